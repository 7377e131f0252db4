"""Verbs that combine values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from asynccoll import calls
from asynccoll.verbs.caller import Caller
from asynccoll.work import Work

__all__ = ["ReducingVerbs"]


class ReducingVerbs(Caller):
    """allreduce and its kin."""

    def allreduce(
        self,
        value: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Combine every rank's ``value`` with ``op``; each rank gets the whole result, the same bits everywhere.

        Args:
            value: an array (numpy, torch CPU tensor, `array.array`, typed `memoryview`, numpy scalar) of any layout, with equal
                dtype and shape on all ranks; or any Python value that pickles. It is not changed; its content at the call counts.
            op: ``"sum" "avg" "prod" "min" "max" "band" "bor" "bxor"``, a `ReduceOp`, or a function of two arguments, which
                rank 0 applies as a strict left fold in rank order.
            out: array of the same dtype and shape to put the result in; lent until the work is done.
            timeout: seconds (or timedelta) until every rank raises `CollectiveTimeout`; the tightest of all ranks holds.
            key: reserved.
            name: compared across ranks, and shown in errors.
            algorithm: ``"auto"``, ``"ring"``, ``"tree"`` or ``"doubling"``; the same on all ranks.

        Returns:
            A `Work` whose result is a new value of the caller's own type (or ``out``).

        Raises (from the work):
            CollectiveMismatch: the ranks' verbs, paths, ops, dtypes, shapes, names or algorithms differ.
            CollectiveTimeout, PeerLost, CollectiveCancelled, RemoteError, CommunicatorClosed: see `asynccoll.errors`.
            TypeError, ValueError: a wrong argument on this rank (the others get `RemoteError`); docs/numerics.md lists the dtypes.
        """
        return self._call(
            "allreduce",
            lambda: calls.allreduce(self._place, value, op, out, algorithm, name),
            timeout,
            key,
            name,
        )

    allreduce_async = allreduce
    all_reduce = allreduce

    def allreduce_(
        self,
        array: Any,
        op: Any = "sum",
        *,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """`allreduce` in place: the result replaces the content of ``array``, which is lent until the work is done.

        Strided views work; the elements between the strides stay as they are. After an error or a cancel the content is
        unspecified, but no longer touched.

        Raises (from the work, besides those of `allreduce`):
            ValueError: the memory is read-only or overlaps itself (an expanded tensor).
        """
        return self._call(
            "allreduce",
            lambda: calls.allreduce_in_place(self._place, array, op, algorithm, name),
            timeout,
            key,
            name,
        )

    def allreduce_tree(
        self,
        tree: Any,
        op: Any = "sum",
        *,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Reduce a nested dict, list, tuple or dataclass of arrays as one operation.

        Leaves are fused per dtype; the structure (containers, keys, dtypes, shapes) is compared across ranks. Python ``int`` and
        ``float`` leaves travel as int64 and float64 and come back as Python numbers; ``None`` leaves stay None. The result has the
        caller's own containers; its arrays are new.
        """
        return self._call(
            "allreduce_tree",
            lambda: calls.allreduce_tree(self._place, tree, op, algorithm, name),
            timeout,
            key,
            name,
        )
