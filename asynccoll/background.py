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

__all__ = ["WAIT_SLICE", "LoopThread", "result_of", "settle"]

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


class LoopThread:
    """One event loop (uvloop where it is installed) that runs in its own daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self.pid = os.getpid()
        """The process that owns the thread: a fork has the object, but not the thread."""
        self._stopping = False
        self._at_stop: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _threads.add(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            # A user's reduce function may call sys.exit(): it has failed its operation, and that is all.
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                self.loop.run_forever()

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

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the loop's thread, in the order of these calls."""
        self.loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``coroutine`` in the loop; the future gives its result and cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

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
    running = [thread for thread in threads if thread.alive and not thread.inside()]
    for thread in running:
        thread._stopping = True
        thread.soon(thread.loop.stop)
    for thread in running:
        thread._thread.join(timeout=_JOIN_SECONDS)
    for thread in running:
        _threads.discard(thread)
        if not thread._thread.is_alive():
            for callback in thread._at_stop:
                callback()
            thread.loop.close()
