"""Takes times: rounds, peers in alternating order, checks, medians. Knows no library, no format and no process.

Every rank runs the same code on the same numbers, so that all make the same calls: whatever depends on a time is agreed
on first.

A *sample* is the mean time of a call in one round: each rank's mean, combined over ranks (by default the maximum, since
a collective is over when the last rank has its result). The *figure* of a size is the median of its samples over the
rounds.

- Small messages: warm-up, a barrier, then all calls of the round back to back, timed as one. Afterwards, untimed,
  calls on fresh data, whose results are checked.
- Large messages (`LARGE`): fresh data and a barrier before each call, each call timed on its own, each result checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asynccoll import Communicator
from benchmarks import data
from benchmarks.data import Array
from benchmarks.peers import Buffers, Calls, Repeat

__all__ = ["LARGE", "VARIANTS", "Measurement", "Plan", "Result", "measure"]

LARGE = 1 << 20
"""Bytes from which on each call is timed on its own, after a barrier: its time is a millisecond or so, which the barrier's
jitter (tens of microseconds) does not blur."""

_MIN_ITERATIONS = 3
_MAX_ITERATIONS = 100_000
_PILOT = 0.02
"""Seconds that a pilot run must take, for its mean to say how many calls fill a round."""

VARIANTS = ("out_of_place", "in_place")
"""Fields of `Calls`, in the order in which nccl-tests runs them."""


class Plan(NamedTuple):
    """How to measure."""

    rounds: int = 5
    iterations: int = 0
    """Timed calls of a round; 0: as many as take `seconds`."""
    warmup: int = 1
    """Untimed calls before the timed ones of each round."""
    checks: int = 1
    """Checked calls of a round of small messages; 0: no result is checked, of large ones neither."""
    average: int = 3
    """Over ranks, as nccl-tests' ``-a``: 0 rank 0, 1 mean, 2 minimum, 3 maximum."""
    seconds: float = 0.2
    """How long the timed calls of one round take, about."""
    cpu: bool = False
    """Take the CPU time of each rank's process, all threads, instead of the time on the clock."""


@dataclass
class Measurement:
    """Samples of one variant of one peer at one size."""

    wrong: int | None
    """Wrong elements over all ranks and checked calls; None where nothing is checked."""
    samples: list[float] = field(default_factory=list)
    """Seconds per call, one per round."""

    @property
    def seconds(self) -> float:
        """The figure."""
        return statistics.median(self.samples)


@dataclass
class Result:
    """One peer at one size."""

    iterations: int
    """Timed calls of each round."""
    out_of_place: Measurement
    in_place: Measurement


async def measure(
    comm: Communicator,
    peers: Sequence[tuple[str, Calls]],
    buffers: Buffers,
    wanted: Array,
    plan: Plan,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Result]:
    """Measure ``peers`` at one size, interleaved. Called on every rank; all get the same results.

    Args:
        comm: for barriers and for agreeing; idle otherwise.
        peers: name and calls of each, in the same order on all ranks.
        buffers: memory that the calls work on.
        wanted: what must be in ``buffers.recv`` after a call.
        plan: how to measure.
        progress: is given a word on what is being done.
    """
    bench = _Bench(comm, buffers, wanted, plan)
    results: dict[str, Result] = {}
    for name, calls in peers:
        progress(f"{name} pilot")
        iterations = plan.iterations or await bench.pilot(calls.in_place)
        first = None if plan.checks == 0 else 0
        results[name] = Result(iterations, Measurement(first), Measurement(first))
    for number in range(plan.rounds):
        for name, calls in peers if number % 2 == 0 else reversed(peers):
            progress(f"{name} round {number + 1} of {plan.rounds}")
            result = results[name]
            for variant in VARIANTS:
                measurement: Measurement = getattr(result, variant)
                call: Repeat = getattr(calls, variant)
                sample, wrong = await bench.round(call, variant == "in_place", result.iterations)
                measurement.samples.append(sample)
                if measurement.wrong is not None:
                    measurement.wrong += wrong
    return results


class _Bench:
    """The buffers of one size, and the ways to run calls on them."""

    def __init__(self, comm: Communicator, buffers: Buffers, wanted: Array, plan: Plan) -> None:
        self._comm = comm
        self._buffers = buffers
        self._wanted = wanted
        self._plan = plan
        self._large = buffers.recv.nbytes >= LARGE
        self._now = time.process_time if plan.cpu else time.perf_counter

    async def pilot(self, call: Repeat) -> int:
        """How many calls fill a round: the same number on every rank."""
        calls = 1
        self._fresh(in_place=True)
        while True:
            await self._comm.barrier()
            began = time.perf_counter()
            await call(calls)
            elapsed = time.perf_counter() - began
            slowest = float((await self._comm.allreduce(np.array([elapsed]), "max"))[0])
            if slowest >= _PILOT or calls >= _MAX_ITERATIONS:
                wanted = int(self._plan.seconds / (slowest / calls))
                return min(max(wanted, _MIN_ITERATIONS), _MAX_ITERATIONS)
            calls *= 4

    async def round(self, call: Repeat, in_place: bool, iterations: int) -> tuple[float, int]:
        """One sample in seconds, and the number of wrong elements, both over all ranks."""
        if self._large:
            seconds, wrong = await self._one_by_one(call, in_place, iterations)
        else:
            seconds, wrong = await self._back_to_back(call, in_place, iterations)
        of_ranks = np.concatenate(await self._comm.allgather(np.array([seconds / iterations, float(wrong)])))
        return self._combine(of_ranks[0::2]), int(of_ranks[1::2].sum())

    async def _back_to_back(self, call: Repeat, in_place: bool, iterations: int) -> tuple[float, int]:
        self._fresh(in_place)
        await call(self._plan.warmup)
        await self._comm.barrier()
        began = self._now()
        await call(iterations)
        elapsed = self._now() - began
        wrong = 0
        for _ in range(self._plan.checks):
            self._fresh(in_place)
            await call(1)
            wrong += data.count_wrong(self._buffers.recv, self._wanted)
        return elapsed, wrong

    async def _one_by_one(self, call: Repeat, in_place: bool, iterations: int) -> tuple[float, int]:
        elapsed = 0.0
        wrong = 0
        for number in range(-self._plan.warmup, iterations):
            self._fresh(in_place)
            await self._comm.barrier()
            began = self._now()
            await call(1)
            ended = self._now()
            if number >= 0:
                elapsed += ended - began
            if self._plan.checks:
                wrong += data.count_wrong(self._buffers.recv, self._wanted)
        return elapsed, wrong

    def _fresh(self, in_place: bool) -> None:
        if in_place:
            np.copyto(self._buffers.recv, self._buffers.send)
        else:
            data.poison(self._buffers.recv, self._wanted)

    def _combine(self, seconds: Array) -> float:
        if self._plan.average == 0:
            return float(seconds[0])
        return float((np.mean, np.min, np.max)[self._plan.average - 1](seconds))
