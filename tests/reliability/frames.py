"""Damaged frames: whatever a peer sends, a rank goes on or gives that peer up, and nothing else happens.

Three forms. ``memory``: recorded streams, damaged frame by frame, straight into the engine below real communicators that run
the verbs. ``socket``: the same over TCP into a rank of a mesh that has formed. ``listener``: the same, and damaged handshakes,
at the door of a rank that is forming, from callers who have proved nothing.

What must hold: nothing but a `ProtocolError` for the peer and typed errors of the operations; every operation ends; nothing is
unpickled before the sender has proved the secret, and with ``safe=True`` nothing at all; memory stays within 16 MiB. Inputs that
reach new lines of the engine, or a new refusal, are kept and damaged further. ::

    python -m tests.reliability.frames --jobs 2                 # 10 million, 100,000, 20,000
    python -m tests.reliability.frames --memory 200000 --socket 0 --listener 0 --seed 7
    python -m tests.reliability.frames --replay FILE            # one input that failed, from the command's own message
"""

import argparse
import asyncio
import collections
import concurrent.futures
import contextlib
import gc
import json
import logging
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from asynccoll.communicator import Communicator, Options
from asynccoll.engine.engine import Engine
from asynccoll.errors import CollectiveError, ProtocolError
from asynccoll.net.accepting import Acceptor, Strangers, listen
from asynccoll.net.handshake import Hello, Purpose
from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import form_mesh
from asynccoll.sim.loop import SimLoop
from asynccoll.world import open_mesh

from .common import conclude, tell
from .mutations import SMALL, mutated
from .tapes import SIZE, Refusal, Tape, pickles_watched, record_all

ENGINE = str(Path(sys.modules[Engine.__module__].__file__).parent)
LONGEST = 160
"""Damaged frames for one victim at most."""
KEPT = 400
"""Inputs in the corpus; `KEPT_BYTES` of one at most, so that the harness itself needs little memory."""
KEPT_BYTES = 6_000
TRACED = 200
"""Every so manieth victim runs with a trace of its lines."""
PATIENCE = 60
"""Seconds for one victim: more is a hang."""
SECRET = b"what no stranger knows"


class Input(NamedTuple):
    """What one victim went through."""

    recording: int
    called: int
    """How many works are started before the first frame; the others after the last one."""
    frames: tuple
    """(peer, bytes), as they were fed."""


class Failed(Exception):
    """A bar was missed. The text says which."""


def looked_at(works):
    """``works``, so that none complains of an exception that nobody has asked for."""
    for work in works:
        if work.done() and not work.cancelled():
            work.exception()
    return works


def ended(work, label):
    """How an operation has ended; `Failed` if it has not, or with what the package's documentation does not name."""
    if not work.done():
        raise Failed(f"{label} never ended")
    if work.cancelled() or (error := work.exception()) is None:
        return "result"
    if isinstance(error, CollectiveError | ProtocolError | Refusal):
        return type(error).__name__
    # What this rank has got wrong itself in the scenario of troubles, and a value that is none with safe=True.
    if isinstance(error, TypeError | ValueError) and re.search(
        r"no plain value|cannot pickle|nonsense", str(error)
    ):
        return f"own {type(error).__name__}"
    raise Failed(f"{label} ended with {type(error).__name__}: {error}") from error


class Fuzz:
    """One shard: a seed, the recordings, the corpus, and what was counted."""

    def __init__(self, seed, recordings, watch):
        self.rng = random.Random(seed)
        self.recordings = recordings
        self.watch = watch
        self.pool = [frame for one in recordings for _, frame in one.frames if len(frame) <= SMALL]
        weights = [1 if any(len(frame) > SMALL * 10 for _, frame in one.frames) else 12 for one in recordings]
        self.choices = random.Random(0).choices(range(len(recordings)), weights, k=4096)
        self.corpus = []
        self.features = set()
        self.lines = set()
        self.counts = collections.Counter()
        self.outcomes = collections.Counter()

    def plan(self):
        """A recording, the frames to damage, and how many works to start first."""
        rng = self.rng
        if self.corpus and rng.random() < 0.4:
            base = self.corpus[int(rng.random() * len(self.corpus))]
            return base.recording, base.frames, base.called
        number = self.choices[int(rng.random() * 4096)]
        return number, self.recordings[number].frames, int(rng.random() * 12)

    def frames(self, base, gone):
        """(peer, bytes, damaged): first the base's, most of them damaged, then any that there are. ``gone``: peers given up."""
        rng, pool = self.rng, self.pool
        share = (0.2, 0.6, 1.0)[int(rng.random() * 3)]
        for peer, frame in base:
            if peer in gone:
                continue
            if len(frame) < 25 or rng.random() < share:
                yield peer, mutated(rng, frame, pool) if len(frame) > 24 else frame, True
            else:
                yield peer, frame, False
        peers = sorted({peer for peer, _ in base} or {1})
        while left := [peer for peer in peers if peer not in gone]:
            frame = pool[int(rng.random() * len(pool))]
            yield left[int(rng.random() * len(left))], mutated(rng, frame, pool), True

    def keep(self, fed, recording, called, features, lines):
        """Into the corpus with what has reached something new."""
        new = features - self.features
        fresh = lines - self.lines
        self.features |= new
        self.lines |= fresh
        if (new or fresh) and sum(len(frame) for _, frame in fed) <= KEPT_BYTES:
            one = Input(recording, called, tuple((peer, bytes(frame)) for peer, frame in fed))
            if len(self.corpus) < KEPT:
                self.corpus.append(one)
            else:
                self.corpus[int(self.rng.random() * KEPT)] = one


def template(error):
    """A message without its numbers and values."""
    return re.sub(r"0x[0-9a-f]+|\d+|b?'[^']*'|\[.*\]|: invalid.*", "#", str(error))[:80]


def started(recording, comm, called):
    """Start ``called`` works of the recording's program; give these, and the iterator with the rest."""
    program = iter(recording.program(comm))
    works = []
    for work in program:
        works.append(work)
        if len(works) > called:
            break
    return works, program


async def in_memory(fuzz, number, called, frames, gone, lines=None):
    """One victim. ``frames``: (peer, bytes, damaged); ``gone`` gets the peers that are given up.

    Returns what was fed, and the features that the victim has shown.
    """
    recording = fuzz.recordings[number]
    loop = asyncio.get_running_loop()
    engine = Engine(recording.rank, SIZE)
    tape = Tape(engine, loop)
    tape.dropped = gone
    comm = Communicator(tape, options=Options(None, safe=recording.safe))
    works, rest = started(recording, comm, called)
    before = fuzz.watch.calls
    features, fed, damaged = set(), [], 0
    if lines is not None:
        sys.settrace(tracer(lines))
    try:
        for peer, data, bad in frames:
            if peer not in tape.dropped:
                fed.append((peer, data))
                damaged += bad
                tape.feed(peer, data)
                if damaged >= LONGEST:
                    break
        works += rest
        fuzz.counts["pickles"] += fuzz.watch.calls - before
        if recording.safe and fuzz.watch.calls != before:
            raise Failed("something was unpickled with safe=True")
        fuzz.counts["given up"] += len(tape.dropped)
        for peer in set(range(SIZE)) - {recording.rank} - tape.dropped:
            tape.lose(peer, "the tape ends")
        for _ in range(4):
            await asyncio.sleep(5.0)
            if all(work.done() for work in works):
                break
        if recording.safe and fuzz.watch.calls != before:
            raise Failed("something was unpickled with safe=True")
        for at, work in enumerate(looked_at(works)):
            outcome = ended(work, f"work {at} of {recording.program.__name__}")
            features.add((number, at, outcome))
            fuzz.outcomes[outcome] += 1
        await comm.close()
    except BaseException as error:
        error.fed = Input(number, called, tuple((peer, bytes(data)) for peer, data in fed))
        raise
    finally:
        sys.settrace(None)
    fuzz.counts["frames"] += len(fed)
    fuzz.counts["damaged"] += damaged
    fuzz.counts["victims"] += 1
    return fed, features


def tracer(lines):
    """A trace function that adds the lines of the engine to ``lines``."""

    def local(frame, event, argument):
        if event == "line":
            lines.add((frame.f_code, frame.f_lineno))
        return local

    def trace(frame, event, argument):
        return local if frame.f_code.co_filename.startswith(ENGINE) else None

    return trace


class Refusals:
    """Notes why engines give peers up: each reason is a feature."""

    def __init__(self):
        self.seen = set()
        self._broken = Engine.broken

    def __enter__(self):
        refusals = self

        def broken(engine, peer, error):
            refusals.seen.add(template(error))
            return refusals._broken(engine, peer, error)

        Engine.broken = broken
        return self

    def __exit__(self, *error):
        Engine.broken = self._broken


def resident():
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """The growth of this process from after the warm-up to the largest seen."""

    def __init__(self):
        self.base = 0
        self.most = 0

    def look(self, warm):
        if not warm or not self.base:
            gc.collect()
            self.base = self.most = resident()
        else:
            self.most = max(self.most, resident())

    @property
    def growth(self):
        return round((self.most - self.base) / (1 << 20), 1)


def quiet():
    """Losses are what this is about: each would be a line in the log."""
    logging.getLogger("asynccoll").setLevel(logging.CRITICAL)


def save(one):
    """An input that failed, in a file; the command that runs it again."""
    handle, name = tempfile.mkstemp(".json", "asynccoll-frames-")
    with os.fdopen(handle, "w") as out:
        json.dump([one.recording, one.called, [(peer, frame.hex()) for peer, frame in one.frames]], out)
    return f"python -m tests.reliability.frames --replay {name}"


def load(name):
    number, called, frames = json.loads(Path(name).read_text())
    return Input(number, called, tuple((peer, bytes.fromhex(text)) for peer, text in frames))


@contextlib.contextmanager
def watchdog():
    """A function to call before each victim: one that runs longer than `PATIENCE` ends with `Failed`."""

    def overdue(number, frame):
        raise Failed(f"still running after {PATIENCE} s")

    previous = signal.signal(signal.SIGALRM, overdue)
    try:
        yield lambda: signal.alarm(PATIENCE)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def run_memory(count, seed, seconds=math.inf):
    """One shard of ``memory``, for ``seconds`` at most. A dict of figures, and what failed."""
    failures, memory = [], Memory()

    async def main():
        loop = asyncio.get_running_loop()
        stray = []
        loop.set_exception_handler(lambda _, context: stray.append(str(context)))
        with pickles_watched() as watch, Refusals() as refusals:
            fuzz = Fuzz(seed, await record_all(), watch)
            watch.sealed = True
            warm, began = min(max(count // 20, 5_000), 50_000), time.process_time()
            until = time.monotonic() + seconds
            while fuzz.counts["damaged"] < count and len(failures) < 10 and time.monotonic() < until:
                feed_dog()
                number, base, called = fuzz.plan()
                traced = set() if fuzz.counts["victims"] % TRACED == 0 else None
                try:
                    gone = set()
                    fed, features = await in_memory(
                        fuzz, number, called, fuzz.frames(base, gone), gone, traced
                    )
                    if stray:
                        raise Failed(f"the loop was told of {stray[0]}")
                except Exception as error:  # noqa: BLE001 (counted, told, and the exit code says so)
                    one = getattr(error, "fed", None)
                    failures.append(
                        f"{type(error).__name__}: {error}; {save(one) if one else f'--seed {seed}'}"
                    )
                    stray.clear()
                    fuzz.counts["damaged"] += 1
                    continue
                fuzz.keep(fed, number, called, features | refusals.seen, traced or set())
                if fuzz.counts["victims"] % 500 == 0:
                    memory.look(fuzz.counts["damaged"] > warm)
                    if fuzz.counts["victims"] % 5_000 == 0:
                        tell(
                            f"{seed}: {fuzz.counts['damaged']} frames, {len(fuzz.lines)} lines, +{memory.growth} MiB"
                        )
            busy = time.process_time() - began
            return {
                **fuzz.counts,
                "outcomes": dict(fuzz.outcomes),
                "corpus": len(fuzz.corpus),
                "refusals": sorted(refusals.seen),
                "lines": sorted(f"{Path(code.co_filename).name}:{line}" for code, line in fuzz.lines),
                "cpu_seconds": busy,
                "memory_mib": memory.growth,
            }

    with watchdog() as feed_dog, asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main()), failures


async def over_tcp(fuzz, number, called, frames, gone):
    """One victim that has really met its peers, all but itself played by this function."""
    recording = fuzz.recordings[number]
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0), backlog=32) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        places = [
            Placement(rank=rank, size=SIZE, host="127.0.0.1", port=port, rendezvous_fd=None if rank else fd)
            for rank in range(SIZE)
        ]
        agreed = {"ASYNCCOLL_ALGORITHM": "auto", "safe": str(recording.safe), "liveness_timeout": None}
        met = await asyncio.gather(
            *(
                open_mesh(place, SECRET, timeout=None, init_timeout=20.0, safe=recording.safe)
                if place.rank == recording.rank
                else form_mesh(place, SECRET, init_timeout=20.0, must_agree=agreed)
                for place in places
            )
        )
    comm = met.pop(recording.rank)
    links = {mesh.rank: mesh.sockets[recording.rank] for mesh in met}
    works, rest = started(recording, comm, called)
    fed, damaged = [], 0
    try:
        for peer, data, bad in frames:
            sock = links.get(peer)
            if sock is None:
                continue
            try:
                await loop.sock_sendall(sock, data)
                damaged += bad
                fed.append((peer, data))
                for _ in range(2):  # the victim reads it, and gives the peer up or not
                    await asyncio.sleep(0)
                while sock.recv(1 << 18):  # what the victim says
                    pass
                raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:  # given up
                gone.add(peer)
                del links[peer]
                sock.close()
                fuzz.counts["given up"] += 1
            if damaged >= LONGEST:
                break
        works += rest
        for sock in links.values():
            sock.shutdown(socket.SHUT_WR)
        await asyncio.wait(works, timeout=PATIENCE / 2)
        for at, work in enumerate(looked_at(works)):
            fuzz.outcomes[ended(work, f"work {at} of {recording.program.__name__}")] += 1
    except BaseException as error:
        error.fed = Input(number, called, tuple((peer, bytes(data)) for peer, data in fed))
        raise
    finally:
        for mesh in met:
            mesh.close()
        await comm.close()
    fuzz.counts["damaged"] += damaged
    fuzz.counts["victims"] += 1


def run_socket(count, seed):
    """``socket``. A dict of figures, and what failed."""
    failures, memory = [], Memory()

    async def main(fuzz):
        loop = asyncio.get_running_loop()
        stray = []
        loop.set_exception_handler(lambda _, context: stray.append(str(context)))
        before = fuzz.watch.calls
        while fuzz.counts["damaged"] < count and len(failures) < 10:
            feed_dog()
            number, base, called = fuzz.plan()
            if not base:
                continue
            try:
                gone = set()
                await over_tcp(fuzz, number, called, fuzz.frames(base, gone), gone)
                if stray:
                    raise Failed(f"the loop was told of {stray[0]}")
            except Exception as error:  # noqa: BLE001 (counted, told, and the exit code says so)
                fed = getattr(error, "fed", None)
                failures.append(f"socket: {type(error).__name__}: {error}; {save(fed) if fed else ''}")
                stray.clear()
                continue
            if fuzz.counts["victims"] % 20 == 0:
                memory.look(fuzz.counts["damaged"] > max(count // 10, 2000))
                if fuzz.counts["victims"] % 200 == 0:
                    tell(f"socket: {fuzz.counts['damaged']} frames, +{memory.growth} MiB")
        return {
            **fuzz.counts,
            "pickles": fuzz.watch.calls - before,
            "outcomes": dict(fuzz.outcomes),
            "memory_mib": memory.growth,
        }

    with watchdog() as feed_dog, pickles_watched() as watch:
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            fuzz = Fuzz(seed, runner.run(record_all()), watch)
        watch.sealed = True
        began = time.monotonic()
        figures = asyncio.run(main(fuzz))
    return {**figures, "seconds": round(time.monotonic() - began, 1)}, failures


def run_listener(count, seed):
    """``listener``: streams of damaged handshakes and of damaged frames at a door. A dict of figures, and what failed."""
    failures, memory, admitted = [], Memory(), []

    async def main(fuzz):
        loop = asyncio.get_running_loop()
        rng, sent = fuzz.rng, 0
        hello = Hello(Purpose.RENDEZVOUS, 1, 0, 2, 0).encode(bytes(32))
        before = fuzz.watch.calls
        with listen((socket.AF_INET, ("127.0.0.1", 0)), 2, reuse=False) as listener:
            acceptor = Acceptor(
                listener, SECRET, 2, admitted.append, lambda *who: admitted.append(who), Strangers("rank 0"),
                on_error=lambda error: failures.append(f"listener: {type(error).__name__}: {error}"),
            )  # fmt: skip
            acceptor.start()
            while sent < count and not failures:
                feed_dog()
                said = [mutated(rng, hello, fuzz.pool) if rng.random() < 0.7 else hello]
                for _, data, _ in fuzz.frames((), ()):
                    said.append(data)
                    if len(said) > 4:
                        break
                if rng.random() < 0.3:
                    said.pop(0)
                with socket.socket() as sock:
                    sock.setblocking(False)
                    try:
                        await loop.sock_connect(sock, listener.getsockname())
                        for data in said:
                            await loop.sock_sendall(sock, data)
                            sent += 1
                            if rng.random() < 0.5:
                                await asyncio.sleep(0)
                        sock.shutdown(socket.SHUT_WR)
                        while await loop.sock_recv(sock, 1 << 16):
                            pass
                    except OSError:  # shown out while still talking
                        sent += len(said) - said.index(data) - 1 if data in said else 0
                fuzz.counts["victims"] += 1
                if fuzz.counts["victims"] % 100 == 0:
                    memory.look(sent > count // 10)
            await acceptor.stop()
        if admitted:
            failures.append(f"listener: admitted {admitted[:3]}")
        if fuzz.watch.calls != before:
            failures.append("listener: something was unpickled before its sender had proved the secret")
        return {
            "damaged": sent,
            "callers": fuzz.counts["victims"],
            "admitted": len(admitted),
            "pickles": fuzz.watch.calls - before,
            "memory_mib": memory.growth,
        }

    with watchdog() as feed_dog, pickles_watched() as watch:
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            fuzz = Fuzz(seed, runner.run(record_all()), watch)
        watch.sealed = True
        return asyncio.run(main(fuzz)), failures


def merged(parts):
    """The figures of all shards."""
    total = collections.Counter()
    outcomes, refusals, lines = collections.Counter(), set(), set()
    for part in parts:
        total.update(
            {name: part.get(name, 0) for name in ("damaged", "frames", "victims", "given up", "pickles")}
        )
        outcomes.update(part["outcomes"])
        refusals.update(part["refusals"])
        lines.update(part["lines"])
    seconds = sum(part["cpu_seconds"] for part in parts)
    return {
        **total,
        "frames_per_cpu_second": round(total["damaged"] / seconds) if seconds else 0,
        "outcomes": dict(outcomes.most_common()),
        "refusals": len(refusals),
        "engine_lines": len(lines),
        "corpus": sum(part["corpus"] for part in parts),
        "memory_mib": max(part["memory_mib"] for part in parts),
    }


def replay(name):
    """Run one saved input again, in memory."""

    async def main():
        with pickles_watched() as watch:
            fuzz = Fuzz(0, await record_all(), watch)
            watch.sealed = True
            one = load(name)
            for peer, frame in one.frames:
                tell(f"from rank {peer}: {len(frame)} bytes {frame[:64].hex()}")
            await in_memory(fuzz, one.recording, one.called, ((*pair, True) for pair in one.frames), set())

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--memory", type=int, default=10_000_000, help="damaged frames into engines in memory"
    )
    parser.add_argument("--socket", type=int, default=100_000, help="damaged frames over TCP to a real rank")
    parser.add_argument("--listener", type=int, default=20_000, help="damaged messages at a listener")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes for the first form")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end the first form then, with what was done"
    )
    parser.add_argument("--replay", metavar="FILE", help="run one input that failed")
    options = parser.parse_args(arguments)
    quiet()
    if options.replay:
        replay(options.replay)
        return 0
    figures, failures = {"seed": options.seed}, []
    if options.memory:
        share = -(-options.memory // options.jobs)
        seeds = [options.seed * 1000 + job for job in range(options.jobs)]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.jobs, context, quiet) as pool:
            limits = [options.minutes * 60] * options.jobs
            parts = list(pool.map(run_memory, [share] * options.jobs, seeds, limits))
        figures["memory"] = merged([part for part, _ in parts])
        failures += [failure for _, part in parts for failure in part]
    for form, run in (("socket", run_socket), ("listener", run_listener)):
        if count := getattr(options, form):
            figures[form], failed = run(count, options.seed)
            failures += failed
    for form in ("memory", "socket", "listener"):
        if form in figures and figures[form]["memory_mib"] >= 16:
            failures.append(
                f"{form}: memory grew by {figures[form]['memory_mib']} MiB; --seed {options.seed}"
            )
    return conclude(failures, **figures)


if __name__ == "__main__":
    sys.exit(main())
