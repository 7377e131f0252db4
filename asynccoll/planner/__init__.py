"""Who is which rank, where it runs, in which order and with which algorithm: plans as values. Knows no links, clocks or processes.

`RankPlan` numbers roles, `ProcessRanks` numbers them as BigGraph does, `Topology` says which rank is where and how fast its links
are. `ring_order` and `choose` are functions of a topology alone. Everything is immutable and travels as JSON.
"""

from __future__ import annotations

from asynccoll.planner.biggraph import ProcessRanks
from asynccoll.planner.choosing import choose, estimate
from asynccoll.planner.ranks import RankPlan
from asynccoll.planner.rings import RingCost, ring_cost, ring_order
from asynccoll.planner.topology import Link, Topology

__all__ = [
    "Link",
    "ProcessRanks",
    "RankPlan",
    "RingCost",
    "Topology",
    "choose",
    "estimate",
    "ring_cost",
    "ring_order",
]
