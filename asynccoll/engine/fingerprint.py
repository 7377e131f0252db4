"""What the ranks must agree on, and its digests. Knows neither values nor frames.

The strict digest covers what must always be equal, the value digest dtype and shape. Digests are the same in every
interpreter (blake2b of a canonical text, never ``hash()``) and are cached, since a trainer makes the same few calls again
and again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from asynccoll.engine.wire import clipped

_TEXT_BYTES: Final = 2048
"""What an ABORT carries of a name or a structure; the digests cover all of it."""

__all__ = ["FIELDS", "Digests", "Fingerprint", "digests", "first_difference"]

FIELDS: Final = ("verb", "root", "path", "op", "dtype", "shape", "name", "algorithm", "structure")
"""Order in which a difference is looked for: the first field that differs is the one reported."""


class Fingerprint(NamedTuple):
    """One rank's description of its call. ``None`` in ``path``, ``dtype`` or ``shape`` is a wildcard."""

    verb: str
    path: str | None = None
    op: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    root: int | None = None
    name: str | None = None
    algorithm: str | None = None
    structure: str | None = None
    loose_path: bool = False
    """True where the path may be a wildcard (broadcast, scatter: only the root's value counts)."""

    def fields(self) -> dict[str, Any]:
        """Field -> value as it travels in an ABORT (msgpack-able)."""
        out: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        if out["shape"] is not None:
            out["shape"] = list(out["shape"])
        for name in ("op", "algorithm"):
            out[name] = _plain(out[name])
        for name in ("name", "structure"):
            if out[name] is not None:
                out[name] = clipped(out[name], _TEXT_BYTES)
        return out


class Digests(NamedTuple):
    """The digests of a fingerprint."""

    strict: int
    """64 bits over the fields that must always agree."""
    value: int
    """64 bits over dtype and shape (and a loose path); 0 is a wildcard."""
    tag: int
    """32 bits that every DATA frame carries."""


def _plain(text: str | None) -> str | None:
    """A subclass of str (`numpy.str_`, a str enum) as the str that it is: equal names must be equal on the wire."""
    return text if text is None or type(text) is str else str.__str__(text)


def _hash64(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@lru_cache(maxsize=4096)
def digests(fp: Fingerprint) -> Digests:
    """Digests of ``fp``. Two ranks may go on together if the strict ones are equal and the value ones are equal or 0."""
    strict_path = None if fp.loose_path else fp.path
    strict = _hash64(fp.verb, strict_path, _plain(fp.op), fp.root, _plain(fp.name), _plain(fp.algorithm))
    loose = (fp.path if fp.loose_path else None, fp.dtype, fp.shape, fp.structure)
    value = 0 if loose == (None, None, None, None) else _hash64(*loose)
    # A verb with wildcards lets ranks with different value digests go on, so its frames cannot carry them.
    tag = strict if fp.loose_path else strict ^ value
    return Digests(strict, value, tag & 0xFFFFFFFF)


def first_difference(values: Mapping[int, Mapping[str, Any]]) -> tuple[str, dict[int, Any]]:
    """The first field on which ranks differ, and rank -> value of it. Wildcards (None) count only where all else agrees."""
    for field in FIELDS:
        column = {rank: fields.get(field) for rank, fields in values.items()}
        wild = field in ("path", "dtype", "shape")
        seen = {repr(value) for value in column.values() if not (wild and value is None)}
        if len(seen) > 1:
            return field, {rank: tuple(v) if isinstance(v, list) else v for rank, v in column.items()}
    # Only the digests differ: the texts were cut, or a peer runs another version.
    return "structure", {rank: fields.get("structure") for rank, fields in values.items()}
