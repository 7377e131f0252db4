"""Calls after which every rank has the same, or nothing: from arguments to an operation. See `asynccoll.calls`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asynccoll.algorithms import registry
from asynccoll.buffers import describe, matches_out
from asynccoll.calls.place import Call, Place, as_target, checked_root, wanted_algorithm
from asynccoll.calls.received import Received, checked_outs, item_of
from asynccoll.engine.fingerprint import Fingerprint
from asynccoll.engine.programs import items

__all__ = ["allgather", "barrier", "broadcast"]


def broadcast(place: Place, value: Any, root: Any, out: Any, algorithm: str, name: str | None) -> Call:
    """The root's value on every rank."""
    root = checked_root(place, root)
    wanted_algorithm(place, "broadcast", algorithm)
    here = place.rank == root
    like = describe(value) if value is not None else None
    outs = None
    if out is not None:
        target = as_target(out)
        if like is not None:
            matches_out(like, target)
        target.lend()  # refuse unsuitable memory now rather than when bytes arrive
        outs = {root: out}
        if not here:
            like = target
    item, own = None, None
    if here:
        if like is None and out is not None:
            raise TypeError(f"out= takes an array; the root broadcasts a {type(value).__name__}")
        item, own = item_of(value, like, place.codec)
    path = "array" if like is not None else (place.codec.path if here else None)
    fingerprint = Fingerprint(
        "broadcast",
        path,
        None,
        like.dtype.name if like is not None else None,
        like.shape if like is not None else None,
        root,
        name,
        algorithm,
        loose_path=True,
    )
    likes = None if like is None else [like] * place.size
    codec = Received(place.rank, own, likes, outs, strict=True, codec=place.codec)
    return Call(fingerprint, items.broadcast(item, codec, place.rank, place.size, root))


def allgather(place: Place, value: Any, out: Sequence[Any] | None, algorithm: str, name: str | None) -> Call:
    """Every rank's value on every rank, in rank order."""
    chosen = wanted_algorithm(place, "allgather", algorithm)
    array = describe(value)
    dtype = array.dtype if array is not None else None
    outs = None
    if out is not None:
        outs = checked_outs(out, place.size, "allgather", dtype, type(value).__name__)
    item, own = item_of(value, array, place.codec)
    fingerprint = Fingerprint(
        "allgather",
        "array" if array is not None else place.codec.path,
        dtype=dtype.name if dtype is not None else None,
        name=name,
        algorithm=algorithm,
    )

    def choose(largest: int) -> str:
        if chosen != "auto":
            return chosen
        return registry.choose("allgather", 1, largest, place.size, table=place.table)

    likes = None if array is None else [array] * place.size
    codec = Received(place.rank, own, likes, outs, codec=place.codec)
    return Call(fingerprint, items.allgather(item, codec, place.rank, place.size, choose))


def barrier(place: Place, name: str | None) -> Call:
    """No payload: the START round alone waits for every rank."""
    return Call(Fingerprint("barrier", name=name), items.nothing())


def meeting(name: str | None) -> Call:
    """The same as a barrier, under the name of what the ranks meet for: ``shrink``."""
    return Call(Fingerprint("shrink", name=name), items.nothing())
