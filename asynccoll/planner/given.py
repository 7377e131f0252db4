"""What an argument must be, and the words in which it is refused. Knows kinds of values, not what they mean."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["integer", "integers", "items", "shown"]

_SHOWN: Final = 60
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """``repr`` for a message, cut where it is long. Very large integers Python refuses to write: of those, how large they are."""
    try:
        text = repr(value)
    except ValueError:
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ", too large to be written"
        return f"<{type(value).__name__}{bits}>"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def integer(value: object, what: str) -> int:
    """``value`` as an int. TypeError, ``what`` and the value, where it is none; bool is none: as a count or a rank it is a slip."""
    if not isinstance(value, bool):
        try:
            # Asked of anything on purpose: its TypeError is the check.
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise TypeError(f"{what} {shown(value)}, which is not an integer")


def items(value: Any, what: str, wanted: str) -> list[Any]:
    """``value`` as a list. TypeError, ``what``, the value and what is ``wanted``, where it is text, or nothing to go through.

    Sets are refused: the order of strings in one is another in each interpreter. And so are dicts, whose values would be lost.
    """
    if isinstance(value, str | bytes | set | frozenset | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{what} {shown(value)}; {wanted}")
    return list(value)


def integers(value: Any, what: str, wanted: str) -> list[int]:
    """``value`` as a list of ints. TypeError as for `items`, or where one of them is no integer."""
    return [integer(item, f"{what} {shown(value)}, with") for item in items(value, what, wanted)]
