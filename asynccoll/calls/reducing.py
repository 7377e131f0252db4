"""Calls that combine: from arguments to an operation. See `asynccoll.calls`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from asynccoll import reduction
from asynccoll.algorithms import registry
from asynccoll.buffers import Array, describe, matches_out
from asynccoll.calls.place import Call, Place, as_target, finisher, function_of, into, wanted_algorithm
from asynccoll.calls.received import Objects
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.operation import EAGER_STREAM
from asynccoll.engine.programs import folds, reductions
from asynccoll.trees import flatten

__all__ = ["Plan", "allreduce", "allreduce_in_place", "allreduce_tree", "chosen", "plan_of"]

MAX_PLANS: Final = 1024
"""Calls of one communicator that are remembered: a program that never repeats a shape must not fill memory."""


def chosen(
    place: Place,
    requested: str,
    arithmetic: reduction.Arithmetic,
    itemsize: int,
    nbytes: int,
    verb: str = "allreduce",
) -> str:
    """The algorithm of an allreduce of ``nbytes`` bytes. Raises ValueError for a name that does not exist."""
    name = wanted_algorithm(place, verb, requested)
    if name == "doubling" and arithmetic.order_sensitive:
        name = "auto"  # several ranks must not compute the same element: see docs/numerics.md
    if name == "auto":
        return registry.choose(
            "allreduce",
            itemsize,
            nbytes,
            place.size,
            order_sensitive=arithmetic.order_sensitive,
            table=place.table,
        )
    return name


def allreduce(place: Place, value: Any, op: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """Reduce ``value``; the result is new, or in ``out``."""
    op_name = reduction.resolve_op(op)
    array = describe(value) if op_name is not None else None
    if array is None or op_name is None:
        if out is not None:
            raise TypeError(
                f"out= takes the result of an array; allreduce of a {type(value).__name__} returns a new value"
            )
        return _fold(place, value, op, op_name, algorithm, name)
    plan = plan_of(place, op_name, array, algorithm, name)
    if out is None:
        flat = array.pack()
        return _reduce(place, plan, flat, lambda: array.wrap(flat))
    target = as_target(out)
    matches_out(array, target)
    flat, write_back = target.lend()
    view = array.view()
    flat[...] = view if view is not None else array.pack()
    return _reduce(place, plan, flat, into(out, write_back))


def allreduce_in_place(place: Place, value: Any, op: Any, algorithm: str, name: str | None) -> Call:
    """Reduce an array in the caller's own memory."""
    op_name = reduction.resolve_op(op)
    if op_name is None:
        raise TypeError("allreduce_ takes a named op; a reduce function returns new values: use allreduce()")
    array = describe(value)
    if array is None:
        raise TypeError(
            f"allreduce_ works in place on arrays and tensors, not on a {type(value).__name__}: use allreduce()"
        )
    plan = plan_of(place, op_name, array, algorithm, name)
    flat, write_back = array.lend()
    return _reduce(place, plan, flat, into(value, write_back))


class Plan:
    """What an array's reduction will be, decided before any memory is touched."""

    __slots__ = ("agreed", "algorithm", "arithmetic", "expected", "fingerprint", "turns")

    def __init__(self, place: Place, op: str, array: Array, algorithm: str, name: str | None) -> None:
        dtype = array.dtype
        arithmetic = reduction.arithmetic(op, dtype)
        self.arithmetic = arithmetic
        self.algorithm = chosen(place, algorithm, arithmetic, dtype.itemsize, array.nbytes)
        self.fingerprint = Fingerprint(
            "allreduce", "array", op, dtype.name, array.shape, None, name, algorithm
        )
        self.agreed = digests(self.fingerprint)
        self.turns = reductions.swap_turns(
            self.algorithm, place.rank, place.size, array.count, arithmetic.partial.itemsize
        )
        self.expected: Mapping[int, int] | None = None
        if array.nbytes > EAGER_STREAM:
            self.expected = reductions.sources(
                ((self.algorithm, arithmetic, array.count),), place.rank, place.size
            )


def plan_of(place: Place, op: str, array: Array, algorithm: str, name: str | None) -> Plan:
    """The plan of a call; the same object for a call that is repeated."""
    key = (op, array.dtype, array.shape, algorithm, name)
    if type(algorithm) is not str or (name is not None and type(name) is not str):
        return Plan(place, op, array, algorithm, name)  # raises, or is too odd to be kept
    plan = place.plans.get(key)
    if plan is None:
        plan = Plan(place, op, array, algorithm, name)
        if len(place.plans) >= MAX_PLANS:
            del place.plans[next(iter(place.plans))]
        place.plans[key] = plan
    return plan


def _reduce(place: Place, plan: Plan, flat: Any, result: Callable[[], Any]) -> Call:
    part = reductions.Part(flat, plan.arithmetic, plan.algorithm)
    if plan.turns is not None:
        swap = reductions.swap(part, plan.turns, place.size, result)
        return Call(plan.fingerprint, swap, None, plan.agreed, swaps=True)
    program = reductions.allreduce(part, place.rank, place.size, result)
    return Call(plan.fingerprint, program, plan.expected, plan.agreed)


def _fold(place: Place, value: Any, op: Any, op_name: str | None, algorithm: str, name: str | None) -> Call:
    wanted_algorithm(place, "allreduce", algorithm)
    compared, tree = function_of(op, op_name)
    fingerprint = Fingerprint("allreduce", place.codec.path, compared, name=name, algorithm=algorithm)
    values = Objects(place.codec)
    program = folds.allreduce(
        values.lent(value),
        place.rank,
        place.size,
        op if op_name is None else reduction.fold_op(op_name),
        finisher(op_name),
        values,
        tree=tree,
    )
    return Call(fingerprint, program)


def allreduce_tree(place: Place, tree: Any, op: Any, algorithm: str, name: str | None) -> Call:
    """Reduce every leaf of a tree, as one operation."""
    op_name = reduction.resolve_op(op)
    if op_name is None:
        raise TypeError("allreduce_tree takes a named op; for a reduce function use allreduce()")
    leaves, structure, rebuild = flatten(tree)
    by_dtype: dict[str, list[int]] = {}
    for number, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.array.dtype.name, []).append(number)
    parts: list[reductions.Part] = []
    flats: list[Any] = [None] * len(leaves)
    for numbers in by_dtype.values():
        dtype = leaves[numbers[0]].array.dtype
        try:
            arithmetic = reduction.arithmetic(op_name, dtype)
        except TypeError as error:
            raise TypeError(f"leaf {leaves[numbers[0]].path or 'itself'}: {error}") from None
        fused = np.empty(sum(leaves[number].array.count for number in numbers), dtype.storage)
        at = 0
        for number in numbers:
            array = leaves[number].array
            flats[number] = fused[at : at + array.count]
            view = array.view()
            flats[number][...] = view if view is not None else array.pack()
            at += array.count
        parts.append(
            reductions.Part(
                fused, arithmetic, chosen(place, algorithm, arithmetic, dtype.itemsize, fused.nbytes)
            )
        )

    def result() -> Any:
        return rebuild([leaf.result(flat) for leaf, flat in zip(leaves, flats, strict=True)])

    fingerprint = Fingerprint(
        "allreduce_tree", "array", op_name, name=name, algorithm=algorithm, structure=structure
    )
    rank, size = place.rank, place.size
    expected = None
    if sum(part.storage.nbytes for part in parts) > EAGER_STREAM:
        expected = reductions.sources((part.share for part in parts), rank, size)
    return Call(fingerprint, reductions.allreduce_parts(parts, rank, size, result), expected)
