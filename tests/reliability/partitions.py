"""A silent partition: two network namespaces joined by a cable that is cut. Both sides notice, and at most one goes on.

Each round forms one mesh over the cable, cuts it with operations under way or none, and checks every rank: a `PeerLost` within the
liveness timeout and a second, which names ranks of the other side alone. Then all ask for a communicator of the survivors: the
majority gets one, of two equal halves that with the lowest rank; the other side is told why not. That
stays so when the cable is mended. Needs root.
"""

import argparse
import asyncio
import itertools
import logging
import os
import random
import re
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: a fork takes no threads with it

import numpy as np

import asynccoll
from tests.net.namespaces import AVAILABLE, Cable
from tests.reliability.common import LOOPS, conclude, tell
from tests.reliability.forks import Crew

MOMENTS = ("idle", "busy", "late call")
SPLITS = {"2|2": [0, 0, 1, 1], "3|1": [0, 0, 0, 1], "1|3": [0, 1, 1, 1]}
"""Name -> end of the cable on which each rank lives."""
GRACE = 1.0
"""Most seconds from the end of the liveness timeout to the last error."""
BULK = 16 << 20
"""Bytes of an allreduce under way."""


class Wrong(AssertionError):
    """A rank did not do what it should."""


async def part(me, moment, liveness):
    """One rank: works until it has lost somebody, then asks to go on without."""
    comm = await asynccoll.init(timeout=60.0, init_timeout=60.0, liveness_timeout=liveness)
    await comm.barrier()
    me.say("ready")
    array = np.ones(BULK // 4, np.float32)
    if moment != "busy":
        await me.told()
    me.say("calls")
    try:
        while True:
            await comm.allreduce_(array, "avg")
            if not (array == 1.0).all():
                raise AssertionError(f"wrong result {array}")
    except asynccoll.CollectiveError as error:
        me.failed(error)
    await me.told()
    try:
        smaller = await comm.shrink()
    except asynccoll.AsynccollError as error:
        me.say("shrunk", ranks=None, total=0, type=type(error).__name__, text=str(error))
        smaller = None
    else:
        total = await smaller.allreduce(np.array([1 << comm.rank]))
        me.say("shrunk", ranks=list(smaller.ranks), total=int(total[0]))
    await me.told()  # the cable is mended: what could not get through before arrives now
    await asyncio.sleep(liveness / 2)
    total = [0] if smaller is None else await smaller.allreduce(np.array([1 << comm.rank]))
    try:
        await comm.barrier()
    except asynccoll.PeerLost as error:
        me.say("mended", total=int(total[0]), peers=sorted(error.peers))
    await me.told()
    await comm.close()


def play(split, moment, loop, liveness, seed):
    """One round. Raises `Wrong` or `forks.Hang`. What was measured."""
    rng = random.Random(f"{seed} {split} {moment} {loop}")
    ends = SPLITS[split]
    ranks = range(len(ends))
    with (
        Cable() as cable,
        Crew(
            len(ends),
            part,
            moment,
            liveness,
            loop=loop,
            host=Cable.addresses[0],
            enter=lambda rank: cable.ends[ends[rank]].enter(),
        ) as crew,
    ):
        crew.hear("ready", ranks)
        time.sleep(rng.uniform(0.0, 0.3))
        cut = time.monotonic()
        end = rng.randrange(2)
        cable.set("down", end)
        if moment == "late call":
            time.sleep(liveness + GRACE)
        if moment != "busy":
            crew.tell(ranks)
        calls = crew.hear("calls", ranks)
        failed = crew.hear("failed", ranks, liveness + 20.0)
        for rank, fact in failed.items():
            there = {other for other in ranks if ends[other] != ends[rank]}
            named = set(fact["peers"])
            if fact["type"] != "PeerLost" or not named or not named <= there:
                raise Wrong(f"cut {split}; rank {rank} said {fact['type']}: {fact['text']}")
        if moment == "late call":
            last = max(failed[rank]["at"] - calls[rank]["at"] for rank in ranks)
        else:
            last = max(fact["at"] for fact in failed.values()) - cut - liveness
        crew.tell(ranks)
        shrunk = crew.hear("shrunk", ranks, 20.0)
        for rank, fact in shrunk.items():
            side = [other for other in ranks if ends[other] == ends[rank]]
            if 2 * len(side) > len(ends) or (2 * len(side) == len(ends) and 0 in side):
                if fact["ranks"] != side or fact["total"] != sum(1 << other for other in side):
                    raise Wrong(f"cut {split}; rank {rank} shrank to {fact}")
            elif fact["ranks"] is not None:
                raise Wrong(f"cut {split}; rank {rank} of the smaller side shrank to {fact}")
        cable.set("up", end)
        crew.tell(ranks)
        for rank, fact in crew.hear("mended", ranks, 20.0).items():
            if fact["total"] != shrunk[rank]["total"] or not fact["peers"]:
                raise Wrong(f"after the cable {split} was mended, rank {rank} got {fact}")
        crew.tell(ranks)
        codes = crew.wait(ranks)
        if any(codes.values()):
            raise Wrong(f"exit codes {codes}")
    refusals = sorted({fact["text"] for fact in shrunk.values() if fact["ranks"] is None})
    return {"late": last, "refusals": refusals}


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often each cell of the grid is run")
    parser.add_argument("--splits", default=",".join(SPLITS), help="who lives where")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="when the cable is cut")
    parser.add_argument("--loops", default=",".join(LOOPS), help="event loops")
    parser.add_argument("--liveness", type=float, default=1.5, help="liveness_timeout in seconds")
    parser.add_argument("--untimed", action="store_true", help="measure times, but hold them to no bar")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next has one more")
    options = parser.parse_args(arguments)
    if not AVAILABLE:
        parser.error("needs Linux, root, ip and nsenter to make network namespaces")
    logging.getLogger("asynccoll").setLevel(logging.ERROR)  # losses are what this is about
    cells = [
        (seed, *cell)
        for seed in range(options.seed, options.seed + options.rounds)
        for cell in itertools.product(
            options.splits.split(","), options.moments.split(","), options.loops.split(",")
        )
    ]
    failures, lates, refusals = [], [], []
    began = time.monotonic()
    for number, (seed, split, moment, loop) in enumerate(cells, start=1):
        replay = (
            f"python -m tests.reliability.partitions --splits '{split}' --moments '{moment}' --loops {loop} "
            f"--liveness {options.liveness} --seed {seed}"
        )
        try:
            one = play(split, moment, loop, options.liveness, seed)
            lates.append(one["late"])
            refusals += one["refusals"]
            if one["late"] > GRACE and not options.untimed:
                raise Wrong(f"the last heard {one['late']:.3f} s after the timeout")
        except AssertionError as error:
            failures.append(f"{type(error).__name__}: {error}\n    replay: {replay}")
            tell(failures[-1])
        if number % 6 == 0 or number == len(cells):
            tell(
                f"{number} of {len(cells)} rounds, {len(failures)} failures, {time.monotonic() - began:.0f} s"
            )
    for text in sorted({re.sub(r"^rank \d+|[\d.]+ s\b", "...", text) for text in refusals}):
        tell(f"a smaller side was told: {text}")
    return conclude(
        failures,
        rounds=len(cells),
        liveness_timeout=options.liveness,
        last_after_timeout_max=round(max(lates, default=0.0), 3),
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
