"""What a seed may be found guilty of."""

from __future__ import annotations

__all__ = ["Hang", "Leak", "Stray", "Wrong", "require"]


class Wrong(AssertionError):
    """A result or an error that the plan does not allow."""


class Stray(AssertionError):
    """An exception from outside the tree of `asynccoll.errors`, or one that reached the loop's handler."""


class Leak(AssertionError):
    """Something is left in an engine or on the loop."""


class Hang(KeyboardInterrupt):
    """The world ran for too long, by a real clock. Not an `Exception`, so that no callback of the loop keeps it."""


def require(condition: bool, message: str) -> None:
    """Raise `Wrong` unless ``condition``."""
    if not condition:
        raise Wrong(message)
