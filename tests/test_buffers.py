"""Every container, dtype and memory layout of the array path goes in, and comes back, element for element."""

from __future__ import annotations

import array
import ctypes
import itertools
import pickle
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naming import shown

from asynccoll import overlap
from asynccoll.buffers import DTYPES, describe, flat_bytes, matches_out, rebuild
from asynccoll.overlap import overlaps_itself

NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]


def counted(shape: Any, dtype: Any) -> np.ndarray:
    """Distinct values where the dtype has room for them, with imaginary parts in complex dtypes."""
    count = int(np.prod(shape))
    values = np.arange(count) % (2 if np.dtype(dtype) == bool else 100)
    filled = values.astype(dtype)
    if filled.dtype.kind == "c":
        filled = filled + filled.dtype.type(1j) * filled[::-1]
    return filled.reshape(shape)


def unaligned(array_: np.ndarray) -> np.ndarray:
    raw = np.zeros(array_.nbytes + 1, np.uint8)
    view = raw[1:].view(array_.dtype).reshape(array_.shape)
    view[...] = array_
    return view


# name -> view of a base array. The base is (6, 8), C-contiguous, so most views leave gaps.
VIEWS: dict[str, Any] = {
    "contiguous": lambda base: base,
    "every other": lambda base: base.reshape(-1)[::2],
    "transposed": lambda base: base.T,
    "reversed": lambda base: base.reshape(-1)[::-1],
    "both reversed": lambda base: base[::-1, ::-1],
    "column": lambda base: base[:, 0],
    "window": lambda base: base[1:4, 2:7],
    "strided window": lambda base: base[::2, 1::3],
    "offset": lambda base: base.reshape(-1)[5:],
    "three axes permuted": lambda base: base.reshape(2, 3, 8).transpose(2, 0, 1),
    "diagonal": lambda base: np.einsum("ii->i", base[:, 1:7]),  # writable, unlike ndarray.diagonal
    "0-d": lambda base: base[2, 3, ...],
    "empty": lambda base: base.reshape(-1)[:0],
    "empty 2-d": lambda base: base[:0],
    "unaligned": unaligned,
}


@pytest.mark.parametrize("name", NUMPY_DTYPES)
@pytest.mark.parametrize("layout", VIEWS)
def test_any_numpy_layout_is_packed_in_c_order_and_wrapped_again(layout: str, name: str) -> None:
    value = VIEWS[layout](counted((6, 8), name))
    found = describe(value)
    assert found is not None
    assert found.dtype is DTYPES[name]
    assert (found.shape, found.count, found.nbytes) == (value.shape, value.size, value.nbytes)

    packed = found.pack()
    assert packed.tolist() == value.ravel(order="C").tolist()
    assert packed.dtype == value.dtype
    assert packed.ndim == 1
    assert packed.flags.carray
    assert not np.may_share_memory(packed, value)

    wrapped = found.wrap(packed)
    assert type(wrapped) is np.ndarray
    assert wrapped.shape == value.shape
    assert wrapped.flags.writeable
    assert np.array_equal(wrapped, value)
    assert value.size == 0 or np.shares_memory(wrapped, packed)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("name", [name for name in NUMPY_DTYPES if DTYPES[name].itemsize > 1])
def test_byte_order_is_undone_going_in_and_restored_coming_back(name: str, order: str) -> None:
    value = counted((3, 4), np.dtype(name).newbyteorder(order))
    found = describe(value)
    assert found is not None
    assert found.dtype is DTYPES[name]
    assert found.pack().dtype.isnative
    assert found.pack().tolist() == value.ravel().tolist()
    wrapped = found.wrap(found.pack())
    assert wrapped.dtype.str == value.dtype.str
    assert np.array_equal(wrapped, value)
    assert wrapped.flags.writeable


def test_a_snapshot_does_not_follow_the_callers_array() -> None:
    value = np.arange(4.0)
    packed = describe(value).pack()
    value[:] = -1
    assert packed.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", ["contiguous", "0-d", "empty", "offset", "unaligned"])
def test_view_of_contiguous_memory_is_that_memory(layout: str) -> None:
    value = VIEWS[layout](counted((6, 8), np.float32))
    seen = describe(value).view()
    assert seen.ndim == 1
    assert seen.tolist() == value.ravel().tolist()
    assert seen.ctypes.data == value.ctypes.data


@pytest.mark.parametrize("layout", ["every other", "transposed", "reversed", "column", "window"])
def test_there_is_no_view_of_memory_with_another_layout(layout: str) -> None:
    assert describe(VIEWS[layout](counted((6, 8), np.float32))).view() is None


def test_there_is_no_view_of_swapped_bytes_and_a_read_only_one_of_read_only_memory() -> None:
    assert describe(np.arange(3, dtype=">f8")).view() is None
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    assert not describe(fixed).view().flags.writeable


@pytest.mark.parametrize("order", ["=", ">"])
@pytest.mark.parametrize("layout", VIEWS)
def test_a_lent_view_gets_its_result_and_the_elements_between_stay(layout: str, order: str) -> None:
    base = counted((6, 8), np.dtype(np.int32).newbyteorder(order))
    before = base.copy()
    value = VIEWS[layout](base)
    expected = value + 1000
    lent, write_back = describe(value).lend()
    assert lent.dtype.isnative
    assert lent.flags.carray
    assert lent.ndim == 1
    assert lent.tolist() == value.ravel().tolist()
    lent += 1000
    if write_back is not None:
        write_back()
    assert np.array_equal(value, expected)
    touched = VIEWS[layout](base)
    if np.shares_memory(touched, base):
        touched -= 1000
    assert np.array_equal(base, before)


def test_contiguous_memory_is_lent_itself() -> None:
    value = np.arange(6.0).reshape(2, 3)
    lent, write_back = describe(value).lend()
    assert write_back is None
    assert lent.ctypes.data == value.ctypes.data


def test_read_only_memory_is_not_lent() -> None:
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        describe(fixed).lend()
    with pytest.raises(ValueError, match="read-only"):
        describe(memoryview(b"abc")).lend()
    with pytest.raises(ValueError, match="immutable"):
        describe(np.float32(1)).lend()


def windows() -> dict[str, np.ndarray]:
    base = np.arange(24.0)
    strided = np.lib.stride_tricks.as_strided
    return {
        "broadcast": strided(base, (3, 4), (0, 8)),
        "expanded inside": strided(base, (4, 3), (8, 0)),
        "sliding window": strided(base, (5, 3), (8, 8)),
        "half an element": strided(base, (4,), (4,)),
        "large sliding window": strided(np.zeros(100_000), (50_000, 2), (8, 8)),
        "large broadcast": strided(base, (100_000, 4), (0, 8)),
    }


@pytest.mark.parametrize("name", windows())
def test_memory_that_overlaps_itself_is_not_lent_but_can_be_packed(name: str) -> None:
    value = windows()[name]
    with pytest.raises(ValueError, match="same memory"):
        describe(value).lend()
    assert describe(value).pack().tolist() == value.ravel().tolist()


def brute_overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    taken: set[int] = set()
    for index in itertools.product(*(range(n) for n in shape)):
        start = sum(i * s for i, s in zip(index, strides, strict=True))
        element = set(range(start, start + itemsize))
        if taken & element:
            return True
        taken |= element
    return False


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_overlap_is_found_exactly_in_small_views(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 4))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim)))
    strides = tuple(data.draw(st.lists(st.integers(-20, 20), min_size=ndim, max_size=ndim)))
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    assert overlaps_itself(shape, strides, itemsize) == brute_overlap(shape, strides, itemsize)


def test_interleaved_runs_do_not_overlap() -> None:
    assert not overlaps_itself((2, 3, 2), (1, 4, 6), 1)  # though the stride of 6 is within the span of 4s


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_every_slice_and_transpose_of_ordinary_memory_passes_the_rule_for_large_views(
    data: st.DataObject,
) -> None:
    # Only shape and strides matter, so the base needs no memory, and the rule is switched on for every size.
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    base = np.lib.stride_tricks.as_strided(np.zeros(1), sizes, np.cumprod([8, *sizes[:0:-1]])[::-1])
    steps = [
        slice(data.draw(st.integers(0, 3)), None, data.draw(st.sampled_from([1, 1, 2, -1, -2])))
        for _ in sizes
    ]
    view = base[tuple(steps)].transpose(data.draw(st.permutations(range(len(sizes)))))
    with mock.patch.object(overlap, "_EXACT_OVERLAP", -1):
        assert not overlaps_itself(view.shape, view.strides, 8)


def test_the_rule_for_large_views_still_refuses_what_overlaps() -> None:
    assert overlaps_itself((70_000, 3), (8, 8), 8)
    assert overlaps_itself((300, 300), (8, 16), 8)
    assert overlaps_itself((70_000,), (0,), 8)
    assert not overlaps_itself((70_000, 0), (0, 0), 8)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_a_numpy_scalar_comes_back_as_the_same_scalar_type(name: str) -> None:
    value = np.dtype(name).type(1)
    found = describe(value)
    assert (found.dtype.name, found.shape, found.count) == (name, (), 1)
    assert found.pack().tolist() == [1]
    assert found.view().tolist() == [1]
    wrapped = found.wrap(found.pack())
    assert type(wrapped) is type(value)
    assert wrapped == value
    assert found.wrap(np.ones(2, name), (2,)).shape == (2,)


def test_a_zero_dimensional_array_stays_an_array() -> None:
    wrapped = describe(np.array(3.0)).wrap(np.array([4.0]))
    assert type(wrapped) is np.ndarray
    assert wrapped.shape == ()
    wrapped[...] = 5


@pytest.mark.parametrize("code", list("bBhHiIlLqQfd"))
def test_array_array_comes_back_with_its_typecode(code: str) -> None:
    value = array.array(code, [1, 2, 3])
    found = describe(value)
    assert (found.shape, found.nbytes) == ((3,), 3 * value.itemsize)
    wrapped = found.wrap(found.pack() * 2)
    assert wrapped == array.array(code, [2, 4, 6])
    assert wrapped.typecode == code
    lent, write_back = found.lend()
    lent += 1
    assert write_back is None
    assert value.tolist() == [2, 3, 4]
    assert type(found.wrap(np.zeros(4, found.dtype.storage), (2, 2))) is np.ndarray


def test_an_empty_array_array_is_an_empty_array() -> None:
    found = describe(array.array("d"))
    assert (found.dtype.name, found.shape) == ("float64", (0,))
    assert found.wrap(found.pack()) == array.array("d")


@pytest.mark.parametrize("code", ["?", "b", "H", "i", "l", "q", "Q", "e", "f", "d", "F", "D", ">f4", ">c16"])
def test_a_typed_memoryview_comes_back_with_its_format_and_shape(code: str) -> None:
    held = np.ones((2, 3), code)
    value = memoryview(held)
    found = describe(value)
    assert found.dtype is describe(held).dtype
    assert found.shape == (2, 3)
    wrapped = found.wrap(found.pack())
    assert type(wrapped) is memoryview
    assert (wrapped.format, wrapped.shape, wrapped.readonly) == (value.format, (2, 3), False)
    assert wrapped.tobytes() == value.tobytes()


def test_memoryviews_of_bytes_ctypes_and_slices_are_arrays() -> None:
    assert describe(memoryview(b"abc")).dtype.name == "uint8"
    assert describe(memoryview(b"abc")).pack().tolist() == [97, 98, 99]
    assert describe(memoryview((ctypes.c_float * 3)(1, 2, 3))).dtype.name == "float32"
    assert describe(memoryview(np.arange(6))[::2]).pack().tolist() == [0, 2, 4]


def test_a_buffer_that_is_not_numbers_is_refused_by_format() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typecode u is on its way out of Python
        text = array.array("u", "ab")
    for value in (
        memoryview(b"ab").cast("c"),
        memoryview(np.zeros(2, "S3")),
        memoryview(np.zeros(2, "i4,f4")),
        text,
    ):
        with pytest.raises(TypeError, match="format"):
            describe(value)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, 1j, "text", b"bytes", bytearray(b"bytes"), [1, 2], (1,), {"a": 1}, {1}, object(), len,
     np.str_("text"), np.bytes_(b"bytes"), [np.zeros(2)]],
    ids=shown,
)  # fmt: skip
def test_other_python_values_are_not_on_the_array_path(value: Any) -> None:
    assert describe(value) is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.array([None]), "object"),
        (np.array(["a"]), "<U1"),
        (np.array([b"a"]), r"\|S1"),
        (np.array(["2024-01-01"], "M8[D]"), r"datetime64\[D\]"),
        (np.array([1], "m8[s]"), r"timedelta64\[s\]"),
        (np.timedelta64(1, "s"), r"timedelta64\[s\]"),
        (np.zeros(1, "f4,i4"), "f0"),
        (np.zeros(1, "V3"), "V3"),
        (np.zeros(1, np.longdouble), "longdouble|float128"),
        (np.zeros(1, np.clongdouble), "clongdouble|complex256"),
        (np.longdouble(1), "longdouble|float128"),
    ],
)
def test_a_dtype_without_arithmetic_is_refused_by_name_with_advice(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=name) as caught:
        describe(value)
    assert ".astype" in str(caught.value)
    assert "list" in str(caught.value)


def test_array_subclasses_with_rules_of_their_own_are_refused_by_type() -> None:
    with pytest.raises(TypeError, match="MaskedArray"):
        describe(np.ma.masked_array([1, 2], [False, True]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)  # that is how numpy greets np.matrix
        matrix = np.matrix([[1, 2]])
    with pytest.raises(TypeError, match="matrix"):
        describe(matrix)


def test_a_memory_map_is_an_ordinary_array(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "values", np.float32, "w+", shape=(4,))
    mapped[:] = 3
    found = describe(mapped)
    lent, write_back = found.lend()
    lent += 1
    assert write_back is None
    assert mapped.tolist() == [4] * 4
    assert type(found.wrap(found.pack())) is np.ndarray


def test_equal_dtypes_that_are_other_objects_are_recognised() -> None:
    unpickled = pickle.loads(pickle.dumps(np.arange(3, dtype=np.float32)))
    assert describe(unpickled).dtype is DTYPES["float32"]
    for alias in "lqLQ":
        value = np.arange(3).astype(alias)
        found = describe(value)
        assert found.dtype.name == value.dtype.name
        assert found.pack().dtype.char == found.dtype.storage.char
        assert found.wrap(found.pack()).dtype.char == alias
        lent, write_back = found.lend()
        lent += 1
        assert write_back is None
        assert value.tolist() == [1, 2, 3]


def test_dtype_records_keep_their_identity_through_pickle() -> None:
    for dtype in DTYPES.values():
        assert pickle.loads(pickle.dumps(dtype)) is dtype
        assert dtype.storage.itemsize == dtype.itemsize


def test_a_wrapped_value_is_writable_and_aligned_whatever_it_came_from() -> None:
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    for source in (np.zeros(3), np.zeros(3, ">f8"), memoryview(np.zeros(3)), array.array("d", [0, 0, 0])):
        for flat in (fixed, unaligned(np.arange(3.0))):
            wrapped = np.asarray(describe(source).wrap(flat))
            assert wrapped.tolist() == [0, 1, 2]
            assert wrapped.flags.behaved
            assert not np.shares_memory(wrapped, flat)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_flat_bytes_is_the_memory_as_bytes(name: str) -> None:
    flat = counted(5, name)
    seen = flat_bytes(flat)
    assert (seen.format, seen.ndim, seen.nbytes) == ("B", 1, flat.nbytes)
    assert bytes(seen) == flat.tobytes()
    seen[0] = 1
    assert flat.tobytes()[0] == 1
    assert len(flat_bytes(flat[:0])) == 0
    flat.flags.writeable = False
    assert flat_bytes(flat).readonly


def test_flat_bytes_spans_more_than_four_gibibytes() -> None:
    huge = np.lib.stride_tricks.as_strided(np.zeros(1), (2**29 + 1,), (8,))  # nothing of it is read
    assert flat_bytes(huge).nbytes == 2**32 + 8


def test_out_must_have_the_dtype_and_shape_of_the_result() -> None:
    value = describe(np.zeros((2, 3), np.float32))
    with pytest.raises(TypeError, match=r"float32 of shape \(2, 3\), not float64"):
        matches_out(value, describe(np.zeros((2, 3))))
    with pytest.raises(TypeError, match=r"float32 of shape \(2, 3\), not int32"):
        matches_out(value, describe(np.zeros((2, 3), np.int32)))
    with pytest.raises(ValueError, match=r"float32 of shape \(2, 3\), not of shape \(3, 2\)"):
        matches_out(value, describe(np.zeros((3, 2), np.float32)))
    with pytest.raises(ValueError, match=r"of shape \(1, 3\)"):
        matches_out(value, describe(np.zeros((2, 3), np.float32)), (1, 3))
    matches_out(value, describe(np.zeros((1, 3), ">f4")), (1, 3))


def test_out_must_be_writable() -> None:
    value = describe(np.zeros(()))
    fixed = np.zeros(())
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        matches_out(value, describe(fixed))
    with pytest.raises(ValueError, match="read-only"):
        matches_out(value, describe(np.float64(1)))


def test_out_may_be_the_input_itself_or_memory_apart_but_not_overlap_it_otherwise() -> None:
    base = np.arange(20.0)
    for same in (base[2:8], base[2:14:2], base[12:2:-2], base[3:9].reshape(2, 3).T):
        matches_out(describe(same), describe(same.view()))
    matches_out(describe(base[0:10:2]), describe(base[1:10:2]))  # interleaved, nothing shared
    matches_out(describe(base[:10]), describe(base[10:]))
    for one, other in (
        (base[0:8], base[1:9]),
        (base[0:8], base[7::-1]),
        (base[0:6].reshape(2, 3), base[0:12].reshape(2, 6)[:, ::2]),
        (base[:9].reshape(3, 3), base[:9].reshape(3, 3).T),
    ):
        with pytest.raises(ValueError, match="overlaps the input"):
            matches_out(describe(one), describe(other))


def test_describing_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # half imported by another thread
    assert describe([1]) is None
    assert describe(array.array("f", [1])).dtype.name == "float32"


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(3, dtype=">i4"),
        np.int16(3),
        array.array("H", [1, 2]),
        memoryview(b"ab"),
    ],
    ids=["array", "big-endian array", "scalar", "array.array", "memoryview"],
)
def test_another_rank_rebuilds_a_value_of_the_senders_kind(value: Any) -> None:
    found = describe(value)
    rebuilt = rebuild(found.container, found.dtype, found.shape, found.pack())
    assert type(rebuilt) is type(value)
    assert np.array_equal(np.asarray(rebuilt), np.asarray(value))
    assert describe(rebuilt).container == found.container


def test_a_kind_that_nobody_has_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="'pandas'"):
        rebuild("pandas", DTYPES["int8"], (1,), np.zeros(1, np.int8))


# ml_dtypes and torch are optional: users bring them, asynccoll does not depend on them.


def test_ml_dtypes_bfloat16_travels_as_bits_and_its_other_types_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for value in (
        np.array([1, -2, 3.5], ml_dtypes.bfloat16),
        np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3).T,
        np.array(2, ml_dtypes.bfloat16),
        np.zeros((0, 2), ml_dtypes.bfloat16),
    ):
        found = describe(value)
        assert found.dtype.name == "bfloat16"
        packed = found.pack()
        assert packed.dtype == np.uint16
        assert packed.tobytes() == value.tobytes()
        wrapped = found.wrap(packed)
        assert wrapped.dtype == value.dtype
        assert wrapped.shape == value.shape
        assert wrapped.tobytes() == value.tobytes()
        rebuilt = rebuild(found.container, found.dtype, found.shape, found.pack())
        assert rebuilt.dtype == value.dtype
        assert rebuilt.tobytes() == value.tobytes()
    scalar = describe(ml_dtypes.bfloat16(1.5))
    assert type(scalar.wrap(scalar.pack())) is ml_dtypes.bfloat16
    strided = np.arange(6).astype(ml_dtypes.bfloat16)
    lent, write_back = describe(strided[::2]).lend()
    lent[:] = 0x3F80
    write_back()
    assert strided.astype(int).tolist() == [1, 1, 1, 3, 1, 5]
    for name in ("float8_e4m3fn", "float8_e5m2", "int4", "uint4"):
        with pytest.raises(TypeError, match=name):
            describe(np.zeros(2, getattr(ml_dtypes, name)))


TORCH_VIEWS: dict[str, Any] = {
    "contiguous": lambda base: base,
    "every other": lambda base: base.reshape(-1)[::2],
    "transposed": lambda base: base.T,
    "column": lambda base: base[:, 0],
    "window": lambda base: base[1:4, 2:7],
    "offset": lambda base: base.reshape(-1)[5:],
    "permuted": lambda base: base.reshape(2, 3, 8).permute(2, 0, 1),
    "0-d": lambda base: base[2, 3],
    "empty": lambda base: base.reshape(-1)[:0],
    "expanded": lambda base: base[:1].expand(4, 8),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("layout", TORCH_VIEWS)
def test_any_torch_layout_is_packed_in_c_order_and_wrapped_again(layout: str, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    base = (torch.arange(48) % (2 if name == "bool" else 100)).to(dtype).reshape(6, 8)
    value = TORCH_VIEWS[layout](base)
    found = describe(value)
    assert (found.dtype.name, found.shape, found.count) == (name, tuple(value.shape), value.numel())
    packed = found.pack()
    assert packed.dtype == found.dtype.storage
    if name == "bfloat16":
        assert packed.tolist() == (value.flatten().view(torch.int16).to(torch.int32) & 0xFFFF).tolist()
    else:
        assert packed.tolist() == value.flatten().tolist()
    rebuilt = rebuild(found.container, found.dtype, found.shape, found.pack())
    wrapped = found.wrap(packed)
    assert type(wrapped) is type(rebuilt) is torch.Tensor
    assert wrapped.dtype == rebuilt.dtype == dtype
    assert torch.equal(rebuilt, value)
    assert wrapped.shape == value.shape
    assert torch.equal(wrapped, value)

    if layout == "expanded":
        with pytest.raises(ValueError, match="same memory"):
            found.lend()
        return
    before = base.clone()
    lent, write_back = found.lend()
    lent[:] = 0
    if write_back is not None:
        write_back()
    assert torch.equal(value, torch.zeros_like(value))
    value.copy_(wrapped)
    assert torch.equal(base, before)


@pytest.mark.torch
def test_tensors_with_gradients_and_parameters_are_detached() -> None:
    torch = pytest.importorskip("torch")
    for value in (torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3)), torch.ones(3).exp()):
        found = describe(value)
        wrapped = found.wrap(found.pack())
        assert type(wrapped) is torch.Tensor
        assert not wrapped.requires_grad
        lent, write_back = found.lend()
        lent += 1
        assert write_back is None
        assert torch.equal(value.detach(), wrapped + 1)


@pytest.mark.torch
def test_conjugate_and_negative_views_are_resolved_and_written_back() -> None:
    torch = pytest.importorskip("torch")
    base = torch.tensor([1 + 2j, 3 - 4j])
    lazy = base.conj()
    negative = lazy.imag
    assert lazy.is_conj()
    assert negative.is_neg()
    assert describe(lazy).pack().tolist() == [1 - 2j, 3 + 4j]
    assert describe(negative).pack().tolist() == [-2, 4]
    lent, write_back = describe(lazy).lend()
    lent[:] = [5 + 6j, 7]
    write_back()
    assert base.tolist() == [5 - 6j, 7]
    lent, write_back = describe(negative).lend()
    lent[:] = [1, 2]
    write_back()
    assert base.tolist() == [5 - 1j, 7 - 2j]
    with pytest.raises(ValueError, match="same memory"):
        describe(base.conj().expand(3, 2)).lend()


@pytest.mark.torch
def test_tensors_elsewhere_or_not_dense_are_refused_with_advice() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"'meta'.*\.cpu\(\)"):
        describe(torch.zeros(2, device="meta"))
    with pytest.raises(TypeError, match="sparse_coo"):
        describe(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"Marked.*subclass"):
        describe(torch.zeros(2).as_subclass(type("Marked", (torch.Tensor,), {})))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["complex32", "float8_e4m3fn", "float8_e5m2", "uint4", "bits8"])
def test_torch_dtypes_without_arithmetic_are_refused_by_name(name: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls complex32 experimental when one is made
        value = torch.empty(2, dtype=getattr(torch, name))
    with pytest.raises(TypeError, match=rf"torch\.{name}.*\.to\("):
        describe(value)


@pytest.mark.torch
def test_quantised_tensors_are_refused_by_dtype() -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantisation is deprecated in torch, and still there
        quantised = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"torch\.qint8"):
        describe(quantised)


@pytest.mark.torch
def test_a_tensor_can_be_out_of_an_array_and_the_other_way_round() -> None:
    torch = pytest.importorskip("torch")
    held = np.zeros(4, np.float32)
    shared = torch.from_numpy(held)
    matches_out(describe(held), describe(shared))
    matches_out(describe(shared), describe(np.zeros(4, np.float32)))
    with pytest.raises(ValueError, match="overlaps"):
        matches_out(describe(shared[:2]), describe(held[1:3]))


@pytest.mark.torch
def test_a_tensor_is_made_of_read_only_or_unaligned_memory_without_a_warning() -> None:
    torch = pytest.importorskip("torch")
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    for flat in (fixed, unaligned(np.arange(3.0))):
        wrapped = describe(torch.zeros(3, dtype=torch.float64)).wrap(flat, (3, 1))
        assert wrapped.flatten().tolist() == [0, 1, 2]
        wrapped += 1
        assert flat.tolist() == [0, 1, 2]
