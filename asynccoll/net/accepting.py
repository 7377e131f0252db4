"""Listens, lets callers prove themselves, hands over those that did. Knows strangers, not ranks' affairs.

Whatever a stranger sends or withholds, he costs one socket and at most `asynccoll.net.handshake.LIMIT` bytes
for at most `HANDSHAKE_TIMEOUT`; when too many wait at once, the one that has waited longest goes. (Refusing
the newest instead would let silent strangers shut the ranks out.) While he is silent there is no task for him,
so that many of them do not delay the ranks, not even by being shown out when the mesh is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from asynccoll.errors import AuthenticationError, ProtocolError, RendezvousError
from asynccoll.net import handshake
from asynccoll.net.handshake import Answer, Hello
from asynccoll.net.scope import TaskScope
from asynccoll.net.sockets import (
    Endpoint,
    Layered,
    channel_of,
    format_address,
    prepare,
    reason,
    receive_exactly,
    send_all,
)

if TYPE_CHECKING:
    from asynccoll.net.tls import Tls

__all__ = ["HANDSHAKE_TIMEOUT", "Acceptor", "Strangers", "backlog", "listen", "shake"]

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for one handshake: two round trips, and a peer whose loop may be busy importing."""

HALF_OPEN = 128
"""Connections that may be half-way through a handshake at once, beyond one for each rank."""

_ACCEPTS_PER_WAKE = 64
"""So that a flood of callers does not hold the loop; the rest comes at the next wake."""

_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RESOURCE_PAUSE = 0.1
"""Seconds without accepting when descriptors or memory have run out: the listener stays readable, and would
spin.
"""

_LOG_INTERVAL = 10.0
"""Seconds between two log lines about strangers."""

_HELLO_READ = 1 << 14
"""Bytes of a TLS hello that are read to be forgotten: it has hundreds, and a record no more than this."""

_OF_RANKS = (handshake.Refused, handshake.VersionMismatch, handshake.TlsMismatch, AuthenticationError)
"""What only a rank that is set up wrongly runs into, as a rule: told in preference to the noise of strangers."""

_TOO_SLOW = "no handshake within {:g} s"

_log = logging.getLogger("asynccoll")


def backlog(size: int) -> int:
    """Queue length to ask the kernel for: every rank may call twice at once. The kernel caps it
    (somaxconn).
    """
    return min(4096, max(128, 2 * size))


def listen(endpoint: Endpoint, size: int, *, reuse: bool, both: bool = False) -> socket.socket:
    """A listening socket at ``endpoint`` for a mesh of ``size`` ranks. OSError where that is not to be had.

    ``reuse``: take a port over whose last connections are in TIME_WAIT (never one that is listened on). Not
    for port 0, where it would let the kernel choose a port that others hold. ``both``: at ``::``, take callers
    over IPv4 too.
    """
    family, address = endpoint
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # On Windows the option means something else: two processes on one port.
        if reuse and os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.bind(address)
        sock.listen(backlog(size))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def shake(
    sock: socket.socket, machine: handshake.Machine, due: float | None = None
) -> tuple[Hello, Answer]:
    """Run one side of a handshake over ``sock``, which stays the caller's: first that of TLS, if there is one.

    TimeoutError at ``due`` (loop time; None: after `HANDSHAKE_TIMEOUT`); otherwise what ``machine`` raises, or
    OSError from the socket.
    """
    if due is None:
        due = asyncio.get_running_loop().time() + HANDSHAKE_TIMEOUT
    async with asyncio.timeout_at(due):
        if isinstance(sock, Layered):
            await sock.handshake()
        step = next(machine)
        while True:
            if isinstance(step, int):
                data = await receive_exactly(sock, step)
            else:
                await send_all(sock, step)
                data = b""
            try:
                step = machine.send(data)
            except StopIteration as end:
                result: tuple[Hello, Answer] = end.value
                if isinstance(sock, Layered):
                    sock.proved()
                return result


class Strangers:
    """Counts connections that were dropped; says so in the log, but not for each."""

    def __init__(self, where: str) -> None:
        # Who speaks, for the log: "rank 0 at 127.0.0.1:29500".
        self._where = where
        # Dropped so far, and of these the ones no log line has told of.
        self.count = 0
        self._untold = 0
        # Loop time from which the next line may be written.
        self._quiet_until = float("-inf")
        # The last one that claimed to be a rank, else the last one, for error messages.
        self.last = ""
        self._last_was_rank = False

    def dropped(self, peer: str, why: str, *, claims_rank: bool = False) -> None:
        """A connection from ``peer`` was closed because of ``why``."""
        self.count += 1
        self._untold += 1
        if claims_rank or not self._last_was_rank:
            self.last = f"{peer}: {why}"
            self._last_was_rank = claims_rank
        if self._may_log():
            more = f" ({self._untold} since the last such line)" if self._untold > 1 else ""
            _log.warning("%s dropped a connection from %s: %s%s", self._where, peer, why, more)
            self._untold = 0

    def starved(self, error: OSError) -> None:
        """The process cannot accept for now, for example because it has no descriptors left."""
        if self._may_log():
            _log.warning("%s cannot accept connections for now: %s", self._where, reason(error))

    def _may_log(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + _LOG_INTERVAL
        return True

    def note(self) -> str:
        """A sentence for an error message, empty where nobody was dropped."""
        if not self.count:
            return ""
        plural = "1 connection was" if self.count == 1 else f"{self.count} connections were"
        return f" {plural} dropped meanwhile, for example from {self.last}."


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection that was accepted, and has not got through its handshake."""

    sock: socket.socket
    """What to talk over; with TLS, the layer over it from the caller's first bytes on."""
    peer: str
    """``host:port`` of its other end. From the accept: a socket that has been reset tells no longer."""
    due: float
    """Loop time at which it has to be through."""


class Acceptor:
    """Accepts on one listener from `start` to `stop`.

    ``judge`` decides on each HELLO whose sender has proved itself; ``arrived`` then takes the socket over.
    Both are called in the loop, without an await between them. The listener stays the caller's.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        size: int,
        judge: Callable[[Hello], Answer],
        arrived: Callable[[Hello, socket.socket], None],
        strangers: Strangers,
        *,
        on_error: Callable[[BaseException], None],
        tls: Tls | None = None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        # With what every connection begins, or None.
        self._tls = tls
        self._judge = judge
        self._arrived = arrived
        self._strangers = strangers
        # Who has not got through yet, oldest first: in here until `arrived` has the socket or it is closed. With
        # the task of the handshake; None for who has not said a word: the loop watches the descriptor then.
        self._half_open: dict[_Caller, asyncio.Task[None] | None] = {}
        self._limit = HALF_OPEN + size
        self._scope = TaskScope(on_error)
        # The pending end of a pause in accepting, if any.
        self._resume: asyncio.TimerHandle | None = None
        # When to look next for those who have been silent for too long; None if nobody needs it.
        self._lapse: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to accept. ``add_reader`` rather than ``sock_accept``, whose cancellation can lose an
        accepted socket.
        """
        self._resume = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """Stop accepting and drop everybody who has not got through."""
        if self._resume is not None:
            self._resume.cancel()
        if self._lapse is not None:
            self._lapse.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        for caller in [caller for caller, task in self._half_open.items() if task is None]:
            self._hang_up(caller)
        await self._scope.stop()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_WAKE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause(error)
                    return
                continue  # the caller was gone before we came (ECONNABORTED and the like)
            self._greet(sock, address)

    def _pause(self, error: OSError) -> None:
        """Nothing left to accept with: let the oldest go and come back in a moment."""
        self._strangers.starved(error)
        self._drop_oldest()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._resume = loop.call_later(_RESOURCE_PAUSE, self.start)

    def _drop_oldest(self) -> None:
        for caller, task in self._half_open.items():
            if task is None or not task.cancelling():
                self._strangers.dropped(caller.peer, "too many unfinished handshakes, and it had the oldest")
                if task is None:
                    self._hang_up(caller)
                else:
                    task.cancel()
                return

    def _greet(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        """Wait for the first bytes of a caller. No task yet: it takes a hundred microseconds to start and cancel."""
        try:
            prepare(sock)
        except OSError:
            sock.close()  # reset before we looked
            return
        loop = asyncio.get_running_loop()
        caller = _Caller(sock, format_address(*address[:2]), loop.time() + HANDSHAKE_TIMEOUT)
        self._half_open[caller] = None
        loop.add_reader(sock.fileno(), self._begin, caller)
        if self._lapse is None:
            self._lapse = loop.call_at(caller.due, self._drop_silent)
        if len(self._half_open) > self._limit:
            self._drop_oldest()

    def _hang_up(self, caller: _Caller) -> None:
        """Let go of a caller who has not said a word."""
        asyncio.get_running_loop().remove_reader(caller.sock.fileno())
        del self._half_open[caller]
        caller.sock.close()

    def _drop_silent(self) -> None:
        """Let those go whose time is up without a word. Handshakes that have begun look to their own time."""
        loop = asyncio.get_running_loop()
        self._lapse = None
        for caller in [caller for caller, task in self._half_open.items() if task is None]:
            if caller.due > loop.time():
                self._lapse = loop.call_at(caller.due, self._drop_silent)
                return
            self._strangers.dropped(caller.peer, _TOO_SLOW.format(HANDSHAKE_TIMEOUT))
            self._hang_up(caller)

    def _begin(self, caller: _Caller) -> None:
        """The caller has said something, or is gone."""
        asyncio.get_running_loop().remove_reader(caller.sock.fileno())
        try:
            if self._tls is not None:
                caller.sock = self._tls.accepted(caller.sock)
        except OSError as error:
            self._strangers.dropped(caller.peer, reason(error))
            del self._half_open[caller]
            caller.sock.close()
            return
        task = self._half_open[caller] = self._scope.start(self._shake(caller))
        task.add_done_callback(partial(self._ended, caller))

    def _ended(self, caller: _Caller, _: asyncio.Task[None]) -> None:
        """Close what was not handed over. Here, because a task cancelled before its first step runs no
        ``finally``.
        """
        if caller in self._half_open:
            del self._half_open[caller]
            caller.sock.close()

    async def _shake(self, caller: _Caller) -> None:
        sock, peer = caller.sock, caller.peer
        machine = handshake.accept(
            self._secret, secrets.token_bytes(handshake.NONCE_BYTES), self._judge, channel_of(sock)
        )
        try:
            hello, _ = await shake(sock, machine, caller.due)
        except TimeoutError:
            self._strangers.dropped(peer, _TOO_SLOW.format(HANDSHAKE_TIMEOUT))
        except handshake.BadProof as error:
            self._strangers.dropped(peer, str(error), claims_rank=True)
        except (RendezvousError, ProtocolError) as error:
            if isinstance(error, handshake.TlsMismatch):
                with contextlib.suppress(
                    OSError
                ):  # unread, the rest of its hello would turn our answer into a reset
                    sock.recv(_HELLO_READ)
            self._strangers.dropped(peer, str(error), claims_rank=isinstance(error, _OF_RANKS))
        except OSError as error:
            self._strangers.dropped(peer, reason(error))
        else:
            del self._half_open[caller]
            self._arrived(hello, sock)
