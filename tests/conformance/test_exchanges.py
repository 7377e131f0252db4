"""What gather, scatter and alltoall have in common: arguments, memory while a rank is late, company, a close."""

import asyncio

import pytest
from exchanges import refused_at
from faults import early_bytes, in_step, in_virtual_time, settle
from ranks import on_all, ordinary, outcomes
from verbs import EXCHANGING, right, start


@pytest.mark.parametrize("verb", EXCHANGING)
async def test_the_common_arguments_are_checked(world, verb):
    async with world(2) as comms:
        for options, says in (
            ({"name": 5}, "name= must be a string"),
            ({"timeout": 0}, "timeout=0"),
        ):
            await refused_at(
                comms,
                1,
                lambda comm, options=options: start(comm, verb, 3, **(options if comm.rank == 1 else {})),
                ValueError,
                says,
            )


@pytest.mark.parametrize("verb", EXCHANGING)
async def test_a_rank_that_is_late_keeps_little_of_what_the_others_send(world, verb):
    count = ordinary(1 << 18, 1 << 12)
    async with world(4) as comms:
        works = {comm: [start(comm, verb, count) for _ in range(3)] for comm in comms[1:]}
        if in_virtual_time():
            await asyncio.sleep(1)
        await settle()
        assert early_bytes(comms[0]) <= (len(comms) - 1) * (256 << 10)
        works[comms[0]] = [start(comms[0], verb, count) for _ in range(3)]
        for comm, mine in works.items():
            for work in mine:
                assert right(comm, verb, count, await work)
        await in_step(comms)


async def test_many_at_once_do_not_wait_for_one_another(world):
    """All verbs and sizes under way together, awaited in another order."""
    async with world(4) as comms:
        size = len(comms)
        plan = [
            (verb, count, root % size)
            for root, count in enumerate((0, 5, 600, 20_000))
            for verb in EXCHANGING
            for _ in range(2)
        ]

        async def rank(comm):
            works = [start(comm, verb, count, root) for verb, count, root in plan]
            works = [works[i] for i in range(len(works) - 1, -1, -1)]
            results = await asyncio.gather(*works)
            return [
                right(comm, verb, count, result, root)
                for (verb, count, root), result in zip(reversed(plan), results, strict=True)
            ]

        assert await on_all(comms, rank) == [[True] * len(plan)] * size


@pytest.mark.parametrize("verb", EXCHANGING)
async def test_closing_ends_it_on_the_others(world, verb):
    async with world(3) as comms:
        works = [start(comm, verb, 1000) for comm in comms[1:]]
        await comms[0].close()
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert type(error).__name__ == "CommunicatorClosed"
            assert error.origin == 0
        for error in await outcomes(comms[1:], lambda comm: start(comm, verb, 1)):
            assert type(error).__name__ == "CommunicatorClosed"
