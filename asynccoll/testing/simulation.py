"""`Simulation`: a user's own program on simulated ranks, with faults, in virtual time. Knows how to run one, not what it does."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Literal

from asynccoll.communicator import Communicator, Options, seconds
from asynccoll.sim.driver import Conditions
from asynccoll.sim.faults import Fault, checked, draw_conditions, draw_faults
from asynccoll.sim.loop import SimLoop, Stuck
from asynccoll.sim.trace import Trace
from asynccoll.testing.cluster import Cluster

__all__ = ["Crashed", "Simulation", "Stopped"]

_MOST: Final = 4
"""Faults that ``faults="random"`` draws at most."""


class Crashed(Exception):
    """In the place of a rank's result: its process died by a fault."""


class Stopped(Exception):
    """In the place of a rank's result: its process was stopped by a fault, and never went on."""


class Simulation:
    """``n`` ranks in one process and virtual time, over links that a seed makes slow, split and broken.

    The real engine runs, over links in memory. The same arguments give the same run, piece for piece: `trace_hash` says so.

        sim = Simulation(4, seed=7, faults=[Crash(rank=2, at=0.5)])
        results = sim.run(main)  # async def main(comm): once on each rank

    Args:
        n: world size.
        seed: draws the links' delays and splits, and random faults.
        faults: what is to go wrong (`asynccoll.testing.Crash`, `Cut`, `Stall`, ...); or how many faults to draw; or ``"random"``
            for 0 to 4.
        conditions: how the links behave; None draws it.
        timeout: default limit of an operation in virtual seconds.
        liveness_timeout: virtual seconds of silence after which a rank is taken for lost; None: never.
        limit: virtual seconds after which the run is `Stuck`.
        safe: as for `asynccoll.init`: nothing is pickled.
        listener: hears of each event as text, with its virtual time: what to look at when a run surprises.

    Attributes:
        faults: the faults of the run, those that were drawn too.
        time: virtual seconds that the last run took.
        trace_hash: hash over each event of the last run: bytes that moved, operations that began and ended, faults.
        struck: how many faults of each kind have struck in the last run.
        generation: 0, and one more for each restart in the last run.
    """

    def __init__(
        self,
        n: int,
        seed: int = 0,
        faults: Iterable[Fault] | int | Literal["random"] = (),
        *,
        conditions: Conditions | None = None,
        timeout: float | None = 60.0,
        liveness_timeout: float | None = 5.0,
        limit: float = 1e6,
        safe: bool = False,
        listener: Callable[[float, str], None] | None = None,
    ) -> None:
        if n < 1:
            raise ValueError(f"a world has at least one rank, not {n}")
        rng = random.Random(seed)
        self.n = n
        self.seed = seed
        self.conditions = draw_conditions(rng) if conditions is None else conditions
        if isinstance(faults, str):
            if faults != "random":
                raise ValueError(f"faults={faults!r} does not exist; give a list, a number or 'random'")
            faults = rng.randint(0, _MOST)
        self.faults = draw_faults(rng, n, faults) if isinstance(faults, int) else checked(faults, n)
        self.time = 0.0
        self.trace_hash = ""
        self.struck: Counter[str] = Counter()
        self.generation = 0
        self._options = Options(seconds(timeout, "timeout", None), safe=safe)
        self._liveness = seconds(liveness_timeout, "liveness_timeout", None)
        self._limit = limit
        self._listener = listener

    def __repr__(self) -> str:
        return f"Simulation({self.n}, seed={self.seed}, faults={self.faults})"

    def run(self, main: Callable[[Communicator], Awaitable[Any]]) -> list[Any]:
        """Run ``main(comm)`` on every rank, to its end, and return what came of it, in rank order.

        A rank's result is what ``main`` returned, or the exception that ended it (`asyncio.CancelledError` too). A rank that a
        fault killed or stopped for good gives `Crashed` or `Stopped`. What ``main`` has not closed is closed when it ends.

        Raises:
            Stuck: the program hangs: every rank that can still run waits for what cannot happen any more, or ``limit`` has passed.
        """
        trace = Trace(self._listener)
        self.struck, self.generation = Counter(), 0
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            loop = runner.get_loop()
            run = _Run(self, main, trace)
            try:
                return runner.run(run.all_generations())
            except Stuck as error:
                waits = run.waits()
                run.abandon()
                raise Stuck(f"{error}{waits}. The run: {self!r}") from None
            finally:
                self.time, self.trace_hash = loop.time(), trace.hash


class _Run:
    """One call of `Simulation.run`."""

    def __init__(
        self, simulation: Simulation, main: Callable[[Communicator], Awaitable[Any]], trace: Trace
    ) -> None:
        self._simulation = simulation
        self._main = main
        self._trace = trace
        self._cluster: Cluster | None = None

    def waits(self) -> str:
        """What each rank waits for, as the end of a sentence."""
        if self._cluster is None:
            return ""
        waits = [
            f"rank {comm.rank} waits in {', '.join(comm.pending())}"
            for comm, process in zip(self._cluster.comms, self._cluster.processes, strict=True)
            if comm.pending() and not process.dead
        ]
        return "; " + "; ".join(waits) if waits else ""

    def abandon(self) -> None:
        """End what still runs: it will never end by itself."""
        if self._cluster is not None:
            self._cluster.abandon()

    async def all_generations(self) -> list[Any]:
        simulation = self._simulation
        try:
            async with asyncio.timeout(simulation._limit):
                while True:
                    results = await self._generation()
                    assert self._cluster is not None
                    simulation.struck += self._cluster.struck
                    if not self._cluster.restarts:
                        return results
                    simulation.generation += 1
        except TimeoutError:
            raise Stuck(f"the run is not over after {simulation._limit:g} virtual seconds") from None

    async def _generation(self) -> list[Any]:
        simulation = self._simulation
        cluster = self._cluster = Cluster(
            simulation.n,
            seed=simulation.seed + simulation.generation,
            conditions=simulation.conditions,
            options=simulation._options,
            liveness_timeout=simulation._liveness,
            trace=self._trace,
        )
        ranks = [cluster.spawn(comm.rank, self._rank(comm)) for comm in cluster.comms]
        cluster.mains[:] = ranks
        cluster.loop.set_exception_handler(self._on_unhandled)
        changed = asyncio.Event()
        cluster.on_end = changed.set
        for task in ranks:
            task.add_done_callback(lambda task: changed.set())
        if simulation.generation == 0:
            for fault in simulation.faults:
                cluster.set(fault)
        while any(
            not task.done() and rank not in cluster.stopped_for_good for rank, task in enumerate(ranks)
        ):
            changed.clear()
            await changed.wait()
        cluster.call_off()
        results = [self._result(cluster, rank, task) for rank, task in enumerate(ranks)]
        for rank in sorted(cluster.stopped_for_good):
            cluster.processes[rank].kill()
            cluster.network.crash(rank)
            cluster.processes[rank].thaw()
        await asyncio.gather(*ranks, return_exceptions=True)
        return results

    def _on_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not Cluster.of_the_dead(context):
            loop.default_exception_handler(context)

    async def _rank(self, comm: Communicator) -> Any:
        async with comm:
            return await self._main(comm)

    @staticmethod
    def _result(cluster: Cluster, rank: int, task: asyncio.Task[Any]) -> Any:
        if cluster.processes[rank].dead:
            return Crashed(f"a fault killed rank {rank}")
        if rank in cluster.stopped_for_good:
            return Stopped(f"a fault stopped rank {rank} for good")
        if task.cancelled():
            return asyncio.CancelledError()
        error = task.exception()
        return task.result() if error is None else error
