"""Pairwise exchange: everybody meets everybody else once. Knows ranks and blocks, not bytes or links.

::

    size 6 (5 seats at a round table, and the last rank in the middle)

    round 0   1-4  2-3  0-5        in round k the ranks a and b of the table meet where a + b = k (modulo
    round 1   0-1  2-4  3-5        the seats); the one that would meet itself meets the last rank, or nobody
    round 2   0-2  3-4  1-5        where the size is odd
    ...

In each round every rank has one partner at most, and both send: no rank is sent to by two at once, as it would
be if all began with rank 0. A pair meets in one round, so its link carries one block each way.

Communication steps: size - 1, or size where it is odd (one of them idle).

Bytes on the wire: from each rank its blocks for the others, each once.

The schedule is that of a round-robin tournament: E. Lucas, Recreations mathematiques 2, 1883, "les promenades
du pensionnat". D. S. Scott: Efficient all-to-all communication patterns in hypercube and mesh topologies.
Distributed Memory Computing Conference, 1991. doi:10.1109/DMCC.1991.633174
"""

from __future__ import annotations

from asynccoll.algorithms.steps import Recv, Schedule, Send

__all__ = ["alltoall", "partners"]


def partners(rank: int, size: int) -> list[int | None]:
    """Whom ``rank`` meets in each round; None in a round that it sits out."""
    seats = size - 1 + size % 2
    last = size - 1
    met: list[int | None] = []
    for round_ in range(seats if size > 1 else 0):
        if rank == seats:  # in the middle: half of `round_`, modulo the seats
            met.append(round_ * ((seats + 1) // 2) % seats)
        elif (other := (round_ - rank) % seats) != rank:
            met.append(other)
        else:
            met.append(last if last == seats else None)
    return met


def alltoall(rank: int, size: int) -> Schedule:
    """Steps of ``rank`` on the final plane: block ``a * size + b`` starts at rank a and ends at rank b."""
    for peer in partners(rank, size):
        if peer is not None:
            there, back = rank * size + peer, peer * size + rank
            yield Send(peer, there, there + 1, final=True)
            yield Recv(peer, back, back + 1)
