import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta

import numpy
import pytest

from asynccoll.errors import CollectiveTimeout, PeerLost, RemoteError
from asynccoll.launch import launch

LIMIT = 60


def my_rank() -> int:
    return int(os.environ["ASYNCCOLL_RANK"])


def test_results_come_in_rank_order():
    assert launch(lambda: (my_rank(), os.environ["ASYNCCOLL_WORLD_SIZE"]), 3) == [
        (0, "3"),
        (1, "3"),
        (2, "3"),
    ]


def test_arguments_reach_every_rank_as_copies():
    value = {"a": [1]}
    results = launch(lambda given, factor: given["a"].append(my_rank() * factor) or given, 2, value, 10)
    assert results == [{"a": [1, 0]}, {"a": [1, 10]}]
    assert value == {"a": [1]}


def test_large_arguments_and_results_come_through():
    array = numpy.arange(3_000_000)
    for rank, result in enumerate(launch(lambda x: x + my_rank(), 2, array)):
        numpy.testing.assert_array_equal(result, array + rank)


def test_ranks_have_the_callers_search_path_and_arguments():
    assert launch(lambda: (sys.path, sys.argv), 1) == [(sys.path, sys.argv)]


def test_what_a_rank_raised_is_raised_with_its_rank_and_traceback():
    def fail() -> None:
        if my_rank() == 1:
            raise KeyError("the culprit")
        signal.pause()

    with pytest.raises(KeyError) as caught:
        launch(fail, 3)
    assert caught.value.args == ("the culprit",)
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 1 of 3 by launch()")
    assert 'raise KeyError("the culprit")' in note
    assert "run_child" not in note


def test_of_two_failures_the_earlier_is_raised_although_its_process_ends_later(tmp_path):
    os.mkfifo(tmp_path / "failed")

    def fail() -> None:
        if my_rank() == 0:
            import atexit

            # Rank 0's interpreter takes its time to end: until rank 1 is gone, or rank 0 is stopped.
            atexit.register(lambda: (open(tmp_path / "failed", "w").close(), signal.pause()))
            raise ValueError("first")
        open(tmp_path / "failed").close()
        raise RuntimeError("because of it")

    with pytest.raises(ValueError, match="first"):
        launch(fail, 2)


class NeedsTwo(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def test_an_exception_that_cannot_be_rebuilt_is_a_remote_error():
    def fail() -> None:
        raise NeedsTwo("one", "two")

    with pytest.raises(RemoteError) as caught:
        launch(fail, 2)
    assert caught.value.origin in (0, 1)
    assert caught.value.type_name.endswith("NeedsTwo")
    assert "one two" in str(caught.value)
    assert 'raise NeedsTwo("one", "two")' in caught.value.remote_traceback


def test_an_exception_that_cannot_be_pickled_is_a_remote_error():
    def fail() -> None:
        error = ValueError("with a lock")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(RemoteError, match="with a lock") as caught:
        launch(fail, 1)
    assert caught.value.type_name == "builtins.ValueError"
    assert "could not be pickled" in caught.value.remote_traceback


def test_a_result_that_cannot_be_pickled_names_the_rank():
    with pytest.raises(TypeError, match="pickle") as caught:
        launch(threading.Lock, 1)
    assert "rank 0" in caught.value.__notes__[0]


def test_a_rank_that_is_killed_is_named():
    def die() -> None:
        if my_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(PeerLost, match="rank 1 of 3 was killed by SIGKILL") as caught:
        launch(die, 3)
    assert caught.value.peer == 1
    assert caught.value.op == "launch"
    assert "communicator" not in repr(caught.value)  # there is none


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_without_a_result_is_named(code):
    with pytest.raises(PeerLost, match=f"rank 0 of 1 exited with code {code}"):
        launch(lambda: sys.exit(code), 1)


@pytest.mark.parametrize("limit", [0.7, timedelta(seconds=0.7)])
def test_the_limit_names_the_ranks_that_were_still_running(limit):
    with pytest.raises(CollectiveTimeout, match=r"still running after the limit of 0\.7 s") as caught:
        launch(signal.pause, 2, timeout=limit)
    assert caught.value.missing == {0, 1}
    assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("nproc", [0, -1, 1.5, True, "2"])
def test_a_bad_number_of_ranks_is_told(nproc):
    with pytest.raises(ValueError, match="nproc must be an integer of at least 1") as caught:
        launch(int, nproc)
    assert repr(nproc) in str(caught.value)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), timedelta(0)])
def test_a_bad_limit_is_told(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        launch(int, 1, timeout=timeout)


def test_a_coroutine_function_is_refused_with_advice():
    async def work() -> None: ...

    with pytest.raises(TypeError, match=r"asynccoll\.run"):
        launch(work, 1)


def test_it_works_in_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.extend(launch(my_rank, 2)))
    thread.start()
    thread.join(LIMIT)
    assert results == [0, 1]


async def test_it_works_inside_a_running_loop_as_in_a_notebook():
    assert launch(my_rank, 2) == [0, 1]


def test_jobs_nest():
    assert launch(lambda: launch(my_rank, 2), 2) == [[0, 1], [0, 1]]


def test_nothing_is_left_of_a_call():
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    launch(my_rank, 2)
    with pytest.raises(ZeroDivisionError):
        launch(lambda: 1 / 0, 2)
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before


def script_of(tmp_path, text: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text("import os, signal, sys\nfrom asynccoll.launch import launch\n" + textwrap.dedent(text))
    return [sys.executable, "-X", "dev", "-W", "error", str(path)]


def with_package() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def test_a_script_needs_no_main_guard_and_its_classes_come_back_as_themselves(tmp_path):
    program = script_of(
        tmp_path,
        """
        class Point:
            def __init__(self, x): self.x = x

        class Mine(Exception): pass

        def work(): return Point(int(os.environ["ASYNCCOLL_RANK"]))

        def fail(): raise Mine("mine")

        points = launch(work, 2)
        print([type(point) is Point for point in points], [point.x for point in points])
        try:
            launch(fail, 1)
        except Mine as error:
            print("caught", error)
        """,
    )
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=LIMIT, check=False, env=with_package()
    )
    assert done.stdout == "[True, True] [0, 1]\ncaught mine\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")


WAITING = """
fd = os.open(sys.argv[1], os.O_WRONLY)

def work():
    leash = os.open(sys.argv[1], os.O_WRONLY)
    os.write(leash, b"up\\n")
    signal.pause()

"""


@pytest.fixture
def waiting(tmp_path):
    """Start a script whose ranks wait, and wait for them: (process, read end of a pipe that they hold)."""
    started = []

    def start(text: str) -> tuple[subprocess.Popen, int]:
        path = tmp_path / "leash"
        os.mkfifo(path)
        leash = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        process = subprocess.Popen(
            [*script_of(tmp_path, WAITING + textwrap.dedent(text)), str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=with_package(),
        )
        started.append((process, leash))
        seen = b""
        while seen.count(b"up") < 2:
            assert select.select([leash], [], [], LIMIT)[0]
            seen += os.read(leash, 100)
        return process, leash

    yield start
    for process, leash in started:
        process.kill()
        process.communicate(timeout=LIMIT)
        os.close(leash)


def test_ctrl_c_ends_the_ranks_and_raises_keyboard_interrupt(waiting):
    process, leash = waiting("""
        try:
            launch(work, 2)
        except KeyboardInterrupt:
            os.close(fd)
            print("interrupted")
            sys.stdin.read(1)
    """)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=LIMIT) == (b"interrupted\n", b"")
    assert process.returncode == 0
    assert os.read(leash, 1) == b""


def test_a_handler_of_the_callers_own_hears_of_ctrl_c_too(waiting):
    process, _ = waiting("""
        signal.signal(signal.SIGINT, lambda *_: print("noted"))
        try:
            launch(work, 2)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=LIMIT) == (b"noted\ninterrupted\n", b"")


def test_ranks_do_not_outlive_a_caller_that_was_killed(waiting):
    process, leash = waiting("launch(work, 2)")
    process.kill()
    assert select.select([leash], [], [], LIMIT)[0]
    assert os.read(leash, 1) == b""
