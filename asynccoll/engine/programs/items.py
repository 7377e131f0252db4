"""Programs that move whole values: broadcast, gather and their kin, and the fold of Python objects. Know no frames or links.

A value travels as an *item*: a few bytes of ``meta`` that describe it, and its payload. Sizes need not be known beforehand:
descriptions go first, with small payloads beside them, and large payloads follow straight into their final memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from asynccoll.algorithms import dissemination, pairwise, registry
from asynccoll.algorithms.binomial import branch, family
from asynccoll.algorithms.steps import Recv, Send
from asynccoll.engine.aborts import FoldFailed
from asynccoll.engine.transfers import (
    Program,
    RecvBytes,
    SendBytes,
    Transfer,
    recv_message,
    send_message,
)
from asynccoll.errors import ProtocolError

__all__ = [
    "Codec",
    "Item",
    "allgather",
    "alltoall",
    "broadcast",
    "fold_objects",
    "folded",
    "gather",
    "guarded",
    "nothing",
    "scatter",
    "unpickled",
]

INLINE: Final = 4096
"""Payloads up to this many bytes travel beside their description."""
_SEGMENT: Final = 1 << 18
"""Bytes that a broadcast passes on at a time, so that the levels of the tree overlap."""
_HEAD: Final = struct.Struct("<IQ")
_LONGEST: Final = _HEAD.size + 1024 + INLINE
"""Bytes of one description and what is beside it. A ``meta`` is a few names and at most 64 lengths of 9 bytes."""


_Described: TypeAlias = tuple[bytes, int, memoryview | None]
"""meta, payload size, and the payload if it travelled beside them."""


class Item(NamedTuple):
    """One value on its way: how to rebuild it, and its bytes."""

    meta: bytes
    payload: memoryview


class Codec(Protocol):
    """How the caller of a program turns received items back into values."""

    def keep(self, item: Item) -> None:
        """This rank's own item is part of the result too."""

    def place(self, rank: int, meta: bytes, nbytes: int) -> memoryview:
        """Flat writable memory of ``nbytes`` for the payload from ``rank``. May raise to refuse it."""

    def value(self, rank: int) -> Any:
        """The value from ``rank``, once its memory is filled."""


def _whole(item: Item) -> bytes:
    """The description of ``item``, with its payload beside it where that is small."""
    return _encode(item.meta, len(item.payload), item.payload)


def _encode(meta: bytes, nbytes: int, payload: memoryview | None) -> bytes:
    """A description, with the payload beside it where that is small."""
    head = _HEAD.pack(len(meta), nbytes) + meta
    return head + payload if payload is not None and nbytes <= INLINE else head


class _Reader:
    """Takes descriptions out of a received message."""

    def __init__(self, message: bytes | bytearray) -> None:
        self._view = memoryview(message)
        self._pos = 0

    def item(self) -> _Described:
        """The next one."""
        view, pos = self._view, self._pos
        if len(view) - pos < _HEAD.size:
            raise ProtocolError("a description is cut short")
        meta_length, nbytes = _HEAD.unpack_from(view, pos)
        pos += _HEAD.size
        end = pos + meta_length
        meta = bytes(view[pos:end])
        payload: memoryview | None = None
        if nbytes <= INLINE:
            payload = view[end : end + nbytes]
            end += nbytes
        if end > len(view):
            raise ProtocolError("a description is cut short")
        self._pos = end
        return meta, nbytes, payload

    def items(self, count: int) -> memoryview:
        """The next ``count`` items as they came, to be passed on."""
        start = self._pos
        for _ in range(count):
            self.item()
        return self._view[start : self._pos]

    def end(self) -> None:
        """Nothing more may come. Raises `ProtocolError`."""
        if self._pos < len(self._view):
            raise ProtocolError(f"{len(self._view) - self._pos} bytes follow the last description")


def broadcast(item: Item | None, codec: Codec, rank: int, size: int, root: int) -> Program:
    """Binomial tree from ``root``; ``item`` is the root's value there and None elsewhere.

    Steps: ceil(log2 size), pipelined over segments of 256 KiB. Bytes on the wire per rank: the payload once for each of its
    children, of which the root has ceil(log2 size).
    """
    parent, children = family(rank, size, root)
    if parent is None:
        assert item is not None
        head = _whole(item)
        for child in children:
            yield from send_message(child, head)
        if len(item.payload) > INLINE:
            for lo in range(0, len(item.payload), _SEGMENT):
                for child in children:
                    yield SendBytes(child, item.payload[lo : lo + _SEGMENT])
        codec.keep(item)
        return codec.value(root)

    message = yield from recv_message(parent)
    for child in children:
        yield from send_message(child, memoryview(message))
    meta, nbytes, payload = _Reader(message).item()
    memory = codec.place(root, meta, nbytes)
    if payload is not None:
        memory[:] = payload
    else:
        for lo in range(0, nbytes, _SEGMENT):
            part = memory[lo : lo + _SEGMENT]
            yield RecvBytes(parent, part)
            for child in children:
                yield SendBytes(child, part)
    return codec.value(root)


def allgather(item: Item, codec: Codec, rank: int, size: int, choose: Callable[[int], str]) -> Program:
    """Everyone's items on every rank, in rank order.

    Descriptions and small payloads go round in ceil(log2 size) steps; the large payloads follow by the algorithm that
    ``choose(bytes of the largest)`` names: a pure function, so that all ranks choose alike.
    Bytes on the wire per rank: the sum of all other ranks' payloads.
    """
    found: dict[int, _Described] = {rank: (item.meta, len(item.payload), item.payload)}
    encoded = {rank: _whole(item)}
    for step in dissemination.allgather(rank, size):
        blocks = range(step.lo, step.hi)
        if type(step) is Send:
            yield from send_message(step.peer, b"".join(encoded[block] for block in blocks))
        elif type(step) is Recv:
            reader = _Reader((yield from recv_message(step.peer)))
            for block in blocks:
                meta, nbytes, payload = found[block] = reader.item()
                encoded[block] = _encode(meta, nbytes, payload)

    codec.keep(item)
    memories = {rank: item.payload}
    for block, (meta, nbytes, payload) in sorted(found.items()):
        if block != rank:
            memory = memories[block] = codec.place(block, meta, nbytes)
            if payload is not None:
                memory[:] = payload
    largest = max(nbytes for _, nbytes, _ in found.values())
    if largest > INLINE:
        for step in registry.schedule("allgather", choose(largest))(rank, size):
            for block in range(step.lo, step.hi):
                if found[block][1] <= INLINE:
                    continue
                if type(step) is Send:
                    yield SendBytes(step.peer, memories[block])
                elif type(step) is Recv:
                    yield RecvBytes(step.peer, memories[block])
    return [codec.value(block) for block in range(size)]


def gather(item: Item, codec: Codec | None, rank: int, size: int, root: int) -> Program:
    """Everyone's items in rank order at ``root``, which alone has a ``codec``; None elsewhere.

    Descriptions and small payloads go up a binomial tree, ceil(log2 size) steps; a large payload goes straight to the root,
    which takes one after the other in rank order. Bytes on the wire per rank: its own payload, and the small ones below it.
    """
    parent, children = family(rank, size, root)
    branches = {child: branch(child, size, root) for child in children}
    if parent is not None:
        parts: list[bytes | bytearray] = [_whole(item)]
        for child in sorted(children, key=lambda one: (one - root) % size):  # the order of `branch`
            parts.append((yield from recv_message(child, _LONGEST * len(branches[child]))))
        yield from send_message(parent, b"".join(parts))
        if len(item.payload) > INLINE:
            yield SendBytes(root, item.payload)
        return None

    assert codec is not None
    found: dict[int, _Described] = {}
    for child in reversed(children):  # the small subtrees are complete first
        reader = _Reader((yield from recv_message(child, _LONGEST * len(branches[child]))))
        for member in branches[child]:
            found[member] = reader.item()
        reader.end()
    codec.keep(item)
    large = {member: _settle(codec, member, described) for member, described in sorted(found.items())}
    for member, memory in large.items():
        if memory is not None:
            yield RecvBytes(member, memory)
    return [codec.value(member) for member in range(size)]


def scatter(items: list[Item] | None, codec: Codec, rank: int, size: int, root: int) -> Program:
    """To each rank its own of ``items``, which are the root's, in rank order; None elsewhere.

    Descriptions and small payloads go down a binomial tree, ceil(log2 size) steps; a large payload goes straight from the root.
    Bytes on the wire: from the root all the others' payloads; from any other rank the small ones below it.
    """
    parent, children = family(rank, size, root)
    if parent is None:
        assert items is not None
        for child in children:
            ours = (items[member] for member in branch(child, size, root))
            yield from send_message(child, b"".join(map(_whole, ours)))
        for member in branch(root, size, root)[1:]:
            if len(items[member].payload) > INLINE:
                yield SendBytes(member, items[member].payload)
        codec.keep(items[root])
        return codec.value(root)

    reader = _Reader((yield from recv_message(parent, _LONGEST * len(branch(rank, size, root)))))
    described = reader.item()
    below = {child: branch(child, size, root) for child in children}
    for child in sorted(children, key=lambda one: (one - root) % size):  # the order of `branch`
        yield from send_message(child, reader.items(len(below[child])))
    reader.end()
    memory = _settle(codec, root, described)
    if memory is not None:
        yield RecvBytes(root, memory)
    return codec.value(root)


def alltoall(items: list[Item], codec: Codec, rank: int, size: int) -> Program:
    """Item i of ``items`` goes to rank i; the result is what the ranks had for this one, in rank order.

    Every rank tells every other at once what it will get, with small payloads beside it: one step. Large payloads follow in
    pairwise exchanges, size - 1 steps (size, where that is odd). Bytes on the wire per rank: its payloads for the others.
    """
    steps = tuple(pairwise.alltoall(rank, size))
    for step in steps:
        if type(step) is Send:
            yield from send_message(step.peer, _whole(items[step.peer]))
    codec.keep(items[rank])
    for step in steps:
        if type(step) is Send:
            if len(items[step.peer].payload) > INLINE:
                yield SendBytes(step.peer, items[step.peer].payload)
        elif type(step) is Recv:
            reader = _Reader((yield from recv_message(step.peer, _LONGEST)))
            described = reader.item()
            reader.end()
            memory = _settle(codec, step.peer, described)
            if memory is not None:
                yield RecvBytes(step.peer, memory)
    return [codec.value(peer) for peer in range(size)]


def _settle(codec: Codec, rank: int, described: _Described) -> memoryview | None:
    """Give the item from ``rank`` its memory. Returns it if the payload is still to come."""
    meta, nbytes, payload = described
    memory = codec.place(rank, meta, nbytes)
    if payload is None:
        return memory
    memory[:] = payload
    return None


def fold_objects(
    payload: bytes,
    rank: int,
    size: int,
    fold: Callable[[Any, Any], Any],
    finish: Callable[[Any], Any],
    loads: Callable[[bytes | bytearray | memoryview], Any],
    dumps: Callable[[Any], bytes],
    *,
    tree: bool = False,
) -> Program:
    """The fold of all ranks' values on every rank: by rank 0's ``fold`` alone, or up a ``tree`` by every rank's own.

    Values travel pickled. Each rank, rank 0 too, gets a copy of its own. With one rank ``fold`` is not called.
    """
    total = yield from folded(payload, rank, size, fold, loads, dumps, tree=tree)
    if rank == 0:
        payload = dumps(guarded(finish, total))
    parent, children = family(rank, size, 0)
    answer: bytes | bytearray = payload
    if parent is not None:
        answer = yield from recv_message(parent)
    for child in children:
        yield from send_message(child, memoryview(answer))
    return loads(answer)


def guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function; what it raises becomes `RemoteError` on every rank."""
    try:
        return function(*args)
    except Exception as error:
        raise FoldFailed(error) from error


def folded(
    payload: bytes,
    rank: int,
    size: int,
    fold: Callable[[Any, Any], Any],
    loads: Callable[[bytes | bytearray | memoryview], Any],
    dumps: Callable[[Any], bytes],
    *,
    tree: bool,
) -> Generator[Transfer, None, Any]:
    """At rank 0 the fold of all ranks' values, in rank order; None elsewhere.

    A strict left fold by rank 0's ``fold``, size - 1 messages received there; or, as a ``tree``, ceil(log2 size) messages one
    after the other: each rank folds its children's blocks behind its own value.
    """
    parent, children = family(rank, size, 0)
    if not tree:
        parent, children = (None, list(range(1, size))) if rank == 0 else (0, [])
    if not children and parent is not None:
        yield from send_message(parent, payload)
        return None
    total = unpickled(loads, payload, rank, rank)
    for child in sorted(children):
        value = unpickled(loads, (yield from recv_message(child)), child, rank)
        total = guarded(fold, total, value)
    if parent is None:
        return total
    yield from send_message(parent, dumps(total))
    return None


def unpickled(loads: Callable[[Any], Any], payload: bytes | bytearray, source: int, rank: int = 0) -> Any:
    """The operand of rank ``source``. What unpickling it raises becomes `RemoteError` on every rank, and names ``source``."""
    try:
        return loads(payload)
    except Exception as error:
        error.add_note(f"raised on rank {rank} by unpickling the value of rank {source}")
        raise FoldFailed(error) from error


def nothing() -> Program:
    """The barrier: no payload at all, since every operation's START round already waits for all ranks."""
    yield from ()
    return None
