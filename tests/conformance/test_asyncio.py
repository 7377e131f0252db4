"""A Work is an asyncio.Future: whatever asyncio does with futures works, and what nobody keeps still finishes."""

import array
import asyncio
import gc
import itertools
import weakref

import numpy as np
import pytest
from faults import loop_complaints
from ranks import on_all, ordinary, outcomes, sizes, sum_of_ranks

from asynccoll import CollectiveCancelled, Work
from asynccoll.sim.driver import Conditions

MIXED = (0, 1, 7, 500, 5_000, 60_000)


async def in_step(comms):
    assert await on_all(comms, lambda comm: comm.allreduce(1)) == [len(comms)] * len(comms)
    assert [comm.pending() for comm in comms] == [[]] * len(comms)


async def test_a_work_is_a_future_of_the_running_loop(world):
    async with world(2) as comms:
        works = [comm.allreduce(np.ones(2)) for comm in comms]
        for work in works:
            assert isinstance(work, Work)
            assert isinstance(work, asyncio.Future)
            assert asyncio.isfuture(work)
            assert asyncio.ensure_future(work) is work
            assert work.get_loop() is asyncio.get_running_loop()
            assert not work.done()
            with pytest.raises(asyncio.InvalidStateError):
                work.result()
        for work in works:
            await work
            assert work.done()
            assert not work.cancelled()
            assert work.exception() is None
            assert work.result() is await work  # again and again


async def test_an_operation_runs_from_the_call_on_whoever_awaits_it(world):
    async with world(3) as comms:
        works = [comm.allreduce(comm.rank) for comm in comms]
        await on_all(comms, lambda comm: comm.barrier())
        await works[2]
        await in_step(comms)
        assert [work.result() for work in works] == [sum_of_ranks(comms)] * len(comms)


async def test_gather_and_wait_and_as_completed(world):
    mixed = ordinary(MIXED, MIXED[:-1])
    async with world(3) as comms:

        async def rank(comm):
            works = [comm.allreduce(np.full(n, comm.rank + 1.0)) for n in mixed]
            gathered = await asyncio.gather(*works)
            done, pending = await asyncio.wait([comm.barrier(), comm.allreduce(2)])
            assert (len(done), pending) == (2, set())
            sums = [await one for one in asyncio.as_completed([comm.allreduce(n) for n in range(5)])]
            return gathered, sorted(sums)

        size = len(comms)
        for gathered, sums in await on_all(comms, rank):
            total = float(sum_of_ranks(comms) + size)
            assert [result.tolist() for result in gathered] == [[total] * n for n in mixed]
            assert sums == [n * size for n in range(5)]


async def test_wait_is_a_coroutine_for_task_groups(world):
    async with world(3) as comms:

        async def rank(comm):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(comm.allreduce([n]).wait()) for n in range(10)]
                last = group.create_task(comm.allgather(comm.rank).wait())
            return [task.result() for task in tasks], last.result()

        size = len(comms)
        for sums, ranks in await on_all(comms, rank):
            assert sums == [[n] * size for n in range(10)]
            assert ranks == list(range(size))


async def test_wait_for_and_timeout_let_a_result_through(world):
    async with world(2) as comms:

        async def rank(comm):
            one = await asyncio.wait_for(comm.allreduce(1), 30)
            async with asyncio.timeout(30):
                two = await comm.allreduce(2)
            return one, two, await asyncio.wait_for(comm.allreduce(3).wait(), None)

        size = len(comms)
        assert await on_all(comms, rank) == [(size, 2 * size, 3 * size)] * size


@pytest.mark.parametrize("how", ["wait_for", "timeout", "wait_for the coroutine"])
async def test_an_expired_limit_of_asyncio_ends_the_operation_everywhere(world, how):
    """Rank 0 does not wait; the others call late and hear who gave up."""
    async with world(3) as comms:

        async def impatient(comm):
            if how == "timeout":
                async with asyncio.timeout(0):
                    await comm.allreduce(1)
            elif how == "wait_for":
                await asyncio.wait_for(comm.allreduce(1), 0)
            else:
                await asyncio.wait_for(comm.allreduce(1).wait(), 0.001)

        work = comms[1].allreduce(1)
        first = await outcomes(comms[:1], impatient)
        assert [type(error) for error in first] == [TimeoutError]
        late = [comm.allreduce(1) for comm in comms[2:]]
        for error in await asyncio.gather(work, *late, return_exceptions=True):
            assert type(error) is CollectiveCancelled
            assert error.origin == 0
        await in_step(comms)


async def test_cancelling_a_task_before_its_first_step_ends_the_operation_everywhere(world):
    """The operation began when the verb was called, not when the task that waits for it began."""
    async with world(2) as comms:
        task = asyncio.create_task(comms[0].allreduce(1).wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert comms[0].pending() == []
        for error in await outcomes(comms[1:], lambda comm: comm.allreduce(1)):
            assert type(error) is CollectiveCancelled
        await in_step(comms)


async def test_a_failing_sibling_in_a_task_group_cancels_the_operation_everywhere(world):
    async with world(2) as comms:
        started = asyncio.Event()

        async def fail():
            await started.wait()
            raise KeyError("sibling")

        async def rank(comm):
            if comm.rank:
                await started.wait()
                return await comm.allreduce(1)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(comm.allreduce(1).wait())
                await asyncio.sleep(0)
                group.create_task(fail())
                asyncio.get_running_loop().call_soon(started.set)
            return task

        failed, *others = await outcomes(comms, rank)
        assert isinstance(failed, ExceptionGroup)
        assert [type(error) for error in failed.exceptions] == [KeyError]
        for other in others:
            assert other == len(comms) or (type(other) is CollectiveCancelled and other.origin == 0)
        await in_step(comms)


async def test_a_shielded_operation_outlives_its_awaiter(world):
    async with world(2) as comms:
        work = comms[0].allreduce(np.ones(3))

        async def awaiter():
            return await asyncio.shield(work)

        task = asyncio.create_task(awaiter())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not work.cancelled()
        size = len(comms)
        for other in await on_all(comms[1:], lambda comm: comm.allreduce(np.ones(3))):
            assert other.tolist() == (await work).tolist() == [size] * 3
        await in_step(comms)


async def test_several_tasks_may_await_one_operation(world):
    async with world(2) as comms:
        works = [comm.allreduce([comm.rank]) for comm in comms]
        results = await asyncio.gather(*(work.wait() for work in works for _ in range(3)))
        size = len(comms)
        assert results == [list(range(size))] * (3 * size)
        assert results[0] is results[1] is results[2]


async def test_callbacks_run_later_in_the_loop_with_the_work(world):
    for size in sizes(1, 2):
        async with world(size) as comms:
            seen, unwanted = [], []
            works = [comm.allreduce(5) for comm in comms]
            for work in works:
                work.add_done_callback(seen.append)
                if size > 1:  # alone it is done at once, and its callbacks are on their way
                    work.add_done_callback(unwanted.append)
                    assert work.remove_done_callback(unwanted.append) == 1
            assert seen == []
            await asyncio.gather(*works)
            await asyncio.sleep(0)
            assert (set(seen), unwanted) == (set(works), [])
            assert [work.result() for work in seen] == [5 * size] * size


async def test_a_callback_may_start_the_next_operation(world):
    async with world(3) as comms:

        async def rank(comm):
            finished = asyncio.get_running_loop().create_future()

            def again(work):
                if work.result() > 1000:
                    finished.set_result(work.result())
                else:
                    comm.allreduce(work.result()).add_done_callback(again)

            comm.allreduce(1).add_done_callback(again)
            return await finished

        size = len(comms)
        assert await on_all(comms, rank) == [next(size**n for n in range(12) if size**n > 1000)] * size


async def test_two_hundred_mixed_operations_at_once_are_all_right(world):
    conditions = Conditions(delay=0.002, piece=1 << 16, split=True, buffer=1 << 18)
    mixed = ordinary(MIXED, (0, 1, 7, 50, 500, 5_000))
    async with world(4, conditions=conditions) as comms:
        size, total = len(comms), sum_of_ranks(comms)

        async def rank(comm):
            works = []
            for number in range(200):
                count = mixed[number % 6]
                match number % 5:
                    case 0:
                        works.append(comm.allreduce(np.full(count, comm.rank + number), algorithm="ring"))
                    case 1:
                        works.append(comm.allgather(np.full(count // 10, comm.rank)))
                    case 2:
                        works.append(comm.broadcast(np.full(count, number) if comm.rank == 3 else None, 3))
                    case 3:
                        works.append(comm.allreduce([comm.rank] * (count // 10)))
                    case 4:
                        works.append(comm.allreduce_tree({"a": np.full(count, number), "n": number}, "max"))
            # Awaited from the last to the first: the order in which one waits does not matter.
            return [await work for work in reversed(works)][::-1]

        for results in await on_all(comms, rank):
            for number, result in enumerate(results):
                count = mixed[number % 6]
                match number % 5:
                    case 0:
                        assert result.tolist() == [total + size * number] * count, number
                    case 1:
                        assert [part.tolist() for part in result] == [
                            [r] * (count // 10) for r in range(size)
                        ], number
                    case 2:
                        assert result.tolist() == [number] * count, number
                    case 3:
                        assert result == [r for r in range(size) for _ in range(count // 10)], number
                    case 4:
                        assert (result["a"].tolist(), result["n"]) == ([number] * count, number), number
        await in_step(comms)


async def test_operations_that_nobody_keeps_still_finish(world):
    """A thousand on each rank, collected as garbage all the while; the last results show that all were matched."""
    many = ordinary(1000, 100)
    async with world(3) as comms:
        memory = [[np.full(3, comm.rank + 1.0) for _ in range(10)] for comm in comms]

        async def rank(comm):
            for number in range(many):
                if number % (many // 10):
                    comm.allreduce([1, number, "x"][number % 3])
                else:
                    comm.allreduce_(memory[comm.rank][number // (many // 10)])
                if number % (many // 4) == 0:
                    if comm.rank < 3:
                        gc.collect()
                    await asyncio.sleep(0)
            if comm.rank < 3:
                gc.collect()
            await comm.barrier()
            return await comm.allreduce(comm.rank)

        size = len(comms)
        assert await on_all(comms, rank) == [sum_of_ranks(comms)] * size
        assert [comm.pending() for comm in comms] == [[]] * size
        for arrays in memory:
            assert [array.tolist() for array in arrays] == [[sum_of_ranks(comms) + size] * 3] * 10


async def test_a_finished_operation_leaves_nothing_of_the_caller_behind(world):
    """Neither arrays nor results nor works wait for the cycle collector."""

    async def rank(comm):
        array, out, value = np.ones(5), np.zeros((2, 2)), np.ones((2, 2))
        tree = {"a": np.ones(3)}
        works = [
            comm.allreduce_(array),
            comm.allreduce(value, out=out),
            comm.allreduce(value),
            comm.broadcast(value),
            comm.allgather(value),
            comm.allreduce_tree(tree),
            comm.allreduce([value], lambda a, b: a + b),
        ]
        results = [await work for work in works]
        watched = [
            array,
            out,
            value,
            tree["a"],
            *works,
            results[2],
            results[3],
            *results[4],
            results[5]["a"],
            results[6][0],
        ]
        return [weakref.ref(one) for one in watched]

    async with world(2) as comms:
        gc.collect()
        gc.disable()
        try:
            watched = itertools.chain(*await on_all(comms, rank))
            await on_all(comms, lambda comm: comm.barrier())
            left = [type(ref()).__name__ for ref in watched if ref() is not None]
            assert left == []
        finally:
            gc.enable()


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "tree"])
async def test_a_buffer_may_be_resized_as_soon_as_its_operation_is_done(world, algorithm):
    """An array.array refuses that while anybody holds a view of it: none may wait for the next turn of the loop."""
    counts = (130_000, 130_000, 130_000, 3)

    async def rank(comm):
        mine, value, out, short = (array.array("d", [comm.rank + 1.0]) * count for count in counts)
        await comm.allreduce_(mine, algorithm=algorithm)
        mine.append(1)
        results = [await comm.allreduce(value, algorithm=algorithm)]
        value.append(1)
        results.append(await comm.allreduce(value[:-1], out=out, algorithm=algorithm))
        out.append(1)
        await comm.allreduce_(short, algorithm=algorithm)
        short.append(1)
        results[0].append(1)
        assert results[1] is out
        return [mine, *results, short]

    conditions = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 19)
    async with world(3, conditions=conditions) as comms:
        gc.collect()
        gc.disable()
        try:
            ends = await on_all(comms, rank)
        finally:
            gc.enable()
        total = sum(comm.rank + 1.0 for comm in comms)
        for arrays in ends:
            for result, count in zip(arrays, counts, strict=True):
                assert result == array.array("d", [total]) * count + array.array("d", [1])


async def test_a_failure_that_nobody_awaits_is_told_to_the_loop_where_it_arose(world):
    async with world(2) as comms:
        with loop_complaints() as told:
            for comm in comms:
                comm.allreduce(np.ones(2), "median" if comm.rank == 0 else "sum")
            await in_step(comms)
            gc.collect()
            await asyncio.sleep(0)
        assert 1 <= len(told) <= len(comms)
        assert all(text.endswith("Work exception was never retrieved") for text in told)
