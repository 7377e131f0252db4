"""scan and exscan: each rank gets what the ranks up to it, or before it, hold together, in rank order."""

import asyncio
import functools

import carriers
import numpy as np
import pytest
import reference
import torch
from faults import in_step
from ranks import each, on_all, ordinary, outcomes
from sharing import BULK, LARGE, WORLDS, all_bits, cancelled, counts, fail, held, refused, sample

from asynccoll import RemoteError

ALGORITHMS = ("auto", "chain", "doubling")
VERBS = pytest.mark.parametrize("verb", ["scan", "exscan"])


def combined(verb, values, rank):
    """Those of the values that ``rank``'s result combines."""
    return values[: rank + (verb == "scan")]


@VERBS
@pytest.mark.parametrize("size", WORLDS)
async def test_every_op_and_dtype_is_right_in_each_ranks_own_container(world, size, verb):
    rng = np.random.default_rng(size)
    wrong = []
    async with world(size) as comms:
        for op, dtype, count, algorithm, number in sample(size, ALGORITHMS):
            values = reference.inputs(dtype, op, size, (count,), rng)
            given = held(size, dtype, values, number)
            results = await each(comms, verb, [one.value for one in given], op, algorithm=algorithm)
            where = f"{verb} {op} {dtype}[{count}] {algorithm} of {size}"
            for rank, (one, result) in enumerate(zip(given, results, strict=True)):
                mine = combined(verb, values, rank)
                if not mine:
                    assert result is None, where
                    continue
                assert carriers.kind(result) == carriers.kind(one.value), where
                if fault := reference.difference(op, dtype, mine, carriers.bits(result)):
                    wrong.append(f"{where}, rank {rank}: {fault}")
                if damage := one.damage():
                    wrong.append(f"{where}: {damage}")
    assert not wrong, wrong[:5]


@VERBS
@pytest.mark.parametrize("size", [*range(1, 10), 17])
async def test_every_count_is_exact(world, size, verb):
    """Each rank adds a power of its own: a rank that is missing or counted twice shows in the sum."""
    async with world(size) as comms:
        for algorithm in ALGORITHMS:

            async def rank(comm, algorithm=algorithm):
                values = [np.arange(n) + 8 ** (comm.rank % 20) for n in counts(size)]
                return await asyncio.gather(
                    *(getattr(comm, verb)(value, algorithm=algorithm) for value in values)
                )

            for at, found in enumerate(await on_all(comms, rank)):
                ranks = range(at + (verb == "scan"))
                for n, result in zip(counts(size), found, strict=True):
                    if ranks:
                        right = np.arange(n) * len(ranks) + sum(8 ** (rank % 20) for rank in ranks)
                        np.testing.assert_array_equal(result, right)
                    else:
                        assert result is None


@VERBS
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_large_arrays_are_right(world, size, algorithm, verb):
    rng = np.random.default_rng(3)
    async with world(size, conditions=BULK) as comms:
        for op, dtype in (("sum", "float16"), ("max", "float64"), ("prod", "complex64"), ("avg", "float32")):
            values = reference.inputs(dtype, op, size, (ordinary(LARGE, 5003),), rng)
            results = await each(comms, verb, values, op, algorithm=algorithm)
            for rank, result in enumerate(results):
                if mine := combined(verb, values, rank):
                    assert reference.difference(op, dtype, mine, result) is None


@VERBS
@pytest.mark.fixed_size("is about the length of a scan: with 64 ranks gigabytes of it")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
async def test_arrays_beyond_two_planes_are_right(world, verb, dtype):
    """The blocks that are lent live on two planes of 8 MiB in turn, here 2 Mi elements each."""
    rng = np.random.default_rng(5)
    async with world(3, conditions=BULK) as comms:
        values = [rng.normal(0, 4, (4 << 20) + 5).astype(dtype) for _ in comms]
        results = await each(comms, verb, values)
    for rank, result in enumerate(results):
        if mine := combined(verb, values, rank):
            assert reference.difference("sum", dtype, mine, result) is None


async def test_the_chain_is_a_strict_left_fold(world):
    values = np.random.default_rng(1).normal(size=(6, 1000)).astype(np.float32)
    async with world(6) as comms:
        for verb in ("scan", "exscan"):
            results = await each(comms, verb, [values[comm.rank % 6] for comm in comms], algorithm="chain")
            for rank, result in enumerate(results):
                mine = [values[r % 6] for r in range(rank + (verb == "scan"))]
                if mine:
                    assert result.tobytes() == functools.reduce(np.add, mine).tobytes()


@VERBS
async def test_nan_infinities_and_zeros_follow_the_rules(world, verb):
    specials = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5])
    async with world(3) as comms:
        size = len(comms)
        for dtype in reference.FLOATS:
            values = [np.asarray(reference.rounded(np.roll(specials, rank), dtype)) for rank in range(size)]
            given = [carriers.hold("numpy/contiguous", dtype, value).value for value in values]
            for op in ("sum", "avg", "prod", "min", "max"):
                for algorithm in ALGORITHMS:
                    results = await each(comms, verb, given, op, algorithm=algorithm)
                    for rank, result in enumerate(results):
                        if mine := combined(verb, values, rank):
                            assert reference.difference(op, dtype, mine, carriers.bits(result)) is None


@VERBS
async def test_0_d_arrays_scalars_and_many_dimensions_keep_their_shape(world, verb):
    async with world(3) as comms:
        for value in (np.float32(2), np.array(2.0), torch.ones(2, 0, 3), np.ones((2, 3, 4)).T):
            results = await each(comms, verb, [value] * len(comms))
            for rank, result in enumerate(results):
                if rank or verb == "scan":
                    assert type(result) is type(value)
                    assert result.shape == value.shape
                    np.testing.assert_array_equal(result, np.asarray(value) * (rank + (verb == "scan")))


@VERBS
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_repeats_give_the_same_bits(world, size, verb):
    values = np.random.default_rng(1).normal(size=(size, 5003)).astype(np.float32)
    async with world(size) as comms:
        for algorithm in ALGORITHMS:

            def start(comm, algorithm=algorithm):
                return getattr(comm, verb)(values[comm.rank], algorithm=algorithm)

            found = await all_bits(comms, start, 5)
            assert [len(bits) for bits in found] == [1] * size


@VERBS
@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_out_may_be_strided_and_may_be_the_input(world, verb, algorithm):
    async with world(3) as comms:
        size = len(comms)
        right = [[sum(range(rank + (verb == "scan")))] * 4 for rank in range(size)]
        outs = [np.full(8, 9.0)[::2] for _ in comms]
        own = [np.full(4, float(rank)) for rank in range(size)]
        results = await on_all(
            comms, lambda c: getattr(c, verb)(own[c.rank], out=outs[c.rank], algorithm=algorithm)
        )
        first = int(verb == "exscan")
        assert [result is out for result, out in zip(results, outs, strict=True)] == [
            rank >= first for rank in range(size)
        ]
        assert [out.tolist() for out in outs[first:]] == right[first:]
        assert [out.tolist() for out in outs[:first]] == [[9] * 4] * first
        assert [value.tolist() for value in own] == [[rank] * 4 for rank in range(size)]
        for out in outs:
            assert out.base[1::2].tolist() == [9] * 4
        await on_all(comms, lambda c: getattr(c, verb)(own[c.rank], out=own[c.rank], algorithm=algorithm))
        assert [value.tolist() for value in own[first:]] == right[first:]
        assert own[0].tolist() == [0] * 4


async def test_objects_are_folded_at_rank_0_and_each_rank_has_its_own_prefix(world):
    calls = []
    async with world(4) as comms:
        size = len(comms)
        names = [str(rank % 10) for rank in range(size)]

        def function_of(rank):
            def pair(a, b):
                calls.append(rank)
                return f"({a}{b})"

            return pair

        right = [functools.reduce(lambda a, b: f"({a}{b})", names[: rank + 1]) for rank in range(size)]
        assert await on_all(comms, lambda c: c.scan(names[c.rank], function_of(c.rank))) == right
        assert calls == [0] * (size - 1)
        assert await on_all(comms, lambda c: c.exscan(names[c.rank], function_of(c.rank))) == [
            None,
            *right[:-1],
        ]
        assert calls == [0] * (2 * size - 3)
        sums = [2**70 * (rank + 1) for rank in range(size)]
        assert await on_all(comms, lambda c: c.scan(2**70)) == sums
        assert await on_all(comms, lambda c: c.exscan(2**70)) == [None, *sums[:-1]]
        means = [sum(range(rank + 1)) / (rank + 1) for rank in range(size)]
        assert await on_all(comms, lambda c: c.scan(c.rank, "avg")) == means
        assert await on_all(comms, lambda c: c.exscan(c.rank, "avg")) == [None, *means[:-1]]
        lists = await on_all(comms, lambda c: c.scan([c.rank]))
        assert lists == [list(range(rank + 1)) for rank in range(size)]
        matrices = [np.array([[1, rank], [1, 1]]) for rank in range(size)]
        products = await each(comms, "scan", matrices, np.matmul)
        for rank, product in enumerate(products):
            np.testing.assert_array_equal(product, functools.reduce(np.matmul, matrices[: rank + 1]))


@VERBS
@pytest.mark.inline_only(
    "a mesh in a thread of its own goes on, and is done, while the test waits or makes its next call"
)
@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_cancel_ends_it_everywhere(world, rank, verb):
    async with world(3, conditions=BULK) as comms:
        for algorithm in ("chain", "doubling"):

            def start(comm, memory, algorithm=algorithm):
                return getattr(comm, verb)(np.ones(LARGE), out=np.frombuffer(memory), algorithm=algorithm)

            await cancelled(comms, start, rank, lambda other: other < rank)


@VERBS
async def test_a_function_that_raises_is_a_remote_error_on_every_rank(world, verb):
    async with world(4) as comms:
        await fail(comms, lambda c, function: getattr(c, verb)(c.rank, function))
        # The last fold fails, when the first prefixes are there.
        late = 1 + (len(comms) - 2 if verb == "exscan" else len(comms) - 1) - 1
        for error in await outcomes(comms, lambda c: getattr(c, verb)("a" if c.rank == late else 1)):
            assert type(error) is RemoteError
            assert error.type_name == "TypeError"
        await in_step(comms)


@VERBS
async def test_wrong_arguments_are_refused_on_every_rank(world, verb):
    def call(*args, **options):
        return lambda c: getattr(c, verb)(*args, **options)

    async with world(2) as comms:
        await refused(comms, call(np.ones(2), algorithm="ring"), ValueError, "auto, chain, doubling")
        await refused(comms, call([1], algorithm="ring"), ValueError, "auto, chain, doubling")
        await refused(comms, call(np.ones(2, int), "avg"), TypeError, "avg of int64")
        await refused(comms, call(1, "median"), ValueError, "median")
        await refused(comms, call([1], out=np.ones(1)), TypeError, "out= takes")
        await refused(comms, call(np.ones(2), out=np.ones(3)), ValueError, "shape")
        await refused(comms, call(np.ones(2), out=np.broadcast_to(1.0, (2,))), ValueError, "read-only")
