"""Who hears from whom in ceil(log2 size) rounds, and an allgather over that graph. Knows ranks, not bytes.

::

    size a power of two: hypercube            any other size: dissemination
    round 0   0-1  2-3  4-5  6-7              round 0   r -> r + 1
    round 1   0-2  1-3  4-6  5-7              round 1   r -> r + 2      (modulo size)
    round 2   0-4  1-5  2-6  3-7              round 2   r -> r + 4

A rank that forwards in each round what it has heard so far has heard from everybody at the end: most START
rounds take this graph (`asynccoll.algorithms.start`). In the hypercube both directions of a round share one link,
and one write with the first data frame of `doubling`.

The allgather sends in round k the blocks a rank holds: in the hypercube the aligned group of 2^k blocks
around it, else the 2^k blocks that end with its own, less what the receiver has already. A group that
passes the last block is two sends.

Communication steps: ceil(log2 size).

Bytes on the wire: each rank receives each block of the others once, size - 1 in all, and sends as many.

D. Hensgen, R. Finkel, U. Manber: Two algorithms for barrier synchronization. International Journal of
Parallel Programming 17 (1), 1988. doi:10.1007/BF01379320

J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: Efficient algorithms for all-to-all communications
in multiport message-passing systems. IEEE Transactions on Parallel and Distributed Systems 8 (11), 1997.
doi:10.1109/71.642949
"""

from __future__ import annotations

from collections.abc import Iterator

from asynccoll.algorithms.steps import Recv, Schedule, Send

__all__ = ["allgather", "partners"]


def partners(rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """``(send_to, recv_from)`` in each of ``rank``'s ceil(log2 size) rounds; empty in a world of one."""
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    if _is_cube(size):
        return tuple((rank ^ distance, rank ^ distance) for distance in distances)
    return tuple(((rank + distance) % size, (rank - distance) % size) for distance in distances)


def allgather(rank: int, size: int) -> Schedule:
    """Steps of ``rank`` over block numbers, on the final plane: block i starts at rank i and ends everywhere."""
    for bit, (send_to, recv_from) in enumerate(partners(rank, size)):
        for lo, hi in _group(rank, size, 1 << bit):
            yield Send(send_to, lo, hi, final=True)
        for lo, hi in _group(recv_from, size, 1 << bit):
            yield Recv(recv_from, lo, hi)


def _is_cube(size: int) -> bool:
    return size & (size - 1) == 0


def _group(sender: int, size: int, distance: int) -> Iterator[tuple[int, int]]:
    """Ranges of the blocks that ``sender`` passes on over ``distance``: one, or two where they wrap."""
    length = min(distance, size - distance)
    first = sender & -distance if _is_cube(size) else (sender - length + 1) % size
    yield first, min(first + length, size)
    if first + length > size:
        yield 0, first + length - size
