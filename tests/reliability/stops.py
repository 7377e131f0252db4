"""SIGSTOP of real ranks, and ranks whose compute holds the loop: a short stop is no death, a long one is, and late ranks stay out.

Each round forms one mesh of processes with a short ``liveness_timeout``:

- ``short``: one rank is stopped for half of it. Nobody notices, every result is right.
- ``forever``: it stays stopped. All others raise `PeerLost` naming it within the timeout and a second, hardly using the CPU until
  then; those that may go on without it, do; and when it is woken up at last it learns that it was evicted, in every call.
- ``compute``: one rank's coroutine holds its loop for three times the timeout while the others send to it. Nobody notices.
"""

import argparse
import asyncio
import itertools
import logging
import os
import random
import signal
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: a fork takes no threads with it

import numpy as np

import asynccoll
from tests.reliability.common import LOOPS, conclude, tell
from tests.reliability.forks import Crew

MOMENTS = ("idle", "busy")
GRACE = 1.0
"""Most seconds from the end of the liveness timeout to the last error."""
CPU = 0.05
"""Most of a core that a rank may use while it waits."""
BULK = 4 << 20
"""Bytes of an allreduce under way."""


class Wrong(AssertionError):
    """A rank did not do what it should."""


def cpu(pid):
    """Seconds of CPU that another process has used: its clock, by the kernel's numbering (see clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


async def work(comm, told):
    """Allreduces until ``told`` is done at rank 0, checked; how many."""
    done = 0
    array = np.ones(BULK // 4, np.float32)
    while True:
        await comm.allreduce_(array, "avg")
        if not (array == 1.0).all():
            raise AssertionError(f"wrong result {array}")
        done += 1
        if await comm.allreduce(int(comm.rank == 0 and told.done())):
            return done


async def live(me, kind, moment, liveness, victim):
    """One rank of a round of ``short`` or ``compute``: nothing may fail."""
    async with asynccoll.init(timeout=60.0, init_timeout=60.0, liveness_timeout=liveness) as comm:
        await comm.barrier()
        me.say("ready")
        told = asyncio.ensure_future(me.told())
        if moment == "idle":
            await told
            again = asyncio.get_running_loop().create_future()
            again.set_result(None)
            me.say("done", done=await work(comm, again))
        else:
            working = asyncio.ensure_future(work(comm, told))
            if kind == "compute" and me.rank == victim:
                await asyncio.sleep(liveness / 4)
                time.sleep(3 * liveness)  # noqa: ASYNC251 (that is what is tried here)
                me.say("computed")
            me.say("done", done=await working)
            if not told.done():
                told.cancel()


async def lose(me, moment, liveness, victim):
    """One rank of a round of ``forever``."""
    comm = await asynccoll.init(timeout=60.0, init_timeout=60.0, liveness_timeout=liveness)
    await comm.barrier()
    me.say("ready")
    never = asyncio.get_running_loop().create_future()
    if moment == "idle":
        await me.told()
    try:
        await work(comm, never)
    except asynccoll.CollectiveError as error:
        me.failed(error)
    if me.rank != victim:
        await me.told()
    try:
        smaller = await comm.shrink()
    except asynccoll.AsynccollError as error:
        me.say("alone", type=type(error).__name__, text=str(error))
    else:
        total = await smaller.allreduce(np.array([1 << comm.rank]))
        me.say("shrunk", ranks=list(smaller.ranks), total=int(total[0]))
        await me.told()
        total = await smaller.allreduce(np.array([1 << comm.rank]))
        me.say("after", total=int(total[0]))
    try:
        await comm.barrier()
    except asynccoll.CollectiveError as error:
        me.failed(error)
    await me.told()
    await comm.close()


def play_unharmed(size, kind, moment, loop, liveness, seed):
    """A round of ``short`` or ``compute``. Raises `Wrong` or `Hang`."""
    rng = random.Random(f"{seed} {size} {kind} {moment} {loop}")
    victim = rng.randrange(size)
    everybody = range(size)
    with Crew(size, live, kind, moment, liveness, victim, loop=loop) as crew:
        crew.hear("ready", everybody)
        if kind == "short":
            time.sleep(rng.uniform(0.0, 0.2))
            crew.send(victim, signal.SIGSTOP)
            time.sleep(liveness / 2)
            crew.send(victim, signal.SIGCONT)
            time.sleep(1.5 * liveness)  # a false alarm would be late by so much at most
        else:
            crew.hear("computed", [victim])
        crew.tell(everybody if moment == "idle" else [0])
        crew.hear("done", everybody, 20.0)
        codes = crew.wait(everybody)
        if any(codes.values()):
            raise Wrong(f"exit codes {codes}")
    return {}


def play_forever(size, moment, loop, liveness, seed):
    """A round of ``forever``. Raises `Wrong` or `Hang`. What was measured."""
    rng = random.Random(f"{seed} {size} forever {moment} {loop}")
    victim = rng.randrange(size)
    others = [rank for rank in range(size) if rank != victim]
    with Crew(size, lose, moment, liveness, victim, loop=loop) as crew:
        crew.hear("ready", range(size))
        time.sleep(rng.uniform(0.0, 0.2))
        stopped = crew.send(victim, signal.SIGSTOP)
        if moment == "idle":
            crew.tell(others)
        time.sleep(0.25 * liveness)  # what was under way has come to a halt
        before, used = time.monotonic(), {rank: cpu(crew.pids[rank]) for rank in others}
        time.sleep(0.5 * liveness)
        passed = time.monotonic() - before
        share = max((cpu(crew.pids[rank]) - used[rank]) / passed for rank in others)
        failed = crew.hear("failed", others, liveness + 15.0)
        for rank, fact in failed.items():
            if fact["type"] != "PeerLost" or fact["peers"] != [victim]:
                raise Wrong(f"stopped {victim}; rank {rank} said {fact['type']}: {fact['text']}")
            if fact["at"] - stopped < 0.8 * liveness:
                raise Wrong(f"rank {rank} gave up rank {victim} after {fact['at'] - stopped:.3f} s already")
        crew.tell(others)
        go_on = 2 * len(others) > size or (2 * len(others) == size and 0 in others)
        total = sum(1 << rank for rank in others)
        if go_on:
            for rank, fact in crew.hear("shrunk", others, 15.0).items():
                if fact["ranks"] != others or fact["total"] != total:
                    raise Wrong(f"stopped {victim}; rank {rank} shrank to {fact}")
        else:
            crew.hear("alone", others, 15.0)
        crew.send(victim, signal.SIGCONT)
        if moment == "idle":
            crew.tell([victim])
        late = [crew.hear("failed", [victim], 15.0)[victim]]
        crew.hear("alone", [victim], 15.0)
        late.append(crew.hear("failed", [victim], 15.0)[victim])
        for fact in late:
            if (fact["type"], fact["peers"]) != ("PeerLost", [victim]) or "evicted" not in fact["reason"]:
                raise Wrong(f"the late rank {victim} said {fact['type']}: {fact['text']}")
        if go_on:
            crew.tell(others)
            for rank, fact in crew.hear("after", others, 15.0).items():
                if fact["total"] != total:
                    raise Wrong(f"after rank {victim} had woken up, rank {rank} got {fact}")
        for rank, fact in crew.hear("failed", others, 15.0).items():
            if fact["peers"] != [victim]:
                raise Wrong(f"then rank {rank} said {fact['type']}: {fact['text']}")
        crew.tell(range(size))
        codes = crew.wait(range(size))
        if any(codes.values()):
            raise Wrong(f"exit codes {codes}")
    return {"late": max(fact["at"] for fact in failed.values()) - stopped - liveness, "cpu": share}


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each cell of the grid is run")
    parser.add_argument("--worlds", default="2,3,4,8", help="world sizes")
    parser.add_argument("--kinds", default="short,forever,compute", help="what happens to one rank")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="with operations under way, or none")
    parser.add_argument("--loops", default=",".join(LOOPS), help="event loops")
    parser.add_argument("--liveness", type=float, default=1.5, help="liveness_timeout in seconds")
    parser.add_argument("--untimed", action="store_true", help="measure times, but hold them to no bar")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has one more")
    options = parser.parse_args(arguments)
    logging.getLogger("asynccoll").setLevel(logging.ERROR)  # losses are what this is about
    cells = [
        (seed, *cell)
        for seed in range(options.seed, options.seed + options.rounds)
        for cell in itertools.product(
            map(int, options.worlds.split(",")),
            options.kinds.split(","),
            options.moments.split(","),
            options.loops.split(","),
        )
        if cell[1:3] != ("compute", "idle")
    ]
    failures, found = [], []
    began = time.monotonic()
    for number, (seed, size, kind, moment, loop) in enumerate(cells, start=1):
        replay = (
            f"python -m tests.reliability.stops --worlds {size} --kinds {kind} --moments {moment} --loops {loop} "
            f"--liveness {options.liveness} --seed {seed}"
        )
        try:
            if kind == "forever":
                one = play_forever(size, moment, loop, options.liveness, seed)
                found.append(one)
                if one["late"] > GRACE and not options.untimed:
                    raise Wrong(f"the last heard {one['late']:.3f} s after the timeout")
                if one["cpu"] > CPU and not options.untimed:
                    raise Wrong(f"a waiting rank used {one['cpu']:.1%} of a core")
            else:
                play_unharmed(size, kind, moment, loop, options.liveness, seed)
        except AssertionError as error:
            failures.append(f"{type(error).__name__}: {error}\n    replay: {replay}")
            tell(failures[-1])
        if number % 8 == 0 or number == len(cells):
            tell(
                f"{number} of {len(cells)} rounds, {len(failures)} failures, {time.monotonic() - began:.0f} s"
            )
    return conclude(
        failures,
        rounds=len(cells),
        forever=len(found),
        liveness_timeout=options.liveness,
        last_after_timeout_max=round(max((one["late"] for one in found), default=0.0), 3),
        waiting_cpu_max=round(max((one["cpu"] for one in found), default=0.0), 4),
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
