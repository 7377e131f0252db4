"""What a run must not leave behind: in the engines of its ranks, and on the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from asynccoll.engine.outbox import EAGER_CREDIT
from asynccoll.sim.driver import SimDriver
from asynccoll.testing.soak.errors import Leak, Stray, require
from asynccoll.testing.soak.world import SENTINEL, World

__all__ = ["in_the_engines", "on_the_loop"]


def in_the_engines(world: World) -> None:
    """Raise `Leak` if an engine of a rank that stays keeps what nothing will ever need."""
    drivers = world.cluster.network.drivers
    alive = [drivers[rank] for rank in world.staying()]
    whole = len(alive) == len(drivers) and not any(driver.engine.losses.out for driver in alive)
    left = [found for driver in alive for found in _of_one(driver, drivers, whole)]
    if left:
        raise Leak("; ".join(left))


def _of_one(driver: SimDriver, drivers: list[SimDriver], whole: bool) -> list[str]:
    engine = driver.engine
    rank = engine.rank
    left = []
    if engine.pending():
        left.append(f"rank {rank}: pending {engine.pending()}")
    for group in engine._groups.values():
        if not all(map(group.awaits, group.early)):
            left.append(f"rank {rank}: frames kept for operations that were called: {sorted(group.early)}")
        if whole and not group.left and (group.early or any(group.early_bytes.values())):
            left.append(f"rank {rank}: early {group.early} {group.early_bytes}")
        if whole and group.withdrawn and not group.left:
            left.append(f"rank {rank}: withdrawn {group.withdrawn}")
    for peer, box in engine._outboxes.items():
        if box.control or box.streams or box.current or box.lent:
            left.append(f"rank {rank}: queued for {peer}")
        if whole:
            owed = drivers[peer].engine._outboxes[rank].owed
            if box.credit + owed != EAGER_CREDIT:
                left.append(f"rank {rank}: credit {box.credit} to {peer}, which owes {owed}")
    uses = sum(keys.outstanding for keys in engine.keys._matching.values())
    if whole and uses:
        left.append(f"rank {rank}: {uses} uses of keys")
    for peer, inbound in engine._inbounds.items():
        if inbound._landing is not None or inbound.start != inbound.end:
            left.append(f"rank {rank}: a part of a frame from {peer}")
    return left


def on_the_loop(world: World) -> None:
    """After closing: raise if memory was touched, an exception got lost, or a timer or task is left."""
    for memory in world.returned:
        require(bool((memory == SENTINEL).all()), "memory was written to after it had been given back")
    if world.unhandled:
        raise Stray(f"unhandled: {world.unhandled}")
    scheduled: list[Any] = getattr(world.loop, "_scheduled")  # noqa: B009 (not in the stubs)
    timers = [handle for handle in scheduled if not handle.cancelled()]
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if timers or tasks:
        raise Leak(f"after closing: timers {timers}, tasks {tasks}")
