"""Reduce: the whole result at the root, None elsewhere, for arrays and for Python objects."""

import asyncio
import functools
import operator

import carriers
import numpy as np
import pytest
import reference
import torch
from faults import in_step
from ranks import each, on_all, ordinary, outcomes
from sharing import BULK, LARGE, WORLDS, all_bits, cancelled, counts, fail, held, refused, sample

from asynccoll import RemoteError

ALGORITHMS = ("auto", "ring", "tree")


@pytest.mark.parametrize("size", WORLDS)
async def test_every_op_and_dtype_is_right_in_the_roots_own_container(world, size):
    rng = np.random.default_rng(size)
    wrong = []
    async with world(size) as comms:
        for op, dtype, count, algorithm, number in sample(size, ALGORITHMS):
            root = number % size
            values = reference.inputs(dtype, op, size, (count,), rng)
            given = held(size, dtype, values, number)
            results = await on_all(
                comms,
                lambda c: c.reduce(given[c.rank].value, op, root, algorithm=algorithm),  # noqa: B023
            )
            where = f"{op} {dtype}[{count}] {algorithm} to {root} of {size}"
            assert [result is None for result in results] == [rank != root for rank in range(size)], where
            assert carriers.kind(results[root]) == carriers.kind(given[root].value), where
            if fault := reference.difference(op, dtype, values, carriers.bits(results[root])):
                wrong.append(f"{where}: {fault}")
            wrong += [f"{where}: {damage}" for one in given if (damage := one.damage())]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("size", WORLDS)
async def test_every_root_and_count_is_exact(world, size):
    """Each rank adds a power of its own: a rank that is missing or counted twice shows in the sum."""
    async with world(size) as comms:
        for algorithm in ALGORITHMS:
            for root in ordinary(range(size), (0, size - 1)):

                async def rank(comm, root=root, algorithm=algorithm):
                    values = [np.arange(n) + 8 ** (comm.rank % 20) for n in counts(size)]
                    return await asyncio.gather(
                        *(comm.reduce(value, "sum", root, algorithm=algorithm) for value in values)
                    )

                results = await on_all(comms, rank)
                total = sum(8 ** (rank % 20) for rank in range(size))
                for at, found in enumerate(results):
                    for n, result in zip(counts(size), found, strict=True):
                        if at == root:
                            np.testing.assert_array_equal(result, np.arange(n) * size + total)
                        else:
                            assert result is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_large_arrays_are_right(world, size, algorithm):
    rng = np.random.default_rng(3)
    async with world(size, conditions=BULK) as comms:
        for op, dtype in (("sum", "float16"), ("max", "float64"), ("prod", "complex64"), ("avg", "float32")):
            values = reference.inputs(dtype, op, size, (ordinary(LARGE, 5003),), rng)
            results = await on_all(
                comms,
                lambda c: c.reduce(values[c.rank], op, size - 1, algorithm=algorithm),  # noqa: B023
            )
            assert reference.difference(op, dtype, values, results[-1]) is None


@pytest.mark.fixed_size("is about the length of a sum in half types: with 64 ranks gigabytes of it")
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
async def test_half_types_beyond_two_planes_are_right(world, algorithm):
    """They are summed in float32 on two planes of 8 MiB in turn, here 2 Mi elements each."""
    rng = np.random.default_rng(5)
    async with world(2, conditions=BULK) as comms:
        values = [rng.normal(0, 4, (4 << 20) + 5).astype(np.float16) for _ in comms]
        results = await on_all(comms, lambda c: c.reduce(values[c.rank], "sum", 1, algorithm=algorithm))
    assert reference.difference("sum", "float16", values, results[1]) is None


async def test_0_d_arrays_scalars_and_many_dimensions_keep_their_shape(world):
    async with world(3) as comms:
        for value in (np.float32(2), np.array(2.0), torch.ones(2, 0, 3), np.ones((2, 3, 4)).T):
            results = await on_all(comms, lambda c, value=value: c.reduce(value, root=1))
            assert type(results[1]) is type(value)
            assert results[1].shape == value.shape
            np.testing.assert_array_equal(results[1], np.asarray(value) * len(comms))


@pytest.mark.parametrize("size", [2, 3, 5])
async def test_repeats_give_the_same_bits(world, size):
    values = np.random.default_rng(1).normal(size=(size, 5003)).astype(np.float32)
    async with world(size) as comms:
        for algorithm in ALGORITHMS:

            def start(comm, algorithm=algorithm):
                return comm.reduce(values[comm.rank], root=1, algorithm=algorithm)

            found = await all_bits(comms, start, 5)
            assert [len(bits) for bits in found] == [1] * size


async def test_out_is_used_at_the_root_and_nowhere_else(world):
    async with world(3) as comms:
        size = len(comms)
        outs = [np.full(8, 9.0, np.float32)[::2] for _ in comms]
        results = await on_all(
            comms, lambda c: c.reduce(np.full(4, c.rank, np.float32), root=1, out=outs[c.rank])
        )
        assert [result is out for result, out in zip(results, outs, strict=True)] == [
            r == 1 for r in range(size)
        ]
        assert [out.tolist() for out in outs] == [
            [sum(range(size)) if rank == 1 else 9] * 4 for rank in range(size)
        ]
        assert outs[1].base[1::2].tolist() == [9] * 4
        own = [np.full(4, rank) for rank in range(size)]
        await on_all(comms, lambda c: c.reduce(own[c.rank], root=1, out=own[c.rank]))
        assert [value[0] for value in own] == [
            sum(range(size)) if rank == 1 else rank for rank in range(size)
        ]


async def test_objects_are_folded_in_rank_order_to_every_root(world):
    calls = []
    async with world(4) as comms:
        size = len(comms)
        names = [str(rank % 10) for rank in range(size)]
        for root in ordinary(range(size), (0, size - 1)):

            def function_of(rank):
                def pair(a, b):
                    calls.append(rank)
                    return f"({a}{b})"

                return pair

            results = await on_all(comms, lambda c: c.reduce(names[c.rank], function_of(c.rank), root))  # noqa: B023
            right = functools.reduce(lambda a, b: f"({a}{b})", names)
            assert results == [right if rank == root else None for rank in range(size)]
            totals = await on_all(comms, lambda c: c.reduce(2**70 + c.rank, "avg", root))  # noqa: B023
            right = (2**70 * size + sum(range(size))) / size
            assert totals == [right if rank == root else None for rank in range(size)]
        assert set(calls) == {0}
        matrices = [np.array([[1, rank], [0, 1]]) for rank in range(size)]
        results = await each(comms, "reduce", matrices, np.matmul, 2)
        np.testing.assert_array_equal(results[2], functools.reduce(np.matmul, matrices))


@pytest.mark.inline_only(
    "a mesh in a thread of its own goes on, and is done, while the test waits or makes its next call"
)
@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_cancel_ends_it_everywhere(world, rank):
    async with world(3, conditions=BULK) as comms:
        for algorithm in ("ring", "tree"):

            def start(comm, memory, algorithm=algorithm):
                value = np.arange(float(LARGE))
                return comm.reduce(value, root=1, out=np.frombuffer(memory), algorithm=algorithm)

            await cancelled(comms, start, rank, lambda other: other != 1)


async def test_a_function_that_raises_is_a_remote_error_on_every_rank(world):
    async with world(4) as comms:
        for root in (0, 2):
            await fail(comms, lambda c, function, root=root: c.reduce(c.rank, function, root))
        for error in await outcomes(comms, lambda c: c.reduce("a" if c.rank == 1 else 1, "sum", 2)):
            assert type(error) is RemoteError
            assert error.type_name == "TypeError"
        await in_step(comms)


async def test_wrong_arguments_are_refused_on_every_rank(world):
    async with world(2) as comms:
        size = len(comms)
        await refused(comms, lambda c: c.reduce(1, root=size), ValueError, f"root={size}")
        await refused(
            comms, lambda c: c.reduce(np.ones(2), algorithm="doubling"), ValueError, "auto, ring, tree"
        )
        await refused(comms, lambda c: c.reduce([1], algorithm="rign"), ValueError, "auto, ring, tree")
        await refused(comms, lambda c: c.reduce(np.ones(2, int), "avg"), TypeError, "avg of int64")
        await refused(comms, lambda c: c.reduce(1, "median"), ValueError, "median")
        errors = await outcomes(comms, lambda c: c.reduce([1], out=np.ones(1), root=1))
        assert [type(error) for error in errors] == [
            TypeError if rank == 1 else RemoteError for rank in range(size)
        ]
        await in_step(comms)
        assert (await each(comms, "reduce", [3] * size, operator.mul))[0] == 3**size
