"""What a named op does to two blocks of elements. Knows numpy memory and dtypes, not ranks or schedules.

An `Arithmetic` works on two planes over the same elements (see `asynccoll.algorithms.steps`). Values under
reduction live on the *partial* plane, in a dtype in which any order of operands gives the defined result:

- float16 and bfloat16 under sum, avg and prod: float32, rounded to the half type once, at the end;
- floating point under min and max: integers in the wanted order (-0.0 below 0.0, NaN beyond all);
- everything else: the values themselves.

Results live on the *final* plane, in the storage dtype. Every NaN in a floating point result is the one
canonical quiet NaN: which operand's NaN survives an addition depends on alignment and vector width, and would
differ between ranks. All of it is numpy, never torch, so that mixed containers agree. The rules as a table,
with error bounds: ``docs/numerics.md``.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from asynccoll.buffers import DTYPES, DType, Flat

__all__ = [
    "OPS",
    "Arithmetic",
    "ReduceOp",
    "arithmetic",
    "finish_object",
    "fold_op",
    "resolve_op",
]

OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
"""Names of the reductions, as ``op=`` takes them."""

# Elements converted at a time. 64 Ki float32 and their scratch stay in a 1 MiB level 2 cache; 32 Ki took 10 %
# longer over 4 Mi elements, 16 Ki 40 % (numpy's price per call).
_BLOCK = 65_536

# Up to here Python's own sum of a list finds a NaN faster (0.2 us) than a numpy reduction (1 us).
_FEW = 8

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}

# Of a name that is a subclass of str, the name itself: what travels and is compared must be the same everywhere.
_NAMES = {name: name for name in OPS}

# name of the dtype -> (bits of positive infinity, bits of the canonical quiet NaN), IEEE 754 and bfloat16.
_SPECIAL_BITS = {
    "float16": (0x7C00, 0x7E00),
    "bfloat16": (0x7F80, 0x7FC0),
    "float32": (0x7F80_0000, 0x7FC0_0000),
    "float64": (0x7FF0_0000_0000_0000, 0x7FF8_0000_0000_0000),
}

_TORCH_OPS = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}

_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.iadd,
    "avg": operator.iadd,
    "prod": operator.imul,
    "min": min,
    "max": max,
    "band": operator.iand,
    "bor": operator.ior,
    "bxor": operator.ixor,
}


class ReduceOp(enum.Enum):
    """The named reductions; each verb takes a member or its value, the plain name."""

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PRODUCT = "prod"
    """torch's word for `PROD`."""


def resolve_op(op: Any) -> str | None:
    """Name of the reduction that ``op`` stands for; None for a callable, which reduces objects.

    Args:
        op: a name from `OPS`, a `ReduceOp`, a value of ``torch.distributed.ReduceOp``, or a callable of two
            arguments.

    Raises:
        ValueError: an unknown name.
        TypeError: neither of those, or torch's PREMUL_SUM, which has a factor that no rank compares.
    """
    if isinstance(op, str):
        name = _NAMES.get(op)
        if name is not None:
            return name
        raise ValueError(f"op={op!r} is not a reduction: use one of {', '.join(OPS)}, or a callable")
    if isinstance(op, ReduceOp):
        return str(op.value)
    kind = type(op)
    if kind.__name__ in ("RedOpType", "ReduceOp") and kind.__module__.startswith("torch"):
        # torch's enum members are callable too; opts.reduceOp is a ReduceOp that holds one in `.op`.
        member = getattr(op, "op", op).name
        if member in _TORCH_OPS:
            return _TORCH_OPS[member]
        raise TypeError(f"torch's ReduceOp.{member} is not supported: scale the tensor, then use SUM")
    if callable(op):
        return None
    raise TypeError(f"op must be one of {', '.join(OPS)}, a ReduceOp or a callable, not {op!r}")


class Arithmetic:
    """One op on one dtype, over flat arrays; `arithmetic` gives it. This class does integers and bool.

    The methods take one-dimensional arrays of equal length: ``partial_flat``, ``mine`` and ``incoming`` of
    dtype `partial`, ``storage_flat`` of dtype `storage`. They write nowhere else, allocate at most blocks of
    64 Ki elements, and neither warn nor raise on overflow, NaN or infinity, whatever numpy's error state.
    """

    __slots__ = ("_ufunc", "dtype", "op", "order_sensitive", "partial", "separate", "storage")

    def __init__(self, op: str, dtype: DType) -> None:
        self.op = op
        self.dtype = dtype
        self.storage = dtype.storage  # of the final plane
        self.partial: np.dtype[Any] = dtype.storage  # of the plane under reduction
        self.separate = False  # whether the partial plane needs memory of its own
        # Of a complex product every element is computed by one rank alone, whatever else computes it elsewhere.
        self.order_sensitive = op == "prod" and dtype.kind == "c"
        self._ufunc = _UFUNCS[op]  # numpy's bool loops are logical: add is or, multiply and

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} {self.op} {self.dtype.name}>"

    def plane(self, storage_flat: Flat) -> Flat:
        """The partial plane of a final plane: the same memory as `partial`, or new, unset if `separate`."""
        if self.separate:
            return np.empty(storage_flat.size, self.partial)
        return storage_flat if self.partial is self.storage else storage_flat.view(self.partial)

    def load(self, storage_flat: Flat, partial_flat: Flat) -> None:
        """Fill the partial plane from the caller's values. Where it is the same memory, in place."""

    def combine_lower(self, mine: Flat, incoming: Flat) -> None:
        """``mine = op(incoming, mine)``, ``incoming`` from lower ranks; it may be read-only, unaligned."""
        self._ufunc(incoming, mine, out=mine)

    def combine_higher(self, mine: Flat, incoming: Flat) -> None:
        """``mine = op(mine, incoming)``, ``incoming`` from higher ranks; it may be read-only, unaligned."""
        self._ufunc(mine, incoming, out=mine)

    def finish(self, partial_flat: Flat, storage_flat: Flat, size: int) -> None:
        """Divide (avg, by ``size`` ranks) and round or map complete values onto the final plane, once.

        Where the planes are separate memory the partial plane stays as it was.
        """


class _Floating(Arithmetic):
    """sum, avg and prod of float32, float64 and complex: the values themselves; NaN canonical at the end."""

    __slots__ = ("_bits", "_nan", "_plain", "_real")

    def __init__(self, op: str, dtype: DType) -> None:
        super().__init__(op, dtype)
        self._plain = op != "avg"  # complete values are the results, unless there is a NaN
        real = DTYPES[f"float{4 * dtype.itemsize}"] if dtype.kind == "c" else dtype
        self._real = real.storage  # of the parts of an element
        self._bits = np.dtype(f"u{real.itemsize}")
        self._nan = _SPECIAL_BITS[real.name][1]

    def combine_lower(self, mine: Flat, incoming: Flat) -> None:
        _quietly(self._ufunc, incoming, mine, mine)

    def combine_higher(self, mine: Flat, incoming: Flat) -> None:
        _quietly(self._ufunc, mine, incoming, mine)

    def finish(self, partial_flat: Flat, storage_flat: Flat, size: int) -> None:
        if self._plain and storage_flat.size <= _FEW:
            total = sum(storage_flat.tolist())
            if total == total:
                return
        _quietly(self._finish, partial_flat, storage_flat, size)

    def _finish(self, partial_flat: Flat, storage_flat: Flat, size: int) -> None:
        parts = storage_flat.view(self._real)
        if self.op == "avg":
            # By parts: complex division by size + 0j makes NaN of the part beside an infinite one.
            np.true_divide(partial_flat.view(self._real), size, out=parts)
        if _has_nan(parts):
            parts.view(self._bits)[np.isnan(parts)] = self._nan


class _ComplexProduct(_Floating):
    """prod of complex numbers, by parts, so that every element is rounded alike.

    numpy's own complex product uses fused operations in some loops and not in others, so its last bit depends on how many
    elements it is given at once: on how the network cut the bytes. Real products and sums have one result each.
    """

    __slots__ = ()

    def combine_lower(self, mine: Flat, incoming: Flat) -> None:
        _quietly(self._multiply, mine, incoming)

    def combine_higher(self, mine: Flat, incoming: Flat) -> None:
        _quietly(self._multiply, mine, incoming)  # commutes, to the bit

    def _multiply(self, mine: Flat, incoming: Flat) -> None:
        for lo in range(0, mine.size, _BLOCK // 2):
            ours, theirs = mine[lo : lo + _BLOCK // 2], incoming[lo : lo + _BLOCK // 2]
            real = ours.real * theirs.real
            real -= ours.imag * theirs.imag
            imaginary = ours.real * theirs.imag
            imaginary += ours.imag * theirs.real
            ours.real, ours.imag = real, imaginary


class _Widened(_Floating):
    """sum, avg and prod of float16 and bfloat16: float32 until the end, then rounded once, ties to even.

    Integer operations for bfloat16; for float16 numpy's cast, which is exact everywhere (4 Mi elements: 6 ms
    up, 13 ms down). Integers took 17 ms down; shifting and scaling took 3 ms up, but 23 ms where values are
    subnormal, as unscaled gradients are.
    """

    __slots__ = ()

    def __init__(self, op: str, dtype: DType) -> None:
        super().__init__(op, dtype)
        self._plain = False
        self.partial = np.dtype(np.float32)
        self.separate = True

    def load(self, storage_flat: Flat, partial_flat: Flat) -> None:
        if self.dtype.name == "float16":
            _quietly(np.copyto, partial_flat, storage_flat)
            return
        bits = partial_flat.view(np.uint32)
        for lo in range(0, bits.size, _BLOCK):
            block = bits[lo : lo + _BLOCK]
            np.copyto(block, storage_flat[lo : lo + _BLOCK])
            np.left_shift(block, 16, out=block)

    def _finish(self, partial_flat: Flat, storage_flat: Flat, size: int) -> None:
        few = min(partial_flat.size, _BLOCK)
        quotients = np.empty(few, np.float32) if self.op == "avg" else None
        scratch = np.empty(few, np.uint32)
        for lo in range(0, partial_flat.size, _BLOCK):
            values = partial_flat[lo : lo + _BLOCK]
            rounded = storage_flat[lo : lo + _BLOCK]
            if quotients is not None:
                values = np.true_divide(values, size, out=quotients[: values.size])
            if self.dtype.name == "float16":
                np.copyto(rounded, values, casting="same_kind")
            else:
                _round_to_bfloat16(values.view(np.uint32), rounded, scratch[: values.size])
            if _has_nan(values):
                rounded.view(self._bits)[np.isnan(values)] = self._nan


class _Ordered(Arithmetic):
    """min and max of floating point, on integer keys over the same memory.

    Read as signed integers, the bits of non-negative floats are in order and those of negative ones in
    reverse; flipping all but the sign bit of the negative ones mends that, puts -0.0 (key -1) just below 0.0
    (key 0), and is its own inverse. NaN takes the key that wins: the lowest integer under min, the highest
    under max.
    """

    __slots__ = ("_bits", "_infinity", "_magnitude", "_nan", "_shift", "_winner")

    def __init__(self, op: str, dtype: DType) -> None:
        super().__init__(op, dtype)
        self.partial = np.dtype(f"i{dtype.itemsize}")
        self._infinity, self._nan = _SPECIAL_BITS[dtype.name]
        limits = np.iinfo(self.partial)
        self._magnitude = np.array(limits.max, self.partial)
        self._shift = np.array(limits.bits - 1, self.partial)  # leaves all ones where negative, else zero
        self._winner = limits.min if op == "min" else limits.max

    def load(self, storage_flat: Flat, partial_flat: Flat) -> None:
        bits, infinity = storage_flat.view(self.partial), self._infinity
        for lo in range(0, bits.size, _BLOCK):
            keys = partial_flat[lo : lo + _BLOCK]
            self._flip(bits[lo : lo + _BLOCK], keys)
            if np.maximum.reduce(keys) > infinity or np.minimum.reduce(keys) < ~infinity:
                keys[(keys > infinity) | (keys < ~infinity)] = self._winner

    def finish(self, partial_flat: Flat, storage_flat: Flat, size: int) -> None:
        bits = storage_flat.view(self.partial)
        for lo in range(0, bits.size, _BLOCK):
            keys = partial_flat[lo : lo + _BLOCK]
            nans = keys == self._winner if self._ufunc.reduce(keys) == self._winner else None
            values = bits[lo : lo + _BLOCK]
            self._flip(keys, values)
            if nans is not None:
                values[nans] = self._nan

    def _flip(self, source: Flat, target: Flat) -> None:
        mask = np.right_shift(source, self._shift)
        np.bitwise_and(mask, self._magnitude, out=mask)
        np.bitwise_xor(source, mask, out=target)


@functools.cache
def arithmetic(op: str, dtype: DType) -> Arithmetic:
    """The arithmetic of an op, by name (`resolve_op`), on a dtype; the same object for the same arguments.

    Raises:
        TypeError: the op has no result in that dtype: avg of integers and bool, min and max of complex
            numbers, band, bor and bxor of floating point.
    """
    kind = dtype.kind
    if op == "avg" and kind in "biu":
        raise TypeError(
            f"avg of {dtype.name} is not defined (the mean need not be one): convert to a floating point "
            "dtype, or reduce with sum and divide"
        )
    if op in ("min", "max") and kind == "c":
        raise TypeError(f"{op} of {dtype.name} is not defined: complex numbers have no order")
    if op in ("band", "bor", "bxor") and kind in "fc":
        raise TypeError(f"{op} of {dtype.name} is not defined: bitwise reductions need integers or bool")
    if kind not in "fc":
        return Arithmetic(op, dtype)
    if op in ("min", "max"):
        return _Ordered(op, dtype)
    if dtype.itemsize == 2:
        return _Widened(op, dtype)
    return _ComplexProduct(op, dtype) if op == "prod" and kind == "c" else _Floating(op, dtype)


def fold_op(op: str) -> Callable[[Any, Any], Any]:
    """A named op on plain Python values, for a strict left fold: ``total = fold(total, next)``.

    sum is ``a += b`` (integers stay exact, lists join) and so on: the left operand may be changed in place,
    so it must not be the caller's own. min and max are Python's: where neither is less, the left one. avg
    folds like sum; `finish_object` divides.
    """
    return _FOLDS[op]


def finish_object(op: str, value: Any, size: int) -> Any:
    """The result of a complete fold over ``size`` ranks: ``value / size`` for avg, else the value."""
    return value / size if op == "avg" else value


def _has_nan(values: Flat) -> bool:
    # A sum may be NaN without one (inf - inf): then the caller looks closer and finds none.
    total = sum(values.tolist()) if values.size <= _FEW else np.maximum.reduce(values)
    return bool(total != total)


def _round_to_bfloat16(bits: Flat, rounded: Flat, scratch: Flat) -> None:
    # The upper half, plus one where the lower half is above a tie, or on it and the upper half odd. Wraps for
    # some NaN, which the caller replaces.
    np.right_shift(bits, 16, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, 0x7FFF, out=scratch)
    np.add(scratch, bits, out=scratch)
    np.right_shift(scratch, 16, out=scratch)
    np.copyto(rounded, scratch, casting="unsafe")


def _quietly(function: Callable[..., Any], *args: Any) -> None:
    """Call without numpy's floating point warnings, whatever error state the caller has set.

    From numpy 2 on that state is a context variable: running in a copy of a context where it is "ignore"
    costs 0.1 us, entering `np.errstate` 1.6 us, twice the price of adding two small arrays.
    """
    silence = _silence()
    if silence is None:
        with np.errstate(all="ignore"):
            function(*args)
    else:
        silence.copy().run(function, *args)


@functools.cache
def _silence() -> contextvars.Context | None:
    if int(np.__version__.partition(".")[0]) < 2:
        return None  # there the state belongs to the thread
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context
