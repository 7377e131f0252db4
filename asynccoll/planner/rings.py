"""In which order a ring visits the ranks. Knows links and their cost, not the algorithms that run on a ring.

Every rank of a ring sends to the next one, all at once, and nobody gets ahead of the slowest link for long. So a ring is as good as
its slowest link; of two that are alike there, the one with the smaller sum is better.

Costs are whole femtoseconds here: sums of integers do not depend on the order in which they are added, so that a ring costs the
same wherever it begins, and every interpreter finds the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final, NamedTuple, TypeAlias

from asynccoll.planner.given import integers, shown
from asynccoll.planner.topology import Topology, checked, checked_bytes

__all__ = ["EXACT", "SEGMENT", "RingCost", "ring_cost", "ring_order"]

SEGMENT: Final = 1 << 20
"""Bytes that a ring passes on at a time, unless told otherwise: a segment of `asynccoll.engine`."""
EXACT: Final = 10
"""Ranks up to which the best ring is found for sure, in at most 2^9 * 9^2 steps of a table."""

_SECOND: Final = 10**15
_TRIES: Final = 400_000
"""Changes that the search looks at before it takes what it has: about a second."""
_STARTS: Final = 16
"""Ranks from which the nearest neighbour is followed."""

_Costs: TypeAlias = list[list[int]]
_Score: TypeAlias = tuple[int, int]


class RingCost(NamedTuple):
    """What one round of a ring costs, in which each rank passes one segment on. Costs compare: the smaller is the better ring."""

    slowest: float
    """Seconds over the slowest link: the time of a round."""
    total: float
    """Seconds over all links, one after the other: the time of a segment that goes once around."""


def ring_cost(topology: Topology, order: Sequence[int], nbytes: int = SEGMENT) -> RingCost:
    """Cost of the ring that visits ``order`` and returns to its first rank, for segments of ``nbytes`` bytes.

    A ring of one rank costs nothing. Where nothing was measured, links cost what `Topology.link` assumes.

    Raises:
        ValueError: ``order`` is not a permutation of the topology's ranks, or ``nbytes`` is negative or above 2^80.
        TypeError: ``nbytes`` is not an integer, ``order`` no list of integers, or ``topology`` no `Topology`.
    """
    wanted = f"name each rank from 0 to {checked(topology).world_size - 1} once"
    order = integers(order, "order is", wanted)
    if sorted(order) != list(topology.ranks):
        raise ValueError(f"order is {shown(order)}; {wanted}")
    nbytes = checked_bytes(nbytes)
    edges = [_cost(topology, a, b, nbytes) for a, b in _around(order)] or [0]
    return RingCost(max(edges) / _SECOND, sum(edges) / _SECOND)


def ring_order(topology: Topology, nbytes: int = SEGMENT) -> tuple[int, ...]:
    """The order in which a ring should visit the ranks. It begins with rank 0, and is the same in every interpreter.

    With a matrix: the ring of the smallest `ring_cost` for segments of ``nbytes`` bytes. Up to `EXACT` ranks it is the best there
    is; of equal ones that which changes hosts least often, then the first in the order of the dictionary. Above, it is the best
    that was found from the rank order, the order by hosts and nearest neighbours, by turning pieces around and by moving
    short ones; it is never worse than the rank order or the order by hosts.

    Without a matrix: host by host, in the order of their lowest ranks, so that each host is entered and left once.

    `Communicator.split` makes a group of that order: ``await comm.split(0, order=ring.index(comm.rank))``.

    Raises:
        ValueError: ``nbytes`` is negative or above 2^80.
        TypeError: ``nbytes`` is not an integer, or ``topology`` no `Topology`.
    """
    nbytes = checked_bytes(nbytes)
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(checked(topology).hosts):
        hosts.setdefault(host, []).append(rank)
    by_host = tuple(rank for here in hosts.values() for rank in here)
    size = topology.world_size
    if not topology.measured or size < 3:
        return by_host
    costs = [[0 if a == b else _cost(topology, a, b, nbytes) for b in topology.ranks] for a in topology.ranks]
    # The last digits of a sum count the changes of host: there are at most `size`, so they decide between equal times only.
    weights = [
        [cost * (size + 1) + (topology.hosts[a] != topology.hosts[b]) for b, cost in enumerate(row)]
        for a, row in enumerate(costs)
    ]
    if size <= EXACT:
        return _best(costs, weights)
    return _good(costs, weights, [topology.ranks, by_host])


def _cost(topology: Topology, source: int, target: int, nbytes: int) -> int:
    return round(topology.link(source, target).seconds(nbytes) * _SECOND)


def _around(order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The links of a ring; none where there is one rank."""
    if len(order) > 1:
        yield from zip(order, [*order[1:], order[0]], strict=True)


def _best(costs: _Costs, weights: _Costs) -> tuple[int, ...]:
    """The best ring, by a table over sets of ranks: first the least slowest link, then the least sum without slower ones.

    In one go it would not be right: what is best for the rest of a way depends on how slow its beginning was.

    M. Held, R. M. Karp: A dynamic programming approach to sequencing problems. Journal of the Society for Industrial and Applied
    Mathematics 10 (1), 1962. doi:10.1137/0110015
    """
    size = len(costs)
    full = (1 << size) - 2  # sets of ranks yet to be visited; rank 0 never is
    others = range(1, size)
    slowest: dict[tuple[int, int], int] = {(0, last): costs[last][0] for last in others}
    for left in range(2, full + 1, 2):
        for last in (0,) if left == full else [rank for rank in others if not left >> rank & 1]:
            slowest[left, last] = min(
                max(costs[last][rank], slowest[left ^ (1 << rank), rank])
                for rank in others
                if left >> rank & 1
            )
    bound = slowest[full, 0]
    never = 1 + sum(map(sum, weights))
    least = {(0, last): weights[last][0] if costs[last][0] <= bound else never for last in others}
    following: dict[tuple[int, int], int] = {}
    for left in range(2, full + 1, 2):
        for last in (0,) if left == full else [rank for rank in others if not left >> rank & 1]:
            least[left, last], following[left, last] = min(
                (
                    (
                        weights[last][rank] + least[left ^ (1 << rank), rank]
                        if costs[last][rank] <= bound
                        else never
                    ),
                    rank,
                )
                for rank in others
                if left >> rank & 1
            )
    order, left = [0], full
    while left:
        order.append(following[left, order[-1]])
        left ^= 1 << order[-1]
    return tuple(order)


def _good(costs: _Costs, weights: _Costs, given: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The best ring that the search finds; never worse than those that are ``given``."""
    size = len(costs)
    starts = [list(order) for order in given]
    starts += [_nearest(weights, rank) for rank in range(0, size, -(-size // _STARTS))]
    starts.sort(key=lambda order: (_score(costs, weights, order), order))
    # Two beginnings that differ end in two valleys more often than not.
    found = [_improved(costs, weights, order, _TRIES // 2) for order in starts[:2]]
    best = min(found, key=lambda order: (_score(costs, weights, order), order))
    at = best.index(0)
    return tuple(best[at:] + best[:at])


def _score(costs: _Costs, weights: _Costs, order: Sequence[int]) -> _Score:
    return max(costs[a][b] for a, b in _around(order)), sum(weights[a][b] for a, b in _around(order))


def _nearest(weights: _Costs, start: int) -> list[int]:
    order = [start]
    left = set(range(len(weights))) - {start}
    while left:
        row = weights[order[-1]]
        order.append(min(left, key=lambda rank: (row[rank], rank)))
        left.remove(order[-1])
    return order


def _improved(costs: _Costs, weights: _Costs, order: list[int], tries: int) -> list[int]:
    """``order`` after all changes that make it better, one at a time, until there is none or ``tries`` were looked at."""
    score = _score(costs, weights, order)
    while tries > 0:
        sums = _Sums(weights, order)
        slow = [at for at, (a, b) in enumerate(_around(order)) if costs[a][b] == score[0]]
        for lo, middle, hi, turned in _changes(len(order)):
            tries -= 1
            # Nearly every change makes the sum larger and keeps a slowest link: looking at all of its links would be wasted.
            if sums.after(lo, middle, hi, turned) < score[1] or _cuts(slow, lo, middle, hi, turned):
                changed = _changed(order, lo, middle, hi, turned)
                better = _score(costs, weights, changed)
                if better < score:
                    order, score = changed, better
                    break
            if tries <= 0:
                return order
        else:
            return order
    return order


def _cuts(slow: list[int], lo: int, middle: int, hi: int, turned: bool) -> bool:
    """Whether none of the links at the places ``slow`` (ascending) is left after a change. In a turned piece all links change."""
    if turned:
        return lo <= slow[0] and slow[-1] <= hi
    return len(slow) <= 3 and all(at in (lo, middle, hi) for at in slow)


def _changes(size: int) -> Iterator[tuple[int, int, int, bool]]:
    """``(lo, middle, hi, turned)``: the links that begin at these places are cut.

    Turned: the piece ``(lo, hi]`` the other way around (2-opt; middle is lo). Else the pieces ``(lo, middle]`` and ``(middle, hi]``
    swapped, one of which is at most three long (or-opt).
    """
    for lo, hi in combinations(range(size), 2):
        if hi - lo > 1:
            yield lo, lo, hi, True
        for length in range(1, min(4, hi - lo)):
            yield lo, lo + length, hi, False
            if hi - lo > 2 * length:
                yield lo, hi - length, hi, False


def _changed(order: list[int], lo: int, middle: int, hi: int, turned: bool) -> list[int]:
    head, tail = order[: lo + 1], order[hi + 1 :]
    if turned:
        return head + order[hi:lo:-1] + tail
    return head + order[middle + 1 : hi + 1] + order[lo + 1 : middle + 1] + tail


class _Sums:
    """The sum of a ring after a change, without walking around it: sums up to each place, forwards and backwards."""

    def __init__(self, weights: _Costs, order: list[int]) -> None:
        self._weights, self._order = weights, order
        self._there, self._back = [0], [0]
        for a, b in _around(order):
            self._there.append(self._there[-1] + weights[a][b])
            self._back.append(self._back[-1] + weights[b][a])

    def after(self, lo: int, middle: int, hi: int, turned: bool) -> int:
        order, weights, there, back = self._order, self._weights, self._there, self._back
        before, first, last, behind = order[lo], order[lo + 1], order[hi], order[(hi + 1) % len(order)]
        if turned:
            kept = there[-1] - (there[hi + 1] - there[lo]) + back[hi] - back[lo + 1]
            return kept + weights[before][last] + weights[first][behind]
        kept = there[-1] - weights[before][first] - weights[last][behind]
        seam, second = order[middle], order[middle + 1]
        kept -= weights[seam][second]
        return kept + weights[before][second] + weights[last][first] + weights[seam][behind]
