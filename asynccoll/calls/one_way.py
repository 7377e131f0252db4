"""Calls that combine to one rank or to parts: from arguments to an operation. See `asynccoll.calls`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from asynccoll import reduction
from asynccoll.algorithms import registry
from asynccoll.algorithms.ring import chunk
from asynccoll.buffers import Array, Flat, describe, matches_out
from asynccoll.calls.place import (
    Call,
    Place,
    as_target,
    checked_root,
    finisher,
    function_of,
    into,
    wanted_algorithm,
)
from asynccoll.calls.received import Objects
from asynccoll.engine.fingerprint import Fingerprint
from asynccoll.engine.operation import EAGER_STREAM
from asynccoll.engine.programs import folds, one_way
from asynccoll.engine.programs.reductions import Part

__all__ = ["chosen", "filled", "reduce", "reduce_scatter"]


def chosen(place: Place, verb: str, requested: str, array: Array) -> str:
    """The algorithm of an array's reduction. Raises ValueError that lists the names."""
    name = wanted_algorithm(place, verb, requested)
    if name != "auto":
        return name
    return registry.choose(verb, array.dtype.itemsize, array.nbytes, place.size, table=place.table)


def filled(array: Array, out: Any) -> tuple[Flat, Callable[[], Any]]:
    """Flat memory that holds ``array``'s elements, and what gives it as a result: a new value, or ``out``."""
    if out is None:
        flat = array.pack()
        return flat, lambda: array.wrap(flat)
    target = as_target(out)
    matches_out(array, target)
    flat, write_back = target.lend()
    view = array.view()
    flat[...] = view if view is not None else array.pack()
    return flat, into(out, write_back)


def reduce(place: Place, value: Any, op: Any, root: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """Reduce ``value`` to ``root``."""
    op_name = reduction.resolve_op(op)
    root = checked_root(place, root)
    here = place.rank == root
    array = describe(value) if op_name is not None else None
    if array is None or op_name is None:
        return _reduce_objects(place, value, op, op_name, root, out if here else None, algorithm, name)
    arithmetic = reduction.arithmetic(op_name, array.dtype)
    algorithm_used = chosen(place, "reduce", algorithm, array)
    flat, result = filled(array, out if here else None)
    slabs = one_way.slabs_of("reduce", algorithm_used, arithmetic, place.rank, place.size, root, array.count)
    program = one_way.reduce(
        Part(flat, arithmetic, algorithm_used), slabs, place.size, result if here else lambda: None
    )
    fingerprint = Fingerprint(
        "reduce", "array", op_name, array.dtype.name, array.shape, root, name, algorithm
    )
    return Call(
        fingerprint, program, one_way.source(slabs, arithmetic) if array.nbytes > EAGER_STREAM else None
    )


def _reduce_objects(
    place: Place,
    value: Any,
    op: Any,
    op_name: str | None,
    root: int,
    out: Any,
    algorithm: str,
    name: str | None,
) -> Call:
    wanted_algorithm(place, "reduce", algorithm)
    if out is not None:
        raise TypeError(
            f"out= takes the result of an array; reduce of a {type(value).__name__} returns a new value"
        )
    compared, tree = function_of(op, op_name)
    fingerprint = Fingerprint("reduce", place.codec.path, compared, root=root, name=name, algorithm=algorithm)
    values = Objects(place.codec)
    program = folds.reduce(
        values.lent(value),
        place.rank,
        place.size,
        root,
        op if op_name is None else reduction.fold_op(op_name),
        finisher(op_name),
        values,
        tree=tree,
    )
    return Call(fingerprint, program)


def reduce_scatter(place: Place, value: Any, op: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """Reduce ``value`` and leave each rank its part of the rows."""
    rank, size = place.rank, place.size
    op_name = reduction.resolve_op(op)
    if op_name is None:
        raise TypeError(
            "reduce_scatter takes a named op; with a reduce function use reduce() or allreduce() and take a part of the result"
        )
    array = describe(value)
    if array is None:
        raise TypeError(
            f"reduce_scatter splits arrays along axis 0, and this is a {type(value).__name__}: pass numpy.asarray(value), or use "
            "allreduce() and take a part of the result"
        )
    if not array.shape:
        raise ValueError(
            "reduce_scatter splits arrays along axis 0, and a 0-d array has none: use reduce() or allreduce()"
        )
    arithmetic = reduction.arithmetic(op_name, array.dtype)
    algorithm_used = chosen(place, "reduce_scatter", algorithm, array)
    inner = math.prod(array.shape[1:])
    rows = [hi - lo for lo, hi in (chunk(peer, size, array.shape[0]) for peer in range(size))]
    extent = tuple(length * inner for length in rows)
    shape = (rows[rank], *array.shape[1:])
    if out is None:
        own = np.empty(extent[rank], array.dtype.storage)
        result: Callable[[], Any] = lambda: array.wrap(own, shape)  # noqa: E731
    else:
        target = as_target(out)
        matches_out(array, target, shape)
        own, write_back = target.lend()
        result = into(out, write_back)
    slabs = one_way.slabs_of("reduce_scatter", algorithm_used, arithmetic, rank, size, None, extent)
    part = Part(array.pack(), arithmetic, algorithm_used)
    program = one_way.reduce_scatter(part, slabs, extent, rank, size, own, result)
    fingerprint = Fingerprint(
        "reduce_scatter", "array", op_name, array.dtype.name, array.shape, None, name, algorithm
    )
    return Call(
        fingerprint, program, one_way.source(slabs, arithmetic) if array.nbytes > EAGER_STREAM else None
    )
