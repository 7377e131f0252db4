"""Alltoall: what every rank has for this one, in rank order, whatever the shapes and sizes."""

import array
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
from ranks import on_all, ordinary, outcomes
from verbs import same

from asynccoll import RemoteError


def listed(comms, make, rank):
    """``make(from, to)`` for all that ``rank`` sends."""
    return [make(rank, to) for to in range(len(comms))]


async def exchange(comms, make, **options):
    """Everybody sends ``make(from, to)``, and must get it."""
    results = await on_all(comms, lambda comm: comm.alltoall(listed(comms, make, comm.rank), **options))
    for rank, result in enumerate(results):
        assert type(result) is list
        assert len(result) == len(comms)
        for origin, found in enumerate(result):
            assert same(found, make(origin, rank)), (origin, rank, found)
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
async def test_values_of_differing_shapes_come_in_rank_order(world, size):
    """Uneven: another shape for each pair in each call; objects too; several at once."""
    async with world(size) as comms:

        def array_of(call):
            return lambda a, b: shaped(SHAPES[(a + 3 * b + call) % len(SHAPES)], 100 * a + b)

        def object_of(a, b):
            return {"from": a, "to": b, "data": [a] * (b * 100)}

        await asyncio.gather(
            *(exchange(comms, array_of(call)) for call in range(4)), exchange(comms, object_of)
        )


@pytest.mark.fixed_size("a large value for each pair")
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_sizes_around_each_boundary_arrive_whole(world, size, boundary):
    """All pairs at one size, and sizes on both sides of the boundary at once; arrays and pickles."""
    noise = np.random.default_rng(boundary).integers(0, 256, boundary + size + 1, np.uint8)
    async with world(size, conditions=BULK) as comms:
        for around in (lambda a, b: 0, lambda a, b: 1, lambda a, b: (a + b) % 3 - 1):
            await exchange(comms, lambda a, b, f=around: noise[a : a + boundary + f(a, b)])
        await exchange(comms, lambda a, b: noise[a : a + boundary - 18 + b % 3].tobytes())


async def test_one_pair_has_much_and_the_others_nothing(world):
    async with world(5, conditions=BULK) as comms:
        for sender, receiver in ((0, 4), (4, 0), (2, 2), (3, 1)):
            await exchange(
                comms,
                lambda a, b, pair=(sender, receiver): np.arange(100_000 if (a, b) == pair else 0),
            )


async def test_ranks_that_call_late_delay_nobodys_next_operation(world):
    """Everything for an operation that was not called yet is taken up when it is."""
    async with world(4) as comms:
        makes = [lambda a, b, n=n: np.full(n + b, a) for n in (3, 700, 40_000)]
        works = [[comm.alltoall(listed(comms, make, comm.rank)) for make in makes] for comm in comms[1:]]
        await asyncio.sleep(0)
        works.insert(0, [comms[0].alltoall(listed(comms, make, 0)) for make in makes])
        for rank, mine in reversed([*enumerate(works)]):
            for make, work in zip(makes, mine, strict=True):
                for origin, found in enumerate(await work):
                    assert same(found, make(origin, rank))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", reference.DTYPES)
async def test_values_come_in_the_container_of_what_was_passed_with_the_same_bits(world, dtype):
    """From rank i in that of the rank's own value for i. Every layout is read right, and none is written to."""
    rng = np.random.default_rng(4)
    async with world(4) as comms:
        size = len(comms)
        held = []
        for rank in range(size):
            row = []
            for to, bits in enumerate(reference.inputs(dtype, "sum", size, (6,), rng)):
                name = carriers.of_rank("mixed", rank + 3 * to, dtype, "1-d", "new", rank)
                if name.endswith("/expanded"):
                    bits = np.broadcast_to(bits[:1], (6,)).copy()
                row.append((carriers.hold(name, dtype, bits), bits))
            held.append(row)
        values = [[one.value for one, _ in row] for row in held]
        for rank, result in enumerate(await on_all(comms, lambda comm: comm.alltoall(values[comm.rank]))):
            for origin, found in enumerate(result):
                assert carriers.kind(found) == carriers.kind(values[rank][origin])
                assert carriers.bits(found).tobytes() == held[origin][rank][1].tobytes()
                assert carriers.memory(found).flags.writeable
                assert not any(carriers.share_memory(found, one) for row in values[:5] for one in row)
        assert {one.damage() for row in held for one, _ in row} == {None}


async def test_scalars_and_arrays_meet_and_each_keeps_its_kind_where_the_shape_allows(world):
    async with world(2) as comms:

        def make(a, b):
            if a == 0:
                return np.float64(b)
            return array.array("d", [7, 8]) if b == 0 else memoryview(np.array(2.5))

        mine = await on_all(comms, lambda comm: comm.alltoall(listed(comms, make, comm.rank)))
        assert type(mine[0][0]) is np.float64
        assert type(mine[0][1]) is np.ndarray
        assert mine[0][1].tolist() == [7, 8]
        assert type(mine[1][0]) is np.ndarray
        assert mine[1][0].tolist() == 1.0
        assert type(mine[1][1]) is memoryview


async def test_objects_are_independent_copies_ones_own_too(world):
    shared = [1, [2]]
    async with world(3) as comms:
        size = len(comms)
        results = await on_all(comms, lambda comm: comm.alltoall([shared] * size))
        assert results == [[shared] * size] * size
        found = [one for result in results for one in result]
        assert len({id(one) for one in [shared, *found]}) == size * size + 1
        assert len({id(one[1]) for one in [shared, *found]}) == size * size + 1


@pytest.mark.parametrize("count", [3, 9_000])
async def test_the_content_at_the_call_counts(world, count):
    async with world(3) as comms:
        size = len(comms)
        arrays = [[np.full(count, 10.0 * a + b) for b in range(size)] for a in range(size)]
        lists = [[[a, b] for b in range(size)] for a in range(size)]
        works = [(c.alltoall(arrays[c.rank]), c.alltoall(lists[c.rank])) for c in comms]
        for row, others in zip(arrays, lists, strict=True):
            for one, numbers in zip(row, others, strict=True):
                one[:] = -1
                numbers.append("later")
            row.clear()
        for rank, (first, second) in enumerate(works):
            assert [one.tolist() for one in await first] == [[10.0 * a + rank] * count for a in range(size)]
            assert await second == [[a, rank] for a in range(size)]


async def test_out_receives_every_value_where_it_belongs(world):
    layouts = ["numpy/contiguous", "numpy/strided", "torch/strided", "numpy/big-endian", "torch/offset"]

    def make(a, b):
        return np.arange((3, 0, 9000, 700)[(a + b) % 4], dtype=np.int32) + a

    async with world(4) as comms:
        size = len(comms)
        held = [
            [
                carriers.hold(layouts[(rank + a) % 5], "int32", np.zeros_like(make(a, rank)))
                for a in range(size)
            ]
            for rank in range(size)
        ]
        outs = [[one.value for one in row] for row in held]
        results = await on_all(comms, lambda c: c.alltoall(listed(comms, make, c.rank), out=outs[c.rank]))
        for rank, (row, result) in enumerate(zip(held, results, strict=True)):
            for a, (one, found) in enumerate(zip(row, result, strict=True)):
                assert found is one.value
                assert carriers.bits(found).tolist() == make(a, rank).tolist()
                assert one.damage(make(a, rank)) is None


async def test_a_table_can_be_transposed_in_its_own_memory(world):
    async with world(3) as comms:
        size = len(comms)
        tables = [np.arange(size * 2000.0).reshape(size, 2000) + 1e6 * comm.rank for comm in comms]
        before = [table.copy() for table in tables]
        await on_all(comms, lambda c: c.alltoall(list(tables[c.rank]), out=list(tables[c.rank])))
        for rank, table in enumerate(tables):
            assert all((table[a] == before[a][rank]).all() for a in range(size))


async def test_an_out_that_does_not_fit_is_an_error_on_every_rank(world):
    async with world(3) as comms:
        size = len(comms)
        for out, kind, says in unfit_outs(size):
            await refused_at(
                comms,
                1,
                lambda comm, out=out: comm.alltoall([np.ones(3)] * size, out=out if comm.rank == 1 else None),
                kind,
                says,
            )
        await refused_at(
            comms,
            0,
            lambda comm: comm.alltoall(["text"] * size, out=None if comm.rank else [np.zeros(3)] * size),
            TypeError,
            "alltoall of a str",
        )


async def test_an_out_of_another_shape_is_an_error_where_it_was_passed(world):
    async with world(3) as comms:
        size = len(comms)
        for count in (3, 9_000):
            for shape in ((count + 1,), (count, 1), ()):
                for place in ordinary(range(size), (0, size - 1)):
                    out = [np.zeros(shape if rank == place else count) for rank in range(size)]
                    works = [
                        comm.alltoall([np.ones(count)] * size, out=out if comm.rank == 1 else None)
                        for comm in comms
                    ]
                    await failed_at(
                        comms,
                        1,
                        works,
                        ValueError,
                        lambda _, result, n=count: all(same(one, np.ones(n)) for one in result),
                    )


async def test_a_wrong_list_is_an_error_on_every_rank(world):
    async with world(3) as comms:
        size = len(comms)
        for values, kind, says in (
            ([], ValueError, "got 0 values"),
            ([1] * (size + 1), ValueError, f"one per rank, {size}"),
            (None, TypeError, "not a NoneType"),
            ("abc", TypeError, "not a str"),
            (np.zeros((size, 2)), TypeError, "pass list(array)"),
            ([np.zeros(2)] * (size - 1) + [np.array(["text"])], TypeError, f"value for rank {size - 1}"),
            ([np.zeros(2)] * (size - 1) + [[1]], TypeError, "arrays of one dtype, or objects"),
            ([np.zeros(2)] * (size - 1) + [np.zeros(2, "f4")], TypeError, "ndarray of float32"),
            ([1] * (size - 1) + [DoesNotPickle()], TypeError, "kept at home"),
        ):
            await refused_at(
                comms,
                1,
                lambda comm, v=values: comm.alltoall(v if comm.rank == 1 else [1] * size),
                kind,
                says,
            )


@pytest.mark.parametrize("size", [0, 100_000])
async def test_a_value_that_does_not_unpickle_is_an_error_where_it_arrives(world, size):
    async with world(3) as comms:
        for origin in ordinary(range(3), (0, len(comms) - 1)):
            for place in ordinary(range(3), (1, len(comms) - 1)):

                def make(a, b, pair=(origin, place)):
                    return DoesNotUnpickle(size) if (a, b) == pair else [a, b]

                works = [comm.alltoall(listed(comms, make, comm.rank)) for comm in comms]
                await failed_at(
                    comms,
                    place,
                    works,
                    LookupError,
                    lambda rank, result: result == [[a, rank] for a in range(len(comms))],
                )


@pytest.mark.parametrize("count", [100, 1 << 17])
async def test_a_cancel_ends_it_everywhere_and_gives_the_memory_back(world, count):
    async with world(3) as comms:
        outs = [[np.zeros(count) for _ in comms] for _ in comms]
        for culprit in (0, 1):
            await cancelled_by(
                comms,
                culprit,
                lambda comm: comm.alltoall([np.ones(count)] * len(comms), out=outs[comm.rank]),
                outs.__getitem__,
            )


async def test_a_refusal_of_one_rank_leaves_the_next_alltoall_right(world):
    async with world(3) as comms:
        size = len(comms)
        pairs = [
            (comm.alltoall([1] if comm.rank == 1 else [1] * size), comm.alltoall([comm.rank] * size))
            for comm in comms
        ]
        for comm, (wrong, right) in zip(comms, pairs, strict=True):
            with pytest.raises(ValueError if comm.rank == 1 else RemoteError):
                await wrong
            assert await right == list(range(size))


async def test_the_torch_style_names_are_the_same_verbs(world):
    async with world(3) as comms:
        size = len(comms)
        assert await on_all(comms, lambda c: c.all_to_all([c.rank] * size)) == [list(range(size))] * size
        assert await on_all(comms, lambda c: c.all_gather(c.rank)) == [list(range(size))] * size
        assert await on_all(comms, lambda c: c.all_reduce(1)) == [size] * size
        for error in await outcomes(comms, lambda c: c.all_reduce(1) if c.rank else c.allreduce("a")):
            assert type(error) is RemoteError  # a str and an int do not add up, so it was one operation
