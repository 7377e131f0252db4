"""Linear allreduce for small arrays on few ranks. Knows ranks and segments, not dtypes, ops or links.

::

    size 4     1 --.         .--> 1
               2 ---+-> 0 --+---> 2
               3 --'         '--> 3

Every rank sends its values to rank 0, which combines them in rank order and sends the result to all. Fewest
messages, two hops, and each element is computed once, at one rank; but everything goes over the links of rank 0,
which takes its peers one after the other. The messages are those of the START round of few ranks
(`asynccoll.algorithms.start`), so small values travel with it.

Large arrays go through in segments. A rank takes segment s off the way back after it has sent segment s + 1.

Communication steps for one segment: 2. Each further segment adds the time of one segment at rank 0.

Bytes on the wire: 2 n (size - 1) in total, all of them over the links of rank 0.
"""

from __future__ import annotations

from asynccoll.algorithms.steps import Finish, Recv, Schedule, Send

__all__ = ["allreduce"]


def allreduce(rank: int, size: int, count: int, segment: int) -> Schedule:
    """Steps of ``rank``: to rank 0, `Finish` there, and back, ``segment`` elements at a time."""
    spans = [(lo, min(lo + segment, count)) for lo in range(0, count, segment)]
    if rank:
        for turn, span in enumerate(spans):
            yield Send(0, *span)
            if turn:
                yield Recv(0, *spans[turn - 1])
        if spans:
            yield Recv(0, *spans[-1])
        return
    for span in spans:
        for peer in range(1, size):
            yield Recv(peer, *span, combine="higher")
        yield Finish(*span)
        for peer in range(1, size):
            yield Send(peer, *span, final=True)
