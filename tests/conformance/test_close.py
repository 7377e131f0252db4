"""Leaving in good order: what was complete stays complete everywhere, what was pending names who left, and nothing remains."""

import asyncio
import gc
import os
import random

import numpy as np
import pytest
from faults import done_at_once, in_step, in_virtual_time, loop_complaints, settle, turns
from ranks import on_all, ordinary, outcomes

import asynccoll
from asynccoll import CommunicatorClosed, NotInitialized
from asynccoll.sim.driver import Conditions

ROUNDS = 200
QUICK = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 18)

VERBS = {
    "barrier": lambda comm: comm.barrier(),
    "allreduce": lambda comm: comm.allreduce(np.ones(9)),
    "large allreduce": lambda comm: comm.allreduce(np.ones(60_000)),
    "broadcast": lambda comm: comm.broadcast(np.ones(60_000) if comm.rank == 1 else None, root=1),
    "allgather": lambda comm: comm.allgather(np.ones(ordinary(20_000, 2_000))),
    "objects": lambda comm: comm.allreduce([comm.rank] * 1000),
}


def assert_left(error, origin, rank, cause="closed"):
    assert type(error) is CommunicatorClosed, error
    assert (error.origin, error.cause, error.rank, error.group) == (origin, cause, rank, "world")


async def test_barrier_then_immediate_close(world):
    with loop_complaints() as complaints:
        for number in range(ordinary(ROUNDS, 20)):
            async with world(4) as comms:

                async def one(comm, number=number):
                    await comm.barrier()
                    if comm.rank != number % 4:  # one rank leaves without even a turn of the loop in between
                        await turns(comm.rank)
                    await comm.close()

                await on_all(comms, one)
    assert complaints == []


@pytest.mark.parametrize("verb", VERBS)
async def test_an_operation_that_the_leaver_has_completed_completes_everywhere(world, verb):
    rng = random.Random(verb)
    for number in range(ordinary(15, 3)):
        size = 2 + number % 3
        async with world(size, conditions=QUICK) as comms:

            async def one(comm):
                if rng.random() < 0.5:
                    await (asyncio.sleep(rng.random() / 50) if in_virtual_time() else turns(rng.randrange(9)))
                result = await VERBS[verb](comm)
                await comm.close()
                return result

            results = await on_all(comms, one)
            assert len(results) == len(comms)  # none raised


@pytest.mark.parametrize("verb", VERBS)
async def test_what_is_pending_names_the_rank_that_left(world, verb):
    async with world(3, conditions=QUICK) as comms:
        last = len(comms) - 1
        works = [VERBS[verb](comm) for comm in comms[:last]]
        await comms[last].close()
        results = await asyncio.gather(*works, return_exceptions=True)
        for rank, error in enumerate(results):
            assert_left(error, last, rank)
        assert f"rank {last} left the communicator (closed)" in str(results[0])
        assert [comm.pending() for comm in comms] == [[]] * len(comms)


async def test_what_is_pending_on_the_leaver_ends_too(world):
    async with world(3) as comms:
        works = [comms[1].allreduce(np.ones(100_000)) for _ in range(5)]
        await comms[1].close()
        for work in works:
            assert_left(work.exception(), 1, 1)
        for comm in (comms[0], *comms[2:]):
            for work in [comm.allreduce(np.ones(100_000)) for _ in range(5)]:
                with pytest.raises(CommunicatorClosed) as caught:
                    await work
                assert_left(caught.value, 1, comm.rank)


async def test_later_calls_on_the_others_fail_at_once(world):
    async with world(3) as comms:
        await comms[0].close()
        await settle()
        for comm in comms[1:]:
            for call in VERBS.values():
                work = call(comm)
                assert await done_at_once(work)
                assert_left(work.exception(), 0, comm.rank)


async def test_an_exception_out_of_the_block_is_the_cause_that_the_others_see(world):
    async with world(3) as comms:
        last = len(comms) - 1
        works = [comm.barrier() for comm in comms[:last]]
        with pytest.raises(LookupError):
            async with comms[last]:
                raise LookupError("no such shard")
        for rank, error in enumerate(await asyncio.gather(*works, return_exceptions=True)):
            assert_left(error, last, rank, "failed with LookupError: no such shard")
            assert "failed with LookupError: no such shard" in str(error)


class Unprintable(Exception):
    def __str__(self):
        raise ZeroDivisionError("in __str__")

    __repr__ = __str__


async def test_an_exception_that_cannot_be_printed_comes_out_of_the_block_and_is_told(world):
    async with world(3) as comms:
        *others, leaver = comms
        works = [comm.barrier() for comm in others]
        error = Unprintable()
        with pytest.raises(Unprintable) as caught:
            async with leaver:
                raise error
        assert caught.value is error
        assert leaver.closed
        cause = "failed with Unprintable: <its __str__ raised ZeroDivisionError>"
        for rank, left in enumerate(await asyncio.gather(*works, return_exceptions=True)):
            assert_left(left, leaver.rank, rank, cause)


@pytest.mark.parametrize("verb", ["init", "connect"])
async def test_an_exception_that_cannot_be_printed_closes_what_the_block_opened(verb):
    error = Unprintable()
    with pytest.raises(Unprintable) as caught:
        async with getattr(asynccoll, verb)() as comm:
            raise error
    assert caught.value is error
    assert comm.closed
    with pytest.raises(NotInitialized):
        asynccoll.rank()


async def test_a_very_long_cause_is_cut(world):
    async with world(3, timeout=5.0) as comms:
        work = comms[0].barrier()

        async def fail():
            async with comms[1]:
                comms[1].barrier()  # pending, so that an abort carries the cause as well
                raise LookupError("x" * 1_000_000)

        with pytest.raises(LookupError):
            await fail()
        with pytest.raises(CommunicatorClosed) as caught:
            await work
        assert caught.value.cause.startswith("failed with LookupError: xxx")
        assert len(caught.value.cause) <= 1 << 14


async def test_a_goodbye_is_heard_in_the_middle_of_bulk_data(world):
    # The leaver has unread bytes: its kernel must not turn the goodbye into a reset.
    for number in range(ordinary(20, 5)):
        async with world(2, timeout=5.0) as comms:
            leaver = number % 2
            works = [comm.allreduce(np.ones(ordinary(1_000_000, 100_000))) for comm in comms]
            await (asyncio.sleep(0.01 * number) if in_virtual_time() else turns(number // 2))
            if works[leaver].done():
                continue
            await comms[leaver].close()
            for rank, result in enumerate(await asyncio.gather(*works, return_exceptions=True)):
                if rank != leaver and isinstance(result, BaseException):
                    assert_left(result, leaver, rank)


async def test_after_close_every_verb_says_so_at_once(world):
    async with world(2) as comms:
        await on_all(comms, lambda comm: comm.close())
        for call in VERBS.values():
            with pytest.raises(NotInitialized, match="is closed; open a new one") as caught:
                call(comms[0])
            assert isinstance(caught.value, RuntimeError)
        assert comms[0].closed
        assert comms[0].pending() == []
        assert "closed" in repr(comms[0])
        assert (comms[0].rank, comms[0].world_size, comms[0].ranks) == (
            0,
            len(comms),
            tuple(range(len(comms))),
        )


async def test_closing_twice_is_silent(world):
    async with world(3) as comms:
        await comms[0].close()
        await comms[0].close()
        await asyncio.gather(comms[1].close(), comms[1].close())


async def test_all_may_close_with_operations_pending(world):
    async with world(3) as comms:
        works = [comm.allreduce(np.ones(300_000), timeout=5.0) for comm in comms]
        works += [comm.barrier(timeout=5.0) for comm in comms[:2]]
        await on_all(comms, lambda comm: comm.close())
        results = await asyncio.gather(*works, return_exceptions=True)
        assert {type(result) for result in results if isinstance(result, BaseException)} <= {
            CommunicatorClosed
        }
        assert all(isinstance(result, CommunicatorClosed) for result in results[len(comms) :])


async def test_a_rank_that_leaves_during_an_inquest_does_not_hold_it_up(world):
    async with world(3) as comms:
        loop = asyncio.get_running_loop()
        started = loop.time()
        works = [comm.allreduce(np.ones(8 if comm.rank else 9)) for comm in comms[:-1]]
        await comms[-1].close()
        results = await asyncio.gather(*works, return_exceptions=True)
        assert all(isinstance(result, Exception) for result in results)
        if in_virtual_time():
            assert loop.time() - started < 1.2


async def test_closing_takes_little_time(world):
    async with world(4) as comms:
        await in_step(comms)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await on_all(comms, lambda comm: comm.close())
        if in_virtual_time():
            assert loop.time() - started < 0.02


async def test_a_peer_that_does_not_close_costs_a_second_at_most(world):
    async with world(3) as comms:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await comms[0].close()
        if in_virtual_time():
            assert loop.time() - started <= 1.0
        # The others can still take their time.
        works = await outcomes(comms[1:], lambda comm: comm.barrier())
        assert [error.origin for error in works] == [0] * (len(comms) - 1)


@pytest.mark.fixed_size("a world of one")
async def test_a_world_of_one_closes(world):
    async with world(1) as comms:
        assert await comms[0].allreduce(5) == 5
        await comms[0].close()
        with pytest.raises(NotInitialized):
            comms[0].barrier()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_nothing_is_left_behind(world):
    async with world(4) as comms:  # imports, and whatever the loop opens lazily
        await in_step(comms)
    gc.collect()
    await turns(3)
    tasks, before = asyncio.all_tasks(), descriptors()
    for _ in range(5):
        async with world(4) as comms:
            await in_step(comms)
            comms[0].allreduce(np.ones(300_000))
            comms[1].barrier()
        async with world(3) as comms:
            await outcomes(comms[:-1], lambda comm: comm.barrier(timeout=0.01))
    await turns(3)
    assert asyncio.all_tasks() == tasks
    assert descriptors() == before


async def test_leaving_by_the_cancel_of_a_task_tells_the_others(world):
    async with world(2) as comms:

        async def one():
            async with comms[0] as comm:
                await comm.allreduce(np.ones(300_000))

        task = asyncio.create_task(one())
        await turns(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        with pytest.raises(Exception, match="rank 0") as caught:
            await comms[1].allreduce(np.ones(300_000))
        assert caught.value.origin == 0
        with pytest.raises(CommunicatorClosed) as closed:
            await comms[1].barrier()
        assert closed.value.origin == 0


@pytest.mark.parametrize("size", [1, 20_000])
async def test_a_message_that_came_before_its_group_was_made_is_received_after_the_sender_has_left(
    world, size
):
    async with world(2) as comms:
        group = comms[0].new_group([0, 1])
        await group.send(
            np.arange(size, dtype=np.uint8), 1
        )  # small enough to be complete when it has been copied
        await comms[0].close()
        with pytest.raises(CommunicatorClosed):
            await comms[1].recv(0)
        await settle()
        group = comms[1].new_group([0, 1])
        value = await group.recv(0)
        assert (value == np.arange(size, dtype=np.uint8)).all()
        with pytest.raises(CommunicatorClosed):
            await group.recv(0)
