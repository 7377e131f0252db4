"""Starts and restarts: many processes at once, one port again and again, a rank that does not come, a barrier and the end.

::

    python -m tests.reliability.starts
    python -m tests.reliability.starts --part rounds --count 50

``crowds``: 64 processes start at once where the kernel keeps 8 callers waiting (in a network namespace, as root).
``restarts``: worlds of real processes one after another at one address, which close or not, now the one and now the other first.
``missing``: ranks that never come are named at ``init_timeout``.
``rounds``: eight processes open, meet and close hundreds of times, rank 0 first; then some more that also end. Nobody raises,
nobody logs a warning, and no connection ends by a reset.
"""

import argparse
import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "net"))  # where `namespaces` is

from namespaces import AVAILABLE, CROWD, SMALL_BACKLOG, in_namespace, statistic

import asynccoll
import asynccoll.net.driver
import asynccoll.net.rendezvous  # here, so that not every fork has to import it

from .common import LOOPS, conclude, tell

SECRET = "the ranks know this"
LIMIT = 60.0
"""Seconds for one start: a hang is a failure."""
EIGHT = 8


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def opening(rank, size, port, **options):
    address = f"tcp://127.0.0.1:{port}"
    return asynccoll.connect(
        address, rank=rank, world_size=size, secret=SECRET, **{"init_timeout": LIMIT, **options}
    )


# -- processes -------------------------------------------------------------------------------------------------


def forked(size, main, loop, limit=LIMIT):
    """Run ``main(rank)`` in a process for each rank: what is wrong with their ends. Only where there are no threads."""
    children = {}
    for rank in range(size):
        child = os.fork()
        if not child:
            _run(rank, main, loop)
        children[child] = rank
    wrong, deadline = [], time.monotonic() + limit
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank, code = children.pop(child), os.waitstatus_to_exitcode(status)
            if code:
                wrong.append(f"rank {rank} ended with {code}")
        elif time.monotonic() < deadline:
            time.sleep(0.002)
        else:
            for other, rank in children.items():
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
                wrong.append(f"rank {rank} hangs")
            break
    return wrong


def _run(rank, main, loop):
    """The whole life of a child. Its exit code is 1 if it raised, 2 if it logged a warning."""
    status, warned = 1, []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warned.append
    logging.getLogger("asynccoll").addHandler(handler)
    try:
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(main(rank))
        status = 2 if warned else 0
        for record in warned:
            tell(f"rank {rank} logged: {record.getMessage()}")
    except BaseException:  # noqa: BLE001 (told, and the process ends)
        tell(f"rank {rank}: {traceback.format_exc()}")
    finally:
        # Not os._exit alone: what a process does at its end is part of it.
        atexit._run_exitfuncs()
        os._exit(status)


# -- the parts -------------------------------------------------------------------------------------------------


def crowds(count, loop):
    """So many starts of 64 processes with a backlog of 8."""
    if not AVAILABLE:
        return {"skipped": "needs root, unshare and ip"}, []
    wrong, overflows, longest = [], 0, 0.0
    for number in range(count):
        began = time.monotonic()
        done = in_namespace(
            SMALL_BACKLOG, sys.executable, str(CROWD), "64", "127.0.0.1", "29500", str(LIMIT), loop
        )
        longest = max(longest, time.monotonic() - began)
        if done.returncode or done.stdout != "64 of 64 formed the mesh\n":
            wrong.append(f"start {number}: {done.stdout[-1000:]}")
        overflows += statistic(done.stderr, "ListenOverflows")
    if not overflows:
        wrong.append("the backlog was never full: this was no test of it")
    return {"starts": count, "overflows": overflows, "longest_s": round(longest, 1)}, wrong


def restarts(count, loop, size=3):
    """So many worlds at one address, one after another."""
    port, wrong = free_port(), []

    for number in range(count):

        async def main(rank, number=number):
            comm = await opening(rank, size, port)
            total = await comm.allreduce(rank + number)
            assert total == sum(range(size)) + size * number
            await comm.barrier()
            if number % 3 == 1 and rank == number % size:
                await asyncio.sleep(0.01)  # the others end first
            if number % 3:
                await comm.close()

        ends = forked(size, main, loop)
        if (
            number % 3 == 0
        ):  # nobody closes: who ends second may log that the first was lost, if that was still under way
            ends = [end for end in ends if not end.endswith("with 2")]
        wrong += [f"restart {number}: {end}" for end in ends]
    return {"restarts": count}, wrong


def missing(count, loop):
    """Worlds in which ranks do not come: ``count`` of them, all others in one loop."""
    cases = [(2, {1}), (3, {2}), (8, {5}), (8, {1, 2, 7}), (16, {15}), (16, set(range(1, 15))), (4, {0})]
    wrong, latest, limit = [], 0.0, 0.5

    async def one(size, absent):
        port = free_port()
        began = time.monotonic()

        async def rank(number):
            try:
                async with opening(number, size, port, init_timeout=limit):
                    return f"rank {number} of {size} got a mesh"
            except asynccoll.RendezvousError as error:
                took = time.monotonic() - began
                named = error.missing == absent and all(str(one) in str(error) for one in absent)
                if not named:
                    return f"rank {number} of {size} says {error}, missing {set(error.missing)} instead of {absent}"
                return took

        return await asyncio.gather(*(rank(number) for number in range(size) if number not in absent))

    for number in range(count):
        size, absent = cases[number % len(cases)]
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            for found in runner.run(asyncio.wait_for(one(size, absent), LIMIT)):
                if isinstance(found, str):
                    wrong.append(found)
                else:
                    latest = max(latest, found - limit)
    if latest > 1.0:
        wrong.append(f"the last rank raised {latest:.1f} s after the limit")
    return {"worlds": count, "latest_after_limit_s": round(latest, 3)}, wrong


def rounds(count, loop):
    """``count`` times open, barrier, close, by eight processes that live on; and a tenth of that by processes that then end."""
    port = free_port()

    async def main(rank, times=count):
        for _ in range(times):
            comm = await opening(rank, EIGHT, port)
            await comm.barrier()
            if rank:
                await asyncio.sleep(0)  # rank 0 is the first to go
            await comm.close()

    wrong = [f"rounds: {end}" for end in forked(EIGHT, main, loop, limit=10.0 + count)]

    async def once(rank):
        await main(rank, 1)

    for number in range(count // 10):
        wrong += [f"round {number} of processes that end: {end}" for end in forked(EIGHT, once, loop)]
    return {"rounds": count, "of processes that end": count // 10}, wrong


PARTS = {
    "crowds": (crowds, 10),
    "restarts": (restarts, 200),
    "missing": (missing, 14),
    "rounds": (rounds, 500),
}
"""Each with how often it is done in the long form, on each loop."""


def in_own_network(part, count, loop):
    """The part in a network namespace of its own, as root, so that its resets can be counted: its output, and how many."""
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--inside",
        "--part",
        part,
        "--count",
        str(count),
        "--loop",
        loop,
    ]
    done = in_namespace({}, *command, timeout=LIMIT + 2 * count)
    told = "\n".join(line for line in done.stderr.splitlines() if line.startswith(("FAILED", "rank")))
    return done.returncode, told, statistic(done.stderr, "EstabResets", "Tcp:")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=list(PARTS), help="one part only")
    parser.add_argument("--count", type=int, help="how often, instead of what each part has in the long form")
    parser.add_argument("--loop", choices=list(LOOPS), help="one loop only")
    parser.add_argument("--inside", action="store_true", help="in this very network, without counting resets")
    options = parser.parse_args()
    failures, figures = [], {}
    for part in PARTS if options.part is None else (options.part,):
        function, usual = PARTS[part]
        count = options.count or usual
        for loop in LOOPS if options.loop is None else (options.loop,):
            began = time.monotonic()
            if part in ("restarts", "rounds") and AVAILABLE and not options.inside:
                code, told, resets = in_own_network(part, count, loop)
                found, wrong = {"count": count, "resets": resets}, [told] if code else []
                if resets and part == "rounds":
                    wrong.append(f"{resets} connections ended by a reset")
            else:
                found, wrong = function(count, loop)
            found["seconds"] = round(time.monotonic() - began, 1)
            figures[f"{part} {loop}"] = found
            tell(f"{part} {loop}: {found}")
            replay = f"python -m tests.reliability.starts --part {part} --count {count} --loop {loop}"
            failures += [f"{part}: {text}; replay: {replay}" for text in wrong]
    return conclude(failures, **figures)


if __name__ == "__main__":
    sys.exit(main())
