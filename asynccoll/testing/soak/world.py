"""One run of a plan: its ranks make their calls, its troubles strike, and what came of each call is kept. Judges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from asynccoll.communicator import Communicator, Options
from asynccoll.errors import AsynccollError
from asynccoll.sim.faults import Crash, Cut, Fault, Partition, Slow, Stall
from asynccoll.sim.trace import Trace
from asynccoll.testing.cluster import Cluster
from asynccoll.testing.soak.errors import require
from asynccoll.testing.soak.plans import LIVENESS, LOCAL, Plan, Trouble
from asynccoll.testing.soak.steps import Call, broken, differ

__all__ = ["LONG", "SENTINEL", "World"]

SENTINEL: Final = 77
"""What a rank fills its memory with when it has got it back."""
_CLOSE: Final = 1.1
"""Virtual seconds within which every rank closes, however slow its links are."""
_IMPATIENCE: Final = 10.0
"""Virtual seconds for which a rank that is to leave waits for its call to end."""
LONG: Final = 100_000.0
"""Virtual seconds after which whatever is under way has arrived or will never."""


class World:
    """One run of a plan, in the running `SimLoop`."""

    def __init__(self, plan: Plan, trace: Trace | None = None) -> None:
        self.plan = plan
        self.loop = asyncio.get_running_loop()
        self.cluster = Cluster(
            plan.size,
            seed=plan.seed,
            conditions=plan.conditions,
            options=Options(timeout=None),
            liveness_timeout=LIVENESS,
            trace=trace,
        )
        self.comms = self.cluster.comms
        self.groups: dict[tuple[int, int], Communicator] = {}
        """(rank, group) -> its communicator."""
        self.called: dict[tuple[int, int], float] = {}
        """(rank, step) -> when it was called."""
        self.ends: dict[tuple[int, int], Any] = {}
        """(rank, step) -> result or error."""
        self.returned: list[Any] = []
        """Memory that ranks have got back after an error, filled with `SENTINEL`."""
        self.unhandled: list[str] = []
        """What reached the loop's exception handler."""
        self.struck: list[Trouble] = []
        """Troubles that have come to pass, in order."""
        self.first_strike = 0.0
        """When the first of them did."""
        self.ended: dict[tuple[int, int], float] = {}
        """(rank, step) -> when it ended badly."""
        self.left: set[int] = set()
        """Ranks that left in good order."""
        self.quit: set[tuple[int, int]] = set()
        """(rank, group) for each that left a group only."""
        self._begun: set[tuple[int, int]] = set()
        """(rank, step) that somebody awaits."""
        self.see: Callable[[str], None] = lambda name: None
        """Hears the names of rare branches."""
        self._changed = asyncio.Event()
        self.cluster.on_end = self._changed.set
        self.loop.set_exception_handler(self._on_unhandled)

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self.cluster.of_the_dead(context):
            self.unhandled.append(str(context))

    # -- who is there -------------------------------------------------------------------------------------

    def dead(self) -> set[int]:
        """Ranks that have died."""
        return {rank for rank, process in enumerate(self.cluster.processes) if process.dead}

    def staying(self) -> list[int]:
        """Ranks that run, and have not left."""
        gone = self.dead() | self.cluster.stopped_for_good | self.left
        return [rank for rank in range(self.plan.size) if rank not in gone]

    # -- the program --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the program of every rank to its end, and wait until nothing moves any more."""
        await self.on_all(range(self.plan.size), self._rank)
        await asyncio.sleep(LONG)

    async def on_all(self, ranks: Any, main: Any) -> dict[int, Any]:
        """Run ``main(rank)`` in each rank's process. What came of it, by rank: result or exception; not of the dead and stopped."""
        tasks = {rank: self.cluster.spawn(rank, main(rank)) for rank in ranks}
        for task in tasks.values():
            task.add_done_callback(lambda _: self._changed.set())
        while any(
            not task.done() and rank not in self.cluster.stopped_for_good for rank, task in tasks.items()
        ):
            self._changed.clear()
            await self._changed.wait()
        gone = self.dead() | self.cluster.stopped_for_good
        ends = {}
        for rank, task in tasks.items():
            if task.done():
                error = asyncio.CancelledError() if task.cancelled() else task.exception()
                if rank not in gone:
                    ends[rank] = task.result() if error is None else error
        return ends

    async def _rank(self, rank: int) -> None:
        plan, comm = self.plan, self.comms[rank]
        waits: list[asyncio.Task[None]] = []
        if plan.seed % 2:
            self._make(rank, len(plan.groups))
        for at in plan.orders[rank]:
            await asyncio.sleep(plan.pauses[rank][at])
            step = plan.program.steps[at]
            if step.group is not None and (rank, step.group) in self.quit:
                continue
            if step.group is not None and (rank, step.group) not in self.groups:
                self._make(rank, step.group)
            on = comm if step.group is None else self.groups[rank, step.group]
            leaving = self._call(rank, at, on, waits)
            if leaving is not None:
                await leaving
                if step.group is not None and (rank, step.group) in self.quit:
                    await on.close()
                else:
                    await comm.close()
                    break
        await asyncio.gather(*waits)

    def _make(self, rank: int, last: int) -> None:
        """Make the groups up to this one: several of the same ranks are told apart by their order."""
        for number, members in enumerate(self.plan.groups[: last + 1]):
            if rank in members and (rank, number) not in self.groups:
                made = self.comms[rank].new_group(members)
                assert made is not None
                self.groups[rank, number] = made

    def _call(
        self, rank: int, at: int, comm: Communicator, waits: list[asyncio.Task[None]]
    ) -> asyncio.Future[None] | None:
        """Make the call of a step. Where the rank is to leave after it: what tells when."""
        plan = self.plan
        mine = [trouble for trouble in plan.of(at) if trouble.rank == rank]
        kinds = {trouble.kind: trouble for trouble in mine}
        call = plan.program.call(at, comm.rank)
        if rank in plan.limited and any(trouble.kind == "late" for trouble in plan.of(at)):
            call.options["timeout"] = plan.timeout
        if "hurry" in kinds:
            call.options["timeout"] = kinds["hurry"].seconds
        if "mismatch" in kinds:
            call = differ(plan.program, at, call, kinds["mismatch"].detail)
        elif "refusal" in kinds:
            call.options["timeout"] = "soon"
        elif "raise" in kinds:
            call = broken(call, lambda: ValueError("raised on purpose"))
        if plan.keys[at] is not None:
            call.options["key"] = plan.keys[at]
        self.called[rank, at] = self.loop.time()
        work = _exchange(comm, *call.args) if call.verb == "exchange" else _started(comm, call)
        if call.args and isinstance(call.args[0], np.ndarray) and call.lent is not call.args[0]:
            call.args[0][...] = SENTINEL  # what counts is the content at the call
        scope = asyncio.timeout(None)
        wait = asyncio.ensure_future(self._wait(rank, at, work, call.lent, scope))
        waits.append(wait)
        leaving: asyncio.Future[None] | None = None
        for trouble in mine:
            if trouble.kind in ("leave", "quit"):
                leaving = leaving or self.loop.create_future()
                self._set(trouble, partial(self._leave, trouble, work, leaving))
            elif trouble.kind == "cancel":
                self._set(trouble, partial(self._cancel, trouble, work, wait, scope))
            elif trouble.kind in LOCAL:
                self.struck.append(trouble)
            else:
                self._set(trouble)
        return leaving

    async def _wait(self, rank: int, at: int, work: Any, lent: Any, scope: asyncio.Timeout) -> None:
        process = self.cluster.processes[rank]
        self._begun.add((rank, at))
        try:
            async with scope:
                self.ends[rank, at] = await work
        except (Exception, asyncio.CancelledError) as error:
            if process.dead:
                raise
            self.ends[rank, at], self.ended[rank, at] = error, self.loop.time()
            if lent is not None and work.done():
                lent[...] = SENTINEL
                self.returned.append(lent)

    # -- troubles -----------------------------------------------------------------------------------------

    def begin(self, stage: str) -> None:
        """The troubles that come after the last step, in this stage of it, are set now."""
        for trouble in self.plan.of(len(self.plan.program.steps)):
            if trouble.kind != "leave" and trouble.detail == stage:
                self._set(trouble)

    def _set(self, trouble: Trouble, do: Callable[[], None] | None = None) -> None:
        """Let a trouble strike when its moment comes. ``do``: how, where it is no fault of the network or of a process."""

        def strike() -> None:
            if self.cluster.processes[trouble.rank].dead:
                return
            self.first_strike = self.first_strike if self.struck else self.loop.time()
            self.struck.append(trouble)
            if do is None:
                self.cluster.strike(self._fault(trouble))
            else:
                do()

        self.cluster.when(trouble.delay, trouble.pieces or None, frozenset([trouble.rank]), strike)

    def _leave(self, trouble: Trouble, work: asyncio.Future[Any], leaving: asyncio.Future[None]) -> None:
        """The rank begins to leave, now or when its call has ended."""

        def go(_: object = None) -> None:
            if leaving.done() or self.cluster.processes[trouble.rank].dead:
                return
            group = self.plan.program.steps[trouble.step].group
            if trouble.kind == "quit" and group is not None:
                self.quit.add((trouble.rank, group))
            else:
                self.left.add(trouble.rank)
            leaving.set_result(None)

        if trouble.detail == "now":
            go()
        else:
            work.add_done_callback(go)
            self.loop.call_later(
                _IMPATIENCE, go
            )  # two that wait for one another before they call on would wait for ever

    def _cancel(self, trouble: Trouble, work: Any, wait: Any, scope: Any) -> None:
        if work.done():
            work.cancel()
            self.see("cancel of what is complete")
        if work.done() or self.cluster.processes[trouble.rank].frozen:
            return
        begun = (trouble.rank, trouble.step) in self._begun
        if (
            trouble.detail == "work" or not begun
        ):  # a task that is cancelled before it begins would not hear of it
            work.cancel()
        elif trouble.detail == "task":
            wait.cancel()
        elif scope.when() is None:
            scope.reschedule(self.loop.time())

    def _fault(self, trouble: Trouble) -> Fault:
        rank, other, seconds = trouble.rank, trouble.other, trouble.seconds
        match trouble.kind:
            case "crash":
                return Crash(rank, trouble.pieces % 3 == 0)
            case "stop":
                return Stall(rank)
            case "pause":
                return Stall(rank, seconds)
            case "fin":
                return Cut(rank, other, "fin")
            case "rst":
                return Cut(rank, other, "rst")
            case "stall":
                return Cut(rank, other, "stall", seconds)
            case "partition":
                side = frozenset(one for one in range(self.plan.size) if other >> one & 1)
                return Partition(side, seconds)
        return Slow(rank)

    # -- the end ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close every rank that still can, whatever goes wrong meanwhile; what is stopped for good is killed."""
        self._tidy()
        before, began = len(self.struck), self.loop.time()
        self.begin("close")
        await self.on_all(
            [rank for rank in range(self.plan.size) if rank not in self.dead()],
            lambda rank: self.comms[rank].close(),
        )
        seconds = self.loop.time() - began
        require(seconds < _CLOSE or len(self.struck) > before, f"closing took {seconds:g} s")
        await asyncio.sleep(LONG)
        self._tidy()
        await asyncio.sleep(LONG)

    def _tidy(self) -> None:
        """No trouble that was set strikes any more, and nobody is stopped for good."""
        self.cluster.call_off()
        for rank in sorted(self.cluster.stopped_for_good):
            self.cluster.strike(Crash(rank))


def is_ours(error: BaseException) -> bool:
    """``error`` is one that a rank may get, by its type."""
    return isinstance(error, AsynccollError | asyncio.CancelledError | TimeoutError)


def _started(comm: Communicator, call: Call) -> asyncio.Future[Any]:
    work: asyncio.Future[Any] = getattr(comm, call.verb)(*call.args, **call.options)
    return work


def _exchange(comm: Communicator, value: Any, to: int, source: int, tag: int) -> asyncio.Future[Any]:
    """Send to one rank and receive from another: the two results."""
    return asyncio.gather(comm.send(value, to, tag), comm.recv(source, tag))
