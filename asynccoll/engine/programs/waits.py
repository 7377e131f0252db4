"""What a program waits for when it has its own part: the other ranks, or one of them. Knows ranks, and no values."""

from __future__ import annotations

from collections.abc import Generator

from asynccoll.algorithms import dissemination
from asynccoll.algorithms.binomial import family
from asynccoll.engine.transfers import RecvBytes, SendBytes, Transfer

__all__ = ["together", "told"]


def together(rank: int, size: int) -> Generator[Transfer, None, None]:
    """Wait until every rank has got this far: what one of them cannot rebuild is to be an error on all."""
    for to, source in dissemination.partners(rank, size):
        yield SendBytes(to, b"\0")
        yield RecvBytes(source, memoryview(bytearray(1)))


def told(rank: int, size: int, root: int) -> Generator[Transfer, None, None]:
    """Wait until ``root`` has got this far."""
    parent, children = family(rank, size, root)
    if parent is not None:
        yield RecvBytes(parent, memoryview(bytearray(1)))
    for child in children:
        yield SendBytes(child, b"\0")
