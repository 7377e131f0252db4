"""Workers that stay: functions and results, failures, interrupts, deaths, and an end that leaves nothing behind."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import asynccoll
import asynccoll.sync as ac
from asynccoll.errors import NotInitialized, PeerLost, RemoteError

DEADLINE = 60
"""Seconds after which something hangs: none of these takes one."""


@pytest.fixture(autouse=True)
async def deadline():
    async with asyncio.timeout(DEADLINE):
        yield


def my_rank():
    return asynccoll.rank()


def pid_of_worker():
    return os.getpid()


def alive(pid):
    """The process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False


def wait_until_gone(pids, limit=DEADLINE):
    end = time.monotonic() + limit
    while any(map(alive, pids)):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.01)


async def hang():
    await asyncio.Event().wait()


def sleep_through_interrupts(path):
    """Makes the file ``path`` when it is past interrupting."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            path.touch()
            time.sleep(DEADLINE)


class TestRun:
    async def test_results_come_in_rank_order(self):
        async with asynccoll.local(3) as workers:
            assert workers.world_size == 3
            assert await workers.run(my_rank) == [0, 1, 2]
            assert await workers.run(lambda factor, more: my_rank() * factor + more, 10, 1) == [1, 11, 21]

    async def test_coroutine_functions_and_works_are_awaited(self):
        async def mean(values):
            total = await asynccoll.allreduce(values + asynccoll.rank())
            return total / asynccoll.world_size()

        async with asynccoll.local(2) as workers:
            for result in await workers.run(mean, np.arange(3.0)):
                np.testing.assert_array_equal(result, np.arange(3.0) + 0.5)
            assert await workers.run(lambda: asynccoll.allgather(asynccoll.rank())) == [[0, 1], [0, 1]]

    async def test_the_default_communicator_is_open_and_stays(self):
        def sequence():
            return asynccoll.get_communicator().stats()["operations"]

        async with asynccoll.local(2) as workers:
            before = await workers.run(sequence)
            await workers.run(asynccoll.barrier)
            assert await workers.run(sequence) == [one + 1 for one in before]

    async def test_workers_are_the_same_processes_each_time(self):
        async with asynccoll.local(2) as workers:
            pids = await workers.run(pid_of_worker)
            assert await workers.run(pid_of_worker) == pids
            assert len({*pids, os.getpid()}) == 3

    async def test_large_arguments_and_results_come_through(self):
        array = np.arange(3_000_000)
        async with asynccoll.local(2) as workers:
            for rank, result in enumerate(await workers.run(lambda x: x + asynccoll.rank(), array)):
                np.testing.assert_array_equal(result, array + rank)

    async def test_runs_at_once_go_one_after_the_other(self):
        async with asynccoll.local(2) as workers:
            runs = [workers.run(lambda n: asynccoll.allreduce(n), number) for number in range(5)]
            assert await asyncio.gather(*runs) == [[2 * number] * 2 for number in range(5)]

    async def test_one_worker_is_a_world_as_well(self):
        async with asynccoll.local(1) as workers:
            assert await workers.run(lambda: asynccoll.allreduce(5)) == [5]

    async def test_the_stream_of_a_verb_works_inside(self):
        async def parts(values):
            return [view.copy() async for _, view in asynccoll.allreduce_stream(values)]

        async with asynccoll.local(2) as workers:
            for views in await workers.run(parts, np.ones(5)):
                assert np.concatenate(views).tolist() == [2.0] * 5

    def test_globals_of_a_script_stay_and_functions_of_main_find_each_other(self, tmp_path):
        done = script(
            tmp_path,
            """
            scale = 10

            def setup():
                global kept
                kept = [asynccoll.rank() * scale]

            def helper():
                return kept

            def use():
                helper().append(1)
                return kept

            class Point:
                def __init__(self, x):
                    self.x = x

            def remember(point):
                global seen
                seen = point

            async def main():
                async with asynccoll.local(2) as workers:
                    await workers.run(setup)
                    await workers.run(use)
                    print(await workers.run(use))
                    await workers.run(remember, Point(3))
                    print(await workers.run(lambda: isinstance(seen, Point) and seen.x))

            asyncio.run(main())
            """,
        )
        assert done.stdout.splitlines() == ["[[0, 1, 1], [10, 1, 1]]", "[3, 3]"]
        assert (done.returncode, done.stderr) == (0, "")

    def test_output_has_the_rank_in_front(self, tmp_path):
        done = script(
            tmp_path,
            """
            def speak():
                print("hello")
                print("careful", file=sys.stderr)

            with ac.local(2) as workers:
                workers.run(speak)
            """,
        )
        assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] hello"]
        assert sorted(done.stderr.splitlines()) == ["[0] careful", "[1] careful"]


class TestFailure:
    async def test_it_is_raised_with_its_rank_and_traceback_and_the_others_are_interrupted(self):
        async def fail():
            if asynccoll.rank() == 1:
                raise KeyError("missing")
            await asynccoll.barrier()

        async with asynccoll.local(3) as workers:
            pids = await workers.run(pid_of_worker)
            with pytest.raises(KeyError, match="missing") as caught:
                await workers.run(fail)
            (note,) = caught.value.__notes__
            assert note.startswith("raised on rank 1 of 3 by local()")
            assert 'raise KeyError("missing")' in note
            # The operation that rank 1 has never called must not meet its next one.
            assert await workers.run(lambda: asynccoll.allreduce(1)) == [3, 3, 3]
            assert await workers.run(pid_of_worker) == pids

    async def test_plain_code_that_computes_is_interrupted_too(self):
        def fail():
            if asynccoll.rank() == 0:
                raise ValueError("first")
            while True:
                time.sleep(0.001)

        async with asynccoll.local(2) as workers:
            with pytest.raises(ValueError, match="first"):
                await workers.run(fail)
            assert await workers.run(my_rank) == [0, 1]

    async def test_the_earliest_is_raised(self):
        async def fail():
            if asynccoll.rank() == 1:
                raise ValueError("cause")
            try:
                await hang()
            finally:
                raise RuntimeError("consequence")

        async with asynccoll.local(3) as workers:
            with pytest.raises(ValueError, match="cause"):
                await workers.run(fail)

    async def test_what_cannot_be_rebuilt_or_is_no_exception_is_a_remote_error(self):
        def unpicklable():
            error = ValueError("odd")
            error.lock = __import__("threading").Lock()
            raise error

        def interrupt():
            raise KeyboardInterrupt

        async with asynccoll.local(2) as workers:
            with pytest.raises(RemoteError, match="odd"):
                await workers.run(unpicklable)
            with pytest.raises(RemoteError, match="KeyboardInterrupt"):
                await workers.run(interrupt)
            assert await workers.run(my_rank) == [0, 1]

    async def test_a_result_without_a_pickle_is_a_failure_of_that_rank(self):
        async with asynccoll.local(2) as workers:
            with pytest.raises(TypeError, match="pickle"):
                await workers.run(lambda: __import__("threading").Lock())
            assert await workers.run(my_rank) == [0, 1]

    async def test_what_a_function_leaves_under_way_is_an_error_and_does_no_harm_to_the_next(self):
        def forgetful():
            if asynccoll.rank() == 0:
                asynccoll.allreduce(100)

        async with asynccoll.local(2) as workers:
            with pytest.raises(
                RuntimeError, match="returned while allreduce #0 was under way: await everything"
            ):
                await workers.run(forgetful)
            assert await workers.run(lambda: asynccoll.allreduce(1)) == [2, 2]

    async def test_an_argument_without_a_pickle_starts_nothing(self):
        async with asynccoll.local(2) as workers:
            with pytest.raises(TypeError, match="pickle"):
                await workers.run(print, __import__("threading").Lock())
            assert await workers.run(my_rank) == [0, 1]

    async def test_a_function_that_does_not_come_back_costs_the_workers(self, tmp_path):
        def stubborn(path):
            if asynccoll.rank() == 1:
                sleep_through_interrupts(path)
            while not path.exists():
                time.sleep(0.001)
            raise ValueError("first")

        async with asynccoll.local(2) as workers:
            with pytest.raises(ValueError, match="first"):
                await workers.run(stubborn, tmp_path / "there")
            with pytest.raises(NotInitialized, match="did not end when it was interrupted"):
                await workers.run(my_rank)

    @pytest.mark.parametrize("n", [0, -1, 1.0, True, "2"])
    def test_a_number_that_is_none(self, n):
        with pytest.raises(ValueError, match="at least 1"):
            asynccoll.local(n)


class TestInterrupt:
    @pytest.mark.parametrize("fn", [hang, lambda: time.sleep(DEADLINE)], ids=["coroutine", "plain"])
    async def test_cancelling_a_run_interrupts_the_functions_and_keeps_the_workers(self, fn, tmp_path):
        def there(path):
            path.with_name(f"{asynccoll.rank()}").touch()
            return fn()

        async with asynccoll.local(2) as workers:
            pids = await workers.run(pid_of_worker)
            running = asyncio.ensure_future(workers.run(there, tmp_path / "x"))
            while len(os.listdir(tmp_path)) < 2:
                await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await workers.run(pid_of_worker) == pids
            assert await workers.run(lambda: asynccoll.allreduce(1)) == [2, 2]

    async def test_a_run_that_is_cancelled_before_it_begins_does_not_run(self):
        async with asynccoll.local(2) as workers:
            running = asyncio.ensure_future(workers.run(hang))
            await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await workers.run(my_rank) == [0, 1]


class TestDeath:
    @pytest.mark.parametrize(
        ("way", "words"),
        [
            (lambda: os._exit(3), "exited with code 3"),
            (lambda: os._exit(0), "exited with code 0"),
            (lambda: sys.exit(4), "exited with code 4"),
            (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        ],
        ids=["code", "zero", "exit", "signal"],
    )
    async def test_the_run_and_every_later_one_name_the_rank_and_its_end(self, way, words):
        async def die():
            if asynccoll.rank() == 1:
                way()
            await asynccoll.barrier()

        async with asynccoll.local(3) as workers:
            pids = await workers.run(pid_of_worker)
            for _ in range(2):
                with pytest.raises(PeerLost, match=f"rank 1 of 3 {words}") as caught:
                    await workers.run(die)
                assert caught.value.peers == {1}
            assert workers.closed
            wait_until_gone(pids)

    async def test_one_that_dies_between_runs_is_told_by_the_next(self):
        async with asynccoll.local(2) as workers:
            pids = await workers.run(pid_of_worker)
            os.kill(pids[0], signal.SIGKILL)
            wait_until_gone(pids)
            with pytest.raises(PeerLost, match="rank 0 of 2 was killed by SIGKILL"):
                await workers.run(my_rank)

    async def test_a_failure_while_they_open_is_raised_and_leaves_nothing(self, monkeypatch):
        monkeypatch.setenv("ASYNCCOLL_ALGORITHM", "magic")
        with pytest.raises(ValueError, match="magic"):
            async with asynccoll.local(2):
                pass


class TestEnd:
    async def test_nothing_is_left_after_the_block(self):
        async with asynccoll.local(1):
            pass  # uvloop keeps a descriptor of its own from the first socket on
        before = set(os.listdir("/proc/self/fd"))
        async with asynccoll.local(3) as workers:
            pids = await workers.run(pid_of_worker)
            assert all(map(alive, pids))
        assert not any(map(alive, pids))
        assert workers.closed
        assert set(os.listdir("/proc/self/fd")) == before
        with pytest.raises(NotInitialized, match="closed"):
            await workers.run(my_rank)
        await workers.close()

    async def test_closing_ends_functions_that_run_whatever_they_do(self, tmp_path):
        def stubborn(path):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sleep_through_interrupts(path.with_name(f"{asynccoll.rank()}"))

        async with asynccoll.local(2) as workers:
            pids = await workers.run(pid_of_worker)
            running = asyncio.ensure_future(workers.run(stubborn, tmp_path / "x"))
            while len(os.listdir(tmp_path)) < 2:
                await asyncio.sleep(0)
        assert not any(map(alive, pids))
        with pytest.raises(NotInitialized, match="closed"):
            await running

    async def test_without_a_block_they_are_awaited_and_closed(self):
        workers = await asynccoll.local(2)
        assert await workers.run(my_rank) == [0, 1]
        assert repr(workers) == "<LocalWorkers of 2>"
        await workers.close()
        assert repr(workers) == "<LocalWorkers of 2 closed>"
        with pytest.raises(RuntimeError, match="started already"):
            await workers

    def test_ctrl_c_ends_script_and_workers(self, tmp_path):
        text = """
            def work():
                print(os.getpid(), flush=True)
                time.sleep(60)

            async def main():
                async with asynccoll.local(2) as workers:
                    await workers.run(work)

            try:
                asyncio.run(main())
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            """
        with started(tmp_path, text) as process:
            pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=DEADLINE)
        assert (out, err, process.returncode) == ("interrupted\n", "", 0)
        assert not any(map(alive, pids))

    @pytest.mark.parametrize("how", ["computes", "idle"])
    def test_they_end_by_themselves_when_this_process_is_killed(self, tmp_path, how):
        text = f"""
            def work():
                print(os.getpid(), flush=True)
                while {how == "computes"}:
                    pass

            with ac.local(2) as workers:
                workers.run(work)
                time.sleep(60)
            """
        with started(tmp_path, text) as process:
            pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
            process.kill()
            process.wait(DEADLINE)
            wait_until_gone(pids)

    def test_they_end_by_themselves_when_nobody_closes_them(self, tmp_path):
        text = """
            workers = ac.local(2)
            print(workers.run(os.getpid))
            """
        done = script(tmp_path, text)
        pids = [int(pid) for pid in re.findall(r"\d+", done.stdout)]
        assert (done.returncode, done.stderr, len(pids)) == (0, "", 2)
        wait_until_gone(pids)


class TestSync:
    def test_it_blocks_and_both_faces_of_the_package_are_open_inside(self):
        with ac.local(2) as workers:
            assert workers.world_size == 2
            assert workers.run(lambda x: ac.allreduce(x + ac.rank()), 3) == [7, 7]
            assert workers.run(lambda: asynccoll.allgather(asynccoll.rank())) == [[0, 1], [0, 1]]
            assert not workers.closed
        assert workers.closed
        with pytest.raises(NotInitialized, match="closed"):
            workers.run(ac.rank)
        workers.close()
        assert repr(workers) == "<SyncLocalWorkers of 2 closed>"

    def test_after_a_failure_both_go_on(self):
        def fail():
            if ac.rank() == 0:
                raise ValueError("no")
            ac.barrier()

        with ac.local(2) as workers:
            with pytest.raises(ValueError, match="no"):
                workers.run(fail)
            assert workers.run(lambda: ac.allreduce(1)) == [2, 2]

    def test_ctrl_c_interrupts_the_run_and_keeps_the_workers(self, tmp_path):
        text = """
            def work():
                print(os.getpid(), flush=True)
                ac.recv()

            with ac.local(2) as workers:
                try:
                    workers.run(work)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                print(workers.run(os.getpid), workers.run(lambda: ac.allreduce(1)))
            """
        with started(tmp_path, text) as process:
            pids = sorted(int(process.stdout.readline().split()[1]) for _ in range(2))
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=DEADLINE)
        first, second = out.splitlines()
        assert (first, err, process.returncode) == ("interrupted", "", 0)
        assert sorted(int(pid) for pid in re.findall(r"\d+", second)[:2]) == pids
        assert second.endswith("[2, 2]")

    def test_a_number_that_is_none_leaves_no_thread(self):
        with pytest.raises(ValueError, match="at least 1"):
            ac.local(0)


PROLOGUE = "import asyncio, os, sys, time\nimport asynccoll\nimport asynccoll.sync as ac\n"


def command(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(PROLOGUE + textwrap.dedent(text))
    return [sys.executable, "-X", "dev", str(path)]


def script(tmp_path, text):
    return subprocess.run(
        command(tmp_path, text), capture_output=True, text=True, timeout=DEADLINE, check=False
    )


@contextlib.contextmanager
def started(tmp_path, text):
    with subprocess.Popen(
        command(tmp_path, text),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
