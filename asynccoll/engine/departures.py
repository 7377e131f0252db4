"""Ranks that die or leave, and what that ends. Knows groups and operations, not frames or links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from asynccoll.engine.aborts import Aborts, valid_ranks
from asynccoll.engine.group import Farewell, Group
from asynccoll.engine.operation import Operation
from asynccoll.engine.wire import KEYED, MESSAGES, clipped, goodbye_frame
from asynccoll.errors import CommunicatorClosed, PeerLost, ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["Departures"]

_AT_ONCE: Final = 512
"""Communicators beside the world that one GOODBYE tells of."""
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
            self._engine.mail.lost(group, peer)
            for op in list(group.active.values()):
                if group.active.get(op.seq) is not op:
                    continue  # ended with another meanwhile
                error = self.unfit(group, op)
                if error is None and left and op.inquest is None and op.awaits(peer):
                    error = self.starved(group, op, peer)
                if error is not None:
                    self.end(op, error)
                elif left and op.inquest is not None:
                    self._aborts.consider(op)
            self._engine.keys.departed(group)

    def unfit(self, group: Group, op: Operation) -> Exception | None:
        """Why ``op`` cannot complete, given who has died or left; None if it can."""
        if not group.lost and not group.left:
            return None
        needs = op.members if op.needs is None else op.needs
        dead = [rank for rank in self.dead(group) if group.members[rank] in needs]
        if dead:
            reason = group.lost[group.members[dead[0]]]
            return PeerLost(dead, reason, op.context(self._engine.now))
        for peer, farewell in group.left.items():
            number = farewell.keyed if KEYED <= op.seq < MESSAGES else farewell.number
            if op.seq >= number and peer in needs:
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
        if group.active.get(op.seq) is not op:
            return  # ended with another meanwhile
        context = op.context(self._engine.now)
        blamed = self.blamed(group)
        if blamed:
            self._aborts.lose(op, PeerLost(blamed, _GONE, context))
        else:
            self._aborts.broadcast(op, {"reason": "closed", "cause": clipped(cause, 1024)})
            self._aborts.end(op, CommunicatorClosed(group.rank, context, cause=cause))

    def farewells(self, cause: str, groups: Iterable[Group]) -> list[bytes]:
        """What to say when leaving the mesh: a frame holds so many communicators, so further ones are left one by one before."""
        world, *others = groups
        later = others[:_AT_ONCE]
        return [self.farewell(cause, [group]) for group in others[_AT_ONCE:]] + [
            self.farewell(cause, [world, *later])
        ]

    def farewell(self, cause: str, groups: Iterable[Group]) -> bytes:
        """GOODBYE from these communicators; from all that there are, if the world is among them."""
        groups = list(groups)
        body = {
            "cause": clipped(cause, 1024),
            "next": {group.comm: group.next_seq for group in groups},
            "keyed": {group.comm: group.next_keyed for group in groups},
            "lost": {group.comm: self.blamed(group) for group in groups},
        }
        return goodbye_frame(groups[0].comm, body)

    def goodbye(self, peer: int, comm: int, body: Mapping[str, Any]) -> None:
        """``peer`` leaves the mesh (``comm`` 0) or one communicator: what it has not taken part in cannot complete."""
        numbers, cause, lost = body.get("next"), body.get("cause"), body.get("lost", {})
        keyed = body.get("keyed", {})
        if not isinstance(numbers, dict) or not isinstance(keyed, dict) or not isinstance(lost, dict):
            raise ProtocolError(f"rank {peer} sent a malformed goodbye")
        if not isinstance(cause, str):
            raise ProtocolError(f"rank {peer} sent a malformed goodbye")
        for group in list(self._groups.values()):
            if group.comm not in numbers and peer in group.left:
                continue  # it has said so before
            if peer in group.index and comm in (0, group.comm):
                number, dead = numbers.get(group.comm, 0), lost.get(group.comm, [])
                granted = keyed.get(group.comm, KEYED)
                whole = type(number) is int and type(granted) is int
                if not whole or min(number, granted) < 0 or not valid_ranks(dead, group.size):
                    raise ProtocolError(f"rank {peer} sent a malformed goodbye")
                group.left[peer] = Farewell(number, cause, tuple(dead), granted)
                group.rumoured.update(set(dead) - {group.rank})
                for op in list(group.active.values()):
                    error = self.unfit(group, op)
                    if error is not None and group.active.get(op.seq) is op:
                        self.end(op, error)
                self._engine.keys.departed(group)

    def inherit(self, group: Group, world: Group) -> None:
        """A communicator is made: who has died or left the mesh before is missing in it from the start."""
        for member in group.members:
            if member in world.left:
                group.left[member] = world.left[member]._replace(number=0, lost=(), keyed=KEYED)
            if member in world.lost:
                group.lost[member] = world.lost[member]
