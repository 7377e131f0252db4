"""One process reads a megabyte per second while the others have gigabytes to tell: nobody's memory grows with it."""

import pytest
from scripts import run_ranks

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


def run(count, size, rate, loop, limit=60.0):
    program = PROGRAM.replace("COUNT", str(count)).replace("SIZE", str(size)).replace("RATE", str(rate))
    return run_ranks(program, 3, loop=loop, limit=limit)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_fast_ranks_stay_small(loop):
    for rank, process in enumerate(run(100, 1 << 20, 50_000_000, loop)):
        assert process.code == 0, process.errors
        assert process.said[-1]["grown"] < 32 << 20, rank


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_fast_ranks_stay_small_for_500_broadcasts_of_4_mebibytes():
    for rank, process in enumerate(run(500, 4 << 20, 20_000_000, "uvloop", limit=1100.0)):
        assert process.code == 0, process.errors
        assert process.said[-1]["grown"] < 64 << 20, rank
