"""Nobody leaves a barrier, or any other verb, before everybody has entered it."""

import asyncio
import random

import numpy as np
import pytest
from faults import in_virtual_time, turns
from ranks import on_all, ordinary, outcomes

from asynccoll import RemoteError

VERBS = {
    "barrier": lambda comm: comm.barrier(),
    "an empty allreduce": lambda comm: comm.allreduce(np.zeros(0)),
    "allreduce by ring": lambda comm: comm.allreduce(np.ones(40), algorithm="ring"),
    "allreduce by tree": lambda comm: comm.allreduce(np.ones(40), algorithm="tree"),
    "allreduce by doubling": lambda comm: comm.allreduce(np.ones(40), algorithm="doubling"),
    "allreduce in place": lambda comm: comm.allreduce_(np.ones(3)),
    "allreduce of objects": lambda comm: comm.allreduce([comm.rank]),
    "a tree of nothing": lambda comm: comm.allreduce_tree({}),
    "broadcast": lambda comm: comm.broadcast(np.ones(3) if comm.rank == 0 else None),
    "broadcast from the last": lambda comm: comm.broadcast("x", comm.world_size - 1),
    "allgather": lambda comm: comm.allgather(np.ones(comm.rank)),
}


async def pause(rng):
    """At random up to 50 ms of virtual time; over sockets up to 20 turns of the loop."""
    if in_virtual_time():
        await asyncio.sleep(rng.uniform(0, 0.05))
    else:
        await turns(rng.randrange(20))


@pytest.mark.parametrize(
    ("size", "rounds"),
    [
        *((size, 200) for size in (1, 2, 3, 4, 5, 6, 7, 9)),
        *((size, 40) for size in (12, 16, 24, 33)),
        *(pytest.param(size, 200, marks=pytest.mark.slow) for size in (12, 16, 24, 33)),
    ],
)
async def test_no_rank_leaves_before_the_last_has_entered(world, size, rounds):
    async with world(size) as comms:
        entered = [0] * size

        async def rank(comm):
            rng = random.Random(1000 * size + comm.rank)
            for number in range(1, rounds + 1):
                await pause(rng)
                entered[comm.rank] = number
                assert await comm.barrier() is None
                missing = [other for other in range(size) if entered[other] < number]
                assert not missing, f"rank {comm.rank} left round {number} before {missing} entered"

        await on_all(comms, rank)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [2, 3, 4, 6, 7])
async def test_every_verb_waits_for_each_possible_latecomer(world, size, verb):
    async with world(size) as comms:
        for late in ordinary(range(size), (0, 1, size * 2 // 3, size - 1)):
            early = [VERBS[verb](comm) for comm in comms if comm.rank != late]
            if in_virtual_time():
                await asyncio.sleep(1.0)
            else:
                await turns(60)
            assert not any(work.done() for work in early), f"a rank did not wait for rank {late}"
            await asyncio.gather(*early, VERBS[verb](comms[late]))


async def test_barriers_may_be_under_way_together(world):
    async with world(5) as comms:

        async def rank(comm):
            works = [comm.barrier() for _ in range(30)]
            assert await asyncio.gather(*works) == [None] * 30
            assert comm.pending() == []

        await on_all(comms, rank)


async def test_a_barrier_overtakes_a_large_array(narrow_world):
    async with narrow_world(2) as comms:
        value = np.arange(1 << 17)
        large = [comm.broadcast(value if comm.rank == 0 else None) for comm in comms]
        await on_all(comms, lambda comm: comm.barrier())
        assert not large[1].done()
        for result in await asyncio.gather(*large):
            np.testing.assert_array_equal(result, value)


async def test_a_name_must_agree_and_is_shown(world):
    async with world(2) as comms:
        await on_all(comms, lambda comm: comm.barrier(name="epoch"))
        for error in await outcomes(comms, lambda comm: comm.barrier(name=f"epoch {comm.rank}")):
            assert error.field == "name"
            assert "epoch 1" in str(error)


async def test_a_wrong_argument_on_one_rank_ends_the_barrier_on_all(world):
    async with world(3) as comms:
        errors = await outcomes(comms, lambda comm: comm.barrier(timeout=-1 if comm.rank == 2 else None))
        assert [type(error) for error in errors] == [
            ValueError if comm.rank == 2 else RemoteError for comm in comms
        ]
        await on_all(comms, lambda comm: comm.barrier())
