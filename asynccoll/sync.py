"""The synchronous facade: the same verbs as blocking calls, for plain scripts, threads and notebooks.

One event loop in one daemon thread carries the mesh. Values are taken in the calling thread, so that what a verb sees is what
the value was at the call. Knows no engine and no sockets.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, cast

from asynccoll import world
from asynccoll.background import LoopThread
from asynccoll.communicator import Communicator
from asynccoll.engine.group import MAX_PENDING
from asynccoll.errors import AlreadyInitialized, NotInitialized, RemoteError
from asynccoll.launch import launch
from asynccoll.objects import describe_error
from asynccoll.work import Work

__all__ = [
    "Pending",
    "SyncCommunicator",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce__async",
    "allreduce_async",
    "allreduce_tree",
    "allreduce_tree_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "connect",
    "exscan",
    "exscan_async",
    "get_communicator",
    "init",
    "launch",
    "rank",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "scan",
    "scan_async",
    "shutdown",
    "world_size",
]

T = TypeVar("T")
P = ParamSpec("P")

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


class _Threaded(Communicator):
    """A communicator whose calls come from any thread: prepared there, started in the loop's thread."""

    def __init__(self, communicator: Communicator, thread: LoopThread) -> None:
        self.__dict__.update(communicator.__dict__)
        self._thread = thread
        self._under_way = 0
        """Calls whose end nobody has seen yet; the engine counts only those that the loop's thread has started."""
        self._counting = threading.Lock()

    def _call(self, *call: Any) -> Any:
        self._usable()
        prepared = self._prepared(*call)
        pending: Pending[Any] = Pending(self._thread)
        with self._counting:
            self._under_way += 1
        pending.add_done_callback(self._one_less)
        self._thread.soon(lambda: pending.begin(lambda: self._start(prepared)))
        return pending

    def _one_less(self, _: object) -> None:
        with self._counting:
            self._under_way -= 1

    def _skip(self, refused: Any) -> None:
        self._thread.soon(lambda: self._start(refused).exception())

    def _usable(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this process is a fork of process {self._pid}, which opened the communicator; "
                "call asynccoll.sync.init() in the child, with ranks of its own"
            )
        if self._pump.closed or not self._thread.alive:
            raise NotInitialized(
                f"communicator {self._name!r} is closed; open a new one with asynccoll.sync.init()"
            )
        if self._under_way >= MAX_PENDING:
            raise RuntimeError(
                f"{MAX_PENDING} operations of communicator {self._name!r} are under way, which is the most; wait for some first"
            )
        if self._thread.inside():
            raise RuntimeError(
                "a blocking call from inside an operation (a reduce function, or a value's own pickling) would wait for itself; "
                "make it after the operation"
            )


def _future(
    verb: Callable[Concatenate[Communicator, P], Work[T]],
) -> Callable[Concatenate[SyncCommunicator, P], Pending[T]]:
    """The ``_async`` form of a verb: starts at the call, returns a future."""

    @functools.wraps(verb)
    def start(self: SyncCommunicator, /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return cast("Pending[T]", verb(self._threaded, *args, **kwargs))

    start.__name__ = f"{verb.__name__}_async"
    return start


def _blocking(
    verb: Callable[Concatenate[Communicator, P], Work[T]],
) -> Callable[Concatenate[SyncCommunicator, P], T]:
    """The blocking form of a verb: returns its result. Ctrl-C aborts the operation on every rank."""

    @functools.wraps(verb)
    def call(self: SyncCommunicator, /, *args: P.args, **kwargs: P.kwargs) -> T:
        pending = cast("Pending[T]", verb(self._threaded, *args, **kwargs))
        try:
            return pending.result()
        except BaseException:
            pending.cancel()  # after Ctrl-C it is still under way; after any other exception this does nothing
            raise

    return call


class SyncCommunicator:
    """All ranks of a mesh, for code without an event loop. Every verb blocks; ``<verb>_async`` returns a future.

    Calls may come from any thread; operations are matched by the order of the calls. Open it with `init` or `connect`.
    """

    def __init__(self, communicator: Communicator, thread: LoopThread) -> None:
        self._threaded = _Threaded(communicator, thread)
        self._thread = thread
        thread.at_stop(communicator._pump.abandon)

    @property
    def rank(self) -> int:
        """This process's number in the communicator, 0 to ``world_size - 1``."""
        return self._threaded.rank

    @property
    def world_size(self) -> int:
        """How many ranks the communicator has."""
        return self._threaded.world_size

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks on its host."""
        return self._threaded.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this rank's host, in the order of the hosts' lowest ranks."""
        return self._threaded.node_rank

    @property
    def closed(self) -> bool:
        """`close` has been called."""
        return self._threaded.closed

    allreduce = _blocking(Communicator.allreduce)
    allreduce_async = _future(Communicator.allreduce)
    allreduce_ = _blocking(Communicator.allreduce_)
    allreduce__async = _future(Communicator.allreduce_)
    allreduce_tree = _blocking(Communicator.allreduce_tree)
    allreduce_tree_async = _future(Communicator.allreduce_tree)
    reduce = _blocking(Communicator.reduce)
    reduce_async = _future(Communicator.reduce)
    reduce_scatter = _blocking(Communicator.reduce_scatter)
    reduce_scatter_async = _future(Communicator.reduce_scatter)
    scan = _blocking(Communicator.scan)
    scan_async = _future(Communicator.scan)
    exscan = _blocking(Communicator.exscan)
    exscan_async = _future(Communicator.exscan)
    broadcast = _blocking(Communicator.broadcast)
    broadcast_async = _future(Communicator.broadcast)
    allgather = _blocking(Communicator.allgather)
    allgather_async = _future(Communicator.allgather)
    barrier = _blocking(Communicator.barrier)
    barrier_async = _future(Communicator.barrier)

    def close(self) -> None:
        """Leave in good order; twice is silent. What is pending fails with `CommunicatorClosed`."""
        self._close("closed")

    def _close(self, cause: str) -> None:
        if self._thread.inside():
            raise RuntimeError(
                "close() or shutdown() from a callback of an operation would wait for itself; call it from another thread"
            )
        if self._thread.alive:
            self._thread.run(self._threaded._close(cause)).result()
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close("closed" if error is None else f"failed with {describe_error(error)}")

    def __repr__(self) -> str:
        return repr(self._threaded).replace("<Communicator", "<SyncCommunicator", 1)


def _open(*args: Any, **options: Any) -> SyncCommunicator:
    thread = LoopThread("asynccoll")

    async def opened() -> Communicator:
        return await world.connect(*args, **options)

    opening = thread.run(opened())
    try:
        return SyncCommunicator(opening.result(), thread)
    except BaseException:
        opening.cancel()
        thread.stop()
        raise


def _like(
    opener: Callable[P, world.Opening],
) -> Callable[[Callable[..., SyncCommunicator]], Callable[P, SyncCommunicator]]:
    """Give a function the arguments of ``opener``."""

    def decorate(function: Callable[..., SyncCommunicator]) -> Callable[P, SyncCommunicator]:
        function.__signature__ = inspect.signature(opener).replace(  # type: ignore[attr-defined]
            return_annotation=SyncCommunicator
        )
        return cast("Callable[P, SyncCommunicator]", function)

    return decorate


@_like(world.connect)
def connect(*args: Any, **options: Any) -> SyncCommunicator:
    """`asynccoll.connect` as a blocking call: joins a mesh without touching the default communicator of this module."""
    return _open(*args, **options)


class _Default:
    """The facade's own default communicator."""

    communicator: SyncCommunicator | None = None
    lock = threading.Lock()


@_like(world.init)
def init(*args: Any, **options: Any) -> SyncCommunicator:
    """`asynccoll.init` as a blocking call: joins the mesh and makes it this module's default. Also a context manager."""
    with _Default.lock:
        current = _Default.communicator
        if current is not None and not current.closed and current._thread.alive:
            raise AlreadyInitialized(
                "asynccoll.sync is already initialised in this process; call shutdown() first, or connect() for a second mesh"
            )
        _Default.communicator = _open(*args, **options)
        return _Default.communicator


def shutdown() -> None:
    """Close the default communicator. Twice is silent; `init` may follow."""
    current = _Default.communicator
    if current is not None:
        current.close()
        _Default.communicator = None


def get_communicator(caller: str = "") -> SyncCommunicator:
    """The communicator that the module's verbs use. Raises `NotInitialized`, naming ``caller``, if there is none."""
    current = _Default.communicator
    if current is None:
        what = f"{caller}() was called" if caller else "there is no communicator"
        raise NotInitialized(f"{what} before init() or after shutdown(); call asynccoll.sync.init() first")
    return current


def rank() -> int:
    """This process's rank in the default communicator."""
    return get_communicator("rank").rank


def world_size() -> int:
    """Number of ranks in the default communicator."""
    return get_communicator("world_size").world_size


def _on_default(verb: Callable[Concatenate[SyncCommunicator, P], T]) -> Callable[P, T]:
    """The module's form of a verb: the same arguments, on the default communicator."""
    return world.on_default(verb, get_communicator)


allreduce = _on_default(SyncCommunicator.allreduce)
allreduce_async = _on_default(SyncCommunicator.allreduce_async)
allreduce_ = _on_default(SyncCommunicator.allreduce_)
allreduce__async = _on_default(SyncCommunicator.allreduce__async)
allreduce_tree = _on_default(SyncCommunicator.allreduce_tree)
allreduce_tree_async = _on_default(SyncCommunicator.allreduce_tree_async)
reduce = _on_default(SyncCommunicator.reduce)
reduce_async = _on_default(SyncCommunicator.reduce_async)
reduce_scatter = _on_default(SyncCommunicator.reduce_scatter)
reduce_scatter_async = _on_default(SyncCommunicator.reduce_scatter_async)
scan = _on_default(SyncCommunicator.scan)
scan_async = _on_default(SyncCommunicator.scan_async)
exscan = _on_default(SyncCommunicator.exscan)
exscan_async = _on_default(SyncCommunicator.exscan_async)
broadcast = _on_default(SyncCommunicator.broadcast)
broadcast_async = _on_default(SyncCommunicator.broadcast_async)
allgather = _on_default(SyncCommunicator.allgather)
allgather_async = _on_default(SyncCommunicator.allgather_async)
barrier = _on_default(SyncCommunicator.barrier)
barrier_async = _on_default(SyncCommunicator.barrier_async)
