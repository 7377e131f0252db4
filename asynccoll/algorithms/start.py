"""The graph of the START round: who tells whom, until each rank has heard of all. Knows ranks, not records.

It depends on the group alone. Two shapes::

    3 or 4 ranks: linear                  2 ranks, or more than 4: dissemination
      1, 2, 3 tell 0,                       ceil(log2 size) rounds, in each of which every rank tells one
      0 tells 1, 2, 3                       and hears one (`asynccoll.algorithms.dissemination`)
      2 (size - 1) messages, 2 hops         size ceil(log2 size) messages, ceil(log2 size) hops

Both tell as much. Up to 4 ranks linear takes no more hops and fewer messages, and messages are what a round costs
where ranks share processors; beyond, rank 0 would be busy for longer than the hops take.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asynccoll.algorithms.dissemination import partners

__all__ = ["Graph", "graph"]

LINEAR: Final = 4
"""Largest group whose START round is linear."""


class Graph(NamedTuple):
    """One rank's part in the START round."""

    tells: tuple[tuple[int, ...], ...]
    """Whom the rank tells what it knows when it has heard i peers; one entry more than it has peers to hear."""
    hears: tuple[int, ...]
    """From whom it hears, in this order; each once."""


def graph(rank: int, size: int) -> Graph:
    """The part of ``rank`` in a group of ``size``."""
    if 2 < size <= LINEAR:
        others = tuple(range(1, size))
        return Graph(((0,), ()), (0,)) if rank else Graph((*((),) * len(others), others), others)
    pairs = partners(rank, size)
    return Graph((*((to,) for to, _ in pairs), ()), tuple(source for _, source in pairs))
