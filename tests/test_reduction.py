"""Every op on every dtype: the defined bits, whichever operand comes first, without a warning."""

from __future__ import annotations

import enum
import functools
import math
import operator
import threading
import tracemalloc
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from naming import shown

from asynccoll.buffers import DTYPES, DType
from asynccoll.reduction import OPS, Arithmetic, ReduceOp, arithmetic, finish_object, fold_op, resolve_op

FLOATS = ["float16", "bfloat16", "float32", "float64"]
HALVES = ["float16", "bfloat16"]
REAL = [name for name, dtype in DTYPES.items() if dtype.kind != "c"]
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0 << 48}
CANONICAL_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}


def supported(op: str, dtype: DType) -> bool:
    if op == "avg":
        return dtype.kind in "fc"
    if op in ("min", "max"):
        return dtype.kind != "c"
    return op in ("sum", "prod") or dtype.kind in "biu"


CELLS = [(op, name) for op in OPS for name, dtype in DTYPES.items() if supported(op, dtype)]


def bits_of(name: str) -> np.dtype[Any]:
    return np.dtype(f"u{DTYPES[name].itemsize}")


def encode(name: str, values: Any) -> np.ndarray:
    """A flat array of the storage dtype; bfloat16 by cutting exact float32 values."""
    if name != "bfloat16":
        with np.errstate(all="ignore"):
            return np.array(values, DTYPES[name].storage).reshape(-1)
    return (np.array(values, np.float32).reshape(-1).view(np.uint32) >> 16).astype(np.uint16)


def decode(name: str, stored: np.ndarray) -> np.ndarray:
    """Values as float64 (exact for every half and float32), other dtypes as they are."""
    if name == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):  # a signalling NaN warns
        return stored.astype(np.float64) if name in FLOATS else stored


def reduce(op: str, name: str, *ranks: np.ndarray, mirrored: bool = False) -> np.ndarray:
    """Left fold over the blocks of the ranks as the engine does it, or the same from the other end."""
    rule = arithmetic(op, DTYPES[name])
    blocks = [rank.copy() for rank in ranks]
    planes = [rule.plane(block) for block in blocks]
    for block, plane in zip(blocks, planes, strict=True):
        rule.load(block, plane)
    if mirrored:
        mine = planes[-1]
        for incoming in planes[-2::-1]:
            rule.combine_lower(mine, incoming)
        final = blocks[-1]
    else:
        mine = planes[0]
        for incoming in planes[1:]:
            rule.combine_higher(mine, incoming)
        final = blocks[0]
    rule.finish(mine, final, len(ranks))
    return final


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_every_op_on_every_dtype_reduces_or_is_a_type_error_naming_both(op: str, name: str) -> None:
    dtype = DTYPES[name]
    if not supported(op, dtype):
        with pytest.raises(TypeError, match=rf"{op} of {name} "):
            arithmetic(op, dtype)
        return
    for count in (0, 1, 2, 9, 1000):
        one, two = encode(name, np.ones(count)), encode(name, np.arange(count) % 2)
        result = reduce(op, name, one, two)
        assert result.dtype == dtype.storage
        assert result.size == count
        expected = {
            "sum": [1, 2], "avg": [0.5, 1], "prod": [0, 1], "min": [0, 1], "max": [1, 1],
            "band": [0, 1], "bor": [1, 1], "bxor": [1, 0],
        }[op]  # fmt: skip
        wanted = (np.array(expected * 500)[:count]).astype(bool if name == "bool" else None)
        assert decode(name, result).tolist() == wanted.tolist()


@pytest.mark.parametrize(("op", "name"), CELLS)
def test_the_partial_plane_is_the_same_memory_unless_said_to_be_separate(op: str, name: str) -> None:
    rule = arithmetic(op, DTYPES[name])
    stored = np.zeros(7, rule.storage)
    plane = rule.plane(stored)
    assert plane.dtype == rule.partial
    assert plane.size == 7
    assert np.shares_memory(plane, stored) == (not rule.separate)
    assert rule.separate == (name in HALVES and op in ("sum", "avg", "prod"))
    assert not rule.separate or rule.partial == np.float32
    assert rule.order_sensitive == (op == "prod" and DTYPES[name].kind == "c")


def test_arithmetic_is_cached() -> None:
    assert arithmetic("sum", DTYPES["int8"]) is arithmetic("sum", DTYPES["int8"])
    assert arithmetic("sum", DTYPES["int8"]) is not arithmetic("sum", DTYPES["uint8"])


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.kind in "iu"])
def test_integers_wrap_as_numpys_do(name: str) -> None:
    info = np.iinfo(name)
    values = [info.max, info.min, info.max // 2 + 1, 100, 3]
    others = [1, info.max, info.max // 2 + 1, 100, info.max]
    span = 2**info.bits

    def wrapped(exact: int) -> int:
        return (exact - info.min) % span + info.min

    one, two = np.array(values, name), np.array(others, name)
    assert reduce("sum", name, one, two).tolist() == [
        wrapped(a + b) for a, b in zip(values, others, strict=True)
    ]
    assert reduce("prod", name, one, two).tolist() == [
        wrapped(a * b) for a, b in zip(values, others, strict=True)
    ]
    assert reduce("min", name, one, two).tolist() == [min(a, b) for a, b in zip(values, others, strict=True)]
    assert reduce("max", name, one, two).tolist() == [max(a, b) for a, b in zip(values, others, strict=True)]


@pytest.mark.parametrize(
    ("op", "truth"),
    [
        ("sum", operator.or_), ("prod", operator.and_), ("min", operator.and_), ("max", operator.or_),
        ("band", operator.and_), ("bor", operator.or_), ("bxor", operator.xor),
    ],
)  # fmt: skip
def test_bool_is_reduced_by_logic(op: str, truth: Any) -> None:
    one, two = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    assert reduce(op, "bool", one, two).tolist() == [
        truth(bool(a), bool(b)) for a, b in zip(one, two, strict=True)
    ]


def special_bits(name: str) -> np.ndarray:
    """Zeros, subnormals, ones, extremes, infinities and NaN of both signs: quiet, signalling, every payload end."""
    infinity = INFINITY[name]
    sign = 1 << (8 * DTYPES[name].itemsize - 1)
    magnitudes = [0, 1, 2, infinity // 2, infinity - 1, infinity, infinity + 1, CANONICAL_NAN[name], sign - 1]
    return np.array([m | s for m in magnitudes for s in (0, sign)], bits_of(name))


def pairs(name: str) -> tuple[np.ndarray, np.ndarray]:
    values = special_bits(name)
    one, two = (grid.ravel() for grid in np.meshgrid(values, values))
    storage = DTYPES[name].storage
    return one.copy().view(storage), two.copy().view(storage)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("name", FLOATS)
def test_min_and_max_are_independent_of_order_with_one_nan_and_ordered_zeros(name: str, op: str) -> None:
    one, two = pairs(name)
    results = [
        reduce(op, name, *blocks, mirrored=mirrored)
        for blocks in ((one, two), (two, one))
        for mirrored in (False, True)
    ]
    for other in results[1:]:
        assert same_bits(results[0], other)
    seen = results[0].view(bits_of(name))
    exact = [decode(name, block) for block in (one, two)]
    for got, a, b in zip(zip(seen, decode(name, results[0]), strict=True), *exact, strict=True):
        bits, value = got
        if math.isnan(a) or math.isnan(b):
            assert int(bits) == CANONICAL_NAN[name]
            continue
        key = functools.partial(sorted, key=lambda x: (x, math.copysign(1, x)))
        wanted = key([a, b])[0 if op == "min" else -1]
        assert (value, math.copysign(1, value)) == (wanted, math.copysign(1, wanted))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("name", HALVES)
def test_every_half_pattern_survives_min_and_max_alone(name: str, op: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(DTYPES[name].storage)
    every = np.concatenate([every, every[::-7]])  # and on into a second block
    result = reduce(op, name, every).view(np.uint16)
    nan = np.isnan(decode(name, every))
    assert (result[nan] == CANONICAL_NAN[name]).all()
    assert np.array_equal(result[~nan], every.view(np.uint16)[~nan])


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_is_found_in_every_block_of_a_long_array(op: str) -> None:
    one = np.zeros(200_000, np.float32)
    two = np.ones(200_000, np.float32)
    for where in (0, 65_535, 65_536, 199_999):
        two[where] = -np.nan
    result = reduce(op, "float32", one, two)
    assert np.flatnonzero(np.isnan(result)).tolist() == [0, 65_535, 65_536, 199_999]
    assert set(result.view(np.uint32)[np.isnan(result)].tolist()) == {CANONICAL_NAN["float32"]}
    assert np.nansum(result) == (0 if op == "min" else 199_996)


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("name", [*FLOATS, "complex64", "complex128"])
def test_sums_and_products_hold_one_nan_whichever_rank_held_which(name: str, op: str) -> None:
    real = {"complex64": "float32", "complex128": "float64"}.get(name, name)
    one, two = (block.view(DTYPES[name].storage) for block in pairs(real))
    for length in (
        1,
        2,
        3,
        8,
        9,
        one.size,
    ):  # numpy keeps the other operand's NaN at some lengths and offsets
        for start in range(0, min(one.size, 40), 7):
            a, b = one[start : start + length], two[start : start + length]
            results = [reduce(op, name, a, b), reduce(op, name, a, b, mirrored=True)]
            if name not in ("complex64", "complex128"):
                results.append(reduce(op, name, b, a))
            for result in results:
                bits = result.view(bits_of(real))
                nan = np.isnan(decode(real, result.view(DTYPES[real].storage)))
                assert (bits[nan] == CANONICAL_NAN[real]).all()
                if op != "prod" or DTYPES[name].kind != "c":
                    assert same_bits(result, results[0])


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
def test_every_half_pattern_round_trips_through_float32(name: str, op: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(DTYPES[name].storage)
    every = np.concatenate([every, every[::-7]])  # and on into a second block
    result = reduce(op, name, every).view(np.uint16)
    nan = np.isnan(decode(name, every))
    assert np.array_equal(result[~nan], every.view(np.uint16)[~nan])
    assert (result[nan] == CANONICAL_NAN[name]).all()


def round_half(name: str, value: Fraction) -> int:
    """Bits of a non-negative number rounded to nearest, ties to even, by exact arithmetic."""
    mantissa, bias, infinity = (10, 15, 0x7C00) if name == "float16" else (7, 127, 0x7F80)
    exponent = 1 - bias  # of the subnormals
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    ulp = Fraction(2) ** (exponent - mantissa)
    units = round(value / ulp)  # Fraction rounds ties to even
    return min(units + (exponent + bias - 1 << mantissa), infinity)


@pytest.mark.parametrize("name", HALVES)
def test_float32_rounds_to_the_nearest_half_with_ties_to_even(name: str) -> None:
    rule = arithmetic("sum", DTYPES[name])
    every = np.arange(0, CANONICAL_NAN[name] & ~0x3F, 61, dtype=np.uint16)  # steps through the finite ones
    every = every[np.isfinite(decode(name, every.view(rule.storage)))]
    lower = decode(name, every.view(rule.storage))
    upper = decode(name, (every + np.uint16(1)).view(rule.storage))
    upper[~np.isfinite(upper)] = 2 * lower[-1] - decode(name, (every[-1:] - np.uint16(1)).view(rule.storage))
    tie = ((lower + upper) / 2).astype(np.float32)
    candidates = np.concatenate(
        [
            lower.astype(np.float32),
            tie,
            np.nextafter(tie, np.float32(0)),
            np.nextafter(tie, np.float32(np.inf)),
        ]
    )
    candidates = np.concatenate(
        [candidates, np.float32([65519.996, 65520, 65536, 3.4028235e38, 1e-8, 2.9e-8, 1e-45])]
    )
    result = np.empty(candidates.size, rule.storage)
    rule.finish(candidates, result, 1)
    wanted = [round_half(name, Fraction(float(value))) for value in candidates]
    assert result.view(np.uint16).tolist() == wanted
    rule.finish(-candidates, result, 1)
    assert result.view(np.uint16).tolist() == [bits | 0x8000 for bits in wanted]


def float32_samples() -> np.ndarray:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    near_ties = (rng.integers(0, 2**16, 65_536, dtype=np.uint32) << 16) + rng.choice(
        np.uint32([0x7FFF, 0x8000, 0x8001]), 65_536
    )
    values = np.concatenate([bits, near_ties]).view(np.float32)
    return values[~np.isnan(values)]


def test_bfloat16_rounds_as_ml_dtypes_does() -> None:
    # ml_dtypes is optional: a second opinion, never a dependency.
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = float32_samples()
    result = np.empty(values.size, np.uint16)
    arithmetic("sum", DTYPES["bfloat16"]).finish(values, result, 1)
    assert np.array_equal(result, values.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.torch
@pytest.mark.parametrize("name", HALVES)
def test_halves_round_as_torch_does(name: str) -> None:
    # torch is optional: a second opinion, never a dependency.
    torch = pytest.importorskip("torch")
    values = float32_samples()
    result = np.empty(values.size, DTYPES[name].storage)
    arithmetic("sum", DTYPES[name]).finish(values, result, 1)
    wanted = torch.from_numpy(values).to(getattr(torch, name)).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(result.view(np.uint16), wanted)


def test_a_sum_of_halves_is_rounded_once_and_does_not_overflow_on_the_way() -> None:
    # 2048 + 1 + 1: rounded at every step it would stay 2048.
    one, many = np.full(3, 2048, np.float16), np.ones(3, np.float16)
    assert reduce("sum", "float16", one, many, many).tolist() == [2050] * 3
    large = np.full(3, 60000, np.float16)
    assert reduce("avg", "float16", *[large] * 8).tolist() == [60000] * 3
    assert reduce("sum", "float16", large, large, -large).tolist() == [60000] * 3
    assert reduce("sum", "float16", large, large).tolist() == [math.inf] * 3
    assert decode(
        "bfloat16", reduce("sum", "bfloat16", *[encode("bfloat16", [256.0, 1, 1])] * 3)
    ).tolist() == [768, 3, 3]


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_the_error_of_a_half_sum_is_within_the_stated_bound(op: str, name: str) -> None:
    rng = np.random.default_rng(3)
    size = 17
    ranks = [encode(name, rng.standard_normal(500) * 10.0 ** rng.integers(-6, 3, 500)) for _ in range(size)]
    result = decode(name, reduce(op, name, *ranks))
    unit = 2.0 ** (-11 if name == "float16" else -8)
    smallest = 2.0**-25 if name == "float16" else 2.0**-134
    steps = size - 1 + (op == "avg")
    share = size if op == "avg" else 1
    for index in range(500):
        values = [Fraction(float(decode(name, rank)[index])) for rank in ranks]
        exact = sum(values) / share
        spread = sum(map(abs, values)) / share * steps * Fraction(2) ** -24 / (1 - steps * Fraction(2) ** -24)
        bound = spread + max(Fraction(unit) * (abs(exact) + spread), Fraction(smallest))
        assert abs(Fraction(float(result[index])) - exact) <= bound


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128", *HALVES])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_avg_is_the_sum_divided_once(name: str, size: int) -> None:
    rng = np.random.default_rng(size)
    values = rng.standard_normal((size, 40)) * 8
    if DTYPES[name].kind == "c":
        values = values + 1j * rng.standard_normal((size, 40))
    ranks = [encode(name, row) for row in values]
    result = reduce("avg", name, *ranks)
    if name in HALVES:
        total = functools.reduce(np.add, [decode(name, rank).astype(np.float32) for rank in ranks])
        wanted = np.empty(40, DTYPES[name].storage)
        arithmetic("sum", DTYPES[name]).finish(total / np.float32(size), wanted, 1)
    else:
        total = functools.reduce(np.add, ranks)
        parts = np.dtype(f"f{DTYPES[name].itemsize // 2}") if DTYPES[name].kind == "c" else total.dtype
        wanted = (total.view(parts) / parts.type(size)).view(total.dtype)
    assert same_bits(result, wanted)


def test_avg_of_complex_keeps_the_finite_part_beside_an_infinite_one() -> None:
    value = np.array([complex(math.inf, 3), complex(4, -math.inf)], np.complex64)
    result = reduce("avg", "complex64", value, value)
    assert result.tolist() == [complex(math.inf, 3), complex(4, -math.inf)]


@pytest.mark.parametrize("name", HALVES)
def test_finish_leaves_a_separate_partial_plane_as_it_was(name: str) -> None:
    values = np.linspace(-3, 3, 70_000, dtype=np.float32)
    values[5] = np.nan
    before = values.tobytes()
    arithmetic("avg", DTYPES[name]).finish(values, np.empty(values.size, DTYPES[name].storage), 3)
    assert values.tobytes() == before


def unaligned(flat: np.ndarray) -> np.ndarray:
    raw = np.zeros(flat.nbytes + 1, np.uint8)
    view = raw[1:].view(flat.dtype)
    view[...] = flat
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(("op", "name"), CELLS)
def test_incoming_memory_may_be_unaligned_and_read_only(op: str, name: str) -> None:
    rule = arithmetic(op, DTYPES[name])
    one, two = (np.arange(20) % 3 + 1).astype(rule.partial), (np.arange(20) % 2 + 1).astype(rule.partial)
    for combine in (rule.combine_lower, rule.combine_higher):
        plain, odd = one.copy(), one.copy()
        combine(plain, two)
        combine(odd, unaligned(two))
        assert same_bits(plain, odd)
        assert not same_bits(plain, one) or op in ("min", "max", "band", "bor") or name == "bool"


def test_the_incoming_block_is_the_left_operand_below_and_the_right_one_above() -> None:
    # No named op shows it any more, so here is one that would.
    rule = Arithmetic("sum", DTYPES["int64"])
    rule._ufunc = np.subtract
    for combine, wanted in ((rule.combine_lower, 4), (rule.combine_higher, -4)):
        mine = np.array([3])
        combine(mine, np.array([7]))
        assert mine == wanted


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_a_complex_product_is_the_same_to_the_bit_however_the_bytes_were_cut(name: str) -> None:
    # numpy's own rounds one element alone, or an unaligned one, in another way than the same element among others.
    rng = np.random.default_rng(5)
    one, two = (rng.standard_normal((2, 4002)) * 3).view(np.complex128).astype(name)
    rule = arithmetic("prod", DTYPES[name])
    whole = one.copy()
    rule.combine_higher(whole, two)
    assert np.allclose(whole, one * two)
    for length in (1, 2, 3, 5, 8, 17, 2000):
        for combine in (rule.combine_lower, rule.combine_higher):
            cut = one.copy()
            for lo in range(0, len(one), length):
                raw = b"..." + two[lo : lo + length].tobytes()
                combine(cut[lo : lo + length], np.frombuffer(raw, name, offset=3))
            assert same_bits(cut, whole)
    swapped = two.copy()
    rule.combine_higher(swapped, one)
    assert same_bits(swapped, whole)


@pytest.mark.parametrize(("op", "name"), CELLS)
def test_a_long_reduction_allocates_blocks_not_copies(op: str, name: str) -> None:
    rule = arithmetic(op, DTYPES[name])
    stored = np.zeros(1_000_000, rule.storage)
    plane = rule.plane(stored)
    incoming = plane.copy()
    tracemalloc.start()
    try:
        rule.load(stored, plane)
        rule.combine_lower(plane, incoming)
        rule.combine_higher(plane, incoming)
        rule.finish(plane, stored, 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 65_536 * 8 * 2.5  # two blocks of the widest dtype, and small change


def overflowing(rule: Arithmetic) -> None:
    stored = np.empty(12, rule.storage)
    extreme = 0x7F7F if rule.dtype.name == "bfloat16" else np.finfo(rule.storage).max
    stored[:] = extreme
    stored[3:6] = np.array(0xFF80, np.uint16) if rule.dtype.name == "bfloat16" else -np.inf
    stored[6:9] = np.array(0x7FA0, np.uint16) if rule.dtype.name == "bfloat16" else np.inf
    stored[9:] = 1
    if rule.dtype.name in FLOATS:
        stored.view(bits_of(rule.dtype.name))[11] = INFINITY[rule.dtype.name] + 1  # a signalling NaN
    other = stored[::-1].copy()
    planes = [rule.plane(block) for block in (stored, other)]
    for block, plane in zip((stored, other), planes, strict=True):
        rule.load(block, plane)
    rule.combine_lower(*planes)
    rule.combine_higher(*planes)
    rule.finish(planes[0], stored, 3)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in CELLS if DTYPES[name].kind in "fc"])
def test_overflow_and_nan_neither_warn_nor_raise_nor_change_numpys_error_state(op: str, name: str) -> None:
    # Warnings are errors in this suite, so a stray one fails the test; and a thread has numpy's defaults.
    before = np.geterr()
    overflowing(arithmetic(op, DTYPES[name]))
    with np.errstate(all="raise"):
        overflowing(arithmetic(op, DTYPES[name]))
        assert set(np.geterr().values()) == {"raise"}
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            overflowing(arithmetic(op, DTYPES[name]))
        except (FloatingPointError, RuntimeWarning) as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(20)
    assert failures == []
    assert np.geterr() == before


def test_names_members_and_values_are_ops() -> None:
    assert [resolve_op(op) for op in OPS] == list(OPS)
    assert [resolve_op(member) for member in ReduceOp] == list(OPS)
    assert [member.value for member in ReduceOp] == list(OPS)
    assert resolve_op(ReduceOp.PRODUCT) == "prod"


@pytest.mark.parametrize(
    "op",
    [max, operator.add, lambda a, b: a, np.add, functools.partial(max)],
    ids=shown,
)
def test_a_callable_is_not_a_named_op(op: Any) -> None:
    assert resolve_op(op) is None


@pytest.mark.parametrize("op", ["mean", "SUM", "", "product"])
def test_an_unknown_name_is_a_value_error_that_lists_the_names(op: str) -> None:
    with pytest.raises(ValueError, match=f"op='{op}'.*sum, avg, prod"):
        resolve_op(op)


@pytest.mark.parametrize(
    "op",
    [None, 3, ("sum",), SimpleNamespace(name="SUM")],
    ids=shown,
)
def test_anything_else_is_a_type_error_that_shows_it(op: Any) -> None:
    with pytest.raises(TypeError, match="op must be") as caught:
        resolve_op(op)
    assert repr(op) in str(caught.value)


@pytest.mark.torch
def test_torchs_reduce_ops_are_ops_though_they_are_callable() -> None:
    # torch is optional; its ReduceOp is recognised by type, not imported.
    torch = pytest.importorskip("torch")
    theirs = torch.distributed.ReduceOp
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    assert [resolve_op(getattr(theirs, name)) for name in names] == list(OPS)
    assert [resolve_op(theirs(getattr(theirs, name))) for name in names] == list(OPS)
    with pytest.raises(TypeError, match="PREMUL_SUM"):
        resolve_op(theirs.PREMUL_SUM)
    assert resolve_op(torch.add) is None
    assert resolve_op(torch.nn.Bilinear(1, 1, 1)) is None


class Named(str, enum.Enum):  # noqa: UP042 (its str() is another text)
    SUM = "sum"


@pytest.mark.parametrize("op", [np.str_("sum"), Named.SUM, ReduceOp.SUM])
def test_the_name_of_an_op_is_a_plain_str(op: Any) -> None:
    assert type(resolve_op(op)) is str
    assert resolve_op(op) == "sum"


def fold(op: str, *values: Any) -> Any:
    return finish_object(op, functools.reduce(fold_op(op), values), len(values))


def test_python_values_fold_from_the_left_with_pythons_operators() -> None:
    assert fold("sum", 2**64, 1, 1) == 2**64 + 2
    assert fold("sum", [1], [2], [3]) == [1, 2, 3]
    assert fold("sum", "a", "b", "c") == "abc"
    assert fold("prod", 2**40, 2**40) == 2**80
    assert fold("avg", 1, 2, 4) == 7 / 3
    assert fold("avg", Fraction(1), Fraction(2)) == Fraction(3, 2)
    assert fold("band", {1, 2}, {2, 3}) == {2}
    assert fold("bor", {1}, {2}) == {1, 2}
    assert fold("bxor", 6, 3) == 5
    assert set(OPS) == {op for op in OPS if callable(fold_op(op))}


def test_the_left_one_wins_ties_of_min_and_max() -> None:
    for op in ("min", "max"):
        assert type(fold(op, 1, 1.0)) is int
        assert type(fold(op, 1.0, 1)) is float
    assert fold("min", 3, 1, 2) == 1
    assert fold("max", "a", "c", "b") == "c"


def test_a_fold_changes_its_left_operand_in_place_where_the_type_can() -> None:
    left = [1]
    assert fold_op("sum")(left, [2]) is left


@pytest.mark.parametrize(("name", "unit"), [("complex64", 2.0**-24), ("complex128", 2.0**-53)])
@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_a_product_of_complex_numbers_keeps_its_bound(name: str, unit: float, size: int) -> None:
    rng = np.random.default_rng(size)
    product = arithmetic("prod", DTYPES[name])
    values = (np.exp(2j * np.pi * rng.random((size, 500))) * rng.uniform(0.5, 2, (size, 500))).astype(name)
    for combine in (product.combine_lower, product.combine_higher):
        mine = values[0].copy()
        for row in values[1:]:
            combine(mine, row)
        bound = (1 + math.sqrt(2) * (2 * unit / (1 - 2 * unit))) ** (size - 1) - 1
        for column in range(500):
            real, imaginary = Fraction(1), Fraction(0)
            for element in values[:, column]:
                a, b = Fraction(float(element.real)), Fraction(float(element.imag))
                real, imaginary = real * a - imaginary * b, real * b + imaginary * a
            error = abs(
                complex(
                    Fraction(float(mine[column].real)) - real, Fraction(float(mine[column].imag)) - imaginary
                )
            )
            assert error <= bound * abs(complex(real, imaginary))
