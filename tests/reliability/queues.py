"""A hundred thousand small frames for a peer that does not read: each costs the same, and none is lost.

::

    python -m tests.reliability.queues

Rank 0 starts and cancels operations that rank 1 has not called, which makes two frames each (START and ABORT), over sockets that
hold 4 KiB. Then rank 1 reads and calls them all: each must have been cancelled, and the next operation is right.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "conformance"))  # where these helpers are

from faults import not_reading, tiny_world

from asynccoll import CollectiveCancelled

from .common import LOOPS, conclude, tell

CHUNK = 500
"""Operations of which the time is taken together."""
WITHIN = 3.0
"""How much longer a frame may take behind many others than behind few."""


async def queue(count):
    """Seconds for each `CHUNK` of ``count`` operations, the bytes that waited, and how many cancels rank 1 heard of."""
    took = []
    async with tiny_world(2, 600.0) as comms:
        with not_reading(comms[1]):
            for _ in range(count // CHUNK):
                began = time.perf_counter()
                for _ in range(CHUNK):
                    comms[0].allreduce(1).cancel()
                took.append(time.perf_counter() - began)
                await asyncio.sleep(0)
            box = comms[0]._pump.engine._outboxes[1]
            waiting = sum(map(len, [*box.control, *box.current]))
        heard = 0
        for _ in range(count // CHUNK):
            works = [comms[1].allreduce(1) for _ in range(CHUNK)]
            ends = await asyncio.gather(*works, return_exceptions=True)
            heard += sum(isinstance(end, CollectiveCancelled) and end.origin == 0 for end in ends)
        total = await asyncio.gather(*(comm.allreduce(comm.rank + 1) for comm in comms))
        if total != [3, 3]:
            raise AssertionError(f"the next operation gave {total}")
    return took, waiting, heard


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--loop", choices=list(LOOPS), help="one loop only")
    options = parser.parse_args()
    failures, figures = [], {}
    for loop in LOOPS if options.loop is None else (options.loop,):
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            took, waiting, heard = runner.run(queue(options.frames // 2))
        tenth = max(1, len(took) // 10)
        first, last = statistics.median(took[1 : tenth + 1]), statistics.median(took[-tenth:])
        replay = f"replay: python -m tests.reliability.queues --loop {loop} --frames {options.frames}"
        if last > WITHIN * first:
            failures.append(f"a frame behind the others takes {last / first:.1f} times as long; {replay}")
        if heard != options.frames // 2:
            failures.append(f"only {heard} of {options.frames // 2} were heard of; {replay}")
        figures[loop] = {
            "frames": options.frames,
            "bytes_waiting": waiting,
            "last_tenth_to_first": round(last / first, 2),
            "us_each": round(last / CHUNK / 2 * 1e6, 1),
            "lost": options.frames // 2 - heard,
        }
        tell(f"{loop}: {figures[loop]}")
    return conclude(failures, **figures)


if __name__ == "__main__":
    sys.exit(main())
