"""Jobs of tiny scripts, ordered by named pipes: opening one waits for the other side, reading one for its end."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from asynccoll.cli.run import main

LIMIT = 60  # seconds after which a test gives up on a process

PRELUDE = """
import os, signal, subprocess, sys
rank = int(os.environ["ASYNCCOLL_RANK"])
here = os.path.dirname(os.path.abspath(__file__))

def tell(name, text=""):
    with open(os.path.join(here, name), "w") as file:
        file.write(text)

def wait_for(name):
    with open(os.path.join(here, name)) as file:
        return file.read()

"""


@pytest.fixture
def script(tmp_path):
    """Write a script in tmp_path; return its path."""

    def write(text: str, name: str = "script.py") -> str:
        path = tmp_path / name
        path.write_text(PRELUDE + textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def start():
    """Start the launcher, as strict about warnings as Python can be; killed and reaped at the end of the test."""
    started = []

    def popen(
        *argv: str, program=(sys.executable, "-X", "dev", "-W", "error"), **options
    ) -> subprocess.Popen:
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        } | options
        process = subprocess.Popen([*program, "-m", "asynccoll", "run", *argv], **options)
        started.append(process)
        return process

    yield popen
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def run(start):
    """Run a job to its end: (exit code, stdout lines, stderr lines), lines in an order of their own."""

    def job(*argv: str, data: bytes | None = None, **options) -> tuple[int, list[str], list[str]]:
        if data is not None:
            options["stdin"] = subprocess.PIPE
        process = start(*argv, **options)
        out, err = process.communicate(data, timeout=LIMIT)
        return process.returncode, sorted(out.decode().splitlines()), err.decode().splitlines()

    return job


@pytest.fixture
def fifo(tmp_path):
    """Make a named pipe in tmp_path."""

    def make(name: str) -> Path:
        path = tmp_path / name
        os.mkfifo(path)
        return path

    return make


class Leash:
    """A named pipe that every process of a job is to hold open for writing: it ends when the last one has."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def words(self, count: int) -> list[str]:
        """Wait for ``count`` words."""
        seen = b""
        while len(seen.split()) < count or not seen.endswith(b"\n"):
            assert select.select([self.fd], [], [], LIMIT)[0], f"only {seen!r} came"
            seen += os.read(self.fd, 4096)
        return seen.decode().split()

    def has_ended(self) -> bool:
        """Whether no process is left now."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            return False
        return True

    def wait(self) -> None:
        """Wait until no process is left."""
        while True:
            assert select.select([self.fd], [], [], LIMIT)[0], "a process is left"
            if not os.read(self.fd, 4096):
                return


@pytest.fixture
def leash(fifo):
    held = Leash(fifo("leash"))
    yield held
    os.close(held.fd)


HOLD = """
leash = os.open(os.path.join(here, "leash"), os.O_WRONLY)
os.set_inheritable(leash, True)

def say(word):
    os.write(leash, f"{word}\\n".encode())
"""


def own_lines(lines: list[str]) -> list[str]:
    """The launcher's own lines of standard error."""
    return [line for line in lines if not re.match(r"\[ *\d+\] ", line)]


# What comes out


def test_every_line_has_its_rank_and_keeps_its_stream(script, run):
    code, out, err = run("-n", "3", script("print('out', rank); print('err', rank, file=sys.stderr)"))
    assert code == 0
    assert out == ["[0] out 0", "[1] out 1", "[2] out 2"]
    assert sorted(err) == ["[0] err 0", "[1] err 1", "[2] err 2"]


def test_no_prefix_leaves_bytes_as_they_are(script, start):
    process = start("-n", "1", "--no-prefix", script(r"os.write(1, b'a\r\n\xff\x00\x1b[31m\n\n no end')"))
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (0, b"a\r\n\xff\x00\x1b[31m\n\n no end", b"")


def test_bytes_that_are_no_text_and_a_last_line_without_end_come_through(script, start):
    process = start("-n", "1", script(r"os.write(1, b'\xff\x00\n'); os.write(2, b'no end')"))
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (0, b"[0] \xff\x00\n", b"[0] no end\n")


def test_long_lines_of_many_ranks_are_never_mixed(script, run):
    code, out, err = run(
        "-n",
        "4",
        script("for _ in range(20): os.write(1, (str(rank) * 30000).encode()); os.write(1, b'\\n')"),
    )
    assert (code, err) == (0, [])
    assert out == sorted(f"[{rank}] " + str(rank) * 30000 for rank in range(4) for _ in range(20))


def test_output_is_live_although_it_goes_through_a_pipe(script, start, fifo):
    fifo("go")
    process = start("-n", "1", script("print('before'); wait_for('go')"))
    assert process.stdout.readline() == b"[0] before\n"  # while the rank still waits
    Path(process.args[-1]).with_name("go").write_text("")
    assert process.wait(LIMIT) == 0


def test_a_progress_bar_in_a_pipe_is_few_lines(script, run):
    code, out, _ = run("-n", "1", script("for i in range(500): print(f'\\r{i}', end='')\nprint()"))
    assert code == 0
    assert "[0] 499" in out
    assert len(out) <= 20


def test_a_reader_that_goes_away_ends_the_job_quietly(script, start, leash):
    process = start("-n", "2", script(HOLD + "while True: print('y' * 100)"))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT) == 128 + signal.SIGPIPE
    assert leash.has_ended()
    assert own_lines(process.stderr.read().decode().splitlines()) == []


def test_a_reader_that_stands_still_does_not_keep_ranks_alive(script, start, leash):
    path = script(HOLD + "if rank: say('up'); wait_for('go'); sys.exit(3)\nwhile True: print('y' * 1000)")
    os.mkfifo(Path(path).with_name("go"))
    process = start("-n", "2", path)
    leash.words(1)
    Path(path).with_name("go").write_text("")
    leash.wait()  # nobody has read a byte of the output
    assert process.communicate(timeout=LIMIT)[1].startswith(b"asynccoll run: rank 1 exited with code 3 (pid ")
    assert process.returncode == 3


def test_ctrl_c_ends_a_launcher_whose_reader_stands_still(script, start, leash):
    process = start("-n", "1", script(HOLD + "say(os.getpid())\nos.write(1, (b'y' * 999 + b'\\n') * 120)"))
    wait_for_state(int(leash.words(1)[0]), "gone")  # the rank has written all; the launcher is not rid of it
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT) == 130


# What a rank gets

SHOW = """
import json, socket
seen = {name: value for name, value in os.environ.items() if name.startswith(("ASYNCCOLL_", "OMP_", "PYTHONUNB"))}
seen["argv"], seen["path0"], seen["name"] = sys.argv, sys.path[0], __name__
listed = os.listdir("/proc/self/fd")  # the descriptor of the listing itself among them
seen["fds"] = sorted(int(fd) for fd in listed if os.path.exists(f"/proc/self/fd/{fd}"))
seen["stdin"] = sys.stdin.read() if os.path.realpath("/proc/self/fd/0") != os.devnull else None
seen["lines"] = [open(f"/proc/{pid}/cmdline").read() for pid in (os.getpid(), os.getppid())]
if "ASYNCCOLL_RENDEZVOUS_FD" in os.environ:
    listener = socket.socket(fileno=int(os.environ["ASYNCCOLL_RENDEZVOUS_FD"]))
    seen["listens"] = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    seen["address"] = listener.getsockname()
    listener.close()
    # The launcher keeps the socket: somebody who comes now waits for the next init().
    socket.create_connection((os.environ["ASYNCCOLL_MASTER_ADDR"], int(os.environ["ASYNCCOLL_MASTER_PORT"]))).close()
json.dump(seen, open(os.path.join(here, f"{rank}.json"), "w"))
"""


def seen_by(path: str, rank: int) -> dict:
    return json.loads(Path(path).with_name(f"{rank}.json").read_text())


def test_ranks_get_the_environment_contract(script, run):
    path = script(SHOW)
    outer = {f"ASYNCCOLL_{name}": "stale" for name in ("RANK", "SECRET", "MASTER_PORT", "GENERATION")}
    outer |= {"ASYNCCOLL_RENDEZVOUS_FD": "77", "ASYNCCOLL_ALGORITHM": "ring"}
    code, out, err = run("-n", "2", path, env=os.environ | outer)
    assert (code, out, err) == (0, [], [])
    zero, one = seen_by(path, 0), seen_by(path, 1)
    for rank, seen in enumerate((zero, one)):
        assert seen["ASYNCCOLL_RANK"] == seen["ASYNCCOLL_LOCAL_RANK"] == str(rank)
        assert seen["ASYNCCOLL_WORLD_SIZE"] == "2"
        assert seen["ASYNCCOLL_MASTER_ADDR"] == "127.0.0.1"
        assert seen["ASYNCCOLL_ALGORITHM"] == "ring"
        assert "ASYNCCOLL_GENERATION" not in seen
    assert len(bytes.fromhex(zero["ASYNCCOLL_SECRET"])) == 32
    assert zero["ASYNCCOLL_SECRET"] == one["ASYNCCOLL_SECRET"]
    assert not any(zero["ASYNCCOLL_SECRET"] in line for seen in (zero, one) for line in seen["lines"])
    assert zero["listens"] == 1
    assert zero["address"] == ["127.0.0.1", int(zero["ASYNCCOLL_MASTER_PORT"])]
    assert zero["ASYNCCOLL_MASTER_PORT"] == one["ASYNCCOLL_MASTER_PORT"] != "stale"
    assert "ASYNCCOLL_RENDEZVOUS_FD" not in one
    assert zero["fds"] == [0, 1, 2, int(zero["ASYNCCOLL_RENDEZVOUS_FD"])]
    assert one["fds"] == [0, 1, 2]


def test_every_job_has_a_secret_of_its_own(script, run):
    path = script(SHOW)
    run("-n", "1", path)
    first = seen_by(path, 0)["ASYNCCOLL_SECRET"]
    run("-n", "1", path)
    assert seen_by(path, 0)["ASYNCCOLL_SECRET"] != first


def test_what_follows_the_script_is_its_own(script, run):
    path = script(SHOW)
    assert run("-n", "1", path, "--lr", "0.1", "-n", "7", "--", "x", "--help")[0] == 0
    assert seen_by(path, 0)["argv"] == [path, "--lr", "0.1", "-n", "7", "--", "x", "--help"]


def test_a_script_runs_as_python_would_run_it(script, run, tmp_path):
    path = script(SHOW)
    (tmp_path / "elsewhere").mkdir()
    assert (
        run("-n", "1", "--", os.path.join("..", "script.py"), cwd=tmp_path / "elsewhere", env=path_env())[0]
        == 0
    )
    seen = seen_by(path, 0)
    assert seen["name"] == "__main__"
    assert os.path.realpath(seen["path0"]) == str(tmp_path)


def path_env(**more: str) -> dict[str, str]:
    """An environment in which the package is found from any directory."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)} | more


@pytest.mark.parametrize("option", [["-m", "pkg.mod"], ["-mpkg.mod"]])
def test_a_module_runs_as_python_dash_m_would_run_it(option, script, run, tmp_path):
    (tmp_path / "pkg").mkdir()
    path = script(SHOW, "pkg/mod.py")
    assert run("-n", "1", *option, "-n", "7", cwd=tmp_path, env=path_env()) == (0, [], [])
    seen = seen_by(path, 0)
    assert seen["name"] == "__main__"
    assert seen["path0"] == str(tmp_path)
    assert seen["argv"][1:] == ["-n", "7"]


def test_rank_0_has_the_launchers_input_and_the_others_none(script, run):
    path = script(SHOW)
    assert run("-n", "2", path, data=b"typed")[0] == 0
    assert [seen_by(path, rank)["stdin"] for rank in (0, 1)] == ["typed", None]


# Mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-n", "2", "missing.py"], "no such script: 'missing.py'"),
        (["-n", "2", "-m", "no_such_module_here.x"], "no module named 'no_such_module_here.x'"),
        (["-n", "2", "-m"], "-m needs the name of a module"),
        (["-n", "2"], "no script"),
        (["-n", "0", "x.py"], "-n/--nproc: must be an integer of at least 1, not '0'"),
        (["-n", "two", "x.py"], "-n/--nproc: must be an integer of at least 1, not 'two'"),
        (["x.py"], "required: -n/--nproc"),
        (["-n", "1", "--timeout", "soon", "x.py"], "--timeout: must be a number of seconds, not 'soon'"),
        (["-n", "1", "--grace", "-1", "x.py"], "--grace: must be a number of seconds, not '-1'"),
        (["-n", "1", "--grace", "nan", "x.py"], "--grace: must be a number of seconds, not 'nan'"),
        (["-n", "1", "--fast", "x.py"], "unrecognized arguments: --fast"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert message in seen.err


def test_ranks_that_cannot_start_are_told_and_none_is_left(script, start, leash):
    path = script(HOLD + "signal.pause()")
    limited = ("/bin/sh", "-c", 'ulimit -n 40; exec "$0" "$@"', sys.executable)
    process = start("-n", "100", path, program=limited)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (1, b"")
    assert own_lines(err.decode().splitlines())[-1].startswith("asynccoll run: cannot start 100 ranks: ")
    assert leash.has_ended()


# Failure


def test_the_first_failure_stops_the_rest_and_is_the_exit_code(script, run, leash):
    code, _, err = run("-n", "3", script(HOLD + "if rank == 2: sys.exit(3)\nsignal.pause()"))
    assert code == 3
    assert len(err) == 1
    assert re.fullmatch(
        r"asynccoll run: rank 2 exited with code 3 \(pid \d+\) after \d+\.\d s; stopping the others", err[0]
    )
    assert leash.has_ended()


def test_a_signal_is_named_and_counts_128_more(script, run):
    code, _, err = run("-n", "1", script("os.kill(os.getpid(), signal.SIGKILL)"))
    assert code == 137
    assert re.fullmatch(r"asynccoll run: rank 0 was killed by SIGKILL \(pid \d+\) after \d+\.\d s", err[0])


def test_the_last_words_of_the_rank_come_before_the_news_of_its_end(script, run):
    _, _, err = run("-n", "1", script("os.write(2, b'reason\\nand more'); os._exit(1)"))
    assert err[:2] == ["[0] reason", "[0] and more"]
    assert err[2].startswith("asynccoll run: rank 0 exited with code 1")


def test_what_the_others_make_of_it_does_not_change_the_code(script, run):
    text = "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\n" + HOLD + "say('up')\n"
    text += "if rank == 1: wait_for('go'); os._exit(3)\nwhile True: signal.pause()"
    path = script(text)
    leash_path = Path(path).with_name("leash")
    os.mkfifo(leash_path)
    os.mkfifo(Path(path).with_name("go"))
    held = Leash(leash_path)

    def release() -> None:
        held.words(3)
        Path(path).with_name("go").write_text("")

    thread = threading.Thread(target=release)
    thread.start()
    code, _, err = run("-n", "3", path)
    thread.join()
    os.close(held.fd)
    assert code == 3
    assert len(err) == 1


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def wait_for_state(pid: int, state: str) -> None:
    poll = select.poll()
    for _ in range(LIMIT * 100):
        if state_of(pid) == state:
            return
        poll.poll(10)
    raise AssertionError(f"process {pid} is in state {state_of(pid)}, not {state}")


def test_first_is_who_ended_first_also_when_all_ends_are_found_at_once(script, start, leash, tmp_path):
    path = script(HOLD + "say(f'{rank}:{os.getpid()}')\nwait_for(f'go{rank}')\nos._exit(10 + rank)")
    for rank in range(4):
        os.mkfifo(tmp_path / f"go{rank}")
    process = start("-n", "4", path)
    pids = dict(word.split(":") for word in leash.words(4))
    process.send_signal(signal.SIGSTOP)
    wait_for_state(process.pid, "T")
    for rank in "2031":
        (tmp_path / f"go{rank}").write_text("")
        wait_for_state(int(pids[rank]), "Z")
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 12
    assert err.startswith(b"asynccoll run: rank 2 exited with code 12")


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(script, run, leash):
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HOLD
    text += "if rank: say('up'); signal.pause()\nwait_for('up'); sys.exit(4)"
    path = script(text)
    os.mkfifo(Path(path).with_name("up"))

    def release() -> None:
        leash.words(1)
        Path(path).with_name("up").write_text("")

    thread = threading.Thread(target=release)
    thread.start()
    code, _, err = run("-n", "2", "--grace", "0.1", path)
    thread.join()
    assert code == 4
    assert err[1:] == ["asynccoll run: rank 1 did not end within 0.1 s; killed"]
    assert leash.has_ended()


GRANDCHILD = HOLD + "subprocess.Popen(['sleep', '1000'], pass_fds=[leash])\n"


@pytest.mark.parametrize("code", [0, 5])
def test_what_ranks_started_ends_with_the_job(code, script, run, leash):
    seen, _, err = run("-n", "2", script(GRANDCHILD + f"sys.exit({code})"))
    assert seen == code
    assert leash.has_ended()
    assert len(err) == (1 if code else 0)


def test_what_ranks_left_behind_is_asked_to_end_before_it_is_killed(script, run, leash):
    text = (
        HOLD
        + """
def end(*_):
    say("bye")
    os._exit(0)

signal.signal(signal.SIGTERM, end)
say("up")
while not os.fork():
    signal.pause()
"""
    )
    assert run("-n", "1", "--grace", "1000", script(text)) == (0, [], [])
    assert leash.words(2) == ["up", "bye"]
    assert leash.has_ended()


def test_a_daemon_that_left_its_rank_outlives_the_job_and_does_not_delay_it(script, run, leash):
    text = (
        HOLD
        + "p = subprocess.Popen(['sleep', '1000'], pass_fds=[leash], start_new_session=True)\nprint(p.pid)"
    )
    code, out, err = run("-n", "1", script(text))
    assert (code, err) == (0, [])
    assert not leash.has_ended()
    os.kill(int(out[0].split()[1]), signal.SIGKILL)
    leash.wait()


def test_the_job_has_a_limit(script, run, leash):
    code, _, err = run("-n", "2", "--timeout", "0.3", script(HOLD + "signal.pause()"))
    assert code == 124
    assert err == ["asynccoll run: ranks 0, 1 still running after the limit of 0.3 s; stopping the job"]
    assert leash.has_ended()


# Signals to the launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_ranks_and_what_they_started_once(number, script, start, leash):
    text = (
        GRANDCHILD
        + f"""
signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])
say("up")
signal.sigwait([{int(number)}])
print("got it", *signal.sigpending())
"""
    )
    process = start("-n", "2", "--grace", "1000", script(text))
    leash.words(2)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert sorted(out.decode().splitlines()) == ["[0] got it", "[1] got it"]
    assert err.decode().splitlines() == [
        f"asynccoll run: {number.name}: stopping ranks 0, 1 (once more kills at once)"
    ]
    assert leash.has_ended()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_kills_at_once(first, script, start, leash):
    text = (
        HOLD
        + f"""
signal.signal({int(first)}, lambda *_: say("no"))
say("up")
while True:
    signal.pause()
"""
    )
    process = start("-n", "2", "--grace", "1000", script(text))
    leash.words(2)
    process.send_signal(first)
    leash.words(2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + first
    assert leash.has_ended()


def test_ctrl_c_of_a_terminal_reaches_each_rank_once(script, start, leash):
    path = script(
        HOLD + "try:\n    say('up')\n    signal.pause()\nexcept KeyboardInterrupt:\n    print('stopped')"
    )
    ours, theirs = pty.openpty()
    program = (sys.executable, "-c", ON_A_TERMINAL_OF_ITS_OWN)
    process = start(
        "-n", "2", "--grace", "1000", path, program=program, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    leash.words(2)
    os.write(ours, b"\x03")
    seen = read_terminal(ours)
    assert process.wait(LIMIT) == 130
    assert leash.has_ended()
    assert "Traceback" not in seen
    assert seen.count("stopped") == 2


ON_A_TERMINAL_OF_ITS_OWN = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def read_terminal(terminal: int) -> str:
    seen = b""
    while select.select([terminal], [], [], LIMIT)[0]:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(terminal)
    return seen.decode()


@pytest.mark.parametrize(
    ("setting", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_on_a_terminal_prefixes_have_colours_and_ranks_know_the_width(setting, coloured, script):
    path = script("print(os.environ['COLUMNS'])")
    outer = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "100"], stdin=theirs, check=True, timeout=LIMIT)
    process = subprocess.Popen(
        [sys.executable, "-m", "asynccoll", "run", "-n", "1", path],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=outer | {"TERM": "xterm"} | setting,
    )
    os.close(theirs)
    seen = read_terminal(ours)
    assert process.wait(LIMIT) == 0
    assert seen == ("\x1b[36m[0]\x1b[0m 96\r\n" if coloured else "[0] 96\r\n")


def test_ctrl_z_stops_ranks_and_launcher_until_they_are_continued(script, start, leash, tmp_path):
    path = script(HOLD + "say(os.getpid())\nwait_for(f'go{rank}')")
    for rank in range(2):
        os.mkfifo(tmp_path / f"go{rank}")
    process = start("-n", "2", path)
    pids = [int(word) for word in leash.words(2)]
    process.send_signal(signal.SIGTSTP)
    for pid in (process.pid, *pids):
        wait_for_state(pid, "T")
    process.send_signal(signal.SIGCONT)
    for pid in pids:
        wait_for_state(pid, "S")
    for rank in range(2):
        (tmp_path / f"go{rank}").write_text("")
    assert process.wait(LIMIT) == 0


def test_an_ignored_ctrl_c_stays_ignored(script, start, leash):
    path = script(HOLD + "say('up')\nwait_for('go')")
    go = Path(path).with_name("go")
    os.mkfifo(go)
    ignoring = ("/bin/sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable)
    process = start("-n", "1", path, program=ignoring)
    leash.words(1)
    process.send_signal(signal.SIGINT)
    go.write_text("")
    assert process.communicate(timeout=LIMIT) == (b"", b"")
    assert process.returncode == 0


def test_exit_codes_are_seen_although_the_parent_ignores_sigchld(script, start):
    ignoring = (sys.executable, "-c", IGNORE_CHILDREN)
    process = start("-n", "1", script("sys.exit(3)"), program=ignoring)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 3


IGNORE_CHILDREN = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_ranks_do_not_outlive_a_launcher_that_was_killed(script, start, leash):
    text = GRANDCHILD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay('up')\nsignal.pause()"
    process = start("-n", "2", "--grace", "0.1", script(text))
    leash.words(2)
    process.kill()
    leash.wait()


def test_a_launcher_without_standard_descriptors_works(script, tmp_path):
    path = script(
        "print(chr(2)); tell(f'{rank}.done')"
    )  # 2 is SIGINT, should it go to the launcher's own pipe
    closed = subprocess.run(
        [
            "/bin/sh",
            "-c",
            'exec "$0" "$@" <&- >&- 2>&-',
            sys.executable,
            "-m",
            "asynccoll",
            "run",
            "-n",
            "2",
            path,
        ],
        timeout=LIMIT,
        check=False,
    )
    assert closed.returncode == 0
    assert {entry.name for entry in tmp_path.glob("*.done")} == {"0.done", "1.done"}
