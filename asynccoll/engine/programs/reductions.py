"""Programs of the array path that reduce: they turn a schedule's element ranges into bytes. Know no frames and no links.

A reduction works on two planes (see `asynccoll.algorithms.steps`). Where they are separate memory (sums of half types, kept
in float32), the schedule runs over slabs, so that the extra memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asynccoll.algorithms import registry
from asynccoll.algorithms.steps import Recv, Send, Step
from asynccoll.buffers import flat_bytes
from asynccoll.engine.transfers import FoldBytes, Program, RecvBytes, SendBytes, Transfer
from asynccoll.reduction import Arithmetic

__all__ = ["Part", "allreduce", "allreduce_parts", "sources", "steps_of"]

Flat = npt.NDArray[Any]
"""A 1-D C-contiguous array."""

SLAB_BYTES: Final = 1 << 24
"""Bytes of a slab on the partial plane where that is separate memory (16 MiB)."""
_SEGMENT_BYTES: Final = 1 << 18
"""Bytes of a pipelined segment of a tree."""
_SNAPSHOT_BYTES: Final = 1 << 16
"""Bytes of a slab of recursive doubling, which is copied at each round."""


class Part:
    """One dtype's share of an operation: the values, in place, and how to reduce them."""

    __slots__ = ("algorithm", "arithmetic", "storage")

    def __init__(self, storage: Flat, arithmetic: Arithmetic, algorithm: str) -> None:
        self.storage = storage
        """The final plane. Holds this rank's values at the start and the result at the end."""
        self.arithmetic = arithmetic
        self.algorithm = algorithm
        """Name of the schedule: never ``"auto"``."""


@lru_cache(maxsize=128)
def steps_of(algorithm: str, rank: int, size: int, count: int, itemsize: int) -> tuple[Step, ...]:
    """The steps of an allreduce over ``count`` elements of ``itemsize`` bytes, as a tuple (cached: a trainer repeats itself)."""
    return tuple(_schedule(algorithm, rank, size, count, itemsize))


def _schedule(algorithm: str, rank: int, size: int, count: int, itemsize: int) -> Iterable[Step]:
    schedule = registry.schedule("allreduce", algorithm)
    if algorithm == "ring":
        return schedule(rank, size, count)
    unit = _SNAPSHOT_BYTES if algorithm == "doubling" else _SEGMENT_BYTES
    return schedule(rank, size, count, max(1, unit // itemsize))


def _slab_length(part: Part) -> int:
    """Elements per run of the schedule: all of them, unless the partial plane is separate memory."""
    count = len(part.storage)
    if not part.arithmetic.separate:
        return max(1, count)
    return max(1, SLAB_BYTES // part.arithmetic.partial.itemsize)


def sources(parts: Sequence[Part], rank: int, size: int) -> Mapping[int, int] | None:
    """Rank -> bytes to come, if all bytes come from one rank: they always have a place once the operation runs."""
    total = 0
    peers: set[int] = set()
    for part in parts:
        partial, final = part.arithmetic.partial.itemsize, part.storage.itemsize
        slab = _slab_length(part)
        for lo in range(0, len(part.storage), slab):
            count = min(slab, len(part.storage) - lo)
            for step in steps_of(part.algorithm, rank, size, count, partial):
                if type(step) is Recv:
                    peers.add(step.peer)
                    total += (step.hi - step.lo) * (final if step.combine is None else partial)
    return {peers.pop(): total} if len(peers) == 1 else None


def _run(part: Part, rank: int, size: int) -> Generator[Transfer, None, None]:
    arithmetic = part.arithmetic
    storage = part.storage
    slab = _slab_length(part)
    partial: Flat = storage
    if arithmetic.separate:
        partial = np.empty(min(slab, len(storage)), arithmetic.partial)
    for lo in range(0, len(storage), slab):
        final = storage[lo : lo + slab]
        working = partial[: len(final)] if arithmetic.separate else arithmetic.plane(final)
        arithmetic.load(final, working)
        steps = steps_of(part.algorithm, rank, size, len(final), arithmetic.partial.itemsize)
        yield from _reduce(steps, arithmetic, working, final, size)


def _reduce(
    steps: Iterable[Step], arithmetic: Arithmetic, partial: Flat, final: Flat, size: int
) -> Generator[Transfer, None, None]:
    final_bytes = flat_bytes(final)
    partial_bytes = flat_bytes(partial) if arithmetic.separate else final_bytes
    wide, narrow = partial.itemsize, final.itemsize
    for step in steps:
        kind = type(step)
        if kind is Send:
            peer, lo, hi, is_final, snapshot = step  # type: ignore[misc]
            if is_final:
                yield SendBytes(peer, final_bytes[lo * narrow : hi * narrow], snapshot)
            else:
                yield SendBytes(peer, partial_bytes[lo * wide : hi * wide], snapshot)
        elif kind is Recv:
            peer, lo, hi, combine = step  # type: ignore[misc]
            if combine is None:
                yield RecvBytes(peer, final_bytes[lo * narrow : hi * narrow])
            else:
                yield FoldBytes(peer, (hi - lo) * wide, _folder(arithmetic, partial[lo:hi], combine))
        else:
            lo, hi = step  # type: ignore[misc]
            arithmetic.finish(partial[lo:hi], final[lo:hi], size)


def _folder(arithmetic: Arithmetic, mine: Flat, operand: str) -> Callable[[int, memoryview], None]:
    combine = arithmetic.combine_lower if operand == "lower" else arithmetic.combine_higher
    dtype = mine.dtype
    itemsize = mine.itemsize

    def fold(offset: int, piece: memoryview) -> None:
        incoming = np.frombuffer(piece, dtype)
        lo = offset // itemsize
        combine(mine[lo : lo + len(incoming)], incoming)

    return fold


def allreduce(part: Part, rank: int, size: int, result: Callable[[], Any]) -> Program:
    """Reduce one part over all ranks; the operation's result is what ``result()`` gives at the end."""
    yield from _run(part, rank, size)
    return result()


def allreduce_parts(parts: Sequence[Part], rank: int, size: int, result: Callable[[], Any]) -> Program:
    """Reduce several parts, one after the other, as one operation."""
    for part in parts:
        yield from _run(part, rank, size)
    return result()
