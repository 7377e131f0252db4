"""One direction between two simulated ranks: bounded, delayed, split, and broken on purpose. Knows bytes, not frames."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccoll.sim.driver import SimDriver

__all__ = ["Conditions", "Link"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """How the links of a `SimNetwork` behave."""

    delay: float = 0.0
    """Largest one-way delay of a piece, in (virtual) seconds; each piece draws its own, order is kept."""
    piece: int = 1 << 16
    """Largest piece that is read at once, in bytes; with ``split`` each read draws its size from 1 to this."""
    split: bool = False
    """Cut the stream at random places."""
    buffer: int = 1 << 18
    """Bytes that a link holds before the writer has to wait."""

    def __post_init__(self) -> None:
        if not self.delay >= 0:
            raise ValueError(f"delay={self.delay!r} is not a number of seconds from 0 on")
        for name in ("piece", "buffer"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a number of bytes from 1 on")


class Link:
    """One direction between two ranks."""

    __slots__ = (
        "arrival",
        "conditions",
        "cut",
        "ended",
        "held",
        "loop",
        "receiver",
        "reset",
        "rng",
        "scheduled",
        "sender",
        "stalled",
        "waiting",
    )

    def __init__(
        self,
        sender: SimDriver,
        receiver: SimDriver,
        conditions: Conditions,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.conditions = conditions
        self.rng = rng
        self.loop = loop
        self.held = bytearray()
        """Bytes under way, in order."""
        self.arrival = 0.0
        """When the latest piece arrives: a later piece never overtakes it."""
        self.scheduled = False
        self.waiting = False
        """The writer found the link full."""
        self.ended = False
        """`end` was called."""
        self.cut = False
        """Broken between two ranks that both live: what is written from now on is lost."""
        self.reset = False
        """Broken so that what was under way is lost too."""
        self.stalled = False
        """Nothing arrives until this is False again: neither bytes nor an end."""

    def write(self, parts: list[memoryview | bytes]) -> int:
        """Take bytes as a socket would: as many as there is room for, 0 if there is none."""
        if self.cut:
            return sum(map(len, parts))
        taken = 0
        for part in parts:
            room = self.conditions.buffer - len(self.held)
            if room <= 0:
                break
            piece = part[:room]
            self.held += piece
            taken += len(piece)
        self.schedule()
        return taken

    def end(self) -> None:
        """The sender has closed its end: what is under way still arrives, then the end of the stream."""
        if not self.ended:
            self.ended = True
            self.schedule()

    def sever(self, *, reset: bool) -> None:
        """Break it from outside. ``reset``: what is under way is lost."""
        self.cut = True
        if reset:
            self.reset = True
            self.held.clear()
        self.end()

    def schedule(self) -> None:
        """See to it that the next piece, or the end, arrives: unless that is under way, or nothing may arrive now."""
        if self.scheduled or self.stalled or self.receiver.frozen or not (self.held or self.ended):
            return
        self.scheduled = True
        if self.conditions.delay:
            now = self.loop.time()
            self.arrival = max(self.arrival, now + self.rng.uniform(0, self.conditions.delay))
            self.loop.call_at(self.arrival, self._deliver)
        else:
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self.scheduled = False
        receiver = self.receiver
        if self.stalled or receiver.frozen:
            return  # `schedule` is called again when that has passed
        source, target = self.sender.engine.rank, receiver.engine.rank
        if not self.held:
            receiver.ended(source)
            return
        limit = self.conditions.piece
        if self.conditions.split:
            limit = self.rng.randint(1, limit)
        piece = bytes(self.held[:limit])
        del self.held[:limit]
        receiver.take(source, memoryview(piece))
        if self.waiting:
            self.waiting = False
            self.loop.call_soon(self.sender.resume, target)
        receiver.network.moved(source, target, len(piece))
        self.schedule()
