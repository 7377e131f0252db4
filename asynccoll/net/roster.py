"""Rank 0's list of who has joined, and what is wrong with it. Pure: it opens nothing and waits for nothing.

Problems come back as text, not as exceptions: rank 0 has to tell them to everybody before it raises.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asynccoll.errors import ProtocolError, name_ranks
from asynccoll.net.sockets import format_address

__all__ = ["Entry", "Roster"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank says about itself when it joins.

    Attributes:
        rank: its rank.
        size: how many ranks it thinks there are.
        peer: ``host:port`` that it called from (rank 0: the rendezvous address).
        host: numeric address at which it takes calls from higher ranks; the highest rank takes none, and
            gives
            the one it would use.
        port: the port there, 0 where it takes no calls.
        node: identity of its host.
        pid: its process id.
        settings: what must be equal on all ranks.
    """

    rank: int
    size: int
    peer: str
    host: str
    port: int
    node: str
    pid: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where it is, for messages."""
        return format_address(self.host, self.port) if self.port else self.peer

    def describe(self) -> str:
        """Enough to find the process."""
        return f"{self.peer} (pid {self.pid} on {self.node.partition('/')[0]})"

    def as_message(self) -> dict[str, Any]:
        """The fields that JOIN carries; rank and size are in the authenticated HELLO."""
        return {
            "host": self.host,
            "port": self.port,
            "node": self.node,
            "pid": self.pid,
            "settings": dict(self.settings),
        }

    @classmethod
    def from_message(cls, rank: int, size: int, peer: str, message: Mapping[str, Any]) -> Entry:
        """The entry in a JOIN message. ProtocolError if a field is missing or of the wrong type."""
        host, port, node = message.get("host"), message.get("port"), message.get("node")
        pid, settings = message.get("pid"), message.get("settings")
        if (
            message.get("kind") == "join"
            and isinstance(host, str)
            and _is_address(host)
            and isinstance(port, int)
            and 0 <= port <= 65535
            and isinstance(node, str)
            and isinstance(pid, int)
            and isinstance(settings, dict)
        ):
            return cls(rank, size, peer, host, port, node, pid, settings)
        raise ProtocolError(f"rank {rank} at {peer} sent {message.get('kind')!r} where a join belongs")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Roster:
    """Who has joined a world of ``own.size`` ranks, ``own`` (rank 0) first."""

    def __init__(self, own: Entry) -> None:
        # Rank -> entry of everyone who was let in.
        self.entries = {own.rank: own}
        self._own = own

    @property
    def missing(self) -> frozenset[int]:
        """Ranks that have not joined."""
        return frozenset(range(self._own.size)) - self.entries.keys()

    def join(self, entry: Entry) -> str | None:
        """Let ``entry`` in. What is wrong with it, if anything: then the mesh cannot form."""
        own = self._own
        if entry.size != own.size:
            return (
                f"world sizes disagree: rank {entry.rank} at {entry.describe()} says {entry.size}, "
                f"rank 0 at {own.describe()} says {own.size}. Give every rank the same world size"
            )
        if entry.rank >= own.size:
            return (
                f"rank {entry.rank} at {entry.describe()} is outside of the world of {own.size} ranks "
                f"(rank 0 at {own.describe()})"
            )
        other = self.entries.get(entry.rank)
        if other is not None:
            return (
                f"rank {entry.rank} was claimed twice: by {other.describe()} and by {entry.describe()}. "
                "Give every process its own rank, and look for one left over from an earlier run"
            )
        self.entries[entry.rank] = entry
        return None

    def disagreement(self) -> str | None:
        """The first setting that differs, with every rank's value."""
        names = sorted({name for entry in self.entries.values() for name in entry.settings})
        for name in names:
            groups: dict[str, list[int]] = {}
            for rank, entry in sorted(self.entries.items()):
                value = repr(entry.settings[name]) if name in entry.settings else "no value"
                groups.setdefault(value, []).append(rank)
            if len(groups) > 1:
                listed = "; ".join(
                    f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
                    for value, ranks in groups.items()
                )
                return f"ranks disagree on {name}: {listed}. Set it alike on every rank"
        return None

    def unreachable(self) -> str | None:
        """A rank that higher ranks on other hosts would have to call at a loopback address."""
        for rank, entry in sorted(self.entries.items()):
            if rank == 0 or not entry.port or not ipaddress.ip_address(entry.host).is_loopback:
                continue
            strangers = [
                other for other in self.entries.values() if other.rank > rank and other.node != entry.node
            ]
            if strangers:
                other = min(strangers, key=lambda found: found.rank)
                return (
                    f"rank {rank} advertised loopback address {entry.address}, which rank {other.rank} at "
                    f"{other.describe()} on another host cannot reach: it called rank 0 through loopback. Set "
                    "ASYNCCOLL_MASTER_ADDR (or MASTER_ADDR) to an address of rank 0's network interface on every rank"
                )
        return None
