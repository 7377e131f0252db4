"""Which ranks make up a communicator, and its id: the same on all members without asking anyone. Pure."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Lineage", "distinct_ranks", "group_id", "ranks_of", "survivors_id"]


class Lineage(NamedTuple):
    """What a communicator and all that were shrunk from it share, so that ranks which are a step apart still meet."""

    root: int
    """Id of the communicator that the first of them was shrunk from."""
    name: str
    """Its name."""
    members: tuple[int, ...]
    """World ranks of its members."""
    made: dict[tuple[int, ...], int]
    """World ranks of survivors -> how often this rank has made a communicator of exactly these."""


def ranks_of(color: int, rows: Sequence[tuple[int | None, int]]) -> list[int]:
    """Ranks whose row is ``(color, order)``, in the order of their ``order``, then of their rank."""
    return [rank for _, rank in sorted((row[1], rank) for rank, row in enumerate(rows) if row[0] == color)]


def distinct_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """``ranks`` as a tuple of distinct ranks below ``size``. Raises TypeError or ValueError."""
    given = []
    for rank in ranks:
        try:
            given.append(operator.index(rank))
        except TypeError:
            raise TypeError(f"ranks= holds {rank!r}, which is not an integer") from None
    if not given:
        raise ValueError("ranks= is empty: a communicator has at least one rank")
    for rank in given:
        if not 0 <= rank < size:
            raise ValueError(
                f"ranks= holds {rank}, which is not a rank of this communicator; use 0 to {size - 1}"
            )
    if len(set(given)) < len(given):
        raise ValueError(f"ranks= names a rank twice: {given}")
    return tuple(given)


def group_id(parent: int, ranks: tuple[int, ...], count: int) -> int:
    """Id of a group of these ranks of ``parent``, made for the ``count``-th time. 0 is the world's."""
    return _hash((parent, ranks, count))


def survivors_id(root: int, members: tuple[int, ...], count: int) -> int:
    """Id of the communicator of these world ranks, the survivors of ``root``."""
    return _hash(("survivors", root, members, count))


def _hash(facts: object) -> int:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") or 1
