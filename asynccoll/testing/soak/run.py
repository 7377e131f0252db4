"""Runs seeds: one world each, and the counts of many. Knows no rule and no fault by itself."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from asynccoll.sim.loop import SimLoop, Stuck
from asynccoll.sim.trace import Trace
from asynccoll.testing.soak import leftovers
from asynccoll.testing.soak.epilogue import go_on, restart
from asynccoll.testing.soak.errors import Hang, Leak, Wrong
from asynccoll.testing.soak.judge import Judge
from asynccoll.testing.soak.plans import Plan, draw
from asynccoll.testing.soak.rare import NAMES
from asynccoll.testing.soak.watch import Watch
from asynccoll.testing.soak.world import World, is_ours

__all__ = ["TOLD", "WALL_LIMIT", "Failure", "Outcome", "Tally", "run_plan"]

TOLD: Final = 20
"""Failures that are told one by one; more of them are only counted."""
WALL_LIMIT: Final = 60.0
"""Seconds of real time after which a world counts as a hang, whatever its own clock says."""


@dataclass
class Outcome:
    """What a seed has seen."""

    trace_hash: str = ""
    pieces: int = 0
    """Pieces of streams that moved."""
    faults: Counter[str] = field(default_factory=Counter)
    """What went wrong, by kind."""
    rare: Counter[str] = field(default_factory=Counter)
    """Named branches that were reached, and how often."""


def run_plan(
    plan: Plan, listener: Callable[[float, str], None] | None = None, *, collect: bool = False
) -> Outcome:
    """Run the world of a plan. ``listener`` hears of each event, as text. ``collect``: run the garbage collector before the loop is
    looked at, so that an exception which nobody has taken is told by the seed that it belongs to.

    Raises `Wrong`, `Stray`, `Leak`, `Hang` or `Stuck`.
    """
    outcome, trace = Outcome(), Trace(listener)
    worlds: list[World] = []

    async def main() -> None:
        world = World(plan, trace)
        worlds.append(world)
        world.see = Watch(world.cluster.network.drivers, outcome.rare).see
        await _whole(world, outcome, collect)

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        try:
            runner.run(main())
        except BaseException:  # re-raised
            for world in worlds:
                world.cluster.abandon()  # what is stopped would not end by being cancelled
            raise
    for world in worlds:
        outcome.faults.update(trouble.kind for trouble in world.struck)
    outcome.faults["delay"] += plan.conditions.delay > 0
    outcome.faults["split reads"] += plan.conditions.split
    outcome.trace_hash, outcome.pieces = trace.hash, trace.pieces
    return outcome


async def _whole(world: World, outcome: Outcome, collect: bool) -> None:
    await world.run()
    Judge(world).program()
    await go_on(world)
    leftovers.in_the_engines(world)
    await world.close()
    if collect:
        gc.collect()
    leftovers.on_the_loop(world)
    if world.plan.after == "restart" and world.dead():
        await restart(world)
        outcome.faults["restart"] += 1
        world.see("a new world after a restart")


@dataclass
class Failure:
    """A seed that failed."""

    seed: int
    kind: str
    """``"hangs"``, ``"wrong"``, ``"leaks"`` or ``"stray"``."""
    text: str


class Tally:
    """The counts of many seeds."""

    def __init__(self, ranks: tuple[int, int] = (2, 16), kinds: Collection[str] = ()) -> None:
        """As for `asynccoll.testing.soak.plans.draw`."""
        self.ranks = ranks
        self.kinds = kinds
        self.seeds = 0
        self.failures: list[Failure] = []
        self.counts: dict[str, int] = dict.fromkeys(("hangs", "wrong", "leaks", "stray"), 0)
        self.faults: Counter[str] = Counter()
        self.rare: Counter[str] = Counter()
        self.pieces = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def run(self, seed: int) -> Failure | None:
        """Run one seed and count what came of it."""
        self.seeds += 1
        try:
            with _within(WALL_LIMIT):
                outcome = run_plan(draw(seed, self.ranks, self.kinds), collect=True)
        except (Stuck, Hang) as error:
            failure = Failure(seed, "hangs", _text(error))
        except Leak as error:
            failure = Failure(seed, "leaks", _text(error))
        except Exception as error:  # noqa: BLE001 (counted and told)
            wrong = isinstance(error, Wrong) or is_ours(error)
            failure = Failure(seed, "wrong" if wrong else "stray", _text(error))
        else:
            self.faults += outcome.faults
            self.rare += outcome.rare
            self.pieces += outcome.pieces
            self._hash.update(f"{seed} {outcome.trace_hash}\n".encode())
            return None
        self.counts[failure.kind] += 1
        self.failures.append(failure)
        self._hash.update(f"{seed} {failure.kind}\n".encode())
        return failure

    @property
    def missing(self) -> list[str]:
        """Rare branches that no seed has reached."""
        return [name for name in NAMES if not self.rare[name]]

    def summary(self) -> dict[str, Any]:
        """The counts, as they go into JSON."""
        return {
            "seeds": self.seeds,
            **self.counts,
            "failed": [failure.seed for failure in self.failures[:TOLD]],
            "faults": dict(sorted(self.faults.items())),
            "rare": {name: self.rare[name] for name in NAMES},
            "pieces": self.pieces,
            "trace_hash": self._hash.hexdigest(),
        }


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `Hang` inside if it takes longer, by a real clock; where the system has such timers."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    previous = signal.signal(signal.SIGALRM, _overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, should it be lost on the way
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _overdue(number: int, frame: Any) -> None:
    raise Hang(f"still running after {WALL_LIMIT:g} real seconds")
