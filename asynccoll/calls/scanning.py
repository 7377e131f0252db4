"""Calls that combine what the ranks before hold: from arguments to an operation. See `asynccoll.calls`."""

from __future__ import annotations

from typing import Any

from asynccoll import reduction
from asynccoll.buffers import describe, matches_out
from asynccoll.calls.one_way import chosen, filled
from asynccoll.calls.place import Call, Place, as_target, finisher, wanted_algorithm
from asynccoll.calls.received import Objects
from asynccoll.engine.fingerprint import Fingerprint
from asynccoll.engine.operation import EAGER_STREAM
from asynccoll.engine.programs import folds, scans
from asynccoll.engine.programs.reductions import Part

__all__ = ["exscan", "scan"]


def scan(place: Place, value: Any, op: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """Combine the values of the ranks up to this one."""
    return _scan("scan", place, value, op, out, algorithm, name)


def exscan(place: Place, value: Any, op: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """Combine the values of the ranks before this one; nothing on rank 0."""
    return _scan("exscan", place, value, op, out, algorithm, name)


def _scan(verb: str, place: Place, value: Any, op: Any, out: Any, algorithm: str, name: str | None) -> Call:
    exclusive = verb == "exscan"
    op_name = reduction.resolve_op(op)
    array = describe(value) if op_name is not None else None
    if array is None or op_name is None:
        if out is not None:
            raise TypeError(
                f"out= takes the result of an array; {verb} of a {type(value).__name__} returns a new value"
            )
        return _fold(verb, place, value, op, op_name, algorithm, name)
    arithmetic = reduction.arithmetic(op_name, array.dtype)
    algorithm_used = chosen(place, verb, algorithm, array)
    if exclusive and place.rank == 0:
        if out is not None:  # the same checks as elsewhere; there is no result to put in it
            target = as_target(out)
            matches_out(array, target)
            target.lend()
        flat, result = array.pack(), _none
    else:
        flat, result = filled(array, out)
    part = Part(flat, arithmetic, algorithm_used)
    program = scans.scan(part, place.rank, place.size, exclusive, result)
    fingerprint = Fingerprint(verb, "array", op_name, array.dtype.name, array.shape, None, name, algorithm)
    return Call(fingerprint, program, scans.source(part, place.rank) if array.nbytes > EAGER_STREAM else None)


def _none() -> None:
    """What rank 0 gets of an exscan."""


def _fold(
    verb: str, place: Place, value: Any, op: Any, op_name: str | None, algorithm: str, name: str | None
) -> Call:
    wanted_algorithm(place, verb, algorithm)
    values = Objects(place.codec)
    program = folds.scan(
        values.lent(value),
        place.rank,
        place.size,
        verb == "exscan",
        op if op_name is None else reduction.fold_op(op_name),
        finisher(op_name),
        values,
    )
    fingerprint = Fingerprint(verb, place.codec.path, op_name or "callable", name=name, algorithm=algorithm)
    return Call(fingerprint, program)
