"""Programs that reduce to one rank, or to parts of an array: partial values leave and nothing comes back. Know no frames.

Where the planes are separate memory, a schedule runs over slabs (see `asynccoll.engine.programs.reductions`). An allreduce
has a slab's results only after all its partial values were consumed, so one plane does for all slabs. Here a rank may be done
while its partial values are still on their way: two planes take turns, and before one is used again, every rank that reads
from it has said, with one byte, that it is through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from asynccoll.algorithms import registry
from asynccoll.algorithms.ring import chunk
from asynccoll.algorithms.steps import Recv, Send, Step
from asynccoll.buffers import Flat
from asynccoll.engine.programs import reductions
from asynccoll.engine.programs.reductions import Part, run_steps, segment_length
from asynccoll.engine.transfers import Program, RecvBytes, SendBytes, Transfer
from asynccoll.reduction import Arithmetic

__all__ = [
    "Extent",
    "Slab",
    "acknowledge",
    "await_readers",
    "reduce",
    "reduce_scatter",
    "slab_spans",
    "slabs_of",
    "source",
]

Extent: TypeAlias = int | tuple[int, ...]
"""What a verb runs over: a number of elements, or for reduce_scatter the number of each rank's part."""


class Slab(NamedTuple):
    """A range of the storage, and one rank's steps over it."""

    lo: int
    hi: int
    steps: tuple[Step, ...]
    """Their element numbers count from ``lo``."""


def slab_spans(count: int, itemsize: int) -> list[tuple[int, int]]:
    """Even ranges of at most half of `reductions.SLAB_BYTES`, since two planes take turns; at least one."""
    slabs = max(1, -(-count * itemsize // max(itemsize, reductions.SLAB_BYTES // 2)))
    return [chunk(index, slabs, count) for index in range(slabs)]


def await_readers(peers: Iterable[int]) -> Iterator[Transfer]:
    """Wait until each of ``peers`` is through with what it was sent from a plane."""
    for peer in peers:
        yield RecvBytes(peer, memoryview(bytearray(1)))


def acknowledge(peers: Iterable[int]) -> Iterator[Transfer]:
    """Tell each of ``peers`` that what it sent from its plane has been consumed."""
    for peer in peers:
        yield SendBytes(peer, b"\0")


@lru_cache(maxsize=128)
def _steps_of(
    verb: str, algorithm: str, rank: int, size: int, root: int | None, extent: Extent, itemsize: int
) -> tuple[Step, ...]:
    """Cached, since a trainer repeats itself."""
    schedule = registry.schedule(verb, algorithm)
    if isinstance(extent, int):
        unit = segment_length(algorithm, size, extent, itemsize)
        return tuple(schedule(rank, size, root, extent, unit))
    unit = segment_length(algorithm, size, sum(extent), itemsize)
    return tuple(schedule(rank, size, tuple(pairwise(accumulate(extent, initial=0))), unit))


def slabs_of(
    verb: str, algorithm: str, arithmetic: Arithmetic, rank: int, size: int, root: int | None, extent: Extent
) -> list[Slab]:
    """The slabs of a call: a single one, unless the partial plane is separate memory and the array large."""
    itemsize = arithmetic.partial.itemsize
    count = extent if isinstance(extent, int) else sum(extent)
    slabs = len(slab_spans(count, itemsize)) if arithmetic.separate else 1
    found: list[Slab] = []
    lo = 0
    for index in range(slabs):
        share: Extent = (
            _length(index, slabs, extent)
            if isinstance(extent, int)
            else tuple(_length(index, slabs, part) for part in extent)
        )
        hi = lo + (share if isinstance(share, int) else sum(share))
        found.append(Slab(lo, hi, _steps_of(verb, algorithm, rank, size, root, share, itemsize)))
        lo = hi
    return found


def _length(index: int, parts: int, count: int) -> int:
    lo, hi = chunk(index, parts, count)
    return hi - lo


def source(slabs: Sequence[Slab], arithmetic: Arithmetic) -> Mapping[int, int] | None:
    """Rank -> bytes to come, if all bytes come from one rank: they always have a place once the operation runs."""
    if len(slabs) > 1:
        return None  # the readers' bytes come from elsewhere
    partial, final = arithmetic.partial.itemsize, arithmetic.storage.itemsize
    found: dict[int, int] = {}
    for step in slabs[0].steps:
        if type(step) is Recv:
            nbytes = (step.hi - step.lo) * (final if step.combine is None else partial)
            found[step.peer] = found.get(step.peer, 0) + nbytes
    return found if len(found) == 1 else None


def _run(part: Part, slabs: Sequence[Slab], size: int) -> Iterator[Transfer]:
    arithmetic, storage = part.arithmetic, part.storage
    if not arithmetic.separate:
        partial = arithmetic.plane(storage)
        arithmetic.load(storage, partial)
        yield from run_steps(slabs[0].steps, arithmetic, partial, storage, size)
        return
    longest = max(slab.hi - slab.lo for slab in slabs)
    planes = [np.empty(longest, arithmetic.partial) for _ in slabs[:2]]
    unread = _Acknowledgements()
    for number, (lo, hi, steps) in enumerate(slabs):
        for peer in unread.readers():
            yield from unread.read(peer, number - 2)
        final, working = storage[lo:hi], planes[number % 2][: hi - lo]
        arithmetic.load(final, working)
        for transfer in run_steps(steps, arithmetic, working, final, size):
            if type(transfer) is not SendBytes:
                yield from unread.read(transfer.peer, number - 1)
            yield transfer
        if number + 2 < len(slabs):
            yield from acknowledge(_writers(steps))
            unread.expect(_readers(steps), number)


class _Acknowledgements:
    """Those that readers have yet to send, or that have yet to be read.

    A reader may send values as well, and both are one stream: it acknowledges a slab before its values of the next one.
    """

    def __init__(self) -> None:
        self._slabs: dict[int, list[int]] = {}
        """Reader -> numbers of the slabs, in order."""

    def readers(self) -> list[int]:
        return list(self._slabs)

    def expect(self, readers: Iterable[int], slab: int) -> None:
        for peer in readers:
            self._slabs.setdefault(peer, []).append(slab)

    def read(self, peer: int, last: int) -> Iterator[Transfer]:
        """Take in what ``peer`` says of the slabs up to ``last``."""
        slabs = self._slabs.get(peer, [])
        while slabs and slabs[0] <= last:
            del slabs[0]
            yield from await_readers([peer])


def _readers(steps: Iterable[Step]) -> list[int]:
    """Ranks that read from this rank's partial plane."""
    return sorted({step.peer for step in steps if type(step) is Send and not step.final})


def _writers(steps: Iterable[Step]) -> list[int]:
    """Ranks from whose partial planes this rank reads."""
    return sorted({step.peer for step in steps if type(step) is Recv and step.combine is not None})


def reduce(part: Part, slabs: Sequence[Slab], size: int, result: Callable[[], Any]) -> Program:
    """Reduce the whole of ``part``; on the rank that the steps name as root the result ends in its storage."""
    yield from _run(part, slabs, size)
    return result()


def reduce_scatter(
    part: Part,
    slabs: Sequence[Slab],
    extent: tuple[int, ...],
    rank: int,
    size: int,
    own: Flat,
    result: Callable[[], Any],
) -> Program:
    """Reduce ``part``, whose storage is private, and put this rank's part of the result into ``own``.

    ``extent``: number of elements of each rank's part, in the order in which they lie in the storage.
    """
    if len(slabs) > 1:
        part = Part(_arranged(part.storage, len(slabs), extent), part.arithmetic, part.algorithm)
    yield from _run(part, slabs, size)
    at = 0
    for index, slab in enumerate(slabs):
        lo = slab.lo + sum(_length(index, len(slabs), length) for length in extent[:rank])
        length = _length(index, len(slabs), extent[rank])
        own[at : at + length] = part.storage[lo : lo + length]
        at += length
    return result()


def _arranged(storage: Flat, slabs: int, extent: tuple[int, ...]) -> Flat:
    """The same elements slab by slab: each holds a piece of each part."""
    spans = list(pairwise(accumulate(extent, initial=0)))
    pieces = []
    for index in range(slabs):
        for lo, hi in spans:
            start, stop = chunk(index, slabs, hi - lo)
            pieces.append(storage[lo + start : lo + stop])
    return np.concatenate(pieces)
