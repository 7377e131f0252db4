"""Reduce-scatter: each rank gets its part of the rows of the whole result."""

import asyncio

import carriers
import numpy as np
import pytest
import reference
import torch
from ranks import on_all, ordinary
from sharing import BULK, LARGE, WORLDS, all_bits, cancelled, counts, held, refused, sample

ALGORITHMS = ("auto", "ring", "tree")


def part_of(values, rank):
    """This rank's part of each array."""
    return [np.array_split(value, len(values))[rank] for value in values]


@pytest.mark.parametrize("size", WORLDS)
async def test_every_op_and_dtype_is_right_in_each_ranks_own_container(world, size):
    rng = np.random.default_rng(size)
    wrong = []
    async with world(size) as comms:
        for op, dtype, count, algorithm, number in sample(size, ALGORITHMS):
            values = reference.inputs(dtype, op, size, (count,), rng)
            given = held(size, dtype, values, number)
            results = await on_all(
                comms,
                lambda c: c.reduce_scatter(given[c.rank].value, op, algorithm=algorithm),  # noqa: B023
            )
            where = f"{op} {dtype}[{count}] {algorithm} of {size}"
            for one, result in zip(given, results, strict=True):
                assert carriers.kind(result) == carriers.kind(one.value), where
                wrong += [f"{where}: {damage}" for damage in [one.damage()] if damage]
            found = [carriers.bits(result) for result in results]
            assert [len(part) for part in found] == [len(part) for part in np.array_split(values[0], size)]
            if fault := reference.difference(op, dtype, values, np.concatenate(found)):
                wrong.append(f"{where}: {fault}")
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("size", WORLDS)
async def test_parts_are_those_of_array_split_along_axis_0(world, size):
    async with world(size) as comms:
        for algorithm in ALGORITHMS:
            for inner in ((), (3,), (2, 0), (1, 5)):

                async def rank(comm, algorithm=algorithm, inner=inner):
                    values = [
                        np.arange(n * int(np.prod(inner))).reshape(n, *inner) + 8 ** (comm.rank % 20)
                        for n in counts(size)
                    ]
                    return await asyncio.gather(
                        *(comm.reduce_scatter(value, algorithm=algorithm) for value in values)
                    )

                results = await on_all(comms, rank)
                total = sum(8 ** (rank % 20) for rank in range(size))
                for k, n in enumerate(counts(size)):
                    whole = np.arange(n * int(np.prod(inner))).reshape(n, *inner) * size + total
                    for found, right in zip(results, np.array_split(whole, size), strict=True):
                        assert found[k].shape == right.shape
                        np.testing.assert_array_equal(found[k], right)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_large_arrays_are_right(world, size, algorithm):
    rng = np.random.default_rng(3)
    async with world(size, conditions=BULK) as comms:
        for op, dtype in (("sum", "float16"), ("max", "float64"), ("prod", "complex64"), ("avg", "float32")):
            values = reference.inputs(dtype, op, size, (ordinary(LARGE, 5003),), rng)
            results = await on_all(
                comms,
                lambda c: c.reduce_scatter(values[c.rank], op, algorithm=algorithm),  # noqa: B023
            )
            for rank, result in enumerate(results):
                assert reference.difference(op, dtype, part_of(values, rank), result) is None


@pytest.mark.fixed_size("is about the length of a sum in half types: with 64 ranks gigabytes of it")
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
async def test_half_types_beyond_two_planes_are_right(world, algorithm):
    """They are summed in float32 on two planes of 8 MiB in turn, here 2 Mi elements each."""
    rng = np.random.default_rng(5)
    async with world(2, conditions=BULK) as comms:
        values = [rng.normal(0, 4, ((1 << 20) + 1, 4)).astype(np.float16) for _ in comms]
        results = await on_all(comms, lambda c: c.reduce_scatter(values[c.rank], algorithm=algorithm))
    for rank, result in enumerate(results):
        assert reference.difference("sum", "float16", part_of(values, rank), result) is None


@pytest.mark.parametrize("size", [2, 3, 5])
async def test_repeats_give_the_same_bits(world, size):
    values = np.random.default_rng(1).normal(size=(size, 5003)).astype(np.float32)
    async with world(size) as comms:
        for algorithm in ALGORITHMS:

            def start(comm, algorithm=algorithm):
                return comm.reduce_scatter(values[comm.rank], algorithm=algorithm)

            found = await all_bits(comms, start, 5)
            assert [len(bits) for bits in found] == [1] * size


@pytest.mark.parametrize("layout", ["contiguous", "strided", "big-endian"])
async def test_out_receives_the_part(world, layout):
    async with world(3) as comms:
        size = len(comms)
        rows = 3 * size + 1
        parts = np.array_split(np.arange(rows * 2.0).reshape(rows, 2) * size, size)
        outs = [carriers.hold(f"numpy/{layout}", "float64", np.zeros_like(part)) for part in parts]
        results = await on_all(
            comms, lambda c: c.reduce_scatter(np.arange(rows * 2.0).reshape(rows, 2), out=outs[c.rank].value)
        )
        for result, out, part in zip(results, outs, parts, strict=True):
            assert result is out.value
            assert out.damage(part) is None


async def test_a_result_keeps_no_more_memory_than_its_part(world):
    async with world(4) as comms:
        for result in await on_all(comms, lambda c: c.reduce_scatter(np.ones((400, 3)))):
            base = result if result.base is None else result.base
            assert base.nbytes == result.nbytes


@pytest.mark.torch
async def test_the_part_of_a_tensor_is_a_tensor_with_the_other_dimensions(world):
    async with world(3) as comms:
        size = len(comms)
        results = await on_all(
            comms, lambda c: c.reduce_scatter(torch.ones(2 * size + 1, 4, dtype=torch.bfloat16))
        )
        assert [tuple(result.shape) for result in results] == [(3, 4)] + [(2, 4)] * (size - 1)
        assert all(torch.equal(result, torch.full_like(result, size)) for result in results)


@pytest.mark.inline_only(
    "a mesh in a thread of its own goes on, and is done, while the test waits or makes its next call"
)
@pytest.mark.parametrize("rank", [0, 2])
async def test_a_cancel_ends_it_everywhere(world, rank):
    async with world(3, conditions=BULK) as comms:
        for algorithm in ("ring", "tree"):

            def start(comm, memory, algorithm=algorithm):
                value = np.ones(LARGE)
                mine = len(np.array_split(value, len(comms))[comm.rank])
                return comm.reduce_scatter(value, out=np.frombuffer(memory)[:mine], algorithm=algorithm)

            await cancelled(comms, start, rank)


async def test_wrong_arguments_are_refused_on_every_rank(world):
    async with world(2) as comms:
        for value, kind, text in (
            (np.array(1.0), ValueError, "0-d array"),
            (np.float32(1), ValueError, "0-d array"),
            (torch.tensor(1.0), ValueError, "0-d array"),
            ([1, 2], TypeError, "pass numpy.asarray(value)"),
            (5, TypeError, "allreduce()"),
            (np.array(["a"]), TypeError, "<U1"),
        ):
            await refused(comms, lambda c, value=value: c.reduce_scatter(value), kind, text)
        await refused(comms, lambda c: c.reduce_scatter(np.ones(4), max), TypeError, "named op")
        await refused(comms, lambda c: c.reduce_scatter(np.ones(4, int), "avg"), TypeError, "avg of int64")
        await refused(
            comms, lambda c: c.reduce_scatter(np.ones(4), out=np.ones(4)), ValueError, "of shape (4,)"
        )
        await refused(comms, lambda c: c.reduce_scatter(np.ones(4), out=[1]), TypeError, "out= must be")
        await refused(
            comms,
            lambda c: c.reduce_scatter(np.ones(4), algorithm="doubling"),
            ValueError,
            "auto, ring, tree",
        )
