"""JSON documents with a format and a version, read with suspicion. Knows fields and kinds of values, not what they mean.

Every mistake is a `ValueError` that names the field, shows the value and says what belongs there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from asynccoll.planner.given import shown

__all__ = ["VERSION", "dump", "load", "reject"]

VERSION: Final = 1
"""Of every document that is written here. A reader refuses any other."""


def dump(form: str, fields: dict[str, Any]) -> str:
    """One line of JSON: ``format``, ``version``, then ``fields`` in their order."""
    return json.dumps({"format": form, "version": VERSION, **fields}, allow_nan=False)


def load(text: str | bytes, form: str, fields: Sequence[str]) -> dict[str, Any]:
    """The values of ``fields`` in a document of format ``form``.

    Raises:
        ValueError: it is no JSON, or another format or version, or a field is missing, unknown or there twice.
        TypeError: ``text`` is neither str nor bytes.
    """
    if not isinstance(text, str | bytes):
        raise TypeError(f"from_json() reads str or bytes, not a {type(text).__name__}")
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"{form}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{form}: this is no JSON ({error}); to_json() writes one line of it") from None
    if not isinstance(found, dict):
        reject(form, "document", found, 'an object {"format": ..., "version": ...}')
    for name in ("format", "version", *fields):
        if name not in found:
            raise ValueError(
                f"{form}: the field {name!r} is missing; there is: {', '.join(found) or 'nothing'}"
            )
    if found.pop("format") != form:
        raise ValueError(f"{form}: the field 'format' says another one; this reads {form!r} only")
    version = found.pop("version")
    if type(version) is not int or version != VERSION:
        reject(form, "version", version, f"{VERSION}, all that this asynccoll reads")
    for name in found:
        if name not in fields:
            raise ValueError(f"{form}: the field {name!r} is unknown; there is: {', '.join(fields)}")
    return found


def reject(form: str, field: str, value: object, wanted: str) -> NoReturn:
    """Raise the `ValueError` that says what ``field`` must be."""
    raise ValueError(f"{form}: the field {field!r} is {shown(value)}; it must be {wanted}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number that JSON knows")
