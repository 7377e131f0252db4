"""Control messages between proved ranks: a length, then a msgpack map. Knows no message's meaning.

Numbers are big-endian. The first key of every map is ``kind``. Never pickle: these bytes come before anything
is agreed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from asynccoll.errors import ProtocolError
from asynccoll.net.sockets import receive_exactly, send_all

__all__ = ["MAX_CONTROL", "decode", "encode", "normalise", "receive", "send"]

MAX_CONTROL = 1 << 20
"""Longest control message in bytes. The welcome of 4,096 ranks takes about a third of it."""

_LENGTH = struct.Struct("!I")


def encode(kind: str, **fields: Any) -> bytes:
    """The message as it travels. ValueError if it is longer than `MAX_CONTROL`, TypeError if msgpack cannot
    carry it.
    """
    body: bytes = msgpack.packb({"kind": kind, **fields}, use_bin_type=True)
    if len(body) > MAX_CONTROL:
        raise ValueError(f"control message {kind!r} has {len(body)} bytes, more than {MAX_CONTROL}")
    return _LENGTH.pack(len(body)) + body


def normalise(mapping: Mapping[str, Any], limit: int, name: str) -> Mapping[str, Any]:
    """``mapping`` as every receiver will see it (tuples become lists). ValueError if it takes more than
    ``limit`` bytes.
    """
    body: bytes = msgpack.packb(dict(mapping), use_bin_type=True)
    if len(body) > limit:
        raise ValueError(f"{name} takes {len(body)} bytes as msgpack, more than {limit}")
    received: Mapping[str, Any] = msgpack.unpackb(body, raw=False, strict_map_key=False)
    return received


def decode(body: bytes) -> Mapping[str, Any]:
    """The map in ``body``. ProtocolError unless it is a map with a ``kind``."""
    try:
        # The defaults bound every inner length by that of the body, so a small message cannot ask for much
        # memory.
        message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a list as a key
        raise ProtocolError(f"a control message is not msgpack: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("a control message is not a map with a 'kind'")
    return message


async def send(sock: socket.socket, message: bytes) -> None:
    """Write an encoded message whole."""
    await send_all(sock, message)


async def receive(sock: socket.socket) -> Mapping[str, Any]:
    """Read one message and no byte of what follows. ConnectionError at the end of the stream, ProtocolError
    on nonsense.
    """
    (length,) = _LENGTH.unpack(await receive_exactly(sock, _LENGTH.size))
    if length > MAX_CONTROL:
        raise ProtocolError(f"a control message of {length} bytes is longer than {MAX_CONTROL}")
    return decode(await receive_exactly(sock, length))
