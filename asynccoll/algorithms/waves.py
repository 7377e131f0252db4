"""Ring allreduce whose results come early: a slice of every chunk at a time. Knows chunks and neighbours, not dtypes or links.

The chunks, the owners and the order of operands are those of `asynccoll.algorithms.ring`, so each element has the same
bits. What differs is the order of the work: `ring` takes one hop with whole chunks, and then the next, so that results
come in its second half only. Here segment s of every chunk follows segment s - 1 as one wave follows another::

    size 3, hops 0 to 4         turn  0    1    2    3    4    5
    (2: `Finish`; 3 and 4       hop 0 s0   s1   s2   s3
    take results)               hop 1      s0   s1   s2   s3
                                hop 2           s0   s1   s2   s3
                                hop 3                s0   s1   s2   ...
                                hop 4                     s0   s1   ...

In a turn a rank handles one segment at each hop. What it receives in turn t its left neighbour has sent in turn t - 1, so
there is one turn of slack everywhere, and the first results are there after ``size`` turns, however many follow.

A segment sent as a partial comes back as a result only after it has gone round the whole ring, as in `ring`: no
snapshot is needed.

Communication steps: 2 (size - 1) for the first segments; each further segment of a chunk adds one turn.

Bytes on the wire: those of the ring, 2 n (size - 1) / size from each rank, in another order.
"""

from __future__ import annotations

from asynccoll.algorithms.ring import chunk
from asynccoll.algorithms.steps import Finish, Recv, Schedule, Send

__all__ = ["allreduce"]


def allreduce(rank: int, size: int, count: int, segment: int) -> Schedule:
    """Steps of ``rank``, ``segment`` elements of each chunk at a time. Empty segments make no steps."""
    left, right = (rank - 1) % size, (rank + 1) % size
    last = 2 * (size - 1)
    bounds = [chunk((rank - 1 - hop) % size, size, count) for hop in range(last + 1)]
    longest = chunk(0, size, count)[1]
    segments = (longest + segment - 1) // segment
    for turn in range(segments + last):
        for hop in range(max(0, turn - segments + 1), min(turn, last) + 1):
            lo, hi = bounds[hop]
            start = lo + (turn - hop) * segment
            stop = min(start + segment, hi)
            if start >= stop:
                continue
            if hop:
                yield Recv(left, start, stop, combine="lower" if hop < size else None)
            if hop == size - 1:
                yield Finish(start, stop)
            if hop < last:
                yield Send(right, start, stop, final=hop >= size - 1)
