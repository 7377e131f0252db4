"""CPU time of a small allreduce, and the share of it that mismatch detection takes. Knows one collective and no peers.

``python -m benchmarks.cpu_per_op``. Each rank's ``process_time`` (user and system, all threads) over many back-to-back
calls; the figure is the mean over ranks, its median over the rounds. Modes take turns within a round:

on
    asynccoll as it is.
no-digests
    Nothing is described and compared: no fingerprint, no digests, no call site. Every call has the same constant ones,
    so that only the comparison of two equal integers per frame is left. This is what detection costs beside the START
    round, which at powers of two shares its frames with the payload.

The modes replace functions of the package from outside, in all ranks at once, for the length of a run; the package has no
such switch, and none of this is supported for any other purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

import asynccoll
from asynccoll import Communicator, communicator
from asynccoll.calls import Place, reducing
from asynccoll.engine.fingerprint import Fingerprint, digests
from benchmarks import command
from benchmarks.nccl_format import fitted
from benchmarks.ranks import LOOPS, loop_factory
from benchmarks.sizes import parse_size

__all__ = ["MODES", "main", "run_rank", "switched"]

MODES = ("on", "no-digests")


def _same_plan() -> Callable[..., Any]:
    """In place of the look-up by what was called: the plan of the first call, for all calls."""
    plans: list[Any] = []

    def plan(place: Place, *call: Any) -> Any:
        if not plans:
            plans.append(reducing.Plan(place, *call))
            plans[0].fingerprint = Fingerprint("allreduce")
            plans[0].agreed = digests(plans[0].fingerprint)
        return plans[0]

    return plan


def _no_site() -> None:
    return None


@contextlib.contextmanager
def switched(mode: str) -> Iterator[None]:
    """Call in ``mode``. Every rank does so from the same call on, up to the same call."""
    with contextlib.ExitStack() as stack:
        if mode != "on":
            stack.enter_context(mock.patch.object(reducing, "plan_of", _same_plan()))
            stack.enter_context(mock.patch.object(communicator, "_call_site", _no_site))
        yield


def run_rank(
    loop: str, size: int, rounds: int, iterations: int, modes: Sequence[str]
) -> dict[str, list[float]]:
    """One rank: mode -> CPU seconds per call, one per round."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return runner.run(_main(size, rounds, iterations, modes))


async def _main(size: int, rounds: int, iterations: int, modes: Sequence[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    async with asynccoll.init() as comm:
        array = np.zeros(size // 4, np.float32)
        for number in range(rounds):
            for mode in modes if number % 2 == 0 else reversed(modes):
                # The barriers' own START rounds keep the ranks together, so they stay outside the switch.
                await comm.barrier()
                with switched(mode):
                    seconds = await _calls(comm, array, iterations)
                await comm.barrier()
                found[mode].append(seconds)
    return found


async def _calls(comm: Communicator, array: Any, iterations: int) -> float:
    for _ in range(max(1, iterations // 10)):
        await comm.allreduce_(array)
    began = time.process_time()
    for _ in range(iterations):
        await comm.allreduce_(array)
    return (time.process_time() - began) / iterations


def _figures(of_ranks: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Mode -> mean over ranks of each round."""
    return {
        mode: [statistics.fmean(row) for row in zip(*(rank[mode] for rank in of_ranks), strict=True)]
        for mode in of_ranks[0]
    }


def table(figures: dict[str, list[float]]) -> list[str]:
    """Lines for people: microseconds per mode, and what "on" costs beyond each of the others."""
    lines = ["#      mode    CPU us   min-max of rounds     saves  of the rounds"]
    whole = figures["on"]
    for mode, rounds in figures.items():
        spread = f"{min(rounds) * 1e6:.1f}-{max(rounds) * 1e6:.1f}"
        line = f"{mode:>11s}  {fitted(statistics.median(rounds) * 1e6, 8)}  {spread:>18s}"
        if mode != "on":
            shares = [1 - part / all_ for part, all_ in zip(rounds, whole, strict=True)]
            line += f"  {statistics.median(shares):7.1%}  {min(shares):.1%} to {max(shares):.1%}"
        lines.append(line)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = command.new_parser(
        "cpu_per_op",
        "CPU time per call of a small allreduce, with and without mismatch detection.",
        __doc__,
    )
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--size", type=parse_size, default=8, help="bytes of the float32 array (default 8)")
    parser.add_argument("--rounds", type=int, default=31, metavar="R", help="rounds (default 31)")
    parser.add_argument(
        "-n", "--iters", type=int, default=500, metavar="N", help="calls per round (default 500)"
    )
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="event loop (default uvloop)")
    parser.add_argument(
        "--modes", choices=MODES[1:], nargs="*", default=list(MODES[1:]), help="beside on (default all)"
    )
    command.add_limits(parser)
    options = parser.parse_args(argv)
    if options.nproc < 2 or options.rounds < 1 or options.iters < 1 or options.size < 4:
        parser.error("--nproc must be at least 2, --size 4, --rounds and --iters 1")
    modes = ("on", *dict.fromkeys(options.modes))
    arguments = (options.loop, options.size, options.rounds, options.iters, modes)
    of_ranks = command.on_ranks(run_rank, options.nproc, *arguments, timeout=options.timeout)
    figures = _figures(of_ranks)
    print(f"# {options.size} B allreduce_ of float32, {options.nproc} ranks on {options.loop}")
    print(*table(figures), sep="\n")
    command.save(options.json, {"seconds_per_call": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
