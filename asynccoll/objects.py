"""Python values and control records as bytes, and failures in a form that travels. Knows no peers or frames.

Three encodings, from the most to the least trusting. `PICKLES` unpickles (`asynccoll.pickling`): only bytes of an
authenticated peer may reach it, and none where the communicator is ``safe``. `restore` unpickles an exception under the
same rule, and never fails. `unpack_control` is msgpack with limits, for bytes from anybody.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgpack

from asynccoll.errors import ProtocolError
from asynccoll.pickling import Buffer, Packed, dumps, loads, pack, qualified_name, text_of, unpack

__all__ = [
    "PICKLES",
    "PLAIN",
    "Codec",
    "capture",
    "describe_error",
    "pack_control",
    "plain_dumps",
    "plain_loads",
    "restore",
    "unpack_control",
]

# A failure travels in a control frame to every rank, so its parts are bounded. 16 KiB of traceback are about 150
# frames; the innermost come last and are kept. An exception of more than 64 KiB carries data, not a description.
_TEXT_LIMIT = 16 * 1024
_ORIGINAL_LIMIT = 64 * 1024

# msgpack allocates the elements that an array's header claims before it reads them, 8 bytes each, and headers
# nest: 1 KiB of them claims 3 MiB, 4 KiB 32 MiB. Longer records are therefore walked once without allocating.
_UNWALKED = 1024


def plain_dumps(value: Any) -> bytes:
    """Pack a value without pickle: None, bool, int, float, str, bytes, and lists and dicts of these (tuples become lists).

    Raises:
        TypeError: it holds anything else.
    """
    try:
        _refuse_keys(value)
        return pack_control(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"this value of type {qualified_name(type(value))} needs pickle ({text_of(error)}), which safe=True refuses: "
            "send arrays, or None, bool, int of 64 bits, float, str, bytes, and lists and dicts of these"
        ) from error


def _refuse_keys(value: Any) -> None:
    """Raise TypeError where a dict has a key that would not come back as one: a tuple arrives as a list."""
    if isinstance(value, dict):
        for key, held in value.items():
            if isinstance(key, tuple):
                raise TypeError(f"the dict key {key!r:.100} is a tuple")
            _refuse_keys(held)
    elif isinstance(value, list | tuple):
        for held in value:
            _refuse_keys(held)


def plain_loads(data: Buffer) -> Any:
    """Rebuild a value from `plain_dumps`. Runs nobody's code.

    Raises:
        TypeError: the bytes are none, as those of a rank that was not opened with ``safe=True``.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    try:
        return unpack_control(data, size)
    except ProtocolError as error:
        raise TypeError(
            f"what came is no plain value ({error}); open every rank with safe=True, or none"
        ) from error


class Codec(NamedTuple):
    """How one communicator carries values that are no arrays."""

    path: str
    """What is compared across the ranks."""
    dumps: Callable[[Any], Packed]
    """A value as bytes. Large buffers in it are lent until they have been sent; the rest is a snapshot."""
    loads: Callable[[Buffer, Sequence[memoryview]], Any]
    """The value of a pickle and its buffers, which are given away: arrays in it live there."""


def pack_control(record: Any) -> bytes:
    """Encode a control record: None, bool, int, float, str, bytes, and lists and dicts of these (tuples too).

    Raises:
        TypeError: the record holds anything else.
        ValueError: it is nested too deeply, or holds an integer of more than 64 bits.
    """
    try:
        packed: bytes = msgpack.packb(record, use_bin_type=True)
    except OverflowError as error:
        raise ValueError(str(error)) from error
    return packed


def unpack_control(data: Buffer, limit: int) -> Any:
    """Decode a control record from anybody: at most ``limit`` bytes, nothing that is not plain data.

    Tuples come back as lists. Memory used is bounded by the data's own length.

    Raises:
        ProtocolError: longer than ``limit``, or not one well-formed record.
    """
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > limit:
        raise ProtocolError(f"control record of {size} bytes, at most {limit} are allowed")
    try:
        if size > _UNWALKED:
            walker = msgpack.Unpacker(max_buffer_size=size)
            walker.feed(data)
            walker.skip()
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,  # maps by rank have integer keys
            ext_hook=_refuse_extension,
            max_str_len=size,
            max_bin_len=size,
            max_ext_len=0,
            max_array_len=size,
            max_map_len=size,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed control record ({type(error).__name__}: {error})") from error


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def capture(error: BaseException, safe: bool = False) -> dict[str, Any]:
    """An exception as a plain record that `pack_control` takes: about 100 KiB at most.

    Keys: ``type`` (qualified name), ``message``, ``traceback`` (text, its innermost part if it is long) and
    ``pickle``, the exception itself, or None where it cannot be pickled *and rebuilt*, is large, or ``safe``.
    """
    return {
        "type": qualified_name(type(error)),
        "message": _encodable(text_of(error)[:_TEXT_LIMIT]),
        "traceback": _encodable(_tail("".join(traceback.format_exception(error)))),
        "pickle": None if safe else _pickled(error),
    }


def restore(info: Any, safe: bool = False) -> tuple[str, str, str, BaseException | None]:
    """Type name, message, traceback and, where it can be rebuilt here, the exception itself, from `capture`.

    Args:
        info: the record, as `unpack_control` returned it.
        safe: never unpickle: the exception itself is None.

    Raises:
        ProtocolError: not such a record.
    """
    match info:
        case {
            "type": str(kind),
            "message": str(message),
            "traceback": str(trace),
            "pickle": bytes() | None as packed,
        }:
            return kind, message, trace, None if safe or packed is None else _rebuilt(packed)
    raise ProtocolError("malformed failure record: not a map, or a part is missing or of the wrong type")


def _pickled(error: BaseException) -> bytes | None:
    try:
        packed = dumps(error)
    except TypeError:
        return None
    # An exception whose __init__ takes other arguments than .args pickles well and fails only on the way back.
    return packed if len(packed) <= _ORIGINAL_LIMIT and _rebuilt(packed) is not None else None


def _rebuilt(packed: bytes) -> BaseException | None:
    try:
        error = loads(packed)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 (the user's code may raise anything; the other parts describe the failure)
        return None
    return error if isinstance(error, BaseException) else None


def _encodable(text: str) -> str:
    # Names of files may hold lone surrogates (PEP 383), which msgpack refuses.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _tail(text: str) -> str:
    return text if len(text) <= _TEXT_LIMIT else "..." + text[3 - _TEXT_LIMIT :]


def describe_error(error: BaseException) -> str:
    """``"ValueError: message"``, or the type alone if there is none, whatever the error's own ``__str__`` does."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plain_packed(value: Any) -> Packed:
    return Packed(plain_dumps(value))


def _plain_unpacked(data: Buffer, buffers: Sequence[memoryview]) -> Any:
    if buffers:
        raise ProtocolError(f"a plain value came with {len(buffers)} buffers; it has none")
    return plain_loads(data)


PICKLES: Final = Codec("object", pack, unpack)
PLAIN: Final = Codec("plain value", _plain_packed, _plain_unpacked)
"""Without pickle, for ``safe=True``."""
