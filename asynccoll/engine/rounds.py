"""The START round: every rank tells what it calls, until each has heard of all. Knows records, not what blocks mean.

Records travel on a graph that depends on the group alone (`asynccoll.algorithms.start`), so that they arrive whatever the ranks
called. No operation is complete before its round is. The blocks of a small reduction that moves along the same graph travel
behind the records (`asynccoll.engine.transfers.Swap`).
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
        if op.key is not None:  # a round trip or more after the call
            op.remaining = self._left(op)
        elif op.limit is not None:
            op.remaining = min(int(op.limit * 1000), wire.NO_DEADLINE - 1)
        if op.swaps and not self._step(op, None):
            return False
        if op.tells[0]:
            self._tell(op, op.remaining)
        return True

    def _tell(self, op: Operation, remaining: int) -> None:
        """Pass on what this rank knows, to those who are to hear it now."""
        digests, round_ = op.digests, op.round
        frame = wire.start_frame(
            round_,
            op.comm,
            op.seq,
            digests.tag,
            (digests.strict, op.value_digest, remaining, op.heard),
            len(op.members),
            op.block,
        )
        for peer in op.tells[round_]:
            self._outgoing.post(peer, frame)

    def receive(self, op: Operation, peer: int, payload: memoryview) -> None:
        """A record arrived: compare it, and pass the round on as far as it goes."""
        turn = op.turns.get(peer)
        if turn is None:
            raise ProtocolError(f"rank {peer} sent a START record, and is not to tell this rank")
        if turn < op.round or (op.early_records is not None and turn in op.early_records):
            raise ProtocolError(f"rank {peer} sent two START records")
        (strict, value, remaining, heard), block = wire.parse_start(payload, len(op.members))
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
        if len(block) != len(op.block):
            raise ProtocolError(f"rank {peer} sent a block of {len(block)} bytes with a START record")
        if remaining < op.remaining:
            self._tighten(op, remaining)
        if turn != op.round:
            if op.early_records is None:
                op.early_records = {}
            op.early_records[turn] = heard, memoryview(bytes(block))
            return
        tells = op.tells
        while True:
            op.heard |= heard
            op.round = turn = turn + 1
            if op.swaps and not self._step(op, block):
                return
            if tells[turn]:
                self._tell(op, self._left(op))
            if turn == len(op.turns):
                if (
                    op.swaps and op.program is not None and not self._step(op, None)
                ):  # it was the last to tell
                    return
                if op.program is None and not op.unsent:
                    self._engine.finish(op)
                return
            if op.early_records is None or turn not in op.early_records:
                return
            heard, block = op.early_records.pop(turn)

    def _tighten(self, op: Operation, remaining: int) -> None:
        """A peer has less time than this rank had at its call."""
        now = self._engine.now
        deadline = now + remaining / 1000
        if op.deadline is None or deadline < op.deadline - 0.001:
            op.deadline, op.limit = deadline, deadline - op.started
            self._engine.expect(deadline)

    def _left(self, op: Operation) -> int:
        """Milliseconds remaining, as a record tells them."""
        if op.deadline is None:
            return wire.NO_DEADLINE
        remaining = int((op.deadline - self._engine.now) * 1000)
        return min(max(0, remaining), wire.NO_DEADLINE - 1)

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
