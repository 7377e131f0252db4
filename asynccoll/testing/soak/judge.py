"""Whether what came of a run is what its plan allows. Knows the rules of the library, not how a world is run.

With one trouble the rules are strict: who is named, who has a result, whose answers are there. With several each end must have its
cause among them.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from asynccoll.errors import (
    CollectiveCancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    PeerLost,
    RemoteError,
)
from asynccoll.testing.soak.errors import Stray, Wrong, require
from asynccoll.testing.soak.plans import LIVENESS, LOCAL, Trouble
from asynccoll.testing.soak.steps import MESSAGES
from asynccoll.testing.soak.world import World, is_ours

__all__ = ["Judge"]

_SILENT: Final = ("pause", "stop", "stall", "partition")
"""Troubles that make a rank silent."""
_PARTED: Final = {"stall", "partition", "fin", "rst"}
"""Troubles that may leave two living ranks without a way to one another, so that each takes the other for dead."""


class Judge:
    """The verdict on one world whose program has ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = world.plan
        self.dead = world.dead() | world.cluster.stopped_for_good
        self.touched = self._touched()
        """Living ranks that the others may take for dead."""

    def _touched(self) -> set[int]:
        """Ranks at the ends of links that broke or were silent for too long."""
        struck = self.world.struck
        silent = [trouble for trouble in struck if trouble.kind in _SILENT]
        touched: set[int] = set()
        for trouble in struck:
            short = trouble.seconds is not None and trouble.seconds < LIVENESS and len(silent) < 2
            if trouble.kind in ("fin", "rst") or (trouble.kind == "stall" and not short):
                touched |= {trouble.rank, trouble.other}
            elif trouble.kind in ("pause", "stop") and not short:
                touched.add(trouble.rank)
            elif trouble.kind == "partition" and not short:
                touched |= set(range(self.plan.size))
        if any(trouble.kind in (*_SILENT, "slow") for trouble in struck):
            touched |= self.world.left  # its goodbye may have come too late
        return touched

    # -- the program --------------------------------------------------------------------------------------

    def program(self) -> None:
        """Judge each call of the program."""
        world, plan = self.world, self.plan
        for (rank, at), end in world.ends.items():
            if not isinstance(end, BaseException):
                self._judge_result(rank, at, end)
                continue
            where = f"rank {rank}, step {at}: {end!r}"
            if not is_ours(end) and not self._mine(rank, at, end):
                raise Stray(where)
            self._judge_error(rank, at, end, where)
        for rank in range(plan.size):
            if rank not in self.dead and rank not in world.left:
                for at in plan.orders[rank]:
                    quitted = (rank, plan.program.steps[at].group) in world.quit
                    require(quitted or (rank, at) in world.ends, f"rank {rank} has not ended step {at}")
        if len(plan.troubles) == 1:
            self._only(plan.troubles[0].kind)

    def _mine(self, rank: int, at: int, error: BaseException) -> bool:
        """The rank's own argument is wrong."""
        return isinstance(error, ValueError) and any(
            trouble.kind == "refusal" and trouble.rank == rank for trouble in self.plan.of(at)
        )

    def _judge_result(self, rank: int, at: int, result: Any) -> None:
        plan, world = self.plan, self.world
        members = plan.program.steps[at].members
        if not plan.program.right(at, members.index(rank), result):
            raise Wrong(f"wrong result, rank {rank}, step {at}: {result!r}")
        for trouble in plan.of(at):
            if trouble.kind in ("mismatch", "refusal") and (trouble.rank, at) in world.called:
                raise Wrong(f"rank {rank} has a result of step {at} although {trouble}")
        if plan.program.steps[at].kind != MESSAGES and not all(
            (member, at) in world.called for member in members
        ):
            raise Wrong(f"rank {rank} has a result of step {at} although not all ranks called it")

    def _judge_error(self, rank: int, at: int, end: BaseException, where: str) -> None:
        plan, world = self.plan, self.world
        members = plan.program.steps[at].members
        here = [trouble for trouble in plan.of(at) if trouble in world.struck]
        kinds = {(trouble.kind, trouble.rank) for trouble in here}
        sole = len(plan.troubles) == 1
        match end:
            case CollectiveCancelled():
                require(("cancel", members[end.origin]) in kinds, where)
            case asyncio.CancelledError():
                require(("cancel", rank) in kinds, where)
            case RemoteError():
                origin = members[end.origin]
                require(bool({("refusal", origin), ("raise", origin)} & kinds), where)
                require(end.type_name == "ValueError", where)
            case ValueError():
                require(("refusal", rank) in kinds, where)
            case CollectiveMismatch():
                odd = [trouble for trouble in here if trouble.kind == "mismatch"]
                require(bool(odd), where)
                if sole:
                    self._judge_mismatch(rank, at, end, odd[0].detail, members.index(odd[0].rank), where)
            case CollectiveTimeout():
                require(any(trouble.kind in ("late", "hurry") for trouble in plan.of(at)), where)
                if sole and here[0].kind == "late":
                    self._judge_late(at, end, where)
            case TimeoutError():
                require(("cancel", rank) in kinds, where)
            case CommunicatorClosed():
                origin, group = members[end.origin], plan.program.steps[at].group
                require(origin in world.left or (origin, group) in world.quit, where)
            case PeerLost():
                self._judge_lost({members[peer] for peer in end.peers}, where)
                if plan.program.steps[at].kind == MESSAGES:
                    place, size = members.index(rank), len(members)
                    near = {place, (place + 1) % size, (place - 1) % size}
                    require(end.peers <= near, f"a rank that has no part in it is named, {where}")
            case _:
                require(False, where)

    def _judge_lost(self, peers: set[int], where: str) -> None:
        require(bool(peers), where)
        require(peers <= self.dead | self.touched, f"a living rank is named, {where}")

    def _judge_mismatch(
        self, rank: int, at: int, end: CollectiveMismatch, detail: str, odd: int, where: str
    ) -> None:
        plan, world = self.plan, self.world
        members = plan.program.steps[at].members
        require(end.field == detail, where)
        value = end.values.get(odd)
        require(
            all(found != value for other, found in end.values.items() if other != odd), f"values, {where}"
        )
        calls = [world.called[member, at] for member in members]
        if max(calls) - min(calls) < 0.2:
            require(sorted(end.values) == list(range(len(members))), f"answers are missing, {where}")
        else:
            require({members.index(rank), odd} <= set(end.values), f"own answers are missing, {where}")

    def _judge_late(self, at: int, end: CollectiveTimeout, where: str) -> None:
        members = self.plan.program.steps[at].members
        deadline = self._deadline(at)
        # Of a keyed step rank 0 says who is missing, who may have called while the call was on its way there.
        slack = 0.02 if self.plan.keys[at] is None else 0.15
        for missing in end.missing:
            require(self.world.called[members[missing], at] > deadline - slack, f"not missing, {where}")

    def _only(self, kind: str) -> None:
        """What holds beyond each single end when there was one trouble."""
        world, plan = self.world, self.plan
        trouble = plan.troubles[0]
        at = trouble.step
        if kind in LOCAL and kind != "raise" and trouble in world.struck:
            elsewhere = [
                end for (_, step), end in world.ends.items() if step != at and isinstance(end, BaseException)
            ]
            require(not elsewhere, f"errors in other steps: {elsewhere}")
        if kind == "cancel" and not isinstance(world.ends[trouble.rank, at], BaseException):
            errors = [
                end for (_, step), end in world.ends.items() if step == at and isinstance(end, Exception)
            ]
            require(not errors, f"the cancel came too late, yet others failed: {errors}")
        if kind == "late":
            self._judge_times(at)
        conditions = plan.conditions
        if conditions.delay <= 0.002 and min(conditions.piece, conditions.buffer) >= 1000:
            self._judge_notice(trouble)

    def _judge_notice(self, trouble: Trouble) -> None:
        """Over quick links a loss ends what it ends within a second, silence within the liveness timeout and a second."""
        world = self.world
        for (rank, at), end in world.ends.items():
            if isinstance(end, PeerLost):
                began = max(world.first_strike, world.called[rank, at])
                if trouble.kind == "pause" and rank == trouble.rank:
                    began = max(began, world.first_strike + (trouble.seconds or 0.0))
                limit = 1.0 + (LIVENESS if trouble.kind in _SILENT else 0.0)
                seconds = world.ended[rank, at] - began
                require(
                    seconds <= limit,
                    f"rank {rank} hears of {trouble} after {seconds:g} s, step {at}: {end!r}",
                )

    def _judge_times(self, at: int) -> None:
        """Everyone in time: everyone has a result. Someone too late: nobody has."""
        world, members = self.world, self.plan.program.steps[at].members
        if not self.plan.limited & set(members):
            return
        deadline = self._deadline(at)
        last = max(world.called[rank, at] for rank in members)
        results = [not isinstance(world.ends[rank, at], BaseException) for rank in members]
        if last > deadline + 0.02:
            require(not any(results), f"a result although a rank called {last - deadline} s too late")
        if last < deadline - 0.02 and not self.plan.conditions.delay:
            require(all(results), f"a timeout although all ranks called {deadline - last} s before it")

    def _deadline(self, at: int) -> float:
        members = self.plan.program.steps[at].members
        limited = [rank for rank in members if rank in self.plan.limited]
        return min(self.world.called[rank, at] for rank in limited) + self.plan.timeout

    # -- afterwards ---------------------------------------------------------------------------------------

    def probe(self, ends: dict[int, Any]) -> dict[int, frozenset[int]]:
        """Judge what each rank that stays gets from a barrier of the world. Whom each takes for lost, by rank."""
        world = self.world
        lost: dict[int, frozenset[int]] = {}
        for rank, end in ends.items():
            where = f"rank {rank} afterwards: {end!r}"
            if isinstance(end, PeerLost):
                lost[rank] = end.peers
                self._judge_lost(set(end.peers), where)
            elif isinstance(end, CommunicatorClosed):
                require(end.origin in world.left, where)
            elif isinstance(end, BaseException):
                require(not is_ours(end), where)
                raise Stray(where)
            else:
                lost[rank] = frozenset()
        return lost

    def shrunk(self, ends: dict[int, Any], lost: dict[int, frozenset[int]], quiet: bool) -> None:
        """Judge what the survivors got from `shrink`, given whom each took for lost. ``quiet``: nothing went wrong meanwhile."""
        world, size = self.world, self.plan.size
        groups: dict[int, tuple[int, ...]] = {}
        for rank, end in ends.items():
            where = f"rank {rank} shrinks: {end!r}"
            if isinstance(end, tuple):
                groups[rank] = end
                require(not set(end) & world.left, where)
            elif isinstance(end, PeerLost):
                self._judge_lost(set(end.peers), where)
            elif isinstance(end, CollectiveTimeout):
                require(not quiet, where)
            else:
                require(not isinstance(end, BaseException) or is_ours(end), where)
                raise Stray(where)
        kinds = {trouble.kind for trouble in world.struck}
        for rank, group in groups.items():
            for other, theirs in groups.items():
                together = rank in theirs and other in group
                require(not together or group == theirs or not quiet, f"{rank} has {group}, {other} {theirs}")
                if not kinds & {"fin", "rst"}:  # what is cut in sight may fall apart, what is silent may not
                    require(bool(set(group) & set(theirs)), f"two parts go on: {group} and {theirs}")
        if quiet:
            for rank, end in ends.items():
                out = lost.get(rank, frozenset())
                gone = out | world.left
                if size - len(gone) > len(out):
                    require(rank in groups, f"a majority may go on, rank {rank}: {end!r}")
                    whole = tuple(one for one in range(size) if one not in gone)
                    require(groups[rank] == whole, f"rank {rank} goes on with {groups[rank]}, not {whole}")

    def agreed(self, ends: dict[int, Any]) -> dict[int, frozenset[int]]:
        """The same, when all has settled: the ranks agree. (Of one that has left, only some may think that it died.)"""
        world, lost = self.world, self.probe(ends)
        for rank, peers in lost.items():
            for other, others in lost.items():
                if rank in peers or other in others:
                    continue  # evicted, it knows of no other
                if other not in peers and rank not in others:
                    require(
                        peers - world.left == others - world.left,
                        f"rank {rank} takes {set(peers)} for lost, rank {other} {set(others)}",
                    )
        parted = {"stall", "partition"} if len(self.plan.troubles) == 1 < self.plan.size - 1 else _PARTED
        if not any(trouble.kind in parted for trouble in world.struck) and not world.left:
            out = frozenset(self.dead | {rank for rank, peers in lost.items() if rank in peers})
            for rank, peers in lost.items():
                require(
                    rank in out or peers == out, f"rank {rank} takes {set(peers)} for lost, not {set(out)}"
                )
        return lost
