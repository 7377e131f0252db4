"""Recursive doubling allreduce for small arrays. Knows ranks and slabs, not dtypes, ops or links.

::

    size 6 = core of 4 + 2 extras

    rank       0      1      2      3      4      5
    fold       0 <--- 1      2 <--- 3                    the odd rank's operand to the even one
    holds    [0,1]         [2,3]          [4]    [5]     core places 0 to 3
    round 0    0 <---------> 2             4 <--> 5      places that differ in bit 0 exchange
    holds    [0-3]         [0-3]         [4,5]  [4,5]
    round 1    0 <-----------------------> 4             places that differ in bit 1 exchange
                             2 <----------------> 5
    finish     *             *             *      *      every core rank for itself
    unfold     0 ---> 1      2 ---> 3                    the result back to the odd rank

After round k a rank holds the block of 2^(k+1) core places around it. Pairs are adjacent, so every block is
contiguous in rank order and the two that meet are neighbours: the operand order is (lower block, higher
block) on both sides, and both compute the same bits. Since several ranks compute each element, operations
whose rounding differs between libraries (complex product) must not come here.

Both sides of a round send what they are about to overwrite: those sends are snapshots. A round's peer is
that of `dissemination.partners` where the size is a power of two.

Communication steps for one slab: log2 size for powers of two, else at most floor(log2 size) + 2; slabs
follow one another.

Bytes on the wire: n floor(log2 size) from each core rank, n from each folded one and to it.

R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH.
International Journal of High Performance Computing Applications 19 (1), 2005. doi:10.1177/1094342005051521
"""

from __future__ import annotations

from asynccoll.algorithms.steps import Finish, Recv, Schedule, Send

__all__ = ["allreduce"]


def allreduce(rank: int, size: int, count: int, slab: int) -> Schedule:
    """Steps of ``rank``, ``slab`` elements at a time: one slab is complete before the next begins."""
    rounds = size.bit_length() - 1
    extras = size - (1 << rounds)
    paired = rank < 2 * extras
    place = rank // 2 if paired else rank - extras
    for lo in range(0, count, slab):
        hi = min(lo + slab, count)
        if paired and rank % 2:
            yield Send(rank - 1, lo, hi)
            yield Recv(rank - 1, lo, hi)
            continue
        if paired:
            yield Recv(rank + 1, lo, hi, combine="higher")
        for bit in range(rounds):
            other = place ^ (1 << bit)
            peer = 2 * other if other < extras else other + extras
            yield Send(peer, lo, hi, snapshot=True)
            yield Recv(peer, lo, hi, combine="lower" if other < place else "higher")
        yield Finish(lo, hi)
        if paired:
            yield Send(rank + 1, lo, hi, final=True)
