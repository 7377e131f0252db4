"""What an allreduce in flight costs a computation that holds the event loop. Knows one verb and no peers.

``python -m benchmarks.overlap``. Each round takes turns, in an order that turns too: ``--compute`` milliseconds of matrix
products in a plain loop, which give the interpreter lock away piece by piece; and the same with an allreduce that is started
before and awaited after. With ``--progress thread`` the mesh goes on meanwhile, in a thread of its own; with ``--progress inline``
it waits for the loop.

A time is that of the slowest rank; figures are medians over the rounds. Every element of every result is checked on every rank,
outside the times. BLAS has one thread for each rank, unless ``OPENBLAS_NUM_THREADS`` says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence

import numpy as np

import asynccoll
from benchmarks import command
from benchmarks.nccl_format import fitted
from benchmarks.ranks import LOOPS, loop_factory
from benchmarks.sizes import human, parse_size

__all__ = ["main", "run_rank"]

_PIECE = 192
"""Rows of a matrix: one product takes about a millisecond, and holds no lock."""


def run_rank(loop: str, progress: str, size: int, seconds: float, rounds: int) -> list[dict[str, float]]:
    """One rank: for each round the seconds of the computation ``alone``, those of ``both``, and elements that were ``wrong``."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return runner.run(_main(progress, size, seconds, rounds))


def _compute(pieces: int) -> float:
    one = np.full((_PIECE, _PIECE), 1 / _PIECE, np.float32)
    product = one
    for _ in range(pieces):
        product = product @ one
    return float(product[0, 0])


async def _main(progress: str, size: int, seconds: float, rounds: int) -> list[dict[str, float]]:
    async with asynccoll.init(progress=progress) as comm:
        count = size // 4
        source = np.arange(count, dtype=np.int32) % 1009
        pieces = 8
        for _ in range(3):  # as many as take so long on rank 0, warm
            began = time.perf_counter()
            _compute(pieces)
            pieces = max(1, round(pieces * seconds / (time.perf_counter() - began)))
        pieces = await comm.broadcast(pieces)
        found: list[dict[str, float]] = []
        for number in range(rounds + 1):
            row: dict[str, float] = {}
            for kind in ("alone", "both") if number % 2 else ("both", "alone"):
                values = (source + (number + comm.rank)).astype(np.float32)
                await comm.barrier()
                began = time.perf_counter()
                if kind == "alone":
                    _compute(pieces)
                else:
                    work = comm.allreduce(values)
                    _compute(pieces)
                    result = await work
                row[kind] = time.perf_counter() - began
            wanted = source * comm.world_size + sum(number + rank for rank in range(comm.world_size))
            row["wrong"] = int(np.count_nonzero(result != wanted))
            if number:  # the first round warms up
                found.append(row)
        return found


def table(of_ranks: Sequence[Sequence[dict[str, float]]]) -> list[str]:
    """Lines for people: times in milliseconds, and the ratio of both kinds of a round."""
    rounds = [
        {key: max(rank[key] for rank in row) for key in ("alone", "both")}
        for row in zip(*of_ranks, strict=True)
    ]
    ratios = [row["both"] / row["alone"] for row in rounds]
    lines = ["#     what   time ms     ratio  of the rounds"]
    for key in ("alone", "both"):
        milliseconds = statistics.median(row[key] for row in rounds) * 1e3
        told = ""
        if key == "both":
            told = f"{statistics.median(ratios):10.3f}  {min(ratios):.3f} to {max(ratios):.3f}"
        lines.append(f"{key:>10s}  {fitted(milliseconds, 8)}{told}")
    wrong = sum(int(row["wrong"]) for rank in of_ranks for row in rank)
    return [*lines, f"# {len(rounds)} rounds, {wrong} wrong elements"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if an element was wrong."""
    parser = command.new_parser(
        "overlap",
        "What an allreduce of float32 in flight costs a computation that holds the event loop.",
        __doc__,
    )
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--size", type=parse_size, default=8 << 20, help="bytes of the array (default 8M)")
    parser.add_argument(
        "--compute", type=float, default=200.0, metavar="MS", help="milliseconds of computing (default 200)"
    )
    parser.add_argument("--rounds", type=int, default=15, metavar="R", help="rounds (default 15)")
    parser.add_argument(
        "--progress", choices=("thread", "inline"), default="thread", help="as init takes it (default thread)"
    )
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="the caller's loop (default uvloop)")
    command.add_limits(parser)
    options = parser.parse_args(argv)
    if options.nproc < 1 or options.rounds < 1 or options.size < 4 or not options.compute > 0:
        parser.error("--nproc and --rounds must be at least 1, --size 4, and --compute above 0")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the ranks inherit it; BLAS has read its own already
    arguments = (options.loop, options.progress, options.size, options.compute / 1e3, options.rounds)
    of_ranks = command.on_ranks(run_rank, options.nproc, *arguments, timeout=options.timeout)
    print(
        f"# {options.compute:g} ms of computing, {human(options.size)} of float32, {options.nproc} ranks on {options.loop}, "
        f"progress={options.progress!r}"
    )
    print(*table(of_ranks), sep="\n")
    command.save(options.json, {"rounds": of_ranks})
    return int(any(row["wrong"] for rank in of_ranks for row in rank))


if __name__ == "__main__":
    raise SystemExit(main())
