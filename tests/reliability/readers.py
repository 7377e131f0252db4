"""One rank reads slowly while the others have gigabytes to tell it: nobody's memory grows with them.

::

    python -m tests.reliability.readers                          # 500 broadcasts of 4 MiB, read at 20 MB/s
    python -m tests.reliability.readers --rate 1000000           # at 1 MB/s: more than half an hour
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))  # where `scripts` is

from scripts import run_ranks

from .common import conclude, tell

PROGRAM = """
import resource

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

async def slow(comm, per_second):
    # Read for a moment, then rest until the rate is kept.
    loop, driver = asyncio.get_running_loop(), comm._pump
    while not comm.closed:
        before = driver.bytes_received
        await asyncio.sleep(0.002)
        due = (driver.bytes_received - before) / per_second
        if due > 0.002:
            for sock in driver._sockets.values():
                loop.remove_reader(sock.fileno())
            await asyncio.sleep(due)
            for peer, sock in driver._sockets.items():
                loop.add_reader(sock.fileno(), driver._readable, peer, sock)

async def main():
    count, size, rate = COUNT, SIZE, RATE
    async with asynccoll.init(timeout=3000) as comm:
        value = np.ones(size // 4, np.float32)
        await comm.allreduce(value)
        base = most = rss()
        brake = asyncio.create_task(slow(comm, rate)) if comm.rank == 1 else None
        under_way = []
        for number in range(count):
            under_way.append(comm.broadcast(value if comm.rank == 0 else None))
            if len(under_way) == 4:
                await under_way.pop(0)
            most = max(most, rss())
        await asyncio.gather(*under_way)
        if brake is not None:
            brake.cancel()
        say(grown=max(most, rss()) - base)

start(main())
"""
"""Rank 1 takes a rest after each read until the rate is kept."""


def run(count, size, rate, loop, limit=60.0):
    """Bytes by which each of three ranks has grown at most, while rank 0 broadcasts ``count`` times ``size`` bytes."""
    program = PROGRAM.replace("COUNT", str(count)).replace("SIZE", str(size)).replace("RATE", str(rate))
    ranks = run_ranks(program, 3, loop=loop, limit=limit)
    for rank, process in enumerate(ranks):
        if process.code:
            raise AssertionError(f"rank {rank} ended with {process.code}: {process.errors[-2000:]}")
    return [process.said[-1]["grown"] for process in ranks]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--mebibytes", type=int, default=4)
    parser.add_argument("--rate", type=int, default=20_000_000, help="bytes a second that rank 1 reads")
    parser.add_argument("--bound", type=int, default=64, help="mebibytes by which a rank may grow")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="uvloop")
    options = parser.parse_args()
    began, failures, size = time.monotonic(), [], options.mebibytes << 20
    seconds = options.count * size / options.rate
    tell(f"about {seconds:.0f} s")
    grown = run(options.count, size, options.rate, options.loop, limit=60.0 + 3 * seconds)
    if max(grown) >= options.bound << 20:
        failures.append(f"a rank has grown by {max(grown) >> 20} MiB; replay: the same command")
    return conclude(
        failures,
        loop=options.loop,
        bytes_sent=options.count * size,
        grown_mib=[round(one / (1 << 20), 1) for one in grown],
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
