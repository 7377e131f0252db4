"""A simulated process: the tasks of one rank, which can be stopped, continued and killed together. Knows no collectives.

Tasks of several processes share one event loop. Each step of a task of a stopped process is kept until the process goes on, as
SIGSTOP and SIGCONT would; a killed one never takes a step again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

__all__ = ["Process", "of_the_dead", "task_factory"]

T = TypeVar("T")


class Process:
    """The tasks that `spawn` starts, and all that they start in turn (where the loop has `task_factory`)."""

    def __init__(self) -> None:
        self.dead = False
        self.frozen = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """Under way, in the order in which they were made."""
        self._held: list[asyncio.Future[None]] = []
        """Steps that wait for `thaw`."""

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``coroutine`` as a task of this process."""
        context = copy_context()
        context.run(_current.set, self)
        return asyncio.get_running_loop().create_task(coroutine, context=context)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """A task of this process was made."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def freeze(self) -> None:
        """Stop, as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Go on, as SIGCONT does."""
        self.frozen = False
        held, self._held = self._held, []
        for step in held:
            if not step.done():
                step.set_result(None)

    def kill(self) -> None:
        """End every task where it stands. Its ``finally`` blocks run as far as their first await; nothing can catch this."""
        self.dead = True
        for task in list(self._tasks):
            task.cancel()

    def hold(self) -> Generator[Any, Any, None]:
        """One wait for `thaw`."""
        step = asyncio.get_running_loop().create_future()
        self._held.append(step)
        return step.__await__()


_current: ContextVar[Process | None] = ContextVar("process", default=None)


def task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> asyncio.Task[Any]:
    """For `loop.set_task_factory`: a task that a task of a `Process` starts belongs to the same process."""
    context = options.get("context")
    process = _current.get() if context is None else context.get(_current)
    if process is None:
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(_Steps(coroutine, process), loop=loop, **options)
    process.adopt(task)
    return task


def of_the_dead(task: asyncio.Task[Any]) -> bool:
    """``task`` belongs to a process that was killed."""
    steps = task.get_coro()
    return isinstance(steps, _Steps) and steps.process.dead


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine whose steps wait while its process is stopped."""

    def __init__(self, inner: Coroutine[Any, Any, Any] | Generator[Any, None, Any], process: Process) -> None:
        self._inner = inner
        self.process = process
        self._kept: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        """The step that was to be taken while the process was stopped."""

    def send(self, value: Any) -> Any:
        if self._kept is not None and not self.process.frozen:
            (step, arguments), self._kept = self._kept, None
            return self._step(step, *arguments)
        if self._kept is not None:  # stopped again before it could take the step
            return next(self.process.hold())
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        process = self.process
        if process.dead:
            with contextlib.suppress(
                Exception
            ):  # what a dead process would have raised, nobody would have seen
                self._inner.close()
            raise asyncio.CancelledError("the process was killed")
        if process.frozen:
            self._kept = step, arguments
            return next(process.hold())
        self._kept = None
        return step(*arguments)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise RuntimeError("a task's own coroutine is not awaited")
