"""Deadlines: a rank that does not call is named by all others in time, and finds an error when it does call."""

import asyncio
import itertools
import math
from datetime import timedelta

import numpy as np
import pytest
import verbs
from faults import done_at_once, in_step, in_virtual_time, settle, turns
from ranks import ordinary, outcomes, sum_of_ranks

from asynccoll import CollectiveCancelled, CollectiveTimeout
from asynccoll.sim.driver import Conditions

LIMIT = 0.05
"""Seconds. In the simulation they are exact; elsewhere they are only waited for."""
LATENCY = 0.05
"""Virtual seconds in which a few frames cross the simulated network behind what is already under way (at most 2 ms a piece)."""
FAST = Conditions(delay=0.002, piece=1 << 18, split=True, buffer=1 << 18)
"""Links that carry a few segments within the latency."""

CALLS = {
    "barrier": lambda comm: comm.barrier(timeout=LIMIT),
    "allreduce": lambda comm: comm.allreduce(np.ones(9), timeout=LIMIT),
    "large allreduce": lambda comm: comm.allreduce(np.ones(300_000), timeout=LIMIT),
    "large allreduce in place": lambda comm: comm.allreduce_(np.ones(300_000), timeout=LIMIT),
    "broadcast": lambda comm: comm.broadcast(np.ones(300_000), timeout=LIMIT),
    "allgather": lambda comm: comm.allgather(np.ones(ordinary(300_000, 3_000)), timeout=LIMIT),
    "tree": lambda comm: comm.allreduce_tree({"a": np.ones(9)}, timeout=LIMIT),
    "objects": lambda comm: comm.allreduce([comm.rank], timeout=LIMIT),
}


def _call(verb, algorithm, count):
    return lambda comm: verbs.start(comm, verb, count, algorithm=algorithm, timeout=LIMIT)


LARGE = ordinary(60_000, 3_000)
"""Elements of float64 that take several segments."""
CALLS |= {
    f"{verb}{f' by {algorithm}' if algorithm else ''} of {count}": _call(verb, algorithm, count)
    for verb, algorithm in verbs.CALLS
    if verb in verbs.REDUCING or verb in verbs.EXCHANGING
    for count in (9, LARGE)
    if count == LARGE or algorithm in (None, *verbs.ALGORITHMS.get(verb, ())[:1])
}


def absences(size):
    """Every rank alone, and every pair where somebody is left; of many ranks some of these, and half of them."""
    if size > 9:
        return [{0}, {size * 2 // 3, size - 1}, set(range(0, size, 2))]
    return [
        set(absent)
        for count in (1, 2)
        for absent in itertools.combinations(range(size), count)
        if count < size
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("call", CALLS)
async def test_every_caller_names_exactly_the_absent_ranks(world, call, size):
    async with world(size, conditions=FAST) as comms:
        loop = asyncio.get_running_loop()
        for absent in absences(size) if in_virtual_time() else [{0}, {size - 1}]:
            callers = [comm for comm in comms if comm.rank not in absent]
            started = loop.time()
            results = await outcomes(callers, CALLS[call])
            elapsed = loop.time() - started
            for comm, error in zip(callers, results, strict=True):
                assert type(error) is CollectiveTimeout
                assert error.missing == absent
                assert 0 < error.limit <= LIMIT + 0.005  # less where this rank called after the first
                assert error.rank == comm.rank
                assert isinstance(error, TimeoutError)
            if in_virtual_time():
                assert LIMIT <= elapsed < LIMIT + LATENCY
                assert all(LIMIT <= error.elapsed < LIMIT + LATENCY for error in results)
                assert all(error.limit == LIMIT for error in results)

            for rank in absent:  # late: an error at once, and none of the others' bytes
                work = CALLS[call](comms[rank])
                assert await done_at_once(work)
                error = work.exception()
                assert type(error) is CollectiveTimeout
                assert error.missing == {rank}
                assert "before the others gave up" in str(error)
            await in_step(comms)


async def test_where_all_have_called_and_data_is_late_nobody_is_named(world):
    """The limit passes in the middle of the transfer. Ranks that have all they need have their result, which is right."""
    if not in_virtual_time():
        pytest.skip("needs links that crawl")
    piece = ordinary(1 << 12, 1 << 8)
    crawling = Conditions(delay=0.002, piece=piece, split=True, buffer=2 * piece)
    for verb, algorithm in verbs.CALLS[1:]:
        async with world(4, conditions=crawling) as comms:
            results = await outcomes(
                comms,
                lambda comm, verb=verb, algorithm=algorithm: verbs.start(
                    comm, verb, LARGE, algorithm=algorithm, timeout=LIMIT
                ),
            )
            assert any(isinstance(result, CollectiveTimeout) for result in results), (verb, algorithm)
            for comm, result in zip(comms, results, strict=True):
                if isinstance(result, BaseException):
                    assert type(result) is CollectiveTimeout
                    assert result.missing == set()
                    assert "every rank called it, but data did not arrive in time" in str(result)
                else:
                    assert verbs.right(comm, verb, LARGE, result), (verb, algorithm, comm.rank)
            await in_step(comms)


async def test_a_late_call_of_another_kind_fails_as_well(world):
    async with world(3) as comms:
        callers = comms[:-1]
        results = await outcomes(callers, lambda comm: comm.allreduce(np.ones(70_000), timeout=LIMIT))
        assert [type(error) for error in results] == [CollectiveTimeout] * len(callers)
        with pytest.raises(CollectiveTimeout):
            await comms[-1].allgather("something else")
        await in_step(comms)


async def test_the_tightest_deadline_of_all_ranks_holds(world):
    async with world(4) as comms:
        loop = asyncio.get_running_loop()
        for absent in range(4):
            tight = 1 if absent != 1 else 0
            started = loop.time()
            results = await outcomes(
                [comm for comm in comms if comm.rank != absent],
                lambda comm, tight=tight: comm.barrier(timeout=LIMIT if comm.rank == tight else 500.0),
            )
            assert len(results) == len(comms) - 1
            for error in results:
                assert (type(error), error.missing) == (CollectiveTimeout, {absent})
            if in_virtual_time():
                assert LIMIT <= loop.time() - started < LIMIT + LATENCY
            with pytest.raises(CollectiveTimeout):
                await comms[absent].barrier()
            await in_step(comms)


async def test_a_deadline_counts_from_the_call_on_the_rank_that_set_it(world):
    async with world(2) as comms:
        loop = asyncio.get_running_loop()
        patient = [comm.allreduce(np.ones(9), timeout=500.0) for comm in comms if comm.rank != 1]
        await asyncio.sleep(2 * LIMIT)
        impatient = await comms[1].allreduce(np.ones(9), timeout=LIMIT)
        for result in await asyncio.gather(*patient):
            np.testing.assert_array_equal(result, impatient)
        started = loop.time()
        lonely = comms[1].barrier(timeout=timedelta(seconds=LIMIT))
        with pytest.raises(CollectiveTimeout):
            await lonely
        if in_virtual_time():
            assert loop.time() - started < LIMIT + LATENCY
        others = [comm for comm in comms if comm.rank != 1]
        for error in await outcomes(others, lambda comm: comm.barrier()):
            assert type(error) is CollectiveTimeout
        await in_step(comms)


async def test_the_communicators_own_limit_is_the_default(world):
    async with world(2, timeout=LIMIT) as comms:
        with pytest.raises(CollectiveTimeout) as caught:
            await comms[0].barrier()
        assert caught.value.limit == LIMIT
        for error in await outcomes(comms[1:], lambda comm: comm.barrier()):
            assert type(error) is CollectiveTimeout
        await in_step(comms)


async def test_a_call_may_be_more_patient_than_its_communicator(world):
    async with world(2, timeout=LIMIT) as comms:
        works = [comms[0].allreduce(1, timeout=60.0)]
        await asyncio.sleep(3 * LIMIT)
        works += [comm.allreduce(2, timeout=60.0) for comm in comms[1:]]
        assert await asyncio.gather(*works) == [2 * len(comms) - 1] * len(comms)
        await in_step(comms)


@pytest.mark.parametrize("limit", [math.inf, 1e300, 1e9])
async def test_an_endless_limit_is_a_limit_like_any_other(world, limit):
    async with world(2, timeout=2.0) as comms:
        results = await outcomes(comms, lambda comm: comm.allreduce(1, timeout=limit))
        assert results == [len(comms)] * len(comms)
        await in_step(comms)


async def test_operations_around_one_that_timed_out_complete(world):
    async with world(2) as comms:
        size = len(comms)
        first = [comm.allreduce(np.ones(300_000)) for comm in comms]
        doomed = comms[0].broadcast(np.ones(300_000), timeout=LIMIT)
        after = comms[0].allgather(0)
        with pytest.raises(CollectiveTimeout):
            await doomed
        own, *others = await asyncio.gather(*first)
        for other in others:
            np.testing.assert_array_equal(own, other)
        for error in await outcomes(comms[1:], lambda comm: comm.broadcast()):
            assert type(error) is CollectiveTimeout
        ranks = list(range(size))
        assert await outcomes(comms[1:], lambda comm: comm.allgather(comm.rank)) == [ranks] * (size - 1)
        assert await after == ranks
        await in_step(comms)


async def test_memory_is_not_touched_after_a_timeout(world):
    async with world(3) as comms:
        arrays = [np.full(300_000, comm.rank, np.float32) for comm in comms]

        async def one(comm):
            with pytest.raises(CollectiveTimeout):
                await comm.allreduce_(arrays[comm.rank], timeout=LIMIT)
            arrays[comm.rank].view("uint8")[:] = 0xA5

        await asyncio.gather(*map(one, comms[:-1]))
        await one(comms[-1])
        await in_step(comms)
        assert all((array.view("uint8") == 0xA5).all() for array in arrays)


async def test_a_call_that_crosses_the_deadline_ends_well_or_with_a_timeout(world):
    if not in_virtual_time():
        pytest.skip("the moment can be chosen in virtual time only")
    async with world(3) as comms:
        rng = np.random.default_rng(11)
        kinds = set()
        size, total = len(comms), sum(comm.rank + 1.0 for comm in comms)
        for number in range(ordinary(60, 30)):
            delay = LIMIT + rng.uniform(ordinary(-0.004, -0.03), 0.008)  # with more ranks it takes longer
            late = number % 3

            async def one(comm, delay=delay, late=late):
                if comm.rank == late:
                    await asyncio.sleep(delay)
                return await comm.allreduce(np.full(9, comm.rank + 1.0), timeout=LIMIT)

            results = await outcomes(comms, one)
            for result in results:
                if isinstance(result, CollectiveTimeout):
                    assert result.missing <= {late}
                else:
                    np.testing.assert_array_equal(result, np.full(9, total))
            kinds.add(sum(isinstance(result, CollectiveTimeout) for result in results))
            await in_step(comms)
        assert {0, size} <= kinds


async def test_a_rank_whose_loop_is_held_shows_as_missing(world):
    # Rank 1 has called, but then it does not run: nobody hears its answer, so after half a second it counts as absent.
    if in_virtual_time():
        pytest.skip("a held loop cannot be had in one virtual clock")
    async with world(3) as comms:
        driver = comms[1]._pump
        for peer, sock in driver._sockets.items():
            driver.loop.remove_reader(sock.fileno())
            driver._blocked.add(peer)  # it writes nothing either
        works = [comm.allreduce(np.ones(9), timeout=LIMIT) for comm in comms]
        results = await asyncio.gather(works[0], works[2], return_exceptions=True)
        assert [(type(error), error.missing) for error in results] == [(CollectiveTimeout, {1})] * 2
        for peer, sock in driver._sockets.items():
            driver.loop.add_reader(sock.fileno(), driver._readable, peer, sock)
            driver._blocked.discard(peer)
            driver.write(peer)
        with pytest.raises(CollectiveTimeout):
            await works[1]
        await in_step(comms)


# -- asyncio's own ways of limiting a wait: they cancel ---------------------------------------------------------


async def test_wait_for_cancels_everywhere(world):
    async with world(2) as comms:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(comms[0].allreduce(np.ones(300_000)), LIMIT)
        await settle()
        for error in await outcomes(comms[1:], lambda comm: comm.allreduce(np.ones(300_000))):
            assert (type(error), error.origin) == (CollectiveCancelled, 0)
        await in_step(comms)


async def test_asyncio_timeout_cancels_everywhere(world):
    async with world(2) as comms:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(LIMIT):
                await comms[1].allreduce(np.ones(300_000))
        await settle()
        others = [comm for comm in comms if comm.rank != 1]
        for error in await outcomes(others, lambda comm: comm.allreduce(np.ones(300_000))):
            assert (type(error), error.origin) == (CollectiveCancelled, 1)
        await in_step(comms)


async def test_wait_for_of_an_operation_in_time_gives_its_result(world):
    async with world(2) as comms:
        works = [asyncio.wait_for(comm.allreduce(comm.rank), 60.0) for comm in comms]
        assert await asyncio.gather(*works) == [sum_of_ranks(comms)] * len(comms)
        works = [asyncio.wait_for(comm.barrier().wait(), 60.0) for comm in comms]
        assert await asyncio.gather(*works) == [None] * len(comms)
        await in_step(comms)


async def test_a_timeout_is_over_when_the_operation_is(world):
    # No timer of a finished operation may fail a later one, or be left behind.
    async with world(2) as comms:
        for _ in range(20):
            await outcomes(comms, lambda comm: comm.allreduce(1, timeout=LIMIT))
        if in_virtual_time():
            await asyncio.sleep(10 * LIMIT)
        else:
            await turns(5)
        works = [comms[0].allreduce(1)]
        await asyncio.sleep(2 * LIMIT)
        works += [comm.allreduce(1) for comm in comms[1:]]
        assert await asyncio.gather(*works) == [len(comms)] * len(comms)
        await in_step(comms)
