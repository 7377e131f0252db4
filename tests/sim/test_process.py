"""Simulated processes: their tasks stop, go on and die together, whatever they wait for."""

import asyncio

import pytest

from asynccoll.sim.process import Process, of_the_dead, task_factory


@pytest.fixture(autouse=True)
async def tasks_belong_to_processes():
    asyncio.get_running_loop().set_task_factory(task_factory)


def now():
    return asyncio.get_running_loop().time()


async def tick(seen, count=10):
    for _ in range(count):
        await asyncio.sleep(1)
        seen.append(now())


async def test_a_process_runs_its_coroutine_and_gives_its_result():
    async def main():
        await asyncio.sleep(1)
        return "done"

    assert await Process().spawn(main()) == "done"


async def test_steps_of_a_stopped_process_wait_until_it_goes_on_and_lose_nothing():
    process, seen = Process(), []
    task = process.spawn(tick(seen, 4))
    await asyncio.sleep(1.5)
    process.freeze()
    await asyncio.sleep(10)
    assert seen == [1]
    process.thaw()
    await task
    assert seen == [1, 11.5, 12.5, 13.5]


async def test_a_value_that_came_meanwhile_is_there_when_it_goes_on():
    process = Process()
    future = asyncio.get_running_loop().create_future()

    async def main():
        return await future

    task = process.spawn(main())
    await asyncio.sleep(0)
    process.freeze()
    future.set_result("value")
    await asyncio.sleep(1)
    assert not task.done()
    process.thaw()
    assert await task == "value"


async def test_stopped_twice_in_one_turn_is_stopped_still():
    process, seen = Process(), []
    task = process.spawn(tick(seen, 1))
    await asyncio.sleep(0)
    process.freeze()
    await asyncio.sleep(5)
    process.thaw()
    process.freeze()
    await asyncio.sleep(5)
    assert seen == []
    process.thaw()
    await task
    assert seen == [10]


async def test_a_cancel_of_a_stopped_process_is_heard_when_it_goes_on():
    process, seen = Process(), []

    async def main():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            seen.append(now())
            raise

    task = process.spawn(main())
    await asyncio.sleep(1)
    process.freeze()
    task.cancel()
    await asyncio.sleep(5)
    assert seen == []
    process.thaw()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [6]


async def test_tasks_that_its_tasks_start_belong_to_it():
    process, seen = Process(), []

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(tick(seen, 2))
            await asyncio.gather(tick(seen, 2))

    task = process.spawn(main())
    await asyncio.sleep(1.5)
    process.freeze()
    await asyncio.sleep(10)
    assert seen == [1, 1]
    process.thaw()
    await task
    assert seen == [1, 1, 11.5, 11.5]


async def test_other_processes_and_tasks_of_none_go_on():
    frozen, other, seen = Process(), Process(), []
    stuck = frozen.spawn(tick([], 3))
    frozen.freeze()
    await asyncio.gather(other.spawn(tick(seen, 2)), tick(seen, 2))
    assert seen == [1, 1, 2, 2]
    assert not stuck.done()
    frozen.thaw()
    await stuck


async def test_a_killed_process_takes_no_step_more_and_cannot_object():
    process, seen = Process(), []

    async def main():
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                seen.append("caught")
            finally:
                seen.append("finally")

    task = process.spawn(main())
    await asyncio.sleep(0.5)
    assert not of_the_dead(task)
    process.kill()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["finally"]
    assert of_the_dead(task)


async def test_a_finally_block_that_waits_gets_no_further_in_a_killed_process():
    process, seen = Process(), []

    async def main():
        try:
            await asyncio.sleep(1)
        finally:
            await asyncio.sleep(0)
            seen.append("after")

    task = process.spawn(main())
    await asyncio.sleep(0.5)
    process.kill()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == []


async def test_a_stopped_process_can_be_killed():
    process = Process()
    task = process.spawn(tick([]))
    await asyncio.sleep(1.5)
    process.freeze()
    await asyncio.sleep(1)
    process.kill()
    process.thaw()
    with pytest.raises(asyncio.CancelledError):
        await task
