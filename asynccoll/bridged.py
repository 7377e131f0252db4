"""A communicator whose loop runs in a thread of its own, awaited in any other loop. Knows how calls get there and their ends back.

A call is prepared where it is made. Its number it gets in the mesh's thread, in the order in which the calls were handed over; its
end is handed back to the loop of the caller. See `asynccoll.threaded` for callers without a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, Final, NamedTuple, Self, TypeVar

from asynccoll.background import LoopThread, hand_over, result_of
from asynccoll.calls import Parts
from asynccoll.communicator import Communicator
from asynccoll.engine.group import MAX_PENDING
from asynccoll.engine.operation import Operation
from asynccoll.groups import Lineage
from asynccoll.pending import ABORT_SECONDS, for_the_caller
from asynccoll.streams import Stream
from asynccoll.threaded import Threaded
from asynccoll.work import Work

__all__ = ["Bridged", "BridgedWork", "bridged"]

T = TypeVar("T")


class _Fate(NamedTuple):
    """How a work ends."""

    error: BaseException | None
    result: Any


_CANCELLED: Final = _Fate(None, "cancelled")
_TOLD: Final = _Fate(None, "told")
"""The future has it: the work need not hold it any more."""


class _Parcel:
    """A work on its way to its loop. Empty once it is there: the thread that sent it is still holding the parcel for a moment, and
    must not hold the result with it.
    """

    def __init__(self, work: BridgedWork[Any]) -> None:
        self._works = [work]

    def __call__(self) -> None:
        self._works.pop()._tell()


class BridgedWork(Work[T]):
    """A `Work` of the caller's loop, whose operation runs in the mesh's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread: LoopThread, over: Callable[[object], None]
    ) -> None:
        super().__init__(loop=loop)
        self._thread = thread
        self._over = over
        """Called with this work in the mesh's thread when the operation has ended. Keeps the communicator until then."""
        self._fate: dict[None, _Fate] = {}
        """Who sets the default first, the end of the operation in one thread or a cancel in the other, has decided. No lock: a
        cancel may come from a signal handler, in the middle of another."""

    def begin(self, start: Callable[[], None]) -> None:
        """In the mesh's thread: start the operation, even if it was cancelled meanwhile, since it has its place in the order."""
        try:
            start()
        except BaseException as error:  # noqa: BLE001 (raised from the work: sys.exit() in a reduce function, too)
            self._op = None
            self._end(_Fate(error, None))

    def ended(self, op: Operation) -> None:
        """The pump's call, in the mesh's thread."""
        if self._op is None:
            return
        self._op = None
        self._end(_Fate(op.error, op.result))

    def _end(self, fate: _Fate) -> None:
        self._over(self)
        if self._fate.setdefault(None, fate) is fate:
            # Not from here: the driver still refers to the operation, and so to the caller's memory.
            self._thread.loop.call_soon(hand_over, self.get_loop(), _Parcel(self))

    def _tell(self) -> None:
        """In the caller's loop: what has become of the operation."""
        fate = self._fate[None]
        if not self.done():
            self._fate[None] = _TOLD
            self._settle(None if fate.error is None else for_the_caller(fate.error), fate.result)

    def cancel(self, msg: Any | None = None) -> bool:
        """See `Work.cancel`. It waits for the mesh's thread, which takes milliseconds at most, or the rest of a reduce function."""
        if self.done():
            return False
        if self._fate.setdefault(None, _CANCELLED) is not _CANCELLED:
            self._tell()  # it is complete, and the loop has not come to it yet
            return False
        try:
            self._recall()
        finally:
            asyncio.Future.cancel(self, msg)
        return True

    def _recall(self) -> None:
        aborted = threading.Event()

        def abort() -> None:
            self._abort()
            aborted.set()  # only now: nothing refers to the operation any more

        with contextlib.suppress(RuntimeError):  # the loop is closed, and so the operation has ended
            self._thread.soon(abort)
            if not self._thread.inside():
                aborted.wait(ABORT_SECONDS)

    def _abort(self) -> None:
        op, self._op = self._op, None
        if op is not None:
            self._pump.cancel(op)
            self._over(self)


class _Gate:
    """What all communicators of one mesh share: calls pass one after the other, and none once the mesh begins to close.

    Works under way keep it, through their communicators. When the last of these is gone, nobody can close the mesh any more.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Not a plain one: a signal handler may make a call in the middle of a call. The mesh's thread never takes it: that handler
        may wait for that thread."""
        self.closed = False


class Bridged(Threaded):
    """What ``init(progress="thread")`` gives: a `Communicator` for any running event loop, in any thread.

    Each `Work` belongs to the loop that called. Operations are numbered in the order of the calls, whatever loop they come from.
    `new_group`, `pending` and `stats` ask the mesh's thread, and wait for its answer: milliseconds at most, unless a reduce
    function takes longer.
    """

    def __init__(self, communicator: Communicator, thread: LoopThread, gate: _Gate | None = None) -> None:
        super().__init__(communicator, thread)
        self._gate = _Gate() if gate is None else gate

    @property
    def closed(self) -> bool:
        """`close` has been called, here or on the communicator that `init` or `connect` opened."""
        return self._gate.closed or super().closed

    def pending(self) -> list[str]:
        """Operations under way on this rank: see `Communicator.pending`."""
        return self._ask(super().pending)

    def stats(self) -> dict[str, int]:
        """Counts since the start: see `Communicator.stats`."""
        return self._ask(super().stats)

    def new_group(self, ranks: Iterable[int], name: str | None = None) -> Self | None:
        """A communicator of some of this one's ranks: see `Communicator.new_group`. No communication."""
        self._enter("new_group()")
        given = list(ranks)
        return self._ask(lambda: Communicator.new_group(self, given, name))

    async def shrink(self, *, timeout: float | timedelta | None = None, name: str | None = None) -> Self:
        """A communicator of the ranks that are left: see `Communicator.shrink`. Every survivor calls."""
        self._enter("shrink()")
        with self._gate.lock:
            self._passable()
            shrinking = self._thread.awaited(lambda: Communicator.shrink(self, timeout=timeout, name=name))
        return await shrinking

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the mesh's thread, after all that was handed over before."""

        async def answer() -> T:
            return question()

        if self._thread.inside():
            return question()
        with self._gate.lock:
            asked = None if self._over_for_good else self._thread.run(answer())
        return question() if asked is None else result_of(asked)

    @property
    def _over_for_good(self) -> bool:
        """Nothing is handed over to the mesh's thread any more. Ask with the gate's lock."""
        return self._gate.closed or not self._thread.alive

    # -- calls --------------------------------------------------------------------------------------------

    def _call(self, *call: Any) -> Work[Any]:
        loop = self._enter("an operation")
        self._usable()
        prepared = self._prepared(*call)
        work: BridgedWork[Any] = BridgedWork(loop, self._thread, self._one_over)
        with self._gate.lock:
            self._passable()  # the value was pickled meanwhile, which may run any code
            self._under_way.add(work)
            self._thread.soon(lambda: work.begin(lambda: self._begin(work, prepared)))
        return work

    def _begin(self, work: Work[Any], op: Operation) -> None:
        if super().closed:  # and not merely about to close, with this call before it
            self._open()
        super()._begin(work, op)

    def _one_over(self, work: object) -> None:
        self._under_way.discard(work)

    def _passable(self) -> None:
        """Raise if nothing may be handed over to the mesh's thread any more. With the gate's lock."""
        if self._over_for_good:
            self._gate.closed = True
        self._open()

    def _stream(self, start: Callable[[Parts], Any]) -> Stream:
        loop = self._enter("an operation")

        def across(ring: Callable[[], None]) -> Callable[[], None]:
            ringing = [False]

            def ring_here() -> None:
                ringing[0] = False  # before: what becomes final from now on rings again
                ring()

            def ring_from_there() -> None:
                if not ringing[0]:
                    ringing[0] = True
                    hand_over(loop, ring_here)

            return ring_from_there

        return Stream(start, across)

    def _sub(self, comm: int, name: str, lineage: Lineage | None = None) -> Self:
        return type(self)(
            Communicator(self._pump, name, self._options, comm, lineage), self._thread, self._gate
        )

    def _skip(self, refused: Operation) -> None:
        def skip() -> None:
            if not self.closed:
                Communicator._skip(self, refused)

        with self._gate.lock:
            if not self._over_for_good:
                self._thread.soon(skip)

    def _enter(self, what: str) -> asyncio.AbstractEventLoop:
        """The running loop. Raises where a call may not come from."""
        if self._pid == os.getpid() and self._thread.inside():
            raise RuntimeError(
                f"{what} of communicator {self._name!r} was started from inside a reduce function or while a value was being "
                "unpickled, in the mesh's own thread; do it after the operation"
            )
        self._open()
        self._here()
        return asyncio.get_running_loop()

    def _usable(self) -> None:
        Communicator._usable(self)
        if len(self._under_way) >= MAX_PENDING:
            raise RuntimeError(
                f"{MAX_PENDING} operations of communicator {self._name!r} are under way, which is the most; await some first"
            )

    def _here(self) -> None:
        """Raise if this is not the process that opened the communicator, or if no loop is running here."""
        if self._pid != os.getpid():
            super()._here()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                f"communicator {self._name!r} was called without a running event loop; call from a coroutine, or use "
                "asynccoll.sync, whose calls block"
            ) from None

    # -- end ----------------------------------------------------------------------------------------------

    async def _close(self, cause: str) -> None:
        if self._pid != os.getpid():
            await super()._close(cause)
            return
        if self._thread.inside():
            raise RuntimeError(
                f"close() of communicator {self._name!r} came from its own thread, which it would end; do it after the operation"
            )
        with self._gate.lock:  # once each, though several loops may close
            callbacks, self._on_close = self._on_close, []
        for callback in callbacks:  # here, and not in the mesh's thread
            callback()
        with self._gate.lock:
            if self._over_for_good or (self._comm and self.closed):
                return  # the mesh's thread is ended even where the mesh has closed by itself
            self._gate.closed = not self._comm
            leaving = self._thread.awaited(lambda: Communicator._close(self, cause))
        try:
            await leaving
        finally:
            if not self._comm:
                await self._thread.stopped()


async def bridged(opener: Callable[[], Awaitable[Communicator]]) -> Bridged:
    """The communicator that ``opener()`` gives when it is awaited in a new thread's loop, for callers in other loops.

    Whatever ends the opening, a cancel too, no thread is left behind.
    """
    thread = LoopThread("asynccoll")

    async def opened() -> Communicator:
        communicator = await opener()
        thread.at_stop(communicator._pump.abandon)
        return communicator

    try:
        made = Bridged(await thread.awaited(opened), thread)
        weakref.finalize(made._gate, thread.forsake).atexit = False
        return made
    except BaseException:  # re-raised
        await thread.stopped()
        raise
