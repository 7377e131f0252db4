"""The same death as in `kills`, on torch's gloo: how many survivors hear at once, how many at the timeout, how many learn who died.

For comparison only: nothing of asynccoll is under test here.
"""

import argparse
import datetime
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from tests.reliability.common import conclude, tell
from tests.reliability.forks import Crew

AT_ONCE = 1.0
"""Seconds within which a survivor counts as told at once."""


async def survive(me, path, limit, nbytes):
    """One rank: allreduces until one fails, and how."""
    store = dist.FileStore(path, me.size)
    dist.init_process_group(
        "gloo", store=store, rank=me.rank, world_size=me.size, timeout=datetime.timedelta(seconds=limit)
    )
    array = torch.zeros(nbytes // 4)
    dist.barrier()
    me.say("ready")
    try:
        while True:
            dist.all_reduce(array)
    except RuntimeError as error:
        me.say("failed", text=str(error))
    await me.told()
    os._exit(0)  # destroying the group may hang by itself


def play(size, limit, nbytes, seed):
    """One round: rank -> (seconds from the kill to its error, whether it names the rank, the text)."""
    rng = random.Random(seed)
    dead = rng.randrange(size)
    survivors = [rank for rank in range(size) if rank != dead]
    with (
        tempfile.TemporaryDirectory() as directory,
        Crew(size, survive, f"{directory}/store", limit, nbytes) as crew,
    ):
        crew.hear("ready", range(size))
        time.sleep(rng.uniform(0.05, 0.2))
        killed = crew.send(dead, signal.SIGKILL)
        failed = crew.hear("failed", survivors, 4 * limit + 10)
        crew.tell(survivors)
        return dead, {
            rank: (
                fact["at"] - killed,
                bool(re.search(rf"rank\D{{0,3}}{dead}\b", fact["text"])),
                fact["text"],
            )
            for rank, fact in failed.items()
        }


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=10.0, help="of gloo's operations, in seconds")
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of the allreduce")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rounds = []
    for seed in range(options.seed, options.seed + options.rounds):
        dead, failed = play(options.world, options.timeout, options.bytes, seed)
        seconds = sorted(round(after, 2) for after, _, _ in failed.values())
        rounds.append(
            {
                "dead": dead,
                "at_once": sum(after < AT_ONCE for after in seconds),
                "at_the_timeout": sum(after >= 0.9 * options.timeout for after in seconds),
                "named": sum(named for _, named, _ in failed.values()),
                "seconds": seconds,
            }
        )
        tell(json.dumps(rounds[-1]))
        for text in {re.sub(r"\d+", "N", text)[:160] for _, _, text in failed.values()}:
            tell(f"    {text}")
    return conclude([], torch=torch.__version__, world=options.world, timeout=options.timeout, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
