import os
import select
import signal
import subprocess
import sys

import pytest

from asynccoll.launch import guard

LIMIT = 60


@pytest.fixture
def group():
    """Start a process in a group of its own; it holds the write end of a pipe: (process, read end)."""
    started = []

    def start(code: str) -> tuple[subprocess.Popen, int]:
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", f"import os, signal\nfd = {writer}\n{code}"],
            pass_fds=[writer],
            start_new_session=True,
        )
        started.append((process, reader))
        os.close(writer)
        return process, reader

    yield start
    for process, reader in started:
        guard.kill_group(process.pid, signal.SIGKILL)
        process.wait()
        os.close(reader)


def start_guard(grace: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, grace], stdin=subprocess.PIPE, bufsize=0
    )


def wait_for_end(reader: int) -> None:
    assert select.select([reader], [], [], LIMIT)[0]
    assert os.read(reader, 1) == b""


def test_a_group_on_the_list_is_stopped_when_the_input_ends(group):
    process, reader = group("signal.pause()")
    watcher = start_guard("1000")
    watcher.stdin.write(f"+{process.pid}\n".encode())
    watcher.stdin.close()
    wait_for_end(reader)
    assert process.wait(LIMIT) == -signal.SIGTERM
    assert watcher.wait(LIMIT) == 0


def test_a_group_that_ignores_sigterm_is_killed_after_the_grace(group):
    process, reader = group(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(fd, b'.'); signal.pause()"
    )
    assert os.read(reader, 1) == b"."
    watcher = start_guard("0.05")
    watcher.stdin.write(f"+{process.pid}\n".encode())
    watcher.stdin.close()
    wait_for_end(reader)
    assert process.wait(LIMIT) == -signal.SIGKILL
    assert watcher.wait(LIMIT) == 0


def test_a_group_that_was_taken_off_the_list_is_left_alone(group):
    process, _ = group("signal.pause()")
    watcher = start_guard("0.05")
    watcher.stdin.write(f"+{process.pid}\n-{process.pid}\n".encode())
    watcher.stdin.close()
    assert watcher.wait(LIMIT) == 0
    assert process.poll() is None


def test_a_group_is_alive_until_its_last_process_is_a_zombie(group):
    process, reader = group("signal.pause()")
    assert guard.group_alive(process.pid)
    process.kill()
    wait_for_end(reader)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not guard.group_alive(process.pid)  # though nobody has reaped it
    process.wait()
    assert not guard.group_alive(process.pid)


def test_a_group_is_alive_while_a_child_of_its_leader_is(group):
    process, reader = group("if os.fork(): os._exit(0)\nsignal.pause()")
    assert process.wait(LIMIT) == 0
    assert guard.group_alive(process.pid)
    guard.kill_group(process.pid, signal.SIGKILL)
    wait_for_end(reader)


def test_a_signal_to_a_group_that_is_gone_is_silent(group):
    process, _ = group("pass")
    process.wait(LIMIT)
    guard.kill_group(process.pid, signal.SIGTERM)
