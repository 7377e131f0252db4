"""The vocabulary of schedules: `Send`, `Recv`, `Finish`. Knows ranks and element ranges, not bytes, ops or links.

An algorithm is a generator of steps for one rank. The rules that give the steps meaning:

- Steps run in program order. A `Send` never waits: it *lends* the elements ``[lo, hi)`` until they have left,
  which may be any time up to the end of the operation. A `Recv` waits until all its elements have arrived.
- The k-th `Send` from rank a to rank b matches the k-th `Recv` of rank b from rank a; both have the same length.
- There are two planes over the same element numbers. The *partial* plane holds values under reduction (float32 for
  half types), the *final* plane holds results. For most dtypes both planes are the same memory.
- ``Recv(combine="lower")`` folds the incoming block in as the left operand: ``mine = op(incoming, mine)``;
  ``"higher"`` as the right one: ``mine = op(mine, incoming)``. Both work on the partial plane.
- ``Recv(combine=None)`` overwrites the final plane. ``Send(final=True)`` reads the final plane.
- ``Finish(lo, hi)``: this rank owns the reduction of ``[lo, hi)``, which is now complete on the partial plane; it is divided
  (avg) and rounded into the final plane, once.
- ``Send(snapshot=True)`` copies its elements at the step, so that later steps may overwrite them at once. It is for slabs
  of at most 64 KiB; every other schedule is proved free of that hazard by `asynccoll.algorithms.check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, final

__all__ = ["Finish", "Operand", "Recv", "Schedule", "Send", "Step"]

Operand: TypeAlias = Literal["lower", "higher"]


@final
class Send(NamedTuple):
    """Lend elements ``[lo, hi)`` to ``peer``."""

    peer: int
    lo: int
    hi: int
    final: bool = False
    snapshot: bool = False


@final
class Recv(NamedTuple):
    """Wait for elements ``[lo, hi)`` from ``peer``; overwrite the final plane, or combine into the partial one."""

    peer: int
    lo: int
    hi: int
    combine: Operand | None = None


@final
class Finish(NamedTuple):
    """Elements ``[lo, hi)`` are completely reduced here: divide and round them into the final plane."""

    lo: int
    hi: int


Step: TypeAlias = Send | Recv | Finish
Schedule: TypeAlias = Iterator[Step]
