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
        Arrays of 16 KiB and more within an object are lent until the work is done; else the content at the call counts.
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

    all_gather = allgather

    def gather(
        self,
        value: Any,
        root: int = 0,
        *,
        out: Sequence[Any] | None = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[list[Any] | None]:
        """Every rank's ``value`` at the root, as a list in rank order; None on the other ranks.

        Args:
            value: an array of any shape, its dtype the same on all ranks; or, on all ranks, any Python value that pickles. It is
                not changed; its content at the call counts, except that arrays of 16 KiB and more within an object are lent.
            root: the rank that gets them; the same on all ranks.
            out: at the root alone, a list of ``world_size`` arrays that receive the values; lent until the work is done.

        Returns:
            A `Work`. The root's arrays are new and of the type of its own ``value``. A rank that is not the root returns when its
            value has left and every rank has called, which may be before the root has it.

        Raises (from the work):
            CollectiveMismatch: the ranks' verbs, roots, paths, dtypes or names differ.
            CollectiveTimeout, PeerLost, CollectiveCancelled, RemoteError, CommunicatorClosed: see `asynccoll.errors`.
            TypeError, ValueError: a wrong argument on this rank (the others get `RemoteError`), or an ``out`` of another shape than
                what arrives; and whatever a value raises that does not unpickle.
        """
        return self._call(
            "gather",
            lambda: calls.gather(self._place, value, root, out, name),
            timeout,
            key,
            name,
        )

    def scatter(
        self,
        values: Sequence[Any] | None = None,
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[Any]:
        """This rank's own of the root's ``values``.

        Args:
            values: at the root a list (or tuple) of ``world_size`` values in rank order: arrays of any shape and dtype, Python
                values that pickle, or both. Their content at the call counts, except that arrays of 16 KiB and more within an
                object are lent. On the other ranks it is ignored: leave it out.
            root: the rank whose values count; the same on all ranks.
            out: array that receives this rank's own; lent until the work is done. If any rank passes it, the root's values must all
                be arrays of its dtype; the shape must be that of this rank's own.

        Returns:
            A `Work` whose result is new, on the root too, and of the type that the root passed (or ``out``). No rank returns before
            every rank has called.

        Raises (from the work):
            CollectiveMismatch: the ranks' verbs, roots or names differ, or an ``out`` is of another dtype than the root's values.
            CollectiveTimeout, PeerLost, CollectiveCancelled, RemoteError, CommunicatorClosed: see `asynccoll.errors`.
            TypeError, ValueError: a wrong argument on this rank, such as a wrong number of values at the root (the others get
                `RemoteError`), or an ``out`` of another shape than what arrives; and whatever a value raises that does not
                unpickle.
        """
        return self._call(
            "scatter",
            lambda: calls.scatter(self._place, values, root, out, name),
            timeout,
            key,
            name,
        )

    def alltoall(
        self,
        values: Sequence[Any],
        *,
        out: Sequence[Any] | None = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[list[Any]]:
        """What each rank has for this one, as a list in rank order: ``values[i]`` goes to rank i.

        Args:
            values: a list (or tuple) of ``world_size`` values: arrays, of one dtype on all ranks and of any shapes; or, on all
                ranks, Python values that pickle. They are not changed; their content at the call counts, except that arrays of
                16 KiB and more within an object are lent.
            out: a list of ``world_size`` arrays that receive the values; lent until the work is done.

        Returns:
            A `Work` whose result is new values (or the arrays of ``out``). What comes from rank i is of the type of ``values[i]``.

        Raises (from the work):
            CollectiveMismatch: the ranks' verbs, paths, dtypes or names differ.
            CollectiveTimeout, PeerLost, CollectiveCancelled, RemoteError, CommunicatorClosed: see `asynccoll.errors`.
            TypeError, ValueError: a wrong argument on this rank (the others get `RemoteError`), or an ``out`` of another shape than
                what arrives; and whatever a value raises that does not unpickle.
        """
        return self._call(
            "alltoall",
            lambda: calls.alltoall(self._place, values, out, name),
            timeout,
            key,
            name,
        )

    all_to_all = alltoall

    def barrier(
        self,
        *,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[None]:
        """Wait until every rank has called it."""
        return self._call("barrier", lambda: calls.barrier(self._place, name), timeout, key, name)
