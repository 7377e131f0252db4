"""What every verb's call has in common: where it is made, what it becomes, and the checks of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asynccoll import reduction
from asynccoll.algorithms import registry
from asynccoll.buffers import Array, describe
from asynccoll.declared import Associative
from asynccoll.engine.fingerprint import Digests, Fingerprint
from asynccoll.engine.transfers import Program, Swap
from asynccoll.objects import PICKLES, Codec

__all__ = [
    "Call",
    "Place",
    "as_target",
    "checked_root",
    "finisher",
    "function_of",
    "into",
    "wanted_algorithm",
]


class Call(NamedTuple):
    """An operation ready to be submitted."""

    fingerprint: Fingerprint
    program: Program | Swap
    expected: Mapping[int, int] | None = None
    """Group rank -> all bytes to come from it, where they always have a place."""
    agreed: Digests | None = None
    """Digests of the fingerprint, where they are at hand."""
    swaps: bool = False
    """The program is a `Swap`."""
    mail: Any = None
    """A message to send or to receive, instead of a program."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call is made: one communicator on one rank. Keeps the plans of the calls that a program repeats."""

    rank: int
    size: int
    algorithm: str
    """What ``algorithm="auto"`` stands for: "auto", or the choice of ``ASYNCCOLL_ALGORITHM``."""
    table: Mapping[str, Any] | None
    """Thresholds of the automatic choice, as rank 0 handed them out."""
    codec: Codec = PICKLES
    """How values that are no arrays travel."""
    plans: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False)
    """Reductions of arrays that were called before; see `asynccoll.calls.reducing`."""


def wanted_algorithm(place: Place, verb: str, requested: str) -> str:
    """The algorithm to use or "auto". Raises ValueError that lists the names."""
    names = registry.names(verb)
    if requested == "auto":
        return place.algorithm if place.algorithm in names else "auto"
    if requested not in names:
        raise ValueError(
            f"algorithm={requested!r} does not exist for {verb}; use one of {', '.join(('auto', *names))}"
        )
    return requested


def checked_root(place: Place, root: Any) -> int:
    """``root`` as a rank of this communicator. Raises TypeError or ValueError."""
    try:
        number = operator.index(root)
    except TypeError:
        raise TypeError(f"root={root!r} is not an integer") from None
    if not 0 <= number < place.size:
        raise ValueError(f"root={number} is not a rank of this communicator; use 0 to {place.size - 1}")
    return number


def as_target(out: Any) -> Array:
    """``out`` as the array that it must be. Raises TypeError."""
    target = describe(out)
    if target is None:
        raise TypeError(f"out= must be an array or a tensor, not a {type(out).__name__}")
    return target


def into(out: Any, write_back: Callable[[], None] | None) -> Callable[[], Any]:
    """What gives ``out`` as a result, after ``write_back``."""

    def result() -> Any:
        if write_back is not None:
            write_back()
        return out

    return result


def function_of(op: Any, op_name: str | None) -> tuple[str, bool]:
    """What is compared of the op of an object's reduction, and whether every rank's own function runs."""
    if isinstance(op, Associative):
        return f"associative {op.name}", True
    return op_name or "callable", False


def finisher(op_name: str | None) -> Callable[[Any, int], Any]:
    """What makes a result of a fold of objects over so many ranks."""

    def finish(total: Any, ranks: int) -> Any:
        return total if op_name is None else reduction.finish_object(op_name, total, ranks)

    return finish
