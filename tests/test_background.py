"""A loop in a daemon thread: order, errors and cancelling across the threads, and a quiet end."""

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

from asynccoll.background import LoopThread, hand_over, result_of

TIMEOUT = 30


@pytest.fixture
def thread():
    made = LoopThread("asynccoll-test")
    yield made
    made.stop()


def test_it_runs_in_a_daemon_thread_of_its_own_name(thread):
    async def who():
        return threading.current_thread()

    runner = thread.run(who()).result(TIMEOUT)
    assert (runner.name, runner.daemon) == ("asynccoll-test", True)
    assert runner is not threading.current_thread()
    assert thread.alive


def test_it_knows_whether_the_caller_is_inside(thread):
    async def inside():
        return thread.inside()

    assert thread.run(inside()).result(TIMEOUT)
    assert not thread.inside()


def test_functions_run_in_the_order_of_the_calls(thread):
    seen, done = [], threading.Event()
    for number in range(100):
        thread.soon(lambda number=number: seen.append(number))
    thread.soon(done.set)
    assert done.wait(TIMEOUT)
    assert seen == list(range(100))


def test_the_future_gives_the_result_or_the_error(thread):
    async def fails():
        raise LookupError("nothing here")

    async def gives():
        return 7

    assert thread.run(gives()).result(TIMEOUT) == 7
    with pytest.raises(LookupError, match="nothing here"):
        thread.run(fails()).result(TIMEOUT)


def test_cancelling_the_future_cancels_the_coroutine(thread):
    started, ended = threading.Event(), threading.Event()

    async def waits():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = thread.run(waits())
    assert started.wait(TIMEOUT)
    assert future.cancel()
    assert ended.wait(TIMEOUT)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(TIMEOUT)


def test_stop_ends_the_thread_and_closes_the_loop(thread):
    thread.stop()
    assert not thread.alive
    assert thread.loop.is_closed()
    assert "asynccoll-test" not in [t.name for t in threading.enumerate()]


def test_stopping_twice_is_silent(thread):
    thread.stop()
    thread.stop()


def test_callbacks_run_once_when_the_loop_has_stopped(thread):
    seen = []
    for number in range(2):
        thread.at_stop(lambda number=number: seen.append((number, thread.loop.is_running())))
    assert seen == []
    thread.stop()
    thread.stop()
    assert seen == [(0, False), (1, False)]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_wants_to_end_the_process_does_not_end_the_thread(thread, error):
    def leave():
        raise error

    thread.soon(leave)

    async def gives():
        return 7

    assert thread.run(gives()).result(TIMEOUT) == 7


def test_it_does_not_stop_itself(thread):
    stopped = threading.Event()

    def stop():
        thread.stop()
        stopped.set()

    thread.soon(stop)
    assert stopped.wait(TIMEOUT)
    assert thread.alive


def test_two_threads_are_apart(thread):
    other = LoopThread("asynccoll-other")
    try:
        assert other.loop is not thread.loop
        other.stop()
        assert thread.alive
    finally:
        other.stop()


def run_script(code):
    """A script in an interpreter that complains about everything."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=os.getcwd())


def test_an_interpreter_that_ends_while_it_runs_ends_quietly():
    run = run_script(
        "from asynccoll.background import LoopThread\nthread = LoopThread('t')\nprint(thread.alive)"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")


def test_a_fork_has_the_object_but_not_the_thread():
    run = run_script(
        "import os, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)  # of fork beside threads, since Python 3.12\n"
        "from asynccoll.background import LoopThread\n"
        "thread = LoopThread('t')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    thread.stop()\n"
        "    os._exit(10 + thread.alive)\n"
        "_, status = os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(status), thread.alive)\n"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "10 True\n", "")


def test_a_wait_hears_of_a_signal_that_did_not_wake_it():
    """One that another thread has handled, or that came just before the wait: Python's flag is up, and nobody looks at it."""
    future = concurrent.futures.Future()
    waiter = threading.get_ident()

    def tell():
        while not {"wait", "result_of"} <= {
            frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[waiter])
        }:
            time.sleep(0.001)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=tell)
    fallback = threading.Timer(TIMEOUT, future.set_result, ["never heard of it"])
    fallback.start()
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        result_of(future)
    assert not future.done()  # else it was heard at the end of the wait only
    fallback.cancel()
    thread.join()


@pytest.mark.parametrize("error", [None, TimeoutError("its own"), LookupError("other")])
def test_a_wait_gives_what_the_future_gives(error, monkeypatch):
    monkeypatch.setattr("asynccoll.background.WAIT_SLICE", 0.001)
    future = concurrent.futures.Future()
    end = (lambda: future.set_result(5)) if error is None else (lambda: future.set_exception(error))
    timer = threading.Timer(0.02, end)
    timer.start()
    if error is None:
        assert result_of(future) == 5
    else:
        with pytest.raises(type(error)) as caught:
            result_of(future)
        assert caught.value is error
        assert caught.value.__context__ is None
    timer.join()


class TestFromAnotherLoop:
    async def test_a_coroutine_is_awaited_across_the_loops(self, thread):
        async def where():
            return threading.current_thread()

        async def fails():
            raise LookupError("nothing here")

        assert (await thread.awaited(where)).name == "asynccoll-test"
        with pytest.raises(LookupError, match="nothing here"):
            await thread.awaited(fails)

    async def test_a_cancel_is_over_when_the_coroutine_has_ended(self, thread):
        begun, ended = asyncio.Event(), []
        here = asyncio.get_running_loop()

        async def body():
            hand_over(here, begun.set)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append(True)

        async def waiting():
            await thread.awaited(body)

        task = asyncio.create_task(waiting())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]

    async def test_stopping_ends_what_runs_and_the_thread(self, thread):
        ended = []

        async def body():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        thread.run(body())
        await thread.stopped()
        assert ended == [True]
        assert not thread.alive
        assert thread.loop.is_closed()
        await thread.stopped()

    async def test_a_cancelled_stop_has_stopped(self, thread):
        stopping = asyncio.create_task(thread.stopped())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not thread.alive

    async def test_what_is_handed_to_a_closed_loop_is_dropped(self, thread):
        await thread.stopped()
        hand_over(thread.loop, lambda: None)
