"""Programs that move whole values: broadcast, gather and their kin. Know no frames or links, and nothing of what values are.

A value travels as an *item*: a few bytes of ``meta`` that describe it, and its payload, in one or more parts that each have
memory of their own. Sizes need not be known beforehand: descriptions go first, with small payloads beside them, and large
payloads follow straight into their final memory.

Parts may be the caller's memory, lent until the operation ends. So what a rank keeps of its own is a copy, made in slices
after everything has been given away to be sent. Making a value may run a user's code, which may write to the memory it gets: a
rank that passes payloads on does so only when they have left.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from asynccoll.algorithms import dissemination, pairwise, registry
from asynccoll.algorithms.binomial import branch, family
from asynccoll.algorithms.steps import Recv, Send
from asynccoll.engine.outbox import passed_on
from asynccoll.engine.programs.waits import together, told
from asynccoll.engine.transfers import (
    DRAIN,
    Program,
    RecvBytes,
    SendBytes,
    Transfer,
    copied,
    recv_message,
    send_message,
)
from asynccoll.errors import ProtocolError

__all__ = [
    "Codec",
    "Copies",
    "Item",
    "Values",
    "allgather",
    "alltoall",
    "broadcast",
    "doubted",
    "gather",
    "nothing",
    "recv_item",
    "scatter",
    "send_item",
    "spread",
]

INLINE: Final = 4096
"""Payloads up to this many bytes travel beside their description."""
_HEAD: Final = struct.Struct("<IQ")
_LONGEST: Final = _HEAD.size + (1 << 13) + 1024 + INLINE
"""Bytes of one description and what is beside it. A ``meta`` is a few names and 64 lengths of 9 bytes, or 1,024 of 8, at most."""
_MOST: Final = 1 << 62
"""Bytes of one payload. No memory holds so many, so a larger number is garbled."""


_LARGE: Final = 1 << 20
"""Bytes of a payload for which one rank alone might have no memory."""
_DOUBT: Final = 1 << 31
"""Added to the length of a ``meta``: see `Item.doubtful`."""


class _Described(NamedTuple):
    """What is known of an item before its payload has come."""

    meta: bytes
    nbytes: int
    payload: memoryview | None
    """The payload, if it travelled beside the description."""
    doubtful: bool


Copies: TypeAlias = Sequence[tuple[memoryview, memoryview]]
"""From where to where bytes are to be copied, in slices."""


class Item(NamedTuple):
    """One value on its way: how to rebuild it, and its bytes."""

    meta: bytes
    parts: tuple[memoryview, ...]
    """Flat bytes, one part after the other on the wire."""
    doubtful: bool = False
    """One rank alone may be unable to rebuild it: then no rank returns before all have."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(map(len, self.parts))


class Codec(Protocol):
    """How the caller of a program turns received items back into values."""

    def keep(self, item: Item) -> Copies:
        """This rank's own item is part of the result too. Returns what is left to copy for it before `value` is called."""

    def place(self, rank: int, meta: bytes, nbytes: int) -> Sequence[memoryview]:
        """Flat writable memory, ``nbytes`` in all, for the parts from ``rank``. May raise to refuse it."""

    def value(self, rank: int) -> Any:
        """The value from ``rank``, once its memory is filled."""


class Values(Protocol):
    """How the objects of a fold become items and come back."""

    def taken(self, value: Any) -> Item:
        """``value`` as an item whose parts nobody else can write to: a snapshot, as a whole."""

    def place(self, meta: bytes, nbytes: int) -> Sequence[memoryview]:
        """Flat writable memory, ``nbytes`` in all, for the parts of an item. May raise to refuse it."""

    def own(self, item: Item) -> tuple[Sequence[memoryview], Copies]:
        """Parts for a copy of this rank's own item, and what is to be copied into them."""

    def value(self, parts: Sequence[memoryview]) -> Any:
        """The object of parts that are filled, and given away."""


def doubted(item: Item) -> bool:
    """One rank alone may be unable to rebuild it, or have no memory for it."""
    return item.doubtful or item.nbytes > _LARGE


def _whole(item: Item, doubt: bool = False) -> bytes:
    """The description of ``item``, with its payload beside it where that is small.

    ``doubt``: it is doubtful, or another one of the same operation is.
    """
    nbytes = item.nbytes
    payload = memoryview(b"".join(item.parts)) if nbytes <= INLINE else None
    return _encode(item.meta, nbytes, payload, doubt or doubted(item))


def _pieces(parts: Sequence[memoryview], longest: int) -> Iterator[memoryview]:
    """The parts in pieces of at most that many bytes."""
    for part in parts:
        for lo in range(0, len(part), longest):
            yield part[lo : lo + longest]


def spread(payload: memoryview, parts: Sequence[memoryview]) -> None:
    """Fill the parts, which are as long in all, from one piece of memory."""
    at = 0
    for part in parts:
        part[:] = payload[at : at + len(part)]
        at += len(part)


def _encode(meta: bytes, nbytes: int, payload: memoryview | None, doubtful: bool = False) -> bytes:
    """A description, with the payload beside it where that is small."""
    head = _HEAD.pack(len(meta) | (_DOUBT if doubtful else 0), nbytes) + meta
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
        doubtful = bool(meta_length & _DOUBT)
        meta_length &= ~_DOUBT
        if nbytes >= _MOST:
            raise ProtocolError(f"a description announces {nbytes} bytes")
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
        return _Described(meta, nbytes, payload, doubtful)

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

    Steps: ceil(log2 size), pipelined over eight segments of 256 KiB to 1 MiB. Bytes on the wire per rank: the payload once for each
    of its children, of which the root has ceil(log2 size).
    """
    parent, children = family(rank, size, root)
    if parent is None:
        assert item is not None
        head = _whole(item)
        for child in children:
            yield from send_message(child, head)
        if item.nbytes > INLINE:
            for piece in _pieces(item.parts, passed_on(item.nbytes)):
                for child in children:
                    yield SendBytes(child, piece)
        yield from copied(codec.keep(item))
        yield DRAIN
        value = codec.value(root)
        if doubted(item):
            yield from together(rank, size)
        return value

    message = yield from recv_message(parent, _LONGEST)
    for child in children:
        yield from send_message(child, memoryview(message))
    reader = _Reader(message)
    described = reader.item()
    reader.end()
    parts = _settle(codec, root, described)
    for piece in _pieces(parts, passed_on(sum(map(len, parts)))):
        yield RecvBytes(parent, piece)
        for child in children:
            yield SendBytes(child, piece)
    yield DRAIN
    value = codec.value(root)
    if described.doubtful:
        yield from together(rank, size)
    return value


def allgather(item: Item, codec: Codec, rank: int, size: int, choose: Callable[[int], str]) -> Program:
    """Everyone's items on every rank, in rank order.

    Descriptions and small payloads go round in ceil(log2 size) steps; the large payloads follow by the algorithm that
    ``choose(bytes of the largest)`` names: a pure function, so that all ranks choose alike.
    Bytes on the wire per rank: the sum of all other ranks' payloads.
    """
    found: dict[int, _Described] = {rank: _Described(item.meta, item.nbytes, None, doubted(item))}
    encoded = {rank: _whole(item)}
    for step in dissemination.allgather(rank, size):
        blocks = range(step.lo, step.hi)
        if type(step) is Send:
            yield from send_message(step.peer, b"".join(encoded[block] for block in blocks))
        elif type(step) is Recv:
            reader = _Reader((yield from recv_message(step.peer, _LONGEST * len(blocks))))
            for block in blocks:
                found[block] = reader.item()
                encoded[block] = _encode(*found[block])
            reader.end()

    memories: dict[int, Sequence[memoryview]] = {rank: item.parts}
    for block, described in sorted(found.items()):
        if block != rank:
            memories[block] = _settle(codec, block, described)
    largest = max(described.nbytes for described in found.values())
    if largest > INLINE:
        for step in registry.schedule("allgather", choose(largest))(rank, size):
            for block in range(step.lo, step.hi):
                if found[block].nbytes <= INLINE:
                    continue
                for part in memories[block]:
                    if type(step) is Send:
                        yield SendBytes(step.peer, part)
                    elif type(step) is Recv:
                        yield RecvBytes(step.peer, part)
    yield from copied(codec.keep(item))
    yield DRAIN
    values = [codec.value(block) for block in range(size)]
    if any(described.doubtful for described in found.values()):
        yield from together(rank, size)
    return values


def gather(
    item: Item, codec: Codec | None, rank: int, size: int, root: int, *, objects: bool = False
) -> Program:
    """Everyone's items in rank order at ``root``, which alone has a ``codec``; None elsewhere.

    Descriptions and small payloads go up a binomial tree, ceil(log2 size) steps; a large payload goes straight to the root,
    which takes one after the other in rank order. Bytes on the wire per rank: its own payload, and the small ones below it.
    ``objects``: no rank returns before the root has its values, ceil(log2 size) steps more.
    """
    parent, children = family(rank, size, root)
    branches = {child: branch(child, size, root) for child in children}
    if parent is not None:
        parts: list[bytes | bytearray] = [_whole(item)]
        for child in sorted(children, key=lambda one: (one - root) % size):  # the order of `branch`
            parts.append((yield from recv_message(child, _LONGEST * len(branches[child]))))
        yield from send_message(parent, b"".join(parts))
        if item.nbytes > INLINE:
            for part in item.parts:
                yield SendBytes(root, part)
        if objects:
            yield from told(rank, size, root)
        return None

    assert codec is not None
    found: dict[int, _Described] = {}
    for child in reversed(children):  # the small subtrees are complete first
        reader = _Reader((yield from recv_message(child, _LONGEST * len(branches[child]))))
        for member in branches[child]:
            found[member] = reader.item()
        reader.end()
    large = {member: _settle(codec, member, described) for member, described in sorted(found.items())}
    for member, missing in large.items():
        yield from _filled(member, missing)
    yield from copied(codec.keep(item))
    values = [codec.value(member) for member in range(size)]
    if objects:
        yield from told(rank, size, root)
    return values


def scatter(items: list[Item] | None, codec: Codec, rank: int, size: int, root: int) -> Program:
    """To each rank its own of ``items``, which are the root's, in rank order; None elsewhere.

    Descriptions and small payloads go down a binomial tree, ceil(log2 size) steps; a large payload goes straight from the root.
    Bytes on the wire: from the root all the others' payloads; from any other rank the small ones below it.
    """
    parent, children = family(rank, size, root)
    if parent is None:
        assert items is not None
        doubt = any(map(doubted, items))
        for child in children:
            ours = (_whole(items[member], doubt) for member in branch(child, size, root))
            yield from send_message(child, b"".join(ours))
        for member in branch(root, size, root)[1:]:
            if items[member].nbytes > INLINE:
                for part in items[member].parts:
                    yield SendBytes(member, part)
        yield from copied(codec.keep(items[root]))
        value = codec.value(root)
        if doubt:
            yield from together(rank, size)
        return value

    reader = _Reader((yield from recv_message(parent, _LONGEST * len(branch(rank, size, root)))))
    described = reader.item()
    below = {child: branch(child, size, root) for child in children}
    for child in sorted(children, key=lambda one: (one - root) % size):  # the order of `branch`
        yield from send_message(child, reader.items(len(below[child])))
    reader.end()
    yield from _filled(root, _settle(codec, root, described))
    value = codec.value(root)
    if described.doubtful:
        yield from together(rank, size)
    return value


def alltoall(items: list[Item], codec: Codec, rank: int, size: int, *, objects: bool = False) -> Program:
    """Item i of ``items`` goes to rank i; the result is what the ranks had for this one, in rank order.

    Every rank tells every other at once what it will get, with small payloads beside it: one step. Large payloads follow in
    pairwise exchanges, size - 1 steps (size, where that is odd). Bytes on the wire per rank: its payloads for the others.
    ``objects``: no rank returns before all have their values, ceil(log2 size) steps more.
    """
    steps = tuple(pairwise.alltoall(rank, size))
    for step in steps:
        if type(step) is Send:
            yield from send_message(step.peer, _whole(items[step.peer]))
    for step in steps:
        if type(step) is Send:
            if items[step.peer].nbytes > INLINE:
                for part in items[step.peer].parts:
                    yield SendBytes(step.peer, part)
        elif type(step) is Recv:
            reader = _Reader((yield from recv_message(step.peer, _LONGEST)))
            described = reader.item()
            reader.end()
            yield from _filled(step.peer, _settle(codec, step.peer, described))
    yield from copied(codec.keep(items[rank]))
    values = [codec.value(peer) for peer in range(size)]
    if objects:
        yield from together(rank, size)
    return values


def _settle(codec: Codec, rank: int, described: _Described) -> Sequence[memoryview]:
    """Give the item from ``rank`` its memory. Returns the parts that are still to come."""
    parts = codec.place(rank, described.meta, described.nbytes)
    if described.payload is None:
        return parts
    spread(described.payload, parts)
    return ()


def _filled(peer: int, parts: Sequence[memoryview]) -> Generator[Transfer, None, None]:
    """Receive the parts that are still to come."""
    for part in parts:
        yield RecvBytes(peer, part)


def send_item(peer: int, item: Item, doubt: bool = False) -> Generator[Transfer, None, None]:
    """Send a value whose size the receiver does not know. ``doubt``: see `recv_item`."""
    yield from send_message(peer, _whole(item, doubt))
    if item.nbytes > INLINE:
        for part in item.parts:
            yield SendBytes(peer, part)


def recv_item(peer: int, values: Values) -> Generator[Transfer, None, tuple[Sequence[memoryview], bool]]:
    """Receive what `send_item` sent: its parts, filled, and whether it, or another item of its operation, is doubtful."""
    reader = _Reader((yield from recv_message(peer, _LONGEST)))
    meta, nbytes, payload, doubtful = reader.item()
    reader.end()
    parts = values.place(meta, nbytes)
    if payload is None:
        yield from _filled(peer, parts)
    else:
        spread(payload, parts)
    return parts, doubtful


def nothing() -> Program:
    """The barrier: no payload at all, since every operation's START round already waits for all ranks."""
    yield from ()
    return None
