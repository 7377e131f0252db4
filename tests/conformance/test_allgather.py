"""Allgather: everybody's value on every rank, in rank order, whatever the shapes and sizes."""

import array
import asyncio

import carriers
import numpy as np
import pytest
import reference
import torch
from ranks import each, filled, in_turn, on_all, ordinary, outcomes

from asynccoll import CollectiveMismatch, RemoteError
from asynccoll.sim.driver import Conditions

ALGORITHMS = ("auto", "ring", "doubling")
BULK = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 20)


@pytest.mark.parametrize("size", [*range(1, 10), 12, 16, 17, 24, 33])
async def test_values_of_differing_shapes_come_in_rank_order(world, size):
    """Empty ones, 0-d ones, small ones and some beyond 4 KiB, a different one on each rank and in each call."""
    shapes = [(0,), (), (3,), (2, 5), (600,), (4, 0, 3), (1, 1, 1), (40, 20)]
    async with world(size) as comms:
        for algorithm in ALGORITHMS:

            def value(rank, call):
                return np.full(shapes[(rank + call) % len(shapes)], 100.0 * call + rank)

            async def rank(comm, algorithm=algorithm):
                works = [comm.allgather(value(comm.rank, call), algorithm=algorithm) for call in range(4)]
                return await asyncio.gather(*works)

            for at, gathered in enumerate(await on_all(comms, rank)):
                for call, result in enumerate(gathered):
                    assert type(result) is list
                    assert len(result) == size
                    for origin, found in enumerate(result):
                        right = value(origin, call)
                        assert found.shape == right.shape, (algorithm, at, origin)
                        assert found.tobytes() == right.tobytes(), (algorithm, at, origin)


@pytest.mark.parametrize("boundary", [4096, 1 << 16, 1 << 18])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_sizes_around_each_boundary_arrive_whole(world, size, algorithm, boundary):
    """All ranks at one size, and sizes on both sides of the boundary at once."""
    rng = np.random.default_rng(boundary + size)
    async with world(size, conditions=BULK) as comms:
        mixed = [rank % 3 - 1 for rank in range(size)]
        for around in ordinary(([0] * size, [1] * size, [-1] * size, mixed), (mixed,)):
            values = [rng.integers(0, 256, boundary + extra, np.uint8) for extra in around]
            for result in await each(comms, "allgather", values, algorithm=algorithm):
                for origin, (found, value) in enumerate(zip(result, values, strict=True)):
                    assert found.tobytes() == value.tobytes(), (around, origin)


async def test_one_large_value_among_empty_ones(world):
    async with world(4, conditions=BULK) as comms:
        for holder in ordinary(range(4), (0, len(comms) - 1)):
            for algorithm in ALGORITHMS:
                values = [np.arange(100_000 if rank == holder else 0) for rank in range(len(comms))]
                for result in await each(comms, "allgather", values, algorithm=algorithm):
                    assert [len(found) for found in result] == [len(value) for value in values]
                    np.testing.assert_array_equal(result[holder], values[holder])


@pytest.mark.torch
@pytest.mark.parametrize("dtype", reference.DTYPES)
async def test_every_rank_gets_all_values_in_its_own_container_with_the_same_bits(world, dtype):
    rng = np.random.default_rng(1)
    async with world(5) as comms:
        size = len(comms)
        names = [carriers.of_rank("mixed", rank, dtype, "1-d", "new", rank) for rank in range(size)]
        values = reference.inputs(dtype, "sum", size, (6,), rng)
        for rank, name in enumerate(names):
            if name.endswith("/expanded"):
                values[rank] = np.broadcast_to(values[rank][:1], (6,)).copy()
        held = [carriers.hold(name, dtype, bits) for name, bits in zip(names, values, strict=True)]
        results = await each(comms, "allgather", [one.value for one in held])
        for one, result in zip(held, results, strict=True):
            assert {carriers.kind(found) for found in result} == {carriers.kind(one.value)}
            assert [carriers.bits(found).tobytes() for found in result] == [bits.tobytes() for bits in values]
            for found in result:
                assert not any(carriers.share_memory(found, other.value) for other in ordinary(held, [one]))
            assert one.damage() is None


async def test_scalars_and_arrays_meet_and_each_rank_keeps_its_kind_where_the_shape_allows(world):
    values = [np.float64(1.5), np.arange(3.0), array.array("d", [7, 8]), memoryview(np.array(2.5))]
    async with world(4) as comms:
        results = await each(comms, "allgather", in_turn(comms, values))
        numbers = in_turn(comms, [1.5, [0, 1, 2], [7, 8], 2.5])
        kinds = [
            in_turn(comms, ["float64", "ndarray", "ndarray", "float64"]),
            ["ndarray"] * len(comms),
            in_turn(comms, ["ndarray", "array", "array", "ndarray"]),
            ["memoryview"] * len(comms),
        ]
    for rank, result in enumerate(results):
        assert [np.asarray(found).tolist() for found in result] == numbers
        assert [type(found).__name__ for found in result] == kinds[rank % 4]


async def test_objects_come_in_rank_order_as_independent_copies(world):
    async with world(5) as comms:
        values = in_turn(comms, [None, {"rank": [1]}, "two" * 5000, 3**100, [4, [4]]])
        results = await each(comms, "allgather", values)
        for result in results:
            assert result == values
        for origin in (1, 4):
            ids = {id(one) for one in [values[origin], *(result[origin] for result in results)]}
            assert len(ids) == len(comms) + 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_out_receives_every_value_where_it_belongs(world, algorithm):
    layouts = ["numpy/contiguous", "numpy/strided", "torch/strided", "numpy/big-endian", "torch/offset"]
    async with world(4) as comms:
        counts = in_turn(comms, [3, 0, 9000, 700])
        values = [np.arange(count, dtype=np.int32) + rank for rank, count in enumerate(counts)]
        held = [
            [
                carriers.hold(layouts[(rank + k) % 5], "int32", np.zeros(n, np.int32))
                for k, n in enumerate(counts)
            ]
            for rank in range(len(comms))
        ]
        outs = [[one.value for one in row] for row in held]
        results = await on_all(
            comms, lambda c: c.allgather(values[c.rank], out=outs[c.rank], algorithm=algorithm)
        )
    for row, result in zip(held, results, strict=True):
        for one, found, value in zip(row, result, values, strict=True):
            assert found is one.value
            assert carriers.bits(found).tolist() == value.tolist()
            assert one.damage(value) is None


async def test_the_rows_of_one_array_can_be_out(world):
    async with world(3) as comms:
        size = len(comms)
        tables = [np.zeros((size, 2000)) for _ in comms]
        await on_all(comms, lambda c: c.allgather(np.full(2000, c.rank + 1.0), out=list(tables[c.rank])))
        for table in tables:
            assert (table == np.arange(1.0, size + 1)[:, None]).all()


async def test_an_out_that_does_not_fit_is_an_error_on_every_rank(world):
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    async with world(2) as comms:
        size = len(comms)
        fitting = [np.zeros(3) for _ in range(size - 1)]
        for out, kind in (
            ([np.zeros(3)], ValueError),
            ([*fitting, np.zeros(3, np.float32)], TypeError),
            ([*fitting, [0.0] * 3], TypeError),
            ([*fitting, frozen], ValueError),
        ):
            errors = await outcomes(comms, lambda comm, out=out: comm.allgather(np.ones(3), out=out))
            assert [type(error) for error in errors] == [kind] * size, (out, errors)
            errors = await outcomes(
                comms, lambda comm, out=out: comm.allgather(np.ones(3), out=out if comm.rank == 1 else None)
            )
            for rank, error in enumerate(errors):
                assert type(error) is (kind if rank == 1 else RemoteError), (out, errors)
        for error in await outcomes(comms, lambda comm: comm.allgather("text", out=[np.zeros(1)] * size)):
            assert type(error) is TypeError
        assert await on_all(comms, lambda comm: comm.allgather(comm.rank)) == [list(range(size))] * size


async def test_an_out_of_another_shape_is_an_error_where_it_was_passed(world):
    """Shapes are known only when they arrive: a rank that has its result by then keeps it, and it is right."""
    async with world(2) as comms:
        size = len(comms)
        for shape in ((4,), (2,), (3, 1), (), (0,)):
            for place in sorted({0, 1, size - 1}):
                out = [np.zeros(3) for _ in comms]
                out[place] = np.zeros(shape)
                results = await outcomes(
                    comms,
                    lambda comm, out=out: comm.allgather(np.ones(3), out=out if comm.rank == 1 else None),
                )
                error = results.pop(1)
                assert type(error) is ValueError
                assert f"rank {place}" in str(error)
                for other in results:
                    if not isinstance(other, RemoteError):
                        assert [one.tolist() for one in other] == [[1] * 3] * size
        assert await on_all(comms, lambda comm: comm.allgather(comm.rank)) == [list(range(size))] * size


@pytest.mark.torch
async def test_dtypes_and_paths_must_agree(world):
    async with world(3) as comms:
        for odd in (np.ones(2, np.float32), torch.ones(2), np.ones(2, np.int64), [1.0, 1.0], 1.0):
            values = filled(comms, [np.ones(2), odd, np.ones(2)])
            errors = await outcomes(comms, lambda comm, values=values: comm.allgather(values[comm.rank]))
            for error in errors:
                assert type(error) is CollectiveMismatch, (odd, error)
                assert error.field in ("dtype", "path")
                assert set(error.values) == set(range(len(comms)))
        size = len(comms)
        assert await on_all(comms, lambda comm: comm.allgather(comm.rank)) == [list(range(size))] * size
