"""When the parts of an allreduce_stream come, as shares of the whole call. Knows one verb and no peers.

``python -m benchmarks.stream``. Each round takes turns: ``allreduce(x)`` as a whole, and ``allreduce_stream(x)`` whose parts are
taken as they come, each after a barrier and with fresh data. A time is that of the slowest rank; figures are medians over the
rounds. Every part is checked when it is taken, element by element, on every rank, outside the times.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import asynccoll
from asynccoll import Communicator
from benchmarks import command
from benchmarks.nccl_format import fitted
from benchmarks.ranks import LOOPS, loop_factory
from benchmarks.sizes import human, parse_size

__all__ = ["main", "run_rank"]

_KEYS = ("allreduce", "stream", "first", "half")
"""Times of a round in seconds: of both calls as a whole, until the first part, until half of the elements are there."""


def run_rank(loop: str, size: int, rounds: int, algorithm: str, out: bool) -> list[dict[str, float]]:
    """One rank: for each round its times by `_KEYS`, and ``parts`` and ``wrong`` (elements)."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return runner.run(_main(size, rounds, algorithm, out))


async def _main(size: int, rounds: int, algorithm: str, out: bool) -> list[dict[str, float]]:
    async with asynccoll.init() as comm:
        count = size // 4
        source = np.arange(count, dtype=np.int32).view(np.uint32) % 1009
        target = np.empty(count, np.float32) if out else None
        found = []
        for number in range(rounds + 1):
            values = (source + (number + comm.rank)).astype(np.float32)
            wanted = source * comm.world_size + sum(number + rank for rank in range(comm.world_size))
            await comm.barrier()
            began = time.perf_counter()
            await comm.allreduce(values, out=target, algorithm=algorithm)
            whole = time.perf_counter() - began
            figures = await _stream(comm, values, target, wanted.astype(np.float32), algorithm)
            if number:  # the first round warms up
                found.append({"allreduce": whole, **figures})
        return found


async def _stream(
    comm: Communicator, values: Any, target: Any, wanted: Any, algorithm: str
) -> dict[str, float]:
    taken: list[tuple[float, int, Any]] = []
    await comm.barrier()
    began = time.perf_counter()
    async for offset, view in comm.allreduce_stream(values, out=target, algorithm=algorithm):
        taken.append((time.perf_counter() - began, offset, view))
    whole = time.perf_counter() - began
    seen = np.zeros(len(values), np.uint8)
    wrong, elements, half = 0, 0, whole
    for when, offset, view in taken:
        here = slice(offset, offset + len(view))
        seen[here] += 1
        wrong += int(np.count_nonzero(view != wanted[here]))
        elements += len(view)
        if 2 * elements >= len(values):
            half = min(half, when)
    wrong += int(np.count_nonzero(seen != 1))
    return {"stream": whole, "first": taken[0][0], "half": half, "parts": len(taken), "wrong": wrong}


def table(of_ranks: Sequence[Sequence[dict[str, float]]]) -> list[str]:
    """Lines for people: times in milliseconds, and as shares of the streamed call as a whole."""
    rounds = [{key: max(rank[key] for rank in row) for key in _KEYS} for row in zip(*of_ranks, strict=True)]
    lines = ["#     what   time ms   of the call  of the rounds"]
    for key in _KEYS:
        shares = [row[key] / row["stream"] for row in rounds]
        milliseconds = statistics.median(row[key] for row in rounds) * 1e3
        spread = f"{min(shares):.1%} to {max(shares):.1%}"
        lines.append(f"{key:>10s}  {fitted(milliseconds, 8)}  {statistics.median(shares):12.1%}  {spread}")
    parts = statistics.median(row["parts"] for rank in of_ranks for row in rank)
    wrong = sum(int(row["wrong"]) for rank in of_ranks for row in rank)
    return [*lines, f"# {parts:g} parts, {wrong} wrong elements"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if an element was wrong."""
    parser = command.new_parser(
        "stream",
        "When the parts of an allreduce_stream of float32 come, as shares of the whole call.",
        __doc__,
    )
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--size", type=parse_size, default=1 << 26, help="bytes of the array (default 64M)")
    parser.add_argument("--rounds", type=int, default=7, metavar="R", help="rounds (default 7)")
    parser.add_argument("--algorithm", default="auto", help="as the verb takes it (default auto)")
    parser.add_argument("--out", action="store_true", help="put the result in memory that exists already")
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="event loop (default uvloop)")
    command.add_limits(parser)
    options = parser.parse_args(argv)
    if options.nproc < 1 or options.rounds < 1 or options.size < 4:
        parser.error("--nproc and --rounds must be at least 1, --size 4")
    arguments = (options.loop, options.size, options.rounds, options.algorithm, options.out)
    of_ranks = command.on_ranks(run_rank, options.nproc, *arguments, timeout=options.timeout)
    print(f"# {human(options.size)} of float32, {options.nproc} ranks on {options.loop}, {options.algorithm}")
    print(*table(of_ranks), sep="\n")
    command.save(options.json, {"rounds": of_ranks})
    return int(any(row["wrong"] for rank in of_ranks for row in rank))


if __name__ == "__main__":
    raise SystemExit(main())
