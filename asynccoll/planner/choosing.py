"""Which algorithm a collective should take, by the time that its schedule would need on given links. Knows a model, no measurement.

The model (of the kind of LogGP): a message of n bytes from rank a to rank b costs both a moment of their processors, leaves over
a's one port behind what a has sent before, is under way for the latency of the link, and comes in over b's one port at the
bandwidth of the link. Both directions of a port work at once. Combining costs time in proportion to the bytes. The steps are those
that the collectives run, walked rank by rank in program order.

A. Alexandrov, M. F. Ionescu, K. E. Schauser, C. Scheiman: LogGP: incorporating long messages into the LogP model. Journal of
Parallel and Distributed Computing 44 (1), 1997. doi:10.1006/jpdc.1997.1346
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Final

from asynccoll.algorithms import registry
from asynccoll.algorithms.ring import chunk
from asynccoll.algorithms.steps import Finish, Recv, Schedule, Send, Step
from asynccoll.planner.given import shown
from asynccoll.planner.rings import SEGMENT
from asynccoll.planner.topology import Link, Topology, checked, checked_bytes

__all__ = ["choose", "estimate"]

MESSAGE: Final = 5e-6
"""Seconds of a processor for one message, at either end: a system call and a turn of an event loop, as an order of magnitude."""
COMBINED: Final = 4e9
"""Bytes per second that one processor adds up."""

LEAST: Final = 1 << 18
"""Bytes of the shortest segment: of a tree, and of a ring whose parts are wanted early. This and the next three are those by which
`asynccoll.engine` cuts arrays (a test compares)."""
SLAB: Final = 1 << 16
"""Bytes that doubling moves at a time."""
PIECES: Final = 8
"""Segments into which a tree cuts an array whose segments are neither the shortest nor the longest."""
MOST_SEGMENTS: Final = 64
"""Segments into which a ring cuts a chunk at the most."""

_WALKED: Final = 8
"""Segments that are walked; of anything but a ring, for each doubling of the ranks: a tree is full only after some, and a scan by
doubling later still. The next ones take as long as the last of these did, so the rest is a product."""
_MOST_STEPS: Final = 300_000
"""Steps of a ring above which fewer segments are walked."""

_FIRST: Final = ("doubling", "tree", "linear", "chain", "ring")
"""The order in which algorithms are tried: short schedules first, so that long ones are given up early. Of two that are
equally fast the first is taken."""


def choose(collective: str, nbytes: int, topology: Topology) -> str:
    """The algorithm of ``collective`` that `estimate` says is the fastest on ``topology``; what ``algorithm=`` takes.

    What it is: a comparison of the schedules on one model of links, for ranks that all call at once, in the order of the topology's
    ranks (`Topology.reordered` for another). Alike on all ranks that ask with the same values. What it is not: a measurement. It
    does not know how many cores the ranks share, nor that links share a wire, nor what travels with a collective's START round;
    ``algorithm="auto"`` goes by thresholds that were measured on small worlds instead. Where the two disagree, measure both.

    Args:
        collective: allreduce, allreduce_stream, allgather, broadcast, reduce, reduce_scatter, scan or exscan.
        nbytes: bytes of the array; for allgather those of the largest block. 0 counts as 1.

    Raises:
        ValueError: the collective has no choice, or ``nbytes`` is negative or above 2^80.
        TypeError: ``nbytes`` is not an integer, or ``topology`` no `Topology`.
    """
    known = _names(collective)
    nbytes, topology = checked_bytes(nbytes), checked(topology)
    best, found = math.inf, ""
    for name in sorted(known, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)):
        seconds = _seconds(collective, name, max(1, nbytes), topology, best)
        if not found or seconds < best:
            best, found = seconds, name
    return found


def estimate(collective: str, algorithm: str, nbytes: int, topology: Topology) -> float:
    """Seconds from a call of ``collective`` on all ranks at once until the last rank has its result, by the model above.

    The START round of every collective is left out: it is the same for all algorithms. A broadcast and a reduce have
    rank 0 as their root, a reduce_scatter even parts. For arrays of many segments a few are walked, and the rest follows from
    them: a second at most for 64 ranks, a few for 256, half a minute for 1000.

    Args:
        collective, nbytes: as for `choose`; 0 bytes take no time.
        algorithm: one that ``collective`` has.

    Raises:
        ValueError: the collective has no such algorithm, or ``nbytes`` is negative or above 2^80.
        TypeError: ``nbytes`` is not an integer, or ``topology`` no `Topology`.
    """
    known = _names(collective)
    if algorithm not in known:
        raise ValueError(
            f"algorithm {shown(algorithm)} does not exist for {collective}; there is: {', '.join(known)}"
        )
    nbytes, topology = checked_bytes(nbytes), checked(topology)
    return _seconds(collective, algorithm, nbytes, topology, math.inf)


def _names(collective: str) -> tuple[str, ...]:
    found = registry.names(collective) if isinstance(collective, str) else ()
    if not found:
        verbs = [verb for verb in ("allreduce_stream", *registry.DEFAULT) if registry.names(verb)]
        raise ValueError(
            f"{shown(collective)} is no collective with a choice of algorithms; there is: {', '.join(verbs)}"
        )
    return found


def _seconds(collective: str, algorithm: str, nbytes: int, topology: Topology, limit: float) -> float:
    """The time; or any number above ``limit`` where it is longer than that."""
    size = topology.world_size
    if nbytes == 0 or size == 1:
        return 0.0
    if collective == "allgather":
        blocks = [registry.schedule(collective, algorithm)(rank, size) for rank in range(size)]
        return _walk(blocks, nbytes, topology, limit)
    segment = _segment(collective, algorithm, nbytes, size)
    turn = segment * size if algorithm == "ring" else segment  # a segment of each chunk
    most = _WALKED if algorithm == "ring" else _WALKED * (size - 1).bit_length()
    while most > 2 and algorithm == "ring" and 4 * size * size * most > _MOST_STEPS:
        most //= 2
    turns = nbytes / turn
    if turns <= most:
        return _walk(_schedules(collective, algorithm, size, nbytes, segment), 1, topology, limit)
    few, many = (
        _walk(_schedules(collective, algorithm, size, turn * number, segment), 1, topology, limit)
        for number in (most // 2, most)
    )
    if math.inf in (few, many):
        return math.inf
    return many + (turns - most) * (many - few) / (most - most // 2)


def _segment(collective: str, algorithm: str, nbytes: int, size: int) -> int:
    """Bytes that a schedule moves at a time, as the engine cuts an array of ``nbytes``."""
    if algorithm == "doubling":
        return SLAB
    if algorithm == "ring":
        least = LEAST if collective == "allreduce_stream" else SEGMENT
        return max(least, nbytes // (size * MOST_SEGMENTS))
    return min(SEGMENT, max(LEAST, nbytes // PIECES))


def _schedules(collective: str, algorithm: str, size: int, count: int, segment: int) -> list[Schedule]:
    """The steps of every rank, over elements of one byte."""
    if collective in ("scan", "exscan"):
        scan = _doubling_scan if algorithm == "doubling" else _chain
        return [scan(rank, size, count, segment) for rank in range(size)]
    schedule = registry.schedule(collective, algorithm)
    if collective == "reduce_scatter":
        parts = [chunk(index, size, count) for index in range(size)]
        return [schedule(rank, size, parts, segment) for rank in range(size)]
    if collective in ("broadcast", "reduce"):
        return [schedule(rank, size, 0, count, segment) for rank in range(size)]
    return [schedule(rank, size, count, segment) for rank in range(size)]


def _chain(rank: int, size: int, count: int, segment: int) -> Schedule:
    """Who sends what in a scan along the chain; the scans themselves are programs of the engine, which have no steps."""
    for lo in range(0, count, segment):
        hi = min(lo + segment, count)
        if rank:
            yield Recv(rank - 1, lo, hi, combine="lower")
        if rank + 1 < size:
            yield Send(rank + 1, lo, hi)


def _doubling_scan(rank: int, size: int, count: int, slab: int) -> Schedule:
    """Who sends what in a scan by doubling."""
    for lo in range(0, count, slab):
        hi = min(lo + slab, count)
        for bit in range((size - 1).bit_length()):
            distance = 1 << bit
            if rank + distance < size:
                yield Send(rank + distance, lo, hi, snapshot=True)
            if rank >= distance:
                yield Recv(rank - distance, lo, hi, combine="lower")


class _Rank:
    """Where one rank is in its schedule, and when its processor and the two sides of its port are free, in seconds."""

    __slots__ = ("now", "port_in", "port_out", "steps", "waits")

    def __init__(self, steps: Iterator[Step]) -> None:
        self.steps = steps
        self.waits: Recv | None = None
        self.now = self.port_in = self.port_out = 0.0


def _walk(schedules: list[Schedule], unit: int, topology: Topology, limit: float) -> float:
    """Seconds until the last rank is through with its steps; infinite once that is sure to be above ``limit``.

    ``unit``: bytes of one element. What this gives does not depend on the order in which ranks are walked: each has its own clock,
    and meets the others in its messages alone.
    """
    ranks = [_Rank(steps) for steps in schedules]
    links: dict[tuple[int, int], Link] = {}
    posts: dict[tuple[int, int], deque[float]] = {}  # when the first byte of each message is at its receiver
    ready = deque(range(len(ranks)))
    while ready:
        number = ready.popleft()
        rank = ranks[number]
        while True:
            step = rank.waits or next(rank.steps, None)
            if step is None:
                break
            if isinstance(step, Finish):
                continue
            nbytes = (step.hi - step.lo) * unit
            if isinstance(step, Send):
                way = number, step.peer
                link = links.get(way) or links.setdefault(way, topology.link(*way))
                rank.now += MESSAGE
                leaves = max(rank.now, rank.port_out)
                rank.port_out = leaves + nbytes / link.bandwidth
                posts.setdefault(way, deque()).append(leaves + link.latency)
                waiting = ranks[step.peer].waits
                if waiting is not None and waiting.peer == number:
                    ready.append(step.peer)
            else:
                way = step.peer, number
                post = posts.get(way)
                if not post:
                    rank.waits = step
                    break
                rank.waits = None
                rank.port_in = max(post.popleft(), rank.port_in) + nbytes / links[way].bandwidth
                rank.now = max(rank.now, rank.port_in) + MESSAGE
                if step.combine is not None:
                    rank.now += nbytes / COMBINED
            if rank.now > limit:
                return math.inf
    return max(rank.now for rank in ranks)
