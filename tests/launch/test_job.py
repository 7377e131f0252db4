"""What the command line does not show; the rest of the job's rules are tested through it (tests/cli/test_run.py)."""

import os
import signal
import sys
import threading

import pytest

from asynccoll.launch import Exit, Job, Overdue


def python(code: str):
    return lambda rank: [sys.executable, "-I", "-S", "-c", f"import os, signal, sys\nrank = {rank}\n{code}"]


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture(params=["pidfd", "thread"])
def way(request, monkeypatch):
    """Both ways to learn of an end."""
    if request.param == "thread":

        def refuse(pid: int, flags: int = 0) -> int:
            raise PermissionError("not in this sandbox")

        monkeypatch.setattr(os, "pidfd_open", refuse)


@pytest.mark.usefixtures("way")
def test_success_has_no_cause_and_every_end_is_noted():
    with Job(3, python("")) as job:
        assert job.supervise() is None
        assert job.running == ()
    assert sorted((end.rank, end.returncode) for end in job.exits) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.usefixtures("way")
def test_the_cause_is_the_first_failure():
    with Job(3, python("if rank != 1: signal.pause()\nsys.exit(6)")) as job:
        cause = job.supervise()
    assert isinstance(cause, Exit)
    assert (cause.rank, cause.returncode) == (1, 6)
    assert {end.rank: end.returncode for end in job.exits} == {0: -15, 1: 6, 2: -15}
    assert job.exits[0] is cause


@pytest.mark.usefixtures("way")
def test_nothing_is_left_of_a_job():
    before = open_descriptors(), threading.active_count()
    for _ in range(3):
        with Job(2, python("if rank == 0: sys.exit(1)\nsignal.pause()"), capture=True) as job:
            job.supervise()
    for thread in threading.enumerate():
        if thread.name.startswith("asynccoll"):
            thread.join(30)
    assert (open_descriptors(), threading.active_count()) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.usefixtures("way")
def test_leaving_a_job_early_kills_and_reaps_it():
    with Job(2, python("signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()")) as job:
        assert job.running == (0, 1)
    assert [end.returncode for end in job.exits] == [-signal.SIGKILL] * 2
    job.close()  # twice is silent


def test_the_limit_names_the_ranks_that_were_still_running():
    with Job(2, python("signal.pause()")) as job:
        cause = job.supervise(timeout=0.5)
    assert cause == Overdue(0.5, (0, 1))


def test_a_stopped_rank_ends_with_the_others():
    reader, writer = os.pipe()
    code = f"""
if rank == 1:
    os.write({writer}, b"%d" % os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()
stat = f"/proc/{{int(os.read({reader}, 99))}}/stat"
while ") T" not in open(stat).read():
    pass
sys.exit(1)
"""
    with Job(2, python(code), pass_fds=lambda rank: [reader, writer]) as job:
        job.supervise()
    os.close(reader)
    os.close(writer)
    assert {end.rank: end.returncode for end in job.exits} == {0: 1, 1: -15}


def test_a_program_that_does_not_exist_is_an_error_and_leaves_nothing():
    before = open_descriptors()
    job = Job(2, lambda rank: [sys.executable if rank == 0 else "/no/such/python", "-c", "input()"])
    with pytest.raises(FileNotFoundError), job:
        pass
    assert open_descriptors() == before
    assert [end.rank for end in job.exits] == [0]


def test_output_that_is_not_captured_has_no_streams():
    with Job(1, python("")) as job:
        with pytest.raises(ValueError, match="capture=True"):
            job.streams(0)
        job.supervise()


def test_descriptors_reach_the_ranks_they_are_for():
    readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
    with Job(
        2, python(f"os.write({writers}[rank], b'%d' % rank)"), pass_fds=lambda rank: [writers[rank]]
    ) as job:
        assert job.supervise() is None
    assert [os.read(reader, 9) for reader in readers] == [b"0", b"1"]
    for fd in (*readers, *writers):
        os.close(fd)


def test_a_job_goes_on_without_its_guard():
    with Job(1, python("")) as job:
        job._guard.kill()
        job._guard.wait()
        assert job.supervise() is None


def test_every_end_is_told_as_it_is_observed():
    told = []
    with Job(2, python("sys.exit(rank * 3)")) as job:
        job.supervise(on_end=lambda end: told.append((end, job.running)))
    assert [end for end, _ in told] == job.exits
    assert told[-1][1] == ()


@pytest.mark.parametrize("reads", [True, False])
def test_rank_0_has_an_input_only_where_it_is_to_read(reads):
    code = "os.write(1, str(os.path.realpath('/proc/self/fd/0') == os.devnull).encode())"
    with open("/proc/self/stat", "rb") as source:
        saved = os.dup(0)
        os.dup2(source.fileno(), 0)
        try:
            with Job(2, python(code), capture=True, reads=reads) as job:
                job.supervise()
                found = [os.read(job.streams(rank)[0], 9) for rank in range(2)]
        finally:
            os.dup2(saved, 0)
            os.close(saved)
    assert found == [str(not reads).encode(), b"True"]
