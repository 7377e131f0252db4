"""Programs that fold Python objects to one rank, or to every rank's prefix. Know pickles and ranks, no frames and no links.

Rank 0 folds strictly from the left in rank order, and its function is the only one that runs. It answers only after the whole
fold, and every rank waits for its answer: what the function raises is `RemoteError` on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asynccoll.algorithms.binomial import family
from asynccoll.engine.programs.items import folded, guarded, unpickled
from asynccoll.engine.transfers import Program, RecvBytes, SendBytes, recv_message, send_message

__all__ = ["reduce", "scan"]


def reduce(
    payload: bytes,
    rank: int,
    size: int,
    root: int,
    fold: Callable[[Any, Any], Any],
    finish: Callable[[Any, int], Any],
    loads: Callable[[bytes | bytearray | memoryview], Any],
    dumps: Callable[[Any], bytes],
    *,
    tree: bool = False,
) -> Program:
    """The fold of all ranks' values on ``root``, None elsewhere. With one rank ``fold`` is not called.

    Steps: size - 1 messages received at rank 0, one to the root, and ceil(log2 size) of one byte to all.
    """
    answer: bytes | bytearray = b""
    total = yield from folded(payload, rank, size, fold, loads, dumps, tree=tree)
    if rank == 0:
        answer = dumps(guarded(finish, total, size))
        if root != 0:
            yield from send_message(root, answer)
    elif rank == root:
        answer = yield from recv_message(0)
    parent, children = family(rank, size, 0)
    if parent is not None:
        yield RecvBytes(parent, memoryview(bytearray(1)))
    for child in children:
        yield SendBytes(child, b"\0")
    return loads(answer) if rank == root else None


def scan(
    payload: bytes,
    rank: int,
    size: int,
    exclusive: bool,
    fold: Callable[[Any, Any], Any],
    finish: Callable[[Any, int], Any],
    loads: Callable[[bytes | bytearray | memoryview], Any],
    dumps: Callable[[Any], bytes],
) -> Program:
    """The fold of the values of ranks 0 to this one (``exclusive``: without this one, and None on rank 0).

    Each prefix is pickled before the next value is folded in, since that may change it. The last rank's value has no part in
    an exclusive scan and does not travel. Steps: size - 1 messages received at rank 0, then as many sent.
    """
    used = size - 1 if exclusive else size
    if rank:
        if rank < used:
            yield from send_message(0, payload)
        return loads((yield from recv_message(0)))
    total = unpickled(loads, payload, 0)
    prefixes = [dumps(guarded(finish, total, 1))]
    for peer in range(1, used):
        value = unpickled(loads, (yield from recv_message(peer)), peer)
        total = guarded(fold, total, value)
        prefixes.append(dumps(guarded(finish, total, peer + 1)))
    for peer in range(1, size):
        yield from send_message(peer, prefixes[peer - exclusive])
    return None if exclusive else loads(prefixes[0])
