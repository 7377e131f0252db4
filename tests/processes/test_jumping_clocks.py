"""The ranks' times of day are hours apart and jump: no time limit ends early or late, and nobody is taken for dead."""

import pytest
from scripts import run_ranks

APART = 16_500.0
"""Seconds between the clocks of neighbouring ranks: 33,000 from the first to the last of three."""
JUMP = 3_600.0
"""Seconds by which each clock jumps at every look, forward and back in turn."""

PROGRAM = f"""
real, looks = time.time, [0]

def jumping():
    looks[0] += 1
    return real() + RANK * {APART} + (-1) ** looks[0] * {JUMP}

time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)

async def main():
    async with asynccoll.init(liveness_timeout=1.0, init_timeout=30.0) as comm:
        assert abs(time.time() - time.time()) > 7000
        for _ in range(20):
            assert await comm.allreduce(1, timeout=30.0) == 3
        say(liveness=await liveness(comm))
        began = time.monotonic()
        try:
            # Rank 2 never calls. Its own limit is the tightest of the two that do.
            if comm.rank < 2:
                await comm.allreduce(1, timeout=0.5 if comm.rank else 2000.0, key="late")
        except asynccoll.CollectiveTimeout as error:
            say(limit=error.limit, missing=sorted(error.missing), took=time.monotonic() - began)
        try:
            await comm.recv(src=(comm.rank + 1) % 3, timeout=0.5)
        except asynccoll.CollectiveTimeout as error:
            say(limit=error.limit, missing=sorted(error.missing), took=time.monotonic() - began)
        await comm.barrier()

async def liveness(comm):
    await asyncio.sleep(2.5)  # more than twice the liveness timeout without an operation
    return await comm.allreduce(1)

start(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_no_time_limit_ends_early_or_late_by_a_clock_that_jumps(loop):
    ended = run_ranks(PROGRAM, 3, loop=loop, limit=40.0)
    assert [process.code for process in ended] == [0, 0, 0], [process.errors for process in ended]
    for rank, process in enumerate(ended):
        alive, *late = process.said
        assert alive["liveness"] == 3
        assert len(late) == (2 if rank < 2 else 1)
        for fact in late:
            assert 0.45 < fact["took"] < 20.0, fact  # the limit is half a second; an hour is the jump
