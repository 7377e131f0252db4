"""An event loop in a daemon thread. Knows threads and loops, not collectives."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from asynccoll.loops import new_loop

__all__ = ["WAIT_SLICE", "LoopThread", "hand_over", "result_of", "settle"]

T = TypeVar("T")

_JOIN_SECONDS: Final = 5.0
"""How long to wait for a loop that was told to stop: it holds no callback for more than milliseconds."""
WAIT_SLICE: Final = 0.25
"""Seconds for which a wait sleeps at most. A signal that comes between Python's last look at its flag and the thread's going to
sleep does not wake it: Ctrl-C would be heard only when the wait is over, and that may be never."""


def settle(future: concurrent.futures.Future[Any], limit: float | None = None) -> None:
    """Wait until ``future`` is done, but so that Ctrl-C is heard. TimeoutError after ``limit`` seconds (None: no end)."""
    deadline = math.inf if limit is None else time.monotonic() + limit
    while True:
        try:
            concurrent.futures.Future.exception(
                future, max(0.0, min(WAIT_SLICE, deadline - time.monotonic()))
            )
            return
        except concurrent.futures.CancelledError:
            return
        except TimeoutError:  # of this slice: what the future holds is not raised
            if time.monotonic() >= deadline and not future.done():
                raise


def result_of(future: concurrent.futures.Future[T], limit: float | None = None) -> T:
    """The result of ``future``, waited for as `settle` does. Raises what the future raises."""
    settle(future, limit)
    return concurrent.futures.Future.result(future)


def hand_over(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call ``function`` in ``loop``, from any thread. If the loop is closed, nobody waits there any more: nothing is done."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class LoopThread:
    """One event loop (uvloop where it is installed) that runs in its own daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self.pid = os.getpid()
        """The process that owns the thread: a fork has the object, but not the thread."""
        self._stopping = False
        self._leaving = False
        self._at_stop: list[Callable[[], object]] = []
        self._at_end: list[Callable[[], object]] = []
        """Called by the thread as the last thing that it does."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _threads.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            # A user's reduce function may call sys.exit(): it has failed its operation, and that is all.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self.loop.run_forever()
        for callback in self._at_end:
            callback()

    @property
    def alive(self) -> bool:
        """The thread runs, in this process."""
        return self.pid == os.getpid() and self._thread.is_alive()

    def inside(self) -> bool:
        """The caller is the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def refuse_inside(self, what: str) -> None:
        """Raise RuntimeError if the caller is the loop's own thread. ``what`` is it about to wait for?"""
        if self.inside():
            raise RuntimeError(
                f"{what} blocks, and would wait for itself here: inside a reduce function, or in a callback of a future. "
                "Do it after the operation; in a callback use the form that ends in _async, and add_done_callback()"
            )

    def at_stop(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once the loop has stopped."""
        self._at_stop.append(callback)

    def forsake(self) -> None:
        """Stop without waiting, from any thread, in the middle of anything: for finalizers. The thread lets go of its own links."""
        if self.alive and not self._leaving:
            self._leaving = True
            self._at_end.append(self._let_go)
            hand_over(self.loop, lambda: self.loop.create_task(self._leave()))

    def _let_go(self) -> None:
        """The loop has stopped for good: free what it held. Once."""
        _threads.discard(self)
        if not self.loop.is_closed():
            for callback in self._at_stop:
                callback()
            self.loop.close()

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the loop's thread, in the order of these calls."""
        self.loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``coroutine`` in the loop; the future gives its result and cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def awaited(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        """Hand ``start()`` over to the loop, now; what is returned is to be awaited in another loop, which keeps turning.

        A cancel goes through to it, and is over when it has ended; a second one does not wait for that.
        """
        here = asyncio.get_running_loop()
        ended = asyncio.Event()
        running: list[asyncio.Task[T]] = []

        def tell(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # a caller who was cancelled will not look at it
            hand_over(here, ended.set)

        def begin() -> None:
            running.append(self.loop.create_task(start()))
            running[0].add_done_callback(tell)

        async def over() -> T:
            try:
                await ended.wait()
            except asyncio.CancelledError:
                hand_over(self.loop, lambda: running[0].cancel())
                await ended.wait()
                raise
            return running.pop().result()

        self.soon(begin)
        return over()

    async def stopped(self) -> None:
        """Cancel what runs in the loop, and `stop`, without holding up the caller's loop. A cancel is raised when it is done."""
        cancelled: asyncio.CancelledError | None = None
        if self.alive and not self._leaving:
            here = asyncio.get_running_loop()
            ended = asyncio.Event()
            self._leaving = True
            self._at_end.append(lambda: hand_over(here, ended.set))
            self.run(self._leave())
            while not ended.is_set():
                try:
                    await ended.wait()
                except asyncio.CancelledError as error:  # raised below: the loop ends within milliseconds
                    cancelled = error
        self.stop()  # has the thread's last steps to wait for, at most
        if cancelled is not None:
            raise cancelled

    def leave(self) -> None:
        """Cancel what runs in the loop, wait until it has ended, and `stop`: for a caller who has given up what it waited for."""
        if self.alive and not self._leaving and not self.inside():
            self._leaving = True
            self.run(self._leave())
            self._thread.join(timeout=_JOIN_SECONDS)
        self.stop()

    async def _leave(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._stopping = True
        self.loop.stop()

    def stop(self) -> None:
        """Stop the loop and wait for the thread. Twice is silent; in a fork it does nothing."""
        _stop([self])


_threads: weakref.WeakSet[LoopThread] = weakref.WeakSet()
"""Threads of this process that have not been stopped."""


@atexit.register
def _stop_all() -> None:
    # A daemon thread that still runs native loop code while the interpreter is torn down may crash it.
    _stop(list(_threads))


def _stop(threads: list[LoopThread]) -> None:
    """Stop all of them before any lets go of its links: else those that still run would take it for a loss."""
    own = [thread for thread in threads if thread.pid == os.getpid() and not thread.inside()]
    left = [thread for thread in own if not thread.loop.is_closed()]
    for thread in left:
        thread._stopping = True
        hand_over(thread.loop, thread.loop.stop)
    for thread in left:
        thread._thread.join(timeout=_JOIN_SECONDS)
    for thread in left:
        _threads.discard(thread)
        if not thread._thread.is_alive():
            thread._let_go()
