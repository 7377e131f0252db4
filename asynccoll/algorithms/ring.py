"""Ring allreduce, its halves reduce-scatter and allgather, and reduce. Knows chunk numbers and neighbours, not dtypes or links.

Every rank sends to the rank on its right and receives from the rank on its left, all links at once::

    reduce-scatter, size 4: chunk c starts at rank c + 1, gathers one operand a hop, is complete at rank c

              rank 0      rank 1      rank 2      rank 3
    hop 0     c3 ->       c0 ->       c1 ->       c2 ->        one operand each
    hop 1     c2 ->       c3 ->       c0 ->       c1 ->        two
    hop 2     c1 ->       c2 ->       c3 ->       c0 ->        three
    holds     c0          c1          c2          c3           all four: `Finish`

    allgather: the same walk with finished chunks, starting from what each rank holds

A partial of chunk c is the block of ranks ``c + 1, c + 2, …`` taken cyclically, and a rank's own operand is
the next one. So what comes in is always the left operand, and chunk c is folded from rank c + 1 on: the same
on every rank, but not the same as a tree's. Each element is computed along one chain, never twice.

Within a hop a chunk moves in segments, each sent on as soon as it is folded or received. The bytes on a link and
their order are those of whole chunks.

A segment sent as a partial comes back as a result only after it has gone round the whole ring, so its
receiver has long consumed it when it is overwritten: no snapshot is needed.

`reduce` is the first half, after which every rank hands its finished chunk to the root. `reduce_scatter` is the
first half alone, over parts of any lengths instead of even chunks.

Communication steps: allreduce 2 (size - 1), reduce size, reduce_scatter and allgather size - 1.

Bytes on the wire: allreduce 2 n (size - 1) / size from each rank, which is the least possible; reduce_scatter
n less the rank's own part; reduce that and n / size more from all but the root; allgather: each rank passes on
every block but its right neighbour's.

P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. Journal of
Parallel and Distributed Computing 69 (2), 2009. doi:10.1016/j.jpdc.2008.09.002
"""

from __future__ import annotations

from collections.abc import Sequence

from asynccoll.algorithms.steps import Finish, Recv, Schedule, Send

__all__ = ["allgather", "allreduce", "chunk", "reduce", "reduce_scatter"]


def chunk(index: int, size: int, count: int) -> tuple[int, int]:
    """Bounds ``(lo, hi)`` of chunk ``index``: ``count`` elements in ``size`` parts as by `numpy.array_split`."""
    length, longer = divmod(count, size)
    lo = index * length + min(index, longer)
    return lo, lo + length + (index < longer)


def allreduce(rank: int, size: int, count: int, segment: int) -> Schedule:
    """Steps of ``rank``: reduce-scatter, `Finish` of its own chunk, allgather. Empty chunks make no steps.

    Chunks pass ``segment`` elements at a time: what has come in goes on at once, while the processor's caches hold it.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    last = 2 * (size - 1)
    for hop in range(last + 1):
        lo, hi = chunk((rank - 1 - hop) % size, size, count)
        for start in range(lo, hi, segment):
            stop = min(start + segment, hi)
            if hop:
                yield Recv(left, start, stop, combine="lower" if hop < size else None)
            if hop == size - 1:
                yield Finish(start, stop)
            if hop < last:
                yield Send(right, start, stop, final=hop >= size - 1)


def reduce_scatter(rank: int, size: int, parts: Sequence[tuple[int, int]], segment: int) -> Schedule:
    """Steps of ``rank``: ``parts[r]`` are the bounds of what rank r gets, one after the other. Empty parts make no steps."""
    left, right = (rank - 1) % size, (rank + 1) % size
    for hop in range(size):
        lo, hi = parts[(rank - 1 - hop) % size]
        for start in range(lo, hi, segment):
            stop = min(start + segment, hi)
            if hop:
                yield Recv(left, start, stop, combine="lower")
            yield Send(right, start, stop) if hop < size - 1 else Finish(start, stop)


def reduce(rank: int, size: int, root: int, count: int, segment: int) -> Schedule:
    """Steps of ``rank``: reduce-scatter over even chunks; then ``root`` receives each from the rank that has it."""
    yield from reduce_scatter(rank, size, [chunk(index, size, count) for index in range(size)], segment)
    for owner in range(size):
        lo, hi = chunk(owner, size, count)
        for start in range(lo, hi, segment) if root != owner and rank in (root, owner) else ():
            stop = min(start + segment, hi)
            yield Recv(owner, start, stop) if rank == root else Send(root, start, stop, final=True)


def allgather(rank: int, size: int) -> Schedule:
    """Steps of ``rank`` over block numbers, on the final plane: block i starts at rank i and ends everywhere."""
    left, right = (rank - 1) % size, (rank + 1) % size
    for hop in range(size - 1):
        block = (rank - hop) % size
        yield Send(right, block, block + 1, final=True)
        block = (rank - hop - 1) % size
        yield Recv(left, block, block + 1)
