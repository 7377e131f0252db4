"""The TCP driver: one non-blocking socket per peer, pumped by the event loop. Knows bytes, not frames.

The driver owns the descriptors (``add_reader``/``add_writer``, ``recv_into``, ``sendmsg``) instead of using transports, so that
bytes land in the caller's memory and that memory can be taken back at once when an operation is aborted.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import os
import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from asynccoll.engine.engine import Engine
from asynccoll.net.pulse import Watch
from asynccoll.net.sockets import Layered, plain_host
from asynccoll.pump import Pump

__all__ = ["NetDriver"]

SLICE: Final = 1 << 20
"""Bytes read from or written to one peer before the loop gets its turn: holds the loop for about a millisecond."""
_GATHERS: Final = hasattr(socket.socket, "sendmsg")
"""The system writes several parts at once. Windows does not."""
LINGER: Final = 1.0
"""Seconds that `NetDriver.close` waits for peers to take the last bytes and to close their side."""
_LAST_READS: Final = 64
"""Reads of one peer at the end of the process: it may go on sending for as long as it likes."""
_UNREACHABLE: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
"""Errors that say only that nothing came back: the peer may be alive behind a broken network."""


class NetDriver(Pump):
    """Drives one engine over connected sockets. Takes the sockets over and closes them."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        sockets: Mapping[int, socket.socket],
        pulses: Mapping[int, socket.socket] | None = None,
        liveness_timeout: float | None = None,
    ) -> None:
        """``pulses``: a second socket for each peer, for heartbeats; ``liveness_timeout`` in seconds goes with them."""
        super().__init__(engine, loop)
        self._sockets = dict(sockets)
        """Peer -> socket, while it is open."""
        self._blocked: set[int] = set()
        """Peers whose socket takes no more at the moment: a writer callback is registered."""
        self._mute: dict[int, str] = {}
        """Peers to which writing failed, and how. That is no verdict: what they sent before is still read, up to the end."""
        self._due: set[int] = set()
        """Peers for which a call of `_again` is to come."""
        self._changed: asyncio.Event | None = None
        """Set while closing, whenever a socket has been drained or closed."""
        self._once = any(kind.__module__.partition(".")[0] == "uvloop" for kind in type(loop).__mro__)
        """The loop tells of an error only once, maybe together with the last data: libuv stops watching a descriptor on which
        there is one. So everything has to be read at that call."""
        self._pid = os.getpid()
        self._watch: Watch | None = None
        """The heartbeats, where there are any."""
        if pulses and liveness_timeout is not None:
            owner = weakref.ref(self)
            self._watch = Watch(
                pulses,
                liveness_timeout,
                lambda peer, seconds: _hand_over(owner, NetDriver._silent, peer, seconds),
                lambda by: _hand_over(owner, NetDriver._evicted, by),
            )
        # Ends the links of a driver that was dropped with its loop; `_end_all` is for the end of the process.
        weakref.finalize(self, _end, engine, self._sockets, self._watch, self._pid).atexit = False
        _open.add(self)
        for peer, sock in self._sockets.items():
            loop.add_reader(sock.fileno(), self._readable, peer, sock)
            if isinstance(sock, Layered):  # with what the handshake left inside it, in either direction
                self._soon(peer, sock)
                self._block(peer, sock)

    def own_addresses(self) -> list[str]:
        """Numeric addresses at which this process's ends of the links are, each once: how its peers reach this host."""
        found = [plain_host(sock.getsockname()[0].partition("%")[0]) for sock in self._sockets.values()]
        return list(dict.fromkeys(found))

    def _readable(self, peer: int, sock: socket.socket) -> None:
        engine = self.engine
        left = SLICE
        reason, silent = "connection closed without goodbye", False
        self.busy = True
        try:
            while left > 0:
                memory = engine.receive_into(peer)
                room = len(memory)
                try:
                    got = sock.recv_into(memory)
                except (BlockingIOError, InterruptedError):
                    break
                except OSError as error:
                    reason = f"connection broken: {error.strerror or error}"
                    self._ended(peer, reason, error.errno in _UNREACHABLE)
                    break
                if not got:
                    self._ended(peer, reason, silent)
                    break
                self.bytes_received += got
                if not engine.received(peer, got, self.loop.time()) or peer not in self._sockets:
                    break
                if got < room:
                    failed = self._failed(peer, sock) if self._once else None
                    if failed is None:
                        break
                    reason, silent = failed  # now what is left is read, to its end
                left -= got
            else:
                if self._once:
                    self._soon(peer, sock)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.busy = False
            if isinstance(sock, Layered) and sock.holds_input:
                self._soon(peer, sock)
            self.flush()

    def _failed(self, peer: int, sock: socket.socket) -> tuple[str, bool] | None:
        """What is wrong with the socket, if anything, and whether that is mere silence. Asking takes the error away, so a later
        read will not raise it.

        Asked only where the loop tells of an error once; another read would tell too, but raises whenever all is well.
        """
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return f"connection broken: {os.strerror(code)}", code in _UNREACHABLE
        return (self._mute[peer], False) if peer in self._mute else None

    def _soon(self, peer: int, sock: socket.socket) -> None:
        """Read on after the loop had its turn, whether or not it tells of more."""
        if peer not in self._due:
            self._due.add(peer)
            self.loop.call_soon(self._again, peer, sock)

    def _again(self, peer: int, sock: socket.socket) -> None:
        """The rest of what was there to read, after the loop had its turn."""
        self._due.discard(peer)
        if self._sockets.get(peer) is sock:
            self._readable(peer, sock)

    def write(self, peer: int) -> None:
        """See `Pump.write`: at most `SLICE` bytes at a time."""
        if peer in self._blocked:
            return
        sock = self._sockets.get(peer)
        engine = self.engine
        left = SLICE
        while parts := engine.data_to_send(peer):
            if sock is None or peer in self._mute:
                engine.sent(peer, sum(map(len, parts)))
                continue
            try:
                sent = sock.sendmsg(parts) if len(parts) > 1 and _GATHERS else sock.send(parts[0])
            except (BlockingIOError, InterruptedError):
                self._block(peer, sock)
                return
            except OSError as error:
                self._mute[peer] = f"connection broken: {error.strerror or error}"
                continue
            self.bytes_sent += sent
            if not engine.sent(peer, sent):
                break
            left -= sent
            if left <= 0:
                self._block(peer, sock)
                return
        if isinstance(sock, Layered) and peer not in self._mute:
            try:
                if not sock.flush():
                    self._block(peer, sock)
            except OSError as error:
                self._mute[peer] = f"connection broken: {error.strerror or error}"

    def _block(self, peer: int, sock: socket.socket) -> None:
        self._blocked.add(peer)
        self.loop.add_writer(sock.fileno(), self._writable, peer, sock)

    def _writable(self, peer: int, sock: socket.socket) -> None:
        self._blocked.discard(peer)
        try:
            self.write(peer)
        except BaseException as error:
            self.fail(error)
            raise
        if peer not in self._blocked:
            self.loop.remove_writer(sock.fileno())
            if self._changed is not None:
                self._changed.set()
        self.flush()

    def _ended(self, peer: int, reason: str, silent: bool = False) -> None:
        """The peer's bytes are at an end: nothing more can come from it."""
        self.drop(peer)
        if self._watch is not None and self._watch.has_evicted(
            peer
        ):  # what was to say so did not fit the link any more
            self.engine.evicted(peer, self.loop.time())
        if self.engine.left(peer):
            reason = "left"
        self.engine.peer_lost(peer, reason, self.loop.time(), silent=silent)

    def _silent(self, peer: int, seconds: float) -> None:
        """Nothing was heard from the peer for so long."""
        reason = f"unresponsive: nothing heard for {seconds:.1f} s; stopped, cut off, or holding the GIL"
        self.engine.silent(peer, reason, self.loop.time())
        self.flush()

    def _evicted(self, by: int) -> None:
        """A peer has said that this rank is out."""
        self.engine.evicted(by, self.loop.time())
        self.flush()

    def evict(self, peer: int) -> None:
        """See `Pump.evict`. The word goes the way of the heartbeats, which is never full."""
        if self._watch is not None and self.engine.rank not in self.engine.losses.out:
            self._watch.evict(peer)
        self.drop(peer)

    def drop(self, peer: int) -> None:
        """See `Pump.drop`."""
        sock = self._sockets.pop(peer, None)
        if sock is None:
            return
        self.loop.remove_reader(sock.fileno())
        if peer in self._blocked:
            self._blocked.discard(peer)
            self.loop.remove_writer(sock.fileno())
        sock.close()
        if self._changed is not None:
            self._changed.set()

    def abandon(self) -> None:
        """See `Pump.abandon`."""
        self.closed = True
        _end(self.engine, self._sockets, self._watch, self._pid)

    async def close(self, cause: str) -> None:
        """See `Pump.close`. Reads to the end before closing, since unread bytes would turn our goodbye into a reset."""
        if self.closed:
            return
        self.closed = True
        self._changed = asyncio.Event()
        if self._watch is not None:
            self._watch.leave()
        try:
            self.engine.close(cause, self.loop.time())
            self.flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    await self._drain()
        finally:
            self.stop_timer()
            for peer in list(self._sockets):
                self.drop(peer)
            if self._watch is not None:
                self._watch.end()

    async def _drain(self) -> None:
        assert self._changed is not None
        open_ended = set(self._sockets)
        while self._sockets:
            for peer in list(open_ended):
                if peer not in self._sockets:
                    open_ended.discard(peer)
                elif peer not in self._blocked:
                    open_ended.discard(peer)
                    with contextlib.suppress(OSError):  # the peer may have closed first
                        self._sockets[peer].shutdown(socket.SHUT_WR)
            self._changed.clear()
            if self._sockets:
                await self._changed.wait()


_open: weakref.WeakSet[NetDriver] = weakref.WeakSet()
"""Drivers of this process."""


def _hand_over(owner: weakref.ref[NetDriver], method: Callable[..., None], *args: Any) -> None:
    """Call a driver's method in its loop, from the thread of the heartbeats. It may be gone, or its loop closed."""
    driver = owner()
    if driver is not None and not driver.closed:
        with contextlib.suppress(RuntimeError):
            driver.loop.call_soon_threadsafe(_if_open, driver, method, *args)


def _if_open(driver: NetDriver, method: Callable[..., None], *args: Any) -> None:
    if not driver.closed:
        method(driver, *args)


def _end(engine: Engine, sockets: dict[int, socket.socket], watch: Watch | None, pid: int) -> None:
    """Say that this process ends, as far as the sockets take it, and close them. A fork only closes its copies."""
    if watch is not None:
        watch.end()
    if sockets and os.getpid() == pid:
        engine.close("the process ended without close()", engine.now, ended=True)
    for peer, sock in list(sockets.items()):
        with contextlib.suppress(OSError):
            while os.getpid() == pid and (parts := engine.data_to_send(peer)):
                engine.sent(peer, sock.sendmsg(parts) if _GATHERS else sock.send(parts[0]))
            for _ in range(_LAST_READS):  # unread bytes would turn the goodbye into a reset
                if not sock.recv(SLICE):
                    break
        sock.close()
    sockets.clear()


@atexit.register
def _end_all() -> None:
    """At the end of the process. A loop that still runs in a thread of its own is ended by that thread's owner."""
    for driver in list(_open):
        if not driver.loop.is_running():
            driver.abandon()


def _forget_all() -> None:
    """In a forked child: close its copies of the sockets, which would hide the parent's death from the peers."""
    for driver in list(_open):
        for sock in driver._sockets.values():
            sock.close()
        driver._sockets.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
