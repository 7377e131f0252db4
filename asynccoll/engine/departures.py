"""Ranks that die or leave, and what that ends. Knows groups and operations, not frames or links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from asynccoll.engine.aborts import Aborts, valid_ranks
from asynccoll.engine.group import Farewell, Group
from asynccoll.engine.operation import Operation
from asynccoll.engine.wire import clipped
from asynccoll.errors import CommunicatorClosed, PeerLost, ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["Departures"]

_GONE: Final = "connection closed without goodbye"


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
                if error is None and left and op.inquest is None and op.awaits(peer):
                    error = self.starved(group, op, peer)
                if error is not None:
                    self.end(op, error)
                elif left and op.inquest is not None:
                    self._aborts.consider(op)

    def unfit(self, group: Group, op: Operation) -> Exception | None:
        """Why ``op`` cannot complete, given who has died or left; None if it can."""
        if not group.lost and not group.left:
            return None
        dead = self.dead(group)
        if dead:
            reason = group.lost[group.members[dead[0]]]
            return PeerLost(dead, reason, op.context(self._engine.now))
        for peer, farewell in group.left.items():
            if op.seq >= farewell.number:
                return self._farewell(group, op, peer, farewell)
        return None

    def starved(self, group: Group, op: Operation, peer: int) -> Exception:
        """``op`` needs bytes of ``peer``, which took part in it, and from which nothing can come any more."""
        farewell = group.left.get(peer)
        if farewell is None:
            dead = group.index[peer]
            return PeerLost([dead], group.lost[peer], op.context(self._engine.now))
        return self._farewell(group, op, peer, farewell)

    def _farewell(self, group: Group, op: Operation, peer: int, farewell: Farewell) -> Exception:
        context = op.context(self._engine.now)
        rank = group.index[peer]
        blamed = set(farewell.lost) - {group.rank}
        if blamed:  # it left because of them: who ends second is never the culprit
            reason = farewell.cause if rank in blamed else f"{_GONE}, says rank {rank}"
            return PeerLost(blamed, reason, context)
        return CommunicatorClosed(rank, context, cause=farewell.cause)

    def blamed(self, group: Group) -> list[int]:
        """Group ranks that are dead as far as this rank has seen or heard."""
        return sorted(group.rumoured.union(self.dead(group)))

    def dead(self, group: Group) -> list[int]:
        """Group ranks that ended without a goodbye."""
        return sorted(group.index[peer] for peer in group.lost if peer not in group.left)

    def end(self, op: Operation, error: Exception) -> None:
        """End ``op`` because of a departure; a loss is told to the other members, who may not have seen it."""
        if isinstance(error, PeerLost):
            self._aborts.lose(op, error)
        else:
            self._aborts.end(op, error)

    def leave(self, group: Group, op: Operation, cause: str) -> None:
        """This rank leaves while ``op`` is under way: because of the dead, if there are any, else of its own accord."""
        context = op.context(self._engine.now)
        blamed = self.blamed(group)
        if blamed:
            self._aborts.lose(op, PeerLost(blamed, _GONE, context))
        else:
            self._aborts.broadcast(op, {"reason": "closed", "cause": clipped(cause, 1024)})
            self._aborts.end(op, CommunicatorClosed(group.rank, context, cause=cause))

    def goodbye(self, peer: int, body: Mapping[str, Any]) -> None:
        """``peer`` leaves in good order: what it has not taken part in cannot complete."""
        numbers, cause, lost = body.get("next"), body.get("cause"), body.get("lost", {})
        if not isinstance(numbers, dict) or not isinstance(cause, str) or not isinstance(lost, dict):
            raise ProtocolError(f"rank {peer} sent a malformed goodbye")
        for comm, group in self._groups.items():
            if peer in group.index:
                number, dead = numbers.get(comm, 0), lost.get(comm, [])
                if not isinstance(number, int) or not valid_ranks(dead, group.size):
                    raise ProtocolError(f"rank {peer} sent a malformed goodbye")
                group.left[peer] = Farewell(number, cause, tuple(dead))
                group.rumoured.update(set(dead) - {group.rank})
                for op in list(group.active.values()):
                    error = self.unfit(group, op)
                    if error is not None:
                        self.end(op, error)
