"""The synchronous facade: the same verbs as blocking calls, for plain scripts, threads and notebooks.

One event loop in one daemon thread carries the mesh. Values are taken in the calling thread, so that what a verb sees is what
the value was at the call. Knows no engine and no sockets.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from asynccoll import world
from asynccoll.background import LoopThread, result_of
from asynccoll.communicator import Communicator
from asynccoll.errors import AlreadyInitialized, NotInitialized
from asynccoll.groups import ranks_of
from asynccoll.launch import launch
from asynccoll.objects import describe_error
from asynccoll.pending import Pending, SyncStream
from asynccoll.streams import Stream
from asynccoll.threaded import Threaded
from asynccoll.work import Work
from asynccoll.workers import SyncLocalWorkers
from asynccoll.workers import sync_local as local

__all__ = [
    "Pending",
    "SyncCommunicator",
    "SyncLocalWorkers",
    "SyncStream",
    "all_gather",
    "all_gather_async",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "all_to_all_async",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce__async",
    "allreduce_async",
    "allreduce_stream",
    "allreduce_tree",
    "allreduce_tree_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "connect",
    "exscan",
    "exscan_async",
    "gather",
    "gather_async",
    "get_communicator",
    "init",
    "launch",
    "local",
    "new_group",
    "rank",
    "recv",
    "recv_async",
    "recv_message",
    "recv_message_async",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "scan",
    "scan_async",
    "scatter",
    "scatter_async",
    "send",
    "send_async",
    "shrink",
    "shutdown",
    "split",
    "world_size",
]

T = TypeVar("T")
P = ParamSpec("P")


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
        self._thread.refuse_inside(f"{verb.__name__}()")
        pending = cast("Pending[T]", verb(self._threaded, *args, **kwargs))
        try:
            return pending.result()
        except BaseException:  # re-raised
            pending.cancel()  # after Ctrl-C it is still under way; after any other exception this does nothing
            raise

    return call


def _iterating(
    verb: Callable[Concatenate[Communicator, P], Stream],
) -> Callable[Concatenate[SyncCommunicator, P], SyncStream]:
    """The form of a verb whose result comes in parts: starts at the call, returns a blocking iterator."""

    @functools.wraps(verb)
    def start(self: SyncCommunicator, /, *args: P.args, **kwargs: P.kwargs) -> SyncStream:
        return cast("SyncStream", verb(self._threaded, *args, **kwargs))

    return start


class SyncCommunicator:
    """All ranks of a mesh, for code without an event loop. Every verb blocks; ``<verb>_async`` returns a future.

    Calls may come from any thread; operations are matched by the order of the calls. Open it with `init` or `connect`.
    """

    def __init__(self, communicator: Communicator, thread: LoopThread) -> None:
        self._thread = thread
        if isinstance(communicator, Threaded):  # a group, which shares its thread
            self._threaded = communicator
        else:
            self._threaded = Threaded(communicator, thread)
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

    @property
    def name(self) -> str:
        """Name of the communicator, as it stands in errors."""
        return self._threaded.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """World rank of each of the communicator's ranks."""
        return self._threaded.ranks

    def pending(self) -> list[str]:
        """Operations under way on this rank: see `asynccoll.Communicator.pending`."""
        return self._threaded.pending()

    allreduce = _blocking(Communicator.allreduce)
    allreduce_async = _future(Communicator.allreduce)
    all_reduce = allreduce
    all_reduce_async = allreduce_async
    allreduce_ = _blocking(Communicator.allreduce_)
    allreduce__async = _future(Communicator.allreduce_)
    allreduce_stream = _iterating(Communicator.allreduce_stream)
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
    send = _blocking(Communicator.send)
    send_async = _future(Communicator.send)
    recv = _blocking(Communicator.recv)
    recv_async = _future(Communicator.recv)
    recv_message = _blocking(Communicator.recv_message)
    recv_message_async = _future(Communicator.recv_message)
    all_gather = allgather
    all_gather_async = allgather_async
    gather = _blocking(Communicator.gather)
    gather_async = _future(Communicator.gather)
    scatter = _blocking(Communicator.scatter)
    scatter_async = _future(Communicator.scatter)
    alltoall = _blocking(Communicator.alltoall)
    alltoall_async = _future(Communicator.alltoall)
    all_to_all = alltoall
    all_to_all_async = alltoall_async
    barrier = _blocking(Communicator.barrier)
    barrier_async = _future(Communicator.barrier)

    def new_group(self, ranks: Iterable[int], name: str | None = None) -> SyncCommunicator | None:
        """A communicator of some of this one's ranks: see `asynccoll.Communicator.new_group`. No communication."""
        self.refuse_inside("new_group()")
        self._threaded._usable()
        given = list(ranks)

        async def make() -> Threaded | None:
            return self._threaded.new_group(given, name)

        made = result_of(self._thread.run(make()))
        return None if made is None else SyncCommunicator(made, self._thread)

    def split(
        self, color: int | None, order: int | None = None, name: str | None = None
    ) -> SyncCommunicator | None:
        """One communicator for each ``color``: see `asynccoll.Communicator.split`. Every rank calls."""
        rows = self.allgather((color, self.rank if order is None else order), name=name)
        return None if color is None else self.new_group(ranks_of(color, rows), name)

    def shrink(self, *, timeout: float | None = None, name: str | None = None) -> SyncCommunicator:
        """A communicator of the ranks that are left: see `asynccoll.Communicator.shrink`. Every survivor calls."""
        self.refuse_inside("shrink()")
        self._threaded._usable()
        shrinking = self._thread.run(self._threaded.shrink(timeout=timeout, name=name))
        try:
            return SyncCommunicator(result_of(shrinking), self._thread)
        except BaseException:  # re-raised
            shrinking.cancel()  # after Ctrl-C the other survivors must not wait for this rank
            raise

    def refuse_inside(self, what: str) -> None:
        """Raise RuntimeError if the caller is a reduce function or a callback, where ``what`` would wait for itself."""
        self._thread.refuse_inside(what)

    def close(self) -> None:
        """Leave in good order; twice is silent. What is pending fails with `CommunicatorClosed`."""
        self._close("closed")

    def _close(self, cause: str) -> None:
        self._thread.refuse_inside("close() or shutdown()")
        if self._thread.alive:
            result_of(self._thread.run(self._threaded._close(cause)))
            if not self._threaded.is_group:
                self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close("closed" if error is None else f"failed with {describe_error(error)}")

    def __repr__(self) -> str:
        return repr(self._threaded).replace("<Communicator", "<SyncCommunicator", 1)


def open_with(connect: Callable[[], Awaitable[Communicator]]) -> SyncCommunicator:
    """The blocking face of the communicator that ``connect()`` gives when it is awaited in the new loop's thread."""
    thread = LoopThread("asynccoll")

    async def opened() -> Communicator:
        return await connect()

    opening = thread.run(opened())
    try:
        return SyncCommunicator(result_of(opening), thread)
    except BaseException:  # re-raised: whatever ends the wait, Ctrl-C too, no thread may be left behind
        thread.leave()
        raise


def _like(
    opener: Callable[P, world.Opening],
) -> Callable[[Callable[..., SyncCommunicator]], Callable[P, SyncCommunicator]]:
    """Give a function the arguments of ``opener``."""

    def decorate(function: Callable[..., SyncCommunicator]) -> Callable[P, SyncCommunicator]:
        signature = inspect.signature(opener)
        parameters = [
            parameter.replace(default="thread") if name == "progress" else parameter
            for name, parameter in signature.parameters.items()
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]  # functions have no such attribute in typeshed
            parameters=parameters, return_annotation=SyncCommunicator
        )
        return cast("Callable[P, SyncCommunicator]", function)

    return decorate


@_like(world.connect)
def connect(*args: Any, progress: str = "thread", **options: Any) -> SyncCommunicator:
    """`asynccoll.connect` as a blocking call: joins a mesh without touching the default communicator of this module.

    There is no loop of the caller's here, so ``progress`` is ``"thread"``; any other value is a ValueError.
    """
    return _opened(args, progress, options)


def _opened(args: tuple[Any, ...], progress: str, options: dict[str, Any]) -> SyncCommunicator:
    if progress != "thread":
        raise ValueError(
            f"progress={progress!r} is not for asynccoll.sync, whose mesh always has a thread of its own: leave it out, or "
            "use 'thread'. For a mesh in your own event loop use asynccoll.init()"
        )
    return open_with(lambda: world.connect(*args, **options))


class _Default:
    """The facade's own default communicator."""

    communicator: SyncCommunicator | None = None
    lock = threading.Lock()


@_like(world.init)
def init(*args: Any, progress: str = "thread", **options: Any) -> SyncCommunicator:
    """`asynccoll.init` as a blocking call: joins the mesh and makes it this module's default. Also a context manager.

    There is no loop of the caller's here, so ``progress`` is ``"thread"``; any other value is a ValueError.
    """
    with _Default.lock:
        current = _Default.communicator
        if current is not None and not current.closed and current._thread.alive:
            raise AlreadyInitialized(
                "asynccoll.sync is already initialised in this process; call shutdown() first, or connect() for a second mesh"
            )
        _Default.communicator = _opened(args, progress, options)
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
all_reduce = allreduce
all_reduce_async = allreduce_async
allreduce_ = _on_default(SyncCommunicator.allreduce_)
allreduce__async = _on_default(SyncCommunicator.allreduce__async)
allreduce_stream = _on_default(SyncCommunicator.allreduce_stream)
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
send = _on_default(SyncCommunicator.send)
send_async = _on_default(SyncCommunicator.send_async)
recv = _on_default(SyncCommunicator.recv)
recv_async = _on_default(SyncCommunicator.recv_async)
recv_message = _on_default(SyncCommunicator.recv_message)
recv_message_async = _on_default(SyncCommunicator.recv_message_async)
new_group = _on_default(SyncCommunicator.new_group)
split = _on_default(SyncCommunicator.split)
shrink = _on_default(SyncCommunicator.shrink)
all_gather = allgather
all_gather_async = allgather_async
gather = _on_default(SyncCommunicator.gather)
gather_async = _on_default(SyncCommunicator.gather_async)
scatter = _on_default(SyncCommunicator.scatter)
scatter_async = _on_default(SyncCommunicator.scatter_async)
alltoall = _on_default(SyncCommunicator.alltoall)
alltoall_async = _on_default(SyncCommunicator.alltoall_async)
all_to_all = alltoall
all_to_all_async = alltoall_async
barrier = _on_default(SyncCommunicator.barrier)
barrier_async = _on_default(SyncCommunicator.barrier_async)
