"""What a seed stands for: a world, its links, a program for its ranks, and what goes wrong. Knows nothing of how it is run."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from asynccoll.sim.links import Conditions
from asynccoll.testing.soak.steps import FIELDS, FOLDS, MESSAGES, Step, Steps

__all__ = ["LIVENESS", "LOCAL", "STAGES", "TROUBLES", "Plan", "Trouble", "draw"]

LOCAL: Final[Mapping[str, int]] = {
    "cancel": 6,
    "late": 3,
    "hurry": 2,
    "mismatch": 3,
    "refusal": 2,
    "raise": 2,
}
"""What one rank may do to one step, and how often: only that step ends badly."""
TROUBLES: Final[Mapping[str, int]] = {
    **LOCAL,
    "crash": 5,
    "leave": 3,
    "quit": 2,
    "stop": 2,
    "pause": 2,
    "fin": 1,
    "rst": 1,
    "stall": 1,
    "partition": 1,
    "slow": 1,
}
"""What may go wrong, and how often."""
STAGES: Final = ("settle", "shrink", "close")
"""What comes after the last step."""
_COUNTS: Final = {0: 15, 1: 45, 2: 20, 3: 12, 4: 8}
"""How many troubles one seed has, and how often."""
ON_A_LINK: Final = 400_000
"""Bytes that a control frame may have to wait for, besides the link's buffer: a segment, and what came before it."""
_PIECES: Final = 30
"""About how many pieces of a link one rank's part in a step may take: what a seed costs."""
LIVENESS: Final = 5.0
"""Virtual seconds of silence after which a rank is taken for lost."""


class Trouble(NamedTuple):
    """What goes wrong, on which rank, in which step."""

    kind: str
    rank: int
    """World rank."""
    step: int
    """As many as there are steps: after the last, while the survivors go on without the lost."""
    delay: float
    """It happens so many virtual seconds after the call,"""
    pieces: int
    """or when so many pieces have arrived at the rank, if that is sooner; 0: the delay alone counts."""
    detail: str = ""
    """Of a mismatch: the field that differs. Of a cancel: in which way. Of one who leaves: at the moment
    itself, or as soon as its own call has ended. After the last step: in which stage, one of `STAGES`."""
    other: int = 0
    """Of a cut: the other rank. Of a partition: the ranks on the side of `rank`, as bits."""
    seconds: float | None = None
    """Of a stall, a pause or a partition: how long; None: for ever. Of a hurry: the rank's limit for the call."""


@dataclass
class Plan:
    """One seed's world and program."""

    seed: int
    size: int
    conditions: Conditions
    program: Steps
    groups: list[tuple[int, ...]]
    """Members of each group, in the order in which each rank makes them."""
    pauses: list[list[float]]
    """Rank -> virtual seconds before each step."""
    troubles: list[Trouble]
    timeout: float = 0.0
    """Limit of the steps of which a rank is late, on the ranks in `limited`."""
    limited: set[int] = field(default_factory=set)
    """World ranks."""
    keys: list[str | None] = field(default_factory=list)
    """Step -> its key."""
    orders: list[list[int]] = field(default_factory=list)
    """Rank -> its steps in the order of its calls; of a group, those without a key, and those of one key, are in the same order
    on all."""
    after: str = "shrink"
    """What the survivors of a loss do: ``"shrink"``, ``"restart"`` or ``"close"``."""

    def of(self, step: int) -> list[Trouble]:
        """The troubles of one step."""
        return [trouble for trouble in self.troubles if trouble.step == step]

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.size} ranks, {self.conditions}, groups {self.groups}, then {self.after}"
        ]
        for at, step in enumerate(self.program.steps):
            key = "" if self.keys[at] is None else f", key {self.keys[at]!r}"
            lines.append(f"  step {at}: {step}{key}")
        lines += [f"  {trouble}" for trouble in self.troubles]
        return "\n".join(lines)


def draw(seed: int, ranks: tuple[int, int] = (2, 16), kinds: Collection[str] = ()) -> Plan:
    """The plan of a seed.

    Args:
        seed: draws everything.
        ranks: smallest and largest world; most are of at most 8 ranks where those may be.
        kinds: the only troubles that there may be, at least one in each plan that can have it; by default all, or none at all.
    """
    rng = random.Random(seed)
    low, high = ranks
    usual = high if low > 8 else min(high, 8)
    size = rng.randint(low, usual if rng.random() < 0.93 else high)
    count = rng.choices([*_COUNTS], [*_COUNTS.values()])[0]
    drawn = [*(kinds or TROUBLES)]
    count = max(count, 1 if kinds else 0)
    kinds = rng.choices(drawn, [TROUBLES[kind] for kind in drawn], k=count)
    bulk = rng.random() < 0.15 and size <= 8
    quick = bool({"late", "mismatch", "leave", "quit"}.intersection(kinds))
    conditions = _conditions(rng, quick, bulk, 1 if size <= 3 else 10 if size <= 4 else 60)
    piece = min(conditions.buffer, conditions.piece // (2 if conditions.split else 1))
    groups = []
    if size > 2 and (rng.random() < 0.3 or "quit" in kinds):
        groups = [tuple(rng.sample(range(size), rng.randint(2, size))) for _ in range(rng.randint(1, 2))]
    steps = [
        _step(rng, size, groups, _PIECES * max(1, piece))
        for _ in range(rng.randint(1, 4 if size <= 8 and piece > 3 else 2))
    ]
    if bulk:  # large blocks straight into the ranks' memory
        at = rng.randrange(len(steps))
        kind = rng.choice(["allreduce_", "out", "broadcast", "gather", "scatter"])
        steps[at] = Step(kind, rng.choice([20_000, 60_000]), "f4", "sum", 0, "auto", tuple(range(size)))
    pace = rng.choice([0.0, 0.001, 0.05, 2.0])
    pauses = [[rng.choice([0.0, rng.random() * pace]) for _ in steps] for _ in range(size)]
    plan = Plan(seed, size, conditions, Steps(seed, steps), groups, pauses, [])
    plan.after = rng.choice(["shrink", "shrink", "shrink", "restart", "close"])
    _draw_keys(plan, rng)
    if "late" in kinds:
        plan.timeout = rng.choice([0.5, 3.0])
        plan.limited = set(rng.sample(range(size), rng.randint(1, size)))
    for kind in kinds:
        _draw_trouble(plan, kind, pace, rng)
    return plan


def _draw_trouble(plan: Plan, kind: str, pace: float, rng: random.Random) -> None:
    steps = plan.program.steps
    folds = [at for at, step in enumerate(steps) if step.kind in FOLDS]
    grouped = [at for at, step in enumerate(steps) if step.group is not None]
    if kind == "raise" and not folds:
        at = rng.randrange(len(steps))
        if plan.of(at):
            return
        steps[at] = steps[at]._replace(kind="fold", algorithm="auto")
        folds = [at]
    elif kind == "quit" and not grouped:
        return
    if kind in ("raise", "quit"):
        at = rng.choice(folds if kind == "raise" else grouped)
    elif plan.troubles and rng.random() < 0.6:  # troubles meet in one step
        at = min(plan.troubles[0].step, len(steps) - 1)
    else:
        at = rng.randrange(len(steps))
    if kind in LOCAL and steps[at].kind == MESSAGES:
        return
    rank = rng.choice(steps[at].members)
    if kind in LOCAL and any(trouble.rank == rank for trouble in plan.of(at)):
        return
    odd = sum(trouble.kind == "mismatch" for trouble in plan.of(at))
    if kind == "mismatch" and odd + 1 == len(steps[at].members):
        return  # if all were to differ in the same way, they would agree
    if kind not in LOCAL and kind not in ("leave", "quit") and rng.random() < 0.2:
        at = len(steps)
    if rng.random() < 0.3:
        delay, pieces = rng.choice([0.0, rng.random() * 0.01, rng.random() * pace]), 0
    else:  # in the middle of a transfer
        delay, pieces = rng.choice([3.0, 1000.0]), int(2 ** (rng.random() * 8))
    trouble = Trouble(kind, rank, at, delay, pieces, rng.choice(STAGES) if at == len(steps) else "")
    peers = [peer for peer in range(plan.size) if peer != rank]
    match kind:
        case "late":
            plan.pauses[rank][at] += rng.random() * 3 * plan.timeout
        case "leave" | "quit":
            trouble = trouble._replace(detail=rng.choice(["now", "done"]))
        case "hurry":
            trouble = trouble._replace(seconds=rng.choice([0.001, 0.02, 0.5, 3.0]))
        case "mismatch":
            trouble = trouble._replace(detail=rng.choice(FIELDS[steps[at].kind]))
        case "cancel":
            trouble = trouble._replace(detail=rng.choice(["work", "work", "task", "timeout"]))
        case "fin" | "rst":
            trouble = trouble._replace(other=rng.choice(peers))
        case "stall":
            trouble = trouble._replace(other=rng.choice(peers), seconds=_while(rng))
        case "pause":
            trouble = trouble._replace(seconds=_while(rng) or LIVENESS * 3)
        case "partition":
            side = {rank, *rng.sample(peers, rng.randint(0, len(peers) - 1))}
            trouble = trouble._replace(other=sum(1 << one for one in side), seconds=_while(rng))
    plan.troubles.append(trouble)


def _while(rng: random.Random) -> float | None:
    """For how long something is silent: less than the liveness timeout, about as long, longer, or for ever."""
    return rng.choice([LIVENESS * rng.random(), LIVENESS + rng.random() * 0.3, LIVENESS * 2, None])


def _draw_keys(plan: Plan, rng: random.Random) -> None:
    """Which steps have which key, and in which order each rank calls its own."""
    steps = plan.program.steps
    keyed = rng.random() < 0.5
    plan.keys = [
        rng.choice([None, "a", "a", f"step {at}"]) if keyed and step.kind != MESSAGES else None
        for at, step in enumerate(steps)
    ]
    for rank in range(plan.size):
        lanes: dict[tuple[int | None, str | None], list[int]] = {}
        for at, step in enumerate(steps):
            if rank in step.members:
                lanes.setdefault((step.group, plan.keys[at]), []).append(at)
        turns = [lane for lane, ats in lanes.items() for _ in ats]
        rng.shuffle(turns)
        plan.orders.append([lanes[lane].pop(0) for lane in turns])


def _conditions(rng: random.Random, quick: bool, bulk: bool, least: int) -> Conditions:
    """``quick``: a control frame arrives within a tenth of a second. Else links are as slow as they like. ``least``: the smallest
    piece that costs no more than a seed may.
    """
    piece = rng.choice([3000, 1 << 16] if bulk else [1, 3, 25, 200, 200, 3000, 3000, 1 << 16])
    buffer = rng.choice([1 << 14, 1 << 18] if bulk else [1, 50, 1000, 1 << 14, 1 << 18])
    piece, buffer = max(piece, least), max(buffer, least)
    delay = rng.choice([0.0, 0.0, 0.0001, 0.002, 0.1])
    if quick:
        buffer = max(buffer, 1000)
        delay = min(delay, 0.025 * piece / (buffer + ON_A_LINK))
    return Conditions(delay, piece, rng.random() < 0.5, buffer)


def _step(rng: random.Random, size: int, groups: list[tuple[int, ...]], budget: int) -> Step:
    """``budget``: bytes per rank that the links move in reasonable time."""
    group = rng.randrange(len(groups)) if groups and rng.random() < 0.5 else None
    members = tuple(range(size)) if group is None else groups[group]
    size = len(members)
    kind = rng.choice(["allreduce", MESSAGES, *FIELDS])
    dtype = rng.choice(["f4", "f8", "i4", "i8", "f2", "u1"])
    ops = ["sum", "max", "min", "bor" if np.dtype(dtype).kind in "iu" else "avg"]
    count = rng.choice([0, 1, size - 1, size, 100, 1000, 17_000, 33_000, 100_000])
    count = min(count, budget // (size * np.dtype(dtype).itemsize))
    algorithms = ["auto", "ring", "doubling"]
    if kind in ("reduce", "reduce_scatter"):
        algorithms = ["auto", "ring", "tree"]
    elif kind in ("scan", "exscan"):
        algorithms = ["auto", "chain", "doubling"]
    elif kind in ("allreduce", "allreduce_", "out", "tree"):
        algorithms.append("tree")
    elif kind in ("broadcast", "object"):
        algorithms = ["auto", "tree"]
    op = "sum" if kind == "tree" else rng.choice(ops)
    return Step(kind, count, dtype, op, rng.randrange(size), rng.choice(algorithms), members, group)
