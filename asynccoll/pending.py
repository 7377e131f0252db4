"""`Pending` and `SyncStream`: what verbs of `asynccoll.sync` return. Know the work behind them and the thread in which it runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from asynccoll.background import WAIT_SLICE, LoopThread, result_of, settle
from asynccoll.calls import Parts
from asynccoll.errors import RemoteError
from asynccoll.work import Work

__all__ = ["ABORT_SECONDS", "Pending", "SyncStream", "for_the_caller"]

T = TypeVar("T")

ABORT_SECONDS: Final = 5.0
"""How long a cancel waits for the loop's thread, which holds an operation for milliseconds at most."""


class Pending(concurrent.futures.Future[T]):
    """What ``<verb>_async`` returns: a `concurrent.futures.Future` whose `cancel` aborts the operation on every rank."""

    def __init__(self, thread: LoopThread) -> None:
        super().__init__()
        self._thread = thread
        self._work: Work[T] | None = None
        """The operation, once it has been started in the loop's thread."""
        self._marking = threading.RLock()  # a signal handler may cancel in the middle of a cancel

    def result(self, timeout: float | None = None) -> T:
        """The result, or what the operation raised. Waits ``timeout`` seconds (None: without an end), then raises TimeoutError.

        Raises:
            RuntimeError: the operation is under way, and the caller is a reduce function or a callback of a future, without
                whose end it cannot go on.
        """
        self._refuse_inside("result")
        return result_of(self, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, or None; waits as `result` does."""
        self._refuse_inside("exception")
        settle(self, timeout)
        return super().exception()

    def _refuse_inside(self, wait: str) -> None:
        if not self.done():
            self._thread.refuse_inside(f"{wait}() of an operation under way")

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
                self.set_exception(for_the_caller(error))
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
            aborted.wait(ABORT_SECONDS)
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


class SyncStream(Iterator[tuple[int, Any]]):
    """What `asynccoll.sync.allreduce_stream` returns: ``for offset, view in stream``, each element of the result exactly once.

    As `asynccoll.Stream`, but `next` blocks. Ctrl-C while it does cancels the operation on every rank, and so does `close`; leaving
    the loop early lets the operation run to its end. `result` waits for the whole.
    """

    def __init__(self, start: Callable[[Parts], Pending[Any]], thread: LoopThread) -> None:
        self._thread = thread
        self._changed = changed = threading.Condition()

        def wake(_: object = None) -> None:
            with changed:
                changed.notify_all()

        self._parts = Parts(wake)
        self.pending = start(self._parts)
        """The operation, as a future; its result is the whole array (or ``out``)."""
        self.pending.add_done_callback(wake)

    def result(self) -> Any:
        """Wait for the operation and return the whole result. Ctrl-C cancels it on every rank."""
        self._thread.refuse_inside("result() of a stream")
        try:
            return self.pending.result()
        except BaseException:  # re-raised
            self.pending.cancel()  # after Ctrl-C it is still under way; after any other exception this does nothing
            raise

    def __next__(self) -> tuple[int, Any]:
        pending = self.pending
        try:
            with self._changed:
                while True:
                    done = pending.done()
                    if done and (pending.cancelled() or pending.exception() is not None):
                        pending.result()  # raises
                    part = self._parts.take()
                    if part is not None:
                        return part
                    if done:
                        raise StopIteration
                    self._thread.refuse_inside("taking a part of a stream")
                    self._changed.wait(WAIT_SLICE)
        except KeyboardInterrupt:
            pending.cancel()
            raise

    def close(self) -> None:
        """Cancel the operation on every rank, unless it is complete. Twice is silent."""
        self.pending.cancel()


def for_the_caller(error: BaseException) -> BaseException:
    """What the caller gets for the ``error`` of a work.

    Where this rank's own reduce function has called `sys.exit`, that: it is meant for the process, not for the loop's thread.
    """
    if isinstance(error, RemoteError) and error.origin == error.rank:
        original = error.original
        if isinstance(original, SystemExit | KeyboardInterrupt):
            return original
    return error
