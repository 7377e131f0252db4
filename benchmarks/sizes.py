"""Sizes of messages: their notation and the sweep over them. Knows bytes, not dtypes or collectives."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

__all__ = ["human", "parse_list", "parse_size", "sweep"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
"""Suffixes are binary, as in nccl-tests."""


def parse_size(text: str) -> int:
    """``"8"``, ``"4K"``, ``"1.5M"``, ``"1g"`` as bytes. `argparse.ArgumentTypeError` for anything else."""
    unit = text[-1:].upper()
    number = text
    if unit in _UNITS:
        number = text[:-1]
    else:
        unit = ""
    try:
        size = float(number) * _UNITS[unit]
    except ValueError:
        size = -1.0
    if not (size >= 0 and size.is_integer()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: use bytes, or K, M and G for powers of 1024, such as 8, 64K, 1M"
        )
    return int(size)


def parse_list(text: str) -> list[int]:
    """Sizes between commas, in ascending order, each once."""
    return sorted({parse_size(part) for part in text.split(",")})


def sweep(smallest: int, largest: int, *, factor: int | None, step: int | None) -> Iterator[int]:
    """Sizes from ``smallest`` to ``largest``, times ``factor`` or plus ``step`` bytes each."""
    size = smallest
    while size <= largest:
        yield size
        if step is not None:
            size += step
        elif factor is not None and size:
            size *= factor
        else:
            return


def human(size: int) -> str:
    """``65536`` as ``"64K"``; bytes where no unit divides them."""
    for unit in ("G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)
