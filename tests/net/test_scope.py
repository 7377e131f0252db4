"""Tasks that end together."""

import asyncio

import pytest

from asynccoll.net.scope import TaskScope


async def forever():
    await asyncio.get_running_loop().create_future()


async def test_stop_waits_until_every_task_has_cleaned_up():
    done = []

    async def slow_to_end():
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            done.append(True)

    scope = TaskScope(pytest.fail)
    for _ in range(3):
        scope.start(slow_to_end())
    await asyncio.sleep(0)
    await scope.stop()
    assert done == [True] * 3
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_nobody_foresaw_is_reported():
    errors = []

    async def broken():
        raise KeyError("oops")

    scope = TaskScope(errors.append)
    await asyncio.wait([scope.start(broken())])
    await scope.stop()
    assert [type(error) for error in errors] == [KeyError]


async def test_a_task_started_after_stop_does_not_run():
    ran = []

    async def late():
        ran.append(True)

    scope = TaskScope(pytest.fail)
    await scope.stop()
    task = scope.start(late())
    await asyncio.wait([task])
    assert task.cancelled()
    assert not ran


async def test_a_cancelled_stop_still_waits_for_the_tasks():
    release = asyncio.Event()

    async def stubborn():
        try:
            await forever()
        finally:
            await release.wait()

    scope = TaskScope(pytest.fail)
    task = scope.start(stubborn())
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(scope.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.sleep(0)
    assert not stopping.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert task.done()
