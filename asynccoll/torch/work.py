"""`GroupWork`: what a torch process group's call returns. Knows futures of both kinds, not what is being communicated."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from asynccoll.background import settle
from asynccoll.errors import CollectiveError, CollectiveTimeout
from asynccoll.torch.untraced import untraced

__all__ = ["Callbacks", "GroupWork", "Started", "as_torch_error"]


_UNAWAITED: Final = 256
"""Works that are kept for C++, about a kilobyte each. DDP has one per model, from its forward to the first gradient."""


class Part(Protocol):
    """What a work waits for: a `Pending` operation, or another work."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call ``callback`` at the end, or now if that has been."""

    def result(self) -> Any:
        """At the end: the result, or the error raised."""

    def cancel(self) -> bool:
        """End it on every rank."""


class Started(NamedTuple):
    """Operations under way, and what is to be done when all are complete."""

    operations: Sequence[Part]
    value: list[torch.Tensor]
    """What the work's future gives: the tensors that hold the result."""
    finish: Callable[[list[Any]], None] | None = None
    """Called once with the results of ``operations``, in the mesh's thread, before anybody hears of the end. May raise."""
    source: Sequence[int] = ()
    """Of a receive: holds the rank that sent the message, at the end."""


@untraced
class GroupWork(dist.Work):  # type: ignore[misc]  # torch has no types here
    """One call of a process group under way. `wait` raises what the operation raised; it may be called from any thread."""

    def __init__(self, started: Started, callbacks: Callbacks) -> None:
        super().__init__()
        self._operations = started.operations
        self.tensors = started.value
        """Those that hold the result, at the end."""
        self._finish = started.finish
        self._callbacks = callbacks
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._under_way = len(started.operations)
        self._counting = threading.Lock()
        self._future: Any = None
        self._source = started.source
        self._awaited = False
        if not started.operations:
            self._done.set_result(None)
        for operation in started.operations:
            operation.add_done_callback(self._one_less)

    def _one_less(self, _: object) -> None:
        with self._counting:
            self._under_way -= 1
            if self._under_way:
                return
        operations, finish = self._operations, self._finish
        self._finish = None
        try:
            # All have ended, so nothing touches the tensors any more, whatever became of them.
            results = [operation.result() for operation in operations]
            if finish is not None:
                finish(results)
        except concurrent.futures.CancelledError as error:
            self._done.set_exception(error)
        except Exception as error:  # noqa: BLE001 (raised by wait)
            self._done.set_exception(as_torch_error(error))
        except BaseException as error:
            self._done.set_exception(error)
            raise
        else:
            self._done.set_result(None)

    # -- torch's interface ----------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end: True, or whatever the operation raised. Ctrl-C cancels it on every rank.

        Args:
            timeout: how long to wait; 0 or less: for as long as the operation's own limit lets it run. When it is over
                ``torch.distributed.DistBackendError`` is raised, and the operation goes on.
        """
        self._awaited = True
        seconds = timeout.total_seconds()
        try:
            settle(self._done, seconds if seconds > 0 else None)
        except TimeoutError:
            raise dist.DistBackendError(
                f"the operation was not complete within {seconds:g} s of this wait(); it goes on. Wait again, or pass a larger "
                "timeout"
            ) from None
        except (KeyboardInterrupt, SystemExit):
            self.cancel()
            raise
        self._done.result()
        return True

    def __del__(self) -> None:
        # C++ may hold its half of this object alone, as DDP's reducer does in join(), and wait on it later: without this half that
        # would be a wait for ever. So a work that nobody has waited for stays for a while, without the tensors.
        if not self._awaited:
            self.tensors, self._future, self._operations = [], None, ()
            self._callbacks.unawaited.append(self)

    def cancel(self) -> bool:
        """End it on every rank, if it is under way: the others raise `CollectiveCancelled`."""
        return any([operation.cancel() for operation in self._operations])

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` at the end, in the mesh's thread: it must not block."""
        self._done.add_done_callback(callback)

    def synchronize(self) -> None:
        """`wait`: there are no streams to synchronise on a CPU."""
        self.wait()

    def is_completed(self) -> bool:
        """It has ended, well or not."""
        return self._done.done()

    def is_success(self) -> bool:
        """It has ended well."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """What it raised; None while it is under way, and if it ended well."""
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result, once it is there: waits."""
        self.wait()
        return self.tensors

    def source_rank(self) -> int:
        """Of a receive: the rank that sent the message; waits."""
        self.wait()
        return self._source[0] if self._source else -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the list of tensors. An error raises from its ``wait``, and ends ``backward`` of DDP."""
        if self._future is None:
            self._future = self._as_torch_future()
        return self._future

    def _as_torch_future(self) -> Any:
        done, value = self._done, self.tensors
        future: Any = torch.futures.Future()
        if done.done():
            future.set_result(value)
            if done.exception() is None:
                return future
        else:
            # Not in the mesh's thread: a callback may start another operation and wait for it, as PowerSGD's does.
            done.add_done_callback(lambda _: self._callbacks.run(functools.partial(future.set_result, value)))

        def check(_: Any) -> list[torch.Tensor]:
            error = done.exception()
            if error is not None:
                raise error
            return value

        # An exception that is *set* on a future of torch's is a value to C++: wait() returns True, and the reducer of DDP crashes.
        # One that is raised in a callback of `then` is an error.
        return future.then(check)


class Callbacks:
    """Daemon threads that run callbacks which may block; as many as are blocked at once, and one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        """Threads that nothing is meant for yet."""
        self._counting = threading.Lock()
        self.unawaited: collections.deque[GroupWork] = collections.deque(maxlen=_UNAWAITED)
        """The last works that Python has dropped before anybody waited for them."""

    def run(self, job: Callable[[], object]) -> None:
        """Run ``job`` soon, in one of the threads."""
        with self._counting:
            spawn = self._idle == 0
            if spawn:
                self._threads += 1
            else:
                self._idle -= 1
        self._jobs.put(job)
        if spawn:
            threading.Thread(target=self._work, name="asynccoll-callbacks", daemon=True).start()

    def close(self) -> None:
        """End the threads, each when its job is done. No job may come after."""
        self.unawaited.clear()
        with self._counting:
            threads, self._threads = self._threads, 0
        for _ in range(threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it holds tensors
            with self._counting:
                self._idle += 1


_LONGER = "or pass a longer timeout to init_process_group() or new_group()."
"""A remedy in torch's words; programs also look for " timeout " in an error's text, since gloo's have no type to tell."""

_both: dict[type[CollectiveError], type[CollectiveError]] = {}
"""Kind of error -> the same that torch's users catch as well."""


def _plain(error: CollectiveError) -> tuple[Any, ...]:
    """How such an error pickles: as the kind that it had before."""
    plain: type[CollectiveError] = type(error).__mro__[1]
    copy = plain.__new__(plain, *error.args)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    return copy.__reduce__()


def as_torch_error(error: Exception) -> Exception:
    """``error`` so that it can be caught as ``torch.distributed.DistBackendError`` too, if it came from an operation.

    It keeps its type, its data and its text: ``except asynccoll.PeerLost as lost: lost.peers`` works as well.
    """
    if not isinstance(error, CollectiveError) or isinstance(error, dist.DistBackendError):
        return error
    plain = type(error)
    kind = _both.get(plain)
    if kind is None:
        own = {"__module__": plain.__module__, "__doc__": plain.__doc__, "__reduce__": _plain}
        kind = _both[plain] = type(plain.__name__, (plain, dist.DistBackendError), own)
    both = kind.__new__(kind, *error.args)
    both.args = error.args
    both.__dict__.update(error.__dict__)
    if isinstance(both, CollectiveTimeout):
        both.detail = both.detail.replace("or raise timeout=.", _LONGER)
    both.__cause__, both.__context__ = error.__cause__, error.__context__
    return both.with_traceback(error.__traceback__)
