"""Programs of the array path that reduce: they turn a schedule's element ranges into bytes. Know no frames and no links.

A reduction works on two planes (see `asynccoll.algorithms.steps`). Where they are separate memory (sums of half types, kept
in float32), the schedule runs over slabs, so that the extra memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from asynccoll.algorithms import registry
from asynccoll.algorithms.start import graph
from asynccoll.algorithms.steps import Finish, Operand, Recv, Send, Step
from asynccoll.buffers import Flat, flat_bytes
from asynccoll.engine.outbox import LEAST, SEGMENT, passed_on
from asynccoll.engine.transfers import FoldBytes, Program, RecvBytes, SendBytes, Swap, Transfer
from asynccoll.engine.wire import MAX_BLOCK
from asynccoll.errors import ProtocolError
from asynccoll.reduction import Arithmetic

__all__ = [
    "SLAB_BYTES",
    "Part",
    "Share",
    "Tell",
    "Turns",
    "allreduce",
    "allreduce_parts",
    "allreduce_stream",
    "run_steps",
    "segment_length",
    "sources",
    "steps_of",
    "swap",
    "swap_turns",
    "whole_elements",
]

Share: TypeAlias = tuple[str, Arithmetic, int]
"""Algorithm, arithmetic and number of elements of a part."""

Tell: TypeAlias = Callable[[int, int], None]
"""Is told of elements ``[lo, hi)`` once they are final: each exactly once. It may not start operations."""

SLAB_BYTES: Final = 1 << 22
"""Bytes of a slab on the partial plane where that is separate memory: a slab is converted in one go, in about 2 ms."""
_MAX_SEGMENTS: Final = 64
"""Segments of a chunk of the ring, each of at least `SEGMENT`: more would only make the schedule of a huge array long."""
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

    @property
    def share(self) -> Share:
        """What `sources` needs to know of it."""
        return self.algorithm, self.arithmetic, len(self.storage)


@lru_cache(maxsize=128)
def steps_of(
    algorithm: str, rank: int, size: int, count: int, itemsize: int, verb: str = "allreduce"
) -> tuple[Step, ...]:
    """The steps of ``verb`` over ``count`` elements of ``itemsize`` bytes, as a tuple (cached: a trainer repeats itself)."""
    schedule = registry.schedule(verb, algorithm)
    early = verb == "allreduce_stream"
    return tuple(schedule(rank, size, count, segment_length(algorithm, size, count, itemsize, early=early)))


def segment_length(algorithm: str, size: int, count: int, itemsize: int, *, early: bool = False) -> int:
    """Elements that a schedule moves at a time. ``early``: its first results are to come soon."""
    if algorithm == "doubling":
        return max(1, _SNAPSHOT_BYTES // itemsize)
    frame = max(1, SEGMENT // itemsize)
    if algorithm == "ring":
        # Of waves the first results are there after `size` segments.
        least = max(1, LEAST // itemsize) if early else frame
        return max(least, count // (size * _MAX_SEGMENTS))
    return max(1, passed_on(count * itemsize) // itemsize)


def _slab_length(arithmetic: Arithmetic, count: int) -> int:
    """Elements per run of the schedule: all of them, unless the partial plane is separate memory."""
    if not arithmetic.separate:
        return max(1, count)
    return max(1, SLAB_BYTES // arithmetic.partial.itemsize)


def sources(shares: Iterable[Share], rank: int, size: int) -> Mapping[int, int] | None:
    """Rank -> bytes to come, if all bytes come from one rank: they always have a place once the operation runs."""
    total = 0
    peers: set[int] = set()
    for algorithm, arithmetic, count in shares:
        partial, final = arithmetic.partial.itemsize, arithmetic.storage.itemsize
        slab = _slab_length(arithmetic, count)
        for lo in range(0, count, slab):
            for step in steps_of(algorithm, rank, size, min(slab, count - lo), partial):
                if type(step) is Recv:
                    peers.add(step.peer)
                    total += (step.hi - step.lo) * (final if step.combine is None else partial)
    return {peers.pop(): total} if len(peers) == 1 else None


def _run(
    part: Part, rank: int, size: int, verb: str = "allreduce", tell: Tell | None = None
) -> Iterator[Transfer]:
    """The transfers of one part, and its arithmetic between them."""
    arithmetic, final = part.arithmetic, part.storage
    if arithmetic.separate or not len(final):
        return _slabs(part, rank, size, verb, tell)
    partial = arithmetic.plane(final)
    arithmetic.load(final, partial)
    steps = steps_of(part.algorithm, rank, size, len(final), final.itemsize, verb)
    return run_steps(steps, arithmetic, partial, final, size, tell)


def _slabs(part: Part, rank: int, size: int, verb: str, tell: Tell | None) -> Iterator[Transfer]:
    """A slab at a time, so that the partial plane needs little memory of its own."""
    arithmetic, storage = part.arithmetic, part.storage
    count, itemsize = len(storage), arithmetic.partial.itemsize
    slab = _slab_length(arithmetic, count)
    partial = np.empty(min(slab, count), arithmetic.partial)
    for lo in range(0, count, slab):
        final = storage[lo : lo + slab]
        working = partial[: len(final)]
        arithmetic.load(final, working)
        steps = steps_of(part.algorithm, rank, size, len(final), itemsize, verb)
        yield from run_steps(steps, arithmetic, working, final, size, tell, lo)


def run_steps(
    steps: Iterable[Step],
    arithmetic: Arithmetic,
    partial: Flat,
    final: Flat,
    size: int,
    tell: Tell | None = None,
    base: int = 0,
) -> Iterator[Transfer]:
    """The transfers of ``steps`` over two planes, which hold loaded values, and the arithmetic between them.

    ``tell`` is told what has become final; the planes' first element is element ``base`` there.
    """
    final_bytes = flat_bytes(final)
    partial_bytes = flat_bytes(partial) if arithmetic.separate else final_bytes
    wide, narrow = partial.itemsize, final.itemsize
    for step in steps:
        if type(step) is Send:
            peer, lo, hi, is_final, snapshot = step
            if is_final:
                yield SendBytes(peer, final_bytes[lo * narrow : hi * narrow], snapshot)
            else:
                yield SendBytes(peer, partial_bytes[lo * wide : hi * wide], snapshot)
        elif type(step) is Recv:
            peer, lo, hi, combine = step
            if combine is None:
                yield RecvBytes(peer, final_bytes[lo * narrow : hi * narrow])
                if tell is not None:
                    tell(base + lo, base + hi)
            else:
                yield FoldBytes(peer, (hi - lo) * wide, _folder(arithmetic, partial[lo:hi], combine))
        else:
            lo, hi = step
            arithmetic.finish(partial[lo:hi], final[lo:hi], size)
            if tell is not None:
                tell(base + lo, base + hi)


def whole_elements(piece: memoryview, dtype: np.dtype[Any]) -> Flat:
    """A piece that came as the elements in it. `ProtocolError` if it ends within one: peers cut between elements."""
    try:
        return np.frombuffer(piece, dtype)
    except ValueError as error:
        raise ProtocolError(f"{len(piece)} bytes came, which are no whole elements of {dtype}") from error


def _folder(arithmetic: Arithmetic, mine: Flat, operand: str) -> Callable[[int, memoryview], None]:
    combine = arithmetic.combine_lower if operand == "lower" else arithmetic.combine_higher
    dtype, whole = mine.dtype, mine.nbytes

    def fold(offset: int, piece: memoryview) -> None:
        incoming = whole_elements(piece, dtype)
        if len(piece) == whole:
            combine(mine, incoming)
        else:
            lo = offset // dtype.itemsize
            combine(mine[lo : lo + len(incoming)], incoming)

    return fold


class Turns(NamedTuple):
    """One rank's part in a swap."""

    operands: tuple[Operand | None, ...]
    """What becomes of the block of each peer heard, in their order: combined as this operand, or (None) taken as it is."""
    closes: bool
    """The rank tells the outcome after it has heard all."""


def swap_turns(algorithm: str, rank: int, size: int, count: int, itemsize: int) -> Turns | None:
    """The part of ``rank`` in a swap that does what the schedule does; None if the schedule, on any rank, is not of that kind.

    It is if it moves the whole of a small array along the START graph and nowhere else, so that what is proved of it holds. Where
    it finishes values at one rank and sends them on, a swap sends them as they are and finishes them everywhere: the same bits.
    """
    if size == 1 or not 0 < count * itemsize <= MAX_BLOCK:
        return None
    every = _all_turns(algorithm, size, count, itemsize)
    return None if every is None else every[rank]


@lru_cache(maxsize=128)
def _all_turns(algorithm: str, size: int, count: int, itemsize: int) -> tuple[Turns, ...] | None:
    found = []
    for rank in range(size):
        steps = steps_of(algorithm, rank, size, count, itemsize)
        tells, hears = graph(rank, size)
        moves = [(type(step), step.peer) for step in steps if type(step) is not Finish]
        if moves != _moves(tells, hears) or any((step.lo, step.hi) != (0, count) for step in steps):
            return None
        operands = tuple(step.combine for step in steps if type(step) is Recv)
        found.append(Turns(operands, closes=bool(tells[-1])))
    return tuple(found)


def _moves(tells: Sequence[Sequence[int]], hears: Sequence[int]) -> list[tuple[type[Step], int]]:
    """What a rank of the START graph sends and receives, in order."""
    moves: list[tuple[type[Step], int]] = []
    for peers, source in zip_longest(tells, hears):
        moves += ((Send, peer) for peer in peers)
        if source is not None:
            moves.append((Recv, source))
    return moves


def swap(part: Part, turns: Turns, size: int, result: Callable[[], Any]) -> Swap:
    """Reduce one small part in swaps along the START graph; ``turns`` are the `swap_turns` of its schedule."""
    arithmetic, final = part.arithmetic, part.storage
    partial = arithmetic.plane(final)
    arithmetic.load(final, partial)
    block, dtype = flat_bytes(partial), partial.dtype
    for operand in turns.operands:
        incoming = np.frombuffer((yield block), dtype)
        if operand == "higher":
            arithmetic.combine_higher(partial, incoming)
        elif operand == "lower":
            arithmetic.combine_lower(partial, incoming)
        else:
            partial[...] = incoming
    if turns.closes:
        yield block
    arithmetic.finish(partial, final, size)
    return result()


def allreduce(part: Part, rank: int, size: int, result: Callable[[], Any]) -> Program:
    """Reduce one part over all ranks; the operation's result is what ``result()`` gives at the end."""
    yield from _run(part, rank, size)
    return result()


def allreduce_stream(part: Part, rank: int, size: int, result: Callable[[], Any], tell: Tell) -> Program:
    """`allreduce` of one part, by schedules that finish some of it early; ``tell`` is told what has become final."""
    yield from _run(part, rank, size, "allreduce_stream", tell)
    return result()


def allreduce_parts(parts: Sequence[Part], rank: int, size: int, result: Callable[[], Any]) -> Program:
    """Reduce several parts, one after the other, as one operation."""
    for part in parts:
        yield from _run(part, rank, size)
    return result()
