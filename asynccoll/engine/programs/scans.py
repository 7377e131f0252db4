"""Scans of arrays: what the ranks before one hold, combined in rank order. Know planes and neighbours, no frames and no links.

A scan of rank r combines the operands of ranks 0 to r, an exscan those of ranks 0 to r - 1. Each rank keeps its block (the
operands of some ranks up to its own) on a partial plane of its own memory, since it is lent while the result is finished, and
in an exscan the block without its own operand as well. Every block is contiguous in rank order, and what comes in is always
the left operand. Each result is computed at one rank.

``chain``, size 4: the prefix goes from rank to rank, a segment at a time::

    rank       0            1            2            3
    segment 0  [0] ------>  [0,1] ---->  [0-2] ---->  [0-3]
    segment 1       [0] ------>  [0,1] ---->  [0-2] ---->  [0-3]

``doubling``, size 4: after the round of distance d a rank holds the operands of the 2 d ranks up to its own::

    rank       0            1            2            3
    d = 1      [0]          [0,1]        [1,2]        [2,3]        from rank - 1
    d = 2      [0]          [0,1]        [0-2]        [0-3]        from rank - 2

Communication steps for one segment: chain size - 1, each further segment adds the time of one; doubling ceil(log2 size).

Bytes on the wire: chain n from each rank but the last; doubling n for each distance that does not pass the last rank.

W. D. Hillis, G. L. Steele: Data parallel algorithms. Communications of the ACM 29 (12), 1986. doi:10.1145/7902.7903
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from asynccoll.buffers import Flat, flat_bytes
from asynccoll.engine.programs.one_way import acknowledge, await_readers, slab_spans
from asynccoll.engine.programs.reductions import Part, segment_length, whole_elements
from asynccoll.engine.transfers import FoldBytes, Program, SendBytes, Transfer
from asynccoll.reduction import Arithmetic

__all__ = ["scan", "source"]


def scan(part: Part, rank: int, size: int, exclusive: bool, result: Callable[[], Any]) -> Program:
    """Replace the storage of ``part`` by this rank's result. In an exscan rank 0 has none: its storage stays as it is."""
    run = _doubling if part.algorithm == "doubling" else _chain
    yield from run(part, rank, size, exclusive)
    return result()


def source(part: Part, rank: int) -> Mapping[int, int] | None:
    """Rank -> bytes to come, if all bytes come from one rank: they always have a place once the operation runs."""
    count, itemsize = len(part.storage), part.arithmetic.partial.itemsize
    if part.algorithm == "doubling" or rank == 0 or len(slab_spans(count, itemsize)) > 2:
        return None
    return {rank - 1: count * itemsize}


def _chain(part: Part, rank: int, size: int, exclusive: bool) -> Iterator[Transfer]:
    arithmetic, storage = part.arithmetic, part.storage
    itemsize = arithmetic.partial.itemsize
    slabs = slab_spans(len(storage), itemsize)
    segment = segment_length(part.algorithm, size, len(storage), itemsize)
    before, after = [rank - 1] if rank else [], [rank + 1] if rank + 1 < size else []
    planes = [np.empty(slabs[0][1], arithmetic.partial) for _ in slabs[:2]]
    for number, (low, high) in enumerate(slabs):
        if number >= 2:
            yield from await_readers(after)
        plane = planes[number % 2]
        for lo in range(low, high, segment):
            final = storage[lo : min(lo + segment, high)]
            block = _Block(arithmetic, final, plane[lo - low : lo - low + len(final)], exclusive)
            for peer in before:
                yield FoldBytes(peer, block.nbytes, block.fold)
            for peer in after:
                yield SendBytes(peer, block.memory)
            block.finish(rank)
        if number + 2 < len(slabs):
            yield from acknowledge(before)


def _doubling(part: Part, rank: int, size: int, exclusive: bool) -> Iterator[Transfer]:
    """A slab that is small enough to be copied at a time: one is complete before the next but one begins."""
    arithmetic, storage = part.arithmetic, part.storage
    count = len(storage)
    slab = segment_length("doubling", size, count, arithmetic.partial.itemsize)
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    before = [rank - distance for distance in distances if distance <= rank]
    after = [rank + distance for distance in distances if rank + distance < size]
    for lo in range(0, count, slab):
        if lo >= 2 * slab:
            yield from await_readers(after)
        final = storage[lo : lo + slab]
        block = _Block(arithmetic, final, np.empty(len(final), arithmetic.partial), exclusive)
        for distance in distances:
            if rank + distance < size:
                yield SendBytes(rank + distance, block.memory, snapshot=True)
            if rank >= distance:
                yield FoldBytes(rank - distance, block.nbytes, block.fold)
                block.first = False
        block.finish(rank)
        if lo + 2 * slab < count:
            yield from acknowledge(before)


class _Block:
    """The operands of the ranks up to one's own, in some elements; in an exscan also those without the own one."""

    __slots__ = ("_arithmetic", "_exclusive", "_final", "_others", "_own", "first", "memory", "nbytes")

    def __init__(self, arithmetic: Arithmetic, final: Flat, own: Flat, exclusive: bool) -> None:
        self._arithmetic = arithmetic
        self._exclusive = exclusive
        self._final = final
        """Holds the operand now and the result after `finish`."""
        self._own = own
        """Partial plane that is lent: the block that ends with this rank's own operand."""
        self._others = own
        """Partial plane that is not lent: the block without it, in an exscan; where it can be, the memory of `_final`."""
        self.first = True
        """Nothing has been folded in yet, so `_others` is unset."""
        self.memory = flat_bytes(own)
        self.nbytes: int = own.nbytes
        if arithmetic.separate:
            arithmetic.load(final, own)
        else:
            np.copyto(own, final.view(own.dtype))
            arithmetic.load(own.view(final.dtype), own)
        if exclusive:
            self._others = arithmetic.plane(final)

    def fold(self, offset: int, piece: memoryview) -> None:
        """Take in a piece of the block that ends just before this one."""
        incoming = whole_elements(piece, self._own.dtype)
        lo = offset // self._own.itemsize
        hi = lo + len(incoming)
        if self._exclusive and self.first:
            self._others[lo:hi] = incoming
        elif self._exclusive:
            self._arithmetic.combine_lower(self._others[lo:hi], incoming)
        self._arithmetic.combine_lower(self._own[lo:hi], incoming)

    def finish(self, rank: int) -> None:
        """Divide and round the block into the final plane. It holds all that it should."""
        arithmetic, final, exclusive = self._arithmetic, self._final, self._exclusive
        if exclusive and rank == 0:
            return
        complete = self._others
        if not arithmetic.separate and not exclusive:
            complete = arithmetic.plane(final)
            np.copyto(complete, self._own)
        arithmetic.finish(complete, final, rank if exclusive else rank + 1)
