"""Verbs that combine values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from asynccoll import calls
from asynccoll.streams import Stream
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
                dtype and shape on all ranks; or any Python value that pickles. It is not changed; its content at the call counts,
                except that arrays of 16 KiB and more within an object, or with a function as ``op``, are lent until the work is
                done.
            op: ``"sum" "avg" "prod" "min" "max" "band" "bor" "bxor"``, a `ReduceOp`, or a function of two arguments, which
                rank 0 applies as a strict left fold in rank order.
            out: array of the same dtype and shape to put the result in; lent until the work is done.
            timeout: seconds (or timedelta) until every rank raises `CollectiveTimeout`; the tightest of all ranks holds.
            key: the operation is matched by this string (at most 256 characters), the n-th use of it on each rank, and not by the
                order of the calls; see docs/verbs.md. The operations of one key are one order.
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

    def allreduce_stream(
        self,
        array: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Stream:
        """`allreduce` of an array whose result is taken part by part: ``async for offset, view in comm.allreduce_stream(x):``.

        The result is, bit for bit, that of `allreduce` with the same ``algorithm``, and each of its elements is in one part.
        ``offset`` is the index of the part's first element (in C order), ``view`` a flat view of the result's memory, of the kind
        of container that was passed. Parts come as they become final: by rising offset with ``"tree"``, ``"linear"`` and
        ``"doubling"``, and in turn from each of W chunks with ``"ring"``. An empty array has no parts.

        Args:
            array: as in `allreduce`; no objects. Its content at the call counts.
            op: a named op.
            out: array of the same dtype and shape to put the result in; lent until the operation is done. Where it is not
                contiguous and native, parts are views of other memory, from which it is filled at the end.
            timeout, key, name: as in `allreduce`.
            algorithm: as in `allreduce`; the same on all ranks.

        Returns:
            A `Stream`, to iterate over or to await for the whole result.

        Raises (from the iteration, besides those of `allreduce`):
            TypeError: a Python object, or a function as ``op``: use `allreduce`.
        """
        return self._stream(
            lambda parts: self._call(
                "allreduce_stream",
                lambda: calls.allreduce_stream(self._place, array, op, out, algorithm, name, parts),
                timeout,
                key,
                name,
            )
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

    def reduce(
        self,
        value: Any,
        op: Any = "sum",
        root: int = 0,
        *,
        out: Any = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Combine every rank's ``value`` with ``op``; ``root`` gets the whole result, the other ranks None.

        Args:
            value, op: as in `allreduce`, dtype and shape equal on all ranks. A function as ``op`` runs at rank 0 only, whichever
                rank is the root, as a strict left fold in rank order.
            root: the rank that gets the result; the same on all ranks.
            out: at the root an array of the same dtype and shape to put the result in, lent until the work is done; elsewhere
                it is ignored.
            timeout, key, name: as in `allreduce`.
            algorithm: ``"auto"``, ``"ring"`` or ``"tree"``; the same on all ranks.

        Returns:
            A `Work` whose result is at the root a new value of the root's own type (or ``out``), elsewhere None. Another rank may
            have its None while the root still receives.

        Raises (from the work): as `allreduce`; CollectiveMismatch where roots differ, too.
        """
        return self._call(
            "reduce",
            lambda: calls.reduce(self._place, value, op, root, out, algorithm, name),
            timeout,
            key,
            name,
        )

    def reduce_scatter(
        self,
        array: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
        algorithm: str = "auto",
    ) -> Work[Any]:
        """Combine every rank's ``array`` with ``op``; rank r gets the r-th part of the result.

        The parts are those of ``numpy.array_split(result, world_size)``: along axis 0, the first ``len(array) % world_size``
        of them one row longer. A part may be empty.

        Args:
            array: an array of one or more dimensions, dtype and shape equal on all ranks. It is not changed.
            op: a named op.
            out: array of the same dtype and of the part's shape to put the part in, apart from ``array`` in memory; lent until the
                work is done.
            timeout, key, name: as in `allreduce`.
            algorithm: ``"auto"``, ``"ring"`` or ``"tree"``; the same on all ranks.

        Returns:
            A `Work` whose result is a new array of the caller's own type (or ``out``).

        Raises (from the work, besides those of `allreduce`):
            TypeError: a Python object, or a function as ``op``: use `allreduce` and take a part of the result.
            ValueError: a 0-d array, which has no rows.
        """
        return self._call(
            "reduce_scatter",
            lambda: calls.reduce_scatter(self._place, array, op, out, algorithm, name),
            timeout,
            key,
            name,
        )

    def scan(
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
        """Combine the values of ranks 0 to this one with ``op``, in rank order (an inclusive prefix reduction).

        Args:
            value, op: as in `allreduce`, dtype and shape equal on all ranks. ``"avg"`` divides by the number of ranks combined,
                here ``rank + 1``. A function as ``op`` runs at rank 0 only, as a strict left fold in rank order.
            out: array of the same dtype and shape to put the result in; lent until the work is done.
            timeout, key, name: as in `allreduce`.
            algorithm: ``"auto"``, ``"chain"`` or ``"doubling"``; the same on all ranks.

        Returns:
            A `Work` whose result is a new value of the caller's own type (or ``out``). A rank may have its result while the ranks
            after it do not; after a failure some ranks of an array's scan may have theirs.

        Raises (from the work): as `allreduce`.
        """
        return self._call(
            "scan",
            lambda: calls.scan(self._place, value, op, out, algorithm, name),
            timeout,
            key,
            name,
        )

    def exscan(
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
        """Combine the values of the ranks before this one with ``op``, in rank order; None on rank 0.

        Arguments, results and errors are those of `scan`; ``"avg"`` divides by ``rank``. On rank 0 ``out`` is left as it is.
        """
        return self._call(
            "exscan",
            lambda: calls.exscan(self._place, value, op, out, algorithm, name),
            timeout,
            key,
            name,
        )
