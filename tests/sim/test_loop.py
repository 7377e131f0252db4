"""Virtual time: it stands still while anything can run, jumps to the next timer else, and never hangs."""

import asyncio
import random
import socket

import pytest

from asynccoll.sim.loop import SimLoop, Stuck


def run(main):
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


async def test_time_starts_at_0_and_does_not_pass_while_something_is_ready():
    loop = asyncio.get_running_loop()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert loop.time() == 0.0


async def test_a_day_passes_in_a_moment():
    await asyncio.sleep(86_400)
    assert asyncio.get_running_loop().time() == 86_400


async def test_timers_fire_at_their_time_in_order_and_in_the_order_of_the_calls_where_they_tie():
    loop = asyncio.get_running_loop()
    fired = []
    for name, delay in [("c", 3), ("a", 1), ("b1", 2), ("b2", 2)]:
        loop.call_later(delay, lambda name=name: fired.append((name, loop.time())))
    await asyncio.sleep(10)
    assert fired == [("a", 1), ("b1", 2), ("b2", 2), ("c", 3)]


async def test_a_timeout_ends_a_wait_that_would_never_end():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.get_running_loop().create_future(), 3600)
    assert asyncio.get_running_loop().time() == 3600


def test_a_program_that_would_hang_is_stuck():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="no timer is set"):
        run(main())


def test_a_hang_is_found_after_the_last_timer():
    async def main():
        await asyncio.sleep(100)
        await asyncio.Event().wait()

    loop = SimLoop()
    try:
        with pytest.raises(Stuck):
            loop.run_until_complete(main())
        assert loop.time() == 100
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


async def test_descriptors_are_served_before_time_moves():
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"x")
        assert await loop.sock_recv(ours, 10) == b"x"
    assert loop.time() == 0.0


def test_the_same_program_makes_the_same_trace():
    def trace(seed):
        rng = random.Random(seed)
        seen = []

        async def worker(name):
            for _ in range(20):
                await asyncio.sleep(rng.random())
                seen.append((name, asyncio.get_running_loop().time()))

        async def main():
            async with asyncio.TaskGroup() as group:
                for name in range(5):
                    group.create_task(worker(name))

        run(main())
        return seen

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)
