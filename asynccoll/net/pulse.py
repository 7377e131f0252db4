"""Heartbeats: tells a peer that has stopped, or that cannot be reached, from one that is busy. Knows bytes, not what a loss ends.

Each pair of ranks has a second connection for this. One daemon thread per process serves all of them, so heartbeats go on while
the event loop computes, and they never wait behind bulk data. What it cannot see through is a call that holds the GIL: then the
thread does not run either, and the peers hear nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["Watch"]

_BEAT: Final = b"."
"""I am here."""
_BYE: Final = b"b"
"""I am closing: expect nothing more."""
_EVICTED: Final = b"e"
"""You are out: the others have agreed that you are dead."""
_BEATS: Final = 6
"""Heartbeats in a liveness timeout: a few may be late on a loaded machine."""
_LONGEST: Final = 5.0
"""Seconds between two heartbeats at most."""
_PIECES: Final = 16
"""Reads of one connection in a turn of the thread."""
_JOIN_SECONDS: Final = 5.0
"""How long to wait for the thread to end: it sleeps in a select that was just woken."""


class Watch:
    """The heartbeats of one mesh, from the moment it is made until `end`. Takes the sockets over."""

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        timeout: float,
        on_silent: Callable[[int, float], object],
        on_evicted: Callable[[int], object],
    ) -> None:
        """``on_silent(peer, seconds)`` and ``on_evicted(by)`` are called from the thread, each once per peer.

        Args:
            sockets: peer -> connected non-blocking socket of its own.
            timeout: seconds without a heartbeat after which a peer counts as silent.
        """
        self.timeout = timeout
        self.interval = min(timeout / _BEATS, _LONGEST)
        """Seconds between two heartbeats."""
        self.sockets = dict(sockets)
        """Peer -> socket, until `end`."""
        self.on_silent, self.on_evicted = on_silent, on_evicted
        now = time.monotonic()
        self.heard = dict.fromkeys(sockets, now)
        """Peer -> when it was last heard; only peers from which heartbeats are due."""
        self.evicted_by: set[int] = set()
        """Peers that have given this rank up."""
        self.next_beat = now
        """When to send heartbeats next."""
        _thread.add(self)

    def has_evicted(self, peer: int) -> bool:
        """Whether ``peer`` has said that this rank is out. Looks at what has come and is not read yet."""
        with _thread.lock:
            if peer in self.sockets and peer in self.heard:
                self.read(peer)
            return peer in self.evicted_by

    def evict(self, peer: int) -> None:
        """Tell ``peer`` that it is out, should it live."""
        with _thread.lock:
            self.heard.pop(peer, None)
            self._say(peer, _EVICTED)

    def leave(self) -> None:
        """Say that nothing more will come, and watch nobody any more. Twice is silent.

        Who does so before it ends its data links finds here, when the others have ended theirs, all that they will ever say: so
        neither side closes a connection on which something is to come, and none ends by a reset.
        """
        with _thread.lock:
            for peer in self.heard:
                self._say(peer, _BYE)
            self.heard.clear()
            for sock in self.sockets.values():
                with contextlib.suppress(OSError):  # it has ended
                    sock.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """`leave`, and close the sockets. Twice is silent. The last one ends the thread."""
        self.leave()
        _thread.remove(self)

    # -- called by the thread, which holds the lock --------------------------------------------------------

    def read(self, peer: int) -> bool:
        """Take what has come from ``peer``. True at the end of the stream, which is no verdict: the data link tells why."""
        said, ended = _read_some(self.sockets[peer])
        if said and peer in self.heard:
            self.heard[peer] = time.monotonic()
        if _EVICTED in said and peer not in self.evicted_by:
            self.evicted_by.add(peer)
            self.on_evicted(peer)
        if _BYE in said or _EVICTED in said:
            self.heard.pop(peer, None)
        return ended

    def beat(self, now: float) -> None:
        """Send a heartbeat to everybody from whom one is due."""
        self.next_beat = now + self.interval
        for peer in self.heard:
            self._say(peer, _BEAT)

    def restart(self, now: float) -> None:
        """This process has not run for long: what the peers did meanwhile it cannot know."""
        self.heard = dict.fromkeys(self.heard, now)

    def look(self, now: float) -> None:
        """Report who has been silent for too long."""
        for peer, heard in list(self.heard.items()):
            if now - heard >= self.timeout:
                del self.heard[peer]
                self.on_silent(peer, now - heard)

    @property
    def deadline(self) -> float:
        """When the thread has to look here next."""
        return min([self.next_beat, *(heard + self.timeout for heard in self.heard.values())])

    def _say(self, peer: int, word: bytes) -> None:
        with contextlib.suppress(
            OSError
        ):  # full: it has not read for ever so long; gone: the data link tells
            self.sockets[peer].send(word)


def _read_some(sock: socket.socket) -> tuple[bytes, bool]:
    """What has come, as far as a turn goes, and whether the stream is at its end. A peer sends a byte now and then: no flood may
    hold the lock.
    """
    said: list[bytes] = []
    try:
        for _ in range(_PIECES):
            piece = sock.recv(4096)
            if not piece:
                return b"".join(said), True
            said.append(piece)
    except BlockingIOError:
        pass
    except OSError:
        return b"".join(said), True
    return b"".join(said), False


class _Thread:
    """Serves all watches of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by the thread except while it sleeps, and by whoever touches a watch."""
        self._adding = threading.Lock()
        """Held by whoever adds a watch, until the thread runs. Never by what the end of a watch needs."""
        self._watches: set[Watch] = set()
        self._selector: selectors.BaseSelector | None = None
        self._waker: socket.socket | None = None
        """Writing to it wakes the thread."""
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        """Serve ``watch`` from now on."""
        with self._adding:
            with self.lock:
                self._watches.add(watch)  # first: while there is one, nobody ends the thread
                try:
                    made = self._make() if self._thread is None else None
                except OSError:  # no descriptors left: re-raised
                    self._watches.discard(watch)
                    raise
                assert self._selector is not None
                for peer, sock in watch.sockets.items():
                    self._selector.register(sock, selectors.EVENT_READ, (watch, peer))
                self._wake()
            if made is None:
                return
            thread, ends = made
            # Without the lock: a thread that starts may have to collect garbage first, and a driver among it takes the lock.
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads: re-raised
                with self.lock:
                    self._watches.discard(watch)
                    self._thread = None
                    self._selector.close()
                    for end in ends:
                        end.close()
                raise

    def _make(self) -> tuple[threading.Thread, tuple[socket.socket, socket.socket]]:
        """A thread, not started, and the ends of its waker."""
        selector, ends = selectors.DefaultSelector(), socket.socketpair()
        for end in ends:
            end.setblocking(False)
        selector.register(ends[1], selectors.EVENT_READ)
        thread = threading.Thread(
            target=self._run, args=(selector, ends), name="asynccoll-pulse", daemon=True
        )
        self._selector, self._waker, self._thread = selector, ends[0], thread
        return thread, ends

    def remove(self, watch: Watch) -> None:
        """Serve ``watch`` no more and close its sockets. Without another one the thread has ended when this returns."""
        with self.lock:
            if watch not in self._watches:
                return
            self._watches.discard(watch)
            for sock in watch.sockets.values():
                self._unregister(sock)
                _read_some(sock)  # unread bytes would make a reset of the end
                sock.close()
            watch.sockets.clear()
            thread = self._thread if not self._watches else None
            if thread is not None:
                self._thread = None
            self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _unregister(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # its stream has ended before
            assert self._selector is not None
            self._selector.unregister(sock)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is being woken
            assert self._waker is not None
            self._waker.send(b"w")

    def _run(self, selector: selectors.BaseSelector, ends: tuple[socket.socket, socket.socket]) -> None:
        me, wakee = threading.current_thread(), ends[1]
        latest = time.monotonic()
        with self.lock:
            try:
                while self._thread is me:
                    deadline = min(watch.deadline for watch in self._watches)
                    self.lock.release()
                    try:
                        events = selector.select(max(0.0, deadline - time.monotonic()))
                    finally:
                        self.lock.acquire()
                    now = time.monotonic()
                    gap, latest = now - latest, now
                    for key, _ in events:
                        if key.fileobj is wakee:
                            with contextlib.suppress(OSError):
                                wakee.recv(4096)
                        elif key.data[0] in self._watches:
                            watch, peer = key.data
                            if watch.read(peer):
                                selector.unregister(key.fileobj)  # its clock goes on
                    for watch in list(self._watches):
                        if gap > watch.interval + watch.timeout / 2:
                            watch.restart(now)
                        watch.look(now)
                        if now >= watch.next_beat:
                            watch.beat(now)
            finally:
                if self._thread is me:  # a defect: the next mesh gets a thread that runs
                    self._thread = None
                selector.close()
                for end in ends:
                    end.close()

    def forget(self) -> None:
        """In a forked child: it has copies of the sockets, and no thread."""
        self.lock, self._adding = threading.RLock(), threading.Lock()
        for watch in self._watches:
            for sock in watch.sockets.values():
                sock.close()
            watch.sockets.clear()
            watch.heard.clear()
        self._watches.clear()
        if self._thread is not None and self._selector is not None and self._waker is not None:
            self._selector.close()
            self._waker.close()
        self._thread = None


_thread = _Thread()


@atexit.register
def _end_all() -> None:
    for watch in list(_thread._watches):
        watch.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.forget)
