"""Simulated processes with one communicator each, in one loop and virtual time, and the faults that strike them.

Knows how a fault is done, not which there are to be, nor what the ranks run. See `asynccoll.testing.simulation`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from asynccoll.communicator import Communicator, Options
from asynccoll.sim.driver import Conditions, SimDriver, SimNetwork
from asynccoll.sim.faults import Cancel, Crash, Cut, Fault, Partition, Restart, Slow, Stall
from asynccoll.sim.process import Process, of_the_dead, task_factory
from asynccoll.sim.trace import Trace
from asynccoll.work import Work

__all__ = ["Cluster"]

T = TypeVar("T")


class Cluster:
    """The ranks of one world. Make it inside the running `SimLoop`."""

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
        options: Options = Options(),  # noqa: B008 (immutable)
        liveness_timeout: float | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_task_factory(task_factory)
        self.trace = trace
        self.network = SimNetwork(
            self.loop,
            size,
            seed=seed,
            conditions=conditions,
            liveness_timeout=liveness_timeout,
            trace=trace,
        )
        self.comms = [Communicator(driver, options=options) for driver in self.network.drivers]
        self.processes = [Process() for _ in range(size)]
        self.mains: list[asyncio.Task[Any] | None] = [None] * size
        """What `Cancel` cancels."""
        self.struck: Counter[str] = Counter()
        """Faults that have struck, by kind."""
        self.stopped_for_good: set[int] = set()
        """Ranks that were stopped and will not go on."""
        self.restarts = False
        """A `Restart` has struck."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a rank has died or was stopped for good."""
        self._set: list[Callable[[], None]] = []
        """What calls off each fault that was set."""

    def spawn(self, rank: int, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``coroutine`` as a task of the process of ``rank``."""
        return self.processes[rank].spawn(coroutine)

    @staticmethod
    def of_the_dead(context: Mapping[str, Any]) -> bool:
        """What the loop complains of is a work or a task of a dead process: nobody is left to look at it."""
        found = context.get("future") or context.get("task")
        if isinstance(found, Work):
            pump = found._pump
            return isinstance(pump, SimDriver) and pump.crashed
        return isinstance(found, asyncio.Task) and of_the_dead(found)

    def abandon(self) -> None:
        """Kill every process: the run is given up."""
        self.call_off()
        for rank, process in enumerate(self.processes):
            self.network.drivers[rank].crash()
            process.kill()
            process.thaw()

    # -- faults -------------------------------------------------------------------------------------------

    def set(self, fault: Fault) -> None:
        """Let ``fault`` strike when its moment comes, counted from now."""
        self.when(fault.at, fault.after, fault.where(), lambda: self.strike(fault))

    def when(
        self, at: float | None, after: int | None, ranks: frozenset[int], do: Callable[[], None]
    ) -> None:
        """Call ``do`` in ``at`` seconds, or when ``after`` pieces have moved to or between ``ranks``; with neither, at once."""
        if at is None and after is None:
            do()
            return
        calls_off: list[Callable[[], None]] = []

        def strike() -> None:
            for call_off in calls_off:
                call_off()
            do()

        if at is not None:
            calls_off.append(self.loop.call_later(at, strike).cancel)
        if after is not None:
            calls_off.append(self.network.after(after, ranks, strike))
        self._set += calls_off

    def call_off(self) -> None:
        """Let no fault strike any more."""
        for call_off in self._set:
            call_off()
        self._set.clear()

    def strike(self, fault: Fault) -> None:
        """Do ``fault`` now."""
        network = self.network
        match fault:
            case Crash(rank=rank, reset=reset):
                if not self._kill(rank, reset):
                    return
            case Restart(rank=rank):
                if not self._kill(rank, False):
                    return
                self.restarts = True
            case Stall(rank=rank, seconds=seconds):
                if self.processes[rank].dead or self.processes[rank].frozen:
                    return
                self._freeze(rank, seconds)
            case Slow(rank=rank, delay=delay, piece=piece):
                network.slow(rank, delay, piece)
            case Cancel(rank=rank):
                main = self.mains[rank]
                if main is None or main.done() or self.processes[rank].dead:
                    return
                main.cancel()
            case Cut(one=one, other=other, how="stall", seconds=seconds):
                self._part([(one, other)], seconds)
            case Cut(one=one, other=other, how=how):
                network.sever(one, other, reset=how == "rst")
            case Partition(side=side, seconds=seconds):
                others = [rank for rank in range(len(self.comms)) if rank not in side]
                self._part([(one, other) for one in sorted(side) for other in others], seconds)
        kind = type(fault).__name__.lower()
        self.struck[f"{kind} {fault.how}" if isinstance(fault, Cut) else kind] += 1
        if self.trace is not None:
            self.trace.note(self.loop.time(), f"fault: {_told(fault)}")

    def _kill(self, rank: int, reset: bool) -> bool:
        process = self.processes[rank]
        if process.dead:
            return False
        self.network.crash(rank, reset=reset)
        process.kill()
        if process.frozen:
            process.thaw()
        self.stopped_for_good.discard(rank)
        self.on_end()
        return True

    def _freeze(self, rank: int, seconds: float | None) -> None:
        self.processes[rank].freeze()
        self.network.freeze(rank)
        if seconds is None:
            self.stopped_for_good.add(rank)
            self.on_end()
        else:
            self.loop.call_later(seconds, self._thaw, rank)

    def _thaw(self, rank: int) -> None:
        if not self.processes[rank].dead:
            self.network.thaw(rank)
            self.processes[rank].thaw()

    def _part(self, pairs: list[tuple[int, int]], seconds: float | None) -> None:
        for one, other in pairs:
            self.network.stall(one, other)
        if seconds is not None:
            self.loop.call_later(seconds, self._join, pairs)

    def _join(self, pairs: list[tuple[int, int]]) -> None:
        for one, other in pairs:
            self.network.heal(one, other)


def _told(fault: Fault) -> str:
    """``fault`` as text that is the same in every process: a set has no order."""
    if isinstance(fault, Partition):
        return f"Partition(side={sorted(fault.side)}, seconds={fault.seconds})"
    return str(fault)
