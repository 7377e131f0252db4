"""The START round: every rank tells what it calls, until each has heard of all. Knows records, not what blocks mean.

Records travel on a graph that depends on the group alone (`asynccoll.algorithms.dissemination.partners`), so that they arrive
whatever the ranks called. No operation is complete before its round is. The blocks of a small reduction whose partners are the
same travel behind the records (`asynccoll.engine.transfers.Swap`).
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

    def start(self, op: Operation) -> bool:
        """Tell of the call. False if it failed at once."""
        if op.swaps and not self._step(op, None):
            return False
        self._send(op)
        return True

    def _send(self, op: Operation) -> None:
        """Pass on what this rank knows, to its partner of the present round."""
        deadline, members, digests = op.deadline, op.members, op.digests
        remaining = wire.NO_DEADLINE
        if deadline is not None:
            remaining = int((deadline - self._engine.now) * 1000)
            if not 0 <= remaining < wire.NO_DEADLINE:
                remaining = 0 if remaining < 0 else wire.NO_DEADLINE - 1
        round_ = op.round
        record = (digests.strict, op.value_digest, remaining, op.heard)
        block = op.block or b""
        frame = wire.start_frame(round_, op.comm, op.seq, digests.tag, record, len(members), block)
        self._outgoing.post(members[op.rounds[round_][0]], frame)

    def receive(self, op: Operation, peer: int, round_: int, payload: memoryview) -> None:
        """A record arrived: compare it, and pass the round on as far as it goes."""
        rounds = op.rounds
        if round_ >= len(rounds) or op.members[rounds[round_][1]] != peer:
            raise ProtocolError(
                f"rank {peer} sent a START record for round {round_}, which it has no part in"
            )
        (strict, value, remaining_ms, heard), block = wire.parse_start(payload, len(op.members))
        if op.inquest is not None:
            return
        if strict != op.digests.strict:
            self._aborts.disagree(op)
            return
        if value != op.value_digest:
            if op.value_digest and value:
                self._aborts.disagree(op)
                return
            op.value_digest = op.value_digest or value
        if len(block) != (0 if op.block is None else len(op.block)):
            raise ProtocolError(f"rank {peer} sent a block of {len(block)} bytes with a START record")
        if remaining_ms != wire.NO_DEADLINE:
            deadline = self._engine.now + remaining_ms / 1000
            if op.deadline is None or deadline < op.deadline - 0.001:
                op.deadline, op.limit = deadline, deadline - op.started
                self._engine.expect(deadline)
        if round_ != op.round:
            if op.early_records is None:
                op.early_records = {}
            op.early_records[round_] = heard, memoryview(bytes(block))
            return
        while True:
            op.heard |= heard
            op.round = round_ = round_ + 1
            if op.swaps and not self._step(op, block):
                return
            if round_ == len(rounds):
                if op.program is None and not op.unsent:
                    self._engine.finish(op)
                return
            self._send(op)
            if op.early_records is None or round_ not in op.early_records:
                return
            heard, block = op.early_records.pop(round_)

    def _step(self, op: Operation, block: memoryview | None) -> bool:
        """Resume a swap with its partner's ``block``. False if it failed."""
        assert op.program is not None
        try:
            op.block = op.program.send(block)
        except StopIteration as stop:
            return self._engine.returned(op, stop.value)
        except BaseException as error:  # noqa: BLE001 (raised by the program: re-raised on every rank)
            self._aborts.fail(op, error)
            return False
        return True
