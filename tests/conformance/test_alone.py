"""A world of one: every verb, with the same aliasing rules as in a larger one, and without a socket."""

import os
import sys

import carriers
import numpy as np
import pytest
import torch

import asynccoll

pytestmark = pytest.mark.fixed_size("a world of one")

VALUES = (
    np.arange(5.0),
    np.array(3, ">i2"),
    np.float32(1.5),
    torch.arange(4),
    memoryview(np.arange(3, dtype=np.uint8)),
    [1, [2]],
    {"a": 1},
    "text",
    None,
)


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


def same(one, other):
    if type(one) is not type(other):
        return False
    if hasattr(one, "dtype"):
        return carriers.kind(one) == carriers.kind(other) and bool((one == other).all())
    return one == other


@pytest.mark.inline_only("the loop of the mesh's thread has descriptors of its own")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
async def test_no_verb_opens_a_descriptor(world):
    before = open_files()
    async with world(1) as comms:
        (comm,) = comms
        assert open_files() == before
        works = [comm.allreduce(value, "max") for value in VALUES]
        works += [comm.broadcast(value) for value in VALUES] + [comm.allgather(value) for value in VALUES]
        works += [comm.gather(value) for value in VALUES] + [comm.scatter([value]) for value in VALUES]
        works += [comm.alltoall([value]) for value in VALUES]
        works += [comm.allreduce_(np.ones(3)), comm.allreduce_tree({"a": 1}), comm.barrier()]
        assert open_files() == before
        for work in works:
            await work
        assert open_files() == before
        assert (comm.rank, comm.world_size, comm.ranks, comm.pending()) == (0, 1, (0,), [])
    assert open_files() == before


async def test_without_a_launcher_init_is_a_world_of_one(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ASYNCCOLL", "MASTER_", "RANK", "WORLD_"))]:
        monkeypatch.delenv(name)
    before = open_files() if sys.platform.startswith("linux") else None
    async with asynccoll.init() as comm:
        assert (comm.rank, comm.world_size) == (0, 1)
        assert (await asynccoll.allreduce(np.ones(2))).tolist() == [1, 1]
        if before is not None:
            assert open_files() == before


@pytest.mark.parametrize("number", range(len(VALUES)))
async def test_results_equal_the_value_and_are_not_it(world, number):
    value = VALUES[number]
    async with world(1) as comms:
        (comm,) = comms
        results = [await comm.broadcast(value), *await comm.allgather(value)]
        results += [await comm.scatter([value]), *await comm.gather(value), *await comm.alltoall([value])]
        results.append(await comm.allreduce(value, "max"))
        if not isinstance(value, memoryview):  # as an object it does not pickle
            results.append(await comm.allreduce(value, lambda a, b: 1 / 0))
        for result in results:
            assert same(result, value), result
            if isinstance(value, list | dict | np.ndarray | torch.Tensor | memoryview):
                assert result is not value
            if hasattr(value, "dtype") or isinstance(value, memoryview):
                assert not carriers.share_memory(result, value)


async def test_every_op_keeps_the_bits_and_refuses_as_in_a_larger_world(world):
    async with world(1) as comms:
        (comm,) = comms
        for op in ("sum", "avg", "prod", "min", "max"):
            value = np.array([-0.0, 0.0, np.inf, 1e-45, 3.0], np.float32)
            for algorithm in ("auto", "ring", "tree", "doubling"):
                assert (await comm.allreduce(value, op, algorithm=algorithm)).tobytes() == value.tobytes()
        with pytest.raises(TypeError, match="avg"):
            await comm.allreduce(np.ones(2, int), "avg")
        with pytest.raises(ValueError, match="algorithm"):
            await comm.allreduce(np.ones(2), algorithm="star")
        assert await comm.allreduce(7, "avg") == 7


async def test_in_place_out_and_trees_work(world):
    async with world(1) as comms:
        (comm,) = comms
        value, out = np.arange(4.0), np.zeros(4)
        assert await comm.allreduce_(value[::2]) is not None
        assert await comm.allreduce(value, out=out) is out
        assert out.tolist() == value.tolist() == [0, 1, 2, 3]
        tree = {"a": value, "b": (1, 2.5, None, True)}
        found = await comm.allreduce_tree(tree)
        assert found["b"] == (1, 2.5, None, True)
        assert found["a"].tolist() == value.tolist()
        assert not np.shares_memory(found["a"], value)
        outs = [np.zeros(4)]
        assert (await comm.allgather(value, out=outs))[0] is outs[0]
        assert (await comm.gather(value, out=outs))[0] is outs[0]
        assert (await comm.alltoall([value], out=outs))[0] is outs[0]
        assert await comm.scatter([value], out=out) is out
        assert await comm.broadcast(value, out=out) is out
        assert await comm.barrier() is None


async def test_reductions_to_a_root_to_parts_and_to_prefixes_give_the_value_itself(world):
    async with world(1) as comms:
        (comm,) = comms
        for value in VALUES:
            results = [await comm.reduce(value, "max"), await comm.scan(value, "max")]
            for result in results:
                assert same(result, value), result
                if hasattr(value, "dtype") or isinstance(value, memoryview):
                    assert not carriers.share_memory(result, value)
                elif isinstance(value, list | dict):
                    assert result is not value
            assert await comm.exscan(value, "max") is None
        value, out = np.array([-0.0, np.inf, 3.0, 1e-45], np.float32), np.zeros(4, np.float32)
        for verb in (comm.reduce, comm.reduce_scatter, comm.scan):
            out[:] = 7
            assert await verb(value, out=out) is out
            assert out.tobytes() == value.tobytes()
        out[:] = 7
        assert await comm.exscan(value, out=out) is None
        assert out.tolist() == [7] * 4
        assert await comm.reduce([1], lambda a, b: 1 / 0) == [1]
        assert await comm.scan([1], lambda a, b: 1 / 0) == [1]
        assert await comm.exscan([1], lambda a, b: 1 / 0) is None
