"""What objects cost: large arrays inside them, small ones against gloo's, and the call itself. Knows three figures and their bars.

``python -m benchmarks.objects``. Every result is checked on every rank. A time is that of the slowest rank, and the median over
rounds, in which what is compared takes turns.

broadcast
    ``broadcast({"x": array})`` against ``broadcast(array)``: what an object costs beyond the array in it. At most 1.3 times.
allgather
    ``allgather`` of a small dict against ``torch.distributed.all_gather_object`` on gloo. At most a fifth.
call
    How long ``allreduce_async(array, numpy.add)`` takes to return, on rank 0, which calls so many seconds after the others, and
    on those. At most 5 ms. Then 20 such operations at once: the slowest call, and the time until all are complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

import asynccoll
from asynccoll import Communicator
from benchmarks import command
from benchmarks.nccl_format import fitted
from benchmarks.peers import open_peer
from benchmarks.ranks import LOOPS, loop_factory
from benchmarks.sizes import human, parse_size

__all__ = ["FIGURES", "Config", "main", "run_rank"]

FIGURES = ("broadcast", "allgather", "call")
OUTSTANDING: Final = 20
_CALL_BAR: Final = 5e-3
_BARS: Final = {"broadcast": 1.3, "allgather": 0.2}
_SMALL: Final = {"loss": 0.25, "step": 1234, "name": "rank", "ok": True}


class Config(NamedTuple):
    """One run. Bytes and seconds."""

    loop: str
    figures: tuple[str, ...]
    broadcast: int
    array: int
    rounds: int
    iterations: int
    late: float


class Rows(NamedTuple):
    """What one rank measured."""

    pairs: dict[str, list[tuple[float, float]]]
    """Figure -> seconds of a call of the object's and of the other's, by round."""
    calls: list[float]
    """Seconds until a call returned."""
    outstanding: tuple[float, float]
    """Seconds of the slowest of many calls at once, and until all were complete."""
    wrong: int
    """Results that were not right."""


def run_rank(config: Config) -> Rows:
    """The whole life of one rank."""
    with asyncio.Runner(loop_factory=loop_factory(config.loop)) as runner:
        return runner.run(_main(config))


async def _main(config: Config) -> Rows:
    found = Rows({}, [], (0.0, 0.0), 0)
    async with contextlib.AsyncExitStack() as stack:
        comm = await stack.enter_async_context(asynccoll.init())
        if "broadcast" in config.figures:
            pairs, wrong = await _broadcast(comm, config)
            found.pairs["broadcast"] = pairs
            found = found._replace(wrong=found.wrong + wrong)
        if "allgather" in config.figures:
            await stack.enter_async_context(open_peer("gloo", comm, "auto"))
            pairs, wrong = await _allgather(comm, config)
            found.pairs["allgather"] = pairs
            found = found._replace(wrong=found.wrong + wrong)
        if "call" in config.figures:
            calls, outstanding, wrong = await _calls(comm, config)
            found = found._replace(calls=calls, outstanding=outstanding, wrong=found.wrong + wrong)
    return found


async def _timed(comm: Communicator, call: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Seconds of one call after a barrier, and its result."""
    await comm.barrier()
    began = time.perf_counter()
    result = await call()
    return time.perf_counter() - began, result


async def _broadcast(comm: Communicator, config: Config) -> tuple[list[tuple[float, float]], int]:
    array = np.arange(config.broadcast // 4, dtype=np.float32)
    root = comm.rank == 0

    async def of_object() -> Any:
        return (await comm.broadcast({"x": array} if root else None))["x"]

    async def of_array() -> Any:
        return await comm.broadcast(array if root else None)

    pairs, wrong = [], 0
    for number in range(config.rounds + 1):
        times = {}
        for name, call in _in_turn(number, {"object": of_object, "array": of_array}):
            times[name], result = await _timed(comm, call)
            wrong += not np.array_equal(result, array)
            del result
        if number:  # the first round is for the allocator
            pairs.append((times["object"], times["array"]))
    return pairs, wrong


async def _allgather(comm: Communicator, config: Config) -> tuple[list[tuple[float, float]], int]:
    import torch.distributed as dist

    own = {**_SMALL, "rank": comm.rank}
    right = [{**_SMALL, "rank": rank} for rank in range(comm.world_size)]

    async def ours() -> Any:
        for _ in range(config.iterations):
            result = await comm.allgather(own)
        return result

    async def gloos() -> Any:
        result: list[Any] = [None] * comm.world_size
        for _ in range(config.iterations):
            dist.all_gather_object(result, own)
        return result

    pairs, wrong = [], 0
    for number in range(config.rounds + 1):
        times = {}
        for name, call in _in_turn(number, {"ours": ours, "gloo": gloos}):
            seconds, result = await _timed(comm, call)
            times[name] = seconds / config.iterations
            wrong += result != right
        if number:
            pairs.append((times["ours"], times["gloo"]))
    return pairs, wrong


async def _calls(comm: Communicator, config: Config) -> tuple[list[float], tuple[float, float], int]:
    array = np.full(config.array // 4, comm.rank + 1, np.float32)
    right = comm.world_size * (comm.world_size + 1) / 2
    calls, wrong = [], 0
    for _ in range(3):
        await comm.barrier()
        if comm.rank == 0:
            await asyncio.sleep(config.late)
        began = time.perf_counter()
        work = comm.allreduce_async(array, np.add)
        calls.append(time.perf_counter() - began)
        wrong += not (await work == right).all()
    await comm.barrier()
    works, slowest, first = [], 0.0, time.perf_counter()
    for _ in range(OUTSTANDING):
        began = time.perf_counter()
        works.append(comm.allreduce_async(array, np.add))
        slowest = max(slowest, time.perf_counter() - began)
    results = await asyncio.gather(*works)
    ended = time.perf_counter() - first
    wrong += sum(not (result == right).all() for result in results)
    return calls, (slowest, ended), wrong


def _in_turn(number: int, calls: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(calls.items()) if number % 2 == 0 else list(reversed(calls.items()))


def table(nproc: int, config: Config, of_ranks: Sequence[Rows]) -> list[str]:
    """Lines for people: one for each figure."""
    lines = []
    for figure in ("broadcast", "allgather"):
        if figure not in config.figures:
            continue
        rounds = [
            tuple(map(max, zip(*row, strict=True)))
            for row in zip(*(rows.pairs[figure] for rows in of_ranks), strict=True)
        ]
        own, other = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [one / two for one, two in rounds]
        lines.append(
            f"{figure:>10s}  {nproc:5d}  {fitted(own * 1e6, 9)}  {fitted(other * 1e6, 9)}  {own / other:6.2f}"
            f"  {min(ratios):5.2f}-{max(ratios):<5.2f}  {_BARS[figure]:5.2f}  {_verdict(own / other, _BARS[figure])}"
        )
    if "call" in config.figures:
        slowest = [max(rows.calls) for rows in of_ranks]
        many, until = (max(rows.outstanding[at] for rows in of_ranks) for at in (0, 1))
        for what, seconds in (
            ("rank 0, late", slowest[0]),
            ("the others", max(slowest[1:])),
            (f"{OUTSTANDING} at once", many),
        ):
            lines.append(
                f"{'call':>10s}  {nproc:5d}  {fitted(seconds * 1e6, 9)}  {what:>27s}  {_CALL_BAR * 1e6:.0f} us  "
                f"{_verdict(seconds, _CALL_BAR)}"
            )
        lines.append(f"# all {OUTSTANDING} were complete after {until * 1e3:.0f} ms")
    return lines


def _verdict(value: float, bar: float) -> str:
    return "ok" if value <= bar else "over"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if a result was wrong."""
    parser = command.new_parser(
        "objects",
        "What objects cost: large arrays inside them, small ones against gloo's, and the call itself.",
        __doc__,
    )
    parser.add_argument(
        "--nproc", type=int, nargs="+", default=[2, 4], metavar="N", help="ranks (default 2 4)"
    )
    parser.add_argument("--figures", choices=FIGURES, nargs="+", default=list(FIGURES), help="default all")
    parser.add_argument(
        "--broadcast",
        type=parse_size,
        default=64 << 20,
        metavar="SIZE",
        help="bytes of the array (default 64M)",
    )
    parser.add_argument(
        "--array", type=parse_size, default=16 << 20, metavar="SIZE", help="bytes of the call's (default 16M)"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="R", help="rounds (default 9)")
    parser.add_argument(
        "-n", "--iters", type=int, default=200, metavar="N", help="small calls per round (default 200)"
    )
    parser.add_argument(
        "--late", type=float, default=2.0, metavar="SECONDS", help="how late rank 0 calls (default 2)"
    )
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help="event loop (default uvloop)")
    command.add_limits(parser, written=None)
    options = parser.parse_args(argv)
    if min(options.nproc) < 2 or min(options.rounds, options.iters) < 1 or options.late < 0:
        parser.error("--nproc must be at least 2, --rounds and --iters 1, --late 0")
    if "allgather" in options.figures and importlib.util.find_spec("torch") is None:
        parser.error("allgather is compared with gloo, which comes with torch; name other --figures")
    config = Config(
        options.loop,
        tuple(options.figures),
        options.broadcast,
        options.array,
        options.rounds,
        options.iters,
        options.late,
    )
    print(f"# {human(config.broadcast)} in a broadcast, {human(config.array)} in a call, on {config.loop}")
    print("#   figure  ranks         us   other us   ratio  of rounds      bar")
    wrong = 0
    for nproc in options.nproc:
        of_ranks = command.on_ranks(run_rank, nproc, config, timeout=options.timeout)
        print(*table(nproc, config, of_ranks), sep="\n", flush=True)
        wrong += sum(rows.wrong for rows in of_ranks)
    print(f"# Wrong results: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
