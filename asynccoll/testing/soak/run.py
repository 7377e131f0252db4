"""Runs seeds: one world each, its epilogue, and the counts of many. Knows no rule and no fault by itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from asynccoll.sim.loop import SimLoop
from asynccoll.sim.trace import Trace
from asynccoll.testing.soak import leftovers
from asynccoll.testing.soak.epilogue import go_on, restart
from asynccoll.testing.soak.judge import Judge
from asynccoll.testing.soak.plans import Plan, draw
from asynccoll.testing.soak.watch import Watch
from asynccoll.testing.soak.world import World

__all__ = ["Outcome", "run_plan", "run_seed"]


@dataclass
class Outcome:
    """What a seed has seen."""

    trace_hash: str = ""
    pieces: int = 0
    """Pieces that moved."""
    faults: Counter[str] = field(default_factory=Counter)
    """Troubles that struck, by kind."""
    rare: Counter[str] = field(default_factory=Counter)
    """Named branches that were reached, and how often."""


def run_seed(seed: int, ranks: tuple[int, int] = (2, 16)) -> Outcome:
    """Run the world of a seed. Raises `Wrong`, `Stray`, `Leak`, `Hang` or `Stuck`."""
    return run_plan(draw(seed, ranks))


def run_plan(plan: Plan, listener: Callable[[float, str], None] | None = None) -> Outcome:
    """Run the world of a plan. ``listener`` hears of each event, as text."""
    outcome, trace = Outcome(), Trace(listener)

    worlds: list[World] = []

    async def main() -> None:
        world = World(plan, trace)
        worlds.append(world)
        watch = Watch(world.cluster.network.drivers, outcome.rare)
        await _whole(world, watch)

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        try:
            runner.run(main())
        except BaseException:
            for world in worlds:
                world.cluster.abandon()  # what is stopped would not end by being cancelled
            raise
    for world in worlds:
        outcome.faults.update(trouble.kind for trouble in world.struck)
    outcome.trace_hash, outcome.pieces = trace.hash, trace.pieces
    return outcome


async def _whole(world: World, watch: Watch) -> None:
    await world.run()
    Judge(world).program()
    await go_on(world, watch.see)
    leftovers.in_the_engines(world)
    await world.close()
    leftovers.on_the_loop(world)
    if world.plan.after == "restart" and world.dead():
        await restart(world)
        watch.see("a new world after a restart")
