"""Which connections one rank still needs, and which callers it takes. Closes sockets, never reads one.

The higher rank dials the lower, so of each pair exactly one side calls. The data link with rank 0 is the
connection over which the rank joined; everything else is made after the welcome.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from asynccoll.net.handshake import Hello, Purpose, Status
from asynccoll.net.sockets import reset_by_peer

__all__ = ["LinkTable"]


class LinkTable:
    """The connections of ``rank``. They are this table's to close until `release`."""

    def __init__(self, rank: int, size: int, generation: int, run_id: bytes, *, pulse: bool) -> None:
        self.rank, self.size, self.generation, self.run_id = rank, size, generation, run_id
        self._purposes = (Purpose.LINK, Purpose.PULSE) if pulse else (Purpose.LINK,)
        # Purpose -> peer's rank -> connection. Both sides of each have proved the secret.
        self._held: dict[Purpose, dict[int, socket.socket]] = {Purpose.LINK: {}, Purpose.PULSE: {}}

    def calls(self) -> Iterator[tuple[Purpose, int]]:
        """What this rank has to dial: every lower rank, except for the data link with rank 0."""
        for peer in range(self.rank):
            for purpose in self._purposes:
                if (purpose, peer) != (Purpose.LINK, 0):
                    yield purpose, peer

    def judge(self, hello: Hello) -> Status:
        """Whether to take a call from somebody who has proved the secret."""
        if hello.run_id != self.run_id:
            return Status.WRONG_RUN
        if hello.target != self.rank or not self.rank < hello.rank < self.size:
            return Status.WRONG_RANK
        if hello.purpose not in self._purposes or (hello.purpose, self.rank) == (Purpose.LINK, 0):
            return Status.WRONG_PURPOSE
        held = self._held[hello.purpose].get(hello.rank)
        # A dialer that missed our answer has closed its end and calls again; that is no duplicate.
        if held is not None and not reset_by_peer(held):
            return Status.DUPLICATE
        return Status.ACCEPTED

    def take(self, purpose: Purpose, peer: int, sock: socket.socket) -> None:
        """Hold ``sock`` as the connection with ``peer``."""
        old = self._held[purpose].get(peer)
        if old is not None:
            old.close()
        self._held[purpose][peer] = sock

    @property
    def missing(self) -> frozenset[int]:
        """Peers with which a connection is still to come."""
        peers = frozenset(range(self.size)) - {self.rank}
        return frozenset().union(*(peers - self._held[purpose].keys() for purpose in self._purposes))

    def release(self) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
        """Links and pulses by peer, in rank order; from now on they are the caller's."""
        links, pulses = (
            dict(sorted(self._held[purpose].items())) for purpose in (Purpose.LINK, Purpose.PULSE)
        )
        for held in self._held.values():
            held.clear()
        return links, pulses

    def close(self) -> None:
        """Close what is still held."""
        for held in self._held.values():
            for sock in held.values():
                sock.close()
            held.clear()
