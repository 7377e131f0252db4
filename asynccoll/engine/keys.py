"""Keyed operations until they have a number: announced, granted, or ended before that. Knows frames, not what a key means.

The order of the calls says nothing about a keyed operation. Each rank announces it to the group's rank 0 (KEY), which matches the
n-th use of the key on each rank (`asynccoll.engine.matching`) and, when all have come, grants the next number of a space of its own
(GRANT, to all members in the same order). From then on it is an operation like any other, START round and all.

Until then a rank that cancels, fails, times out or leaves withdraws its announcement (UNKEY), and rank 0 tells those who have
come, and each who comes later. Each announcement gets exactly one last answer from rank 0: a grant, another rank's reason, or, for
a rank that withdrew, that all have come (`OVER`). Where the grant and the withdrawal cross, the withdrawn rank aborts the granted
operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from asynccoll.engine import wire
from asynccoll.engine.aborts import PATIENCE, Aborts, refusal, valid_ranks, well_formed
from asynccoll.engine.departures import Departures
from asynccoll.engine.group import Group
from asynccoll.engine.matching import OVER, Answer, Matching
from asynccoll.engine.operation import Inquest, Operation
from asynccoll.engine.outgoing import Outgoing
from asynccoll.errors import CollectiveTimeout, ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["Keys"]

_REASONS: Final = ("cancel", "error", "closed", "timeout")
"""Why one rank may withdraw an announcement."""
_RELAYED: Final = wire.MAX_CONTROL - 64
"""Bytes that a withdrawal may have, so that it still fits a frame with the rank that withdrew in it."""


class Keys:
    """The keyed operations of one engine that have no number yet."""

    def __init__(self, engine: Engine, outgoing: Outgoing, aborts: Aborts, departures: Departures) -> None:
        self._engine = engine
        self._outgoing = outgoing
        self._aborts = aborts
        self._departures = departures
        self._matching: dict[int, Matching] = {}
        """Communicator of which this rank is rank 0 -> its keys."""

    # -- calls --------------------------------------------------------------------------------------------

    def submit(self, group: Group, op: Operation) -> None:
        """Announce ``op``, which has a key."""
        number = self._enrol(group, op)
        error = self._departures.unfit(group, op)
        if error is not None:
            self._aborts.end(op, error)
            return
        group.active[op.seq] = op
        if op.limit is not None:
            op.deadline = op.started + op.limit
            self._engine.expect(op.deadline)
        self._announce(group, number, op)

    def refuse(self, group: Group, op: Operation, error: Exception) -> None:
        """``op`` failed before it started. It takes its use of the key, and ends it on the other ranks."""
        number = self._enrol(group, op)
        if self._departures.unfit(group, op) is None:
            body = refusal(error, self._engine.safe)
            group.withdrawn[number] = body
            self._announce(group, number, op)
            self._withdraw(group, number, body)
        self._aborts.end(op, error)

    @staticmethod
    def _enrol(group: Group, op: Operation) -> int:
        """Give ``op`` a number of this rank's own until it is granted one. The number of its announcement."""
        op.announced = True
        op.seq = group.take_local()
        return op.seq - wire.LOCAL

    def _announce(self, group: Group, number: int, op: Operation) -> None:
        assert op.key is not None
        if group.rank == 0:
            self._answer(group, self._keys_of(group).announce(0, number, op.key))
        else:
            self._outgoing.post(group.members[0], wire.key_frame(group.comm, number, op.key))

    # -- ends before the grant ----------------------------------------------------------------------------

    def withdraw(self, op: Operation, body: Mapping[str, Any]) -> None:
        """``op`` ends here because of ``body`` and has no number yet."""
        group = self._engine.group(op.comm)
        number = op.seq - wire.LOCAL
        group.withdrawn[number] = body
        self._withdraw(group, number, body)

    def _withdraw(self, group: Group, number: int, body: Mapping[str, Any]) -> None:
        first = group.members[0]
        if group.rank == 0:
            self._answer(group, self._keys_of(group).withdraw(0, number, body))
        elif first not in group.lost and first not in group.left:
            self._outgoing.post(first, wire.unkey_frame(group.comm, number, body))

    def time_out(self, op: Operation) -> None:
        """The deadline of ``op`` has passed: ask rank 0 who has not come. It answers within `PATIENCE`, or is missing itself."""
        engine = self._engine
        op.inquest = Inquest("timeout", engine.now + PATIENCE, op.limit or 0.0)
        engine.recall(op)
        engine.expect(op.inquest.deadline)
        self.withdraw(op, {"reason": "timeout", "limit": op.limit})

    def give_up(self, op: Operation) -> None:
        """Rank 0 has not said who is missing."""
        self._aborts.end(op, self._timeout(op, [0], op.limit))

    def departed(self, group: Group) -> None:
        """A member died or left, and what it ended has ended: nothing of the group will be granted, nor answered."""
        group.withdrawn.clear()
        self._matching.pop(group.comm, None)

    def left(self, comm: int) -> None:
        """This rank has left a communicator."""
        self._matching.pop(comm, None)

    # -- frames -------------------------------------------------------------------------------------------

    def announced(self, group: Group, peer: int, number: int, payload: memoryview) -> None:
        """KEY: ``peer`` has called a keyed operation."""
        if group.rank:
            raise ProtocolError(
                f"rank {peer} announced a key to rank {group.rank} of {group.name!r}, not to rank 0"
            )
        key = wire.parse_key(payload)
        if not group.left and not group.lost:
            self._answer(group, self._keys_of(group).announce(group.index[peer], number, key))

    def granted(self, group: Group, peer: int, seq: int, payload: memoryview) -> None:
        """GRANT: rank 0 gives an announcement of this rank its number."""
        if group.index[peer] or seq != group.next_keyed:
            raise ProtocolError(f"rank {peer} granted the number {seq:#x} on {group.name!r} out of turn")
        self._begin(group, wire.parse_u64(payload))

    def unkeyed(self, group: Group, peer: int, number: int, payload: memoryview) -> None:
        """UNKEY: an announcement has ended."""
        body = wire.control_payload(payload)
        rank, reason = group.index[peer], body.get("reason")
        if group.rank == 0 and _fit(reason, body) and len(payload) <= _RELAYED:
            if not group.left and not group.lost:
                self._answer(group, self._keys_of(group).withdraw(rank, number, _relayed(str(reason), body)))
        elif rank == 0 and (reason == "over" or _told(reason, body, group.size)):
            self._ended(group, number, body)
        else:
            raise ProtocolError(
                f"rank {peer} sent a malformed end of a keyed operation (reason {reason!r:.100})"
            )

    # -- what frames do -----------------------------------------------------------------------------------

    def _keys_of(self, group: Group) -> Matching:
        found = self._matching.get(group.comm)
        if found is None:
            found = self._matching[group.comm] = Matching(group.size)
        return found

    def _answer(self, group: Group, answers: Iterable[Answer]) -> None:
        """Rank 0 tells the members what has become of their announcements; itself last, since that may run a program."""
        own = None
        for answer in answers:
            rank, number, body = answer
            if rank == 0:
                own = answer
            elif body is None:
                self._outgoing.post(
                    group.members[rank], wire.grant_frame(group.comm, group.next_keyed, number)
                )
            else:
                self._outgoing.post(group.members[rank], wire.unkey_frame(group.comm, number, body))
        if own is None:
            return
        if own.body is None:
            self._begin(group, own.number)
        else:
            self._ended(group, own.number, own.body)

    def _begin(self, group: Group, number: int) -> None:
        """An announcement of this rank is granted the next number."""
        seq = group.next_keyed
        group.next_keyed += 1
        body = group.withdrawn.pop(number, None)
        op = group.active.get(wire.LOCAL + number)
        if op is not None and op.announced:  # those numbers serve receives too
            del group.active[op.seq]
            op.announced, op.seq = False, seq
            self._engine.begin(group, op)
            return
        early = group.early.pop(seq, None)
        if early is not None:
            self._outgoing.release(early)
        if body is not None:  # the withdrawal and the grant have crossed
            self._engine.push(group, wire.abort_frame(group.comm, seq, dict(body)))
        elif not group.left and not group.lost and not self._engine.closing:
            raise ProtocolError(f"rank 0 of {group.name!r} granted a number that this rank has not asked for")

    def _ended(self, group: Group, number: int, body: Mapping[str, Any]) -> None:
        """An announcement of this rank has ended because of ``body``."""
        op = group.active.get(wire.LOCAL + number)
        if body is OVER or body["reason"] == "over":
            group.withdrawn.pop(number, None)
            return
        origin = body["origin"]
        if origin != group.rank:
            group.withdrawn.pop(number, None)
        if op is None or not op.announced:
            return
        if body["reason"] != "timeout":
            self._aborts.end(op, self._aborts.error_of(op, origin, body))
        elif group.rank in body["missing"]:
            self._aborts.end(
                op, self._timeout(op, [group.rank], body.get("limit"), " before the others gave up")
            )
        else:
            self._aborts.end(op, self._timeout(op, body["missing"], body.get("limit")))

    def _timeout(
        self, op: Operation, missing: Iterable[int], limit: Any, note: str = ""
    ) -> CollectiveTimeout:
        seconds = limit if isinstance(limit, float | int) else 0.0
        return CollectiveTimeout(missing, seconds, op.context(self._engine.now), note=note)


def _relayed(reason: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What rank 0 passes on of a withdrawal: no more than a frame holds."""
    match reason:
        case "error":
            return {"reason": reason, "error": body["error"]}
        case "closed":
            cause = wire.clipped(str(body.get("cause", "closed")), 1024)
            return {"reason": reason, "cause": cause, "ended": body.get("ended") is True}
        case "timeout":
            limit = body.get("limit")
            return {"reason": reason, "limit": limit if isinstance(limit, float | int) else 0.0}
    return {"reason": reason}


def _fit(reason: Any, body: Mapping[str, Any]) -> bool:
    """Whether a rank may withdraw for this reason, and the body has what it needs."""
    return isinstance(reason, str) and reason in _REASONS and well_formed(reason, body)


def _told(reason: Any, body: Mapping[str, Any], size: int) -> bool:
    """The same for an end that rank 0 tells."""
    return (
        _fit(reason, body)
        and valid_ranks([body.get("origin")], size)
        and (reason != "timeout" or valid_ranks(body.get("missing"), size))
    )
