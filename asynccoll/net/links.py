"""The formed mesh as plain data: a connected socket per peer. Knows neither its past nor what it will carry."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Links"]


@dataclass(slots=True)
class Links:
    """What `asynccoll.net.rendezvous.form_mesh` returns. The sockets belong to whoever holds this.

    Attributes:
        rank: own rank.
        size: number of ranks.
        run_id: 16 random bytes that name this mesh, the same on every rank.
        sockets: peer's rank -> connected non-blocking TCP socket, ``TCP_NODELAY`` set, nothing registered on
            it and no
            byte read too many.
        pulses: peer's rank -> a second such socket for heartbeats; empty unless asked for.
        addresses: rank -> ``"host:port"``, for messages: rank 0's rendezvous address, the others' end of the
            mesh.
        hosts: rank -> opaque identity of its host; equal exactly where two ranks share a kernel and a
            loopback.
        welcome: rank 0's ``offer``, the same on every rank (after msgpack: tuples are lists).
    """

    rank: int
    size: int
    run_id: bytes
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    pulses: dict[int, socket.socket] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    welcome: Mapping[str, Any] = field(default_factory=dict)

    @property
    def node_ranks(self) -> dict[int, int]:
        """Rank -> number of its host; hosts are numbered by their lowest rank."""
        numbers: dict[str, int] = {}
        return {rank: numbers.setdefault(host, len(numbers)) for rank, host in sorted(self.hosts.items())}

    @property
    def local_ranks(self) -> dict[int, int]:
        """Rank -> its number among the ranks of its host, in rank order."""
        counts: dict[str, int] = {}
        local = {}
        for rank, host in sorted(self.hosts.items()):
            local[rank] = counts.get(host, 0)
            counts[host] = local[rank] + 1
        return local

    def close(self) -> None:
        """Close every socket."""
        for sock in (*self.sockets.values(), *self.pulses.values()):
            sock.close()
