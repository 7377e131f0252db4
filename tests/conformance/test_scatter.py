"""Scatter: to each rank its own of the root's values, whatever their shapes, sizes and kinds."""

import array
import asyncio

import carriers
import ml_dtypes
import numpy as np
import pytest
import reference
import torch
from exchanges import (
    BOUNDARIES,
    BULK,
    SHAPES,
    DoesNotPickle,
    DoesNotUnpickle,
    cancelled_by,
    disagree,
    failed_at,
    refused_at,
    shaped,
)
from ranks import in_turn, on_all, ordinary, outcomes
from verbs import same

from asynccoll import CollectiveMismatch, RemoteError


def scatter(comm, values, root=0, **options):
    """The verb, with ``values`` at the root only."""
    return comm.scatter(values if comm.rank == root else None, root, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
async def test_every_root_reaches_every_rank(world, size):
    """Empty, 0-d, small and large arrays of several dtypes and objects, mixed, another one for each rank in each call."""
    things = [shaped(shape, number) for number, shape in enumerate(SHAPES)]
    things += [{"a": [1]}, None, "text" * 3000, np.arange(5, dtype=np.int16), 3**100]
    async with world(size) as comms:
        for root in ordinary(range(size), (0, 1, size - 1)):
            lists = [[things[(root + call + r) % len(things)] for r in range(size)] for call in range(5)]

            async def rank(comm, root=root, lists=lists):
                return await asyncio.gather(*(scatter(comm, values, root) for values in lists))

            for number, results in enumerate(await on_all(comms, rank)):
                for found, values in zip(results, lists, strict=True):
                    assert same(found, values[number]), (root, number, found)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("size", "root"), [(2, 1), (3, 0), (5, 3)])
async def test_sizes_around_each_boundary_arrive_whole(world, size, root, boundary):
    rng = np.random.default_rng(boundary + size)
    async with world(size, conditions=BULK) as comms:
        mixed = [rank % 3 - 1 for rank in range(size)]
        for around in ordinary(([0] * size, [1] * size, mixed), (mixed,)):
            values = [rng.integers(0, 256, boundary + extra, np.uint8) for extra in around]
            results = await on_all(comms, lambda comm, values=values: scatter(comm, values, root))
            assert all(same(found, value) for found, value in zip(results, values, strict=True))
            pickled = [value.tobytes()[: boundary - 18] for value in values]  # near the boundary as pickles
            assert await on_all(comms, lambda comm, values=pickled: scatter(comm, values, root)) == pickled


async def test_one_large_value_among_empty_ones(world):
    async with world(5, conditions=BULK) as comms:
        for holder in ordinary(range(5), (0, len(comms) - 1)):
            values = [np.arange(100_000 if rank == holder else 0) for rank in range(len(comms))]
            results = await on_all(comms, lambda comm, values=values: scatter(comm, values, 2))
            assert all(same(found, value) for found, value in zip(results, values, strict=True))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", reference.DTYPES)
async def test_every_layout_of_the_root_arrives_with_the_same_bits(world, dtype):
    """The root's own is of the kind that it passed; elsewhere a plain one of that container arrives."""
    rng = np.random.default_rng(3)
    async with world(3) as comms:
        size = len(comms)
        for start, _ in enumerate(carriers.SINGLE):
            names = [carriers.of_rank("mixed", rank, dtype, "1-d", "new", start) for rank in range(size)]
            bits = reference.inputs(dtype, "sum", size, (6,), rng)
            for rank, name in enumerate(names):
                if name.endswith("/expanded"):
                    bits[rank] = np.broadcast_to(bits[rank][:1], (6,)).copy()
            held = [carriers.hold(name, dtype, one) for name, one in zip(names, bits, strict=True)]
            values, root = [one.value for one in held], start % size
            for rank, found in enumerate(
                await on_all(comms, lambda comm, values=values, root=root: scatter(comm, values, root))
            ):
                plain = carriers.hold(names[rank].partition("/")[0] + "/contiguous", dtype, bits[rank])
                like = held[rank] if rank == root else plain
                assert carriers.kind(found) == carriers.kind(like.value), names
                assert carriers.bits(found).tobytes() == bits[rank].tobytes(), names
                assert carriers.memory(found).flags.writeable
                assert not any(carriers.share_memory(found, one.value) for one in held)
            assert [one.damage() for one in held] == [None] * size


@pytest.mark.torch
async def test_each_value_travels_with_its_own_description(world):
    values = [
        np.float32(1.5),
        torch.arange(6).reshape(2, 3),
        array.array("h", [1, -2]),
        memoryview(np.array([2.5, 3.5])),
        np.array([1.0, -2.5], ml_dtypes.bfloat16),
        np.zeros((3, 0), ">c8"),
        "text",
    ]
    async with world(len(values)) as comms:
        results = await on_all(
            comms, lambda comm: scatter(comm, in_turn(comms, values), min(6, len(comms) - 1))
        )
        for found, value in zip(results, in_turn(comms, values), strict=True):
            assert type(found) is type(value)
            if type(value) is str:
                assert found == value
            else:
                assert carriers.kind(found) == carriers.kind(value).replace(">", "<")
                assert carriers.memory(found).shape == carriers.memory(value).shape
                assert carriers.bits(found).tolist() == carriers.bits(value).tolist()


async def test_objects_are_independent_copies_at_the_root_too(world):
    shared = [1, [2]]
    async with world(4) as comms:
        results = await on_all(comms, lambda comm: scatter(comm, [shared] * len(comms), 1))
        assert results == [shared] * len(comms)
        assert len({id(one) for one in [shared, *results]}) == len(comms) + 1
        assert len({id(one[1]) for one in [shared, *results]}) == len(comms) + 1


@pytest.mark.parametrize("count", [3, 9_000])
async def test_the_content_at_the_call_counts(world, count):
    async with world(3) as comms:
        arrays = [np.full(count, rank + 1.0) for rank in range(len(comms))]
        lists = [[rank] for rank in range(len(comms))]
        works = [(scatter(comm, arrays), scatter(comm, lists)) for comm in comms]
        for one, numbers in zip(arrays, lists, strict=True):
            one[:] = -1
            numbers.append("later")
        arrays.clear()
        for rank, (first, second) in enumerate(works):
            assert (await first).tolist() == [rank + 1.0] * count
            assert await second == [rank]


async def test_what_other_ranks_pass_is_ignored(world):
    async with world(4) as comms:
        values = list(range(len(comms)))
        passed = in_turn(comms, [["too few"], values, np.zeros(3), DoesNotPickle()])
        assert await on_all(comms, lambda comm: comm.scatter(passed[comm.rank], 1)) == values
        assert await on_all(comms, lambda comm: scatter(comm, tuple(values), 2)) == values


@pytest.mark.parametrize("count", [0, 5, 9_000])
async def test_out_receives_this_ranks_array(world, count):
    layouts = ["numpy/big-endian", "numpy/strided", "numpy/offset", "torch/strided"]
    async with world(4) as comms:
        values = [np.arange(count + comm.rank, dtype=np.float32) for comm in comms]
        for root in ordinary(range(4), (1,)):
            held = [
                carriers.hold(name, "float32", np.zeros(len(value), np.float32))
                for name, value in zip(in_turn(comms, layouts), values, strict=True)
            ]
            results = await on_all(
                comms, lambda c, root=root, held=held: scatter(c, values, root, out=held[c.rank].value)
            )
            for one, found, value in zip(held, results, values, strict=True):
                assert found is one.value
                assert carriers.bits(found).tolist() == value.tolist()
                assert one.damage(value) is None
            # Only some pass one, and the root takes it for its very own value.
            outs = [value if comm.rank == root else None for comm, value in zip(comms, values, strict=True)]
            results = await on_all(
                comms, lambda c, root=root, outs=outs: scatter(c, values, root, out=outs[c.rank])
            )
            assert results[root] is values[root]
            assert all(same(found, value) for found, value in zip(results, values, strict=True))


async def test_a_wrong_number_of_values_is_an_error_on_every_rank(world):
    async with world(3) as comms:
        size = len(comms)
        for values, kind, says in (
            ([], ValueError, "got 0 values"),
            ([1] * (size - 1), ValueError, f"one per rank, {size}"),
            ([1] * (size + 1), ValueError, f"got {size + 1} values"),
            (None, TypeError, "not a NoneType"),
            ("abc", TypeError, "not a str"),
            (dict.fromkeys(range(size)), TypeError, "not a dict"),
            (np.zeros((size, 2)), TypeError, "pass list(array)"),
            ([1] * (size - 1) + [np.array(["text"])], TypeError, f"value for rank {size - 1}: dtype"),
            ([1] * (size - 1) + [DoesNotPickle()], TypeError, "kept at home"),
        ):
            await refused_at(comms, 1, lambda comm, v=values: scatter(comm, v, 1), kind, says)


async def test_an_out_that_cannot_be_written_is_an_error_on_every_rank(world):
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    async with world(3) as comms:
        values = [np.ones(3) for _ in comms]
        for out, kind, says in (
            (frozen, ValueError, "read-only"),
            ([0.0] * 3, TypeError, "must be an array"),
            (np.broadcast_to(np.zeros(1), 3), ValueError, "read-only"),
        ):
            for rank in (0, 1):
                await refused_at(
                    comms,
                    rank,
                    lambda comm, rank=rank, out=out: scatter(
                        comm, values, out=out if comm.rank == rank else None
                    ),
                    kind,
                    says,
                )
        for out, kind in (
            (np.zeros(4), ValueError),
            (np.zeros(3, "f4"), TypeError),
        ):  # at the root it is known
            await refused_at(
                comms,
                0,
                lambda comm, out=out: scatter(comm, values, out=None if comm.rank else out),
                kind,
                "out must be float64",
            )
        await refused_at(
            comms,
            0,
            lambda comm: scatter(comm, ["text"] * len(comms), out=None if comm.rank else np.zeros(3)),
            TypeError,
            "has a str for itself",
        )


async def test_an_out_of_another_shape_is_an_error_where_it_was_passed(world):
    async with world(3) as comms:
        for count in (3, 9_000):
            values = [np.full(count, float(comm.rank)) for comm in comms]
            for shape in ((count + 1,), (count - 1,), (count, 1), (), (0,)):
                works = [
                    scatter(comm, values, out=np.zeros(shape) if comm.rank == 1 else None) for comm in comms
                ]
                await failed_at(
                    comms,
                    1,
                    works,
                    ValueError,
                    lambda rank, result, values=values: same(result, values[rank]),
                )


async def test_an_out_of_another_dtype_or_for_an_object_is_a_mismatch_on_every_rank(world):
    async with world(4) as comms:
        size = len(comms)
        for count in (3, 9_000):
            out = np.ones(count, np.float32)
            mixed = [np.ones(count, np.float32 if rank % 2 else np.float64) for rank in range(size)]
            for values, field, theirs in (
                ([np.ones(count)] * size, "dtype", "float64"),
                (mixed, "dtype", "float32|float64"),
                ([[1]] * size, "path", "object"),
                ([np.ones(count)] * (size - 1) + ["text"], "path", "array|object"),
            ):
                errors = await outcomes(
                    comms,
                    lambda comm, values=values, out=out: scatter(
                        comm, values, 1, out=out if comm.rank == 3 else None
                    ),
                )
                for error in errors:
                    assert type(error) is CollectiveMismatch
                    assert error.field == field, error
                    assert error.values[1] == theirs
                    assert error.values[3] == ("float32" if field == "dtype" else "array")
                assert (out == 1).all()
        assert await on_all(comms, lambda comm: scatter(comm, list(range(size)))) == list(range(size))


async def test_roots_names_and_verbs_must_agree(world):
    async with world(3) as comms:
        for count in (2, 50_000):
            values = [np.ones(count) for _ in comms]
            for odd, field in (
                (lambda c, v=values: scatter(c, v, 1), "root"),
                (lambda c, v=values: c.scatter(v, 1), "root"),
                (lambda c, v=values: scatter(c, v, name="other"), "name"),
                (lambda c, v=values: c.broadcast(v[0]), "verb"),
                (lambda c, v=values: c.alltoall(v), "verb"),
                (lambda c: c.barrier(), "verb"),
            ):
                await disagree(comms, lambda c, v=values: scatter(c, v), odd, field)


async def test_an_impossible_root_is_an_error_on_every_rank(world):
    async with world(2) as comms:
        size = len(comms)
        values = list(range(size))
        for root, kind in ((size, ValueError), (-1, ValueError), (1.0, TypeError), ("0", TypeError)):
            for error in await outcomes(comms, lambda comm, root=root: comm.scatter(values, root)):
                assert type(error) is kind
                assert str(root) in str(error)
        await refused_at(
            comms,
            1,
            lambda comm: scatter(comm, values, size + 3 if comm.rank == 1 else 0),
            ValueError,
            "root",
        )
        assert await on_all(comms, lambda comm: scatter(comm, values, np.int64(1))) == values


@pytest.mark.parametrize("size", [0, 100_000])
async def test_a_value_that_does_not_unpickle_is_an_error_where_it_arrives(world, size):
    async with world(4) as comms:
        for place in ordinary(range(len(comms)), (0, 2, len(comms) - 1)):
            values = [DoesNotUnpickle(size) if rank == place else rank for rank in range(len(comms))]
            works = [scatter(comm, values, 2) for comm in comms]
            await failed_at(comms, place, works, LookupError, lambda rank, result: result == rank)


@pytest.mark.parametrize("count", [100, 1 << 17])
async def test_a_cancel_ends_it_everywhere_and_gives_the_memory_back(world, count):
    async with world(3) as comms:
        outs = [np.zeros(count) for _ in comms]
        values = [np.ones(count) for _ in comms]
        for culprit in (0, 1):
            await cancelled_by(
                comms,
                culprit,
                lambda comm: scatter(comm, values, out=outs[comm.rank]),
                lambda rank: [outs[rank]],
            )


async def test_a_refusal_of_the_root_leaves_the_next_scatter_right(world):
    async with world(3) as comms:
        good = list(range(len(comms)))
        pairs = [(scatter(comm, [1], 1), scatter(comm, good, 1)) for comm in comms]
        for comm, (wrong, right) in zip(comms, pairs, strict=True):
            with pytest.raises(ValueError if comm.rank == 1 else RemoteError):
                await wrong
            assert await right == comm.rank
