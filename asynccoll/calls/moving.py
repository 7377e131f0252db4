"""Calls that move whole values, or nothing: from arguments to an operation. See `asynccoll.calls`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asynccoll import objects
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
from asynccoll.calls.place import Call, Place, as_target, checked_root, into, wanted_algorithm
from asynccoll.engine.aborts import Disagrees
from asynccoll.engine.fingerprint import Fingerprint
from asynccoll.engine.programs import items
from asynccoll.errors import ProtocolError

__all__ = ["allgather", "array_item", "array_of", "barrier", "broadcast", "object_item"]


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
        target = as_target(out)
        if target.dtype is not dtype or target.shape != shape:
            raise ValueError(
                f"out for rank {rank} is {target.dtype.name}{list(target.shape)}; it must be {dtype.name}{list(shape)}"
            )
        flat, write_back = target.lend()
        self._values[rank] = into(out, write_back)
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


def array_of(meta: bytes, nbytes: int) -> tuple[DType, tuple[int, ...], str] | None:
    """dtype, shape and container of an array that a peer describes as of ``nbytes`` bytes; None for an object."""
    description = objects.unpack_control(meta, len(meta))
    if description is None:
        return None
    dtype, shape, container = _parse(description)
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ProtocolError(f"{nbytes} bytes were announced for {dtype.name}{list(shape)}")
    return dtype, shape, container


_OBJECT_META = objects.pack_control(None)


def array_item(array: Array) -> tuple[items.Item, Any]:
    """A snapshot of the array as it travels, and its elements."""
    flat = array.pack()
    meta = objects.pack_control([array.dtype.name, list(array.shape), array.container])
    return items.Item(meta, flat_bytes(flat)), flat


def object_item(value: Any) -> tuple[items.Item, bytes]:
    """An object as it travels, and its pickle."""
    payload = objects.dumps(value)
    return items.Item(_OBJECT_META, memoryview(payload)), payload


def broadcast(place: Place, value: Any, root: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """The root's value on every rank."""
    root = checked_root(place, root)
    wanted_algorithm(place, "broadcast", algorithm)
    here = place.rank == root
    like = describe(value) if value is not None else None
    outs = None
    if out is not None:
        target = as_target(out)
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
        item, own = array_item(like) if like is not None else object_item(value)
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
    chosen = wanted_algorithm(place, "allgather", algorithm)
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
        targets = [as_target(one) for one in out]
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
    item, own = array_item(array) if array is not None else object_item(value)
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
