"""What must work with nothing but the core dependencies, on every supported Python."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import asynccoll
from asynccoll.testing import local_world

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
async def test_every_verb_on_arrays_and_objects(size):
    async with local_world(size) as comms:

        async def rank_main(comm):
            array = np.arange(1000, dtype=np.float32) * (comm.rank + 1)
            total = await comm.allreduce(array)
            half = await comm.allreduce(np.full(5, comm.rank, np.float16), "avg")
            tree = await comm.allreduce_tree({"w": array, "n": comm.rank})
            first = await comm.broadcast(array if comm.rank == 0 else None)
            every = await comm.allgather(np.full(comm.rank, comm.rank))
            at_root = await comm.gather(np.full(comm.rank, comm.rank))
            mine = await comm.scatter([array[:n] for n in range(size)] if comm.rank == 0 else None)
            theirs = await comm.alltoall([np.full(to, comm.rank) for to in range(size)])
            words = await comm.allreduce([comm.rank])
            await comm.allreduce_(array, "max")
            await comm.barrier()
            return total, half, tree, first, every, at_root, mine, theirs, words, array

        for rank, results in enumerate(await asyncio.gather(*map(rank_main, comms))):
            total, half, tree, first, every, at_root, mine, theirs, words, array = results
            base = np.arange(1000, dtype=np.float32)
            assert np.array_equal(total, base * (size * (size + 1) / 2))
            assert np.array_equal(half, np.full(5, (size - 1) / 2, np.float16))
            assert np.array_equal(tree["w"], total)
            assert tree["n"] == size * (size - 1) // 2
            assert np.array_equal(first, base)
            assert [part.shape for part in every] == [(origin,) for origin in range(size)]
            if rank == 0:
                assert [part.tolist() for part in at_root] == [part.tolist() for part in every]
            else:
                assert at_root is None
            assert np.array_equal(mine, base[:rank])
            assert [part.tolist() for part in theirs] == [[origin] * rank for origin in range(size)]
            assert words == list(range(size))
            assert np.array_equal(array, base * size)


async def test_a_disagreement_is_raised_everywhere_and_the_mesh_goes_on():
    async with local_world(3) as comms:
        works = [comm.allreduce(np.zeros(4 + (comm.rank == 2), np.float32)) for comm in comms]
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(error, asynccoll.CollectiveMismatch)
            assert error.field == "shape"
            assert error.values == {0: (4,), 1: (4,), 2: (5,)}
        assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [3, 3, 3]


def test_the_launcher_runs_the_plain_script():
    command = [
        sys.executable,
        "-X",
        "dev",
        "-m",
        "asynccoll",
        "run",
        "-n",
        "3",
        str(ROOT / "examples" / "mean.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0] mean of [0, 1, 2] is 1.0\n"
