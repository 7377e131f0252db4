"""Calls after which each rank has something else: from arguments to an operation. See `asynccoll.calls`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asynccoll.buffers import Array, describe, matches_out
from asynccoll.calls.place import Call, Place, as_target, checked_root
from asynccoll.calls.received import Received, checked_outs, item_of
from asynccoll.engine.fingerprint import Fingerprint
from asynccoll.engine.programs import items

__all__ = ["alltoall", "gather", "scatter"]


def gather(place: Place, value: Any, root: Any, out: Sequence[Any] | None, name: str | None) -> Call:
    """Every rank's value at the root, in rank order."""
    root = checked_root(place, root)
    array = describe(value)
    dtype = array.dtype if array is not None else None
    outs = None
    if out is not None:
        if place.rank != root:
            raise ValueError(
                f"out= is for the root of a gather, rank {root}; leave it out on rank {place.rank}"
            )
        outs = checked_outs(out, place.size, "gather", dtype, type(value).__name__)
    item, own = item_of(value, array, place.codec)
    fingerprint = Fingerprint(
        "gather",
        "array" if array is not None else place.codec.path,
        dtype=dtype.name if dtype is not None else None,
        root=root,
        name=name,
    )
    codec = None
    if place.rank == root:
        codec = Received(root, own, None if array is None else [array] * place.size, outs, codec=place.codec)
    return Call(fingerprint, items.gather(item, codec, place.rank, place.size, root, objects=array is None))


def scatter(place: Place, values: Sequence[Any] | None, root: Any, out: Any, name: str | None) -> Call:
    """To each rank its own of the root's values."""
    root = checked_root(place, root)
    sent, own, like = None, None, None
    path = dtype = None
    if place.rank == root:
        listed = _one_per_rank(place, "scatter", values)
        arrays = _described(listed)
        like = arrays[root]
        if out is not None:
            if like is None:
                raise TypeError(
                    f"out= takes an array; the root has a {type(listed[root]).__name__} for itself"
                )
            matches_out(like, as_target(out))
        packed = [item_of(one, array, place.codec) for one, array in zip(listed, arrays, strict=True)]
        sent, own = [item for item, _ in packed], packed[root][1]
        path, dtype = _in_common(arrays, place.codec.path)
    if out is not None:
        target = as_target(out)
        target.lend()  # refuse unsuitable memory now rather than when bytes arrive
        if place.rank != root:
            like, path, dtype = target, "array", target.dtype.name
    fingerprint = Fingerprint("scatter", path, dtype=dtype, root=root, name=name, loose_path=True)
    codec = Received(
        place.rank,
        own,
        None if like is None else [like] * place.size,
        None if out is None else {root: out},
        codec=place.codec,
    )
    return Call(fingerprint, items.scatter(sent, codec, place.rank, place.size, root))


def alltoall(place: Place, values: Sequence[Any], out: Sequence[Any] | None, name: str | None) -> Call:
    """To each rank its own of every rank's values."""
    listed = _one_per_rank(place, "alltoall", values)
    arrays = _described(listed)
    if len({None if array is None else array.dtype for array in arrays}) > 1:
        each = (
            type(one).__name__ if array is None else f"{type(one).__name__} of {array.dtype.name}"
            for one, array in zip(listed, arrays, strict=True)
        )
        kinds = ", ".join(dict.fromkeys(each))
        raise TypeError(
            f"alltoall takes arrays of one dtype, or objects alone; these are {kinds:.1000}. "
            "Put an array in a list to send it as an object."
        )
    path, dtype = _in_common(arrays, place.codec.path)
    likes = [array for array in arrays if array is not None]
    outs = None
    if out is not None:
        outs = checked_outs(
            out, place.size, "alltoall", likes[0].dtype if likes else None, type(listed[0]).__name__
        )
    packed = [item_of(one, array, place.codec) for one, array in zip(listed, arrays, strict=True)]
    codec = Received(place.rank, packed[place.rank][1], likes or None, outs, codec=place.codec)
    fingerprint = Fingerprint("alltoall", path, dtype=dtype, name=name)
    sent = [item for item, _ in packed]
    return Call(fingerprint, items.alltoall(sent, codec, place.rank, place.size, objects=not likes))


def _one_per_rank(place: Place, verb: str, values: Any) -> Sequence[Any]:
    """``values`` as the list that it must be. Raises TypeError or ValueError."""
    if not isinstance(values, list | tuple):
        hint = "; an array is not split by itself, pass list(array)" if hasattr(values, "dtype") else ""
        raise TypeError(
            f"{verb} takes a list of {place.size} values, one per rank, not a {type(values).__name__}{hint}"
        )
    if len(values) != place.size:
        raise ValueError(f"{verb} got {len(values)} values; it takes one per rank, {place.size}")
    return values


def _described(values: Sequence[Any]) -> list[Array | None]:
    """`describe` of each; the error says which one it is about."""
    found: list[Array | None] = []
    for number, value in enumerate(values):
        try:
            found.append(describe(value))
        except TypeError as error:
            raise TypeError(f"value for rank {number}: {error}") from None
    return found


def _in_common(arrays: Sequence[Array | None], other: str) -> tuple[str, str | None]:
    """Path and dtype as they are compared across ranks; with a bar between them where the values differ."""
    paths = {other if array is None else "array" for array in arrays}
    dtypes = {array.dtype.name for array in arrays if array is not None}
    return "|".join(sorted(paths)), "|".join(sorted(dtypes)) or None
