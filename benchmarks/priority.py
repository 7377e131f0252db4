"""How long a small operation takes behind queued bulk, and what memory the bulk costs meanwhile. Knows two small operations.

``python -m benchmarks.priority``. In each round every rank starts ``--ops`` in-place allreduces of ``--bulk`` bytes each, and makes
one small call (an 8-byte allreduce or a barrier, in turn) right behind them; five more follow, one every ``--every`` seconds. Small
operations and bulk share the same links, so the time says how far the small ones get ahead.

time
    From the call of the last rank to the result of the last rank, by the host's monotonic clock: no rank can have its result
    before all have called. Median and worst of all small calls.
waited
    The longest time from a rank's own call to its own result, which includes waiting for a rank that called later because its
    loop was busy.
behind
    The least bulk that was still under way on a rank when a small operation ended.
extra
    The most resident memory that a process had above what it had with all arrays filled, before the bulk was started, for each
    peer. (Kernel buffers are not in it.)
#wrong
    Wrong elements of bulk and small results, over all ranks and rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import asynccoll
from asynccoll import Communicator
from asynccoll.errors import AsynccollError
from benchmarks import command
from benchmarks.ranks import LOOPS, loop_factory
from benchmarks.sizes import human, parse_size

__all__ = ["KINDS", "POINTS", "Sample", "main", "rows", "run_rank"]

KINDS = ("allreduce", "barrier")
"""The small operations, in the order of their turns."""
POINTS = 6
"""Small calls of a round."""


class Sample(NamedTuple):
    """One small operation on one rank."""

    kind: str
    called: float
    """Seconds on the monotonic clock."""
    ended: float
    behind: int
    """Bytes of bulk that were under way at its end."""


class Found(NamedTuple):
    """What one rank measured."""

    samples: list[Sample]
    extra: int | None
    """Bytes of resident memory above the arrays; None where the system does not tell."""
    wrong: int


def run_rank(loop: str, rounds: int, ops: int, nbytes: int, every: float) -> Found:
    """The whole life of one rank."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return runner.run(_main(rounds, ops, nbytes, every))


async def _main(rounds: int, ops: int, nbytes: int, every: float) -> Found:
    async with asynccoll.init() as comm:
        arrays = [np.zeros(nbytes // 4, np.float32) for _ in range(ops)]
        samples: list[Sample] = []
        extras: list[int | None] = []
        wrong = 0
        for number in range(rounds):
            for n, array in enumerate(arrays):
                array.fill(comm.rank + n + number)
            await comm.barrier()
            before = _peak(reset=True)
            found, wrong_small = await _round(comm, arrays, number, every)
            after = _peak()
            samples += found
            extras.append(None if before is None or after is None else after - before)
            ranks = comm.world_size
            for n, array in enumerate(arrays):
                expected = ranks * (n + number) + sum(range(ranks))
                wrong += int(np.count_nonzero(array != expected))
            wrong += wrong_small
        known = [extra for extra in extras if extra is not None]
        return Found(samples, max(known) if known else None, wrong)


async def _round(
    comm: Communicator, arrays: list[Any], number: int, every: float
) -> tuple[list[Sample], int]:
    began = max(await comm.allgather(time.monotonic()))
    bulk = [comm.allreduce_(array) for array in arrays]
    samples, wrong = [], 0
    one = np.zeros(2, np.float32)
    for point in range(POINTS):
        # At the same moment on all ranks, so that none waits for another's call: they share the host's clock.
        await asyncio.sleep(began + point * every - time.monotonic())
        kind = KINDS[(number * POINTS + point) % len(KINDS)]
        one.fill(comm.rank)
        called = time.monotonic()
        if kind == "barrier":
            await comm.barrier()
        else:
            await comm.allreduce_(one)
        ended = time.monotonic()
        behind = sum(array.nbytes for array, work in zip(arrays, bulk, strict=True) if not work.done())
        samples.append(Sample(kind, called, ended, behind))
        if kind != "barrier":
            wrong += int(np.count_nonzero(one != sum(range(comm.world_size))))
    await asyncio.gather(*bulk)
    return samples, wrong


def _peak(*, reset: bool = False) -> int | None:
    """The most resident memory since the last reset, in bytes; with ``reset``, now. None where there is no ``/proc``."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


class Row(NamedTuple):
    """One kind of small operation, over all rounds and ranks."""

    kind: str
    times: list[float]
    """Seconds from the last call to the last result, one for each small operation."""
    waited: float
    behind: int


def rows(of_ranks: Sequence[Sequence[Sample]]) -> list[Row]:
    """The figures of each kind, from each rank's samples in the order of the calls."""
    found = []
    for kind in KINDS:
        calls = [call for call in zip(*of_ranks, strict=True) if call[0].kind == kind]
        if calls:
            times = [max(one.ended for one in call) - max(one.called for one in call) for call in calls]
            waited = max(one.ended - one.called for call in calls for one in call)
            found.append(Row(kind, times, waited, min(one.behind for call in calls for one in call)))
    return found


def table(found: Sequence[Row], extra: int | None, peers: int, wrong: int) -> list[str]:
    """The lines of the table."""
    lines = [
        "#                            time               waited      behind       extra",
        "#      kind  calls    median     worst           worst       least    per peer  #wrong",
        "#                       (ms)      (ms)            (ms)         (B)       (MiB)",
    ]
    memory = "N/A" if extra is None else f"{extra / peers / (1 << 20):.1f}"
    for row in found:
        median, worst = statistics.median(row.times) * 1e3, max(row.times) * 1e3
        lines.append(
            f"{row.kind:>11}{len(row.times):>7}{median:>10.2f}{worst:>10.2f}{row.waited * 1e3:>16.2f}"
            f"{human(row.behind):>12}{memory:>12}{wrong:>8}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if a result was wrong or a rank failed."""
    parser = command.new_parser(
        "priority",
        "Time of a small operation that is started behind bulk, and the memory that the bulk costs.",
        __doc__,
    )
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--bulk", type=parse_size, default=64 << 20, help="bytes of one array (default 64M)")
    parser.add_argument("--ops", type=int, default=16, metavar="N", help="bulk operations (default 16)")
    parser.add_argument(
        "--every", type=float, default=0.05, metavar="SECONDS", help="between small calls (default 0.05)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="rounds (default 5)")
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="event loop (default uvloop)")
    command.add_limits(parser, written="all samples")
    options = parser.parse_args(argv)
    if (
        options.nproc < 2
        or options.rounds < 1
        or options.ops < 1
        or options.bulk < 4
        or not options.every > 0
    ):
        parser.error("--nproc must be at least 2, --rounds 1, --ops 1, --bulk 4, and --every above 0")
    try:
        arguments = (options.loop, options.rounds, options.ops, options.bulk, options.every)
        found = command.on_ranks(run_rank, options.nproc, *arguments, timeout=options.timeout)
    except (AsynccollError, OSError, MemoryError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    wrong = sum(rank.wrong for rank in found)
    known = [rank.extra for rank in found if rank.extra is not None]
    extra = max(known) if known else None
    print(
        f"# nproc {options.nproc}, {options.loop}, {options.ops} allreduces of {human(options.bulk)} under way, "
        f"{options.rounds} rounds"
    )
    print(*table(rows([rank.samples for rank in found]), extra, options.nproc - 1, wrong), sep="\n")
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    command.save(options.json, [rank._asdict() for rank in found])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
