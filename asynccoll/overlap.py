"""Whether views share memory, with themselves or with each other. Knows strides and addresses, not containers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["overlaps_itself", "partly_shared", "shared"]

# Up to here `overlaps_itself` compares all offsets (a sort of 64 Ki int64 takes about 1 ms); above, it rules.
_EXACT_OVERLAP = 65_536

# Search steps for `np.shares_memory` before overlap is assumed; ordinary views are settled in a handful.
_SHARE_WORK = 10_000


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements of such a view share memory (strides in bytes, of either sign).

    Exact up to 65,536 elements. Beyond, a view passes if, in ascending order of stride, every dimension steps
    over all that the smaller ones span: true of every slice, reversal, transpose and diagonal of an ordinary
    array.
    """
    if 0 in shape:
        return False
    steps = sorted((abs(stride), n) for n, stride in zip(shape, strides, strict=True) if n > 1)
    span = itemsize
    for stride, n in steps:
        if stride < span:
            break
        span += stride * (n - 1)
    else:
        return False
    if steps[0][0] < itemsize or math.prod(shape) > _EXACT_OVERLAP:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, n in steps:
        offsets = np.add.outer(offsets, np.arange(n, dtype=np.int64) * stride)
    return bool((np.diff(np.sort(offsets, axis=None)) < itemsize).any())


def partly_shared(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two views share memory without being the very same view; True where that is too hard to tell."""
    return _layout(one) != _layout(other) and shared(one, other)


def shared(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two views share memory; True where that is too hard to tell."""
    if not np.may_share_memory(one, other):
        return False
    try:
        return np.shares_memory(one, other, max_work=_SHARE_WORK)  # type: ignore[arg-type]  # any int works
    except np.exceptions.TooHardError:
        return True


def _layout(memory: npt.NDArray[Any]) -> tuple[Any, ...]:
    address = memory.__array_interface__["data"][0]
    return address, memory.shape, [s for s, n in zip(memory.strides, memory.shape, strict=True) if n > 1]
