"""``kill -9`` of real ranks: who notices, whom they name, how soon, at what cost, and whether they can go on.

Each round forms one mesh of processes, kills one rank at a random moment, and checks every survivor: a `PeerLost` that names the
killed and nobody else, after which the survivors shrink and work on. With ``--deaths 2`` another rank is killed, up to 5 ms after
the first, or while the others shrink. The grid is worlds x algorithms x moments x loops, each cell ``--rounds`` times.
"""

import argparse
import asyncio
import itertools
import logging
import os
import random
import resource
import signal
import statistics
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: a fork takes no threads with it

import numpy as np

import asynccoll
from tests.reliability.common import LOOPS, conclude, tell
from tests.reliability.forks import Crew

MOMENTS = {"8B": 8, "64MB": 64 << 20, "256MB": 256 << 20, "idle": 8, "late call": 8}
"""Name -> bytes of the allreduce. ``idle``: nothing is under way, the next call comes with the kill; ``late call``: half a second
later."""
LATE = 0.5
"""Seconds between a kill and a ``late call``."""
SPREAD = 1.0
"""Most seconds from the first survivor's error to the last one's."""
CPU = 0.2
"""Most of a core that a survivor may use after its error."""
SECOND = 0.005
"""Most seconds between two deaths of one round."""


def bars(size):
    """Most seconds from the kill to the last survivor's error."""
    return 1.0 if size <= 8 else 2.0


def cpu():
    """Seconds of CPU that this process has used, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def survive(me, algorithm, moment, watch):
    """One rank: allreduces until a peer is lost, then waits, shrinks, and checks that the rest can go on."""
    comm = await asynccoll.init(timeout=60.0, init_timeout=60.0)
    array = np.ones(MOMENTS[moment] // 4, np.float32)
    await comm.barrier()
    me.say("ready")
    done = 0
    try:
        if moment in ("idle", "late call"):
            await me.told()
            called = time.monotonic()
            await comm.allreduce_(array, "avg", algorithm=algorithm)
        else:
            called = 0.0
            while True:
                await comm.allreduce_(array, "avg", algorithm=algorithm)
                if not (array[0] == array[-1] == 1.0):
                    raise AssertionError(f"wrong result {array}")
                done += 1
    except asynccoll.CollectiveError as error:
        me.failed(error, done=done, called=called)
    else:
        raise AssertionError("a call succeeded although a rank was dead before it")
    before, used = time.monotonic(), cpu()
    await asyncio.sleep(watch)
    me.say("watched", share=(cpu() - used) / (time.monotonic() - before), pending=len(comm.pending()))
    await me.told()
    await go_on(me, comm)
    await me.told()
    await comm.close()


async def go_on(me, comm):
    """Shrink, and work with who is left until all have been told that it is enough. Another death is a reason to shrink again."""
    began = time.monotonic()
    enough = asyncio.ensure_future(me.told())
    while True:
        try:
            smaller = await comm.shrink()
            first = None
            while True:
                total, told = await smaller.allreduce(np.array([1 << comm.rank, enough.done()]))
                first = first or time.monotonic() - began
                if told == smaller.world_size:
                    me.say("shrunk", ranks=list(smaller.ranks), total=int(total), seconds=first)
                    return
                await asyncio.sleep(0)  # a sole survivor's operations are done at once
        except asynccoll.PeerLost:
            continue


class Wrong(AssertionError):
    """A survivor did not do what it should."""


def play(size, algorithm, moment, loop, *, deaths=1, number=signal.SIGKILL, seed=0, victim=None, watch=1.0):
    """One round. Raises `Wrong` or `forks.Hang`. What was measured, as a dict."""
    rng = random.Random(f"{seed} {size} {algorithm} {moment} {loop}")
    dead = rng.sample(range(size), deaths) if victim is None else [victim]
    survivors = [rank for rank in range(size) if rank not in dead]
    # An operation of 64 MB takes about so long; a small one much less than the shortest pause here.
    pause = rng.uniform(0.0, max(0.05, 0.05 * size * MOMENTS[moment] / (64 << 20)))
    gap = rng.choice([0.0, rng.uniform(0.0, SECOND)])
    shrinking = dead[1:] if rng.random() < 1 / 3 else []  # these are killed only while the others shrink
    survivors += shrinking
    survivors.sort()
    with Crew(size, survive, algorithm, moment, watch, loop=loop) as crew:
        crew.hear("ready", range(size))
        time.sleep(pause)
        killed = crew.send(dead[0], number)
        for other in dead[1:]:
            if other not in shrinking:
                time.sleep(gap)
                crew.send(other, number)
        if moment == "idle":
            crew.tell(survivors)
        elif moment == "late call":
            time.sleep(LATE)
            crew.tell(survivors)
        failed = crew.hear("failed", survivors, 15.0)
        for rank, fact in failed.items():
            named = set(fact["peers"])
            good = named == {dead[0]} if deaths == 1 or shrinking else named and named <= set(dead)
            if fact["type"] != "PeerLost" or not good:
                raise Wrong(f"killed {dead}; rank {rank} said {fact['type']}: {fact['text']}")
        if moment == "late call":
            last = max(fact["at"] - fact["called"] for fact in failed.values())
        else:
            last = max(fact["at"] for fact in failed.values()) - killed
        first = min(fact["at"] for fact in failed.values()) - killed
        watched = crew.hear("watched", survivors)
        if any(fact["pending"] for fact in watched.values()):
            raise Wrong(f"still pending: {watched}")
        found = {
            "last": last,
            "spread": last - first,
            "cpu": max(fact["share"] for fact in watched.values()),
            "same": len({tuple(fact["peers"]) for fact in failed.values()}) == 1,
            "size": size,
        }
        crew.tell(survivors + shrinking)
        for other in shrinking:
            time.sleep(gap)
            crew.send(other, number)
            survivors.remove(other)
        time.sleep(2 * SECOND)
        crew.tell(survivors)
        shrunk = crew.hear("shrunk", survivors, 15.0)
        for rank, fact in shrunk.items():
            if fact["ranks"] != survivors or fact["total"] != sum(1 << other for other in survivors):
                raise Wrong(f"killed {dead}; rank {rank} shrank to {fact}")
        found["shrink"] = max(fact["seconds"] for fact in shrunk.values())
        crew.tell(survivors)
        codes = crew.wait(survivors)
        if any(codes.values()):
            raise Wrong(f"exit codes {codes}")
    return found


def figures(name, values, digits=4):
    """Median and maximum."""
    return (
        {f"{name}_p50": round(statistics.median(values), digits), f"{name}_max": round(max(values), digits)}
        if values
        else {}
    )


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each cell of the grid is run")
    parser.add_argument("--worlds", default="2,3,4,8,16", help="world sizes")
    parser.add_argument("--algorithms", default="ring,tree", help="of an allreduce")
    parser.add_argument("--moments", default="8B,64MB,idle,late call", help="when the kill comes; 256MB too")
    parser.add_argument("--loops", default=",".join(LOOPS), help="event loops")
    parser.add_argument("--deaths", type=int, default=1, choices=(1, 2), help="how many ranks are killed")
    parser.add_argument("--signal", default="KILL", choices=("KILL", "TERM"), help="how they are killed")
    parser.add_argument("--victim", type=int, help="the rank to kill, by default a random one")
    parser.add_argument(
        "--watch", type=float, default=1.0, help="seconds after an error in which the CPU is measured"
    )
    parser.add_argument("--untimed", action="store_true", help="measure times, but hold them to no bar")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has one more")
    options = parser.parse_args(arguments)
    logging.getLogger("asynccoll").setLevel(logging.ERROR)  # losses are what this is about
    worlds = [int(size) for size in options.worlds.split(",") if int(size) > options.deaths]
    cells = [
        (seed, *cell)
        for seed in range(options.seed, options.seed + options.rounds)
        for cell in itertools.product(
            worlds, options.algorithms.split(","), options.moments.split(","), options.loops.split(",")
        )
    ]
    failures, found = [], []
    began = time.monotonic()
    for number, (seed, size, algorithm, moment, loop) in enumerate(cells, start=1):
        more = {
            "deaths": options.deaths,
            "number": getattr(signal, f"SIG{options.signal}"),
            "victim": options.victim,
            "watch": options.watch,
        }
        replay = (
            f"python -m tests.reliability.kills --worlds {size} --algorithms {algorithm} --moments '{moment}' --loops {loop} "
            f"--deaths {options.deaths} --signal {options.signal} --seed {seed}"
        )
        if options.victim is not None:
            replay += f" --victim {options.victim}"
        try:
            one = play(size, algorithm, moment, loop, seed=seed, **more)
        except AssertionError as error:
            failures.append(f"{type(error).__name__}: {error}\n    replay: {replay}")
            tell(failures[-1])
            continue
        found.append(one)
        if one["last"] > bars(size) and not options.untimed:
            failures.append(f"the last survivor heard after {one['last']:.3f} s\n    replay: {replay}")
        if one["spread"] > SPREAD and not options.untimed:
            failures.append(
                f"{one['spread']:.3f} s from the first to the last survivor\n    replay: {replay}"
            )
        if one["cpu"] > CPU and not options.untimed:
            failures.append(f"a survivor used {one['cpu']:.0%} of a core afterwards\n    replay: {replay}")
        if number % 20 == 0 or number == len(cells):
            tell(
                f"{number} of {len(cells)} rounds, {len(failures)} failures, {time.monotonic() - began:.0f} s"
            )
    by_size = {
        str(size): {
            **figures("last", [one["last"] for one in found if one["size"] == size]),
            **figures("shrink", [one["shrink"] for one in found if one["size"] == size and "shrink" in one]),
        }
        for size in worlds
    }
    return conclude(
        failures,
        rounds=len(cells),
        deaths=options.deaths,
        **figures("last", [one["last"] for one in found]),
        **figures("spread", [one["spread"] for one in found]),
        **figures("cpu", [one["cpu"] for one in found], 3),
        **figures("shrink", [one["shrink"] for one in found if "shrink" in one]),
        same_name_everywhere=sum(one["same"] for one in found),
        worlds=by_size,
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
