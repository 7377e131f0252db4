"""Writes docs/reference.md: every public call with its arguments, from the code. Knows signatures and docstrings, not behaviour.

    python -m tools.reference

`tests/tools/test_reference.py` fails where the page is not what this writes.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asynccoll
import asynccoll.sync
import asynccoll.testing

__all__ = ["PAGE", "main", "page"]

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

_WIDTH = 100
"""Characters of a signature on one line."""

_INNER = {"Work": ("start", "ended"), "Pending": ("begin",)}
"""Methods for the package itself."""

_HEAD = """# Reference

Every public call with its arguments and the first words of its docstring; `help(...)` in Python shows the whole.
What the verbs do is told in [Verbs](verbs.md), what can go wrong in [Errors](errors.md).

This page is written from the code by `python -m tools.reference`.
"""


def _signature(name: str, function: Callable[..., Any], *, returns: bool = True) -> str:
    """``name(arguments) -> result`` as in the source, on one line or with a line for each argument."""
    signature = inspect.signature(function)
    parts: list[str] = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            parts.append("*")
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = mark + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_plain(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            equals = " = " if parameter.annotation is not parameter.empty else "="
            text += equals + _value(parameter.default)
        parts.append(text)
    if inspect.iscoroutinefunction(function):
        name = f"async {name}"
    result = ""
    if returns and signature.return_annotation is not signature.empty:
        result = f" -> {_plain(signature.return_annotation)}"
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


def _plain(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else inspect.formatannotation(annotation)


def _value(default: Any) -> str:
    """A default as it may be written: an object's address is no part of it."""
    if isinstance(default, str):
        return json.dumps(default)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(default))


def _words(thing: Any) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def _public(owner: Any) -> Iterator[tuple[str, Any]]:
    """Public members that ``owner`` and its bases in this package define, by name."""
    for name in sorted(dir(owner)):
        member = inspect.getattr_static(owner, name)
        home = next((base for base in owner.__mro__ if name in vars(base)), owner)
        if not name.startswith("_") and home.__module__.startswith("asynccoll"):
            yield name, member


def _class(owner: Any) -> Iterator[str]:
    yield f"### `{owner.__name__}`"
    yield _words(owner)
    attributes = [(name, member) for name, member in _public(owner) if isinstance(member, property)]
    for name, member in attributes:
        yield f"- `.{name}`: {_words(member)}"
    for name, member in _public(owner):
        if isinstance(member, property) or not callable(member):
            continue
        if name in _INNER.get(owner.__name__, ()):
            continue
        if owner is asynccoll.sync.SyncCommunicator and name.endswith("_async"):
            continue
        if member.__name__ != name:
            yield f"`.{name}` is another name of `.{member.__name__}`."
            continue
        blocking = owner is asynccoll.sync.SyncCommunicator and hasattr(owner, f"{name}_async")
        yield _entry(f".{name}", member, returns=not blocking)


def _entry(name: str, function: Any, *, returns: bool = True) -> str:
    return f"```\n{_signature(name, function, returns=returns)}\n```\n\n{_words(function)}"


def _functions(module: Any, title: str, notes: str) -> Iterator[str]:
    """The functions of a module; verbs that only call the method of the default communicator are listed by name."""
    yield f"## {title}"
    if notes:
        yield notes
    forwarded = []
    for name in sorted(module.__all__):
        member = getattr(module, name)
        if not inspect.isfunction(member):
            continue
        if hasattr(member, "__wrapped__") and hasattr(asynccoll.sync.SyncCommunicator, name):
            forwarded.append(name)
        else:
            yield _entry(name, member)
    names = ", ".join(f"`{name}`" for name in forwarded if not name.endswith("_async"))
    yield f"On the default communicator, with the arguments of its methods: {names}."


def page() -> str:
    """The text of the page."""
    sections = [
        _HEAD.rstrip(),
        *_functions(asynccoll, "`asynccoll`", ""),
    ]
    for owner in (
        asynccoll.Communicator,
        asynccoll.Work,
        asynccoll.Stream,
        asynccoll.LocalWorkers,
        asynccoll.Message,
    ):
        sections += _class(owner)
    sections += _functions(
        asynccoll.sync,
        "`asynccoll.sync`",
        "The verbs block and return their result. Each has a form `<verb>_async` with the same arguments, "
        "which returns a `Pending`.",
    )
    for owner in (
        asynccoll.sync.SyncCommunicator,
        asynccoll.sync.Pending,
        asynccoll.sync.SyncStream,
        asynccoll.sync.SyncLocalWorkers,
    ):
        sections += _class(owner)
    sections.append("## `asynccoll.testing`")
    sections.append(_entry("local_world", asynccoll.testing.local_world))
    simulation = asynccoll.testing.Simulation
    sections.append(_entry("Simulation", simulation, returns=False))
    sections.append(_entry(".run", simulation.run))
    lines: list[str] = []
    for section in sections:
        # Items of a list stay together.
        if lines and not (section.startswith("- ") and lines[-1].startswith("- ")):
            lines.append("")
        lines.append(section)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
