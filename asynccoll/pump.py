"""What every driver does alike: flush dirty peers, hand out events, keep one timer. Knows a loop, but no sockets.

A driver owns one engine, moves its bytes over some links, and reports what became of them. Two exist: `asynccoll.net.driver`
(TCP sockets) and `asynccoll.sim.driver` (an in-memory network, with a virtual clock if the loop has one).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from types import TracebackType

from asynccoll.engine.engine import Engine, PeerBroken, PeerEvicted
from asynccoll.engine.operation import Operation
from asynccoll.errors import CommunicatorClosed, PeerLost

__all__ = ["Pump"]

_log = logging.getLogger("asynccoll")


class _Inside:
    """A call into the engine: nothing else may call meanwhile, and what it leads to is written and told at its end."""

    __slots__ = ("_pump",)

    def __init__(self, pump: Pump) -> None:
        self._pump = pump

    def __enter__(self) -> None:
        pump = self._pump
        if pump.busy:
            raise RuntimeError(
                "an asynccoll operation was started from inside a reduce function or while a value was being pickled; do it after "
                "the operation"
            )
        pump.busy = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pump = self._pump
        pump.busy = False
        try:
            if isinstance(
                error, KeyboardInterrupt | SystemExit
            ):  # of a signal handler: it may have come at any moment
                pump.fail(error)
        finally:
            pump.flush()


class Pump(ABC):
    """Base of the drivers. All calls come from the thread of ``loop``."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.loop = loop
        self.bytes_sent = 0
        """Bytes handed to the links since the start, headers included."""
        self.bytes_received = 0
        self.closed = False
        """`close` was called: no operation is accepted."""
        self.busy = False
        """The engine is running: a reduce function that starts an operation would re-enter it."""
        self._flushing = False
        """Something is being written, or told: what a signal handler does meanwhile has to wait."""
        self._inside = _Inside(self)
        self._cancelled: list[Operation] = []
        """Cancelled from inside of a call: by a signal handler (asyncio cancels the main task there), or by a reduce function."""
        self._told: set[object] = set()
        """Causes of failure that have been logged."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._turn: asyncio.Handle | None = None
        """The call of `_resume` that is to come, while the engine has something paused."""

    # -- for the communicator -----------------------------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """Number ``op`` and start it."""
        with self._inside:
            self.engine.submit(op, self.loop.time())

    def refuse(self, op: Operation, error: Exception) -> None:
        """Number ``op`` and end it with ``error`` here, as `RemoteError` elsewhere."""
        with self._inside:
            self.engine.refuse(op, error, self.loop.time())

    def cancel(self, op: Operation) -> None:
        """End ``op`` everywhere. Its memory is free when this returns, or when the call ends in the middle of which this comes."""
        if self.busy or self._flushing:
            self._cancelled.append(op)
            return
        with self._inside:
            self.engine.cancel(op, self.loop.time())

    def post(self, op: Operation) -> None:
        """Start ``op``, a send or a receive of a message."""
        with self._inside:
            self.engine.message(op, self.loop.time())

    def make(self, comm: int, members: tuple[int, ...], name: str) -> None:
        """Make one communicator known to the engine. ``members``: group rank -> world rank."""
        with self._inside:
            self.engine.add_group(comm, members, name)

    def leave(self, comm: int, cause: str) -> None:
        """Leave one communicator: end what is pending on it, tell its members."""
        with self._inside:
            self.engine.leave_group(comm, cause, self.loop.time())

    @abstractmethod
    async def close(self, cause: str) -> None:
        """End what is pending, say goodbye, and free every link, timer and callback. At most about a second."""

    def abandon(self) -> None:
        """The process or the loop ends and nobody has closed: let go of the links, quietly and at once."""
        self.closed = True

    # -- for the drivers ----------------------------------------------------------------------------------

    @abstractmethod
    def write(self, peer: int) -> None:
        """Write to ``peer`` what the engine has for it, as far as the link takes it."""

    @abstractmethod
    def drop(self, peer: int) -> None:
        """Close the link to ``peer``: the engine does not want it any more."""

    def evict(self, peer: int) -> None:
        """The ranks agree that ``peer`` is dead: tell it, should it live, and close the link."""
        self.drop(peer)

    def flush(self) -> None:
        """Write what has become due, then tell what has ended. Called after every call into the engine."""
        engine = self.engine
        nested, self._flushing = self._flushing, True
        try:
            self._write_all()
            if engine.events:
                for event in engine.take_events():
                    if isinstance(event, PeerBroken):
                        self.drop(event.peer)
                    elif isinstance(event, PeerEvicted):
                        self.evict(event.peer)
                        self.write(event.peer)  # what the link did not take goes nowhere, and is let go of
                    else:
                        if event.error is not None:
                            self._tell(event.error)
                        event.on_end(event)
        finally:
            self._flushing = nested
        while self._cancelled and not nested:
            self.cancel(self._cancelled.pop(0))
        if engine.paused and self._turn is None:
            self._turn = self.loop.call_soon(self._resume)
        deadline = engine.next_deadline
        if deadline is not None and (self._timer is None or deadline < self._timer_at):
            self._arm(deadline)

    def _write_all(self) -> None:
        dirty = self.engine.dirty
        while dirty:
            peers = tuple(dirty)
            dirty.clear()
            for peer in peers:
                try:
                    self.write(peer)
                except BaseException as error:
                    self.fail(error)
                    raise

    def fail(self, error: BaseException) -> None:
        """``error`` came out of the engine in a callback, where nobody awaits it. Re-raise it, for the loop to report."""
        self.engine.failed(error, self.loop.time())
        if self.engine.events:  # not here: this may be in the middle of a flush
            self.loop.call_soon(self.flush)

    def _tell(self, error: BaseException) -> None:
        """Log a loss once: it fails many operations, whose works do not complain one by one when nobody awaits them."""
        if isinstance(error, PeerLost):
            cause: object = error.peers
        elif isinstance(error, CommunicatorClosed) and error.origin != error.rank:
            cause = error.origin
        else:
            return
        if cause not in self._told:
            self._told.add(cause)
            _log.warning("%s", error)

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self.loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        try:
            self.engine.handle_timer(self.loop.time())
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.flush()

    def _resume(self) -> None:
        self._turn = None
        self.busy = True
        try:
            self.engine.resume(self.loop.time())
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.busy = False
            self.flush()

    def stop_timer(self) -> None:
        """Cancel the timer, and the turn of what is paused, for good."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
