"""Reduce functions of which the user has declared something. Knows no ranks and no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Associative", "associative"]


class Associative:
    """A reduce function that may be applied in any bracketing: see `associative`."""

    __slots__ = ("function", "name")

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        name = getattr(function, "__qualname__", None)
        if not callable(function) or not isinstance(name, str):
            raise TypeError(f"associative() takes a function with a name of its own, not {function!r}")
        if name.endswith("<lambda>"):
            raise ValueError(
                "associative() takes a named function: it runs on every rank, and its module and name are compared, "
                "which tell one lambda from another no better than chance"
            )
        self.function = function
        self.name = f"{function.__module__}.{name}"
        """Module and qualified name: compared across the ranks."""

    def __call__(self, left: Any, right: Any) -> Any:
        """``function(left, right)``."""
        return self.function(left, right)

    def __repr__(self) -> str:
        return f"associative({self.name})"


def associative(function: Callable[[Any, Any], Any]) -> Associative:
    """Declare that ``function(function(a, b), c) == function(a, function(b, c))``, for ``op=`` of `allreduce` and `reduce`.

    Values are then folded up a tree, in rank order still, by every rank's own ``function``, instead of one after the other by
    rank 0's. Its module and qualified name are compared across the ranks. It may change and return its first argument.

    Raises:
        TypeError, ValueError: it has no name of its own (a lambda, a partial).
    """
    return Associative(function)
