"""Which algorithms a verb has, and which of them "auto" means. Knows sizes and thresholds, not steps.

A table of thresholds is plain data, so that rank 0 can hand it out and every rank chooses alike::

    {verb: ((size limit, byte limit, algorithm), ...)}      the first row with size <= and bytes <= its limits
                                                            decides; None is no limit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from asynccoll.algorithms import dissemination, doubling, linear, ring, tree, waves
from asynccoll.algorithms.steps import Schedule

__all__ = ["DEFAULT", "Table", "choose", "default_table", "names", "schedule"]

Table: TypeAlias = Mapping[str, Sequence[Sequence[Any]]]
"""Verb -> rows ``(size limit or None, byte limit or None, algorithm)``."""

DEFAULT: Final[Table] = {
    # Measured on two cores over loopback, W = 2, 3, 4 (`benchmarks/`). Doubling has the shortest way and most messages; linear
    # as few as the tree, along the START round's own way up to 4 ranks; the tree all bytes over its root, which beyond 4 ranks
    # tells earlier; the ring the fewest bytes per rank.
    "allreduce": (
        (2, 1 << 16, "doubling"),
        (4, 1 << 16, "linear"),
        (None, 1 << 12, "doubling"),
        (4, 1 << 19, "tree"),
        (None, 1 << 17, "tree"),
        (None, None, "ring"),
    ),
    # Bytes of the largest block. Both move the same bytes; doubling in fewer steps, ring over two links only.
    # Not measured yet: where a snapshot slab of doubling ends.
    "allgather": ((None, 1 << 16, "doubling"), (None, None, "ring")),
    "broadcast": ((None, None, "tree"),),
    # Measured once, calls one after the other, W = 2, 3, 4, 8 processes on two cores while others worked there. In a reduce the
    # tree was ahead up to 4 MiB (W = 8: 1 MiB), in a reduce_scatter up to 256 KiB; above, the bytes over rank 0's links tell.
    "reduce": ((4, 1 << 22, "tree"), (None, 1 << 20, "tree"), (None, None, "ring")),
    "reduce_scatter": ((None, 1 << 18, "tree"), (None, None, "ring")),
    # Doubling takes ceil(log2 W) hops but log2 W times the bytes, the chain W - 1 hops: alike there up to 64 KiB, then the chain
    # was ahead by up to 3.6 times. On links with a latency of their own the hops count for more.
    "scan": ((2, None, "chain"), (None, 1 << 14, "doubling"), (None, None, "chain")),
    "exscan": ((2, None, "chain"), (None, 1 << 14, "doubling"), (None, None, "chain")),
}

_SCHEDULES: Final[Mapping[tuple[str, str], Callable[..., Schedule]]] = {
    ("allreduce", "ring"): ring.allreduce,
    ("allreduce", "tree"): tree.allreduce,
    ("allreduce", "doubling"): doubling.allreduce,
    ("allreduce", "linear"): linear.allreduce,
    # Parts of the result are used before the rest is there: of a ring the same results, but in waves.
    ("allreduce_stream", "ring"): waves.allreduce,
    ("allreduce_stream", "tree"): tree.allreduce,
    ("allreduce_stream", "doubling"): doubling.allreduce,
    ("allreduce_stream", "linear"): linear.allreduce,
    ("allgather", "ring"): ring.allgather,
    ("allgather", "doubling"): dissemination.allgather,
    ("broadcast", "tree"): tree.broadcast,
    ("reduce", "ring"): ring.reduce,
    ("reduce", "tree"): tree.reduce,
    ("reduce_scatter", "ring"): ring.reduce_scatter,
    ("reduce_scatter", "tree"): tree.reduce_scatter,
}

_SCANS: Final = ("chain", "doubling")
"""A scan keeps two values per element, which steps do not have: its algorithms are programs (`engine.programs.scans`)."""

_NAMES: Final = {
    **{verb: tuple(name for of, name in _SCHEDULES if of == verb) for verb, _ in _SCHEDULES},
    "scan": _SCANS,
    "exscan": _SCANS,
}


def names(verb: str) -> tuple[str, ...]:
    """Algorithms of ``verb``, without ``"auto"``; empty for a verb that has no choice."""
    return _NAMES.get(verb, ())


def schedule(verb: str, name: str) -> Callable[..., Schedule]:
    """The function that makes the steps of one rank; its arguments are those of the algorithm's own module.

    Raises:
        ValueError: there is no such algorithm for this verb; the message lists those there are.
    """
    found = _SCHEDULES.get((verb, name))
    if found is None:
        raise _unknown(verb, name)
    return found


def _unknown(verb: str, name: str) -> ValueError:
    known = ", ".join(names(verb)) or "none"
    return ValueError(f"algorithm {name!r} does not exist for {verb}; there is: {known}")


def default_table() -> dict[str, list[list[Any]]]:
    """`DEFAULT` as lists and strings for the wire; what comes out at the other end is a `Table` again."""
    return {verb: [list(row) for row in rows] for verb, rows in DEFAULT.items()}


def choose(
    verb: str,
    dtype_itemsize: int,
    nbytes: int,
    size: int,
    *,
    order_sensitive: bool = False,
    table: Table | None = DEFAULT,
) -> str:
    """The algorithm that ``"auto"`` stands for: a function of its arguments alone, so all ranks choose alike.

    Args:
        dtype_itemsize: bytes of one element. With fewer elements than ranks a ring would be mostly empty
            chunks on a long way, so an allreduce of so few never takes it.
        nbytes: bytes of the array; for allgather those of the largest block.
        order_sensitive: two ranks that compute the same element might get different bits (complex product), so
            each element must be computed at one rank: doubling is replaced by the tree in an allreduce.
        table: thresholds, `DEFAULT` or what rank 0 handed out; None means `DEFAULT`.

    Raises:
        ValueError: the table has no row that fits, or names an algorithm that does not exist here.
    """
    name = _look_up(DEFAULT if table is None else table, verb, nbytes, size)
    if name not in names(verb):
        raise _unknown(verb, name)
    if verb == "allreduce":
        if name == "ring" and nbytes < size * dtype_itemsize:
            name = "doubling"
        if name == "doubling" and order_sensitive:
            name = "tree"
    return name


def _look_up(table: Table, verb: str, nbytes: int, size: int) -> str:
    for size_limit, byte_limit, name in table.get(verb, ()):
        if (size_limit is None or size <= size_limit) and (byte_limit is None or nbytes <= byte_limit):
            return str(name)
    raise ValueError(f"the table of thresholds has no row for {verb} of {nbytes} bytes on {size} ranks")
