"""Calls that send and receive one message: from arguments to what `asynccoll.engine.mail` is asked for. See `asynccoll.calls`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from asynccoll.buffers import describe, rebuild
from asynccoll.calls.place import Call, Place
from asynccoll.calls.received import Objects, array_of, item_of, room_for
from asynccoll.engine.fingerprint import Fingerprint
from asynccoll.engine.mail import Receive, Send
from asynccoll.engine.programs import items
from asynccoll.objects import Codec
from asynccoll.pickling import fresh

__all__ = ["Message", "receive", "send"]

_TAGS: Final = 1 << 63


class Message(NamedTuple):
    """A message and where it came from."""

    value: Any
    source: int
    """Rank of the sender in the communicator."""
    tag: int


def _tag(tag: Any) -> int:
    try:
        number = operator.index(tag)
    except TypeError:
        raise TypeError(f"tag={tag!r} is not an integer") from None
    if not -_TAGS <= number < _TAGS:
        raise ValueError(f"tag={number} does not fit 64 bits")
    return number


def _peer(place: Place, rank: Any, argument: str) -> int:
    try:
        number = operator.index(rank)
    except TypeError:
        raise TypeError(f"{argument}={rank!r} is not an integer") from None
    if not 0 <= number < place.size:
        raise ValueError(f"{argument}={number} is not a rank of this communicator; use 0 to {place.size - 1}")
    return number


def send(place: Place, value: Any, dst: Any, tag: Any) -> Call:
    """One message: of an array a snapshot; of an object the large buffers are lent until it is sent."""
    to = _peer(place, dst, "dst")
    array = describe(value)
    if array is None and to == place.rank:  # sent as soon as called, and received later
        item = Objects(place.codec).taken(value)
    else:
        item, _ = item_of(value, array, place.codec)
    return Call(Fingerprint("send", root=to), items.nothing(), mail=Send(to, _tag(tag), item))


def receive(place: Place, verb: str, src: Any, tag: Any) -> Call:
    """One message; its value alone (``"recv"``), or a `Message` (``"recv_message"``)."""
    source = None if src is None else _peer(place, src, "src")
    wanted = None if tag is None else _tag(tag)

    def value(meta: bytes, parts: Sequence[memoryview], source: int, tag: int) -> Any:
        try:
            found = _value(meta, parts, place.codec)
        except Exception as error:
            error.add_note(f"raised by the message of rank {source} with tag {tag}")
            raise
        return Message(found, source, tag) if verb == "recv_message" else found

    return Call(Fingerprint(verb, root=source), items.nothing(), mail=Receive(source, wanted, _memory, value))


def _memory(meta: bytes, nbytes: int) -> Sequence[memoryview]:
    """Memory for the parts of that description."""
    return room_for(meta, nbytes) if array_of(meta, nbytes) is None else (fresh(nbytes),)


def _value(meta: bytes, parts: Sequence[memoryview], codec: Codec) -> Any:
    found = array_of(meta, sum(map(len, parts)))
    if found is None:
        return codec.loads(parts[0], parts[1:])
    dtype, shape, container = found
    return rebuild(container, dtype, shape, np.frombuffer(parts[0], dtype.storage))
