"""Ranks that die or leave, and what that ends. Knows groups and operations, not frames or links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from asynccoll.engine.aborts import Aborts
from asynccoll.engine.group import Farewell, Group
from asynccoll.engine.losses import Losses
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

    def __init__(self, engine: Engine, groups: Mapping[int, Group], losses: Losses, aborts: Aborts) -> None:
        self._engine = engine
        self._groups = groups
        self._losses = losses
        self._aborts = aborts

    def ended(self, peer: int, reason: str) -> None:
        """The connection to ``peer`` has ended. What that ends is known at once only where it has said goodbye."""
        for group in self._groups.values():
            if peer not in group.index or peer in group.lost:
                continue
            group.lost[peer] = reason
            self._engine.mail.lost(group, peer)
            left = peer in group.left
            for op in list(group.active.values()):
                if group.active.get(op.seq) is not op:
                    continue  # ended with another meanwhile
                if left and op.inquest is not None:
                    self._aborts.consider(op)
                elif left and op.awaits(peer):
                    self.starve(group, op, peer)
            self._engine.keys.departed(group)

    def evicted(self, ranks: Iterable[int]) -> None:
        """It is agreed that these world ranks are dead: end what needs them."""
        for group in self._groups.values():
            for rank in ranks:
                if rank in group.index and rank not in group.lost:
                    group.lost[rank] = self._losses.out[rank].reason
                    self._engine.mail.lost(group, rank)
        for group in self._groups.values():
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """End every operation of the group that cannot complete."""
        for op in list(group.active.values()):
            if group.active.get(op.seq) is not op:
                continue  # ended with another meanwhile
            error = self.unfit(group, op)
            if error is not None:
                self._aborts.end(op, error)
            elif op.inquest is not None:
                self._aborts.consider(op)
            else:
                for peer in group.left:
                    if peer in group.lost and op.awaits(peer):
                        self.starve(group, op, peer)
                        break
        if group.lost or group.left:
            self._engine.keys.departed(group)

    def unfit(self, group: Group, op: Operation) -> Exception | None:
        """Why ``op`` cannot complete, given who has died or left; None if it can, or if that is not decided yet."""
        losses = self._losses
        if not group.left and not losses.out:
            return None
        needs = op.members if op.needs is None else op.needs
        # Also those whose goodbye this rank has heard: who has not gives up what they took part in, and others wait for it.
        dead = [rank for rank in needs if rank in losses.out]
        if losses.out.keys() >= {self._engine.rank}:
            dead = [self._engine.rank]
        if dead:
            ranks = sorted(group.index[rank] for rank in dead)
            reason = losses.out[group.members[ranks[0]]].reason
            return self.error(group, ranks, reason, op)
        if self._undecided(op):
            return None
        for peer, farewell in group.left.items():
            number = farewell.keyed if KEYED <= op.seq < MESSAGES else farewell.number
            if op.seq >= number and peer in needs:
                return self._farewell(group, op, peer, farewell)
        return None

    def starve(self, group: Group, op: Operation, peer: int) -> None:
        """``op`` needs bytes of ``peer``, whose connection has ended: it ends if ``peer`` has left, else with the verdict."""
        farewell = group.left.get(peer)
        if farewell is not None and not self._undecided(op):
            self._aborts.end(op, self._farewell(group, op, peer, farewell))

    def _undecided(self, op: Operation) -> bool:
        """Ranks that ``op`` needs are suspected: who leaves because of them is not the culprit."""
        losses = self._losses
        return losses.deadline is not None and not losses.suspects().isdisjoint(
            op.members if op.needs is None else op.needs
        )

    def error(self, group: Group, ranks: Iterable[int], reason: str, op: Operation) -> PeerLost:
        """The error that ends ``op`` because these group ranks are lost."""
        ranks, known = list(ranks), self._engine.peers.addresses
        addresses = {rank: known[group.members[rank]] for rank in ranks if group.members[rank] in known}
        return PeerLost(ranks, reason, op.context(self._engine.now), addresses=addresses)

    def _farewell(self, group: Group, op: Operation, peer: int, farewell: Farewell) -> Exception:
        context = op.context(self._engine.now)
        rank = group.index[peer]
        if farewell.ended:
            return self.error(group, [rank], farewell.cause, op)
        return CommunicatorClosed(rank, context, cause=farewell.cause)

    def blamed(self, group: Group) -> list[int]:
        """Group ranks that are dead as far as this rank has seen or heard."""
        ranks = self._losses.suspects() | self._losses.out.keys()
        return sorted(group.index[rank] for rank in ranks if rank in group.index)

    def leave(self, group: Group, op: Operation, cause: str, ended: bool = False) -> None:
        """This rank leaves while ``op`` is under way: because of the dead, if there are any, else of its own accord.

        ``ended``: its process ends and it has not closed, so that it is lost to the others.
        """
        if group.active.get(op.seq) is not op:
            return  # ended with another meanwhile
        context = op.context(self._engine.now)
        blamed = self.blamed(group)
        if blamed:  # the others know of them
            self._aborts.end(op, self.error(group, blamed, _GONE, op))
            return
        self._aborts.broadcast(op, {"reason": "closed", "cause": clipped(cause, 1024), "ended": ended})
        self._aborts.end(op, CommunicatorClosed(group.rank, context, cause=cause))

    def farewells(self, cause: str, groups: Iterable[Group], ended: bool) -> list[bytes]:
        """What to say when leaving the mesh: a frame holds so many communicators, so further ones are left one by one before."""
        world, *others = groups
        later = others[:_AT_ONCE]
        return [self.farewell(cause, [group], ended) for group in others[_AT_ONCE:]] + [
            self.farewell(cause, [world, *later], ended)
        ]

    def farewell(self, cause: str, groups: Iterable[Group], ended: bool = False) -> bytes:
        """GOODBYE from these communicators; from all that there are, if the world is among them."""
        groups = list(groups)
        body = {
            "cause": clipped(cause, 1024),
            "next": {group.comm: group.next_seq for group in groups},
            "keyed": {group.comm: group.next_keyed for group in groups},
            "ended": ended,
        }
        return goodbye_frame(groups[0].comm, body)

    def goodbye(self, peer: int, comm: int, body: Mapping[str, Any]) -> None:
        """``peer`` leaves the mesh (``comm`` 0) or one communicator: what it has not taken part in cannot complete."""
        numbers, cause, ended = body.get("next"), body.get("cause"), body.get("ended", False)
        keyed = body.get("keyed", {})
        if not isinstance(numbers, dict) or not isinstance(keyed, dict):
            raise ProtocolError(f"rank {peer} sent a malformed goodbye")
        if not isinstance(cause, str) or not isinstance(ended, bool):
            raise ProtocolError(f"rank {peer} sent a malformed goodbye")
        for group in list(self._groups.values()):
            if group.comm not in numbers and peer in group.left:
                continue  # it has said so before
            if peer in group.index and comm in (0, group.comm):
                number, granted = numbers.get(group.comm, 0), keyed.get(group.comm, KEYED)
                if type(number) is not int or type(granted) is not int or min(number, granted) < 0:
                    raise ProtocolError(f"rank {peer} sent a malformed goodbye")
                group.left[peer] = Farewell(number, cause, granted, ended)
                self._settle(group)

    def survivors(self, members: Iterable[int], comm: int) -> tuple[int, ...]:
        """Which of these world ranks, the members of ``comm``, are alive and have not left."""
        left = self._groups[comm if comm in self._groups else 0].left
        return tuple(rank for rank in members if rank not in self._losses.out and rank not in left)

    def may_go_on(self, members: Sequence[int], comm: int) -> PeerLost | None:
        """Why this rank may not go on with the survivors of these world ranks; None if it may. Its numbers are their places here.

        Ranks that have fallen silent may be alive on the other side of a partition, and think the same of this side: only one side
        may go on, the larger one, or of equal halves that with the lowest rank.
        """
        own, out = self._engine.rank, self._losses.out
        if own in out:
            return PeerLost([members.index(own)], out[own].reason)
        here = [members.index(rank) for rank in self.survivors(members, comm)]
        there = [at for at, rank in enumerate(members) if rank in out and self._losses.silent(rank)]
        if there and (len(here), -min(here)) < (len(there), -min(there)):
            sides = f"{len(there)} ranks there, {len(here)} here"
            return PeerLost(
                there,
                f"they are silent, and may be alive behind a broken network: {sides}, and only the larger part may go on, "
                "or of equal halves the one with the lowest rank",
                remedy="Close this communicator and end here: the others may be going on.",
            )
        return None

    def inherit(self, group: Group, world: Group) -> None:
        """A communicator is made: who has died or left the mesh before is missing in it from the start."""
        for member in group.members:
            if member in world.left:
                group.left[member] = world.left[member]._replace(number=0, keyed=KEYED)
            if member in world.lost:
                group.lost[member] = world.lost[member]
