"""The in-memory driver: links between engines of one process, with seeded delay and splitting. Knows bytes, not frames.

On a `SimLoop` the whole world runs in virtual time and repeats exactly for a seed; on any other loop it is a mesh without
sockets. The links behave like sockets: bounded buffers, partial writes, reads split anywhere. `SimNetwork` breaks them on
request, and stops and kills whole ranks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from asynccoll.engine.engine import Engine
from asynccoll.engine.operation import Operation
from asynccoll.pump import Pump
from asynccoll.sim.links import Conditions, Link
from asynccoll.sim.pulses import Pulses
from asynccoll.sim.trace import Trace

__all__ = ["Conditions", "SimDriver", "SimNetwork"]


class SimNetwork:
    """A full mesh of links between the drivers of one process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        size: int,
        *,
        seed: int = 0,
        conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
        name: str = "world",
        liveness_timeout: float | None = None,
        trace: Trace | None = None,
    ) -> None:
        """``liveness_timeout``: seconds of silence after which a rank is taken for lost; None: never."""
        self.loop = loop
        self.conditions = conditions
        self.rng = random.Random(seed)
        self.trace = trace
        self.drivers = [SimDriver(Engine(rank, size, name), self) for rank in range(size)]
        """One driver per rank."""
        self.pulses = None if liveness_timeout is None else Pulses(self, liveness_timeout)
        self._countdowns: list[_Countdown] = []

    def link(self, source: int, target: int) -> Link:
        """The link from one rank to another."""
        return self.drivers[source].link(target)

    # -- moments ------------------------------------------------------------------------------------------

    def moved(self, source: int, target: int, nbytes: int) -> None:
        """A piece has arrived."""
        if self.trace is not None:
            self.trace.moved(self.loop.time(), source, target, nbytes)
        if self._countdowns:
            for countdown in list(self._countdowns):
                countdown.moved(source, target)

    def after(self, pieces: int, ranks: frozenset[int], do: Callable[[], None]) -> Callable[[], None]:
        """Call ``do`` when so many pieces more have moved: to the one rank in ``ranks``, or between any of several.

        Returns what calls that off.
        """

        def call_off() -> None:
            if countdown in self._countdowns:
                self._countdowns.remove(countdown)

        def strike() -> None:
            call_off()
            do()

        countdown = _Countdown(pieces, ranks, strike)
        self._countdowns.append(countdown)

        return call_off

    # -- faults -------------------------------------------------------------------------------------------

    def sever(self, one: int, other: int, *, reset: bool = False) -> None:
        """Cut the connection of two ranks: both read an end of the stream, or (``reset``) an error at once."""
        for source, target in ((one, other), (other, one)):
            self.link(source, target).sever(reset=reset)

    def stall(self, one: int, other: int) -> None:
        """Between two ranks nothing arrives any more, and neither hears why: a silent partition."""
        self._stalled(one, other, True)

    def heal(self, one: int, other: int) -> None:
        """What was stalled goes on."""
        self._stalled(one, other, False)

    def _stalled(self, one: int, other: int, stalled: bool) -> None:
        for source, target in ((one, other), (other, one)):
            link = self.link(source, target)
            link.stalled = stalled
            link.schedule()
        self.listen()

    def slow(self, rank: int, delay: float, piece: int) -> None:
        """All that goes to and from ``rank`` crawls: pieces of at most ``piece`` bytes, each up to ``delay`` seconds late."""
        for peer in range(len(self.drivers)):
            if peer != rank:
                for link in (self.link(rank, peer), self.link(peer, rank)):
                    least = min(link.conditions.piece, piece)
                    link.conditions = replace(link.conditions, delay=delay, piece=least)

    def freeze(self, rank: int) -> None:
        """Stop a rank: it neither runs nor reads nor writes, and its links stay open."""
        self.drivers[rank].frozen = True
        self.listen()

    def thaw(self, rank: int) -> None:
        """A stopped rank goes on where it was."""
        driver = self.drivers[rank]
        driver.frozen = False
        driver.awake()
        for peer in range(len(self.drivers)):
            if peer != rank:
                self.link(peer, rank).schedule()
        self.listen()

    def crash(self, rank: int, *, reset: bool = False) -> None:
        """Kill a rank: every stream ends without a word. ``reset``: what was under way from it is lost."""
        driver = self.drivers[rank]
        if reset:
            for peer in range(len(self.drivers)):
                if peer != rank:
                    self.link(rank, peer).sever(reset=True)
        driver.crash()
        self.listen()

    def listen(self) -> None:
        """Who can be heard has changed."""
        if self.pulses is not None:
            self.pulses.listen()


class _Countdown:
    """Something to be done when some pieces have moved."""

    def __init__(self, left: int, ranks: frozenset[int], do: Callable[[], None]) -> None:
        self._left = max(1, left)
        self._ranks = ranks
        self._do = do

    def moved(self, source: int, target: int) -> None:
        if target in self._ranks and (len(self._ranks) == 1 or source in self._ranks):
            self._left -= 1
            if self._left == 0:
                self._do()


class SimDriver(Pump):
    """Drives one engine over a `SimNetwork`."""

    def __init__(self, engine: Engine, network: SimNetwork) -> None:
        super().__init__(engine, network.loop)
        self.network = network
        self.frozen = False
        """The rank is stopped: what arrives waits, and so do its timers."""
        self.crashed = False
        self.untold: set[int] = set()
        """Peers that were evicted, and whose link did not take the reason."""
        self._links: dict[int, Link] = {}
        """Peer -> link to it, made when it is first written to."""
        self._gone: set[int] = set()
        """Peers whose stream has ended, or that were dropped."""
        self._idle: asyncio.Event | None = None
        """Set while closing, when a peer's stream has ended or a full link has room again."""

    def link(self, peer: int) -> Link:
        """The link to ``peer``."""
        link = self._links.get(peer)
        if link is None:
            network = self.network
            rng = random.Random(network.rng.getrandbits(64))
            link = self._links[peer] = Link(self, network.drivers[peer], network.conditions, rng, self.loop)
        return link

    def parted(self, peer: int) -> bool:
        """The stream of ``peer`` has ended, or it was dropped."""
        return peer in self._gone

    # -- for the communicator: the same, with a trace ------------------------------------------------------

    def submit(self, op: Operation) -> None:
        """See `Pump.submit`."""
        self._follow(op)
        super().submit(op)

    def refuse(self, op: Operation, error: Exception) -> None:
        """See `Pump.refuse`."""
        self._follow(op)
        super().refuse(op, error)

    def post(self, op: Operation) -> None:
        """See `Pump.post`."""
        self._follow(op)
        super().post(op)

    def _follow(self, op: Operation) -> None:
        trace = self.network.trace
        if trace is None:
            return
        verb, rank, now = op.fingerprint.verb, self.engine.rank, self.loop.time
        trace.note(now(), f"rank {rank} calls {verb}")
        told = op.on_end

        def ended(op: Operation) -> None:
            outcome = type(op.result if op.error is None else op.error).__name__
            trace.note(now(), f"rank {rank} ends {op.label}: {outcome}")
            told(op)

        op.on_end = ended

    # -- links --------------------------------------------------------------------------------------------

    def write(self, peer: int) -> None:
        """See `Pump.write`."""
        engine = self.engine
        while parts := engine.data_to_send(peer):
            if peer in self._gone:
                engine.sent(peer, sum(map(len, parts)))
                continue
            link = self.link(peer)
            sent = link.write(list(parts))
            if not sent:
                link.waiting = True
                return
            self.bytes_sent += sent
            engine.sent(peer, sent)

    def resume(self, peer: int) -> None:
        """A full link has room again."""
        if self.frozen:
            return  # `awake` writes
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
        if self.engine.left(peer):
            reason = "left"
        elif self.network.link(peer, self.engine.rank).reset:
            reason = "connection reset"
        else:
            reason = "connection closed without goodbye"
        self.drop(peer)
        self.engine.peer_lost(peer, reason, self.loop.time())
        self.flush()

    def silent(self, peer: int, seconds: float) -> None:
        """Nothing has come from the peer for so long. Its link stays open until the ranks agree that it is lost."""
        if peer not in self._gone and not self.closed:
            self.engine.silent(peer, f"silent for {seconds:g} s", self.loop.time())
            self.flush()

    def evicted(self, by: int) -> None:
        """A peer can be heard again, and has given this rank up meanwhile."""
        if not self.closed and not self.frozen:
            self.engine.evicted(by, self.loop.time())
            self.flush()

    def drop(self, peer: int) -> None:
        """See `Pump.drop`."""
        if peer not in self._gone:
            self._gone.add(peer)
            self.link(peer).end()
            if self.network.pulses is not None:
                self.network.pulses.parted(self.engine.rank, peer)
            if self._idle is not None:
                self._idle.set()

    def evict(self, peer: int) -> None:
        """See `Pump.evict`. The peer reads why, if the link takes that; else a pulse says it."""
        self.write(peer)
        if self.engine.data_to_send(peer) and self.engine.rank not in self.engine.losses.out:
            self.untold.add(peer)
        self.drop(peer)
        self.network.listen()

    # -- faults -------------------------------------------------------------------------------------------

    def awake(self) -> None:
        """The rank was stopped and goes on: what has become due meanwhile happens now."""
        if self.crashed:
            return
        for peer in list(self._links):
            self.resume(peer)
        if self._timer is None and self.engine.next_deadline is not None:
            self._on_timer()
        self.flush()

    def _on_timer(self) -> None:
        if self.frozen:
            self._timer = None
        else:
            super()._on_timer()

    def _resume(self) -> None:
        if self.frozen:
            self._turn = None
        else:
            super()._resume()

    def crash(self) -> None:
        """End every stream without a word, as the death of a process would."""
        self.closed = self.crashed = True
        self.stop_timer()
        for peer in range(self.engine.size):
            if peer != self.engine.rank:
                self.drop(peer)

    # -- end ----------------------------------------------------------------------------------------------

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
                    self.link(peer).end()
                while peers - self._gone:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            pass
        finally:
            self.stop_timer()
            for peer in sorted(peers):
                self.drop(peer)  # with what has not left by now: the stream ends, as a closed socket's does
            self.network.listen()
