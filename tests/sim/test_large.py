"""Many ranks in one process, in virtual time."""

import asyncio
import subprocess
import sys
from pathlib import Path

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


SLICE = (
    "test_allgather.py::test_the_rows_of_one_array_can_be_out",
    "test_alltoall.py::test_ranks_that_call_late_delay_nobodys_next_operation",
    "test_broadcast.py::test_every_root_of_a_large_world_reaches_every_rank",
    "test_cancel.py::test_every_rank_may_cancel_at_once",
    "test_close.py::test_what_is_pending_on_the_leaver_ends_too",
    "test_gather.py::test_the_rows_of_one_array_can_be_out",
    "test_loss.py::test_survivors_hear_of_it_within_a_round_trip",
    "test_mismatch.py::test_three_opinions_are_all_reported",
    "test_objects_path.py::test_the_fold_is_strictly_from_the_left_in_rank_order",
    "test_scatter.py::test_a_refusal_of_the_root_leaves_the_next_scatter_right",
    "test_timeout.py::test_a_late_call_of_another_kind_fails_as_well",
)
"""Of the conformance suite, for each verb and each way to fail one."""


def test_a_slice_of_the_conformance_suite_passes_with_64_ranks():
    suite = Path(__file__).parents[1] / "conformance"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["--world-size", "64", "--worlds", "sim", *(str(suite / test) for test in SLICE)]
    done = subprocess.run(command, cwd=suite.parents[1], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SLICE)} worlds of 64 ranks were opened" in done.stdout
    assert f"{len(SLICE)} passed" in done.stdout
