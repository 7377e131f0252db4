"""`Work`: the awaitable that a verb returns. Knows its operation and its pump, not what is being communicated."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from asynccoll.engine.operation import Operation
from asynccoll.errors import CollectiveCancelled, CommunicatorClosed, PeerLost
from asynccoll.pump import Pump

__all__ = ["Work"]

T = TypeVar("T")


class Work(asyncio.Future[T]):
    """A collective operation under way: a native `asyncio.Future`, bound to the loop that made the call.

    ``await``, `asyncio.gather`, `asyncio.wait_for`, `asyncio.shield`, `asyncio.timeout` and ``add_done_callback`` work as on any
    future. The operation runs from the call on, awaited or not, and finishes even if the work is not kept.
    """

    _pump: Pump
    _op: Operation | None = None
    """The operation while it is under way. Dropped at its end, so that its memory does not wait for the cycle collector."""

    def start(self, pump: Pump, op: Operation) -> None:
        """Submit ``op``, whose end this work tells. Called once."""
        self._pump = pump
        self._op = op
        op.on_end = self.ended
        try:
            if op.mail is not None:
                pump.post(op)
            elif op.refused is None:
                pump.submit(op)
            elif op.message:
                op.error = op.refused
                self.ended(op)
            else:
                pump.refuse(op, op.refused)
        except BaseException:  # re-raised
            if self.done():
                self.exception()  # what ended it is raised here, or by the caller's own reduce function
            raise

    def ended(self, op: Operation) -> None:
        """The pump's call when the operation has ended."""
        if self._op is None or self.done():
            return
        self._op = None
        self._settle(op.error, op.result)

    def _settle(self, error: BaseException | None, result: Any) -> None:
        """End with ``error``, or else with ``result``. In the thread of the loop that the work belongs to."""
        if error is None:
            self.set_result(result)
            return
        self.set_exception(error)
        if isinstance(error, PeerLost | CommunicatorClosed | CollectiveCancelled):
            # One cause fails many works at once, and the pump has logged it: no "never retrieved" for each of them.
            self.exception()

    def cancel(self, msg: Any | None = None) -> bool:
        """Abort the operation on every rank; the others raise `CollectiveCancelled`. Its memory is free on return.

        Returns False, and does nothing, if the operation is complete. The mesh stays in step: the next operation works.
        """
        op = self._op
        if self.done() or op is None:
            return False
        self._op = None
        self._pump.cancel(op)
        return super().cancel(msg)

    def wait(self) -> Coroutine[Any, Any, T]:
        """The result, as a coroutine: for ``create_task`` and `asyncio.TaskGroup`, which do not take futures.

        Cancelling the task cancels the operation, also before the task's first step.
        """
        return _Wait(self)


class _Wait(Coroutine[Any, Any, T]):
    """``await work`` as a coroutine that also hears of a cancel before it has begun (an ``async def`` would not)."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._steps: Generator[Any, Any, T] | None = None
        """The await under way, once it has begun."""

    def send(self, value: Any) -> Any:
        if self._steps is None:
            self._steps = self._work.__await__()
            return next(self._steps)
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        if self._steps is None:
            self._steps = self._work.__await__()
            raised = error[0] if len(error) == 1 else error[1]
            if isinstance(raised, asyncio.CancelledError):
                self._work.cancel()
            raise raised
        return self._steps.throw(*error)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()
