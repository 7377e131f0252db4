"""Programs that fold Python objects: to every rank, to one, or to each rank's prefix. Know items and ranks, no frames, no links.

Rank 0 folds strictly from the left in rank order, and its function is the only one that runs (but see ``tree``). It answers only
after the whole fold, and every rank waits for its answer: what the function raises is `RemoteError` on all of them.

The function may change its first argument, keep what it was given, and return memory that it will write to again. So rank 0's
own operand is a copy, made in slices when the first other operand is there; and what the function returns is copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from asynccoll.algorithms.binomial import family
from asynccoll.engine.aborts import FoldFailed
from asynccoll.engine.programs.items import (
    Copies,
    Item,
    Values,
    broadcast,
    doubted,
    recv_item,
    send_item,
)
from asynccoll.engine.programs.waits import together, told
from asynccoll.engine.transfers import Pause, Program, Transfer, copied

__all__ = ["allreduce", "reduce", "scan"]


def allreduce(
    item: Item,
    rank: int,
    size: int,
    fold: Callable[[Any, Any], Any],
    finish: Callable[[Any, int], Any],
    values: Values,
    *,
    tree: bool = False,
) -> Program:
    """The fold of all ranks' values on every rank, which gets a copy of its own. With one rank ``fold`` is not called.

    Steps: size - 1 messages received at rank 0, then a broadcast from there.
    """
    total = yield from _folded(item, rank, size, fold, values, tree=tree)
    answer = values.taken(_guarded(finish, total, size)) if rank == 0 else None
    return (yield from broadcast(answer, _Answer(values), rank, size, 0))


class _Answer:
    """The result of a fold on its way from rank 0 to all (see `items.Codec`)."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._parts: Sequence[memoryview] = ()

    def keep(self, item: Item) -> Copies:
        self._parts = item.parts  # nobody else's, once they have been sent
        return ()

    def place(self, rank: int, meta: bytes, nbytes: int) -> Sequence[memoryview]:
        self._parts = self._values.place(meta, nbytes)
        return self._parts

    def value(self, rank: int) -> Any:
        return self._values.value(self._parts)


def reduce(
    item: Item,
    rank: int,
    size: int,
    root: int,
    fold: Callable[[Any, Any], Any],
    finish: Callable[[Any, int], Any],
    values: Values,
    *,
    tree: bool = False,
) -> Program:
    """The fold of all ranks' values on ``root``, None elsewhere. With one rank ``fold`` is not called.

    Steps: size - 1 messages received at rank 0, one to the root, and from there ceil(log2 size) of one byte to all.
    """
    result = None
    total = yield from _folded(item, rank, size, fold, values, tree=tree)
    if rank == 0:
        taken = values.taken(_guarded(finish, total, size))
        if root == 0:
            result = values.value(taken.parts)
        else:
            yield from send_item(root, taken)
    elif rank == root:
        parts, _ = yield from recv_item(0, values)
        result = values.value(parts)
    yield from told(rank, size, root)
    return result


def scan(
    item: Item,
    rank: int,
    size: int,
    exclusive: bool,
    fold: Callable[[Any, Any], Any],
    finish: Callable[[Any, int], Any],
    values: Values,
) -> Program:
    """The fold of the values of ranks 0 to this one (``exclusive``: without this one, and None on rank 0).

    Each prefix is taken before the next value is folded in, since that may change it. The last rank's value has no part in
    an exclusive scan and does not travel. Steps: size - 1 messages received at rank 0, then as many sent.
    """
    used = size - 1 if exclusive else size
    if rank:
        if rank < used:
            yield from send_item(0, item)
        parts, doubt = yield from recv_item(0, values)
        result = values.value(parts)
    else:
        parts = (yield from recv_item(1, values))[0] if used > 1 else ()
        total = yield from _own_value(values, item, rank)
        prefixes = [values.taken(_guarded(finish, total, 1))]
        for peer in range(1, used):
            if peer > 1:
                parts, _ = yield from recv_item(peer, values)
            total = _guarded(fold, total, _unpickled(values, parts, peer))
            prefixes.append(values.taken(_guarded(finish, total, peer + 1)))
        doubt = any(map(doubted, prefixes))
        for peer in range(1, size):
            yield from send_item(peer, prefixes[peer - exclusive], doubt)
        result = None if exclusive else values.value(prefixes[0].parts)
    if doubt:
        yield from together(rank, size)
    return result


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function; what it raises becomes `RemoteError` on every rank."""
    try:
        return function(*args)
    except Exception as error:
        raise FoldFailed(error) from error


def _folded(
    item: Item,
    rank: int,
    size: int,
    fold: Callable[[Any, Any], Any],
    values: Values,
    *,
    tree: bool,
) -> Generator[Transfer | Pause, None, Any]:
    """At rank 0 the fold of all ranks' values, in rank order; None elsewhere.

    A strict left fold by rank 0's ``fold``, size - 1 messages received there; or, as a ``tree``, ceil(log2 size) messages one
    after the other: each rank folds its children's blocks behind its own value.
    """
    parent, children = family(rank, size, 0)
    if not tree:
        parent, children = (None, list(range(1, size))) if rank == 0 else (0, [])
    if not children and parent is not None:
        yield from send_item(parent, item)
        return None
    total, own = None, False
    for child in sorted(children):
        parts, _ = yield from recv_item(child, values)
        if not own:  # not at the call, which would be held by the copy
            total, own = (yield from _own_value(values, item, rank)), True
        total = _guarded(fold, total, _unpickled(values, parts, child, rank))
    if not own:
        total = yield from _own_value(values, item, rank)
    if parent is None:
        return total
    yield from send_item(parent, values.taken(total))
    return None


def _own_value(values: Values, item: Item, rank: int) -> Generator[Pause, None, Any]:
    """This rank's own operand: a copy that the fold may change."""
    parts, copies = values.own(item)
    yield from copied(copies)
    return _unpickled(values, parts, rank, rank)


def _unpickled(values: Values, parts: Sequence[memoryview], source: int, rank: int = 0) -> Any:
    """The operand of rank ``source``. What unpickling it raises becomes `RemoteError` on every rank, and names ``source``."""
    try:
        return values.value(parts)
    except Exception as error:
        error.add_note(f"raised on rank {rank} by unpickling the value of rank {source}")
        raise FoldFailed(error) from error
