"""The synchronous facade: blocking verbs and futures from any thread, Ctrl-C, forks, and a quiet end.

Values are the business of the conformance suite.
"""

import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import asynccoll
import asynccoll.sync as ac
from asynccoll.background import LoopThread
from asynccoll.errors import (
    AlreadyInitialized,
    AsynccollError,
    CollectiveCancelled,
    CommunicatorClosed,
    NotInitialized,
    RemoteError,
)

TIMEOUT = 60
"""Seconds after which a wait has failed: none of these takes one."""


@contextlib.contextmanager
def pair_of_ranks(**options):
    """Two ranks in this process, each with its own thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener, concurrent.futures.ThreadPoolExecutor() as pool:
        os.environ["ASYNCCOLL_RENDEZVOUS_FD"] = str(listener.fileno())
        try:
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            opening = [
                pool.submit(
                    ac.connect, address, rank=rank, world_size=2, secret="s", init_timeout=TIMEOUT, **options
                )
                for rank in range(2)
            ]
            ranks = [future.result(TIMEOUT) for future in opening]
        finally:
            del os.environ["ASYNCCOLL_RENDEZVOUS_FD"]
        try:
            yield ranks
        finally:
            for closing in [pool.submit(comm.close) for comm in ranks]:
                closing.result(TIMEOUT)


@pytest.fixture
def pair():
    with pair_of_ranks() as ranks:
        yield ranks


@pytest.fixture
def alone():
    with ac.connect() as comm:
        yield comm


@pytest.fixture
def default():
    ac.init()
    yield
    ac.shutdown()


@contextlib.contextmanager
def held(comm):
    """The loop of ``comm`` stands still inside."""
    stands, free = threading.Event(), threading.Event()
    comm._thread.soon(lambda: stands.set() or free.wait(TIMEOUT))
    assert stands.wait(TIMEOUT)
    try:
        yield
    finally:
        free.set()


def settle(*comms):
    """Until the loops, one after the other, have done what they were asked for and read what is there."""
    for comm in comms:
        for _ in range(3):
            comm._thread.run(asyncio.sleep(0)).result(TIMEOUT)


class TestVerbs:
    def test_each_blocks_until_it_has_its_result(self, pair):
        zero, one = pair

        def rank(comm):
            array = np.full(3, comm.rank + 1.0)
            results = [
                comm.allreduce(array).tolist(),
                comm.allreduce_(array.copy(), "max").tolist(),
                comm.allreduce_tree({"a": comm.rank}),
                comm.broadcast("from one" if comm.rank == 1 else None, root=1),
                comm.allgather(comm.rank),
                comm.gather(comm.rank, 1),
                comm.scatter(["zero's", "one's"] if comm.rank == 0 else None),
                comm.alltoall([(comm.rank, to) for to in range(2)]),
                comm.all_to_all([comm.rank] * 2),
                comm.barrier(),
            ]
            return results

        with concurrent.futures.ThreadPoolExecutor() as pool:
            ends = [future.result(TIMEOUT) for future in [pool.submit(rank, comm) for comm in (zero, one)]]
        same = [[3.0] * 3, [2.0] * 3, {"a": 1}, "from one", [0, 1]]
        assert ends == [
            [*same, None, "zero's", [(0, 0), (1, 0)], [0, 1], None],
            [*same, [0, 1], "one's", [(0, 1), (1, 1)], [0, 1], None],
        ]

    def test_the_async_forms_are_futures(self, pair):
        futures = [comm.allreduce_async(np.full(2, comm.rank)) for comm in pair]
        assert all(isinstance(future, concurrent.futures.Future) for future in futures)
        assert [future.result(TIMEOUT).tolist() for future in futures] == [[1, 1]] * 2
        calls = {
            **dict.fromkeys(("allreduce__async", "allreduce_tree_async"), np.zeros(1)),
            **dict.fromkeys(("broadcast_async", "allgather_async", "gather_async"), np.zeros(1)),
            **dict.fromkeys(("scatter_async", "alltoall_async", "all_to_all_async"), [np.zeros(1)] * 2),
        }
        for name, value in calls.items():
            futures = [getattr(comm, name)(value) for comm in pair]
            for future in futures:
                future.result(TIMEOUT)
        for future in [comm.barrier_async() for comm in pair]:
            assert future.result(TIMEOUT) is None

    def test_the_other_reductions_block_and_have_async_forms_too(self, pair):
        def rank(comm):
            array = np.arange(3) + comm.rank
            return [
                comm.reduce(array, root=1),
                comm.reduce_scatter(array),
                comm.scan(array, "max"),
                comm.exscan(array),
                *(future.result(TIMEOUT) for future in (comm.reduce_async("ab"), comm.scan_async("ab"))),
                *(
                    future.result(TIMEOUT)
                    for future in (comm.reduce_scatter_async(array), comm.exscan_async([comm.rank]))
                ),
            ]

        with concurrent.futures.ThreadPoolExecutor() as pool:
            ends = [future.result(TIMEOUT) for future in [pool.submit(rank, comm) for comm in pair]]
        shown = [[one.tolist() if isinstance(one, np.ndarray) else one for one in end] for end in ends]
        assert shown == [
            [None, [1, 3], [0, 1, 2], None, "abab", "ab", [1, 3], None],
            [[1, 3, 5], [5], [1, 2, 3], [0, 1, 2], None, "abab", [5], [0]],
        ]

    def test_the_value_at_the_call_counts(self, pair):
        array = np.ones(100_000)
        first = pair[0].allreduce_async(array)
        array[:] = -1
        second = pair[1].allreduce_async(np.ones(100_000))
        assert first.result(TIMEOUT).max() == second.result(TIMEOUT).min() == 2

    def test_calls_are_matched_in_call_order_whatever_is_waited_for_first(self, pair):
        futures = [[comm.allgather_async((comm.rank, n)) for n in range(20)] for comm in pair]
        for mine in futures:
            for n in reversed(range(20)):
                assert mine[n].result(TIMEOUT) == [(0, n), (1, n)]

    def test_wrong_arguments_are_raised_here_and_on_the_peer(self, pair):
        other = pair[1].allreduce_async(np.zeros(1))
        with pytest.raises(ValueError, match="algorithm='nope'"):
            pair[0].allreduce(np.zeros(1), algorithm="nope")
        with pytest.raises(RemoteError) as caught:
            other.result(TIMEOUT)
        assert caught.value.origin == 0

    def test_facts(self, pair, alone):
        assert [comm.rank for comm in pair] == [0, 1]
        assert {comm.world_size for comm in pair} == {2}
        assert [comm.local_rank for comm in pair] == [0, 1]
        assert {comm.node_rank for comm in pair} == {0}
        assert (alone.rank, alone.world_size, alone.closed) == (0, 1, False)
        assert repr(pair[1]) == "<SyncCommunicator 'world' rank 1 of 2>"


class TestThreads:
    def test_many_threads_may_call_at_once(self, alone):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda n: alone.allreduce(n), range(200)))
        assert results == list(range(200))

    def test_one_rank_may_call_from_several_threads_in_an_order_of_its_own_making(self, pair):
        order = threading.Semaphore(1)

        def call(comm):
            for _ in range(10):
                with order:  # the same order on both ranks: one call of each
                    futures = [c.barrier_async() for c in pair]
                for future in futures:
                    future.result(TIMEOUT)
            return comm.rank

        with concurrent.futures.ThreadPoolExecutor() as pool:
            assert list(pool.map(call, pair, timeout=TIMEOUT)) == [0, 1]

    def test_from_inside_a_running_loop_it_blocks_and_works(self, alone):
        async def main():
            return alone.allreduce(np.ones(3)).tolist()

        assert asyncio.run(main()) == [1.0] * 3

    def test_from_a_thread_beside_a_running_loop_it_works(self, pair):
        async def main():
            return await asyncio.gather(*(asyncio.to_thread(comm.allgather, comm.rank) for comm in pair))

        assert asyncio.run(main()) == [[0, 1]] * 2

    @pytest.mark.parametrize("text", ["no running event loop", "This event loop is already running"])
    def test_a_runtime_error_of_the_users_own_comes_out_as_it_is(self, pair, text):
        """Whatever it says: it is not taken for one of asyncio's."""

        def fold(a, b):
            raise RuntimeError(text)

        other = pair[1].allreduce_async(1, fold)
        with pytest.raises(RemoteError) as caught:
            pair[0].allreduce(1, fold)
        for error in (caught.value, other.exception(TIMEOUT)):
            assert (error.origin, error.type_name, error.original.args) == (0, "RuntimeError", (text,))

        assert [future.result(TIMEOUT) for future in [comm.barrier_async() for comm in pair]] == [None, None]

    def test_a_future_can_be_awaited_from_a_loop(self, pair):
        async def main():
            return await asyncio.gather(
                *(asyncio.wrap_future(comm.allgather_async(comm.rank)) for comm in pair)
            )

        assert asyncio.run(main()) == [[0, 1]] * 2

    def test_from_inside_a_reduce_function_it_is_refused_at_once(self, pair):
        other = pair[1].allreduce_async(1, max)
        with pytest.raises(RemoteError) as caught:
            pair[0].allreduce(1, lambda a, b: pair[0].barrier())
        assert isinstance(caught.value.original, RuntimeError)
        assert "wait for itself" in str(caught.value.original)
        assert isinstance(other.exception(TIMEOUT), RemoteError)
        # Nothing was numbered: the next calls match.
        assert [future.result(TIMEOUT) for future in [comm.barrier_async() for comm in pair]] == [None, None]

    @pytest.mark.parametrize("leave", [SystemExit(3), KeyboardInterrupt()], ids=["sys.exit", "Ctrl-C"])
    @pytest.mark.parametrize("runs", ["at the call", "when the peer's frame comes"])
    def test_a_reduce_function_that_wants_to_end_the_process_is_heard_by_its_caller_and_its_peers(
        self, pair, leave, runs
    ):
        """The process is not the thread's to end. No frame that came with that one is lost or counts twice."""

        def fails(a, b):
            raise leave

        def start(comm, number):
            if number == 2:
                return comm.allreduce_async(number, fails)
            return comm.allreduce_async((number, comm.rank))

        zero, one = pair
        if runs == "at the call":
            second = [start(one, number) for number in range(5)]
            settle(one, zero)
            first = [start(zero, number) for number in range(5)]
        else:
            first = [start(zero, number) for number in range(5)]
            settle(zero)
            with held(zero):  # so that it reads in one piece what rank 1 sends
                second = [start(one, number) for number in range(5)]
                settle(one)
        works = [first, second]
        ends = [mine.pop(2).exception(TIMEOUT) for mine in works]
        assert type(ends[0]) is type(leave)
        assert ends[0].args == leave.args
        assert type(ends[1]) is RemoteError
        assert (ends[1].origin, ends[1].rank, type(ends[1].original)) == (0, 1, type(leave))
        for mine in works:
            right = [(number, 0, number, 1) for number in (0, 1, 3, 4)]
            assert [future.result(TIMEOUT) for future in mine] == right
        for future in [comm.allreduce_async(comm.rank) for comm in pair]:
            assert future.result(TIMEOUT) == 1

    def test_ctrl_c_while_a_value_is_taken_takes_the_operations_number(self, pair):
        class Interrupted:
            def __reduce__(self):
                raise KeyboardInterrupt

        for verb in ("allreduce", "allreduce_async", "allgather", "broadcast_async"):
            with pytest.raises(KeyboardInterrupt):
                getattr(pair[0], verb)(Interrupted())
            error = getattr(pair[1], verb.removesuffix("_async") + "_async")(1).exception(TIMEOUT)
            assert type(error) is RemoteError
            assert error.origin == 0
            assert "interrupted by KeyboardInterrupt" in str(error)
            after = [comm.allgather_async(comm.rank) for comm in pair]
            assert [future.result(TIMEOUT) for future in after] == [[0, 1]] * 2

    def test_ctrl_c_while_a_value_is_taken_is_told_from_the_loops_thread(self, pair, monkeypatch):
        """Nothing but the loop's thread may touch the engine and the sockets."""
        pump, threads = pair[0]._threaded._pump, []
        refuse = pump.refuse

        def seen(*args):
            threads.append(threading.current_thread().name)
            return refuse(*args)

        monkeypatch.setattr(pump, "refuse", seen)

        class Interrupted:
            def __reduce__(self):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pair[0].allreduce(Interrupted())
        assert isinstance(pair[1].allreduce_async(1).exception(TIMEOUT), RemoteError)
        assert threads == ["asynccoll"]

    def test_so_many_operations_may_be_under_way_and_one_more_takes_no_number(self, pair, monkeypatch):
        monkeypatch.setattr("asynccoll.threaded.MAX_PENDING", 5)
        zero, one = pair
        with held(zero):  # those that the loop has not begun count as well
            ahead = [zero.allgather_async(number) for number in range(5)]
            for call in (zero.barrier, zero.barrier_async, lambda: zero.allgather_async(5)):
                with pytest.raises(RuntimeError, match="5 operations of communicator 'world' are under way"):
                    call()
        for number in range(3):
            assert one.allgather_async(number).result(TIMEOUT) == [number, number]
        assert ahead[2].result(TIMEOUT) == [2, 2]
        assert ahead[4].cancel()  # makes room as well
        ahead += [zero.allgather_async(number) for number in range(5, 9)]
        with pytest.raises(RuntimeError, match="wait for some first"):
            zero.barrier()
        assert one.allgather_async(3).result(TIMEOUT) == [3, 3]
        assert isinstance(one.allgather_async(4).exception(TIMEOUT), CollectiveCancelled)
        for number in range(5, 9):
            assert one.allgather_async(number).result(TIMEOUT) == [number, number]
            assert ahead[number].result(TIMEOUT) == [number, number]

    def test_a_value_that_calls_while_it_is_pickled_takes_its_place_before(self, alone):
        class Calls:
            def __reduce__(self):
                return str, (alone.allreduce("inner"),)

        assert alone.allreduce(Calls()) == "inner"


class TestGroups:
    def test_a_group_has_blocking_verbs_and_shares_the_thread(self, pair):
        def one(comm):
            group = comm.new_group([1, 0])
            other = comm.new_group([comm.rank])
            results = group.allgather(comm.rank), other.allreduce(5), group.rank
            group.close()
            group.close()
            assert group.closed
            assert not comm.closed
            comm.barrier()
            return results

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert list(pool.map(one, pair)) == [([1, 0], 5, 1), ([1, 0], 5, 0)]

    def test_split_and_who_is_left_out(self, pair):
        def one(comm):
            group = comm.split(7 if comm.rank else None, name="odd")
            return group and (group.rank, group.world_size, group.allreduce(3))

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert list(pool.map(one, pair)) == [None, (0, 1, 3)]

    def test_wrong_lists_are_refused(self, alone):
        with pytest.raises(ValueError, match="twice"):
            alone.new_group([0, 0])


class TestCancel:
    def test_it_aborts_the_operation_on_every_rank_and_frees_the_memory(self, pair):
        array = np.zeros(1 << 20)
        mine = pair[0].allreduce__async(array)
        assert mine.cancel()
        array[:] = 5
        with pytest.raises(concurrent.futures.CancelledError):
            mine.result(TIMEOUT)
        with pytest.raises(CollectiveCancelled) as caught:
            pair[1].allreduce_(np.zeros(1 << 20))
        assert caught.value.origin == 0
        assert (array == 5).all()
        for future in [comm.barrier_async() for comm in pair]:
            future.result(TIMEOUT)

    def test_of_a_complete_operation_it_is_false(self, alone):
        future = alone.barrier_async()
        future.result(TIMEOUT)
        assert future.cancel() is False

    def test_twice_is_no_error(self, pair):
        mine = pair[0].barrier_async()
        assert mine.cancel()
        assert mine.cancel()
        assert isinstance(pair[1].barrier_async().exception(TIMEOUT), CollectiveCancelled)

    def test_those_who_wait_for_several_futures_hear_of_it(self, pair):
        mine = pair[0].barrier_async()
        mine.cancel()
        done, waiting = concurrent.futures.wait([mine], timeout=TIMEOUT)
        assert (done, waiting) == ({mine}, set())
        assert isinstance(pair[1].barrier_async().exception(TIMEOUT), CollectiveCancelled)

    def test_those_who_take_futures_as_they_complete_get_it_like_the_others(self, pair):
        mine, later = pair[0].barrier_async(), pair[0].barrier_async()
        order = concurrent.futures.as_completed([mine, later], timeout=TIMEOUT)
        canceller = threading.Thread(target=mine.cancel)  # maybe before the wait begins, maybe during it
        canceller.start()
        assert next(order) is mine
        assert (mine.done(), mine.cancelled(), mine.running()) == (True, True, False)
        canceller.join(TIMEOUT)  # those who wait are told before the other rank is
        others = [pair[1].barrier_async() for _ in range(2)]
        assert next(order) is later
        assert later.result(0) is None
        assert isinstance(others[0].exception(TIMEOUT), CollectiveCancelled)
        assert others[1].result(TIMEOUT) is None

    def test_a_callback_of_a_future_may_start_the_next_operation_but_not_wait_for_it(self, pair):
        started, refused = concurrent.futures.Future(), concurrent.futures.Future()

        def callback(_):  # in the loop's thread, since the operation is under way when it is added
            started.set_result(pair[0].allreduce_async(2))
            try:
                pair[0].allreduce(3)
            except RuntimeError as error:
                refused.set_result(str(error))

        pair[0].allreduce_async(1).add_done_callback(callback)
        pair[1].allreduce_async(1)
        assert "in a callback use the form that ends in _async" in refused.result(TIMEOUT)
        assert pair[1].allreduce(2) == started.result(TIMEOUT).result(TIMEOUT) == 4
        with concurrent.futures.ThreadPoolExecutor() as pool:
            assert list(pool.map(lambda comm: comm.allreduce(1), pair)) == [2, 2]

    def test_a_reduce_function_cannot_wait_for_another_operation(self, pair):
        words, later = [], []

        def fold(a, b):
            for wait in (
                later[0].result,
                lambda: later[0].result(1),
                later[0].exception,
                lambda: pair[0].new_group([0]),
            ):
                try:
                    wait()
                except RuntimeError as error:
                    words.append(str(error))
            return a + b

        first = pair[0].allreduce_async(1, fold)
        later.append(pair[0].barrier_async())
        assert pair[1].allreduce(1, fold) == first.result(TIMEOUT) == 2
        pair[1].barrier()
        assert later[0].result(TIMEOUT) is None
        assert len(words) == 4
        assert all("would wait for itself" in text for text in words)

    def test_a_callback_of_a_future_may_cancel_another(self, pair):
        second = [None]
        first = pair[0].barrier_async()
        second[0] = pair[0].barrier_async()
        done = threading.Event()

        def cancel(future):
            second[0].cancel()
            done.set()

        first.add_done_callback(cancel)
        pair[1].barrier()
        assert done.wait(TIMEOUT)
        assert isinstance(pair[1].barrier_async().exception(TIMEOUT), CollectiveCancelled)

    def test_it_is_heard_even_if_the_operation_had_not_been_started_yet(self, pair):
        zero = pair[0]
        held, free = threading.Event(), threading.Event()

        def hold():
            held.set()
            free.wait(TIMEOUT)

        zero._thread.soon(hold)
        assert held.wait(TIMEOUT)
        mine = zero.barrier_async()
        canceller = threading.Thread(target=mine.cancel)
        canceller.start()
        while not mine.cancelled():
            time.sleep(0.001)
        free.set()
        canceller.join(TIMEOUT)
        assert isinstance(pair[1].barrier_async().exception(TIMEOUT), CollectiveCancelled)
        for future in [comm.barrier_async() for comm in pair]:
            future.result(TIMEOUT)


class TestStream:
    def test_each_rank_gets_the_whole_in_parts(self, pair):
        values = [np.arange(300_001.0) + comm.rank for comm in pair]
        streams = [comm.allreduce_stream(value) for comm, value in zip(pair, values, strict=True)]
        for stream in streams:
            whole, elements = np.zeros(300_001), 0
            for offset, view in stream:
                whole[offset : offset + len(view)] = view
                elements += len(view)
            assert elements == len(whole)
            np.testing.assert_array_equal(whole, values[0] + values[1])
            np.testing.assert_array_equal(stream.result(), whole)

    def test_the_module_has_it_too(self, default):
        ((offset, view),) = ac.allreduce_stream(np.ones(3))
        assert (offset, view.tolist()) == (0, [1.0, 1.0, 1.0])

    def test_leaving_it_early_lets_it_end(self, pair):
        streams = [comm.allreduce_stream(np.ones(300_000)) for comm in pair]
        for _ in streams[0]:
            break
        assert (streams[1].result() == 2).all()
        assert (streams[0].result() == 2).all()

    def test_closing_it_cancels_it_on_every_rank(self, pair):
        streams = [comm.allreduce_stream(np.ones(300_000)) for comm in pair[:1]]
        streams[0].close()
        streams[0].close()
        with pytest.raises(concurrent.futures.CancelledError):
            next(streams[0])
        with pytest.raises(CollectiveCancelled):
            list(pair[1].allreduce_stream(np.ones(300_000)))
        for future in [comm.barrier_async() for comm in pair]:
            future.result(TIMEOUT)

    def test_a_wrong_argument_is_raised_from_the_iteration(self, pair):
        wrong, other = pair[0].allreduce_stream({}), pair[1].allreduce_stream(np.ones(2))
        with pytest.raises(TypeError, match="use allreduce"):
            next(wrong)
        with pytest.raises(RemoteError):
            next(other)

    def test_a_callback_cannot_wait_for_a_part(self, pair):
        refused = concurrent.futures.Future()
        stream = pair[0].allreduce_stream(np.ones(3))

        def callback(_):  # in the loop's thread, before the other rank has called
            for wait in (lambda: next(stream), stream.result):
                with pytest.raises(RuntimeError, match="wait for itself"):
                    wait()
            refused.set_result(True)

        pair[0]._thread.soon(lambda: callback(None))
        assert refused.result(TIMEOUT)
        assert (pair[1].allreduce_stream(np.ones(3)).result() == 2).all()

    def test_its_memory_does_not_wait_for_the_cycle_collector(self, alone):
        gc.collect()
        gc.disable()
        try:
            stream = alone.allreduce_stream(np.ones(9))
            ((_, view),) = stream
            memory = weakref.ref(stream.result())
            alone.barrier()
            del stream, view
            assert memory() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize(
        ("verb", "take"),
        [
            ("allreduce_stream", list),
            ("allreduce_stream", lambda stream: stream.result()),
            ("allreduce_async", lambda pending: pending.result()),
            ("allreduce_async", lambda pending: pending.result(TIMEOUT)),
            ("allreduce_async", lambda pending: pending.exception(TIMEOUT)),
        ],
    )
    def test_no_wait_is_without_an_end_of_its_own(self, pair, monkeypatch, verb, take):
        """A signal that comes just before the thread goes to sleep does not wake it: only a bounded wait hears it for certain."""
        waited = []
        plain = threading.Condition.wait
        main = threading.get_ident()

        def wait(condition, timeout=None):
            if threading.get_ident() == main:
                waited.append(timeout)
                if len(waited) == 1:
                    getattr(pair[1], verb)(np.ones(3))
            return plain(condition, timeout)

        monkeypatch.setattr(threading.Condition, "wait", wait)
        take(getattr(pair[0], verb)(np.ones(3)))
        assert waited
        assert None not in waited
        assert max(waited) < 1

    def test_ctrl_c_interrupts_the_wait_for_a_part(self):
        code = PAIR + (
            "import numpy, os, signal, sys, time, traceback\n"
            "stream = zero.allreduce_stream(numpy.ones(9))\n"
            "main = threading.get_ident()\n"
            "def waits():\n"
            "    found = [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]\n"
            "    return found[0] == 'wait' and '__next__' in found\n"
            "def interrupt():\n"
            "    while not waits():\n"
            "        time.sleep(0.001)\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "threading.Thread(target=interrupt).start()\n"
            "try:\n"
            "    next(stream)\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted')\n"
            "error = one.allreduce_async(1).exception(60)\n"
            "print(type(error).__name__)\n"
            "zero.close()\n"
            "one.close()\n"
        )
        done = subprocess.run(command(code), capture_output=True, text=True, timeout=TIMEOUT, check=False)
        assert (done.stdout, done.stderr) == ("interrupted\nCollectiveCancelled\n", "")


class TestOpening:
    def test_without_init_every_function_says_what_to_do(self):
        for call in (ac.rank, ac.world_size, ac.get_communicator, ac.barrier, ac.barrier_async):
            with pytest.raises(NotInitialized, match=r"asynccoll\.sync\.init"):
                call()
        with pytest.raises(NotInitialized, match=r"allreduce\(\) was called before"):
            ac.allreduce(1)

    def test_init_makes_the_default(self, default):
        assert (ac.rank(), ac.world_size()) == (0, 1)
        assert ac.get_communicator().allreduce(5) == ac.allreduce(5) == 5
        assert ac.allgather_async(1).result(TIMEOUT) == [1]

    def test_a_second_init_is_refused_and_changes_nothing(self, default):
        first = ac.get_communicator()
        with pytest.raises(AlreadyInitialized, match="shutdown"):
            ac.init()
        assert ac.get_communicator() is first
        assert ac.allreduce(5) == 5

    def test_init_may_follow_shutdown(self):
        for _ in range(3):
            comm = ac.init()
            ac.shutdown()
            assert comm.closed

    def test_init_may_follow_a_close_of_the_communicator_itself(self):
        with ac.init():
            pass
        with ac.init() as comm:
            assert ac.get_communicator() is comm
        ac.shutdown()

    def test_shutdown_twice_is_silent(self):
        ac.init()
        ac.shutdown()
        ac.shutdown()
        with pytest.raises(NotInitialized):
            ac.rank()

    def test_it_is_not_the_default_of_the_package(self, default):
        with pytest.raises(NotInitialized):
            asynccoll.rank()

    def test_an_opening_that_fails_leaves_no_thread(self):
        before = threading.active_count()
        with pytest.raises(ValueError, match="streams=5"):
            ac.connect(streams=5)
        with pytest.raises(ValueError, match="streams=5"):
            ac.init(streams=5)
        assert threading.active_count() == before
        ac.init()
        ac.shutdown()

    def test_only_one_of_many_threads_may_init(self):
        def attempt(_):
            try:
                return ac.init()
            except AlreadyInitialized:
                return None

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            opened = [comm for comm in pool.map(attempt, range(8)) if comm is not None]
        ac.shutdown()
        assert len(opened) == 1
        assert opened[0].closed

    @pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
    def test_what_an_interrupted_opening_runs_has_ended_when_it_raises(self, monkeypatch, ends):
        """Else its tasks would be destroyed pending, which Python prints at exit."""
        begun, ended = threading.Event(), []

        async def lasting(name):
            if name == "b":  # the second
                begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)  # as a socket that is closed in the next turn
                ended.append(name)

        async def connect():
            await asyncio.wait([asyncio.create_task(lasting(name)) for name in ("a", "b")])

        def interrupted(future):
            begun.wait(10)
            raise ends

        monkeypatch.setattr(ac, "result_of", interrupted)
        before = threading.active_count()
        with pytest.raises(ends):
            ac.open_with(connect)
        assert sorted(ended) == ["a", "b"]
        assert threading.active_count() == before


class TestClosing:
    def test_the_context_manager_closes(self):
        before = threading.active_count()
        with ac.connect() as comm:
            assert threading.active_count() == before + 1
        assert comm.closed
        assert threading.active_count() == before

    def test_afterwards_every_verb_says_so(self):
        with ac.connect() as comm:
            pass
        for call in (comm.barrier, comm.barrier_async, lambda: comm.allreduce(1)):
            with pytest.raises(NotInitialized, match="is closed"):
                call()

    def test_twice_is_silent(self):
        with ac.connect() as comm:
            comm.close()
            comm.close()

    def test_what_is_pending_fails_here_and_on_the_peer(self, pair):
        mine = pair[0].barrier_async()
        pair[0].close()
        assert mine.exception(TIMEOUT).origin == 0
        with pytest.raises(CommunicatorClosed):
            pair[1].barrier()

    def test_an_exception_out_of_the_block_is_told_to_the_peer(self, pair):
        other = pair[1].barrier_async()

        def fails():
            with pair[0]:
                raise LookupError("nothing here")

        with pytest.raises(LookupError):
            fails()
        assert "failed with LookupError: nothing here" in str(other.exception(TIMEOUT))

    def test_from_a_callback_it_is_refused_since_it_would_wait_for_itself(self, alone):
        caught = concurrent.futures.Future()

        def close(future):
            try:
                alone.close()
            except RuntimeError as error:
                caught.set_result(str(error))

        alone._thread.soon(lambda: close(None))
        assert "would wait for itself" in caught.result(TIMEOUT)
        assert alone.allreduce(5) == 5

    @pytest.mark.parametrize("close", ["close", "shutdown", "exit"])
    def test_from_a_done_callback_of_an_operation_it_is_refused_as_well(self, default, close):
        comm, caught = ac.get_communicator(), concurrent.futures.Future()

        def leave():
            with comm:
                pass

        def attempt(pending):
            try:
                {"close": comm.close, "shutdown": ac.shutdown, "exit": leave}[close]()
            except RuntimeError as error:
                caught.set_result(str(error))
            else:
                caught.set_result("it was not refused")

        with held(comm):  # else it might be done before it has its callback, which ran here then
            comm.barrier_async().add_done_callback(attempt)
        text = caught.result(TIMEOUT)
        assert "close() or shutdown() blocks, and would wait for itself here" in text
        assert not comm.closed
        assert ac.allreduce(5) == 5

    def test_a_call_that_meets_a_close_ends_too(self, pair):
        # The value is pickled in the caller's thread; meanwhile another one begins to close.
        zero, one = pair
        released = threading.Event()
        one._thread.soon(lambda: released.wait(TIMEOUT))  # so that closing waits for the peer
        closer = threading.Thread(target=zero.close)

        class Closes:
            def __reduce__(self):
                closer.start()
                while not zero.closed:
                    time.sleep(0.001)
                return int, (1,)

        try:
            with pytest.raises((AsynccollError, RuntimeError)):
                zero.allreduce_async(Closes()).result(10)
        finally:
            released.set()
            closer.join(TIMEOUT)


class TestOptions:
    def test_connect_passes_them_on(self):
        with pair_of_ranks(timeout=0.05) as ranks:
            error = ranks[0].barrier_async().exception(TIMEOUT)
            assert (type(error).__name__, error.limit) == ("CollectiveTimeout", 0.05)


# -- processes -------------------------------------------------------------------------------------------------

QUIET = "import logging; logging.getLogger('asyncio').setLevel(logging.ERROR)\n"
"""-X dev makes asyncio tell of every callback that took a tenth of a second: a matter of the machine's load."""

PAIR = """
import os, socket, threading
import asynccoll.sync as ac
listener = socket.create_server(("127.0.0.1", 0))
os.environ["ASYNCCOLL_RENDEZVOUS_FD"] = str(listener.fileno())
address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
ranks = [None, None]
def connect(rank):
    ranks[rank] = ac.connect(address, rank=rank, world_size=2, secret="s", init_timeout=60)
opener = threading.Thread(target=connect, args=(1,))
opener.start()
connect(0)
opener.join()
listener.close()
del os.environ["ASYNCCOLL_RENDEZVOUS_FD"]
zero, one = ranks
"""
"""Two ranks in the script's process."""


def command(code):
    return [sys.executable, "-X", "dev", "-W", "error", "-c", QUIET + code]


def run(code):
    """Code, output and errors of a script in an interpreter that complains about everything."""
    done = subprocess.run(command(code), capture_output=True, text=True, timeout=TIMEOUT)
    return done.returncode, done.stdout, done.stderr


class TestExit:
    def test_without_close_it_is_quiet(self):
        code = "import asynccoll.sync as ac\nac.init()\nprint(ac.allreduce(5))"
        assert run(code) == (0, "5\n", "")

    def test_with_two_ranks_and_an_operation_under_way_too(self):
        code = (
            PAIR
            + "future = zero.barrier_async()\nprint([c.allgather_async(c.rank) for c in ranks][0].done())"
        )
        assert run(code) == (0, "False\n", "")

    def test_after_shutdown_too(self):
        code = PAIR + "zero.close()\none.close()\nprint(threading.active_count())"
        assert run(code) == (0, "1\n", "")


class TestInterrupt:
    def test_ctrl_c_interrupts_the_wait_and_aborts_the_operation_everywhere(self):
        code = PAIR + (
            "import sys, time, traceback\n"
            "main = threading.get_ident()\n"
            "def names():\n"
            "    return [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]\n"
            "def waits():\n"
            "    found = names()  # once: else it may be two waits, one of the thread's start and one of the future\n"
            "    return found[0] == 'wait' and 'result' in found\n"
            "def tell():\n"
            "    while not waits():\n"
            "        time.sleep(0.001)\n"
            "    print('waiting', flush=True)\n"
            "threading.Thread(target=tell).start()\n"
            "try:\n"
            "    zero.barrier()\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted')\n"
            "error = one.barrier_async().exception(60)\n"
            "print(type(error).__name__, error.origin)\n"
            "print([f.result(60) for f in [c.allgather_async(c.rank) for c in ranks]])\n"
            "zero.close()\n"
            "one.close()\n"
        )
        with subprocess.Popen(
            command(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            try:
                first = child.stdout.readline()
                child.send_signal(signal.SIGINT)
                out, err = child.communicate(timeout=TIMEOUT)
            finally:
                child.kill()
        assert first == "waiting\n"
        assert (out, err) == ("interrupted\nCollectiveCancelled 0\n[[0, 1], [0, 1]]\n", "")
        assert child.returncode == 0


SEEDED_INTERRUPTS = """
import asyncio, collections, random, signal, sys, time
import numpy as np

LATE, EARLY = 0.1, 0.004  # seconds into the call: when it waits, and when it may just be on its way into the wait
seed, count = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
bystander = asyncio.new_event_loop()
threading.Thread(target=bystander.run_forever, daemon=True).start()
sleeper = asyncio.run_coroutine_threadsafe(asyncio.sleep(1000), bystander)
big = np.ones(1 << 20)
calls = {
    "allreduce": (lambda c: c.allreduce(big), lambda c: c.allreduce_async(big)),
    "objects": (lambda c: c.allgather("x" * 100), lambda c: c.allgather_async("x" * 100)),
    "scan": (lambda c: c.scan(big), lambda c: c.scan_async(big)),
    "barrier": (lambda c: c.barrier(), lambda c: c.barrier_async()),
}

def numbered(comm):
    async def look():
        return comm._threaded._pump.engine.group(0).next_seq
    return comm._thread.run(look()).result(60)

def interrupt(delay):
    def later():
        entered.wait(60)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)
        sent.append(time.monotonic())
    entered = threading.Event()
    sent = []
    thread = threading.Thread(target=later)
    thread.start()
    return entered, sent, thread

def attempt(number):
    verb = sorted(calls)[number % len(calls)]
    block, start = calls[verb]
    before = numbered(zero)
    other = start(one) if rng.random() < 0.3 else None  # it waits for nobody, or for rank 0 itself
    entered, sent, thread = interrupt(rng.uniform(0, EARLY) if number % 2 else LATE)
    result = None
    try:
        entered.set()
        result = block(zero)
        time.sleep(60)  # complete before the signal came, which must not be lost
    except KeyboardInterrupt:
        took = time.monotonic() - sent[0] if sent else 0.0
    thread.join()
    assert took < 5, took
    if numbered(zero) == before:
        end = "not begun"  # it took no number: the next call is in its place
        mine = start(zero)
        other = other or start(one)
        mine.result(60)
        other.result(60)
    else:
        other = other or start(one)
        error = other.exception(60)
        if error is None:
            end = "complete"
        else:
            assert result is None and error.origin == 0, error
            end = type(error).__name__
            if end != "CollectiveCancelled":  # the value was being taken: that failed, here
                assert end == "RemoteError" and "interrupted by KeyboardInterrupt" in str(error), error
    assert [f.result(60) for f in [c.allgather_async((number, c.rank)) for c in ranks]] == [[(number, 0), (number, 1)]] * 2
    return end

ends = collections.Counter(attempt(number) for number in range(count))
assert not sleeper.done()
bystander.call_soon_threadsafe(sleeper.cancel)
zero.close()
one.close()
print(sum(ends.values()), ends["CollectiveCancelled"] >= count // 4)
"""


class TestInterruptAtAnyMoment:
    """SIGINT 100 ms into a blocked call, and in its first moments: the next call is right, and the peer has heard of it."""

    def interrupted(self, seed, count):
        code = PAIR + SEEDED_INTERRUPTS
        done = subprocess.run(
            [*command(code), str(seed), str(count)], capture_output=True, text=True, timeout=TIMEOUT
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert done.stdout == f"{count} True\n"

    def test_20_times(self):
        self.interrupted(seed=1, count=20)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(2, 7))
    def test_100_times(self, seed):
        self.interrupted(seed, count=20)


class TestFork:
    def test_a_fork_must_not_use_it_and_its_parent_goes_on(self):
        code = PAIR + (
            "import warnings\n"
            "warnings.simplefilter('ignore', DeprecationWarning)  # of fork beside threads, since Python 3.12\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    ok = 0\n"
            "    for call in (zero.barrier, zero.barrier_async, lambda: zero.allreduce(1)):\n"
            "        try:\n"
            "            call()\n"
            "        except RuntimeError as error:\n"
            "            ok += 'is a fork of process' in str(error)\n"
            "    zero.close()\n"
            "    os._exit(ok)\n"
            "_, status = os.waitpid(child, 0)\n"
            "print(os.waitstatus_to_exitcode(status))\n"
            "print([f.result(60) for f in [c.allgather_async(c.rank) for c in ranks]])\n"
            "zero.close()\n"
            "one.close()\n"
        )
        assert run(code) == (0, "3\n[[0, 1], [0, 1]]\n", "")

    def test_a_fork_may_open_its_own(self):
        code = (
            "import os, warnings\n"
            "warnings.simplefilter('ignore', DeprecationWarning)  # of fork beside threads, since Python 3.12\n"
            "import asynccoll.sync as ac\n"
            "ac.init()\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    ac.init()\n"
            "    value = ac.allreduce(7)\n"
            "    ac.shutdown()\n"
            "    os._exit(value)\n"
            "_, status = os.waitpid(child, 0)\n"
            "print(os.waitstatus_to_exitcode(status), ac.allreduce(8))\n"
        )
        assert run(code) == (0, "7 8\n", "")


def test_the_thread_carries_the_name_of_the_package(alone):
    assert "asynccoll" in [thread.name for thread in threading.enumerate()]
    assert isinstance(alone._thread, LoopThread)


@pytest.mark.parametrize("opener", [ac.init, ac.connect])
def test_its_progress_is_a_thread_and_nothing_else(opener):
    with opener(rank=0, world_size=1, progress="thread") as comm:
        assert comm.allreduce(1) == 1
    with pytest.raises(ValueError, match=r"progress='inline' is not for asynccoll\.sync"):
        opener(rank=0, world_size=1, progress="inline")
    assert inspect.signature(opener).parameters["progress"].default == "thread"
