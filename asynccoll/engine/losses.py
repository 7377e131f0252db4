"""Who is dead, agreed by all ranks. Knows accusations and frames that carry them, not what a loss ends.

A rank whose link to another breaks, or falls silent, *accuses* it, and tells everybody (LOST). Accusations are evidence, not yet a
verdict: of two living ranks whose link breaks each accuses the other, and a rank that was stopped for long is accused by all. Each
rank comes to its verdict by the same function of the evidence, as soon as every rank that could accuse has done so at first hand,
or after `PATIENCE`. A verdict is final, it is told to the others, and they adopt it: so they agree in the end even if they had
different evidence. Whoever is evicted hears so, as far as it still can, and is out for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asynccoll.engine.outgoing import Outgoing
from asynccoll.engine.wire import clipped, lost_frame
from asynccoll.errors import EVICTED, ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["PATIENCE", "Accusation", "Kind", "Losses", "verdict"]

PATIENCE: Final = 0.2
"""Seconds to wait for the evidence of ranks that are slow to give theirs."""
_AT_ONCE: Final = 128
"""Accusations in one frame, so that it stays below the limit of a control frame."""
_RELAYED: Final = 64
"""Accusations of others that a rank passes on: they matter where two ranks accuse one another, and there are few of them then."""
_REASON: Final = 200
"""Bytes of a reason as it travels."""
_SAYS: Final = ", says rank "


class Kind(IntEnum):
    """What an accusation rests on."""

    ENDED = 0
    """The connection ended: the process is gone, or something in between has cut the link."""
    SILENT = 1
    """Nothing was heard for the liveness timeout: stopped, cut off, or too busy even for heartbeats."""
    BROKEN = 2
    """It sent what is not the wire format."""


class Accusation(NamedTuple):
    """One rank's word that another is lost."""

    kind: Kind
    reason: str


def verdict(accusations: Mapping[tuple[int, int], Accusation], out: Iterable[int] = ()) -> frozenset[int]:
    """Who is to be evicted, given all accusations as (accuser, accused) and who is out already.

    The fewest ranks, about, without which nobody accuses anybody: whoever is accused by most goes first, of equals the highest
    rank. That a connection ended is no evidence against a rank which had its own reason to end it.
    """
    gone = set(out)
    edges = {
        (accuser, accused)
        for (accuser, accused), (kind, _) in accusations.items()
        if accuser not in gone
        and accused not in gone
        and (kind is not Kind.ENDED or accusations.get((accused, accuser), (kind,))[0] is Kind.ENDED)
    }
    culprits: set[int] = set()
    if {accuser for accuser, _ in edges}.isdisjoint(accused for _, accused in edges):
        return frozenset(accused for _, accused in edges)  # nobody's word is in doubt
    while edges:
        counts = Counter(accused for _, accused in edges)
        worst = max(counts, key=lambda rank: (counts[rank], rank))
        culprits.add(worst)
        edges = {edge for edge in edges if worst not in edge}
    return frozenset(culprits)


class Losses:
    """The evidence and the verdicts of one engine. Ranks are world ranks."""

    def __init__(self, engine: Engine, outgoing: Outgoing) -> None:
        self._engine = engine
        self._outgoing = outgoing
        self.accusations: dict[tuple[int, int], Accusation] = {}
        """(accuser, accused) -> what the accuser has said first."""
        self.out: dict[int, Accusation] = {}
        """Evicted rank -> why."""
        self.deadline: float | None = None
        """While evidence is being collected: when to come to a verdict with what there is."""
        self.exiting: BaseException | None = None
        """What a user's reduce function has raised for the process: no bytes were lost by it."""
        self._passed_on: set[tuple[int, int]] = set()
        """The accusations that the others have heard from this rank."""
        self._told: frozenset[int] | None = None
        """The verdict that the others would expect of us, from what we told them last."""

    # -- evidence -----------------------------------------------------------------------------------------

    def accuse(self, peer: int, kind: Kind, reason: str) -> None:
        """This rank has lost ``peer``."""
        me = self._engine.rank
        if peer in self.out or me in self.out or (me, peer) in self.accusations:
            return
        self.accusations[me, peer] = Accusation(kind, reason)
        self._open()
        self._tell()
        self._consider()

    def heard(self, peer: int, body: Mapping[str, Any]) -> None:
        """LOST: what ``peer`` knows. `ProtocolError` if it is malformed."""
        entries = list(_parsed(peer, body, self._engine.size))
        if self._engine.closing or self._engine.rank in self.out:
            return
        decided = {}
        fresh = False
        for accuser, accused, accusation, final in entries:
            if accused in self.out:
                # No verdict hangs on it any more, but `silent` must say the same on all ranks.
                self.accusations.setdefault((accuser, accused), accusation)
            elif final:
                decided[accused] = self._as_heard(peer, accusation, accused)
            elif (accuser, accused) not in self.accusations:
                self.accusations[accuser, accused] = accusation
                fresh = True
        if decided:
            self._evict(decided)
        if fresh and self._engine.rank not in self.out and self.suspects():
            self._open()
            if self.suspects() != self._told:
                self._tell()
            self._consider()

    def evicted(self, by: int) -> None:
        """``by`` says, by another way than the link, that this rank is out.

        Of two parts of a partition each evicts the other, and hears that of itself when the network is mended: not from a rank of
        this mesh any more.
        """
        me = self._engine.rank
        if me not in self.out and by not in self.out:
            self._evict({me: Accusation(Kind.SILENT, self._own_eviction(by))})

    def resign(self, error: BaseException) -> None:
        """There is no memory, or a defect, so bytes have been lost: this rank takes no further part. It says so itself, else the
        blame would be on its healthy peers. The ``sys.exit()`` of a user's reduce function has lost nothing; one that a signal
        handler raises may have come at any moment.
        """
        me = self._engine.rank
        if me in self.out or error is self.exiting:
            return
        ends = isinstance(error, KeyboardInterrupt | SystemExit)
        what = "ended by" if ends else "internal error:"
        own = Accusation(Kind.BROKEN, clipped(f"{what} {type(error).__name__}: {error}", _REASON))
        frame = lost_frame({"entries": [_packed(me, me, own, True)]})
        for peer in self._engine.peers.reachable():
            self._outgoing.post(peer, frame)
        self._evict({me: own})

    def suspects(self) -> frozenset[int]:
        """The verdict as it stands: who is accused and not out yet."""
        return verdict(self.accusations, self.out)

    def silent(self, rank: int) -> bool:
        """Nobody knows more of an evicted rank than that it was silent: it may be alive on the other side of a partition."""
        seen = [
            accusation.kind for (_, accused), accusation in self.accusations.items() if accused == rank
        ] or [self.out[rank].kind]
        return all(kind is Kind.SILENT for kind in seen)

    # -- verdict ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self.deadline is None:
            self.deadline = self._engine.now + PATIENCE
            self._engine.expect(self.deadline)

    def _consider(self) -> None:
        """Decide if every rank that could accuse the suspects has done so itself."""
        engine, suspects = self._engine, self.suspects()
        witnesses = {engine.rank, *engine.peers.reachable()} - suspects
        if suspects and all((rank, one) in self.accusations for rank in witnesses for one in suspects):
            self._decide(suspects)

    def handle_timer(self, now: float) -> None:
        """Decide with what there is, if it is time."""
        if self.deadline is None:
            return
        if now < self.deadline:
            self._engine.expect(self.deadline)
            return
        self._decide(self.suspects())

    def _decide(self, culprits: frozenset[int]) -> None:
        self._evict({rank: self._why(rank) for rank in sorted(culprits)})

    def _evict(self, culprits: Mapping[int, Accusation]) -> None:
        self.deadline = None
        self.out.update(culprits)
        self._tell(culprits)
        self._engine.peers.evict(frozenset(culprits))
        if self.suspects() and self._engine.rank not in self.out:
            self._open()

    def _why(self, rank: int) -> Accusation:
        me = self._engine.rank
        if (me, rank) in self.accusations:
            return self.accusations[me, rank]
        accuser = min(accuser for accuser, accused in self.accusations if accused == rank)
        return self._as_heard(accuser, self.accusations[accuser, rank], rank)

    def _as_heard(self, accuser: int, accusation: Accusation, rank: int) -> Accusation:
        """What ``accuser`` says of ``rank``, as this rank reports it."""
        kind, reason = accusation
        if rank == self._engine.rank:
            return Accusation(kind, self._own_eviction(accuser))
        return Accusation(kind, reason if _SAYS in reason else f"{reason}{_SAYS}{accuser}")

    @staticmethod
    def _own_eviction(by: int) -> str:
        return f"{EVICTED}: rank {by} took this rank for dead, because it was silent for too long or the link between them broke"

    # -- telling ------------------------------------------------------------------------------------------

    def _tell(self, decided: Mapping[int, Accusation] | None = None) -> None:
        """Tell everybody who can still be told, the accused included, what they have not been told yet."""
        engine = self._engine
        fresh = [pair for pair in self.accusations if pair not in self._passed_on]
        own = [pair for pair in fresh if pair[0] == engine.rank]
        others = [pair for pair in fresh if pair[0] != engine.rank and pair[1] not in self.out]
        told = own + others[:_RELAYED]
        self._passed_on.update(told)
        entries = [_packed(*pair, self.accusations[pair], False) for pair in told]
        for rank, accusation in (decided or {}).items():
            if rank != engine.rank:  # who is out itself cuts its own links now
                entries.append(_packed(engine.rank, rank, accusation, True))
        for at in range(0, len(entries), _AT_ONCE):
            frame = lost_frame({"entries": entries[at : at + _AT_ONCE]})
            for peer in engine.peers.reachable():
                self._outgoing.post(peer, frame)
        self._told = self.suspects()


def _packed(accuser: int, accused: int, accusation: Accusation, final: bool) -> list[Any]:
    return [accuser, accused, int(accusation.kind), clipped(accusation.reason, _REASON), final]


def _parsed(peer: int, body: Mapping[str, Any], size: int) -> Iterator[tuple[int, int, Accusation, bool]]:
    entries = body.get("entries")
    if not isinstance(entries, list):
        raise ProtocolError(f"rank {peer} sent a malformed LOST")
    for entry in entries:
        if not isinstance(entry, list) or list(map(type, entry)) != [int, int, int, str, bool]:
            raise ProtocolError(f"rank {peer} sent a malformed LOST")
        accuser, accused, kind, reason, final = entry
        known = 0 <= accuser < size and 0 <= accused < size and 0 <= kind < len(Kind)
        if not known or (accuser == accused and not final):  # of oneself it is a resignation
            raise ProtocolError(f"rank {peer} sent a LOST of ranks {accuser} and {accused}, kind {kind}")
        yield accuser, accused, Accusation(Kind(kind), reason), final
