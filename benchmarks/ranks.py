"""What each rank of a benchmark does: opens the mesh and the peers, measures size after size. Knows no command line.

Rank 0 prints while the run goes on, so that a long one can be watched; its report goes back to the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
from collections.abc import Callable

import asynccoll
from asynccoll import Communicator
from benchmarks import nccl_format, report
from benchmarks.collectives import COLLECTIVES
from benchmarks.data import dtype_of
from benchmarks.harness import measure
from benchmarks.nccl_format import Row
from benchmarks.peers import Peer, open_peer
from benchmarks.report import OWN, Config, Report
from benchmarks.sizes import human

__all__ = ["LOOPS", "loop_factory", "run_rank"]

LOOPS = ("uvloop", "asyncio")


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes an event loop of that kind."""
    if name == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run_rank(config: Config) -> Report | None:
    """The whole life of one rank; the report on rank 0, None elsewhere."""
    with asyncio.Runner(loop_factory=loop_factory(config.loop)) as runner:
        return runner.run(_main(config))


async def _main(config: Config) -> Report | None:
    async with contextlib.AsyncExitStack() as stack:
        comm = await stack.enter_async_context(asynccoll.init())
        peers = [
            await stack.enter_async_context(open_peer(name, comm, config.algorithm)) for name in config.peers
        ]
        found = Report(config, report.environment(config.loop), await _devices(comm))
        with _Screen(comm.rank == 0) as screen:
            await _run(comm, peers, found, screen)
        return found if comm.rank == 0 else None


async def _devices(comm: Communicator) -> list[dict[str, object]]:
    own = {
        "rank": comm.rank,
        "group": 0,
        "pid": os.getpid(),
        "hostname": platform.node(),
        "device": comm.local_rank,
    }
    return list(await comm.allgather(own))


class _Screen:
    """Rank 0's standard output, and a status line on standard error where that is a terminal. Mute on other ranks."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._status = speaks and sys.stderr.isatty()

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *exc: object) -> None:
        self.status("")

    def lines(self, *lines: str) -> None:
        """Print result lines, at once."""
        if self._speaks:
            self.status("")
            print(*lines, sep="\n", flush=True)

    def status(self, text: str) -> None:
        """Replace the status line."""
        if self._status:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


async def _run(comm: Communicator, peers: list[Peer], found: Report, screen: _Screen) -> None:
    config = found.config
    collective = COLLECTIVES[config.collective]
    dtype = dtype_of(config.dtype)
    rows: dict[str, list[Row]] = {peer.name: [] for peer in peers}
    ratios: dict[str, list[report.Ratio]] = {peer.name: [] for peer in peers if peer.name != OWN}
    screen.lines(*_opening(found), *nccl_format.table_header(cpu=config.plan.cpu))
    for number, size in enumerate(config.sizes):
        count = size // dtype.itemsize
        actual = count * dtype.itemsize
        buffers, wanted = collective.buffers(config.op, count, dtype, comm.rank, comm.world_size)
        where = f"{human(size)} ({number + 1} of {len(config.sizes)})"
        results = await measure(
            comm,
            [(peer.name, collective.calls(peer, buffers, config.op)) for peer in peers],
            buffers,
            wanted,
            config.plan,
            lambda text, where=where: screen.status(f"{where}: {text}"),  # type: ignore[misc]
        )
        found.counts[actual] = count
        for name, result in results.items():
            found.results.setdefault(name, {})[actual] = result
            rows[name].append(report.row_of(config, actual, count, result))
            if name != OWN:
                ratios[name].append(report.ratio_of(config, name, actual, results[OWN], result))
        screen.lines(nccl_format.result_row(rows[OWN][-1]))
    screen.lines(*nccl_format.footer(rows[OWN]))
    for peer in peers:
        if peer.name == OWN:
            continue
        table = map(nccl_format.result_row, rows[peer.name])
        screen.lines(
            *nccl_format.header(peer.name, peer.version, cpu=config.plan.cpu),
            *table,
            *nccl_format.footer(rows[peer.name]),
        )
        screen.lines(*_ratio_lines(config, peer.name, ratios[peer.name]))
    screen.lines("#", f"# Collective test concluded: {collective.title}")


def _opening(found: Report) -> list[str]:
    config, plan, machine = found.config, found.config.plan, found.environment
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    calls = (
        f"{plan.iterations} calls"
        if plan.iterations
        else f"as many calls as take {plan.seconds:g} s (iters: 0)"
    )
    ranks = ("time of rank 0", "mean over ranks", "minimum over ranks", "maximum over ranks")[plan.average]
    return [
        f"# {versions}",
        f"# Python {machine['python']} on {config.loop}, {machine['system']} {machine['kernel']}, "
        f"{machine['usable_cpus']} CPUs, load {machine['load_average']:.1f}, commit {machine['commit'] or 'unknown'}",
        f"# {plan.rounds} rounds of {calls}, peers interleaved; a time is the median over rounds, {ranks}",
        *nccl_format.start_lines(
            COLLECTIVES[config.collective].title,
            min(config.sizes),
            max(config.sizes),
            config.step,
            plan.warmup,
            plan.iterations,
            plan.checks,
        ),
        "# Using devices",
        *(
            nccl_format.device_line(device["rank"], device["pid"], device["hostname"], machine["cpu"])
            for device in found.devices
        ),
        "#",
        f"# {OWN}: algorithm {config.algorithm}",
    ]


def _ratio_lines(config: Config, peer: str, ratios: list[report.Ratio]) -> list[str]:
    lines = nccl_format.ratio_header(
        OWN, peer, f"in place, {config.nproc} ranks{', CPU time' if config.plan.cpu else ''}"
    )
    for ratio in ratios:
        lines.append(
            nccl_format.ratio_row(
                ratio.size, ratio.own, ratio.peer, ratio.rounds, ratio.target, ratio.verdict
            )
        )
    return lines
