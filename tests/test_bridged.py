"""``progress="thread"``: works of any running loop, of a mesh in a thread of its own that nothing in those loops holds up."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import asynccoll
from asynccoll import Communicator, NotInitialized, RendezvousError, Work
from asynccoll.bridged import Bridged
from asynccoll.errors import CollectiveCancelled, CommunicatorClosed
from asynccoll.testing import local_world

LIMIT = 30
"""Seconds after which a wait has failed."""


def pair():
    return local_world(2, progress="thread", timeout=LIMIT)


def alone(**options):
    return asynccoll.connect(rank=0, world_size=1, progress="thread", **options)


def elsewhere(function, *args):
    """A coroutine function in a loop and a thread of its own. Returns the thread."""
    thread = threading.Thread(target=lambda: asyncio.run(function(*args)))
    thread.start()
    return thread


def mesh_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("asynccoll")]


class TestCalls:
    async def test_a_work_belongs_to_the_loop_of_the_caller(self):
        async with pair() as comms:
            assert all(isinstance(comm, Bridged) and isinstance(comm, Communicator) for comm in comms)
            works = [comm.allreduce(np.arange(3.0)) for comm in comms]
            for work in works:
                assert isinstance(work, Work)
                assert work.get_loop() is asyncio.get_running_loop()
            for result in await asyncio.gather(*works):
                np.testing.assert_array_equal(result, [0, 2, 4])

    async def test_a_blocked_loop_holds_no_operation_up(self):
        async with pair() as comms:
            values = [np.full(1_000_000, rank + 1.0) for rank in range(2)]
            theirs, there = [], threading.Event()

            async def other():
                theirs.append(await comms[1].allreduce(values[1]))
                there.set()

            thread = elsewhere(other)
            mine = comms[0].allreduce(values[0])
            assert there.wait(LIMIT)  # blocks this loop until the other rank has what it needs this one for
            assert not mine.done()
            np.testing.assert_array_equal(theirs[0], np.full(1_000_000, 3.0))
            np.testing.assert_array_equal(await mine, theirs[0])
            thread.join(LIMIT)

    async def test_calls_of_many_loops_keep_one_order(self):
        async with alone() as comm:
            count, found = 50, []

            async def many(number):
                for turn in range(count):
                    work = comm.allgather((number, turn))
                    assert work.get_loop() is asyncio.get_running_loop()
                    found.append(await work)

            threads = [elsewhere(many, number) for number in range(3)]
            await many(3)
            for thread in threads:
                thread.join(LIMIT)
            for number in range(4):
                assert [turn for [(who, turn)] in found if who == number] == list(range(count))
            assert comm.stats()["operations"] == 4 * count

    async def test_the_value_is_that_at_the_call(self):
        async with alone() as comm:
            value = {"a": [1]}
            work = comm.broadcast(value)
            value["a"].append(2)
            assert await work == {"a": [1]}

    async def test_pending_and_stats_know_what_was_called_just_now(self):
        async with pair() as comms:
            work = comms[0].barrier()
            assert comms[0].pending() == ["barrier #0"]
            assert comms[0].stats()["pending"] == 1
            await asyncio.gather(work, comms[1].barrier())
            assert comms[0].pending() == []

    async def test_without_a_running_loop_it_points_to_the_facade(self):
        async with alone() as comm:
            for call in (
                comm.barrier,
                lambda: comm.allreduce_stream(np.ones(3)),
                lambda: comm.new_group([0]),
            ):
                with pytest.raises(RuntimeError, match=r"without a running event loop.*asynccoll\.sync"):
                    await asyncio.to_thread(call)
            await comm.barrier()
            assert comm.stats()["operations"] == 1  # none of them has taken a number

    async def test_a_reduce_function_runs_in_the_meshs_thread_and_starts_nothing(self):
        async with pair() as comms:
            seen = []

            def reduce(a, b):
                seen.append(threading.current_thread().name)
                for call in (comms[0].barrier, lambda: comms[0].new_group([0])):
                    with pytest.raises(RuntimeError, match="inside a reduce function"):
                        call()
                return a + b

            assert await asyncio.gather(*(comm.allreduce(comm.rank, reduce) for comm in comms)) == [1, 1]
            assert seen == ["asynccoll"]

    async def test_sys_exit_in_a_reduce_function_is_raised_by_the_work(self):
        async with pair() as comms:

            def reduce(a, b):
                sys.exit(3)

            other = comms[1].allreduce(1, reduce)
            with pytest.raises(SystemExit) as caught:
                await comms[0].allreduce(1, reduce)
            assert caught.value.code == 3
            with pytest.raises(asynccoll.RemoteError, match="SystemExit"):
                await other

    async def test_a_result_for_a_closed_loop_is_nobodys(self):
        async with pair() as comms:

            async def leave():
                comms[0].allreduce(np.ones(3))

            await asyncio.to_thread(lambda: asyncio.run(leave()))
            await comms[1].allreduce(np.ones(3))
            assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [2, 2]

    async def test_the_parts_of_a_stream_come_to_the_caller(self):
        async with pair() as comms:
            values = np.arange(300_000.0)
            other = comms[1].allreduce_stream(values)
            seen = np.zeros(300_000)
            async for offset, view in comms[0].allreduce_stream(values):
                seen[offset : offset + len(view)] += view
            np.testing.assert_array_equal(seen, 2 * values)
            await other

    async def test_groups_share_the_thread(self):
        async with pair() as comms:
            before = len(mesh_threads())
            groups = [comm.new_group([1, 0]) for comm in comms]
            halves = await asyncio.gather(*(comm.split(comm.rank) for comm in comms))
            assert await asyncio.gather(*(group.allgather(group.rank) for group in groups)) == [[0, 1]] * 2
            assert await asyncio.gather(*(half.allreduce(5) for half in halves)) == [5, 5]
            assert len(mesh_threads()) == before
            await groups[0].close()
            with pytest.raises(NotInitialized, match="new_group"):
                groups[0].barrier()
            assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [2, 2]


class TestCancel:
    async def test_it_aborts_everywhere_and_the_memory_is_free_on_return(self):
        async with pair() as comms:
            memory = bytearray(1 << 20)
            work = comms[0].allreduce_(np.frombuffer(memory, np.float32))
            with pytest.raises(BufferError):
                memory.append(0)
            assert work.cancel()
            assert work.cancelled()
            memory.append(0)
            with pytest.raises(asyncio.CancelledError):
                await work
            with pytest.raises(CollectiveCancelled) as caught:
                await comms[1].allreduce_(np.ones(1 << 18, np.float32))
            assert caught.value.origin == 0
            assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [2, 2]

    async def test_what_is_complete_is_not_cancelled_though_the_loop_has_not_come_to_it(self):
        async with alone() as comm:
            work = comm.allreduce(7)
            assert comm.pending() == []  # the mesh's thread has done it
            assert not work.done()
            assert not work.cancel()
            assert work.done()
            assert await work == 7

    async def test_the_forms_of_asyncio_pass_it_on(self):
        async with pair() as comms:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(comms[0].barrier(), 0.001)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await comms[0].barrier().wait()
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(comms[0].barrier().wait())
                    group.create_task(failing())
            kept = comms[0].barrier()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(kept), 0.001)
            for _ in range(3):
                with pytest.raises(CollectiveCancelled):
                    await comms[1].barrier()
            await asyncio.gather(kept, comms[1].barrier())

    async def test_in_the_middle_of_a_cancel_is_once(self):
        async with pair() as comms:
            work = comms[0].barrier()
            recall, inner = work._recall, []

            def handler():  # what a signal handler of asyncio's does
                work._recall = recall
                inner.append(work.cancel())
                recall()

            work._recall = handler
            assert work.cancel()
            assert inner == [True]
            assert work.cancelled()
            assert comms[0].stats()["pending"] == 0
            assert not comms[0]._under_way

    async def test_from_a_signal_handler_in_the_middle_of_a_call_waits_for_nothing(self):
        async with pair() as comms:
            work = comms[0].barrier()
            with comms[0]._gate.lock:  # where such a handler finds a call
                assert work.cancel()
                assert not comms[0]._under_way  # the mesh's thread has come through
                assert comms[0].pending() == []
            with pytest.raises(CollectiveCancelled):
                await comms[1].barrier()

    async def test_one_of_shrink_goes_through(self):
        async with pair() as comms:
            shrinking = asyncio.create_task(comms[0].shrink())
            while not comms[0]._ask(lambda: len(comms[0]._pump.engine._groups)) > 1:
                await asyncio.sleep(0)
            shrinking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await shrinking
            with pytest.raises((CollectiveCancelled, CommunicatorClosed)):
                await comms[1].shrink(timeout=LIMIT)


async def failing():
    raise LookupError


class TestOpening:
    async def test_init_makes_it_the_default(self):
        async with asynccoll.init(rank=0, world_size=1, progress="thread") as comm:
            assert asynccoll.get_communicator() is comm
            assert await asynccoll.allreduce(3) == 3
            async with alone() as second:
                with asynccoll.use(second):
                    assert await asynccoll.allgather(1) == [1]
                assert second.stats()["operations"] == 1
        with pytest.raises(NotInitialized):
            asynccoll.rank()

    async def test_the_loop_keeps_turning_and_a_cancelled_one_leaves_no_thread(self):
        before = threading.enumerate()
        opening = asyncio.create_task(connecting(LIMIT))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(mesh_threads()) == 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert threading.enumerate() == before

    async def test_a_failed_one_leaves_no_thread(self):
        before = threading.enumerate()
        with pytest.raises(RendezvousError):
            await connecting(0.05)
        assert threading.enumerate() == before

    async def test_an_unknown_progress_is_named(self):
        with pytest.raises(ValueError, match=r"progress='fibre'.*'inline' or 'thread'"):
            await asynccoll.connect(progress="fibre")


async def connecting(seconds):
    # Port 9 of this host: nobody answers.
    await asynccoll.connect(
        "tcp://127.0.0.1:9", rank=1, world_size=2, secret="s", init_timeout=seconds, progress="thread"
    )


class TestClose:
    async def test_it_stops_the_thread_and_what_is_pending_fails(self):
        before = threading.enumerate()
        async with pair() as comms:
            told = []
            comms[0].on_close(lambda: told.append(threading.current_thread()))
            work = comms[0].barrier()
            await comms[0].close()
            assert told == [threading.current_thread()]
            with pytest.raises(CommunicatorClosed):
                await work
            with pytest.raises(NotInitialized, match=r"asynccoll\.init"):
                comms[0].barrier()
            assert comms[0].closed
            await comms[0].close()
            assert comms[0].pending() == []
        assert threading.enumerate() == before

    async def test_no_call_passes_once_it_has_begun_and_those_before_it_are_started(self):
        comm = await alone()
        go_on = threading.Event()
        comm._thread.soon(lambda: go_on.wait(LIMIT))  # the mesh's thread comes to nothing meanwhile
        work = comm.allreduce(5)
        closing = asyncio.create_task(comm.close())
        await asyncio.sleep(0)
        with pytest.raises(NotInitialized):
            comm.barrier()
        go_on.set()
        await closing
        assert await work == 5

    async def test_of_two_loops_at_once_tells_it_once(self):
        comm = await alone()
        told = []

        def closing():
            told.append(1)
            elsewhere(comm.close).join(LIMIT)  # another loop comes in the middle

        comm.on_close(closing)
        await comm.close()
        assert told == [1]

    async def test_what_nobody_holds_any_more_ends_with_its_operations(self):
        before = threading.enumerate()
        comm = await alone()
        group, kept = comm.new_group([0]), comm.recv()
        (thread,) = set(mesh_threads()) - set(before)
        del comm
        gc.collect()
        assert await group.allreduce(3) == 3
        del group
        gc.collect()
        assert thread.is_alive()  # a work under way is enough
        kept.cancel()
        del kept
        async with asyncio.timeout(LIMIT):
            while thread.is_alive():
                gc.collect()
                await asyncio.sleep(0)
        assert threading.enumerate() == before

    async def test_many_at_once_are_one(self):
        before = threading.enumerate()
        comm = await alone()
        group = comm.new_group([0])
        await asyncio.gather(comm.close(), group.close(), comm.close())
        assert threading.enumerate() == before

    async def test_a_cancelled_one_still_stops_the_thread(self):
        before = threading.enumerate()
        async with contextlib.AsyncExitStack() as stack:
            comms = await stack.enter_async_context(pair())
            closing = asyncio.create_task(comms[0].close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        assert threading.enumerate() == before


def script(text, *options):
    """Run a script in a process of its own under ``-X dev``; what it prints."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", *options, "-c", text],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_end_of_the_process_without_close_is_silent():
    text = (
        "import asyncio, asynccoll\n"
        "async def main():\n"
        "    comm = await asynccoll.init(rank=0, world_size=1, progress='thread')\n"
        "    comm.recv()\n"
        "    print(await comm.allreduce(1))\n"
        "asyncio.run(main())\n"
    )
    assert script(text) == "1\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_is_refused():
    text = (
        "import asyncio, asynccoll, os\n"
        "async def main():\n"
        "    async with asynccoll.init(rank=0, world_size=1, progress='thread') as comm:\n"
        "        child = os.fork()\n"
        "        if not child:\n"
        "            try:\n"
        "                comm.barrier()\n"
        "            except RuntimeError as error:\n"
        "                print('fork of' in str(error), flush=True)\n"
        "            await comm.close()\n"
        "            os._exit(0)\n"
        "        os.waitpid(child, 0)\n"
        "        print(await comm.allreduce(1))\n"
        "asyncio.run(main(), debug=False)\n"
    )
    # From Python 3.12 on a fork of a process with threads warns.
    assert script(text, "-W", "ignore::DeprecationWarning") == "True\n1\n"
