"""A thousand strangers a second: while the ranks of a mesh meet, and while they run collectives.

Real processes. Two ranks of three are forming while strangers call every port that they listen on: silence, connect and close,
an HTTP request, a TLS ClientHello, a MiB of noise, a header with a length of 2^63 bytes. Then the third rank comes, and must get
in. Once the mesh is up its listeners are closed: the strangers go on to call all ports of the ranks and are refused by the kernel;
small allreduces run meanwhile, in windows with and without strangers, interleaved. At last ranks join a mesh whose rank 0 holds
as many half-open handshakes as it does when a thousand call, and the same without them: until the mesh is up, in less than twice
the time. ::

    python -m tests.reliability.strangers
    python -m tests.reliability.strangers --rate 200 --forming 2 --windows 2 --half-open 200
"""

import argparse
import asyncio
import collections
import contextlib
import errno
import json
import logging
import os
import selectors
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

import asynccoll
from asynccoll.net.joiner import Joiner
from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import form_mesh

from .common import LOOPS, conclude, tell

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.reliability.strangers"
SIZE = 3
SECRET = "strangers do not know this"
LIMIT = 120.0
"""Seconds that any process of a run may take."""
SAYINGS = {
    "silence": None,
    "connect and close": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(192),
    "noise": b"\xa5" * (1 << 20),
    "huge length": struct.pack("<BBHIQIQ", 1, 0, 0, 0, 0, 0, 1 << 63),
}
"""What a stranger says; None: nothing, and he stays."""


def resident(pid):
    """Bytes of memory that a process has."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sockets_of(pid):
    """The kernel's numbers of a process's sockets."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/{pid}/fd/{fd}")
            if name.startswith("socket:["):
                found.add(name[8:-1])
    return found


def ports_of(pids, *, listening):
    """Local TCP ports of these processes; ``listening``: only those that take calls."""
    mine = set().union(*map(sockets_of, pids))
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as lines:
            for columns in map(str.split, list(lines)[1:]):
                if columns[9] in mine and (columns[3] == "0A" or not listening):
                    found.add(int(columns[1].rpartition(":")[2], 16))
    return found


# -- strangers ---------------------------------------------------------------------------------------------------


class Crowd:
    """Calls ports in turn, at a rate, without waiting for any."""

    def __init__(self, ports, rate):
        self.ports, self.rate = sorted(ports), rate
        self.selector = selectors.DefaultSelector()
        self.outcomes = collections.Counter()
        self.silent = collections.deque()
        self.calls = 0

    def run(self, seconds, stop=lambda: False):
        """Call for so long. Once: what it takes is given back at the end."""
        began = time.monotonic()
        sayings = list(SAYINGS.items())
        while (elapsed := time.monotonic() - began) < seconds and not stop():
            for _ in range(min(50, int(elapsed * self.rate) - self.calls + 1)):
                self._call(
                    self.ports[self.calls % len(self.ports)], *sayings[self.calls // len(self.ports) % 6]
                )
                self.calls += 1
            self._serve(0.002)
        end = time.monotonic() + 1.0
        while len(self.selector.get_map()) and time.monotonic() < end:
            self._serve(0.05)
        for key in list(self.selector.get_map().values()):
            self._end(key.fileobj, "left unanswered")
        for sock in self.silent:
            sock.close()
        self.selector.close()
        return time.monotonic() - began

    def _call(self, port, kind, said):
        sock = socket.socket()
        sock.setblocking(False)
        code = sock.connect_ex(("127.0.0.1", port))
        if code not in (0, errno.EINPROGRESS):
            self._end(sock, errno.errorcode.get(code, str(code)), registered=False)
            return
        self.selector.register(sock, selectors.EVENT_WRITE, (said, kind))

    def _serve(self, timeout):
        for key, _ in self.selector.select(timeout):
            sock, (said, kind) = key.fileobj, key.data
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._end(sock, errno.errorcode.get(code, str(code)))
            elif said is None:
                self.selector.unregister(sock)
                self.outcomes["connected"] += 1
                self.silent.append(sock)
                if len(self.silent) > 500:
                    self.silent.popleft().close()
            elif not said:
                self._end(sock, "connected")
            else:
                try:
                    said = memoryview(said)[sock.send(said) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self._end(sock, "connected")  # and shown out
                    continue
                if said:
                    self.selector.modify(sock, selectors.EVENT_WRITE, (said, kind))
                else:
                    self._end(sock, "connected")

    def _end(self, sock, outcome, registered=True):
        self.outcomes[outcome] += 1
        if registered:
            self.selector.unregister(sock)
        sock.close()


def environment():
    """The environment of a child that runs this module by its name from the root of the repository."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}


def stranger_process(ports, rate, seconds):
    """A crowd in a process of its own; its last line says what became of it."""
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, "--crowd", json.dumps([sorted(ports), rate, seconds])],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment(),
        text=True,
    )


def crowd(specification):
    """The body of that process."""
    ports, rate, seconds = json.loads(specification)
    one = Crowd(ports, rate)
    took = one.run(seconds)
    print(json.dumps({"calls": one.calls, "seconds": took, "outcomes": one.outcomes}), flush=True)
    return 0


# -- ranks -------------------------------------------------------------------------------------------------------


async def rank_main():
    """A rank: small allreduces until rank 0 gets SIGUSR1. Rank 0 prints when each began and how long it took."""
    enough = []
    signal.signal(signal.SIGUSR1, lambda *_: enough.append(True))
    async with asynccoll.init(init_timeout=LIMIT) as comm:
        print(json.dumps({"formed": time.monotonic()}), flush=True)
        times, value = [], np.zeros(8)
        while True:
            value[0] = bool(enough)
            began = time.monotonic()
            total = await comm.allreduce(value, "max")
            times.append((began, time.monotonic() - began))
            if total[0]:
                break
        print(json.dumps({"times": times if comm.rank == 0 else len(times)}), flush=True)


class Rank:
    """One rank's process."""

    def __init__(self, rank, port, loop):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (`end` closes it)
        env = {name: value for name, value in environment().items() if not name.startswith("ASYNCCOLL_")}
        env |= {
            "ASYNCCOLL_RANK": str(rank),
            "ASYNCCOLL_WORLD_SIZE": str(SIZE),
            "ASYNCCOLL_MASTER_ADDR": "127.0.0.1",
            "ASYNCCOLL_MASTER_PORT": str(port),
            "ASYNCCOLL_SECRET": SECRET,
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "--rank", "--loop", loop],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.pid = self.process.pid

    def line(self):
        """The next thing that it says."""
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"a rank ended: {self.errors()[-2000:]}")
        return json.loads(text)

    def errors(self):
        self.log.seek(0)
        return self.log.read()

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def listening(ranks, count):
    """Wait until these ranks listen on so many ports; the ports."""
    deadline = time.monotonic() + LIMIT
    while len(found := ports_of([rank.pid for rank in ranks], listening=True)) < count:
        for rank in ranks:
            if time.monotonic() > deadline or rank.process.poll() is not None:
                raise RuntimeError(f"the ranks do not come to listen: {rank.errors()[-2000:]}")
        time.sleep(0.05)  # a poll
    return found


def run_ranks(options, failures):
    """Forming and collectives. The figures."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        ranks = []

        def start(rank):
            ranks.append(Rank(rank, port, options.loop))
            stack.callback(ranks[-1].end)

        start(0)
        start(1)
        doors = listening(ranks, 2)
        before = [resident(rank.pid) for rank in ranks]
        outside = stranger_process(doors, options.rate, options.forming + 3)
        stack.callback(outside.wait)
        stack.callback(outside.kill)
        time.sleep(
            options.forming
        )  # how long the strangers have it to themselves: the length of the experiment
        after = [resident(rank.pid) for rank in ranks]
        began = time.monotonic()
        start(2)
        formed = [rank.line()["formed"] for rank in ranks]
        joining = max(formed) - began
        met = json.loads(outside.communicate(timeout=LIMIT)[0])
        tell(f"the mesh has formed among {met['calls']} strangers")

        pids = [rank.pid for rank in ranks]
        still = ports_of(pids, listening=True)
        if still:
            failures.append(f"the ranks still listen on {sorted(still)}")
        ports = ports_of(pids, listening=False) | doors
        noisy, calls, outcomes = [], 0, collections.Counter()
        for _ in range(options.windows):
            time.sleep(options.window)  # a quiet window
            crowd_of_window = stranger_process(ports, options.rate, options.window)
            begun = time.monotonic()
            told = json.loads(crowd_of_window.communicate(timeout=LIMIT)[0])
            # Its interpreter takes a moment to start; only the calls' own time counts as noisy.
            noisy.append((time.monotonic() - told["seconds"], time.monotonic(), begun))
            calls += told["calls"]
            outcomes.update(told["outcomes"])
        grown = [resident(rank.pid) for rank in ranks]
        os.kill(ranks[0].pid, signal.SIGUSR1)
        times = ranks[0].line()["times"]
        for rank in ranks:
            if rank.process.wait(LIMIT) != 0:
                failures.append(f"a rank ended with {rank.process.returncode}: {rank.errors()[-500:]}")
        lines = [rank.errors() for rank in ranks]
    split = {"quiet": [], "noisy": []}
    for began, took in times:
        if any(start <= began <= end for start, end, _ in noisy):
            split["noisy"].append(took)
        elif not any(begun <= began <= end for _, end, begun in noisy):
            split["quiet"].append(took)
    medians = {name: statistics.median(found) for name, found in split.items()}
    refused = outcomes.pop("ECONNREFUSED", 0)
    if outcomes:
        failures.append(f"a stranger was not refused once the mesh was up: {dict(outcomes)}")
    told = sum(text.count("dropped a connection") for text in lines)
    # One line in ten seconds from each of the two ranks that take calls.
    allowed = 2 * (2 + int((options.forming + joining + 3) / 10))
    if not 1 <= told <= allowed:
        failures.append(f"{told} lines about strangers, not 1 to {allowed}")
    growth = max(more - less for more, less in zip(after, before, strict=True)) / (1 << 20)
    later = max(more - less for more, less in zip(grown, before, strict=False)) / (1 << 20)
    if growth >= 16:
        failures.append(f"memory grew by {growth:.1f} MiB")
    return {
        "forming": {
            "strangers": met["calls"],
            "a_second": round(met["calls"] / met["seconds"]),
            "outcomes": met["outcomes"],
            "memory_mib": round(growth, 1),
            "memory_mib_up": round(later, 1),
            "log_lines": told,
            "last_rank_joined_in": round(joining, 3),
        },
        "collectives": {
            "strangers": calls,
            "refused": refused,
            "ports": len(ports),
            "operations": len(times),
            "median_us_quiet": round(medians["quiet"] * 1e6),
            "median_us_noisy": round(medians["noisy"] * 1e6),
            "ratio": round(medians["noisy"] / medians["quiet"], 3),
        },
    }


# -- half-open handshakes ----------------------------------------------------------------------------------------


async def join_time(half_open):
    """Seconds in which ranks 1 and 2 join a rank 0 that holds so many silent callers, and those until the mesh is up.

    In between rank 0 lets the silent callers go, of whom it holds 128 and one for each rank at most.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        port = listener.getsockname()[1]

        def form(rank):
            fd = None if rank else listener.fileno()
            place = Placement(rank=rank, size=SIZE, host="127.0.0.1", port=port, rendezvous_fd=fd)
            return form_mesh(place, SECRET.encode(), init_timeout=LIMIT)

        welcomed, real = [], Joiner._welcomed

        def welcoming(joiner, *what):
            welcomed.append(time.perf_counter())
            real(joiner, *what)

        zero = asyncio.ensure_future(form(0))
        silent = []
        for _ in range(half_open):
            sock = socket.create_connection(("127.0.0.1", port))
            silent.append(sock)
            await asyncio.sleep(0)
        for _ in range(200):  # turns in which rank 0 takes the last of them, and lets the oldest go
            await asyncio.sleep(0)
        began = time.perf_counter()
        with mock.patch.object(Joiner, "_welcomed", welcoming):
            links = await asyncio.gather(zero, form(1), form(2))
        up = time.perf_counter()
        for mesh in links:
            mesh.close()
        for sock in silent:
            sock.close()
    return max(welcomed) - began, up - began


async def half_open(count, rounds):
    """Medians of joins with and without them, interleaved, in milliseconds."""
    times = {0: [], count: []}
    await join_time(0)
    for _ in range(rounds):
        for number in times:
            times[number].append(await join_time(number))
    (quiet, quiet_up), (crowded, crowded_up) = (
        [statistics.median(column) * 1e3 for column in zip(*found, strict=True)] for found in times.values()
    )
    return {
        "held": count,
        "welcome_ms_quiet": round(quiet, 1),
        "welcome_ms_crowded": round(crowded, 1),
        "welcome_ratio": round(crowded / quiet, 2),
        "up_ms_quiet": round(quiet_up, 1),
        "up_ms_crowded": round(crowded_up, 1),
        "ratio": round(crowded_up / quiet_up, 2),
    }


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=int, default=1000, help="strangers a second")
    parser.add_argument("--forming", type=float, default=5.0, help="seconds before the last rank comes")
    parser.add_argument("--windows", type=int, default=5, help="pairs of a quiet and a noisy window")
    parser.add_argument("--window", type=float, default=1.5, help="seconds of one")
    parser.add_argument("--half-open", type=int, default=1000, help="silent callers during a join")
    parser.add_argument("--rounds", type=int, default=7, help="joins with and without them")
    parser.add_argument("--loop", choices=LOOPS, default="asyncio", help="event loop of the ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--crowd", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.crowd is not None:
        return crowd(options.crowd)
    if options.rank:
        signal.alarm(int(LIMIT))
        with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
            runner.run(rank_main())
        return 0
    logging.getLogger("asynccoll").setLevel(logging.ERROR)  # the ranks' processes have logs of their own
    failures, figures = [], {}
    if options.windows:
        figures = run_ranks(options, failures)
    if options.half_open:
        with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
            figures["half_open"] = runner.run(half_open(options.half_open, options.rounds))
    for name in ("collectives", "half_open"):
        bar = {"collectives": 1.5, "half_open": 2.0}[name]
        if name in figures and figures[name]["ratio"] >= bar:
            failures.append(f"{name}: ratio {figures[name]['ratio']}, not below {bar}")
    return conclude(failures, loop=options.loop, rate=options.rate, **figures)


if __name__ == "__main__":
    sys.exit(main())
