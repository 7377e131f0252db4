"""The peers of one rank as far as they can be read from and written to. Knows connections that end, not what operations become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from asynccoll.engine.group import Group
from asynccoll.engine.inbound import FrameSink, Inbound
from asynccoll.engine.losses import Kind
from asynccoll.engine.outgoing import Outgoing
from asynccoll.errors import ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["PeerBroken", "PeerEvicted", "Peers"]


class PeerBroken(NamedTuple):
    """The peer broke the protocol: the driver closes the connection to it."""

    peer: int
    error: ProtocolError


class PeerEvicted(NamedTuple):
    """The ranks agree that the peer is dead, though its connection is open: the driver closes it."""

    peer: int


class Peers:
    """Which peers of one engine still take part in the mesh."""

    def __init__(self, engine: Engine, groups: Mapping[int, Group], outgoing: Outgoing) -> None:
        self._engine = engine
        self._groups = groups
        self._outgoing = outgoing
        self.addresses: dict[int, str] = {}
        """World rank -> ``"host:port"``, for errors, where whoever made the links knows it."""
        self.inbounds: dict[int, Inbound] = {}
        """Made at the first byte of a peer."""
        self.gone: set[int] = set()
        """Peers whose connection has ended, or is to be closed."""

    def inbound(self, peer: int, sink: FrameSink) -> Inbound:
        """What reads the bytes of ``peer``."""
        found = self.inbounds.get(peer)
        if found is None:
            found = self.inbounds[peer] = Inbound(peer, sink)
        return found

    def left(self, peer: int) -> bool:
        """The peer has said goodbye."""
        return peer in self._groups[0].left

    def reachable(self) -> list[int]:
        """Peers that still take part in the mesh and can be told something."""
        left = self._groups[0].left
        return [peer for peer in self._outgoing.boxes if peer not in self.gone and peer not in left]

    def lost(self, peer: int, reason: str, kind: Kind) -> None:
        """The connection to ``peer`` has ended: an accusation, unless it has left."""
        self._outgoing.boxes[peer].clear()
        self._forget(peer)
        self._engine.departures.ended(peer, reason)
        if not self.left(peer) and not self._engine.closing:  # whoever hears a goodbye closes its end too
            self._engine.losses.accuse(peer, kind, reason)

    def broken(self, peer: int, error: ProtocolError) -> None:
        """The peer broke the protocol: give it up."""
        if peer in self.gone:
            return
        self._engine.events.append(PeerBroken(peer, error))
        for group in self._groups.values():
            group.left.pop(peer, None)  # whatever it said before, it did not leave in good order
        self.lost(peer, f"protocol error: {error}", Kind.BROKEN)

    def evict(self, ranks: frozenset[int]) -> None:
        """The ranks agree that these are dead. If this rank is among them it has no peers any more."""
        for peer in self._outgoing.boxes if self._engine.rank in ranks else ranks:
            if peer not in self.gone and not self.left(peer):
                self._forget(peer)  # what is queued for it is still written, as far as it takes it
                self._engine.events.append(PeerEvicted(peer))
        self._engine.departures.evicted(ranks)

    def _forget(self, peer: int) -> None:
        """Nothing more is read from ``peer``."""
        inbound = self.inbounds.pop(peer, None)
        if inbound is not None:
            inbound.dead = True
        self.gone.add(peer)
        self._engine.arrivals.forget(peer)
