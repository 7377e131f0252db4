"""What the engine knows of one communicator: members, numbers, who has left, what came early. Knows no frames.

A frame may arrive before this rank has made the matching call. It is kept in an `Early` record, which the eager credit bounds;
an ABORT turns the record into a tombstone, so that the later call fails at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from asynccoll.algorithms.start import graph
from asynccoll.engine.operation import Operation
from asynccoll.engine.outbox import EAGER_CREDIT
from asynccoll.engine.wire import KEYED, LOCAL, MESSAGES, longest_record
from asynccoll.errors import ProtocolError

__all__ = ["MAX_PENDING", "Early", "Farewell", "Group"]

MAX_PENDING: Final = 1 << 15
"""Operations that one rank may have under way on a communicator."""
_MAX_EARLY: Final = 2 * MAX_PENDING
"""Operations that peers may be ahead of this rank: each costs some hundred bytes here."""


class Early:
    """What peers have sent for one operation that has not been called here."""

    __slots__ = ("aborts", "grants", "group", "payload", "records", "wants")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.records: dict[int, bytes] = {}
        """START records: world rank -> payload."""
        self.payload: list[tuple[int, int, memoryview]] = []
        """DATA: world rank, tag, payload. All of it is eager."""
        self.grants: dict[int, int] = {}
        """READY: world rank -> offset."""
        self.wants: set[int] = set()
        """World ranks that sent WANT."""
        self.aborts: dict[int, Mapping[str, Any]] = {}
        """ABORT: group rank -> its first body. Not empty: this is a tombstone."""

    def keep_record(self, peer: int, payload: bytes) -> None:
        """Keep a START record; a rank sends one for each round."""
        if peer not in self.group.turns:
            raise ProtocolError(f"rank {peer} sent a START record, and is not to tell this rank")
        if len(payload) > longest_record(self.group.size):
            raise ProtocolError(f"rank {peer} sent a START record of {len(payload)} bytes")
        if peer in self.records:
            raise ProtocolError(f"rank {peer} sent two START records")
        self.records[peer] = payload


class Farewell(NamedTuple):
    """What a rank said when it left in good order."""

    number: int
    """The first operation that it did not take part in."""
    cause: str
    keyed: int = KEYED
    """The first keyed operation that it had not been granted."""
    ended: bool = False
    """Its process ended without having closed, so it counts as lost."""


class Group:
    """One communicator on this rank."""

    __slots__ = (
        "active",
        "comm",
        "early",
        "early_bytes",
        "index",
        "left",
        "lost",
        "members",
        "name",
        "next_keyed",
        "next_local",
        "next_seq",
        "rank",
        "size",
        "tells",
        "turns",
        "withdrawn",
    )

    def __init__(self, comm: int, members: tuple[int, ...], rank: int, name: str) -> None:
        self.comm = comm
        self.members = members
        """Group rank -> world rank."""
        self.rank = rank
        """Own group rank."""
        self.size = len(members)
        self.name = name
        self.index = {world: group for group, world in enumerate(members)}
        """World rank -> group rank."""
        tells, hears = graph(rank, self.size)
        self.tells = tuple(tuple(members[peer] for peer in peers) for peers in tells)
        """START graph: world ranks to tell after i peers have been heard."""
        self.turns = {members[peer]: turn for turn, peer in enumerate(hears)}
        """START graph: world rank to hear -> its turn."""
        self.next_seq = 0
        """Number of the next call; every smaller number has been called here."""
        self.next_keyed = KEYED
        """Number of the next keyed operation to be granted; grants come in order, each to every member."""
        self.next_local = LOCAL
        """See `take_local`."""
        self.withdrawn: dict[int, Mapping[str, Any]] = {}
        """Announcement that this rank has withdrawn -> why, until rank 0 has said that nothing will come of it."""
        self.active: dict[int, Operation] = {}
        """Number -> operation under way."""
        self.early: dict[int, Early] = {}
        """Number -> what came for it; only numbers that `awaits` is true of."""
        self.early_bytes: dict[int, int] = {}
        """World rank -> payload bytes held in `early`."""
        self.lost: dict[int, str] = {}
        """World rank -> why its connection ended, for good; what that ends may not be decided yet."""
        self.left: dict[int, Farewell] = {}
        """World rank -> what it said in its goodbye."""

    @property
    def crowded(self) -> bool:
        """As many operations are under way as may be: the other ranks keep a record of each that they have not called.

        Keyed ones that were withdrawn count until every rank has come to them, since rank 0 keeps a record of each.
        """
        return len(self.active) + len(self.withdrawn) >= MAX_PENDING

    def awaits(self, seq: int) -> bool:
        """The operation of that number, from a frame, has not been called here yet."""
        if seq < KEYED:
            return seq >= self.next_seq
        return self.next_keyed <= seq < MESSAGES

    def take_local(self) -> int:
        """A number for what has none on the wire."""
        self.next_local += 1
        return self.next_local - 1

    def early_of(self, seq: int) -> Early:
        """The record of early frames for number ``seq``."""
        early = self.early.get(seq)
        if early is None:
            if len(self.early) >= _MAX_EARLY:
                raise ProtocolError(f"peers are more than {_MAX_EARLY} operations ahead on {self.name!r}")
            early = self.early[seq] = Early(self)
        return early

    def limit_early(self, peer: int, flags: int, length: int) -> None:
        """Raise `ProtocolError` if ``peer`` may not send ``length`` more bytes for operations not called here."""
        if not flags or self.early_bytes.get(peer, 0) + length > EAGER_CREDIT:
            raise ProtocolError(
                f"rank {peer} sent {length} bytes without credit for an operation not started here"
            )

    def keep_payload(self, peer: int, flags: int, seq: int, tag: int, payload: memoryview) -> bool:
        """Keep payload for a call to come. False if that operation has ended already and the bytes are not needed."""
        self.limit_early(peer, flags, len(payload))
        early = self.early_of(seq)
        if early.aborts:
            return False
        self.early_bytes[peer] = self.early_bytes.get(peer, 0) + len(payload)
        early.payload.append((peer, tag, payload))
        return True
