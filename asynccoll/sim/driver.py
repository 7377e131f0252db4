"""The in-memory driver: links between engines of one process, with seeded delay and splitting. Knows bytes, not frames.

On a `SimLoop` the whole world runs in virtual time and repeats exactly for a seed; on any other loop it is a mesh without
sockets. The links behave like sockets: bounded buffers, partial writes, reads split anywhere.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from asynccoll.engine.engine import Engine
from asynccoll.pump import Pump

__all__ = ["Conditions", "SimDriver", "SimNetwork"]


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


class _Link:
    """One direction between two ranks."""

    __slots__ = (
        "arrival",
        "conditions",
        "ended",
        "held",
        "loop",
        "receiver",
        "rng",
        "scheduled",
        "sender",
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

    def write(self, parts: list[memoryview | bytes]) -> int:
        """Take bytes as a socket would: as many as there is room for, 0 if there is none."""
        taken = 0
        for part in parts:
            room = self.conditions.buffer - len(self.held)
            if room <= 0:
                break
            piece = part[:room]
            self.held += piece
            taken += len(piece)
        self._schedule()
        return taken

    def end(self) -> None:
        """The sender has closed its end."""
        if not self.ended:
            self.ended = True
            self._schedule()

    def _schedule(self) -> None:
        if self.scheduled or not (self.held or self.ended):
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
        if not self.held:
            self.receiver.ended(self.sender.engine.rank)
            return
        limit = self.conditions.piece
        if self.conditions.split:
            limit = self.rng.randint(1, limit)
        piece = bytes(self.held[:limit])
        del self.held[:limit]
        self.receiver.take(self.sender.engine.rank, memoryview(piece))
        if self.waiting:
            self.waiting = False
            self.loop.call_soon(self.sender.resume, self.receiver.engine.rank)
        self._schedule()


class SimNetwork:
    """A full mesh of links between the drivers of one process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        size: int,
        *,
        seed: int = 0,
        conditions: Conditions = Conditions(),
        name: str = "world",
    ) -> None:
        self.loop = loop
        self.conditions = conditions
        self.rng = random.Random(seed)
        self.drivers = [SimDriver(Engine(rank, size, name), self) for rank in range(size)]
        """One driver per rank."""


class SimDriver(Pump):
    """Drives one engine over a `SimNetwork`."""

    def __init__(self, engine: Engine, network: SimNetwork) -> None:
        super().__init__(engine, network.loop)
        self._network = network
        self._links: dict[int, _Link] = {}
        """Peer -> link to it, made when it is first written to."""
        self._gone: set[int] = set()
        """Peers whose stream has ended, or that were dropped."""
        self._idle: asyncio.Event | None = None
        """Set while closing, when a peer's stream has ended or a full link has room again."""

    def _link(self, peer: int) -> _Link:
        link = self._links.get(peer)
        if link is None:
            network = self._network
            rng = random.Random(network.rng.getrandbits(64))
            link = self._links[peer] = _Link(self, network.drivers[peer], network.conditions, rng, self.loop)
        return link

    def write(self, peer: int) -> None:
        """See `Pump.write`."""
        engine = self.engine
        while parts := engine.data_to_send(peer):
            if peer in self._gone:
                engine.sent(peer, sum(map(len, parts)))
                continue
            link = self._link(peer)
            sent = link.write(list(parts))
            if not sent:
                link.waiting = True
                return
            self.bytes_sent += sent
            engine.sent(peer, sent)

    def resume(self, peer: int) -> None:
        """A full link has room again."""
        self.write(peer)
        self.flush()
        if self._idle is not None:
            self._idle.set()

    def take(self, peer: int, piece: memoryview) -> None:
        """Bytes arrived."""
        engine = self.engine
        self.busy = True
        try:
            while piece and peer not in self._gone:
                memory = engine.receive_into(peer)
                count = min(len(memory), len(piece))
                memory[:count] = piece[:count]
                piece = piece[count:]
                self.bytes_received += count
                if not engine.received(peer, count, self.loop.time()):
                    break
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.busy = False
            self.flush()

    def ended(self, peer: int) -> None:
        """The peer's stream has ended; this end is closed too, as a socket would be."""
        if peer in self._gone:
            return
        reason = "left" if self.engine.left(peer) else "connection closed without goodbye"
        self.drop(peer)
        self.engine.peer_lost(peer, reason, self.loop.time())
        self.flush()

    def drop(self, peer: int) -> None:
        """See `Pump.drop`."""
        if peer not in self._gone:
            self._gone.add(peer)
            self._link(peer).end()
            if self._idle is not None:
                self._idle.set()

    def crash(self) -> None:
        """End every stream without a word, as the death of a process would."""
        self.closed = True
        self.stop_timer()
        for peer in range(self.engine.size):
            if peer != self.engine.rank:
                self.drop(peer)

    async def close(self, cause: str) -> None:
        """See `Pump.close`."""
        if self.closed:
            return
        self.closed = True
        self.engine.close(cause, self.loop.time())
        self.flush()
        self._idle = asyncio.Event()
        peers = {peer for peer in range(self.engine.size) if peer != self.engine.rank}
        try:
            async with asyncio.timeout(1.0):
                for peer in sorted(peers):
                    while peer not in self._gone and self.engine.data_to_send(peer):
                        self._idle.clear()
                        await self._idle.wait()
                    self._link(peer).end()
                while peers - self._gone:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        finally:
            self.stop_timer()
            self._gone |= peers
