"""Binomial trees: allreduce, broadcast, reduce, reduce-scatter. Knows ranks, segments and one tree, not dtypes, ops or links.

::

    size 8, root 0            0                  a child's subtree is the block of ranks from the child up to
                      .-------+---+---.          its next sibling: with its own operand first and then its
                      4       2       1          children from the smallest up, every partial of a rank is a
                  .---+---.   |                  contiguous block, and what comes in is the right operand
                  6       5   3
                  |
                  7

Reductions always use the tree of rank 0, since only there blocks are contiguous in rank order; `reduce` to
another root costs one hop more, and so does handing out the parts of a `reduce_scatter`. Broadcast rotates the
ranks so that the root becomes 0. Each element is computed once, at one rank.

Large arrays go through in segments. Rank 0 sends a segment down as soon as it is complete. Every other rank
takes segment s off the way down only after it has put segment s + `_lag` on the way up, so both ways are
full at once and no rank runs further ahead than that. Segments are disjoint, and a segment comes down only
after its partial has been consumed on the way up: no snapshot is needed.

Communication steps for one segment: allreduce 2 ceil(log2 size), broadcast ceil(log2 size), reduce
ceil(log2 size) and one more where the root is not 0. Each further segment adds the time of one segment at
the busiest rank.

Bytes on the wire: allreduce 2 n (size - 1) in total; broadcast and reduce n (size - 1), reduce n more where the
root is not 0, reduce_scatter n more. The root's own links carry up to n ceil(log2 size) each way.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH.
International Journal of High Performance Computing Applications 19 (1), 2005. doi:10.1177/1094342005051521
"""

from __future__ import annotations

from collections.abc import Sequence

from asynccoll.algorithms.binomial import family
from asynccoll.algorithms.steps import Finish, Recv, Schedule, Send

__all__ = ["allreduce", "broadcast", "reduce", "reduce_scatter"]


def allreduce(rank: int, size: int, count: int, segment: int) -> Schedule:
    """Steps of ``rank``: up to rank 0, `Finish` there, and down, ``segment`` elements at a time."""
    lag = 0 if rank == 0 else _lag(size)
    spans = _spans(count, segment)
    for turn in range(len(spans) + lag):
        if turn < len(spans):
            yield from _up(rank, size, *spans[turn])
        if turn >= lag:
            yield from _down(rank, size, 0, *spans[turn - lag])


def broadcast(rank: int, size: int, root: int, count: int, segment: int) -> Schedule:
    """Steps of ``rank`` on the final plane, from ``root`` down, ``segment`` elements at a time."""
    for lo, hi in _spans(count, segment):
        yield from _down(rank, size, root, lo, hi)


def reduce(rank: int, size: int, root: int, count: int, segment: int) -> Schedule:
    """Steps of ``rank``: up to rank 0, `Finish` there, the result on to ``root``; ``segment`` elements at a time."""
    waits = root != 0 and rank == root
    lag = _lag(size) if waits else 0
    spans = _spans(count, segment)
    for turn in range(len(spans) + lag):
        if turn < len(spans):
            lo, hi = spans[turn]
            yield from _up(rank, size, lo, hi)
            if root != 0 and rank == 0:
                yield Send(root, lo, hi, final=True)
        if waits and turn >= lag:
            lo, hi = spans[turn - lag]
            yield Recv(0, lo, hi)


def reduce_scatter(rank: int, size: int, parts: Sequence[tuple[int, int]], segment: int) -> Schedule:
    """Steps of ``rank``: up to rank 0, `Finish` there, and every rank r gets its ``parts[r]`` from there."""
    for span in _spans(parts[-1][1], segment):
        yield from _up(rank, size, *span)
    for peer, (lo, hi) in enumerate(parts):
        if peer and lo < hi and rank in (0, peer):
            yield Recv(0, lo, hi) if rank else Send(peer, lo, hi, final=True)


def _spans(count: int, segment: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + segment, count)) for lo in range(0, count, segment)]


def _lag(size: int) -> int:
    """Segments that a rank puts on the way up before it takes one down: one for each hop to rank 0 and back."""
    return 2 * (size - 1).bit_length()


def _up(rank: int, size: int, lo: int, hi: int) -> Schedule:
    parent, children = family(rank, size, 0)
    for child in sorted(children):
        yield Recv(child, lo, hi, combine="higher")
    yield Finish(lo, hi) if parent is None else Send(parent, lo, hi)


def _down(rank: int, size: int, root: int, lo: int, hi: int) -> Schedule:
    parent, children = family(rank, size, root)
    if parent is not None:
        yield Recv(parent, lo, hi)
    for child in children:
        yield Send(child, lo, hi, final=True)
