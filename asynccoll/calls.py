"""From a verb's arguments to an operation: which path, what must agree, which program. Knows no loop and no engine state.

Each function is pure: it may raise `TypeError` or `ValueError` for wrong arguments, and has not touched anything when it does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from asynccoll import objects, reduction
from asynccoll.algorithms import registry
from asynccoll.buffers import (
    DTYPES,
    Array,
    DType,
    Flat,
    describe,
    flat_bytes,
    matches_out,
    rebuild,
    share_memory,
)
from asynccoll.engine.aborts import Disagrees
from asynccoll.engine.fingerprint import Digests, Fingerprint, digests
from asynccoll.engine.operation import EAGER_STREAM
from asynccoll.engine.programs import items, reductions
from asynccoll.engine.transfers import Program, Swap
from asynccoll.errors import ProtocolError
from asynccoll.trees import flatten

__all__ = [
    "Call",
    "Place",
    "allgather",
    "allreduce",
    "allreduce_in_place",
    "allreduce_tree",
    "barrier",
    "broadcast",
]


_MAX_PLANS: Final = 1024  # a program that never repeats a shape must not fill memory


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call is made: one communicator on one rank. Keeps the plans of the calls that a program repeats."""

    rank: int
    size: int
    algorithm: str
    """What ``algorithm="auto"`` stands for: "auto", or the choice of ``ASYNCCOLL_ALGORITHM``."""
    table: Mapping[str, Any] | None
    """Thresholds of the automatic choice, as rank 0 handed them out."""
    plans: dict[tuple[Any, ...], _Plan] = field(default_factory=dict, init=False, repr=False)
    """Reductions of arrays that were called before; at most `_MAX_PLANS`."""


def _algorithm(place: Place, verb: str, requested: str) -> str:
    """The algorithm to use or "auto". Raises ValueError that lists the names."""
    names = registry.names(verb)
    if requested == "auto":
        return place.algorithm if place.algorithm in names else "auto"
    if requested not in names:
        raise ValueError(
            f"algorithm={requested!r} does not exist for {verb}; use one of {', '.join(('auto', *names))}"
        )
    return requested


def _chosen(
    place: Place, requested: str, arithmetic: reduction.Arithmetic, itemsize: int, nbytes: int
) -> str:
    name = _algorithm(place, "allreduce", requested)
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


def _root(place: Place, root: Any) -> int:
    try:
        number = operator.index(root)
    except TypeError:
        raise TypeError(f"root={root!r} is not an integer") from None
    if not 0 <= number < place.size:
        raise ValueError(f"root={number} is not a rank of this communicator; use 0 to {place.size - 1}")
    return number


# -- allreduce ------------------------------------------------------------------------------------------------


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
    plan = _plan(place, op_name, array, algorithm, name)
    if out is None:
        flat = array.pack()
        return _reduce(place, plan, flat, lambda: array.wrap(flat))
    target = _target(out)
    matches_out(array, target)
    flat, write_back = target.lend()
    view = array.view()
    flat[...] = view if view is not None else array.pack()
    return _reduce(place, plan, flat, _into(out, write_back))


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
    plan = _plan(place, op_name, array, algorithm, name)
    flat, write_back = array.lend()
    return _reduce(place, plan, flat, _into(value, write_back))


def _target(out: Any) -> Array:
    target = describe(out)
    if target is None:
        raise TypeError(f"out= must be an array or a tensor, not a {type(out).__name__}")
    return target


def _into(out: Any, write_back: Callable[[], None] | None) -> Callable[[], Any]:
    def result() -> Any:
        if write_back is not None:
            write_back()
        return out

    return result


class _Plan:
    """What an array's reduction will be, decided before any memory is touched."""

    __slots__ = ("agreed", "algorithm", "arithmetic", "expected", "fingerprint", "operands")

    def __init__(self, place: Place, op: str, array: Array, algorithm: str, name: str | None) -> None:
        dtype = array.dtype
        arithmetic = reduction.arithmetic(op, dtype)
        self.arithmetic = arithmetic
        self.algorithm = _chosen(place, algorithm, arithmetic, dtype.itemsize, array.nbytes)
        self.fingerprint = Fingerprint(
            "allreduce", "array", op, dtype.name, array.shape, None, name, algorithm
        )
        self.agreed = digests(self.fingerprint)
        self.operands = reductions.swap_operands(
            self.algorithm, place.rank, place.size, array.count, arithmetic.partial.itemsize
        )
        self.expected: Mapping[int, int] | None = None
        if array.nbytes > EAGER_STREAM:
            self.expected = reductions.sources(
                ((self.algorithm, arithmetic, array.count),), place.rank, place.size
            )


def _plan(place: Place, op: str, array: Array, algorithm: str, name: str | None) -> _Plan:
    key = (op, array.dtype, array.shape, algorithm, name)
    if type(algorithm) is not str or (name is not None and type(name) is not str):
        return _Plan(place, op, array, algorithm, name)  # raises, or is too odd to be kept
    plan = place.plans.get(key)
    if plan is None:
        plan = _Plan(place, op, array, algorithm, name)
        if len(place.plans) >= _MAX_PLANS:
            place.plans.clear()
        place.plans[key] = plan
    return plan


def _reduce(place: Place, plan: _Plan, flat: Any, result: Callable[[], Any]) -> Call:
    part = reductions.Part(flat, plan.arithmetic, plan.algorithm)
    if plan.operands is not None:
        swap = reductions.swap(part, plan.operands, place.size, result)
        return Call(plan.fingerprint, swap, None, plan.agreed, swaps=True)
    program = reductions.allreduce(part, place.rank, place.size, result)
    return Call(plan.fingerprint, program, plan.expected, plan.agreed)


def _fold(place: Place, value: Any, op: Any, op_name: str | None, algorithm: str, name: str | None) -> Call:
    _algorithm(place, "allreduce", algorithm)
    size = place.size
    fold = op if op_name is None else reduction.fold_op(op_name)

    def finish(total: Any) -> Any:
        return total if op_name is None else reduction.finish_object(op_name, total, size)

    fingerprint = Fingerprint("allreduce", "object", op_name or "callable", name=name, algorithm=algorithm)
    payload = objects.dumps(value)
    program = items.fold_objects(payload, place.rank, size, fold, finish, objects.loads, objects.dumps)
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
                fused, arithmetic, _chosen(place, algorithm, arithmetic, dtype.itemsize, fused.nbytes)
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


# -- whole values ---------------------------------------------------------------------------------------------


class _Received:
    """Turns items back into values, for broadcast and allgather (see `items.Codec`)."""

    def __init__(
        self, rank: int, own: Any, like: Array | None, outs: Mapping[int, Any] | None, *, strict: bool
    ) -> None:
        self._rank = rank
        self._own = own
        """Flat snapshot of this rank's own value, or its pickle; None where it sends nothing."""
        self._like = like
        """This rank's own array, for container and dtype, or None."""
        self._outs = outs
        """Rank -> array to receive into, or None."""
        self._strict = strict
        """dtype and shape must be those of `_like` (broadcast); else only the dtype, which START has compared."""
        self._values: dict[int, Callable[[], Any]] = {}

    def keep(self, item: items.Item) -> None:
        rank, own, like = self._rank, self._own, self._like
        if like is None:
            self._values[rank] = lambda: objects.loads(own)
        elif self._outs is None:
            self._values[rank] = lambda: like.wrap(own)
        else:
            flat = self._into_out(like.dtype, like.shape)
            flat[...] = own

    def place(self, rank: int, meta: bytes, nbytes: int) -> memoryview:
        like = self._like
        description = objects.unpack_control(meta, len(meta))
        if description is None:
            if like is not None:
                raise Disagrees("an object arrived where an array was passed")
            pickled = bytearray(nbytes)
            self._values[rank] = lambda: objects.loads(pickled)
            return memoryview(pickled)
        dtype, shape, container = _parse(description)
        count = math.prod(shape)
        if count * dtype.itemsize != nbytes:
            raise ProtocolError(f"rank {rank} announced {nbytes} bytes for {dtype.name}{list(shape)}")
        if like is not None and (like.dtype is not dtype or (self._strict and like.shape != shape)):
            raise Disagrees(f"{dtype.name}{list(shape)} arrived for {like.dtype.name}{list(like.shape)}")
        if self._outs is not None:
            return flat_bytes(self._into_out(dtype, shape, rank))
        flat = np.empty(count, dtype.storage)
        if like is not None:
            self._values[rank] = lambda: like.wrap(flat, shape)
        else:
            self._values[rank] = lambda: rebuild(container, dtype, shape, flat)
        return flat_bytes(flat)

    def _into_out(self, dtype: DType, shape: tuple[int, ...], rank: int | None = None) -> Flat:
        """Flat memory for the value from ``rank`` in the caller's ``out``."""
        rank = self._rank if rank is None else rank
        assert self._outs is not None
        out = self._outs[rank]
        target = _target(out)
        if target.dtype is not dtype or target.shape != shape:
            raise ValueError(
                f"out for rank {rank} is {target.dtype.name}{list(target.shape)}; it must be {dtype.name}{list(shape)}"
            )
        flat, write_back = target.lend()
        self._values[rank] = _into(out, write_back)
        return flat

    def value(self, rank: int) -> Any:
        return self._values.pop(rank)()


def _parse(description: Any) -> tuple[DType, tuple[int, ...], str]:
    try:
        dtype_name, lengths, container = description
        shape = tuple(map(operator.index, lengths))
        if shape and min(shape) < 0:
            raise ValueError
        return DTYPES[dtype_name], shape, str(container)
    except (TypeError, ValueError, KeyError):
        raise ProtocolError(f"malformed description of an array: {description!r}") from None


_OBJECT_META = objects.pack_control(None)


def _array_item(array: Array) -> tuple[items.Item, Any]:
    flat = array.pack()
    meta = objects.pack_control([array.dtype.name, list(array.shape), array.container])
    return items.Item(meta, flat_bytes(flat)), flat


def _object_item(value: Any) -> tuple[items.Item, bytes]:
    payload = objects.dumps(value)
    return items.Item(_OBJECT_META, memoryview(payload)), payload


def broadcast(place: Place, value: Any, root: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """The root's value on every rank."""
    root = _root(place, root)
    _algorithm(place, "broadcast", algorithm)
    here = place.rank == root
    like = describe(value) if value is not None else None
    outs = None
    if out is not None:
        target = _target(out)
        if like is not None:
            matches_out(like, target)
        target.lend()  # refuse unsuitable memory now rather than when bytes arrive
        outs = {root: out}
        if not here:
            like = target
    item, own = None, None
    if here:
        if like is None and out is not None:
            raise TypeError(f"out= takes an array; the root broadcasts a {type(value).__name__}")
        item, own = _array_item(like) if like is not None else _object_item(value)
    path = "array" if like is not None else ("object" if here else None)
    fingerprint = Fingerprint(
        "broadcast",
        path,
        None,
        like.dtype.name if like is not None else None,
        like.shape if like is not None else None,
        root,
        name,
        algorithm,
        loose_path=True,
    )
    codec = _Received(place.rank, own, like, outs, strict=True)
    return Call(fingerprint, items.broadcast(item, codec, place.rank, place.size, root))


def allgather(place: Place, value: Any, out: Sequence[Any] | None, algorithm: str, name: str | None) -> Call:
    """Every rank's value on every rank, in rank order."""
    chosen = _algorithm(place, "allgather", algorithm)
    array = describe(value)
    outs = None
    if out is not None:
        if array is None:
            raise TypeError(f"out= takes arrays; allgather of a {type(value).__name__} returns new values")
        if not isinstance(out, list | tuple):
            raise TypeError(
                f"out= must be a list of {place.size} arrays, one per rank, not a {type(out).__name__}"
            )
        if len(out) != place.size:
            raise ValueError(f"out= holds {len(out)} arrays; it must hold one per rank, {place.size}")
        targets = [_target(one) for one in out]
        for target in targets:
            if target.dtype is not array.dtype:
                raise TypeError(f"out= holds {target.dtype.name}; it must hold {array.dtype.name}")
            target.lend()
        if share_memory(targets):
            raise ValueError(
                "out= holds the same memory for several ranks; pass arrays apart from each other"
            )
        outs = dict(enumerate(out))
    own: Any
    item, own = _array_item(array) if array is not None else _object_item(value)
    fingerprint = Fingerprint(
        "allgather",
        "array" if array is not None else "object",
        dtype=array.dtype.name if array is not None else None,
        name=name,
        algorithm=algorithm,
    )

    def choose(largest: int) -> str:
        if chosen != "auto":
            return chosen
        return registry.choose("allgather", 1, largest, place.size, table=place.table)

    codec = _Received(place.rank, own, array, outs, strict=False)
    return Call(fingerprint, items.allgather(item, codec, place.rank, place.size, choose))


def barrier(place: Place, name: str | None) -> Call:
    """No payload: the START round alone waits for every rank."""
    return Call(Fingerprint("barrier", name=name), items.nothing())
