"""Gather: every rank's value at the root, in rank order, whatever the shapes and sizes, and nothing elsewhere."""

import asyncio

import carriers
import numpy as np
import pytest
import reference
from exchanges import (
    BOUNDARIES,
    BULK,
    SHAPES,
    DoesNotPickle,
    DoesNotUnpickle,
    cancelled_by,
    failed_at,
    refused_at,
    shaped,
    unfit_outs,
)
from ranks import each, in_turn, on_all, ordinary, outcomes
from verbs import same

from asynccoll import RemoteError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
async def test_values_of_differing_shapes_come_to_every_root_in_rank_order(world, size):
    """A different shape on each rank and in each call, and objects; several at once."""
    async with world(size) as comms:

        def value(rank, call):
            if call == 4:
                return {"rank": rank, "data": [rank] * (rank * 100)}
            return shaped(SHAPES[(rank + call) % len(SHAPES)], 100 * call + rank)

        for root in ordinary(range(size), (0, 1, size - 1)):

            async def rank(comm, root=root):
                return await asyncio.gather(*(comm.gather(value(comm.rank, n), root) for n in range(5)))

            for number, results in enumerate(await on_all(comms, rank)):
                for call, result in enumerate(results):
                    if number != root:
                        assert result is None
                        continue
                    assert type(result) is list
                    assert len(result) == size
                    for origin, found in enumerate(result):
                        assert same(found, value(origin, call)), (root, origin, call)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("size", "root"), [(2, 1), (3, 0), (5, 3)])
async def test_sizes_around_each_boundary_arrive_whole(world, size, root, boundary):
    """All ranks at one size, and sizes on both sides of the boundary at once; arrays and pickles."""
    rng = np.random.default_rng(boundary + size)
    async with world(size, conditions=BULK) as comms:
        mixed = [rank % 3 - 1 for rank in range(size)]
        for around in ordinary(([0] * size, [1] * size, mixed), (mixed,)):
            values = [rng.integers(0, 256, boundary + extra, np.uint8) for extra in around]
            results = await each(comms, "gather", values, root)
            assert [result is None for result in results] == [rank != root for rank in range(size)]
            for found, value in zip(results[root], values, strict=True):
                assert same(found, value)
            pickled = [value.tobytes()[: boundary - 18] for value in values]  # near the boundary as pickles
            results = await each(comms, "gather", pickled, root)
            assert results[root] == pickled


async def test_one_large_value_among_empty_ones(world):
    async with world(5, conditions=BULK) as comms:
        for holder in ordinary(range(5), (0, len(comms) - 1)):
            values = [np.arange(100_000 if rank == holder else 0) for rank in range(len(comms))]
            result = (await each(comms, "gather", values, 2))[2]
            assert all(same(found, value) for found, value in zip(result, values, strict=True))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", reference.DTYPES)
async def test_the_root_gets_all_values_in_its_own_container_with_the_same_bits(world, dtype):
    """NaN payloads and negative zeros too: nothing is computed. Every layout is read right, and none is written to."""
    rng = np.random.default_rng(2)
    async with world(5) as comms:
        size = len(comms)
        names = [carriers.of_rank("mixed", rank, dtype, "1-d", "new", rank) for rank in range(size)]
        values = reference.inputs(dtype, "sum", size, (6,), rng)
        for rank, name in enumerate(names):
            if name.endswith("/expanded"):
                values[rank] = np.broadcast_to(values[rank][:1], (6,)).copy()
        held = [carriers.hold(name, dtype, bits) for name, bits in zip(names, values, strict=True)]
        for root in ordinary(range(size), (0, size - 1)):
            result = (await each(comms, "gather", [one.value for one in held], root))[root]
            assert {carriers.kind(found) for found in result} == {carriers.kind(held[root].value)}
            assert [carriers.bits(found).tobytes() for found in result] == [bits.tobytes() for bits in values]
            for found in result:
                assert carriers.memory(found).flags.writeable
                assert not any(carriers.share_memory(found, one.value) for one in ordinary(held, held[:2]))
            assert [one.damage() for one in held] == [None] * size


async def test_objects_are_independent_copies(world):
    async with world(4) as comms:
        values = in_turn(comms, [{"rank": [1]}, [4, [4]], "two" * 5000, 3**100])
        result = (await each(comms, "gather", values, 1))[1]
        assert result == values
        assert result[0] is not values[0]
        assert result[1] is not values[1]
        assert result[1][1] is not values[1][1]


@pytest.mark.parametrize("count", [3, 9_000])
async def test_the_content_at_the_call_counts(world, count):
    async with world(3) as comms:
        arrays = [np.full(count, comm.rank + 1.0) for comm in comms]
        lists = [[comm.rank] for comm in comms]
        works = [(comm.gather(arrays[comm.rank]), comm.gather(lists[comm.rank])) for comm in comms]
        for array, numbers in zip(arrays, lists, strict=True):
            array[:] = -1
            numbers.append("later")
        for number, (first, second) in enumerate(works):
            found, listed = await first, await second
            if number:
                assert found is listed is None
            else:
                assert [part.tolist() for part in found] == [[r + 1.0] * count for r in range(len(comms))]
                assert listed == [[rank] for rank in range(len(comms))]


async def test_out_receives_every_value_where_it_belongs(world):
    layouts = ["numpy/contiguous", "numpy/strided", "torch/strided", "numpy/big-endian", "torch/offset"]
    async with world(4) as comms:
        counts = in_turn(comms, [3, 0, 9000, 700])
        values = [np.arange(count, dtype=np.int32) + rank for rank, count in enumerate(counts)]
        for root in ordinary(range(4), (1,)):
            held = [
                carriers.hold(layouts[(root + k) % 5], "int32", np.zeros(n, np.int32))
                for k, n in enumerate(counts)
            ]
            outs = [one.value for one in held]
            results = await on_all(
                comms,
                lambda c, root=root, outs=outs: c.gather(
                    values[c.rank], root, out=outs if c.rank == root else None
                ),
            )
            for one, found, value in zip(held, results[root], values, strict=True):
                assert found is one.value
                assert carriers.bits(found).tolist() == value.tolist()
                assert one.damage(value) is None


async def test_the_rows_of_one_array_can_be_out(world):
    async with world(3) as comms:
        size = len(comms)
        table = np.zeros((size, 2000))
        await on_all(
            comms, lambda c: c.gather(np.full(2000, c.rank + 1.0), out=None if c.rank else list(table))
        )
        assert (table == np.arange(1.0, size + 1)[:, None]).all()


async def test_an_out_that_does_not_fit_is_an_error_on_every_rank(world):
    async with world(3) as comms:
        size = len(comms)
        for out, kind, says in unfit_outs(size):
            await refused_at(
                comms,
                1,
                lambda comm, out=out: comm.gather(np.ones(3), 1, out=out if comm.rank == 1 else None),
                kind,
                says,
            )
        await refused_at(
            comms,
            0,
            lambda comm: comm.gather("text", out=None if comm.rank else [np.zeros(3)] * size),
            TypeError,
            "gather of a str",
        )


async def test_out_anywhere_but_at_the_root_is_refused(world):
    async with world(3) as comms:
        outs = [np.zeros(3) for _ in comms]
        await refused_at(
            comms,
            1,
            lambda comm: comm.gather(np.ones(3), 0, out=outs if comm.rank == 1 else None),
            ValueError,
            "is for the root of a gather, rank 0",
        )


async def test_an_out_of_another_shape_is_an_error_at_the_root(world):
    async with world(3) as comms:
        for shape in ((4,), (2,), (3, 1), (), (0,)):
            for place in ordinary(range(len(comms)), (0, 1, len(comms) - 1)):
                out = [np.zeros(shape if rank == place else 3) for rank in range(len(comms))]
                works = [comm.gather(np.ones(3), 1, out=out if comm.rank == 1 else None) for comm in comms]
                await failed_at(comms, 1, works, ValueError, lambda _, result: result is None)


async def test_an_impossible_root_is_an_error_on_every_rank(world):
    async with world(2) as comms:
        size = len(comms)
        for root, kind in ((size, ValueError), (-1, ValueError), (1.0, TypeError), ("0", TypeError)):
            for error in await outcomes(comms, lambda comm, root=root: comm.gather(1, root)):
                assert type(error) is kind
                assert str(root) in str(error)
        await refused_at(
            comms, 1, lambda comm: comm.gather(1, size + 3 if comm.rank == 1 else 0), ValueError, "root"
        )
        assert (await each(comms, "gather", list(range(size)), np.int64(1)))[1] == list(range(size))


async def test_a_value_that_does_not_pickle_is_an_error_on_every_rank(world):
    async with world(4) as comms:
        for rank in ordinary(range(len(comms)), (0, 2, len(comms) - 1)):
            await refused_at(
                comms,
                rank,
                lambda comm, rank=rank: comm.gather(DoesNotPickle() if comm.rank == rank else 1, 2),
                TypeError,
                "kept at home",
            )


@pytest.mark.parametrize("size", [0, 100_000])
async def test_a_value_that_does_not_unpickle_is_an_error_at_the_root(world, size):
    async with world(4) as comms:
        for origin in ordinary(range(len(comms)), (0, 2, len(comms) - 1)):
            works = [comm.gather(DoesNotUnpickle(size) if comm.rank == origin else 1, 2) for comm in comms]
            await failed_at(comms, 2, works, LookupError, lambda _, result: result is None)


@pytest.mark.parametrize("count", [100, 1 << 17])
async def test_a_cancel_ends_it_everywhere_and_gives_the_memory_back(world, count):
    async with world(3) as comms:
        outs = [np.zeros(count) for _ in comms]
        for culprit in (0, 1):
            await cancelled_by(
                comms,
                culprit,
                lambda comm: comm.gather(np.ones(count), out=None if comm.rank else outs),
                lambda rank: [] if rank else outs,
            )


async def test_a_refusal_of_one_rank_leaves_the_next_gather_right(world):
    async with world(3) as comms:
        pairs = [
            (comm.gather(np.array(["text"]) if comm.rank == 1 else np.ones(3)), comm.gather(comm.rank))
            for comm in comms
        ]
        for comm, (wrong, right) in zip(comms, pairs, strict=True):
            with pytest.raises(TypeError if comm.rank == 1 else RemoteError):
                await wrong
            assert await right == (None if comm.rank else list(range(len(comms))))
