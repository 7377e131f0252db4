"""A set of tasks that end together. Knows nothing of what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["TaskScope"]


class TaskScope:
    """Holds tasks until `stop`. A task that fails for a reason nobody foresaw is reported, never lost.

    Unlike ``asyncio.TaskGroup`` the owner ends it, not the last task: accept loops and readers go on until
    they are no longer wanted.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        # The tasks that have not ended. Each leaves by itself.
        self._tasks: set[asyncio.Task[None]] = set()
        # Told of every exception that leaves a task, cancellation excepted.
        self._on_error = on_error
        # Set once by `stop`; what starts afterwards is cancelled before it runs.
        self._stopped = False

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` as a task of this scope. It may be cancelled before its first line runs: hand it
        nothing to close.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._stopped:
            task.cancel()
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def stop(self) -> None:
        """Cancel every task and wait until all have ended, also if this call is itself cancelled
        meanwhile.
        """
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await asyncio.wait(tuple(self._tasks))
                # `wait` may return before our callback has taken the tasks out of the set.
                self._tasks = {task for task in self._tasks if not task.done()}
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
