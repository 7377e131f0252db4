"""Which of n holders has a key: the same in every interpreter. Knows keys and numbers, not ranks.

Rendezvous hashing: each holder gets a number from the key and its own index, the largest has it. Another holder takes a key only
where its number is the largest, so from n to n + 1 holders about 1 / (n + 1) of the keys move, all of them to the new one.

`hash` will not do: it is salted in each interpreter, so machines would disagree about who has what.

D. G. Thaler, C. V. Ravishankar: Using name-based mappings to increase hit rates. IEEE/ACM Transactions on Networking 6 (1), 1998.
doi:10.1109/90.663936
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any, TypeAlias

from asynccoll.planner.given import shown

__all__ = ["Key", "holder"]

Key: TypeAlias = "str | bytes | int | tuple[Key, ...]"
"""What can be placed. Keys that are equal have one place, keys of different types are different keys."""

_DEEPEST = 32
"""Tuples in tuples: a key that holds itself by mistake is an error, not an endless walk."""


def holder(key: Key, count: int) -> int:
    """Index from 0 to ``count`` - 1 of who holds ``key``. Takes time in proportion to ``count``.

    Raises:
        TypeError: the key is, or holds, something other than str, bytes, int or a tuple of these.
        ValueError: ``count`` is below 1, or tuples are nested too deeply.
    """
    if count < 1:
        raise ValueError(f"nobody can hold a key among {count} holders; there must be at least one")
    begun = hashlib.blake2b(_encode(key, 0), digest_size=8, person=b"asynccoll.place")
    best, found = b"", 0
    for index in range(count):
        mixed = begun.copy()
        mixed.update(index.to_bytes(8, "big"))
        number = mixed.digest()
        if number > best:
            best, found = number, index
    return found


def _encode(key: Any, depth: int) -> bytes:
    """Bytes that no other key has: a letter for the type, the length, the content."""
    if isinstance(key, str):
        # Half a surrogate pair, as in file names that are no UTF-8, is as good a key as any.
        return _framed(b"s", key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return _framed(b"b", key)
    if isinstance(key, tuple):
        if depth >= _DEEPEST:
            # The key is not shown: Python may be unable to write it.
            raise ValueError(f"a key has more than {_DEEPEST} tuples in one another; use a flat one")
        items = [_encode(item, depth + 1) for item in key]
        return b"t%d:" % len(items) + b"".join(items)
    # bool is an int to Python; as a key it is a mistake more often than meant.
    if not isinstance(key, bool):
        try:
            number = operator.index(key)
        except TypeError:
            pass
        else:
            # Bytes, not digits: those of very large integers Python refuses to write.
            length = number.bit_length() // 8 + 1
            return _framed(b"i", number.to_bytes(length, "big", signed=True))
    raise TypeError(
        f"a key is a str, bytes, int or a tuple of these, not {shown(key)} of type {type(key).__name__}; convert it first"
    )


def _framed(kind: bytes, content: bytes) -> bytes:
    return kind + b"%d:" % len(content) + content
