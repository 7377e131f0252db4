"""`start_server`: readiness, death and its reasons, of real processes."""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

import asynccoll
from asynccoll.torch import ServerFailed, ServerProcess, Startable, start_server
from asynccoll.torch import servers as module
from asynccoll.torch.opening import planned
from asynccoll.torch.servers import _MAX_TEXT, _Parcel, _Reporter, _tag_logs

pytestmark = pytest.mark.torch

BOUND = 100.0
"""Seconds that any of these processes may take, on a machine that does other things as well."""


class Serving(Startable):
    """Says where it is, and what it was given, and then does as it was told."""

    def __init__(self, told, saying=None):
        self.told = told
        self.saying = saying

    def start(self):
        if self.saying is not None:
            self.saying.send((self.told, len(self.groups), multiprocessing.current_process().name))
        getattr(self, self.told)()

    def returns(self):
        logging.getLogger("a.server").warning("about to return")

    def fails(self):
        raise LookupError("no such relation")

    def exits(self):
        sys.exit(3)

    def waits(self):
        self.saying.recv()


class NotThere(Startable):
    """Cannot be unpickled."""

    def __reduce__(self):
        return unpickled_with_trouble, ()

    def start(self):
        raise AssertionError("it never gets here")


def unpickled_with_trouble():
    raise FileNotFoundError("no edges at /nowhere")


class Unsendable(Startable):
    def __init__(self):
        self.lock = (each for each in ())

    def start(self):
        raise AssertionError("it never gets here")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One process for each way to go, all started at once; with the end of a pipe for those that talk."""
    folder = tmp_path_factory.mktemp("stores")
    errors = (folder / "errors").open("wb")
    saved = os.dup(2)
    started, pipes = {}, {}
    os.dup2(errors.fileno(), 2)  # what a child writes to its standard error
    try:
        for told in ("returns", "fails", "exits", "waits"):
            here, there = multiprocessing.get_context("spawn").Pipe()
            started[told] = start_server(Serving(told, there), f"file://{folder}/{told}", 1, 0, [[0], [0]])
            pipes[told] = here
        started["unpickle"] = start_server(
            NotThere(), f"file://{folder}/unpickle", 1, 0, [], process_name="Edges-7"
        )
        started["alone"] = start_server(
            Serving("returns"), f"file://{folder}/alone", 2, 1, [[1]], timeout=600
        )
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        errors.close()
    yield started, pipes, folder / "errors"
    for process in started.values():
        process.kill()
        process.join(BOUND)


def ended(process):
    process.join(BOUND)
    assert process.exitcode is not None
    return process.exitcode


class TestLife:
    def test_p7_it_is_a_spawned_daemon_named_after_class_and_rank(self, servers):
        process = servers[0]["returns"]
        assert isinstance(process, multiprocessing.get_context("spawn").Process)
        assert (process.name, process.daemon) == ("Serving-0", True)
        assert servers[0]["unpickle"].name == "Edges-7"

    def test_p9_ready_once_its_groups_are_up_and_later_killed(self, servers):
        started, pipes, _ = servers
        process = started["waits"]
        process.wait_ready(BOUND)
        assert process.ready
        assert pipes["waits"].poll(BOUND)
        assert pipes["waits"].recv() == ("waits", 2, "Serving-0")  # the groups were set before start
        assert (process.exitcode, process.failure) == (None, None)
        process.wait_ready(0)  # again

        process.kill()
        assert ended(process) == -signal.SIGKILL
        failure = process.failure
        assert (failure.stage, failure.type_name, failure.exitcode) == ("start", "", -9)
        assert "killed by signal 9" in str(failure)

    def test_one_that_has_returned_was_ready(self, servers):
        process = servers[0]["returns"]
        assert ended(process) == 0
        process.wait_ready(0)
        assert process.failure is None

    def test_p7_logs_begin_with_its_name(self, servers):
        ended(servers[0]["returns"])
        assert "[Serving-0] WARNING a.server: about to return" in servers[2].read_text().splitlines()


class TestDeath:
    def test_p9_unpickling_fails(self, servers):
        process = servers[0]["unpickle"]
        with pytest.raises(ServerFailed) as caught:
            process.wait_ready(BOUND)
        error = caught.value
        assert (error.rank, error.name, error.stage, error.exitcode) == (0, "Edges-7", "unpickle", 1)
        assert error.type_name == "FileNotFoundError"
        assert "unpickled_with_trouble" in error.remote_traceback
        for fragment in ("Edges-7", "rank 0", "no edges at /nowhere", "traceback of Edges-7"):
            assert fragment in str(error)
        assert str(process.failure) == str(error)

    def test_p9_start_fails(self, servers):
        process = servers[0]["fails"]
        assert ended(process) == 1
        process.wait_ready(0)  # it was
        failure = process.failure
        assert (failure.stage, failure.type_name, failure.exitcode) == ("start", "LookupError", 1)
        assert "no such relation" in str(failure)
        assert "in fails" in failure.remote_traceback

    def test_p9_it_exits(self, servers):
        process = servers[0]["exits"]
        assert ended(process) == 3
        assert (process.failure.type_name, process.failure.exitcode) == ("SystemExit", 3)

    def test_p9_not_ready_in_time_and_then_killed(self, servers):
        process = servers[0]["alone"]
        with pytest.raises(TimeoutError) as caught:
            process.wait_ready(0.01)
        for fragment in ("'Serving-1'", "rank 1", "0.01 s"):
            assert fragment in str(caught.value)
        process.kill()
        with pytest.raises(ServerFailed) as caught:
            process.wait_ready(BOUND)
        assert (caught.value.rank, caught.value.exitcode) == (1, -9)
        assert not process.ready

    def test_a_failure_survives_pickling(self):
        error = ServerFailed(3, "S-3", "start", 1, type_name="KeyError", text="'x'", remote_traceback="here")
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), vars(again)) == (str(error), vars(error))
        assert isinstance(again, asynccoll.AsynccollError)


class TestRefusals:
    def test_p9_what_cannot_be_pickled_is_an_error_at_the_call(self):
        before = multiprocessing.active_children()
        with pytest.raises(TypeError) as caught:
            start_server(Unsendable(), "file:///nowhere", 2, 1, [])
        for fragment in ("Unsendable", "rank 1", "generator", "start()"):
            assert fragment in str(caught.value)
        assert multiprocessing.active_children() == before

    @pytest.mark.parametrize(
        ("kept", "fragment"),
        [
            (
                torch.ones(1, requires_grad=True) * 2,
                "RuntimeError: ",
            ),  # torch's word for a tensor that is no leaf
            (threading.Lock(), "TypeError: "),
        ],
        ids=["tensor", "lock"],
    )
    def test_whatever_pickling_raises_says_which_server_it_is(self, kept, fragment):
        with pytest.raises(TypeError) as caught:
            start_server(Serving("returns", kept), "file:///nowhere", 2, 1, [])
        assert "the server Serving of rank 1 cannot be pickled" in str(caught.value)
        assert fragment in str(caught.value)

    def test_a_daemon_has_no_servers(self, monkeypatch):
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
        with pytest.raises(RuntimeError, match="'MainProcess', which is a daemon"):
            start_server(Serving("returns"), "file:///nowhere", 2, 1, [])

    @pytest.mark.parametrize(
        ("timeout", "error"),
        [
            (-1, ValueError),
            (float("nan"), ValueError),
            (timedelta(seconds=-1), ValueError),
            ("5", TypeError),
            (True, TypeError),
            ([], TypeError),
        ],
        ids=repr,
    )
    def test_what_is_no_time_to_wait(self, timeout, error):
        with pytest.raises(error, match="is not a number of seconds") as caught:
            ServerProcess(target=print).wait_ready(timeout)
        assert f"timeout={timeout!r}" in str(caught.value)

    def test_what_is_no_server(self):
        with pytest.raises(TypeError, match="is not a Startable"):
            start_server(object(), "file:///nowhere", 2, 1, [])
        with pytest.raises(TypeError, match="abstract"):
            Startable()

    def test_p3_without_an_init_method(self):
        with pytest.raises(RuntimeError, match="must be set when num_machines > 1"):
            start_server(Serving("returns"), None, 2, 1, [])

    def test_wrong_arguments_start_nothing(self):
        before = multiprocessing.active_children()
        for arguments, fragment in [((2, 2, []), "rank=2"), ((2, 0, [[2]]), "groups[0]")]:
            with pytest.raises(ValueError) as caught:
                start_server(Serving("returns"), "file:///nowhere", *arguments)
            assert fragment in str(caught.value)
        assert multiprocessing.active_children() == before


def test_a_report_fits_into_a_pipe_that_nobody_reads():
    reader, writer = multiprocessing.Pipe(duplex=False)
    os.set_blocking(writer.fileno(), False)
    with reader, writer:
        reporter = _Reporter(writer)
        for stage in ("unpickle", "init_process_group", "start"):
            reporter.enter(stage)
        reporter.failed(
            ValueError("\U0001f600" * 10 * _MAX_TEXT + "\udcff")
        )  # BlockingIOError if it does not


class Mute(Exception):
    def __str__(self):
        raise LookupError("no words")


def test_an_error_without_words_is_reported_all_the_same():
    process = ServerProcess(target=print)
    reader, writer = multiprocessing.Pipe(duplex=False)
    with writer:
        process._watch(3, reader)
        reporter = _Reporter(writer)
        reporter.enter("start")
        reporter.failed(Mute())
        assert process.ready
        failure = process._failed(1)
        assert failure.type_name == "Mute"
        assert "its __str__ raised LookupError" in str(failure)


def test_the_end_of_its_pipe_is_no_trouble_for_another_thread_that_waits_for_it():
    process = ServerProcess(target=print)
    reader, writer = multiprocessing.Pipe(duplex=False)
    process._watch(0, reader)
    writer.close()
    assert not process.ready
    assert process._reader is None
    assert multiprocessing.connection.wait([reader], 0) == [
        reader
    ]  # OSError, were it closed under their hands
    reader.close()


class Descriptor:
    """Of a file, on its way to a child that is this process itself."""

    def __init__(self, number):
        self.number = number

    def detach(self):
        return self.number


def test_a_large_server_and_many_groups_do_not_go_through_the_pipe_that_spawns():
    """It holds 64 KiB, pipe(7); what is more waits for the child to load its main module, and so would the caller."""
    server, plan = Serving("returns", b"x" * 1_000_000), planned(1000, 3, [range(1000)] * 100, "gloo", None)
    set_spawning_popen(SimpleNamespace(duplicate_for_child=os.dup, DupFd=Descriptor))
    parcel = _Parcel(server, "env://", plan)
    try:
        data = bytes(ForkingPickler.dumps(parcel))
    finally:
        set_spawning_popen(None)
        parcel.close()
    assert len(data) < 1000
    again, method, same = pickle.loads(data).unpack()
    assert (again.told, again.saying, method, same) == ("returns", server.saying, "env://", plan)


@pytest.mark.parametrize(("sentinel", "parent"), [(False, 7), (True, 1)], ids=["ended", "adopted"])
def test_a_server_without_a_parent_ends_itself_and_if_it_must_by_force(monkeypatch, sentinel, parent):
    joined, done = [], []

    def join(limit):
        joined.append(limit)
        assert len(joined) < 3, "it waits forever"

    father = SimpleNamespace(pid=7, is_alive=lambda: sentinel if joined else True, join=join)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: father)
    monkeypatch.setattr(module.os, "getppid", lambda: parent if joined else 7)
    monkeypatch.setattr(module.os, "kill", lambda pid, number: done.append((pid, number)))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: done.append(seconds))
    module._follow_parent()
    assert joined == [module.FOLLOW]
    assert done == [(os.getpid(), signal.SIGTERM), module.GRACE, (os.getpid(), signal.SIGKILL)]


def test_p7_handlers_that_are_there_are_tagged(capsys):
    root = logging.getLogger()
    saved, root.handlers = root.handlers, []
    try:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        root.addHandler(handler)
        _tag_logs("LockServer-4")
        root.warning("hello")
    finally:
        root.handlers = saved
    assert capsys.readouterr().out == "[LockServer-4] WARNING: hello\n"


PARENT = """
import os, sys
from asynccoll.torch import Startable, start_server

class Waiting(Startable):
    def start(self):
        import torch, torch.distributed as dist
        dist.recv(torch.zeros(1), 0)  # in native code, for as long as the parent lives

if __name__ == "__main__":
    import torch.distributed as dist
    server = start_server(Waiting(), "file://" + sys.argv[1], 2, 1, [])
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], world_size=2, rank=0)
    server.wait_ready(60)
    print(server.pid, flush=True)
    server.join()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_no_server_outlives_its_parent(tmp_path, number):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(asynccoll.__file__).parents[1])},
        start_new_session=True,
    )
    try:
        child = int(parent.stdout.readline())
        # Ctrl-C goes to both, as a terminal sends it.
        (os.killpg if number == signal.SIGINT else os.kill)(parent.pid, number)
        parent.wait(BOUND)
        deadline = time.monotonic() + BOUND
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(child)
    finally:
        parent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_join_is_made_of_slices(monkeypatch):
    """A signal that comes just before the wait begins is heard at the end of a slice, and not only when the process ends."""
    waits = []
    process = ServerProcess(target=print)
    codes = iter([None, None, 0])
    monkeypatch.setattr(SpawnProcess, "join", lambda self, timeout=None: waits.append(timeout))
    monkeypatch.setattr(ServerProcess, "exitcode", property(lambda self: next(codes)))
    process.join()
    assert len(waits) == 3
    assert max(waits) <= 1
    codes = iter([None] * 10)
    process.join(0)
    assert waits[3:] == [0]
