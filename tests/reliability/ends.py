"""Ends of every kind, in real interpreters under ``-X dev -W error``: at once, with the right exit code, and in silence.

::

    python -m tests.reliability.ends                     # 300 runs
    python -m tests.reliability.ends --case 17           # one of them

A case is two ranks. Rank 1 comes to its end in one of `ENDS`, with operations under way or without, by one of the three ways to
call the library and on either loop. Rank 0 does the same, or waits for rank 1 and must hear of its end. Some cases are started by
``asynccoll run``. Nothing but the user's own traceback may be printed, and that only where an exception is the end; a rank that
lives on may log that it has lost the other, in one line. ``os._exit`` and signals that kill at once leave no process to look at.
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))  # where `scripts` is

from scripts import PROLOGUE, run_ranks

from .common import conclude, tell

WITHIN = 2.0
"""Seconds from what causes the end to the end of the process."""
STRICT = ("-X", "dev", "-W", "error")
LOOPS = ("asyncio", "uvloop")


class End(NamedTuple):
    """One way to come to an end."""

    statement: str
    """What the program does, in the words of `DIALECTS`."""
    code: int = 0
    """Exit code, or minus the number of a signal."""
    last: str | None = None
    """Last line of the user's own traceback, where there is one."""
    block: bool = False
    """The communicator was opened by ``with``."""
    facades: tuple[str, ...] = ("async", "sync", "collective")
    idle: bool = False
    """Only without operations under way, which it would wait for."""


ENDS = {
    "return": End("return"),
    "error": End("raise LookupError('no shard 7')", 1, "LookupError: no shard 7"),
    "sys.exit": End("sys.exit(3)", 3),
    "sys.exit in a callback": End("EXIT_IN_CALLBACK\nFOREVER", 3, facades=("async",)),
    "sys.exit in a callback of a thread": End("EXIT_IN_CALLBACK\nBARRIER_OF_ONE\nreturn", facades=("sync",)),
    "SIGINT": End("soon(signal.SIGINT)\nFOREVER", -signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": End("soon(signal.SIGTERM)\nFOREVER", -signal.SIGTERM),
    "SIGTERM, handled": End(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nsoon(signal.SIGTERM)\nFOREVER", 7
    ),
    "SIGTERM, which cancels": End(
        "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)\n"
        "soon(signal.SIGTERM)\n"
        "with contextlib.suppress(asyncio.CancelledError):\n    FOREVER",
        facades=("async",),
    ),
    "close": End("CLOSE", facades=("async", "sync")),
    "close twice": End("CLOSE\nCLOSE_AGAIN\nreturn", idle=True),
    "return from the block": End("return", block=True, facades=("async", "sync")),
    "error in the block": End(
        "raise LookupError('no shard 7')", 1, "LookupError: no shard 7", block=True, facades=("async", "sync")
    ),
    "sys.exit in the block": End("sys.exit(3)", 3, block=True, facades=("async", "sync")),
    "SIGINT in the block": End(
        "soon(signal.SIGINT)\nFOREVER",
        -signal.SIGINT,
        "KeyboardInterrupt",
        block=True,
        facades=("async", "sync"),
    ),
    "SIGTERM in the block, handled": End(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nsoon(signal.SIGTERM)\nFOREVER",
        7,
        block=True,
        facades=("async", "sync"),
    ),
}

HEAD = """
import logging, threading

TOGETHER, PENDING, TASK, DELAY, LOOP = {together}, {pending}, {task}, {delay}, {loop!r}
logging.getLogger("asyncio").setLevel(logging.ERROR)  # warnings tell how busy the machine is
if LOOP == "asyncio":
    sys.modules["uvloop"] = None  # as where it is not installed
kept = []

def soon(number):
    threading.Timer(DELAY, os.kill, (os.getpid(), number)).start()

def heard(error):
    say(error=type(error).__name__, rank=getattr(error, "peer", getattr(error, "origin", None)))
"""
DIALECTS = {
    "async": {
        "program": """
async def body(comm):
    await comm.allreduce(1)
    if comm.rank == 0 and not TOGETHER:
        try:
            await comm.barrier()
        except asynccoll.CollectiveError as error:
            heard(error)
        await comm.close()
        return
    if PENDING:
        kept.extend([comm.recv(tag=99), comm.allreduce(np.ones(300_000), key=str(comm.rank)), comm.send(bytes(1 << 20), 0, 98)])
        if TASK:
            kept.append(asyncio.create_task(comm.recv(tag=97).wait()))
            await asyncio.sleep(0)
    say(cause=True)
    END

async def main():
    OPEN

start(main())
""",
        "open": "comm = await asynccoll.init()\nawait body(comm)",
        "block": "async with asynccoll.init() as comm:\n    await body(comm)",
        "FOREVER": "await (asyncio.sleep(60) if TOGETHER else comm.recv(tag=96))",
        "EXIT_IN_CALLBACK": "comm.send(1, comm.rank).add_done_callback(lambda _: sys.exit(3))",
        "CLOSE_AGAIN": "await comm.close()\nawait asynccoll.shutdown()",
        "CLOSE": "await comm.close()",
    },
    "sync": {
        "program": """
import asynccoll.sync as ac

def body(comm):
    comm.allreduce(1)
    if comm.rank == 0 and not TOGETHER:
        try:
            comm.barrier()
        except asynccoll.CollectiveError as error:
            heard(error)
        comm.close()
        return
    if PENDING:
        kept.extend([comm.recv_async(tag=99), comm.allreduce_async(np.ones(300_000), key=str(comm.rank))])
        kept.append(comm.send_async(bytes(1 << 20), 0, 98))
    say(cause=True)
    END

def main():
    OPEN

main()
""",
        "open": "comm = ac.init()\nbody(comm)",
        "block": "with ac.init() as comm:\n    body(comm)",
        "FOREVER": "time.sleep(60) if TOGETHER else comm.recv(tag=96)",
        "EXIT_IN_CALLBACK": (
            "comm.recv_async(comm.rank, 50).add_done_callback(lambda _: sys.exit(3))\ncomm.send(1, comm.rank, 50)"
        ),
        "BARRIER_OF_ONE": "comm.new_group([comm.rank]).barrier()",
        "CLOSE_AGAIN": "comm.close()\nac.shutdown()\nac.shutdown()",
        "CLOSE": "comm.close()",
    },
    "collective": {
        "program": """
from asynccoll import collective

def body():
    collective.allreduce(1)
    if RANK == 0 and not TOGETHER:
        time.sleep(1.0)  # operations are matched by their order alone: what rank 1 has begun is under way until this one calls
        while True:
            try:
                collective.allreduce(1)
            except asynccoll.CollectiveCancelled:
                pass  # by Ctrl-C, on the way
            except asynccoll.CollectiveError as error:
                return heard(error)
    if PENDING:
        kept.extend([collective.allreduce_async(1), collective.allreduce_async(bytes(1 << 20))])
    say(cause=True)
    END

def main():
    collective.initialize()
    OPEN

main()
""",
        "open": "body()",
        "FOREVER": "time.sleep(60) if TOGETHER else collective.allreduce(1)",
        "CLOSE_AGAIN": "with contextlib.suppress(asynccoll.NotInitialized):\n    collective.teardown()",
        "CLOSE": "collective.teardown()",
    },
}
"""What the words of an `End` mean, by the way in which the library is called."""


class Case(NamedTuple):
    """One run of two ranks."""

    end: str
    facade: str
    loop: str
    pending: bool
    together: bool
    launched: bool

    def __str__(self):
        words = [self.end, self.facade, self.loop]
        words += [word for word in ("pending", "together", "launched") if getattr(self, word)]
        return ", ".join(words)


def every():
    """All cases that make sense."""
    for name, facade, loop, pending, together, launched in itertools.product(
        ENDS, DIALECTS, LOOPS, (False, True), (False, True), (False, True)
    ):
        end = ENDS[name]
        alone = facade == "collective" and "CLOSE" in end.statement and not together  # which none can do
        if facade in end.facades and not (pending and end.idle) and not alone:
            yield Case(name, facade, loop, pending, together, launched)


def draw(count, seed=0):
    """``count`` cases: each end by each facade on each loop first, then others."""
    cases = list(every())
    random.Random(seed).shuffle(cases)
    seen, first, others = set(), [], []
    for case in cases:
        kind = case.end, case.facade, case.loop
        (others if kind in seen else first).append(case)
        seen.add(kind)
    drawn = list(itertools.islice(itertools.cycle([*first, *others]), count))
    return drawn


def program(case, delay):
    """The script of both ranks, to be run after `scripts.PROLOGUE`."""
    end, words = ENDS[case.end], DIALECTS[case.facade]

    def put(text, word, into):
        """``text`` for ``word``, indented as that is."""
        indent = re.search(rf"( *){word}", into)
        return (
            into
            if indent is None
            else put(text, word, into.replace(indent[0], _indented(text, indent[1]), 1))
        )

    statement = end.statement
    for word in ("CLOSE_AGAIN", "CLOSE", "FOREVER", "EXIT_IN_CALLBACK", "BARRIER_OF_ONE"):
        statement = put(words.get(word, ""), word, statement)
    text = put(statement, "END\\b", put(words["block" if end.block else "open"], "OPEN\\b", words["program"]))
    # A task whose operation fails before the end is the user's, who would have to look at it.
    task = not (case.together or end.block or "CLOSE" in end.statement)
    head = HEAD.format(together=case.together, pending=case.pending, task=task, delay=delay, loop=case.loop)
    return head + text


def _indented(text, by):
    return "\n".join(by + line for line in text.split("\n"))


# -- what must hold --------------------------------------------------------------------------------------------

NOISE = re.compile(
    "exception ignored|never retrieved|was destroyed|never awaited|warning|unclosed|atexit|fatal python|coredump|invalid state"
    "|exception in (thread|callback)",
    re.IGNORECASE,
)
LOSS = re.compile(r"rank \d: .*(lost rank|left the communicator)")
"""The line that a rank logs of a loss that fails what it has under way."""


def judge(case, code, errors, took, rank=1):
    """What is wrong with the end of one process."""
    end = ENDS[case.end]
    expected, last = (0, None) if rank == 0 and not case.together else (end.code, end.last)
    lines = [line for line in errors.splitlines() if not LOSS.match(line)]
    if code != expected:
        yield f"rank {rank} ended with {code} instead of {expected}: {errors[-2000:]!r}"
    if took > WITHIN:
        yield f"rank {rank} took {took:.1f} s"
    if last is None and lines:
        yield f"rank {rank} printed {errors[-2000:]!r}"
    if last is not None and (not lines or lines[-1] != last or NOISE.search(errors)):
        yield f"rank {rank} printed more than its traceback: {errors[-2000:]!r}"


def run(case, number):
    """Run one case: the failures, and seconds from the cause to the end of rank 1."""
    delay = round(random.Random(number).uniform(0.0, 0.05), 4)
    text = program(case, delay)
    if case.launched:
        return _launched(case, text, delay)
    ranks = run_ranks(text, 2, loop=case.loop, python=STRICT, limit=60.0)
    failures, spent = [], 0.0
    for rank, process in enumerate(ranks):
        cause = [
            fact["at"] for fact in (process if rank or case.together else ranks[1]).said if "cause" in fact
        ]
        took = process.at - cause[0] - delay if cause else 99.0
        waits = case.facade == "collective" and rank == 0  # see its program
        failures += judge(case, process.code, process.errors, took - waits, rank)
        if rank:
            spent = took
    if not case.together:
        failures += _unheard(ranks[0].said)
    return failures, spent


def _unheard(said):
    """What is wrong with what rank 0 heard of the end of rank 1."""
    heard = [fact for fact in said if "error" in fact]
    if not (
        len(heard) == 1 and heard[0]["error"] in ("PeerLost", "CommunicatorClosed") and heard[0]["rank"] == 1
    ):
        yield f"rank 0 heard {heard}"


def _launched(case, text, delay):
    """The same by ``asynccoll run``, which reports the first failure as its own."""
    end = ENDS[case.end]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(f"import sys; sys.argv[1:] = [{case.loop!r}]\n{PROLOGUE}{text}")
        script.flush()
        done = subprocess.run(
            [sys.executable, *STRICT, "-m", "asynccoll", "run", "--no-prefix", "-n", "2", script.name],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("ASYNCCOLL_")},
                "PYTHONDEVMODE": "1",
                "PYTHONWARNINGS": "error",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
        at = time.monotonic()
    said = [json.loads(line) for line in done.stdout.splitlines()]
    causes = [fact["at"] for fact in said if "cause" in fact]
    took = at - max(causes) - delay if causes else 99.0
    waits = case.facade == "collective" and not case.together and not end.code
    code = end.code if end.code >= 0 else 128 - end.code
    failures = []
    if done.returncode != code:
        failures.append(
            f"the launcher ended with {done.returncode} instead of {code}: {done.stderr[-2000:]!r}"
        )
    if took - waits > WITHIN:
        failures.append(f"the launcher took {took:.1f} s")
    lines = [
        line
        for line in done.stderr.splitlines()
        if not LOSS.match(line) and not line.startswith("asynccoll run: ")
    ]
    if (end.last is None and lines) or NOISE.search(done.stderr):
        failures.append(f"printed {done.stderr[-2000:]!r}")
    if not case.together and not end.code:  # else the launcher has ended rank 0, too
        failures += _unheard(said)
    return failures, took


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--case", type=int, help="run that one of the cases only, and show its program")
    options = parser.parse_args()
    cases = draw(options.runs if options.case is None else options.case + 1)
    numbers = range(len(cases)) if options.case is None else (options.case,)
    if options.case is not None:
        tell(program(cases[options.case], 0.0))
    failures, longest = [], 0.0
    for number in numbers:
        try:
            wrong, took = run(cases[number], number)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            wrong, took = [f"hangs: {error}"], 0.0
        longest = max(longest, took)
        tell(f"{number}: {cases[number]}: {took:.2f} s{' FAILED' if wrong else ''}")
        failures += [
            f"{cases[number]}: {text}; replay: python -m tests.reliability.ends --case {number}"
            for text in wrong
        ]
    return conclude(failures, runs=len(numbers), kinds=len(set(cases)), longest_end_s=round(longest, 2))


if __name__ == "__main__":
    sys.exit(main())
