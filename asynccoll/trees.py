"""Nested containers of arrays, flattened in an order on which ranks agree. Knows containers, not reductions or ranks.

Leaves are arrays (whatever `asynccoll.buffers.describe` takes) and Python ``bool``, ``int`` and ``float``; ``None`` is part of the
structure.
Dicts are walked in the order of their sorted keys, so that ranks need not have inserted them in the same order.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from asynccoll.buffers import Array, describe

__all__ = ["Leaf", "flatten"]


class Leaf:
    """One array of a tree, or a Python number that travels as one."""

    __slots__ = ("array", "path", "python")

    def __init__(self, array: Array, path: str, python: Callable[[Any], Any] | None) -> None:
        self.array = array
        self.path = path
        """Where it is, for messages: ``["layer"][0]``."""
        self.python = python
        """Makes the Python number from a 0-d array, or None for arrays."""

    def result(self, flat: Any) -> Any:
        """The leaf's value in its own type, from its flat result."""
        if self.python is not None:
            return self.python(flat[0])
        return self.array.wrap(flat)


def flatten(tree: Any) -> tuple[list[Leaf], str, Callable[[list[Any]], Any]]:
    """The leaves of ``tree``, a text of its structure, and a function that rebuilds it from the leaves' results.

    The text holds containers, keys, dtypes and shapes; it is equal on two ranks exactly if their leaves correspond.
    Raises TypeError that names the place of a leaf that cannot be reduced.
    """
    leaves: list[Leaf] = []
    text: list[str] = []
    rebuild = _walk(tree, "", leaves, text)
    return leaves, "".join(text), lambda results: rebuild(iter(results))


_Rebuild = Callable[[Iterator[Any]], Any]


def _walk(node: Any, path: str, leaves: list[Leaf], text: list[str]) -> _Rebuild:
    if node is None:
        text.append("None")
        return lambda results: None
    if isinstance(node, dict):
        return _mapping(node, path, leaves, text)
    if isinstance(node, list | tuple):
        return _sequence(node, path, leaves, text)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        text.append(f"{type(node).__name__}(")
        parts = []
        for name in names:
            text.append(f"{name}=")
            parts.append((name, _walk(getattr(node, name), f"{path}.{name}", leaves, text)))
            text.append(",")
        text.append(")")

        def remake(results: Iterator[Any]) -> Any:
            made = copy.copy(node)
            for name, part in parts:
                object.__setattr__(
                    made, name, part(results)
                )  # frozen ones and fields that __init__ does not take
            return made

        return remake
    leaves.append(_leaf(node, path, text))
    return next


def _mapping(node: dict[Any, Any], path: str, leaves: list[Leaf], text: list[str]) -> _Rebuild:
    keys = sorted(node, key=lambda key: (type(key).__name__, repr(key)))
    text.append("{")
    parts = {}
    for key in keys:
        text.append(f"{key!r}:")
        parts[key] = _walk(node[key], f"{path}[{key!r}]", leaves, text)
        text.append(",")
    text.append("}")

    def remake(results: Iterator[Any]) -> Any:
        done = {key: part(results) for key, part in parts.items()}
        made = copy.copy(node)  # the caller's own kind and order
        for key in node:
            made[key] = done[key]
        return made

    return remake


def _sequence(node: list[Any] | tuple[Any, ...], path: str, leaves: list[Leaf], text: list[str]) -> _Rebuild:
    kind = (
        type(node).__name__ if hasattr(node, "_fields") else ("list" if isinstance(node, list) else "tuple")
    )
    text.append(f"{kind}[")
    parts = []
    for number, child in enumerate(node):
        parts.append(_walk(child, f"{path}[{number}]", leaves, text))
        text.append(",")
    text.append("]")

    def remake(results: Iterator[Any]) -> Any:
        made = [part(results) for part in parts]
        if type(node) is list:
            return made
        if isinstance(node, list):
            copied = copy.copy(node)
            copied[:] = made
            return copied
        if hasattr(node, "_fields"):  # a named tuple
            return type(node)(*made)
        return type(node)(made)

    return remake


def _leaf(node: Any, path: str, text: list[str]) -> Leaf:
    python: Callable[[Any], Any] | None = None
    value = node
    if isinstance(node, bool):
        value, python = np.asarray(node), bool
    elif isinstance(node, int):
        if not -(1 << 63) <= node < 1 << 63:
            raise TypeError(
                f"leaf {path or 'itself'} is an int beyond 64 bits: reduce it with allreduce(), which keeps ints exact"
            )
        value, python = np.asarray(node, np.int64), int
    elif isinstance(node, float) and not isinstance(node, np.generic):
        value, python = np.asarray(node, np.float64), float
    try:
        array = describe(value)
    except TypeError as error:
        raise TypeError(f"leaf {path or 'itself'}: {error}") from None
    if array is None:
        raise TypeError(
            f"leaf {path or 'itself'} is a {type(node).__name__}, which is neither an array nor a number: take it out of the tree "
            "or reduce it with allreduce()"
        )
    text.append(f"{array.dtype.name}{list(array.shape)}")
    return Leaf(array, path, python)
