"""The collectives that can be measured: their data, and what a time means as bandwidth. Knows no library and no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks import data
from benchmarks.data import Array
from benchmarks.peers import Buffers, Calls, Peer

__all__ = ["COLLECTIVES", "Bandwidth", "Collective", "bandwidth"]


class Collective(NamedTuple):
    """One collective, as nccl-tests measures it."""

    title: str
    """Name of the test in the output."""
    bus_factor: Callable[[int], float]
    """World size -> busbw / algbw: the bytes that cross the busiest link, per byte of the message."""
    buffers: Callable[[str, int, np.dtype[Any], int, int], tuple[Buffers, Array]]
    """op, count, dtype, rank, world size -> memory, and the result that must come out."""
    calls: Callable[[Peer, Buffers, str], Calls]
    """The peer's calls on these buffers."""


def _allreduce_buffers(
    op: str, count: int, dtype: np.dtype[Any], rank: int, world_size: int
) -> tuple[Buffers, Array]:
    send = data.contribution(op, count, dtype, rank, world_size)
    return Buffers(send, np.empty_like(send)), data.expected(op, count, dtype, world_size)


COLLECTIVES: Mapping[str, Collective] = {
    "allreduce": Collective(
        "all_reduce_perf",
        lambda n: 2 * (n - 1) / n,
        _allreduce_buffers,
        lambda peer, buffers, op: peer.allreduce(buffers, op),
    ),
}


class Bandwidth(NamedTuple):
    """GB/s, where a GB is 1e9 bytes."""

    algorithm: float
    """Bytes of the message over the time."""
    bus: float
    """The same, times the collective's factor: comparable with the speed of a link, whatever the world size."""


def bandwidth(collective: Collective, nbytes: int, seconds: float, world_size: int) -> Bandwidth:
    """What ``nbytes`` in ``seconds`` mean."""
    algorithm = nbytes / 1e9 / seconds if seconds > 0 else 0.0
    return Bandwidth(algorithm, algorithm * collective.bus_factor(world_size))
