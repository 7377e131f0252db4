"""After a loss the survivors go on without the dead: `shrink` gives all of them the same communicator, whatever dies meanwhile."""

import asyncio
import random

import numpy as np
import pytest
from faults import crash, in_virtual_time, settle, turns
from ranks import on_all, ordinary, outcomes, sizes

from asynccoll import CollectiveCancelled, CollectiveTimeout, CommunicatorClosed, NotInitialized, PeerLost


def survivors_of(comms, *dead):
    return [comm for comm in comms if comm.rank not in dead]


async def works(comms, world_ranks):
    """The communicators are one, of these world ranks, and their operations are right."""
    assert [comm.rank for comm in comms] == list(range(len(comms)))
    for comm in comms:
        assert comm.world_size == len(comms)
        assert list(comm.ranks) == world_ranks
    totals = await on_all(comms, lambda comm: comm.allreduce(np.arange(3.0) + comm.rank))
    size = len(comms)
    for total in totals:
        np.testing.assert_array_equal(total, np.arange(3.0) * size + size * (size - 1) / 2)
    assert await on_all(comms, lambda comm: comm.allgather(comm.rank)) == [list(range(size))] * size
    await on_all(comms, lambda comm: comm.barrier(key="k"))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
async def test_the_survivors_go_on(world, size):
    for dead in ordinary(range(size), (0, size // 2)):
        async with world(size) as comms:
            survivors = survivors_of(comms, dead)
            failing = [comm.allreduce(np.ones(9)) for comm in survivors]
            await turns(3)
            crash(comms[dead])
            for error in await asyncio.gather(*failing, return_exceptions=True):
                assert type(error) is PeerLost
                assert error.peers == {dead}
            shrunk = await on_all(survivors, lambda comm: comm.shrink())
            await works(shrunk, [comm.rank for comm in survivors])
            assert len({comm.name for comm in shrunk}) == 1
            with pytest.raises(PeerLost):  # the old one stays as it is
                await survivors[0].barrier()


async def test_it_may_be_called_before_the_loss_is_known(world):
    async with world(4) as comms:
        size = len(comms)
        survivors = comms[:-1]
        waits = [asyncio.ensure_future(comm.shrink()) for comm in survivors]
        await settle()
        assert not any(wait.done() for wait in waits)  # as far as anybody knows the last one is still to call
        crash(comms[-1])
        await works(await asyncio.gather(*waits), list(range(size - 1)))


async def test_another_death_in_the_middle(world):
    for seed in range(ordinary(25, 4) if in_virtual_time() else 8):
        rng = random.Random(seed)
        async with world(5, **({"seed": seed} if in_virtual_time() else {})) as comms:
            first, second = rng.sample(range(len(comms)), 2)
            crash(comms[first])
            if rng.random() < 0.5:
                await settle()
            alive = survivors_of(comms, first)
            waits = {comm.rank: asyncio.ensure_future(without(comm, {first, second})) for comm in alive}
            await (asyncio.sleep(rng.random() * 0.02) if in_virtual_time() else turns(rng.randrange(40)))
            crash(comms[second])
            waits.pop(second).cancel()
            left = [comm.rank for comm in survivors_of(comms, first, second)]
            await works(await asyncio.gather(*(waits[rank] for rank in left)), left)


async def without(comm, dead):
    """As an application does: work, and shrink whenever somebody is lost; until all of ``dead`` are."""
    while not dead.isdisjoint(comm.ranks):
        try:
            await comm.barrier()
        except PeerLost:
            comm = await comm.shrink()
    return comm


async def test_a_shrunk_communicator_shrinks_again(world):
    (size,) = sizes(4)
    async with world(size) as comms:
        current = list(comms)
        for dead in range(size - 1, 1, -1):
            crash(comms[dead])
            current = await on_all(current[:dead], lambda comm: comm.shrink())
            await works(current, list(range(dead)))


async def test_a_group_shrinks_to_its_own_survivors(world):
    async with world(4) as comms:
        size = len(comms)
        order = [size - 1, 0, 1]
        groups = [comms[rank].new_group(order) for rank in order]
        crash(comms[0])
        shrunk = await on_all([groups[0], groups[2]], lambda comm: comm.shrink())
        await works(shrunk, [size - 1, 1])


async def test_without_a_loss_it_gives_all_ranks_again(world):
    async with world(3) as comms:
        everybody = list(range(len(comms)))
        first = await on_all(comms, lambda comm: comm.shrink())
        second = await on_all(comms, lambda comm: comm.shrink(name="again"))
        await works(first, everybody)
        await works(second, everybody)
        assert second[0].name == "again"


async def test_a_rank_that_has_left_is_not_waited_for(world):
    async with world(4) as comms:
        size = len(comms)
        await asyncio.gather(comms[0].close(), settle())
        crash(comms[1])
        await works(await on_all(comms[2:], lambda comm: comm.shrink()), list(range(2, size)))


async def test_a_rank_that_does_not_call_is_named(world):
    async with world(4) as comms:
        crash(comms[0])
        size = len(comms)
        for error in await outcomes(comms[1:-1], lambda comm: comm.shrink(timeout=0.3)):
            assert type(error) is CollectiveTimeout
            assert error.missing == {size - 2}  # the ranks that are left are numbered anew
            assert error.op == "shrink"
        # It comes too late for that one; the next one works.
        (late,) = await outcomes(comms[-1:], lambda comm: comm.shrink(timeout=0.3))
        assert type(late) is not PeerLost
        assert isinstance(late, Exception)
        await works(await on_all(comms[1:], lambda comm: comm.shrink()), list(range(1, size)))


async def test_cancelling_it_ends_it_everywhere_and_the_next_one_works(world):
    async with world(4) as comms:
        size = len(comms)
        crash(comms[0])
        await settle()
        waits = [asyncio.ensure_future(comm.shrink()) for comm in comms[1:-1]]
        await settle()
        waits[0].cancel()
        first, *others = await asyncio.gather(*waits, return_exceptions=True)
        assert type(first) is asyncio.CancelledError
        for error in others:
            assert type(error) is CollectiveCancelled
        (late,) = await outcomes(comms[-1:], lambda comm: comm.shrink(timeout=1.0))
        assert isinstance(late, Exception)
        await works(await on_all(comms[1:], lambda comm: comm.shrink()), list(range(1, size)))


async def test_it_takes_no_part_in_a_mesh_that_is_closed(world):
    async with world(2) as comms:
        await on_all(comms, lambda comm: comm.close())
        with pytest.raises(NotInitialized):
            await comms[0].shrink()


async def test_groups_of_survivors_go_on_through_a_loss_and_a_shrink(world):
    async with world(4) as comms:
        pair = [comms[rank].new_group([0, 1]) for rank in (0, 1)]
        work = pair[0].allreduce(1)
        crash(comms[-1])
        shrunk = await on_all(comms[:-1], lambda comm: comm.shrink())
        assert await pair[1].allreduce(2) == 3
        assert await work == 3
        inner = [comm.new_group([0, 1]) for comm in shrunk[:2]]
        assert await on_all(inner, lambda comm: comm.allreduce(comm.rank)) == [1, 1]


async def test_ranks_in_its_errors_are_those_of_the_communicator_that_is_shrunk(world):
    async with world(4) as comms:
        size = len(comms)
        crash(comms[0])
        first = await on_all(comms[1:], lambda comm: comm.shrink())
        for error in await outcomes(first[:-1], lambda comm: comm.shrink(timeout=0.3)):
            assert type(error) is CollectiveTimeout
            assert error.missing == {size - 2}


async def test_when_a_survivor_leaves_meanwhile_the_others_are_told_and_may_call_again(world):
    async with world(4) as comms:
        size = len(comms)
        crash(comms[0])
        await settle()
        waits = [asyncio.ensure_future(comm.shrink()) for comm in comms[2:]]
        await settle()
        closing = asyncio.ensure_future(comms[1].close())
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert type(error) is CommunicatorClosed
        await works(await on_all(comms[2:], lambda comm: comm.shrink()), list(range(2, size)))
        await closing


async def test_its_limit_is_that_of_the_whole_call(world):
    if not in_virtual_time():
        pytest.skip("asserts elapsed time")
    async with world(6) as comms:
        loop = asyncio.get_running_loop()
        crash(comms[-1])
        wait = asyncio.ensure_future(comms[0].shrink(timeout=2.0))
        started = loop.time()
        for at in (-2, -3):
            await asyncio.sleep(0.8)
            crash(comms[at])
        with pytest.raises(CollectiveTimeout):
            await wait
        assert loop.time() - started < 3.0
