"""Collectives on Python objects with the names of ``adaptdl.collective``. Knows AdaptDL's variables; no engine, no wire.

A program moves over by its import alone::

    from asynccoll import collective

    collective.initialize()
    total = collective.allreduce({"loss": 0.5}, merge)
    collective.teardown()

Every value travels as a pickled object, arrays and tensors too: a result is a left fold in rank order by rank 0's function, and
each replica gets a copy of its own. For arrays in bulk use `asynccoll.sync`, whose array path is many times faster.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import ipaddress
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

from asynccoll import world
from asynccoll.errors import AlreadyInitialized, CommunicatorClosed, NotInitialized, PeerLost
from asynccoll.net.launchers import (
    ASYNCCOLL,
    MAX_GENERATION,
    MAX_WORLD_SIZE,
    READERS,
    Placement,
    check_rank,
    detect,
    parse_host,
    parse_number,
)
from asynccoll.net.sockets import format_address
from asynccoll.sync import Pending, SyncCommunicator, open_with

__all__ = ["allreduce", "allreduce_async", "broadcast", "default_reduce_fn", "initialize", "teardown"]

T = TypeVar("T")

_SEED: Final = "adaptdl.collective"
"""Programs that come from there compare the text of these two errors, so they name the module that they knew."""


class _Module:
    """What this process has opened."""

    communicator: SyncCommunicator | None = None
    pid = 0
    """The process that opened it: a fork has the object, but neither its thread nor its place in the mesh."""
    pending: set[Pending[Any]] = set()  # noqa: RUF012 (one module, one set)
    """Operations under way, which `teardown` waits for."""
    lock = threading.RLock()
    """Held while it opens or closes. Reentrant, for a signal handler that calls `teardown` meanwhile."""


def initialize(
    master_addr: str | None = None,
    master_port: int | None = None,
    replica_rank: int | None = None,
    num_replicas: int | None = None,
) -> None:
    """Meet the other replicas; returns on each once all have called it. One replica needs no address and opens no connection.

    Args:
        master_addr: name or address of the host of rank 0; by default ``ADAPTDL_MASTER_ADDR``. ``"0.0.0.0"``, AdaptDL's own
            default, means this host alone.
        master_port: a free TCP port there; by default ``ADAPTDL_MASTER_PORT``.
        replica_rank: who this process is; by default ``ADAPTDL_REPLICA_RANK``, or 0.
        num_replicas: how many there are; by default ``ADAPTDL_NUM_REPLICAS``, or 1.

    What none of these says comes from where `asynccoll.init` has it, so that ``asynccoll run`` works too.
    ``ADAPTDL_NUM_RESTARTS`` keeps replicas of different restarts apart. docs/collective.md has the whole list.

    Raises:
        AlreadyInitialized: (a RuntimeError) it is open in this process.
        ValueError: an argument or variable is garbled or contradictory; the message names it.
        RendezvousError: not everybody came, or the address needs a secret; `AuthenticationError`: the secrets differ.
    """
    with _Module.lock:
        if _Module.communicator is not None and _Module.pid == os.getpid():
            raise AlreadyInitialized(f"{_SEED} is already initialized")
        placement = _placement(master_addr, master_port, replica_rank, num_replicas)
        _Module.communicator = open_with(lambda: world.connect_at(placement))
        _Module.pid = os.getpid()
        _Module.pending = set()


def teardown() -> None:
    """Leave together: returns on each replica once all have called it. `initialize` may follow.

    What is under way is finished first. Where a replica is gone, or has left by itself, this raises what says so, and has closed
    all the same.

    Raises:
        NotInitialized: (a RuntimeError) there is nothing to leave.
        CollectiveMismatch, CollectiveTimeout: another replica makes another call, or none. Nothing is closed.
        PeerLost, CommunicatorClosed: a replica died, or left.
    """
    _opened().refuse_inside("teardown()")
    with _Module.lock:
        communicator = _opened()
        concurrent.futures.wait(tuple(_Module.pending))
        try:
            communicator.barrier()
        except (PeerLost, CommunicatorClosed):
            _leave(communicator)
            raise
        _leave(communicator)


def default_reduce_fn(a: Any, b: Any) -> Any:
    """``a += b``: numbers are added, sequences joined, Counters merged, arrays added in place (in copies of your values)."""
    a += b
    return a


def allreduce(value: Any, reduce_fn: Callable[[Any, Any], Any] = default_reduce_fn) -> Any:
    """``fn(fn(fn(v0, v1), v2), v3)`` on every replica, ``fn`` being rank 0's ``reduce_fn``.

    Args:
        value: anything that pickles. It is not changed. Its content at the call counts, except that of arrays of 16 KiB and more,
            which may not be written to before the result is there.
        reduce_fn: a function of two arguments, which may change and return the first. It runs at rank 0 only, and need not pickle;
            the other replicas' are ignored. With one replica it is not called.

    Returns:
        The result, a new object on each replica; with one replica an equal copy of ``value``.

    Raises:
        NotInitialized: (a RuntimeError) before `initialize` or after `teardown`.
        TypeError: ``value`` does not pickle; the other replicas get `RemoteError`.
        RemoteError: ``reduce_fn`` raised, or a value does not unpickle; with the origin's traceback, on every replica.
        CollectiveMismatch, CollectiveTimeout, PeerLost, CommunicatorClosed: see `asynccoll.errors`.
    """
    _opened().refuse_inside("allreduce()")
    return _result(allreduce_async(value, reduce_fn))


def allreduce_async(
    value: Any, reduce_fn: Callable[[Any, Any], Any] = default_reduce_fn
) -> concurrent.futures.Future[Any]:
    """`allreduce` that returns at once, whatever the other replicas do. The result, or what is raised, is the future's.

    Operations are matched by the order of the calls, in whatever order their results are taken; ``result()`` gives the same object
    each time. ``cancel()`` ends the operation on every replica.
    """
    # In a function of ours, since a named op and torch's ReduceOp would mean another path, and None nothing at all: what it is
    # matters at rank 0 alone, and there when it is called.
    return _kept(_opened().allreduce_async(value, lambda a, b: reduce_fn(a, b)))


def broadcast(value: Any) -> Any:
    """Rank 0's ``value`` on every replica, a copy on rank 0 too. The other replicas' values are ignored and need not pickle.

    Raises:
        What `allreduce` raises.
    """
    communicator = _opened()
    communicator.refuse_inside("broadcast()")
    # As the element of a tuple an array is an object like any other, of whatever dtype; its type, layout and flags are kept.
    boxed = (value,) if communicator.rank == 0 else None
    (copy,) = _result(_kept(communicator.broadcast_async(boxed)))
    return copy


def _opened() -> SyncCommunicator:
    communicator = _Module.communicator
    if communicator is None or _Module.pid != os.getpid():
        raise NotInitialized(f"{_SEED} has not been initialized")
    return communicator


def _leave(communicator: SyncCommunicator) -> None:
    _Module.communicator = None
    communicator.close()


def _kept(pending: Pending[Any]) -> Pending[Any]:
    """``pending``, known to `teardown` until it is done."""
    under_way = _Module.pending
    under_way.add(pending)
    pending.add_done_callback(under_way.discard)
    return pending


def _result(future: concurrent.futures.Future[Any]) -> Any:
    """What a blocking call returns. Ctrl-C ends the operation on every replica."""
    try:
        return future.result()
    except BaseException:  # re-raised
        future.cancel()  # does nothing unless the wait was interrupted
        raise


# -- who this process is --------------------------------------------------------------------------------


def _placement(
    master_addr: str | None, master_port: int | None, replica_rank: int | None, num_replicas: int | None
) -> Placement:
    """This process's place: from the arguments, else from AdaptDL's variables, else as `asynccoll.init` finds it."""
    rank, shown_rank = _number("replica_rank", replica_rank, "ADAPTDL_REPLICA_RANK")
    size, shown_size = _number("num_replicas", num_replicas, "ADAPTDL_NUM_REPLICAS")
    port, shown_port = _number("master_port", master_port, "ADAPTDL_MASTER_PORT", 65535)
    restarts, _ = _number("", None, "ADAPTDL_NUM_RESTARTS", MAX_GENERATION)
    if rank is None and size is None:
        found = _first(reader.read(os.environ) for reader in READERS)
        alone = found is None or found.size == 1
    else:
        # The half that nobody gave: as the launcher has it, else AdaptDL's own default.
        if rank is None:
            rank = _first(reader.read_rank(os.environ) for reader in READERS) or 0
            shown_rank = f"rank {rank}"
        if size is None:
            size = _first(reader.read_size(os.environ) for reader in READERS) or 1
            shown_size = f"a world of {size}"
        if size == 0:
            raise ValueError(f"{shown_size}: there is at least one replica")
        check_rank(rank, size, shown_rank, shown_size)
        if replica_rank is None and num_replicas is None:
            _agree_with_ours(rank, size, shown_rank, shown_size)
        alone = size == 1
    address = None if alone else _address(master_addr, port, shown_port)
    placement = detect(address, rank, size)
    return placement if restarts is None else dataclasses.replace(placement, generation=restarts)


def _agree_with_ours(rank: int, size: int, shown_rank: str, shown_size: str) -> None:
    """A launcher inside the other leaves both families, and each process might be alone, or a rank twice, without a word."""
    ours = ASYNCCOLL.read(os.environ)
    if ours is not None and (ours.rank, ours.size) != (rank, size):
        raise ValueError(
            f"{shown_rank} and {shown_size} contradict ASYNCCOLL_RANK={ours.rank} and ASYNCCOLL_WORLD_SIZE={ours.size}: "
            "unset those of the launcher that is not meant, or pass replica_rank= and num_replicas="
        )


def _address(master_addr: str | None, port: int | None, shown_port: str) -> str | None:
    """Where rank 0 is; None where neither half is given."""
    shown = f"master_addr={master_addr!r}"
    if master_addr is None and (master_addr := os.environ.get("ADAPTDL_MASTER_ADDR")) is not None:
        shown = f"ADAPTDL_MASTER_ADDR={master_addr!r}"
    if master_addr is None and port is None:
        return None
    host = "0.0.0.0" if master_addr is None else parse_host(str(master_addr), shown)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass  # a name
    else:
        # "Every interface" names no host that others could call, and is more than one host needs.
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    if not port:
        raise ValueError(
            f"{shown_port}: several replicas find rank 0 by a port from 1 to 65535; set ADAPTDL_MASTER_PORT to a free one"
        )
    return f"tcp://{format_address(host, port)}"


def _first(findings: Iterable[T | None]) -> T | None:
    return next((found for found in findings if found is not None), None)


def _number(argument: str, value: Any, variable: str, limit: int = MAX_WORLD_SIZE) -> tuple[int | None, str]:
    """The argument, or the variable where it is None, as an integer; and how a message shows it."""
    if value is not None:
        shown = f"{argument}={value!r}"
        return parse_number(str(value), shown, limit), shown
    text = os.environ.get(variable)
    shown = f"{variable}={text!r}"
    return (None if text is None else parse_number(text, shown, limit)), shown
