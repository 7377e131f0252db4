"""The trace of a simulated run as one hash: equal for equal runs, in any process. Knows events by name only."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Final

__all__ = ["Trace"]

_MOVED: Final = struct.Struct("<BdHHI")
_BLOCK: Final = 1 << 16
"""Bytes that are hashed at a time."""


class Trace:
    """Every event of a run, in order: bytes that moved, and what `note` was told."""

    def __init__(self, listener: Callable[[float, str], None] | None = None) -> None:
        """``listener`` hears of each note as text, with its virtual time."""
        self._hash = hashlib.blake2b(digest_size=16)
        self._pending = bytearray()
        self._listener = listener
        self.pieces = 0
        """Pieces that have moved."""

    def moved(self, now: float, source: int, target: int, nbytes: int) -> None:
        """A piece of a stream has arrived."""
        self.pieces += 1
        pending = self._pending
        pending += _MOVED.pack(1, now, source, target, nbytes)
        if len(pending) > _BLOCK:
            self._hash.update(pending)
            pending.clear()

    def note(self, now: float, what: str) -> None:
        """Anything else that happened."""
        self._pending += struct.pack("<Bd", 2, now) + what.encode("utf-8", "backslashreplace") + b"\n"
        if self._listener is not None:
            self._listener(now, what)

    @property
    def hash(self) -> str:
        """The hash of all events so far, as 32 hexadecimal digits."""
        self._hash.update(self._pending)
        self._pending.clear()
        return self._hash.hexdigest()
