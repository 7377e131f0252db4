"""What comes after the program of a seed: the ranks find out who is left, go on without the lost, or start again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from asynccoll.communicator import Communicator, Options
from asynccoll.errors import PeerLost
from asynccoll.testing.cluster import Cluster
from asynccoll.testing.soak.errors import require
from asynccoll.testing.soak.judge import Judge
from asynccoll.testing.soak.plans import LIVENESS
from asynccoll.testing.soak.world import LONG, World

__all__ = ["go_on", "restart"]

_TRIES: Final = 8
"""Shrinks of one rank: more than ranks can be lost on the way."""
_PATIENCE: Final = 1000.0
"""Virtual seconds that ranks wait for one another in `shrink`: the slowest links need some."""


async def go_on(world: World) -> None:
    """See whether the mesh is in step, or who is lost; then whether the survivors can go on. Judges all of it."""
    comms, plan = world.comms, world.plan
    world.begin("settle")
    ends = await world.on_all(world.staying(), lambda rank: _meet(comms[rank]))
    await asyncio.sleep(LONG)
    Judge(world).probe(ends)
    ends = await world.on_all(world.staying(), lambda rank: _meet(comms[rank]))
    judge = Judge(world)
    lost = judge.agreed(ends)
    staying = world.staying()
    if len(staying) == plan.size and not any(lost.values()) and not judge.touched:
        await _all_well(world, staying)
    elif plan.after == "shrink":
        survivors = [rank for rank in staying if rank not in lost.get(rank, ())]
        before = len(world.struck)
        world.begin("shrink")
        ends = await world.on_all(survivors, lambda rank: _shrink(comms[rank], world.see))
        await asyncio.sleep(LONG)
        Judge(world).shrunk(ends, lost, len(world.struck) == before)


async def _all_well(world: World, ranks: list[int]) -> None:
    ends = await world.on_all(ranks, lambda rank: _in_step(world.comms[rank]))
    for rank, end in ends.items():
        require(not isinstance(end, BaseException), f"rank {rank} is not in step: {end!r}")
    await asyncio.sleep(LONG)


async def _meet(comm: Communicator) -> None:
    await comm.barrier()


async def _in_step(comm: Communicator) -> None:
    """The mesh is in step: the next operations work."""
    await asyncio.gather(comm.barrier(key="a"), comm.barrier())
    total = await comm.allreduce(np.arange(100) + comm.rank)
    size = comm.world_size
    require(
        np.array_equal(total, np.arange(100) * size + sum(range(size))),
        "the operation after the trouble has a wrong result",
    )


async def _shrink(comm: Communicator, see: Callable[[str], None]) -> Any:
    """Go on until nobody is lost for some time. The world ranks that are left, or the `PeerLost` that forbids to go on."""
    for tries in range(_TRIES):
        try:
            comm = await comm.shrink(timeout=_PATIENCE)
        except PeerLost as error:
            if comm.rank not in error.peers:
                see("shrink is refused to a minority")
            return error
        see("shrink again because another rank is lost" if tries else "shrink without another loss")
        try:
            await _in_step(comm)
            await asyncio.sleep(4 * LIVENESS)  # whoever has died meanwhile is noticed
            await comm.barrier()
        except PeerLost:
            continue
        return comm.ranks
    raise AssertionError(f"{_TRIES} shrinks were not enough")


async def restart(world: World) -> None:
    """The same ranks form a new world, as a launcher would have them do, and it works."""
    plan = world.plan
    cluster = Cluster(
        plan.size,
        seed=plan.seed + 1,
        conditions=plan.conditions,
        options=Options(timeout=None),
        liveness_timeout=LIVENESS,
        trace=world.cluster.trace,
    )
    tasks = [cluster.spawn(comm.rank, _in_step(comm)) for comm in cluster.comms]
    await asyncio.gather(*tasks)
    await asyncio.gather(*(comm.close() for comm in cluster.comms))
