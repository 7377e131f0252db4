"""Ranks that die or leave, and what that ends. Knows groups and operations, not frames or links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asynccoll.engine.aborts import Aborts
from asynccoll.engine.group import Group
from asynccoll.engine.operation import Operation
from asynccoll.errors import CommunicatorClosed, PeerLost, ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["Departures"]


class Departures:
    """What one engine does when peers go."""

    def __init__(self, engine: Engine, groups: Mapping[int, Group], aborts: Aborts) -> None:
        self._engine = engine
        self._groups = groups
        self._aborts = aborts

    def lost(self, peer: int, reason: str) -> None:
        """The connection to ``peer`` has ended: fail what needs it."""
        for group in self._groups.values():
            if peer not in group.index or peer in group.lost:
                continue
            left = peer in group.left
            group.lost[peer] = reason
            for op in list(group.active.values()):
                error = self.unfit(group, op)
                if error is not None:
                    self.end(op, error)
                elif left and op.inquest is not None:
                    self._aborts.consider(op)

    def unfit(self, group: Group, op: Operation) -> Exception | None:
        """Why ``op`` cannot complete, given who has died or left; None if it can."""
        dead = [peer for peer in group.lost if peer not in group.left]
        if dead:
            ranks = [group.index[peer] for peer in dead]
            return PeerLost(ranks, group.lost[dead[0]], op.context(self._engine.now))
        for peer, (number, cause) in group.left.items():
            if op.seq >= number:
                return CommunicatorClosed(group.index[peer], op.context(self._engine.now), cause=cause)
        return None

    def end(self, op: Operation, error: Exception) -> None:
        """End ``op`` because of a departure; a loss is told to the other members, who may not have seen it."""
        if isinstance(error, PeerLost):
            self._aborts.lose(op, error)
        else:
            self._aborts.end(op, error)

    def goodbye(self, peer: int, body: Mapping[str, Any]) -> None:
        """``peer`` leaves in good order: what it has not taken part in cannot complete."""
        numbers, cause = body.get("next"), body.get("cause")
        if not isinstance(numbers, dict) or not isinstance(cause, str):
            raise ProtocolError(f"rank {peer} sent a malformed goodbye")
        for comm, group in self._groups.items():
            if peer in group.index:
                number = numbers.get(comm, 0)
                if not isinstance(number, int):
                    raise ProtocolError(f"rank {peer} sent a malformed goodbye")
                group.left[peer] = (number, cause)
                for op in list(group.active.values()):
                    error = self.unfit(group, op)
                    if error is not None:
                        self.end(op, error)
