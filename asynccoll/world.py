"""Opening and closing a mesh, and the default communicator. Knows how the parts fit together, and none of their insides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from asynccoll.bridged import bridged
from asynccoll.communicator import Communicator, Options, seconds
from asynccoll.engine.engine import Engine
from asynccoll.errors import AlreadyInitialized, NotInitialized
from asynccoll.loops import new_loop, require_watching

if TYPE_CHECKING:
    from asynccoll.net.contexts import Contexts
    from asynccoll.net.launchers import Placement
    from asynccoll.net.tls import Tls

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_stream",
    "allreduce_tree",
    "alltoall",
    "barrier",
    "broadcast",
    "connect",
    "exscan",
    "gather",
    "get_communicator",
    "init",
    "new_group",
    "rank",
    "recv",
    "recv_message",
    "reduce",
    "reduce_scatter",
    "run",
    "scan",
    "scatter",
    "send",
    "shrink",
    "shutdown",
    "split",
    "use",
    "world_size",
]

DEFAULT_TIMEOUT = float("1800")
"""Seconds. An object of its own: who passes 1800 explicitly overrides ``ASYNCCOLL_TIMEOUT``, who passes nothing does not."""

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C")
P = ParamSpec("P")

_chosen: ContextVar[Communicator | None] = ContextVar("asynccoll.communicator", default=None)
"""What `use` has set in this context."""


class _Default:
    """The process-wide default communicator: `init` sets it, `shutdown` and the communicator's own close clear it."""

    communicator: Communicator | None = None
    opening = False
    pid = 0


class Opening:
    """What `init` and `connect` return: await it for the communicator, or use it as an async context manager."""

    def __init__(self, arguments: dict[str, Any], *, default: bool) -> None:
        self._arguments = arguments
        self._default = default
        self._opened: Communicator | None = None

    def __await__(self) -> Generator[Any, None, Communicator]:
        return self._open().__await__()

    async def __aenter__(self) -> Communicator:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, trace)

    async def _open(self) -> Communicator:
        if not self._default:
            return await _connect(**self._arguments)
        if _Default.pid != os.getpid():  # a fork does not inherit its parent's communicator
            _Default.communicator, _Default.opening, _Default.pid = None, False, os.getpid()
        if _Default.communicator is not None or _Default.opening:
            raise AlreadyInitialized(
                "asynccoll is already initialised in this process; call shutdown() first, or connect() for a second mesh"
            )
        _Default.opening = True
        try:
            communicator = await _connect(**self._arguments)
        finally:
            _Default.opening = False
        _Default.communicator = communicator
        communicator.on_close(_forget)
        return communicator


def _forget() -> None:
    _Default.communicator = None


def init(
    address: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    secret: str | bytes | None = None,
    ssl: Contexts | None = None,
    insecure: bool = False,
    safe: bool = False,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT,
    init_timeout: float | timedelta = 300.0,
    liveness_timeout: float | timedelta = 30.0,
    transport: str = "auto",
    streams: int = 1,
    compression: str | None = None,
    progress: str = "inline",
) -> Opening:
    """Join the mesh and make it the default communicator: ``await init()`` or ``async with init() as comm``.

    Returns when every rank has joined. With nothing to detect it is a world of one, without a socket.

    Args:
        address: None or ``"env://"`` (detect the launcher), or ``"tcp://host:port"``, where rank 0 listens.
        rank, world_size: who this process is; by default from ``ASYNCCOLL_RANK`` and ``ASYNCCOLL_WORLD_SIZE``, then ``RANK`` and
            ``WORLD_SIZE``.
        secret: shared by all ranks; by default ``ASYNCCOLL_SECRET``, or on one host a file that only this user can read.
        insecure: allow an address beyond this host without a secret. Anyone who reaches it can then join and run code.
        timeout: default time limit of an operation in seconds (None: no limit).
        init_timeout: time limit of forming the mesh, in seconds; the error names the ranks that are missing.
        liveness_timeout: seconds after which a rank from which nothing is heard, no heartbeat either, counts as lost: it is stopped
            (SIGSTOP), cut off, or in a call that holds the GIL for so long. The same on all ranks; ``math.inf``: never. A rank
            that dies is noticed at once without it, and one whose event loop is busy is not taken for dead.
        safe: pickle and unpickle nothing, exceptions of other ranks neither. Arrays travel as ever; other values must be None,
            bool, int of 64 bits, float, str, bytes, or lists and dicts of these (tuples arrive as lists). On all ranks, or on
            none.
        ssl: TLS for every connection, from its first byte: ``asynccoll.tls(...)``, or a pair (server context, client context). On
            all ranks, or on none. The secret is still proved, inside.
        progress: ``"inline"``: the mesh runs in the caller's event loop, with the lowest latency. ``"thread"``: it has a loop and a
            thread of its own, and goes on while compute blocks the caller's; the communicator may be used from any running loop,
            and reduce functions run in that thread.
        transport, streams, compression: fixed in this version (``"auto"`` or ``"tcp"``, 1, None); any other value is a ValueError.

    Raises:
        ValueError: an argument or environment variable is garbled, missing or contradictory; the message names it.
        RendezvousError: the mesh did not form in time, or ranks disagree; AuthenticationError: the secrets differ, or a certificate
            is not accepted.
        AlreadyInitialized: a default communicator is open.
    """
    return Opening(dict(locals()), default=True)


def connect(
    address: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    secret: str | bytes | None = None,
    ssl: Contexts | None = None,
    insecure: bool = False,
    safe: bool = False,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT,
    init_timeout: float | timedelta = 300.0,
    liveness_timeout: float | timedelta = 30.0,
    transport: str = "auto",
    streams: int = 1,
    compression: str | None = None,
    progress: str = "inline",
) -> Opening:
    """The same as `init`, without touching the default communicator: several meshes may live in one process."""
    return Opening(dict(locals()), default=False)


def _supported(**options: tuple[Any, tuple[Any, ...]]) -> None:
    for option, (value, allowed) in options.items():
        if value not in allowed:
            shown = " or ".join(repr(item) for item in allowed)
            raise ValueError(f"{option}={value!r} is not available in this version; use {shown}")


async def _connect(
    *,
    address: str | None,
    rank: int | None,
    world_size: int | None,
    secret: str | bytes | None,
    ssl: Contexts | None,
    insecure: bool,
    safe: bool,
    timeout: float | timedelta | None,
    init_timeout: float | timedelta,
    liveness_timeout: float | timedelta,
    transport: str,
    streams: int,
    compression: str | None,
    progress: str,
) -> Communicator:
    from asynccoll.net.launchers import detect

    _supported(
        transport=(transport, ("auto", "tcp")),
        streams=(streams, (1,)),
        compression=(compression, (None,)),
        progress=(progress, ("inline", "thread")),
    )
    placement = detect(address, rank, world_size, secret)
    here = functools.partial(
        connect_at,
        placement,
        ssl=ssl,
        insecure=insecure,
        safe=safe,
        timeout=timeout,
        init_timeout=init_timeout,
        liveness_timeout=liveness_timeout,
    )
    return await (here() if progress == "inline" else bridged(here))


async def connect_at(
    placement: Placement,
    *,
    ssl: Contexts | None = None,
    insecure: bool = False,
    safe: bool = False,
    timeout: float | timedelta | None = DEFAULT_TIMEOUT,
    init_timeout: float | timedelta = 300.0,
    liveness_timeout: float | timedelta | None = 30.0,
) -> Communicator:
    """`connect` for a process whose place is known already; the arguments are those of `init`."""
    from asynccoll.algorithms import registry
    from asynccoll.net.contexts import layer
    from asynccoll.net.driver import NetDriver

    limit = _env_timeout() if timeout is DEFAULT_TIMEOUT else seconds(timeout, "timeout", None)
    forming = seconds(init_timeout, "init_timeout", 300.0) or math.inf
    if not isinstance(insecure, bool):
        raise ValueError(f"insecure={insecure!r} is neither True nor False")
    liveness = seconds(liveness_timeout, "liveness_timeout", 30.0)
    algorithm = os.environ.get("ASYNCCOLL_ALGORITHM", "auto")
    if algorithm != "auto" and algorithm not in registry.names("allreduce"):
        known = ", ".join(("auto", *registry.names("allreduce")))
        raise ValueError(f"ASYNCCOLL_ALGORITHM={algorithm!r} does not exist; use one of {known}")
    if not isinstance(safe, bool):
        raise ValueError(f"safe={safe!r} is neither True nor False")
    loop = asyncio.get_running_loop()
    secured = layer(ssl, insecure=insecure)
    if placement.size == 1:
        return Communicator(NetDriver(Engine(0, 1), loop, {}), options=Options(limit, algorithm, safe=safe))

    from asynccoll.net.agent_store import placed
    from asynccoll.net.secret import load_secret

    require_watching(loop)
    started = loop.time()
    async with placed(placement, forming) as place:
        return await open_mesh(
            place,
            load_secret(place.secret, place.host, insecure),
            timeout=limit,
            # What the search for rank 0 has taken is gone.
            init_timeout=forming if place is placement else max(0.05, forming - (loop.time() - started)),
            liveness_timeout=liveness,
            algorithm=algorithm,
            safe=safe,
            tls=secured,
        )


async def open_mesh(
    placement: Placement,
    secret: bytes,
    *,
    timeout: float | None,
    init_timeout: float,
    liveness_timeout: float | None = None,
    algorithm: str = "auto",
    safe: bool = False,
    tls: Tls | None = None,
) -> Communicator:
    """Form the mesh for a rank whose place is known, in the running loop. Without ``liveness_timeout`` there are no heartbeats."""
    from asynccoll.algorithms import registry
    from asynccoll.net.driver import NetDriver
    from asynccoll.net.rendezvous import form_mesh

    links = await form_mesh(
        placement,
        secret,
        init_timeout=init_timeout,
        offer={"table": registry.default_table()},
        must_agree={
            "ASYNCCOLL_ALGORITHM": algorithm,
            "safe": str(safe),
            "liveness_timeout": liveness_timeout,
        },
        pulse=liveness_timeout is not None,
        tls=tls,
    )
    loop = asyncio.get_running_loop()
    hosts = [links.hosts[member] for member in range(links.size)]
    own = hosts[links.rank]
    local_rank = placement.local_rank
    if local_rank is None:
        local_rank = hosts[: links.rank].count(own)
    node_rank = placement.node_rank
    if node_rank is None:
        node_rank = list(dict.fromkeys(hosts)).index(own)
    options = Options(timeout, algorithm, links.welcome.get("table"), local_rank, node_rank, safe)
    engine = Engine(links.rank, links.size)
    engine.peers.addresses.update(links.addresses)
    try:
        driver = NetDriver(engine, loop, links.sockets, links.pulses, liveness_timeout)
    except BaseException:  # no thread for the heartbeats: re-raised
        links.close()
        raise
    return Communicator(driver, options=options)


def _env_timeout() -> float:
    text = os.environ.get("ASYNCCOLL_TIMEOUT")
    if text is None:
        return 1800.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"ASYNCCOLL_TIMEOUT={text!r} is not a positive number of seconds")
    return value


async def shutdown() -> None:
    """Close the default communicator. Twice is silent; `init` may follow."""
    communicator = _Default.communicator
    if communicator is not None and _Default.pid == os.getpid():
        await communicator.close()


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """``asyncio.run(main)`` on uvloop where it is installed, else on a selector loop.

    Plain ``asyncio.run`` works too, with more latency; but not on Windows, whose usual loop does not watch sockets for others.
    """
    with asyncio.Runner(debug=debug, loop_factory=new_loop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def use(communicator: Communicator) -> Iterator[Communicator]:
    """``with use(comm):`` makes ``comm`` the default in this context (tasks started inside inherit it)."""
    token = _chosen.set(communicator)
    try:
        yield communicator
    finally:
        _chosen.reset(token)


def get_communicator(caller: str = "") -> Communicator:
    """The communicator that the module's verbs use. Raises `NotInitialized`, naming ``caller``, if there is none."""
    communicator = _chosen.get()
    if communicator is None:
        communicator = _Default.communicator
    if communicator is None:
        what = f"{caller}() was called" if caller else "there is no communicator"
        raise NotInitialized(
            f"{what} before init() or after shutdown(); open one with `async with asynccoll.init():`"
        )
    return communicator


def rank() -> int:
    """This process's rank in the default communicator."""
    return get_communicator("rank").rank


def world_size() -> int:
    """Number of ranks in the default communicator."""
    return get_communicator("world_size").world_size


def on_default(verb: Callable[Concatenate[C, P], R], get: Callable[[str], C]) -> Callable[P, R]:
    """The module's form of a verb: the same arguments, on the communicator that ``get(name of the verb)`` gives."""

    @functools.wraps(verb)
    def forwarded(*args: P.args, **kwargs: P.kwargs) -> R:
        return verb(get(verb.__name__), *args, **kwargs)

    signature = inspect.signature(verb)
    forwarded.__signature__ = signature.replace(  # type: ignore[attr-defined]  # functions have no such attribute in typeshed
        parameters=list(signature.parameters.values())[1:]
    )
    # So that it pickles, by name.
    forwarded.__module__, forwarded.__qualname__ = get.__module__, verb.__name__
    return forwarded


allreduce = on_default(Communicator.allreduce, get_communicator)
allreduce_async = allreduce
all_reduce = allreduce
allreduce_ = on_default(Communicator.allreduce_, get_communicator)
allreduce_stream = on_default(Communicator.allreduce_stream, get_communicator)
allreduce_tree = on_default(Communicator.allreduce_tree, get_communicator)
reduce = on_default(Communicator.reduce, get_communicator)
reduce_scatter = on_default(Communicator.reduce_scatter, get_communicator)
scan = on_default(Communicator.scan, get_communicator)
exscan = on_default(Communicator.exscan, get_communicator)
broadcast = on_default(Communicator.broadcast, get_communicator)
allgather = on_default(Communicator.allgather, get_communicator)
all_gather = allgather
gather = on_default(Communicator.gather, get_communicator)
scatter = on_default(Communicator.scatter, get_communicator)
alltoall = on_default(Communicator.alltoall, get_communicator)
all_to_all = alltoall
barrier = on_default(Communicator.barrier, get_communicator)
send = on_default(Communicator.send, get_communicator)
recv = on_default(Communicator.recv, get_communicator)
recv_message = on_default(Communicator.recv_message, get_communicator)
new_group = on_default(Communicator.new_group, get_communicator)
split = on_default(Communicator.split, get_communicator)
shrink = on_default(Communicator.shrink, get_communicator)
