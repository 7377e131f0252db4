"""Values as items and back: how a call that moves values describes its own, and takes what arrives. See `asynccoll.calls`."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from asynccoll import objects, pickling
from asynccoll.buffers import DTYPES, Array, DType, Flat, flat_bytes, rebuild, share_memory
from asynccoll.calls.place import as_target, into
from asynccoll.engine.aborts import Disagrees
from asynccoll.engine.programs import items
from asynccoll.errors import ProtocolError

__all__ = ["Objects", "Received", "array_of", "checked_outs", "item_of", "room_for"]

_CONTAINERS: Final = frozenset(
    ["numpy", "scalar", "torch", "memoryview", *(f"array:{typecode}" for typecode in "bBhHiIlLqQfd")]
)
"""What `Array.container` may be."""
_MOST_LENGTHS: Final = 64
"""numpy has no arrays of more dimensions."""


class Objects:
    """The values of a fold as items and back (see `items.Values`)."""

    def __init__(self, codec: objects.Codec) -> None:
        self._codec = codec

    def lent(self, value: Any) -> items.Item:
        """The caller's ``value``. Its large buffers are lent until the operation ends; the rest is a snapshot."""
        return _object_item(self._codec.dumps(value))

    def taken(self, value: Any) -> items.Item:
        """What a function has made, and may change again: a snapshot as a whole."""
        return _object_item(self._codec.dumps(value).owned())

    def place(self, meta: bytes, nbytes: int) -> list[memoryview]:
        """Memory for an object that a peer describes."""
        if array_of(meta, nbytes) is not None:
            raise ProtocolError("an array arrived where every rank passed an object")
        return room_for(meta, nbytes)

    def own(self, item: items.Item) -> tuple[list[memoryview], items.Copies]:
        """Memory for a copy of this rank's own, and what is to be copied: the buffers. The pickle is nobody else's."""
        copies = [(part, pickling.fresh(len(part))) for part in item.parts[1:]]
        return [item.parts[0], *(copy for _, copy in copies)], copies

    def value(self, parts: Sequence[memoryview]) -> Any:
        """The object of its pickle and its buffers."""
        return self._codec.loads(parts[0], parts[1:])


class Received:
    """Turns items back into values (see `items.Codec`)."""

    def __init__(
        self,
        rank: int,
        own: Any,
        likes: Sequence[Array] | None,
        outs: Mapping[int, Any] | None,
        *,
        strict: bool = False,
        codec: objects.Codec,
    ) -> None:
        self._rank = rank
        self._own = own
        """Flat snapshot of this rank's array for itself; None for an object, and where it has none."""
        self._likes = likes
        """For each rank an array of this one's own, for container and dtype of what comes from there, or None."""
        self._outs = outs
        """Rank -> array to receive into, or None."""
        self._strict = strict
        """dtype and shape must be those of `_likes` (broadcast); else only the dtype, which START has compared."""
        self._objects = Objects(codec)
        self._values: dict[int, Callable[[], Any]] = {}

    def keep(self, item: items.Item) -> items.Copies:
        """This rank's own value is part of the result: an array's snapshot itself, a copy of an object's lent buffers."""
        rank, own = self._rank, self._own
        if self._likes is None:
            parts, copies = self._objects.own(item)
            self._values[rank] = lambda: self._objects.value(parts)
            return copies
        like = self._likes[rank]
        if self._outs is not None:
            return [(flat_bytes(own), flat_bytes(self._into_out(like.dtype, like.shape)))]
        self._values[rank] = lambda: like.wrap(own)
        return ()

    def place(self, rank: int, meta: bytes, nbytes: int) -> Sequence[memoryview]:
        """Memory for what ``rank`` has announced: new, or in ``out``."""
        like = self._likes[rank] if self._likes is not None else None
        described = array_of(meta, nbytes)
        if described is None:
            if like is not None:
                raise Disagrees("an object arrived where an array was passed")
            parts = room_for(meta, nbytes)
            self._values[rank] = lambda: self._objects.value(parts)
            return parts
        dtype, shape, container = described
        if like is not None and (like.dtype is not dtype or (self._strict and like.shape != shape)):
            raise Disagrees(f"{dtype.name}{list(shape)} arrived for {like.dtype.name}{list(like.shape)}")
        if self._outs is not None:
            return (flat_bytes(self._into_out(dtype, shape, rank)),)
        flat = np.empty(math.prod(shape), dtype.storage)
        if like is not None:
            self._values[rank] = lambda: like.wrap(flat, shape)
        else:
            self._values[rank] = lambda: rebuild(container, dtype, shape, flat)
        return (flat_bytes(flat),)

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
        """The value from ``rank``, whose memory is filled."""
        try:
            return self._values.pop(rank)()
        except Exception as error:
            error.add_note(f"raised by the value of rank {rank}")
            raise


def _parse(description: Any) -> tuple[DType, tuple[int, ...], str]:
    try:
        dtype_name, lengths, container = description
        shape = tuple(map(operator.index, lengths))
        if len(shape) > _MOST_LENGTHS or not all(0 <= length < 1 << 63 for length in shape):
            raise ValueError
        if container not in _CONTAINERS:
            raise ValueError
        return DTYPES[dtype_name], shape, container
    except (TypeError, ValueError, KeyError):
        raise ProtocolError(f"malformed description of an array: {description!r}") from None


def array_of(meta: bytes, nbytes: int) -> tuple[DType, tuple[int, ...], str] | None:
    """dtype, shape and container of an array that a peer describes as of ``nbytes`` bytes; None for an object."""
    description = objects.unpack_control(meta, len(meta))
    if description is None or isinstance(description, bytes):
        return None
    dtype, shape, container = _parse(description)
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise ProtocolError(f"{nbytes} bytes were announced for {dtype.name}{list(shape)}")
    return dtype, shape, container


_LENGTH: Final = struct.Struct("<Q")
_NO_BUFFERS: Final = objects.pack_control(None)


def _object_item(packed: pickling.Packed) -> items.Item:
    """An object as an item: its pickle, then each buffer. Described by the buffers' lengths; the pickle is the rest."""
    meta = _NO_BUFFERS
    if packed.buffers:
        meta = objects.pack_control(b"".join(_LENGTH.pack(len(buffer)) for buffer in packed.buffers))
    return items.Item(meta, (memoryview(packed.pickle), *packed.buffers), packed.foreign)


def room_for(meta: bytes, nbytes: int) -> list[memoryview]:
    """Memory for the pickle and for each buffer of an object that a peer describes as of ``nbytes`` bytes.

    Raises:
        ProtocolError: the lengths do not fit each other.
        MemoryError: there is not that much memory.
    """
    packed = objects.unpack_control(meta, len(meta)) or b""
    if len(packed) % _LENGTH.size or len(packed) > _LENGTH.size * pickling.MOST_BUFFERS:
        raise ProtocolError(f"malformed description of an object: {len(packed)} bytes of lengths")
    lengths = [length for (length,) in _LENGTH.iter_unpack(packed)]
    pickled = nbytes - sum(lengths)
    if pickled < 0:
        raise ProtocolError(f"{nbytes} bytes were announced for an object whose buffers are {sum(lengths)}")
    return [pickling.fresh(length) for length in (pickled, *lengths)]


def item_of(value: Any, array: Array | None, codec: objects.Codec) -> tuple[items.Item, Any]:
    """``value``, whose description is ``array``, as an item; and what a `Received` takes as a rank's own.

    An array is copied: that snapshot is both. Of an object large buffers are lent until the operation ends, and copied later.
    """
    if array is None:
        return _object_item(codec.dumps(value)), None
    flat = array.pack()
    meta = objects.pack_control([array.dtype.name, list(array.shape), array.container])
    return items.Item(meta, (flat_bytes(flat),)), flat


def checked_outs(out: Any, size: int, verb: str, dtype: DType | None, kind: str) -> Mapping[int, Any]:
    """``out=`` of ``verb``, which returns a list of arrays of ``dtype``, as rank -> array.

    ``dtype`` is None, and ``kind`` the type's name, where it returns objects. Raises TypeError or ValueError.
    """
    if dtype is None:
        raise TypeError(f"out= takes arrays; {verb} of a {kind} returns new values")
    if not isinstance(out, list | tuple):
        raise TypeError(f"out= must be a list of {size} arrays, one per rank, not a {type(out).__name__}")
    if len(out) != size:
        raise ValueError(f"out= holds {len(out)} arrays; it must hold one per rank, {size}")
    targets = [as_target(one) for one in out]
    for target in targets:
        if target.dtype is not dtype:
            raise TypeError(f"out= holds {target.dtype.name}; it must hold {dtype.name}")
        target.lend()  # refuse unsuitable memory now rather than when bytes arrive
    if share_memory(targets):
        raise ValueError("out= holds the same memory for several ranks; pass arrays apart from each other")
    return dict(enumerate(out))
