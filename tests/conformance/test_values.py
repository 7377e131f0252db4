"""What reductions of arrays give, against plain numpy: every size, op, dtype, container and algorithm, the same bits everywhere."""

import array
import asyncio
import functools
import hashlib
import itertools
import warnings

import carriers
import matrix
import ml_dtypes
import numpy as np
import pytest
import reducing
import reference
import torch
from faults import in_step, in_virtual_time
from ranks import each, in_turn, on_all, ordinary, outcomes, sizes

from asynccoll.sim.driver import Conditions

ALGORITHMS = ("ring", "tree", "doubling")
BULK = Conditions(delay=0.002, piece=1 << 18, split=True, buffer=1 << 20)
SAMPLE = matrix.sample()
OTHERS = pytest.mark.parametrize("verb", matrix.OTHERS)
SPECIALS = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5)
TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def digest(result):
    return hashlib.sha256(carriers.bits(result).tobytes()).hexdigest()


def wrapped(number):
    """As int64 holds it."""
    return int(np.uint64(number % 2**64).view(np.int64))


def powers(size):
    """Numbers for the ranks whose sum shows what is missing or there twice: powers of 8, or of 5 where those are too large."""
    return [wrapped((8 if size <= 20 else 5) ** rank) for rank in range(size)]


def report(wrong):
    assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:5])


# -- the matrix -----------------------------------------------------------------------------------------------


def test_the_sample_has_every_pair_of_values_that_can_meet():
    axes = ("size", "carrier", "dtype", "op", "form", "mode", "algorithm")
    found = {
        pair
        for case in SAMPLE
        for pair in itertools.combinations(((axis, getattr(case, axis)) for axis in axes), 2)
    }
    missing = []
    for a, b in itertools.combinations(axes, 2):
        for x, y in itertools.product(matrix.AXES[a], matrix.AXES[b]):
            possible = matrix.fits({**dict.fromkeys(matrix.AXES), a: x, b: y})
            if possible and ((a, x), (b, y)) not in found:
                missing.append((x, y))
    assert missing == []
    for size in matrix.SIZES[:9]:
        assert {case.count for case in SAMPLE if case.size == size} >= set(matrix.counts(size))


@pytest.mark.parametrize("size", matrix.SIZES)
async def test_a_sample_of_all_combinations_is_right(world, size):
    cases = ordinary([case for case in SAMPLE if case.size == size], matrix.sample_of(size))
    async with world(size) as comms:
        report(await reducing.failures(comms, cases))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
async def test_an_op_that_a_dtype_lacks_is_a_type_error_on_every_rank(world, size):
    async with world(size) as comms:
        report(await reducing.failures(comms, matrix.refusals(size)))
        results = await on_all(comms, lambda comm: comm.allreduce(np.float32(1)))
        assert results == [size] * size


async def test_a_million_and_one_elements_are_right(world):
    reductions = (("sum", "float32"), ("avg", "bfloat16"), ("max", "float64"), ("sum", "int16"))
    async with world(3, conditions=BULK) as comms:
        size, count = len(comms), ordinary(reducing.LARGE, 30_001)
        report(
            await reducing.failures(comms, matrix.large(size, reductions[:1], ALGORITHMS, count), together=1)
        )
        report(
            await reducing.failures(comms, matrix.large(size, reductions[1:], ("auto",), count), together=1)
        )


@pytest.mark.fixed_size("is about the length of a sum in half types: with 64 ranks gigabytes of it")
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
async def test_half_types_beyond_one_slab_are_right(world, algorithm):
    """They are summed in float32 in slabs of 16 MiB, here 4 Mi elements and a rest."""
    rng = np.random.default_rng(5)
    async with world(2, conditions=BULK) as comms:
        values = [rng.normal(0, 4, (1 << 22) + 5).astype(np.float16) for _ in comms]
        results = await on_all(comms, lambda comm: comm.allreduce(values[comm.rank], algorithm=algorithm))
    assert len({digest(result) for result in results}) == 1
    assert reference.difference("sum", "float16", values, results[0]) is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", matrix.FULL_SIZES)
async def test_a_share_of_the_whole_product_is_right(world, size):
    """One combination in 10,000, and a million and one elements of every op and dtype, or in large worlds of some."""
    reductions = (
        matrix.REDUCTIONS if size <= 4 else (("sum", "float32"), ("min", "float16"), ("prod", "int64"))
    )
    async with world(size, conditions=BULK) as comms:
        report(await reducing.failures(comms, matrix.share(matrix.full(size), 1, 10_000)))
        report(await reducing.failures(comms, matrix.large(size, reductions, ("auto",)), together=1))


@OTHERS
async def test_a_sample_of_the_other_reductions_is_right(world, verb):
    """W from 1 to 33: of those in `matrix.SIZES` every pair of axis values meets."""
    sample = matrix.sample(verb=verb)
    for size in sizes(*(matrix.FULL_SIZES if in_virtual_time() else (2, 3, 5))):
        cases = [case for case in sample if case.size == size] or matrix.sample_of(size, 12, verb=verb)
        async with world(size) as comms:
            report(await reducing.failures(comms, cases))


@OTHERS
@pytest.mark.parametrize("size", [2, 5])
async def test_an_op_that_a_dtype_lacks_is_a_type_error_of_the_other_reductions_too(world, verb, size):
    async with world(size) as comms:
        report(await reducing.failures(comms, matrix.refusals(size, verb)))
        await in_step(comms)


@OTHERS
async def test_a_million_and_one_elements_of_the_other_reductions_are_right(world, verb):
    async with world(3, conditions=BULK) as comms:
        size, count = len(comms), ordinary(reducing.LARGE, 30_001)
        for reduction, algorithms in ((("sum", "float32"), None), (("avg", "bfloat16"), ("auto",))):
            cases = matrix.large(size, [reduction], algorithms, count, verb)
            report(await reducing.failures(comms, cases, together=1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@OTHERS
@pytest.mark.parametrize("size", matrix.FULL_SIZES)
async def test_a_share_of_the_whole_product_of_the_other_reductions_is_right(world, verb, size):
    reductions = (
        matrix.REDUCTIONS if size <= 4 else (("sum", "float32"), ("min", "float16"), ("prod", "int64"))
    )
    async with world(size, conditions=BULK) as comms:
        report(await reducing.failures(comms, matrix.share(matrix.full(size, verb), 1, 10_000)))
        report(await reducing.failures(comms, matrix.large(size, reductions, ("auto",), verb=verb), 1))


# -- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 18))
async def test_fewer_elements_than_ranks_and_every_remainder_are_exact(world, size):
    """Each rank adds a power of its own: a rank that is missing or counted twice shows in the sum."""
    wrong = []
    own = powers(size)
    async with world(size) as comms:
        for algorithm in ALGORITHMS:
            counts = ordinary(range(2 * size + 2), matrix._counts_in_sample(size))

            async def rank(comm, algorithm=algorithm, counts=counts):
                works = [comm.allreduce(np.arange(n) + own[comm.rank], algorithm=algorithm) for n in counts]
                return await asyncio.gather(*works)

            results = await on_all(comms, rank)
            total = wrapped(sum(own))
            for (r, found), (k, n) in itertools.product(enumerate(results), enumerate(counts)):
                if found[k].tolist() != (np.arange(n) * size + total).tolist():
                    wrong.append(f"{algorithm}, {n} elements, rank {r} of {size}: {found[k]}")
    report(wrong)


@pytest.mark.parametrize(
    "size", [3, pytest.param(7, marks=pytest.mark.slow), pytest.param(17, marks=pytest.mark.slow)]
)
async def test_a_million_and_one_integers_are_exact(world, size):
    async with world(size, conditions=BULK) as comms:
        for algorithm in ALGORITHMS:
            values = np.arange(ordinary(reducing.LARGE, 100_001))
            own = [values + power for power in powers(size)]
            results = await each(comms, "allreduce", own, algorithm=algorithm)
            total = wrapped(sum(powers(size)))
            for result in results:
                np.testing.assert_array_equal(result, values * size + total, err_msg=algorithm)


# -- bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 10))
async def test_sums_with_cancellation_have_the_same_bits_on_all_ranks_and_in_20_repeats(world, size):
    rng = np.random.default_rng(size)
    pattern = np.resize(np.float32([1e8, 1, -1e8, 1]), size)
    async with world(size) as comms:
        for count, algorithm in itertools.product(ordinary((11, 5000), (11, 500)), matrix.ALGORITHMS):
            values = [
                (rng.permutation(pattern)[:, None] * rng.uniform(0.9, 1.1, (size, count))).astype(np.float32)[
                    r
                ]
                for r in range(size)
            ]

            async def rank(comm, values=values, algorithm=algorithm):
                works = [comm.allreduce(values[comm.rank], algorithm=algorithm) for _ in range(10)]
                found = [digest(result) for result in await asyncio.gather(*works)]
                for _ in range(10):
                    found.append(digest(await comm.allreduce(values[comm.rank], algorithm=algorithm)))
                return found

            digests = set(itertools.chain(*await on_all(comms, rank)))
            assert len(digests) == 1, f"{len(digests)} results with {algorithm} of {count} elements"


def specials(size, dtype):
    """Values for each of ``size`` ranks: one element for each way to hand the special ones to the ranks."""
    if size <= 4:
        columns = np.array(list(itertools.product(SPECIALS, repeat=size))).T
    else:  # three that matter, a rank apart in every way, among ones that change nothing
        columns = np.ones((size, len(SPECIALS) ** 3))
        columns[[0, size // 2, size - 1]] = np.array(list(itertools.product(SPECIALS, repeat=3))).T
    real = [np.asarray(reference.rounded(row, reference.part(dtype))) for row in columns]
    if dtype in reference.COMPLEX:
        return [np.stack([row, row[::-1]], -1).copy().view(dtype)[:, 0] for row in real]
    return real


def ordered(op, dtype):
    """The rules say what the result is: a complex product of infinities is NaN in parts that the order decides."""
    return not reference.refused(op, dtype) and not (op == "prod" and dtype in reference.COMPLEX)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [*reference.FLOATS, *reference.COMPLEX])
async def test_nan_infinities_and_zeros_follow_the_rules_whichever_rank_holds_them(world, size, dtype):
    wrong = []
    async with world(size) as comms:
        values = specials(size, dtype)
        held = [carriers.hold("numpy/contiguous", dtype, row).value for row in values]
        for op, algorithm in itertools.product(("sum", "avg", "prod", "min", "max"), ALGORITHMS):
            if not ordered(op, dtype):
                continue
            results = await each(comms, "allreduce", held, op, algorithm=algorithm)
            found = [carriers.bits(result) for result in results]
            if len({one.tobytes() for one in found}) > 1:
                wrong.append(f"{op} {algorithm}: the ranks' bits differ")
            if fault := reference.difference(op, dtype, values, found[0]):
                wrong.append(f"{op} {algorithm}: {fault}")
    report(wrong)


@OTHERS
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [*reference.FLOATS, *reference.COMPLEX])
async def test_they_do_so_in_the_other_reductions(world, verb, size, dtype):
    wrong = []
    async with world(size) as comms:
        values = specials(size, dtype)
        held = [carriers.hold("numpy/contiguous", dtype, row).value for row in values]
        for op, algorithm in itertools.product(("sum", "avg", "prod", "min", "max"), matrix.OTHERS[verb][1:]):
            if not ordered(op, dtype):
                continue
            results = await each(comms, verb, held, op, algorithm=algorithm)
            for rank, result in enumerate(results):
                mine = reducing.combined(verb, values, rank)
                if mine is None:
                    assert result is None
                elif fault := reference.difference(op, dtype, mine, carriers.bits(result)):
                    wrong.append(f"{op} {algorithm}, rank {rank}: {fault}")
    report(wrong)


async def test_every_nan_is_the_canonical_one(world):
    """Negative, signalling and with a payload; in and out of a sum, in a world of one too."""
    odd = np.array([0xFFC0_0000, 0x7F80_0001, 0x7FC1_2345, 0xFFFF_FFFF], np.uint32).view(np.float32)
    for size in sizes(1, 2, 3):
        async with world(size) as comms:
            for op in ("sum", "avg", "prod", "min", "max"):
                values = [np.roll(odd, r) for r in range(size)]
                for result in await each(comms, "allreduce", values, op):
                    assert result.view(np.uint32).tolist() == [0x7FC0_0000] * 4, (size, op)


# -- averages and overflow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "value"),
    [
        (2, np.array([1], np.int64)),
        (4, np.array([255], np.uint8)),
        (3, np.array([True])),
        (2, torch.tensor([1])),
        (2, np.int32(3)),
    ],
)
async def test_the_average_of_integers_and_bool_is_a_type_error(world, size, value):
    async with world(size) as comms:
        for error in await outcomes(comms, lambda comm: comm.allreduce(value, "avg")):
            assert type(error) is TypeError
            assert "avg" in str(error)
            assert str(value.dtype).removeprefix("torch.") in str(error)
        assert await on_all(comms, lambda comm: comm.allreduce(comm.rank)) == [sum(range(size))] * size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_the_average_of_large_halves_does_not_overflow_but_their_sum_does(world, algorithm):
    value = np.full(3, 60000, np.float16)
    async with world(8) as comms:
        size = len(comms)
        for result in await each(comms, "allreduce", [value] * size, "avg", algorithm=algorithm):
            assert result.dtype == np.float16
            assert result.tolist() == [60000] * 3
        for result in await each(comms, "allreduce", [value] * size, algorithm=algorithm):
            assert result.tolist() == [np.inf] * 3
        opposites = in_turn(comms, [value, -value])
        left = 60000 * (size % 2)
        for result in await each(comms, "allreduce", opposites, algorithm=algorithm):
            assert result.tolist() == [left] * 3


async def test_the_average_divides_by_the_number_of_ranks(world):
    async with world(5) as comms:
        size = len(comms)
        for shape in ((1,), (2, 3), ()):
            results = await each(comms, "allreduce", [np.full(shape, r + 1.0) for r in range(size)], "avg")
            for result in results:
                np.testing.assert_array_equal(result, np.full(shape, (size + 1) / 2))
        results = await each(comms, "allreduce", [np.full(2, 1 + 1j) * r for r in range(size)], "avg")
        for result in results:
            assert result.tolist() == [(1 + 1j) * (size - 1) / 2] * 2


@pytest.mark.parametrize("algorithm", matrix.ALGORITHMS)
async def test_integers_wrap_as_those_of_numpy(world, algorithm):
    cases = [
        ("sum", np.array([100], np.int8), [-56]),
        ("sum", np.array([2**31 - 1], np.int32), [-2]),
        ("sum", np.array([2**64 - 1], np.uint64), [2**64 - 2]),
        ("sum", np.array([200], np.uint8), [144]),
        ("prod", np.array([16], np.int8), [0]),
        ("prod", np.array([2**16 + 1], np.int32), [131073]),
        ("prod", np.array([2**63 + 3], np.uint64), [9]),
        ("prod", np.array([-(2**15)], np.int16), [0]),
    ]
    async with world(2) as comms:
        for op, value, right in cases:
            if len(comms) > 2:
                right = functools.reduce(reference.UFUNCS[op], [value] * len(comms)).tolist()
            for result in await each(comms, "allreduce", [value] * len(comms), op, algorithm=algorithm):
                assert (result.dtype, result.tolist()) == (value.dtype, right), (op, value)


async def test_sums_of_bool_are_or_and_products_and(world):
    table = {"sum": [0, 1, 1, 1], "prod": [0, 0, 0, 1], "min": [0, 0, 0, 1], "max": [0, 1, 1, 1]}
    table |= {"band": [0, 0, 0, 1], "bor": [0, 1, 1, 1], "bxor": [0, 1, 1, 0]}
    values = [np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)]
    async with world(2) as comms:
        for op, right in table.items():
            if op == "bxor" and len(comms) > 2:
                right = np.logical_xor.reduce(in_turn(comms, values))
            for result in await each(comms, "allreduce", in_turn(comms, values), op):
                assert (result.dtype, result.tolist()) == (np.dtype(bool), [bool(x) for x in right]), op


# -- containers -------------------------------------------------------------------------------------------------


@pytest.mark.torch
async def test_every_rank_gets_its_own_container_with_the_same_bits(world):
    rng = np.random.default_rng(1)
    kinds = [
        lambda plain: plain,
        torch.from_numpy,
        lambda plain: array.array("f", plain.tobytes()),
        memoryview,
        lambda plain: plain.astype(">f4"),
        lambda plain: np.repeat(plain, 2)[::2],
    ]
    async with world(6) as comms:
        plain = [rng.normal(size=6).astype(np.float32) for _ in comms]
        held = [kind(value) for kind, value in zip(in_turn(comms, kinds), plain, strict=True)]
        for op, algorithm in itertools.product(("sum", "max"), ALGORITHMS):
            results = await each(comms, "allreduce", held, op, algorithm=algorithm)
            assert [carriers.kind(result) for result in results] == [carriers.kind(value) for value in held]
            assert len({carriers.bits(result).tobytes() for result in results}) == 1
            assert reference.difference(op, "float32", plain, results[0]) is None


@pytest.mark.torch
async def test_bfloat16_of_torch_and_of_ml_dtypes_meet(world):
    numbers = np.array([1.0, 2.5, -3.0, 256.0], np.float32)
    held = [numbers.astype(ml_dtypes.bfloat16), torch.from_numpy(numbers).bfloat16()]
    async with world(2) as comms:
        results = await on_all(comms, lambda comm: comm.allreduce(held[comm.rank % 2]))
        right = (len(comms) * numbers).astype(ml_dtypes.bfloat16).astype(np.float32).tolist()
    for rank, result in enumerate(results):
        assert result.dtype == (torch.bfloat16 if rank % 2 else ml_dtypes.bfloat16)
        assert (result.float() if rank % 2 else result.astype(np.float32)).tolist() == right


@pytest.mark.torch
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
async def test_every_dtype_of_torch_works_or_is_refused_by_name(world, dtype):
    """0-d, empty and 1-d, with every op. Nothing outside the numerics table is added up as raw bytes."""
    name = str(dtype).removeprefix("torch.")
    shapes = ordinary([(), (0,), (3,)], [(3,)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that complex32 is experimental and qint32 deprecated
            tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    except (RuntimeError, NotImplementedError, ValueError):
        pytest.skip(f"torch makes no {name} tensor on the CPU")
    cases = list(itertools.product(reference.OPS, tensors))
    if name in reference.DTYPES:
        for tensor in tensors:
            tensor.fill_(1)

    async with world(2) as comms:

        async def rank(comm):
            works = [comm.allreduce(tensor, op) for op, tensor in cases]
            return await asyncio.gather(*works, return_exceptions=True)

        for results in await on_all(comms, rank):
            for (op, tensor), result in zip(cases, results, strict=True):
                if name not in reference.DTYPES or reference.refused(op, name):
                    assert type(result) is TypeError, (op, tensor.shape, result)
                    assert name in str(result), (op, str(result))
                    continue
                assert (result.dtype, result.shape) == (dtype, tensor.shape), (op, result)
                ones = [carriers.bits(tensor)] * len(comms)
                fault = reference.difference(op, name, ones, carriers.bits(result))
                assert fault is None, (op, tensor.shape, fault)
        await in_step(comms)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, ml_dtypes.float8_e4m3fn),
        np.zeros(2, ml_dtypes.int4),
        np.zeros(2, "M8[s]"),
        np.zeros(2, "U3"),
        np.zeros(2, "f4,i4"),
        np.zeros(2, object),
        np.zeros(2, np.longdouble),
        np.ma.masked_array([1.0, 2.0]),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype}",
)
async def test_arrays_without_a_defined_sum_are_refused_on_every_rank(world, value):
    async with world(2) as comms:
        verbs = (
            "allreduce",
            "allreduce_",
            "allreduce_tree",
            *matrix.OTHERS,
            "broadcast",
            "allgather",
            "gather",
        )

        async def rank(comm):
            works = [getattr(comm, verb)(value) for verb in verbs]
            works += [comm.alltoall([value] * len(comms)), comm.scatter([value] * len(comms), comm.rank)]
            return await asyncio.gather(*works, return_exceptions=True)

        for errors in await on_all(comms, rank):
            assert [type(error) for error in errors] == [TypeError] * (len(verbs) + 2), errors
        await in_step(comms)
