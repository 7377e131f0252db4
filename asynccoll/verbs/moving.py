"""Verbs that move whole values, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from asynccoll import calls
from asynccoll.verbs.caller import Caller
from asynccoll.work import Work

__all__ = ["MovingVerbs"]


class MovingVerbs(Caller):
    """broadcast and its kin."""

    def broadcast(
        self,
        value: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """The root's ``value`` on every rank: an array of any shape, or any Python value that pickles.

        On the other ranks ``value`` may be None or an object (both are ignored), or an array, whose dtype and shape must then be
        those of the root's; the result is of its type. ``out`` receives the array. No rank returns before every rank has called.
        """
        return self._call(
            "broadcast",
            lambda: calls.broadcast(self._place, value, root, out, algorithm, name),
            timeout,
            key,
            name,
        )

    def allgather(
        self,
        value: Any,
        *,
        out: Sequence[Any] | None = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Work[list[Any]]:
        """Every rank's ``value``, as a list in rank order. Arrays must agree in dtype; their shapes may differ.

        ``out``: a list of ``world_size`` arrays that receive the values.
        """
        return self._call(
            "allgather",
            lambda: calls.allgather(self._place, value, out, algorithm, name),
            timeout,
            key,
            name,
        )

    def barrier(
        self,
        *,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[None]:
        """Wait until every rank has called it."""
        return self._call("barrier", lambda: calls.barrier(self._place, name), timeout, key, name)
