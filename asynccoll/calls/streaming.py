"""Calls whose result is taken part by part: what is final and was not taken yet. See `asynccoll.calls`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from asynccoll import reduction
from asynccoll.buffers import Array, Flat, describe, matches_out
from asynccoll.calls.place import Call, Place, as_target, into
from asynccoll.calls.reducing import chosen
from asynccoll.engine.fingerprint import Fingerprint
from asynccoll.engine.operation import EAGER_STREAM
from asynccoll.engine.programs import reductions

__all__ = ["Parts", "allreduce_stream"]

_VERB = "allreduce_stream"


class Parts:
    """The parts of one result that are final and were not taken yet, as ranges: of the elements themselves there is no copy.

    Parts that follow each other in memory are one part if both wait here. So a slow consumer finds few large ones, and there are
    never more than there are gaps between them. `tell` and `take` may be called from two threads.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._ends: dict[int, int] = {}
        """End -> start of each range, the oldest first."""
        self._lock = threading.Lock()
        self._view: Callable[[int, int], Any] = lambda lo, hi: None
        """Gives elements ``[lo, hi)`` in the caller's kind of container. Set when the call is prepared."""

    def show(self, view: Callable[[int, int], Any]) -> None:
        """The memory of the result is known: ``view(lo, hi)`` gives a part of it."""
        self._view = view

    def tell(self, lo: int, hi: int) -> None:
        """Elements ``[lo, hi)`` are final."""
        with self._lock:
            self._ends[hi] = self._ends.pop(lo, lo)
        self._wake()

    def take(self) -> tuple[int, Any] | None:
        """The oldest part, as ``(offset, view)``; None if there is none."""
        with self._lock:
            if not self._ends:
                return None
            hi = next(iter(self._ends))
            lo = self._ends.pop(hi)
        return lo, self._view(lo, hi)


def allreduce_stream(
    place: Place, value: Any, op: Any, out: Any, algorithm: str, name: str | None, parts: Parts
) -> Call:
    """Reduce an array; ``parts`` is told what has become final. The result is new, or in ``out``."""
    op_name = reduction.resolve_op(op)
    if op_name is None:
        raise TypeError("allreduce_stream takes a named op; with a reduce function use allreduce()")
    array = describe(value)
    if array is None:
        raise TypeError(
            f"allreduce_stream gives parts of arrays and tensors, not of a {type(value).__name__}: use allreduce()"
        )
    dtype = array.dtype
    arithmetic = reduction.arithmetic(op_name, dtype)
    used = chosen(place, algorithm, arithmetic, dtype.itemsize, array.nbytes, _VERB)
    if out is None:
        flat, shown = array.pack(), array

        def result() -> Any:
            return array.wrap(flat)
    else:
        shown = as_target(out)
        matches_out(array, shown)
        flat, write_back = shown.lend()
        view = array.view()
        flat[...] = view if view is not None else array.pack()
        result = into(out, write_back)
    parts.show(_viewer(shown, flat))
    fingerprint = Fingerprint(_VERB, "array", op_name, dtype.name, array.shape, None, name, algorithm)
    expected = None
    if array.nbytes > EAGER_STREAM:
        # The ring's waves bring the same bytes from the same rank as its whole chunks do.
        share = used, arithmetic, array.count
        expected = reductions.sources((share,), place.rank, place.size)
    part = reductions.Part(flat, arithmetic, used)
    program = reductions.allreduce_stream(part, place.rank, place.size, result, parts.tell)
    return Call(fingerprint, program, expected)


def _viewer(array: Array, flat: Flat) -> Callable[[int, int], Any]:
    """What gives elements ``[lo, hi)`` of ``flat`` in the kind of container that ``array`` has.

    Read-only where the container can be: other ranks may still be waiting for these very bytes.
    """

    def view(lo: int, hi: int) -> Any:
        part = array.wrap(flat[lo:hi], (hi - lo,))
        if isinstance(part, memoryview):
            return part.toreadonly()
        flags = getattr(part, "flags", None)
        if flags is not None:
            flags.writeable = False
        return part

    return view
