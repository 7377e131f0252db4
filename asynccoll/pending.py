"""`Pending`: what a verb of `asynccoll.sync` returns. Knows the work behind it and the thread in which that runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from asynccoll.background import LoopThread, result_of
from asynccoll.errors import RemoteError
from asynccoll.work import Work

__all__ = ["Pending"]

T = TypeVar("T")

_ABORT_SECONDS: Final = 5.0
"""How long `Pending.cancel` waits for the loop's thread, which holds an operation for milliseconds at most."""


class Pending(concurrent.futures.Future[T]):
    """What ``<verb>_async`` returns: a `concurrent.futures.Future` whose `cancel` aborts the operation on every rank."""

    def __init__(self, thread: LoopThread) -> None:
        super().__init__()
        self._thread = thread
        self._work: Work[T] | None = None
        """The operation, once it has been started in the loop's thread."""
        self._marking = threading.Lock()

    def result(self, timeout: float | None = None) -> T:
        """The result, or what the operation raised. Waits ``timeout`` seconds (None: without an end), then raises TimeoutError."""
        return result_of(self) if timeout is None else super().result(timeout)

    def begin(self, start: Callable[[], Work[T]]) -> None:
        """In the loop's thread: start the operation, even if it was cancelled meanwhile, since it has its place in the order."""
        try:
            work = self._work = start()
        except BaseException as error:  # noqa: BLE001 (raised from the future: sys.exit() in a reduce function, too)
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.set_exception(error)
            return
        work.add_done_callback(self._finish)
        if self.cancelled():
            work.cancel()

    def _finish(self, work: asyncio.Future[T]) -> None:
        self._work = None
        with contextlib.suppress(
            concurrent.futures.InvalidStateError
        ):  # cancelled in the caller's thread at this moment
            if work.cancelled():
                self._mark_cancelled()
            elif (error := work.exception()) is not None:
                self.set_exception(_for_the_caller(error))
            else:
                self.set_result(work.result())

    def cancel(self) -> bool:
        """Abort the operation on every rank. False, and nothing is done, if it is complete. Its memory is free on return."""
        if self.cancelled():
            return True
        if not self._mark_cancelled():
            return False
        if self._thread.inside():
            self._abort()
        else:
            aborted = threading.Event()

            def abort() -> None:
                self._abort()
                aborted.set()

            self._thread.soon(abort)
            aborted.wait(_ABORT_SECONDS)
        return True

    def _mark_cancelled(self) -> bool:
        """Become cancelled, once, and tell `concurrent.futures.wait` and ``as_completed``. False if it is complete."""
        with self._marking:
            if self.cancelled():
                return True
            return super().cancel() and not self.set_running_or_notify_cancel()

    def _abort(self) -> None:
        if self._work is not None:
            self._work.cancel()


def _for_the_caller(error: BaseException) -> BaseException:
    """What the caller gets for the ``error`` of a work.

    Where this rank's own reduce function has called `sys.exit`, that: it is meant for the process, not for the loop's thread.
    """
    if isinstance(error, RemoteError) and error.origin == error.rank:
        original = error.original
        if isinstance(original, SystemExit | KeyboardInterrupt):
            return original
    return error
