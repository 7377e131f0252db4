"""What gather, scatter and alltoall have in common: deaths, deadlines, arguments, memory while a rank is late, company."""

import asyncio

import numpy as np
import pytest
from exchanges import refused_at, same
from faults import crash, early_bytes, in_step, in_virtual_time, settle, turns
from ranks import on_all, ordinary, outcomes

from asynccoll import CollectiveTimeout, PeerLost

VERBS = ("gather", "scatter", "alltoall")


def start(comm, verb, count, root=0, **options):
    """The verb, on arrays of ``count`` elements that tell where they come from and, but for a gather, where they go."""
    own, ranks = float(comm.rank), range(comm.world_size)
    if verb == "gather":
        return comm.gather(np.full(count, own), root, **options)
    values = [np.full(count, own * 100 + to) for to in ranks]
    if verb == "alltoall":
        return comm.alltoall(values, **options)
    return comm.scatter(values if comm.rank == root else None, root, **options)


def right(comm, verb, count, result, root=0):
    """It is what `start` gives there."""
    ranks = range(comm.world_size)
    if verb == "scatter":
        return same(result, np.full(count, 100.0 * root + comm.rank))
    if verb == "gather" and comm.rank != root:
        return result is None
    to = comm.rank if verb == "alltoall" else 0
    scale = 100.0 if verb == "alltoall" else 1.0
    return len(result) == len(ranks) and all(
        same(found, np.full(count, scale * origin + to)) for origin, found in zip(ranks, result, strict=True)
    )


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("count", [3, 1 << 17])
async def test_a_death_ends_it_on_every_survivor(world, verb, count):
    """Before the dead rank has called, and in the middle; the root's death and another's."""
    for dead in (0, 1):
        for pause in (None, 0, 4):
            async with world(4) as comms:
                works = {comm: start(comm, verb, count) for comm in comms if comm.rank != dead}
                if pause is not None:
                    works[comms[dead]] = start(comms[dead], verb, count)
                    await turns(pause)
                crash(comms[dead])
                survivors = [comm for comm in comms if comm.rank != dead]
                results = await asyncio.gather(*(works[comm] for comm in survivors), return_exceptions=True)
                for comm, result in zip(survivors, results, strict=True):
                    if isinstance(result, BaseException) or pause is None:
                        assert type(result) is PeerLost
                        assert result.peers == {dead}
                    else:
                        assert right(comm, verb, count, result)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("count", [3, 1 << 15])
async def test_a_deadline_names_the_rank_that_has_not_called(world, verb, count):
    async with world(3) as comms:
        for late in (0, 1):
            works = [start(comm, verb, count, timeout=0.1) for comm in comms if comm.rank != late]
            for error in await asyncio.gather(*works, return_exceptions=True):
                assert type(error) is CollectiveTimeout
                assert error.missing == {late}
            with pytest.raises(CollectiveTimeout):
                await start(comms[late], verb, count)
            await in_step(comms)


@pytest.mark.parametrize("verb", VERBS)
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


@pytest.mark.parametrize("verb", VERBS)
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
            for verb in VERBS
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


@pytest.mark.parametrize("verb", VERBS)
async def test_closing_ends_it_on_the_others(world, verb):
    async with world(3) as comms:
        works = [start(comm, verb, 1000) for comm in comms[1:]]
        await comms[0].close()
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert type(error).__name__ == "CommunicatorClosed"
            assert error.origin == 0
        for error in await outcomes(comms[1:], lambda comm: start(comm, verb, 1)):
            assert type(error).__name__ == "CommunicatorClosed"
