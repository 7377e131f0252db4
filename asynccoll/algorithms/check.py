"""Symbolic proof of a schedule, all ranks at once. Knows what steps mean, not which algorithm made them.

Values are expressions over ranks. Each rank runs until it waits or ends. A step waits for nothing but the
next message of one peer, so what this run computes is what every run computes, however the ranks are timed.
Timing does decide whether an element is still lent when it is written; there vector clocks speak for all
runs. The write of a `Recv` can begin once the step before it is over *and* its data has been sent, so the
reader must have finished before one of the two; a `Finish` writes at once. Both planes count as one memory,
which is the worst case.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from asynccoll.algorithms.steps import Finish, Recv, Send, Step

__all__ = ["ScheduleError", "prove"]


class ScheduleError(Exception):
    """The schedule of ``rank`` is wrong at its step number ``step`` (from 0), for ``reason``."""

    def __init__(self, rank: int, step: int, reason: str) -> None:
        super().__init__(rank, step, reason)
        self.rank, self.step, self.reason = rank, step, reason

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.step}: {self.reason}"


class _Value(NamedTuple):
    ranks: tuple[int, ...]  # whose operands, from left to right
    tree: int  # equal numbers: equal brackets too
    final: bool


@dataclass(slots=True)
class _Message:
    step: Send
    values: list[_Value]
    clock: list[int]  # the sender's when it sent this; its own entry is the number of the step
    read: int = 0  # steps that were over for the receiver once it had read this; 0 before


class _World:
    def __init__(self, size: int, held: list[list[_Value | None]]) -> None:
        self.size, self.held = size, held  # held[rank][element]
        self.clock = [[0] * size for _ in held]  # clock[rank][other]: steps rank knows to be over
        self.lent: list[list[_Message]] = [[] for _ in held]
        self.links: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)  # [sender, receiver]
        self.joins: dict[tuple[int, int], _Value] = {}  # by the trees of both operands

    def require(self, holds: bool, rank: int, *reason: object) -> None:
        if not holds:
            raise ScheduleError(rank, self.clock[rank][rank], " ".join(map(str, reason)))

    def run(self, rank: int, steps: Iterable[Step], first: Callable[[int], int]) -> Iterator[Step]:
        """Do the steps of ``rank``; yield one whenever it waits."""
        for step in steps:
            self.require(0 <= step.lo < step.hi <= len(self.held[rank]), rank, step, "is no range")
            if isinstance(step, Recv):
                while not (link := self.links[step.peer, rank]):
                    yield step
                self.recv(rank, step, link.popleft())
            elif isinstance(step, Send):
                self.send(rank, step)
            else:
                values = self.look(rank, step, final=False)
                for element, value in enumerate(values, step.lo):
                    whole = len(value.ranks) == self.size and value.ranks[0] == first(element)
                    self.require(whole, rank, step, "of", value.ranks, "in element", element)
                self.store(rank, step, [_Value(value.ranks, value.tree, True) for value in values])
            self.clock[rank][rank] += 1

    def send(self, rank: int, step: Send) -> None:
        self.require(step.peer != rank, rank, step, "goes to itself")
        message = _Message(step, self.look(rank, step, final=step.final), self.clock[rank].copy())
        self.links[rank, step.peer].append(message)
        if not step.snapshot:
            self.lent[rank].append(message)

    def recv(self, rank: int, step: Recv, message: _Message) -> None:
        sent, values = message.step, message.values
        fits = (sent.lo, sent.hi, sent.final) == (step.lo, step.hi, step.combine is None)
        self.require(fits, rank, step, "reads", sent)
        self.clock[rank] = [a if a > b else b for a, b in zip(self.clock[rank], message.clock, strict=True)]
        if step.combine is not None:
            mine = self.look(rank, step, final=False)
            left, right = (values, mine) if step.combine == "lower" else (mine, values)
            values = [self.join(rank, step, *pair) for pair in zip(left, right, strict=True)]
        self.store(rank, step, values)
        message.read = self.clock[rank][rank] + 1

    def join(self, rank: int, step: Step, left: _Value, right: _Value) -> _Value:
        key = left.tree, right.tree
        if key not in self.joins:
            adjacent = (left.ranks[-1] + 1) % self.size == right.ranks[0]
            self.require(adjacent, rank, step, "joins", left.ranks, "and", right.ranks)
            self.joins[key] = _Value(left.ranks + right.ranks, self.size + len(self.joins), False)
        return self.joins[key]

    def look(self, rank: int, step: Step, *, final: bool) -> list[_Value]:
        there = [value for value in self.held[rank][step.lo : step.hi] if value and value.final is final]
        self.require(len(there) == step.hi - step.lo, rank, step, "wants", ["partials", "results"][final])
        return there

    def store(self, rank: int, step: Recv | Finish, values: list[_Value]) -> None:
        results = any(value and value.final for value in self.held[rank][step.lo : step.hi])
        self.require(not results, rank, step, "overwrites results")
        for loan in self.lent[rank]:
            if loan.step.lo < step.hi and step.lo < loan.step.hi:
                read = 0 < loan.read <= self.clock[rank][loan.step.peer]
                self.require(read, rank, step, "overwrites", loan.step, "which may not have been read")
        self.held[rank][step.lo : step.hi] = values


def prove(
    schedule: Callable[[int], Iterable[Step]],
    size: int,
    count: int,
    *,
    origin: Callable[[int], int] | None = None,
    first: Callable[[int], int] = lambda element: 0,
    wanted: Callable[[int, int], bool] = lambda rank, element: True,
) -> None:
    """Run ``schedule(rank)`` of ``size`` ranks over ``count`` elements; `ScheduleError` where it is wrong.

    Proved: each contribution once in each result, in rank order from ``first(element)`` on, bracketed alike
    on all ranks; one `Finish` or delivery per element and rank, before it is sent or kept as a result; messages
    read, all of them, as the elements and in the plane that were sent; no deadlock; no write to elements that
    may still be lent.

    ``origin(element)``: the rank that has it to begin with, where results are moved; None where all reduce.
    ``wanted(rank, element)``: whether the rank must end with the result.
    """
    ranks, elements = range(size), range(count)
    own = [_Value((rank,), rank, origin is not None) for rank in ranks]
    held = [[own[rank] if not origin or origin(e) == rank else None for e in elements] for rank in ranks]
    world = _World(size, held)
    running = {rank: world.run(rank, schedule(rank), first) for rank in ranks}
    while running:
        before = [world.clock[rank][rank] for rank in running]
        waits = {rank: step for rank, run in running.items() if (step := next(run, None)) is not None}
        moved = len(waits) < len(running) or before != [world.clock[rank][rank] for rank in running]
        for rank, step in waits.items():
            world.require(moved, rank, step, "waits for ever")
        running = {rank: running[rank] for rank in waits}
    for (rank, _), link in world.links.items():
        for message in link:
            raise ScheduleError(rank, message.clock[rank], f"{message.step} is never read")
    for e in elements:
        results = [(rank, held[rank][e]) for rank in ranks if wanted(rank, e)]
        for rank, result in results:
            world.require(result is not None and result.final, rank, "has no result in element", e)
            world.require(result == results[0][1], rank, "brackets element", e, "in its own way")
