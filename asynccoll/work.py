"""`Work`: the awaitable that a verb returns. Knows its operation and its pump, not what is being communicated."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from asynccoll.engine.operation import Operation
from asynccoll.errors import CollectiveCancelled, CommunicatorClosed, PeerLost
from asynccoll.pump import Pump

__all__ = ["Work"]

T = TypeVar("T")


class Work(asyncio.Future[T]):
    """A collective operation under way: a native `asyncio.Future`, bound to the loop of the communicator.

    ``await``, `asyncio.gather`, `asyncio.wait_for`, `asyncio.shield`, `asyncio.timeout` and ``add_done_callback`` work as on any
    future. The operation runs from the call on, awaited or not, and finishes even if the work is not kept.
    """

    def __init__(self, pump: Pump) -> None:
        super().__init__(loop=pump.loop)
        self._pump = pump
        self._op: Operation | None = None
        """The operation while it is under way. Dropped at its end, so that its memory does not wait for the cycle collector."""

    def start(self, op: Operation) -> None:
        """Submit ``op``, whose end this work tells. Called once, by the communicator."""
        self._op = op
        self._pump.submit(op)

    def refuse(self, op: Operation, error: Exception) -> None:
        """Submit ``op`` as one that failed before it began. Called once, by the communicator."""
        self._op = op
        self._pump.refuse(op, error)

    def ended(self, op: Operation) -> None:
        """The pump's call when the operation has ended."""
        if self._op is None or self.done():
            return
        self._op = None
        error = op.error
        if error is None:
            self.set_result(op.result)
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
        try:
            self._pump.cancel(op)
        except RuntimeError:  # called from inside a reduce function: nothing was cancelled
            self._op = op
            raise
        return super().cancel(msg)

    async def wait(self) -> T:
        """The result, as a coroutine: for ``create_task`` and `asyncio.TaskGroup`, which do not take futures."""
        return await self
