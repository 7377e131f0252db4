"""An event loop in a daemon thread. Knows threads and loops, not collectives."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """One event loop (uvloop where it is installed) that runs in its own daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        self.pid = os.getpid()
        """The process that owns the thread: a fork has the object, but not the thread."""
        self._stopping = False
        self._at_stop: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # A daemon thread that still runs native loop code while the interpreter is torn down may crash it.
        atexit.register(self.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._stopping:
                # A user's reduce function may call sys.exit(): it has failed its operation, and that is all.
                with contextlib.suppress(KeyboardInterrupt, SystemExit):
                    self.loop.run_forever()
            for callback in self._at_stop:
                callback()
        finally:
            self.loop.close()

    @property
    def alive(self) -> bool:
        """The thread runs, in this process."""
        return self.pid == os.getpid() and self._thread.is_alive()

    def inside(self) -> bool:
        """The caller is the loop's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    def at_stop(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in the loop's thread once the loop has stopped."""
        self._at_stop.append(callback)

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the loop's thread, in the order of these calls."""
        self.loop.call_soon_threadsafe(function)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run ``coroutine`` in the loop; the future gives its result and cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        """Stop the loop and wait for the thread. Twice is silent; in a fork it does nothing."""
        atexit.unregister(self.stop)
        if self.alive and not self.inside():
            self._stopping = True
            self.soon(self.loop.stop)
            self._thread.join(timeout=5.0)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
