"""Faults of a simulated world as values: what breaks, where, and when. Knows how to draw some from a seed, not how they are done.

When: ``at`` seconds of virtual time after the fault was set, or when ``after`` pieces of streams have moved there since, whichever
comes first; with neither, at once. Pieces are counted where the fault strikes: those that reach the rank, or those that move
between the two.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from asynccoll.sim.links import Conditions

__all__ = [
    "Cancel",
    "Crash",
    "Cut",
    "Fault",
    "Partition",
    "Restart",
    "Slow",
    "Stall",
    "checked",
    "draw_conditions",
    "draw_faults",
]


@dataclass(frozen=True, kw_only=True)
class _Moment:
    at: float | None = None
    """Virtual seconds."""
    after: int | None = None
    """Pieces."""

    def __post_init__(self) -> None:
        if self.at is not None and not self.at >= 0:
            raise ValueError(f"at={self.at!r} is not a number of seconds from 0 on")
        if self.after is not None and not self.after >= 1:
            raise ValueError(f"after={self.after!r} is not a number of pieces from 1 on")
        for name, least in (("seconds", 0), ("delay", 0), ("piece", 1)):
            value = getattr(self, name, None)
            if value is not None and not value >= least:
                raise ValueError(f"{name}={value!r} of {type(self).__name__} is below {least}")
        how = getattr(self, "how", "fin")
        if how not in ("fin", "rst", "stall"):
            raise ValueError(f"how={how!r} is not a way to cut; use 'fin', 'rst' or 'stall'")

    def where(self) -> frozenset[int]:
        """The ranks that it strikes."""
        raise NotImplementedError


@dataclass(frozen=True)
class Crash(_Moment):
    """The process of ``rank`` dies, as by ``kill -9``. ``reset``: what it had sent and the others had not read is lost too."""

    rank: int
    reset: bool = False

    def where(self) -> frozenset[int]:
        """See `_Moment.where`."""
        return frozenset([self.rank])


@dataclass(frozen=True)
class Restart(_Moment):
    """The process of ``rank`` dies; when all other ranks have ended too, every rank is started again, in a new world.

    That is what a launcher with restarts does: survivors have to notice the loss and to end. Faults that have not struck until then
    do not come any more.
    """

    rank: int

    def where(self) -> frozenset[int]:
        """See `_Moment.where`."""
        return frozenset([self.rank])


@dataclass(frozen=True)
class Stall(_Moment):
    """``rank`` is stopped, as by SIGSTOP: it neither runs nor reads. After ``seconds`` it goes on; None: it never does."""

    rank: int
    seconds: float | None = None

    def where(self) -> frozenset[int]:
        """See `_Moment.where`."""
        return frozenset([self.rank])


@dataclass(frozen=True)
class Slow(_Moment):
    """From now on all links of ``rank`` crawl: pieces of at most ``piece`` bytes, each up to ``delay`` seconds late."""

    rank: int
    delay: float = 0.01
    piece: int = 4096

    def where(self) -> frozenset[int]:
        """See `_Moment.where`."""
        return frozenset([self.rank])


@dataclass(frozen=True)
class Cancel(_Moment):
    """The task that runs ``main`` on ``rank`` is cancelled."""

    rank: int

    def where(self) -> frozenset[int]:
        """See `_Moment.where`."""
        return frozenset([self.rank])


@dataclass(frozen=True)
class Cut(_Moment):
    """The connection of two ranks breaks, while both live.

    ``how``: ``"fin"``, both read an end of the stream after what was under way; ``"rst"``, that is lost; ``"stall"``, nothing
    arrives any more and neither hears why, for ``seconds`` (None: for ever).
    """

    one: int
    other: int
    how: Literal["fin", "rst", "stall"] = "fin"
    seconds: float | None = None

    def where(self) -> frozenset[int]:
        """See `_Moment.where`."""
        return frozenset([self.one, self.other])


@dataclass(frozen=True)
class Partition(_Moment):
    """Nothing arrives any more between the ranks in ``side`` and all others, and nobody hears why; ``seconds`` as for `Cut`."""

    side: frozenset[int]
    seconds: float | None = None

    def where(self) -> frozenset[int]:
        """See `_Moment.where`."""
        return frozenset(self.side)


Fault: TypeAlias = Crash | Restart | Stall | Slow | Cancel | Cut | Partition

_KINDS: Final = ("crash", "stall", "slow", "fin", "rst", "silence", "partition", "cancel")


def draw_conditions(rng: random.Random) -> Conditions:
    """How the links of a world behave: delays, splits and buffers of any kind that a network may have."""
    return Conditions(
        delay=rng.choice([0.0, 0.0001, 0.002, 0.02]),
        piece=rng.choice([50, 1000, 1 << 14, 1 << 16]),
        split=rng.random() < 0.7,
        buffer=rng.choice([1000, 1 << 14, 1 << 18]),
    )


def draw_faults(rng: random.Random, size: int, count: int) -> list[Fault]:
    """``count`` faults in a world of ``size`` ranks, each within the first ten seconds or thousand pieces."""
    return [_draw(rng, size) for _ in range(count if size > 1 else 0)]


def _draw(rng: random.Random, size: int) -> Fault:
    rank = rng.randrange(size)
    at = rng.choice([rng.random() * 0.01, rng.random(), rng.random() * 10])
    after = rng.choice([None, int(2 ** (rng.random() * 10))])
    match rng.choice(_KINDS):
        case "crash":
            return Crash(rank, rng.random() < 0.3, at=at, after=after)
        case "stall":
            return Stall(rank, rng.choice([None, rng.random(), rng.random() * 30]), at=at, after=after)
        case "slow":
            return Slow(rank, at=at, after=after)
        case "cancel":
            return Cancel(rank, at=at, after=after)
        case "partition":
            side = frozenset(rng.sample(range(size), rng.randint(1, size - 1)))
            return Partition(side, rng.choice([None, rng.random() * 30]), at=at, after=after)
        case how:
            other = rng.choice([peer for peer in range(size) if peer != rank])
            if how == "silence":
                return Cut(rank, other, "stall", rng.choice([None, rng.random() * 30]), at=at, after=after)
            return Cut(rank, other, "fin" if how == "fin" else "rst", at=at, after=after)


def checked(faults: Iterable[Fault], size: int) -> list[Fault]:
    """``faults``; `ValueError` where one names a rank that a world of ``size`` does not have."""
    given = list(faults)
    for fault in given:
        strangers = sorted(rank for rank in fault.where() if not 0 <= rank < size)
        if strangers:
            raise ValueError(f"{fault} names rank {strangers[0]}, and the world has ranks 0 to {size - 1}")
        if isinstance(fault, Cut) and fault.one == fault.other:
            raise ValueError(f"{fault} cuts a rank from itself")
    return given
