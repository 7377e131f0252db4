"""What a program asks of the engine: bytes to a rank, bytes from a rank. Knows no frames, no dtypes and no schedules.

A *program* is the per-rank body of one operation: a generator that yields transfers and returns the operation's result.
Peers are ranks of the operation's group. A `SendBytes` never waits; a `RecvBytes` or `FoldBytes` resumes the program when all
its bytes are there, a `Pause` when the others have had their turn, a `Drain` when what it sent has left. The k-th byte sent to
a peer is the k-th byte received from this rank: between two ranks an operation is one stream of bytes in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, NamedTuple, TypeAlias, final

from asynccoll.errors import ProtocolError

__all__ = [
    "DRAIN",
    "PAUSE",
    "Drain",
    "FoldBytes",
    "Pause",
    "Program",
    "RecvBytes",
    "SendBytes",
    "Swap",
    "Transfer",
    "copied",
    "recv_message",
    "send_message",
]


@final
class SendBytes(NamedTuple):
    """Send ``data``. It is lent until it has left, at the latest when the operation ends, unless ``snapshot``."""

    peer: int
    data: memoryview | bytes
    snapshot: bool = False


@final
class RecvBytes(NamedTuple):
    """Fill ``into`` (a flat writable byte view), which belongs to the engine until the program resumes."""

    peer: int
    into: memoryview


@final
class FoldBytes(NamedTuple):
    """Take ``nbytes`` in pieces: ``fold(offset, piece)`` per piece, in order, each whole elements (multiples of 16 bytes
    from the start, except the last). ``piece`` is valid during the call only."""

    peer: int
    nbytes: int
    fold: Callable[[int, memoryview], None]


@final
class Pause(NamedTuple):
    """Between two slices of work without bytes to wait for: everything else of this rank goes on first."""


@final
class Drain(NamedTuple):
    """Until all that was sent has left its memory, so that it may be written to, by a user's code for one."""


PAUSE: Final = Pause()
DRAIN: Final = Drain()
SLICE: Final = 1 << 20
"""Bytes that a program copies before it pauses: a millisecond at most, even into memory that was never touched."""

Transfer: TypeAlias = SendBytes | RecvBytes | FoldBytes
Program: TypeAlias = Generator[Transfer | Pause | Drain, None, Any]
Swap: TypeAlias = Generator[memoryview, Any, Any]
"""Body of a small operation that moves along the START graph: it yields the block to tell, is resumed with that of each peer heard
(with None where it tells after the last), and returns the operation's result. Blocks are copied, and travel behind the records."""


def send_message(peer: int, payload: bytes | memoryview) -> Generator[Transfer, None, None]:
    """Send ``payload`` with its length in front, so that the receiver need not know it."""
    length = len(payload).to_bytes(8, "little")
    if len(payload) <= 4096:  # one small frame is cheaper than two
        yield SendBytes(peer, length + payload)
    else:
        yield SendBytes(peer, length)
        yield SendBytes(peer, payload)


def recv_message(peer: int, limit: int | None = None) -> Generator[Transfer, None, bytearray]:
    """Receive what `send_message` sent. Raises `ProtocolError` if it is announced as longer than ``limit``."""
    head = bytearray(8)
    yield RecvBytes(peer, memoryview(head))
    length = int.from_bytes(head, "little")
    if limit is not None and length > limit:
        raise ProtocolError(f"rank {peer} announced a message of {length} bytes, at most {limit} are allowed")
    payload = bytearray(length)
    if payload:
        yield RecvBytes(peer, memoryview(payload))
    return payload


def copied(copies: Iterable[tuple[memoryview, memoryview]]) -> Generator[Pause, None, None]:
    """Copy from the first to the second of each pair, which are as long, in slices with pauses between them."""
    room = SLICE
    for source, target in copies:
        lo, size = 0, len(source)
        while lo < size:
            if not room:
                yield PAUSE
                room = SLICE
            hi = min(size, lo + room)
            target[lo:hi] = source[lo:hi]
            room -= hi - lo
            lo = hi
