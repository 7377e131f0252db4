"""The START round: every rank tells what it calls, until each has heard of all. Knows records, not payload.

Records travel on a graph that depends on the group alone (`asynccoll.algorithms.dissemination.partners`), so that they arrive
whatever the ranks called. No operation is complete before its round is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynccoll.engine import wire
from asynccoll.engine.aborts import Aborts
from asynccoll.engine.operation import Operation
from asynccoll.engine.outgoing import Outgoing
from asynccoll.errors import ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["Rounds"]


class Rounds:
    """The START rounds of one engine's operations."""

    def __init__(self, engine: Engine, outgoing: Outgoing, aborts: Aborts) -> None:
        self._engine = engine
        self._outgoing = outgoing
        self._aborts = aborts

    def send(self, op: Operation) -> None:
        """Pass on what this rank knows, to its partner of the present round."""
        if op.deadline is None:
            remaining = wire.NO_DEADLINE
        else:
            remaining = min(max(0, int((op.deadline - self._engine.now) * 1000)), wire.NO_DEADLINE - 1)
        record = wire.Record(op.digests.strict, op.value_digest, remaining, op.heard)
        peer = op.members[op.rounds[op.round][0]]
        frame = wire.start_frame(op.round, op.comm, op.seq, op.digests.tag, record, len(op.members))
        self._outgoing.post(peer, frame)

    def receive(self, op: Operation, peer: int, round_: int, record: wire.Record) -> None:
        """A record arrived: compare it, and pass the round on as far as it goes."""
        if round_ >= len(op.rounds) or op.members[op.rounds[round_][1]] != peer:
            raise ProtocolError(
                f"rank {peer} sent a START record for round {round_}, which it has no part in"
            )
        if op.inquest is not None:
            return
        if record.strict != op.digests.strict:
            self._aborts.disagree(op)
            return
        if record.value != op.value_digest:
            if op.value_digest and record.value:
                self._aborts.disagree(op)
                return
            op.value_digest = op.value_digest or record.value
        if record.remaining_ms != wire.NO_DEADLINE:
            deadline = self._engine.now + record.remaining_ms / 1000
            if op.deadline is None or deadline < op.deadline - 0.001:
                op.deadline, op.limit = deadline, deadline - op.started
                self._engine.expect(deadline)
        if round_ != op.round:
            if op.early_records is None:
                op.early_records = {}
            op.early_records[round_] = record.heard
            return
        heard = record.heard
        while True:
            op.heard |= heard
            op.round += 1
            if op.round == len(op.rounds):
                if op.finished:
                    self._engine.finish(op)
                return
            self.send(op)
            if op.early_records is None or op.round not in op.early_records:
                return
            heard = op.early_records.pop(op.round)
