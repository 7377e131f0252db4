"""Many ranks in one process, in virtual time."""

import asyncio

import numpy as np
import pytest

from asynccoll.communicator import Communicator, Options
from asynccoll.errors import CollectiveMismatch
from asynccoll.sim.driver import SimNetwork


async def world(size, body):
    """Run ``body(comm)`` on ``size`` ranks; their results."""
    network = SimNetwork(asyncio.get_running_loop(), size)
    comms = [Communicator(driver, options=Options(timeout=None)) for driver in network.drivers]
    try:
        return await asyncio.gather(*map(body, comms))
    finally:
        await asyncio.gather(*(comm.close() for comm in comms))


async def test_64_ranks_agree_whatever_the_algorithm():
    async def body(comm):
        results = []
        for algorithm in ("ring", "tree", "doubling"):
            results.append(await comm.allreduce(np.arange(100) + comm.rank, algorithm=algorithm))
        results.append(await comm.broadcast(np.arange(10) if comm.rank == 63 else None, root=63))
        results.append(await comm.allgather(comm.rank))
        await comm.barrier()
        return results

    total = np.arange(100) * 64 + sum(range(64))
    for *sums, value, ranks in await world(64, body):
        for result in sums:
            np.testing.assert_array_equal(result, total)
        assert value.tolist() == list(range(10))
        assert ranks == list(range(64))


async def test_one_odd_rank_of_64_is_named_by_all():
    async def body(comm):
        try:
            await comm.allreduce(np.zeros(3 if comm.rank != 41 else 4))
        except CollectiveMismatch as error:
            return (
                error.field,
                {rank for rank, shape in error.values.items() if shape == (4,)},
                len(error.values),
            )

    assert await world(64, body) == [("shape", {41}, 64)] * 64


@pytest.mark.timeout(600)
async def test_a_ring_of_256_ranks():
    # 130,560 messages.
    async def body(comm):
        result = await comm.allreduce(np.full(512, comm.rank), algorithm="ring")
        return set(result.tolist())

    assert await world(256, body) == [{sum(range(256))}] * 256
