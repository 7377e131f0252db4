"""The libraries under comparison behind one interface. Knows how each is opened and called, not how time is taken.

A peer gives, for a collective's buffers, two coroutine functions that make a number of calls back to back. To add a
library, write a class like those here and name it in `PEERS`; to add a collective, give each class a method of its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

import asynccoll
from asynccoll import Communicator
from benchmarks.data import Array

__all__ = ["PEERS", "AsynccollPeer", "Buffers", "Calls", "GlooPeer", "Peer", "missing", "open_peer"]

Repeat: TypeAlias = Callable[[int], Awaitable[None]]
"""Makes that many calls, one after the other."""


class Buffers(NamedTuple):
    """One rank's memory for one size. All peers work on the same."""

    send: Array
    """This rank's values. Never written."""
    recv: Array
    """Where the result goes; in place it also holds the values."""


class Calls(NamedTuple):
    """One collective of one peer, ready to run on some buffers."""

    out_of_place: Repeat
    """From ``send`` to ``recv``."""
    in_place: Repeat
    """On ``recv`` alone."""


class Peer(Protocol):
    """A library, opened on this rank."""

    name: str
    version: str

    def allreduce(self, buffers: Buffers, op: str) -> Calls:
        """All-reduce of the buffers by ``op``."""


class AsynccollPeer:
    """asynccoll, on the communicator that the benchmark itself uses for its barriers."""

    name = "asynccoll"
    version = asynccoll.__version__

    def __init__(self, comm: Communicator, algorithm: str = "auto") -> None:
        self._comm = comm
        self._algorithm = algorithm

    def allreduce(self, buffers: Buffers, op: str) -> Calls:
        """Awaits in a coroutine, as a user writes them: ``out=`` out of place, ``allreduce_`` in place."""
        comm, algorithm = self._comm, self._algorithm
        send, recv = buffers

        async def out_of_place(calls: int) -> None:
            for _ in range(calls):
                await comm.allreduce(send, op, out=recv, algorithm=algorithm)

        async def in_place(calls: int) -> None:
            for _ in range(calls):
                await comm.allreduce_(recv, op, algorithm=algorithm)

        return Calls(out_of_place, in_place)


class GlooPeer:
    """torch.distributed with gloo. Its calls block the event loop, which has nothing else to do meanwhile."""

    name = "gloo"

    def __init__(self, torch: ModuleType) -> None:
        self.version = f"torch {torch.__version__}"
        self._torch = torch

    def allreduce(self, buffers: Buffers, op: str) -> Calls:
        """gloo reduces in place only, so out of place is a copy to ``recv`` and a call on that."""
        torch = self._torch
        all_reduce = torch.distributed.all_reduce
        name = {"prod": "PRODUCT"}.get(op, op.upper())
        reduce_op = getattr(torch.distributed.ReduceOp, name)
        send, recv = self._tensor(buffers.send), self._tensor(buffers.recv)

        async def out_of_place(calls: int) -> None:
            for _ in range(calls):
                recv.copy_(send)
                all_reduce(recv, reduce_op)

        async def in_place(calls: int) -> None:
            for _ in range(calls):
                all_reduce(recv, reduce_op)

        return Calls(out_of_place, in_place)

    def _tensor(self, array: Array) -> Any:
        """A tensor on the array's own memory."""
        torch = self._torch
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


@contextlib.asynccontextmanager
async def _asynccoll(comm: Communicator, algorithm: str) -> AsyncIterator[Peer]:
    yield AsynccollPeer(comm, algorithm)


@contextlib.asynccontextmanager
async def _gloo(comm: Communicator, algorithm: str) -> AsyncIterator[Peer]:
    if sys.platform == "linux":
        # As asynccoll here: the loopback device, whatever the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        await comm.broadcast(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", await comm.broadcast(), None, False)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    try:
        yield GlooPeer(torch)
    finally:
        dist.destroy_process_group()


PEERS: Mapping[str, Callable[[Communicator, str], AbstractAsyncContextManager[Peer]]] = {
    "asynccoll": _asynccoll,
    "gloo": _gloo,
}
"""Peers by name: what opens them on a rank of a communicator (every rank at the same time)."""

_NEEDS = {"gloo": ("torch", "pip install torch --index-url https://download.pytorch.org/whl/cpu")}
"""Peer -> module that must be there, and how to get it."""

_REFUSES = {
    "gloo": lambda dtype, op: dtype in ("uint32", "uint64") or (op == "avg" and "int" in dtype),
}
"""Peer -> whether it has no reduction by an op of a dtype (nccl-tests' names)."""


def missing(name: str, dtype: str, op: str) -> str | None:
    """Why peer ``name`` cannot be measured here, and what to do about it; None if it can."""
    module, install = _NEEDS.get(name, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return f"--peer {name} needs {module}, which is not installed: {install} (or use --peer none)"
    if name in _REFUSES and _REFUSES[name](dtype, op):
        return f"{name} has no {op} of {dtype}: use another -d or -o, or --peer none"
    return None


def open_peer(name: str, comm: Communicator, algorithm: str) -> AbstractAsyncContextManager[Peer]:
    """Context manager that opens peer ``name`` on this rank; every rank opens the same peers in the same order."""
    return PEERS[name](comm, algorithm)
