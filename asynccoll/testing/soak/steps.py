"""Operations of a random program: what each rank passes, what it must get, and how one rank may differ. Knows no faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["FIELDS", "FOLDS", "MESSAGES", "Call", "Step", "Steps", "broken", "differ"]

_REDUCTION: Final = ("verb", "name", "op", "dtype", "shape", "algorithm")
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "allreduce": _REDUCTION,
    "allreduce_": _REDUCTION,
    "out": _REDUCTION,
    "tree": ("verb", "name", "structure", "algorithm"),
    "broadcast": ("verb", "name", "root"),
    "object": ("verb", "name", "root"),
    "allgather": ("verb", "name", "dtype", "algorithm", "path"),
    "objects": ("verb", "name", "algorithm", "path"),
    "gather": ("verb", "name", "root", "dtype", "path"),
    "scatter": ("verb", "name", "root"),
    "alltoall": ("verb", "name", "dtype", "path"),
    "fold": ("verb", "name", "path"),
    "reduce": (*_REDUCTION, "root"),
    "reduce_scatter": _REDUCTION,
    "scan": _REDUCTION,
    "exscan": _REDUCTION,
    "fold to root": ("verb", "name", "path", "root"),
    "prefixes": ("verb", "name", "path"),
    "barrier": ("verb", "name"),
}
"""Kind of step -> in what one rank may differ."""
MESSAGES: Final = "messages"
"""Kind of a step that is no collective: each rank sends to the next and receives from the one before. It has no key."""
FOLDS: Final = ("fold", "fold to root", "prefixes")
"""Kinds whose reduction is a function of the user's."""


class Step(NamedTuple):
    """One operation, the same on all its ranks."""

    kind: str
    length: int
    dtype: str
    op: str
    root: int
    """Rank in the group of the step."""
    algorithm: str
    members: tuple[int, ...]
    """Group rank -> world rank."""
    group: int | None = None
    """Number of the group; None: the world."""


@dataclass
class Call:
    """One rank's call of a step."""

    verb: str
    args: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    lent: Any = None
    """The rank's memory that the call may write to."""


@lru_cache(maxsize=64)
def _ramp(count: int) -> Any:
    return np.arange(count)


class Steps:
    """The steps of one program, with the values that its ranks pass. Ranks are those of a step's group."""

    def __init__(self, seed: int, steps: list[Step]) -> None:
        self.seed = seed
        self.steps = steps
        self._numbers: dict[tuple[int, int, int], Any] = {}
        self._reduced: dict[tuple[int, int], Any] = {}

    def size(self, at: int) -> int:
        """Ranks of a step's group."""
        return len(self.steps[at].members)

    # -- values -------------------------------------------------------------------------------------------

    def numbers(self, at: int, rank: int, fewer: int = 0) -> Any:
        """A rank's array: small integers, whose sums are exact in every dtype. Not to be written to."""
        found = self._numbers.get((at, rank, fewer))
        if found is None:
            step = self.steps[at]
            ramp = _ramp(max(0, step.length - fewer))
            factor = 1 + (self.seed + 5 * at + 3 * rank) % 7
            values = (ramp * factor + (ramp >> 4) + 2 * rank + at) % 9
            found = self._numbers[at, rank, fewer] = values.astype(step.dtype)
            found.flags.writeable = False
        return found

    def thing(self, at: int, rank: int) -> Any:
        """A rank's Python value."""
        return {"of": rank, "data": bytes(max(0, self.steps[at].length - rank))}

    def passed(self, at: int, origin: int, target: int) -> Any:
        """What one rank has for another: another length for each."""
        return self.numbers(at, origin * self.size(at) + target, target)

    def reduced(self, at: int, size: int | None = None) -> Any:
        """The result of an array's reduction over all ranks, or the first ``size`` of them."""
        step = self.steps[at]
        size = self.size(at) if size is None else size
        found = self._reduced.get((at, size))
        if found is None:
            rows = np.stack([self.numbers(at, rank) for rank in range(size)])
            if step.op == "sum":
                found = rows.sum(0, dtype=rows.dtype)
            elif step.op == "avg":
                wide = np.promote_types(rows.dtype, "f4")
                found = (rows.sum(0, dtype=wide) / wide.type(size)).astype(rows.dtype)
            else:
                folds: dict[str, Any] = {"max": np.maximum, "min": np.minimum, "bor": np.bitwise_or}
                found = folds[step.op].reduce(rows)
            self._reduced[at, size] = found
        return found

    # -- calls --------------------------------------------------------------------------------------------

    def call(self, at: int, rank: int) -> Call:
        """What ``rank`` calls in a step where nothing is wrong."""
        step, size = self.steps[at], self.size(at)
        value = self.numbers(at, rank).copy()
        chosen = {"algorithm": step.algorithm}
        match step.kind:
            case "allreduce":
                return Call("allreduce", [value, step.op], chosen)
            case "allreduce_":
                return Call("allreduce_", [value, step.op], chosen, value)
            case "out":
                out = np.zeros_like(value)
                return Call("allreduce", [value, step.op], {**chosen, "out": out}, out)
            case "tree":
                tree = {"a": value, "b": [np.full(3, rank, "i8"), rank]}
                return Call("allreduce_tree", [tree, step.op], chosen)
            case "broadcast" if rank == step.root:
                return Call("broadcast", [value, step.root], chosen)
            case "broadcast" if rank % 2:
                return Call("broadcast", [None, step.root], chosen)
            case "broadcast":
                out = np.zeros_like(value)
                return Call("broadcast", [None, step.root], {**chosen, "out": out}, out)
            case "object":
                return Call("broadcast", [self.thing(at, rank), step.root], chosen)
            case "allgather":  # another length on each rank
                return Call("allgather", [self.numbers(at, rank, rank).copy()], chosen)
            case "objects":
                return Call("allgather", [self.thing(at, rank)], chosen)
            case "gather" if rank == step.root and rank % 2:
                memory, outs = _outs([self.numbers(at, other, other) for other in range(size)])
                return Call("gather", [self.numbers(at, rank, rank).copy(), step.root], {"out": outs}, memory)
            case "gather":
                return Call("gather", [self.numbers(at, rank, rank).copy(), step.root])
            case "scatter":
                values = [self.numbers(at, other, other) for other in range(size)]
                out = np.zeros_like(values[rank]) if rank % 2 else None
                return Call("scatter", [values if rank == step.root else None, step.root], {"out": out}, out)
            case "alltoall":
                values = [self.passed(at, rank, other) for other in range(size)]
                if rank % 2:
                    return Call("alltoall", [values])
                memory, outs = _outs([self.passed(at, other, rank) for other in range(size)])
                return Call("alltoall", [values], {"out": outs}, memory)
            case "fold":
                return Call("allreduce", [f"{rank}.", _joined])
            case "reduce":
                out = np.zeros_like(value) if rank == step.root else None
                return Call("reduce", [value, step.op, step.root], {**chosen, "out": out}, out)
            case "reduce_scatter":
                out = np.zeros_like(np.array_split(value, size)[rank])
                return Call("reduce_scatter", [value, step.op], {**chosen, "out": out}, out)
            case "scan":
                out = np.zeros_like(value)
                return Call("scan", [value, step.op], {**chosen, "out": out}, out)
            case "exscan":
                return Call("exscan", [value, step.op], chosen)
            case "fold to root":
                return Call("reduce", [f"{rank}.", _joined, step.root])
            case "prefixes":
                return Call("scan", [f"{rank}.", _joined])
            case "messages":
                value = self.numbers(at, rank, rank).copy()
                return Call("exchange", [value, (rank + 1) % size, (rank - 1) % size, at])
            case _:
                return Call("barrier", [])

    # -- results ------------------------------------------------------------------------------------------

    def right(self, at: int, rank: int, result: Any) -> bool:
        """``result`` is what the step gives on ``rank``."""
        step, size = self.steps[at], self.size(at)
        ranks = range(size)
        match step.kind:
            case "barrier":
                return result is None
            case "broadcast":
                return _same(result, self.numbers(at, step.root))
            case "object":
                return bool(result == self.thing(at, step.root))
            case "allgather":
                return _all_same(result, [self.numbers(at, other, other) for other in ranks])
            case "gather" if rank != step.root:
                return result is None
            case "gather":
                return _all_same(result, [self.numbers(at, origin, origin) for origin in ranks])
            case "scatter":
                return _same(result, self.numbers(at, rank, rank))
            case "alltoall":
                return _all_same(result, [self.passed(at, origin, rank) for origin in ranks])
            case "objects":
                return bool(result == [self.thing(at, other) for other in ranks])
            case "fold":
                return bool(result == "".join(f"{other}." for other in ranks))
            case "reduce" | "fold to root" if rank != step.root:
                return result is None
            case "exscan" if rank == 0:
                return result is None
            case "fold to root":
                return bool(result == "".join(f"{other}." for other in ranks))
            case "prefixes":
                return bool(result == "".join(f"{other}." for other in range(rank + 1)))
            case "messages":
                before = (rank - 1) % size
                return bool(result[0] is None) and _same(result[1], self.numbers(at, before, before))
            case "reduce_scatter":
                return _same(result, np.array_split(self.reduced(at), size)[rank])
            case "scan" | "exscan":
                return _same(result, self.reduced(at, rank + (step.kind == "scan")))
            case "tree":
                total = sum(ranks)
                array, number = result["b"]
                return (
                    _same(result["a"], self.reduced(at))
                    and _same(array, np.full(3, total, "i8"))
                    and bool(number == total)
                )
            case _:
                return _same(result, self.reduced(at))


def _joined(left: str, right: str) -> str:
    return left + right


def _outs(values: list[Any]) -> tuple[Any, list[Any]]:
    """Memory for arrays like ``values``, in one piece, and its parts."""
    memory = np.zeros(sum(map(len, values)), values[0].dtype)
    return memory, np.split(memory, np.cumsum([len(value) for value in values])[:-1])


def _same(got: Any, expected: Any) -> bool:
    return isinstance(got, np.ndarray) and got.dtype == expected.dtype and np.array_equal(got, expected)


def _all_same(got: Any, expected: list[Any]) -> bool:
    return isinstance(got, list) and len(got) == len(expected) and all(map(_same, got, expected))


def broken(call: Call, error: Callable[[], Exception]) -> Call:
    """The same call of a kind in `FOLDS`, with a function that raises."""

    def raises(left: str, right: str) -> str:
        raise error()

    return Call(call.verb, [call.args[0], raises, *call.args[2:]], call.options)


def differ(steps: Steps, at: int, call: Call, detail: str) -> Call:
    """The same call, but for one field."""
    step, size = steps.steps[at], steps.size(at)
    options = {key: value for key, value in call.options.items() if key != "out"}
    args = list(call.args)
    match detail:
        case "verb":
            return Call("broadcast", [1, 0]) if call.verb == "barrier" else Call("barrier", [])
        case "name":
            return Call(call.verb, args, {**call.options, "name": "another"})
        case "op":
            args[1] = "min" if step.op != "min" else "max"
        case "dtype" if step.kind == "alltoall":
            args[0] = [value.astype("i2") for value in args[0]]
        case "dtype" if step.op == "avg":
            args[0] = args[0].astype("f8" if step.dtype != "f8" else "f4")
        case "dtype":
            args[0] = args[0].astype("i2")
        case "shape":
            args[0] = args[0].reshape(1, -1)
        case "structure":
            args[0] = {**args[0], "c": 1}
        case "root" if step.kind in ("gather", "scatter"):
            args[0] = [1] * size if step.kind == "scatter" else args[0]
            args[1] = (step.root + 1) % size
        case "root" if call.verb == "reduce":
            args[2] = (step.root + 1) % size
        case "root":
            args[0] = steps.numbers(at, 0).copy() if step.kind == "broadcast" else 1
            args[1] = (step.root + 1) % size
        case "algorithm":
            first, other = {"reduce": ("ring", "tree"), "reduce_scatter": ("ring", "tree")}.get(
                step.kind, ("chain" if step.kind in ("scan", "exscan") else "ring", "doubling")
            )
            options["algorithm"] = first if step.algorithm != first else other
        case "path" if step.kind in ("gather", "alltoall"):
            args[0] = ["text"] * size
        case "path":
            args[0] = "text" if step.kind == "allgather" else np.ones(3, "f4")
            args[1:2] = ["sum"] if step.kind in FOLDS else []
    return Call(call.verb, args, options)
