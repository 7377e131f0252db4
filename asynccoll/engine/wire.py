"""Frames as bytes: the fixed header, START records, control payloads. Knows nothing of operations or credit.

Every frame is a 24-byte little-endian header, then ``length`` bytes of payload::

    0      1      2        4       8           16     20       24
    +------+------+--------+-------+-----------+------+--------+
    | kind | flag | round  | comm  |    seq    | tag  | length |
    |  u8  |  u8  |  u16   |  u32  |    u64    | u32  |  u32   |
    +------+------+--------+-------+-----------+------+--------+

``comm`` and ``seq`` name the operation. ``tag`` is 32 bits of the sender's fingerprint of it, so that bytes of a disagreeing
call are never taken for payload, whatever arrives first. ``docs/wire.md`` describes each kind.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from asynccoll.errors import ProtocolError
from asynccoll.objects import pack_control, unpack_control

__all__ = [
    "ABORT",
    "CREDIT",
    "DATA",
    "EAGER",
    "GOODBYE",
    "GRANT",
    "HEADER",
    "HEADER_SIZE",
    "KEY",
    "KEYED",
    "LAST",
    "LOCAL",
    "LOST",
    "MAX_BLOCK",
    "MAX_CONTROL",
    "MAX_DATA",
    "MESSAGE",
    "MESSAGES",
    "NO_DEADLINE",
    "READY",
    "START",
    "TAKE",
    "UNKEY",
    "WANT",
    "Record",
    "abort_frame",
    "clipped",
    "control_payload",
    "credit_frame",
    "data_header",
    "goodbye_frame",
    "grant_frame",
    "key_frame",
    "longest_record",
    "lost_frame",
    "message_frame",
    "parse_key",
    "parse_message",
    "parse_start",
    "parse_u64",
    "ready_frame",
    "start_frame",
    "take_frame",
    "unkey_frame",
    "want_frame",
]

DATA: Final = 1
"""Payload of one operation."""
START: Final = 2
"""One record of an operation's START round."""
READY: Final = 3
"""The receiver of an operation's stream takes bytes up to this offset."""
CREDIT: Final = 4
"""Eager bytes were taken over by their operations: the sender may send as many again."""
WANT: Final = 5
"""The sender has no eager credit left for this operation: answer with READY once it is started."""
ABORT: Final = 6
"""The operation ends on every rank."""
GOODBYE: Final = 7
"""The sender closes in good order."""

MESSAGE: Final = 8
"""A message from one rank to another: its description, and its payload where that is short."""
TAKE: Final = 9
"""The receiver of a message asks for its payload."""
KEY: Final = 10
"""To rank 0 of the communicator: the sender has called a keyed operation, its announcement number ``seq``."""
GRANT: Final = 11
"""From rank 0: all ranks have called the operation that this rank announced, and its number is ``seq``."""
UNKEY: Final = 12
"""An announcement has ended: to rank 0 by the rank that made it, from rank 0 to the ranks that wait."""
LOST: Final = 13
"""To every rank of the mesh: whom the sender takes for dead, and what it has heard of that (`asynccoll.engine.losses`)."""
LAST: Final = LOST
"""The largest kind."""

KEYED: Final = 1 << 62
"""Numbers from here to `MESSAGES` are those of keyed operations, in the order of their grants."""
MESSAGES: Final = 1 << 63
"""Numbers from here on are those of messages: this, the sender's rank shifted by 40, and its count."""
LOCAL: Final = 1 << 64
"""Numbers from here on are a rank's own, for what has none on the wire (yet): no frame can name one."""

EAGER: Final = 1
"""Flag of a DATA frame: its bytes count against the eager credit."""

HEADER: Final = struct.Struct("<BBHIQII")
HEADER_SIZE: Final = HEADER.size
_RECORD: Final = struct.Struct("<QQI")
_START: Final = struct.Struct("<BBHIQIIQQI")
_NARROW: Final = 8
"""Groups of up to this many ranks have a bitmap of one byte: their records are packed and parsed in one go."""
_NARROW_RECORD: Final = struct.Struct("<QQIB")
_NARROW_START: Final = struct.Struct("<BBHIQIIQQIB")
_READY: Final = struct.Struct("<BBHIQIIQ")
_MESSAGE: Final = struct.Struct("<qQI")
_U64: Final = struct.Struct("<Q")

MAX_DATA: Final = 1 << 20
"""Largest payload of a DATA frame in bytes: what one slice of work may take at most (the loop is held < 10 ms)."""
MAX_CONTROL: Final = 1 << 16
"""Largest payload of any other frame in bytes."""
MAX_BLOCK: Final = 256
"""Largest block behind a START record: no more than the record itself costs a rank that has not called yet, so it needs no
credit."""
_MAX_KEY: Final = 256
"""Characters of a key."""
NO_DEADLINE: Final = 0xFFFFFFFF
"""Remaining milliseconds of a record when there is no deadline."""


Record: TypeAlias = tuple[int, int, int, int]
"""What one rank knows of an operation when it passes the START round on: a plain tuple, since one is made for each frame.

- strict: digest of what must always agree: verb, op, root, requested algorithm, name (and path, where it must).
- value: digest of dtype and shape; 0 is a wildcard.
- remaining_ms: smallest time remaining, in milliseconds (remaining time travels, never a clock reading).
- heard: bitmap of the group ranks that this record stands for.
"""


Buffer: TypeAlias = bytes | memoryview


def longest_record(size: int) -> int:
    """Bytes of the longest START record in a group of ``size`` ranks, with a block behind it."""
    return _RECORD.size + ((size + 7) >> 3) + MAX_BLOCK


def data_header(flags: int, comm: int, seq: int, tag: int, length: int) -> bytes:
    """Header of a DATA frame with ``length`` bytes to follow."""
    return HEADER.pack(DATA, flags, 0, comm, seq, tag, length)


def start_frame(
    round_: int, comm: int, seq: int, tag: int, record: Record, size: int, block: Buffer = b""
) -> bytes:
    """START frame of a group with ``size`` ranks, with the ``block`` of a swap behind the record."""
    if size <= _NARROW:
        length = _NARROW_RECORD.size + len(block)
        return _NARROW_START.pack(START, 0, round_, comm, seq, tag, length, *record) + block
    width = (size + 7) >> 3
    strict, value, remaining, heard = record
    length = _RECORD.size + width + len(block)
    head = _START.pack(START, 0, round_, comm, seq, tag, length, strict, value, remaining)
    return head + heard.to_bytes(width, "little") + block


def parse_start(payload: memoryview, size: int) -> tuple[Record, memoryview]:
    """Record and block of a START frame's payload; `ProtocolError` if it does not fit a group of ``size`` ranks."""
    end = _RECORD.size + ((size + 7) >> 3)
    if not end <= len(payload) <= end + MAX_BLOCK:
        raise ProtocolError(f"START of {len(payload)} bytes does not fit a group of {size} ranks")
    if size <= _NARROW:
        record: Record = _NARROW_RECORD.unpack_from(payload)
    else:
        record = (*_RECORD.unpack_from(payload), int.from_bytes(payload[_RECORD.size : end], "little"))
    if record[3] >> size:
        raise ProtocolError(f"START record names ranks outside its group of {size}")
    return record, payload[end:]


def ready_frame(comm: int, seq: int, upto: int) -> bytes:
    """READY: bytes of this operation's stream below offset ``upto`` have a place."""
    return _READY.pack(READY, 0, 0, comm, seq, 0, 8, upto)


def want_frame(comm: int, seq: int) -> bytes:
    """WANT: answer with READY as soon as the operation is started."""
    return HEADER.pack(WANT, 0, 0, comm, seq, 0, 0)


def credit_frame(nbytes: int) -> bytes:
    """CREDIT: ``nbytes`` of eager credit are given back."""
    return _READY.pack(CREDIT, 0, 0, 0, 0, 0, 8, nbytes)


def parse_u64(payload: memoryview) -> int:
    """The number in a READY, CREDIT or GRANT frame."""
    if len(payload) != 8:
        raise ProtocolError(f"expected 8 bytes of payload, got {len(payload)}")
    return int(_U64.unpack(payload)[0])


def message_frame(comm: int, seq: int, tag: int, meta: bytes, nbytes: int, payload: bytes) -> bytes:
    """MESSAGE with the description of a payload of ``nbytes``, and the ``payload`` itself, or nothing of it."""
    body = _MESSAGE.pack(tag, nbytes, len(meta)) + meta + payload
    return HEADER.pack(MESSAGE, 0, 0, comm, seq, 0, len(body)) + body


def parse_message(payload: memoryview) -> tuple[int, int, bytes, memoryview]:
    """Tag, bytes of the payload, its description, and what there is of it: all or nothing."""
    if len(payload) < _MESSAGE.size:
        raise ProtocolError(f"a message of {len(payload)} bytes is too short for its head")
    tag, nbytes, length = _MESSAGE.unpack_from(payload)
    body = payload[_MESSAGE.size :]
    if length > len(body) or len(body) - length not in (0, nbytes) or nbytes >= 1 << 62:
        raise ProtocolError(
            f"a message announces {length} bytes of description and {nbytes} of payload, and holds {len(body)}"
        )
    return tag, nbytes, bytes(body[:length]), body[length:]


def take_frame(comm: int, seq: int) -> bytes:
    """TAKE: send the payload of this message."""
    return HEADER.pack(TAKE, 0, 0, comm, seq, 0, 0)


def key_frame(comm: int, number: int, key: str) -> bytes:
    """KEY: announce an operation under ``key``. Lone surrogates travel as they are: equal keys are equal everywhere."""
    payload = key.encode("utf-8", "surrogatepass")
    return HEADER.pack(KEY, 0, 0, comm, number, 0, len(payload)) + payload


def parse_key(payload: memoryview) -> str:
    """The key in a KEY frame."""
    try:
        key = str(payload, "utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a key is not UTF-8: {error}") from None
    if len(key) > _MAX_KEY:
        raise ProtocolError(f"a key has {len(key)} characters, and {_MAX_KEY} are allowed")
    return key


def grant_frame(comm: int, seq: int, number: int) -> bytes:
    """GRANT: announcement ``number`` of the receiver is the operation ``seq``."""
    return _READY.pack(GRANT, 0, 0, comm, seq, 0, 8, number)


def unkey_frame(comm: int, number: int, body: Mapping[str, Any]) -> bytes:
    """UNKEY with a msgpack body of at most `MAX_CONTROL` bytes."""
    return _packed(UNKEY, comm, number, dict(body))


def abort_frame(comm: int, seq: int, body: dict[str, Any]) -> bytes:
    """ABORT with a msgpack body of at most `MAX_CONTROL` bytes."""
    return _packed(ABORT, comm, seq, body)


def goodbye_frame(comm: int, body: dict[str, Any]) -> bytes:
    """GOODBYE with a msgpack body, from one communicator or (0) from the mesh."""
    return _packed(GOODBYE, comm, 0, body)


def lost_frame(body: dict[str, Any]) -> bytes:
    """LOST with a msgpack body of at most `MAX_CONTROL` bytes."""
    return _packed(LOST, 0, 0, body)


def clipped(text: str, limit: int) -> str:
    """``text`` as it may travel: well-formed (lone surrogates are spelled out) and of at most ``limit`` bytes in UTF-8."""
    return text.encode("utf-8", "backslashreplace")[:limit].decode("utf-8", "ignore")


def _packed(kind: int, comm: int, seq: int, body: dict[str, Any]) -> bytes:
    payload = pack_control(body)
    if len(payload) > MAX_CONTROL:
        raise ValueError(f"control payload of {len(payload)} bytes is over the limit of {MAX_CONTROL}")
    return HEADER.pack(kind, 0, 0, comm, seq, 0, len(payload)) + payload


def control_payload(payload: memoryview) -> dict[str, Any]:
    """The msgpack map in an ABORT or GOODBYE frame; anything else is a `ProtocolError`."""
    body = unpack_control(payload, MAX_CONTROL)
    if not isinstance(body, dict):
        raise ProtocolError(f"control payload is a {type(body).__name__}, not a map")
    return body
