"""`Stream`: the parts of a result as they become final, in an event loop. Knows a work and its parts, not what is being reduced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from asynccoll.calls import Parts
from asynccoll.work import Work

__all__ = ["Stream"]


class _Bell:
    """Wakes the tasks that wait. Apart from the stream, so that its memory does not wait for the cycle collector."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    def ring(self, _: object = None) -> None:
        """Wake all of them."""
        waiting, self.waiting = self.waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class Stream(AsyncIterator[tuple[int, Any]]):
    """What `allreduce_stream` returns: ``async for offset, view in stream`` gives each element of the result exactly once.

    ``offset`` is the index of the part's first element in C order, ``view`` a flat view of the result's memory, of the kind of
    container that was passed. Parts come as they become final, not by offset. The operation runs from the call on, whether parts
    are taken or not. ``await stream`` gives the whole result.

    What becomes of the operation:

    - Leaving the loop early lets it run to its end.
    - Cancelling the task while it waits for a part cancels it on every rank, and so does `aclose`: where the loop's body may fail
      or be cancelled, use ``async with contextlib.aclosing(stream)``.
    - A failure is raised from the iteration, at once: parts that were not taken yet are dropped. Those that were taken are right.
    """

    def __init__(
        self,
        start: Callable[[Parts], Work[Any]],
        across: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        """``across``: where parts become final in another thread, makes of a call one that may come from there."""
        self._bell = _Bell()
        self._closed = False
        self._parts = Parts(self._bell.ring if across is None else across(self._bell.ring))
        self.work = start(self._parts)
        """The operation; its result is the whole array (or ``out``)."""
        self.work.add_done_callback(self._bell.ring)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.work.__await__()

    async def __anext__(self) -> tuple[int, Any]:
        work = self.work
        if self._closed:
            raise StopAsyncIteration
        while True:
            if work.done() and (work.cancelled() or work.exception() is not None):
                work.result()  # raises
            part = self._parts.take()
            if part is not None:
                return part
            if work.done():
                raise StopAsyncIteration
            waiter = work.get_loop().create_future()
            self._bell.waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                work.cancel()
                raise

    async def aclose(self) -> None:
        """Cancel the operation on every rank, unless it is complete; no more parts are given. Twice is silent."""
        self._closed = True
        self.work.cancel()
