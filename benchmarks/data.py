"""What is reduced, and what must come out, to the last bit. Knows numpy arrays, ops and dtypes, not libraries.

Every rank's values are small integers from a fixed pseudo-random pattern, chosen so that each op's result is exact in
each dtype in whatever order it is computed. The pattern repeats after a prime number of elements, so that an element or
chunk at a wrong place is a wrong value.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["DTYPES", "OPS", "Array", "contribution", "count_wrong", "dtype_of", "expected", "poison"]

Array: TypeAlias = npt.NDArray[Any]

DTYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bfloat16": "bfloat16",
}
"""nccl-tests' names of the dtypes, and numpy's."""

OPS = ("sum", "prod", "min", "max", "avg")
"""Reductions of nccl-tests that asynccoll has."""

_PERIOD = 8191
"""Elements until the pattern repeats: a prime, so that no chunk, slab or segment is a multiple of it."""

_EXACT_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
"""Bits of the significand, the hidden one included: integers up to that power of two are exact."""


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy's dtype for one of nccl-tests' names. `ImportError`, with what to install, for bfloat16 without ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(DTYPES[name])
    try:
        found: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise ImportError("-d bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
    return found


def _pattern(op: str, rank: int, world_size: int) -> npt.NDArray[np.int64]:
    random = np.random.default_rng(rank)
    if op == "prod":
        return random.integers(1, 3, _PERIOD)  # powers of two stay exact
    values = random.integers(0, 8, _PERIOD)
    return values * world_size if op == "avg" else values


def _combined(op: str, world_size: int) -> npt.NDArray[np.int64]:
    patterns = [_pattern(op, rank, world_size) for rank in range(world_size)]
    ufunc = {"min": np.minimum, "max": np.maximum, "prod": np.multiply}.get(op, np.add)
    total: npt.NDArray[np.int64] = ufunc.reduce(patterns)
    return total // world_size if op == "avg" else total


def _tiled(pattern: npt.NDArray[np.int64], count: int, dtype: np.dtype[Any]) -> Array:
    return np.resize(pattern.astype(dtype), count) if count else np.empty(0, dtype)


def contribution(op: str, count: int, dtype: np.dtype[Any], rank: int, world_size: int) -> Array:
    """``count`` values of ``rank``, the same in every run."""
    return _tiled(_pattern(op, rank, world_size), count, dtype)


def expected(op: str, count: int, dtype: np.dtype[Any], world_size: int) -> Array:
    """What ``op`` over all ranks' contributions must be, exactly. Integers wrap around.

    Raises:
        ValueError: with so many ranks the result is not exact in ``dtype``.
    """
    bits = _EXACT_BITS.get(dtype.name, 64)
    largest = 2 if op == "prod" else (7 * world_size if op == "sum" else 7 * world_size**2)
    if op not in ("min", "max", "prod") and math.log2(largest) > bits:
        raise ValueError(
            f"{op} over {world_size} ranks is not exact in {dtype.name}: use a wider dtype, or fewer ranks"
        )
    return _tiled(_combined(op, world_size), count, dtype)


def poison(array: Array, wanted: Array) -> None:
    """Make every element of ``array`` a wrong one, so that a result that is never written is seen."""
    bits = np.dtype(f"u{array.itemsize}")
    np.invert(wanted.view(bits), out=array.view(bits))


def count_wrong(result: Array, wanted: Array) -> int:
    """Elements of ``result`` that are not equal to those of ``wanted``."""
    return int(np.count_nonzero(result != wanted))
