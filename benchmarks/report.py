"""What a run found, as rows, ratios and JSON. Knows results and the machine, not how either was come by.

The JSON has nccl-tests' keys for asynccoll's own table (``version``, ``config``, ``results``, ...), so that its
tools read it, and beside them ``peers`` (the same for each peer), ``ratios`` and ``environment``.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import targets
from benchmarks.collectives import COLLECTIVES, bandwidth
from benchmarks.harness import Measurement, Plan, Result
from benchmarks.nccl_format import Cell, Row

__all__ = [
    "OWN",
    "Config",
    "Ratio",
    "Report",
    "environment",
    "ratio_of",
    "row_of",
    "to_json",
    "wrong_elements",
]

OWN = "asynccoll"
"""The library whose table comes first, and which the others are compared with."""

_KEPT_VARIABLES = ("ASYNCCOLL_ALGORITHM", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTHONOPTIMIZE")
"""Environment variables that bear on the figures. The rest, secrets among it, stays out of the report."""


class Config(NamedTuple):
    """What to run, as the command line has it. The same on every rank."""

    collective: str
    nproc: int
    peers: tuple[str, ...]
    """`OWN` first."""
    sizes: tuple[int, ...]
    step: str
    dtype: str
    op: str
    algorithm: str
    loop: str
    plan: Plan
    args: tuple[str, ...] = ()


class Ratio(NamedTuple):
    """asynccoll beside one peer at one size, in place."""

    size: int
    own: float
    """Seconds."""
    peer: float
    rounds: tuple[float, ...]
    """The ratio in each round."""
    target: float | None

    @property
    def ratio(self) -> float:
        return self.own / self.peer

    @property
    def verdict(self) -> str:
        """``"ok"``, ``"over"``, or empty without a target."""
        return "" if self.target is None else targets.verdict(self.ratio, self.target)


@dataclass
class Report:
    """All that rank 0 brings home."""

    config: Config
    environment: dict[str, Any]
    devices: list[dict[str, Any]]
    results: dict[str, dict[int, Result]] = field(default_factory=dict)
    """Peer -> size in bytes -> result."""
    counts: dict[int, int] = field(default_factory=dict)
    """Size in bytes -> elements."""


def row_of(config: Config, size: int, count: int, result: Result) -> Row:
    """One line of a peer's table."""
    collective = COLLECTIVES[config.collective]

    def cell(measurement: Measurement) -> Cell:
        seconds = measurement.seconds
        return Cell(seconds, bandwidth(collective, size, seconds, config.nproc), measurement.wrong)

    out_of_place, in_place = cell(result.out_of_place), cell(result.in_place)
    return Row(size, count, config.dtype, config.op, -1, out_of_place, in_place)


def ratio_of(config: Config, peer: str, size: int, own: Result, other: Result) -> Ratio:
    """asynccoll's time over that of ``peer``, both in place, since that is all that some peers have."""
    pairs = zip(own.in_place.samples, other.in_place.samples, strict=True)
    share = None
    measured = (config.dtype, config.op, config.algorithm, config.loop, config.plan.cpu)
    if measured == ("float", "sum", "auto", "uvloop", False):
        share = targets.target(peer, config.nproc, size)
    rounds = tuple(mine / theirs for mine, theirs in pairs)
    return Ratio(size, own.in_place.seconds, other.in_place.seconds, rounds, share)


def wrong_elements(report: Report) -> int:
    """Over all peers, sizes, variants, ranks and checks."""
    found = 0
    for results in report.results.values():
        for result in results.values():
            found += (result.out_of_place.wrong or 0) + (result.in_place.wrong or 0)
    return found


def environment(loop: str) -> dict[str, Any]:
    """The machine and the versions that the figures hold for."""
    packages = {name: _version(name) for name in ("asynccoll", "numpy", "uvloop", "torch")}
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "loop": loop,
        "packages": packages,
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": cpus,
        "load_average": os.getloadavg()[0],
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "hostname": platform.node(),
        "variables": {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that this file lies in, with a ``+`` where tracked files were changed."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: platform has a word for it
    return platform.processor() or platform.machine()


def to_json(report: Report, started: str, ended: str) -> dict[str, Any]:
    """The report as plain data. Times in microseconds, bandwidth in GB/s (1e9), as in nccl-tests."""
    config, plan = report.config, report.config.plan
    return {
        "version": 1,
        "start_time": started,
        "end_time": ended,
        "args": list(config.args),
        "env": [f"{name}={value}" for name, value in report.environment["variables"].items()],
        "config": {
            "collective": config.collective,
            "nproc": config.nproc,
            "algorithm": config.algorithm,
            "minimum_bytes": min(config.sizes),
            "maximum_bytes": max(config.sizes),
            "step": config.step,
            "warmup_iters": plan.warmup,
            "iterations": plan.iterations,
            "aggregated_iterations": 1,
            "validation": plan.checks,
            "rounds": plan.rounds,
            "average": plan.average,
            "devices": report.devices,
        },
        **_table(report, OWN),
        "peers": {name: _table(report, name) for name in report.results if name != OWN},
        "ratios": _ratios(report),
        "environment": report.environment,
    }


def _table(report: Report, name: str) -> dict[str, Any]:
    entries, wrong, buses = [], 0, []
    for size, result in report.results[name].items():
        row = row_of(report.config, size, report.counts[size], result)
        entry: dict[str, Any] = {
            "size": size,
            "count": row.count,
            "type": row.type,
            "redop": row.redop,
            "root": row.root,
            "actual_iterations": result.iterations,
        }
        variants: Mapping[str, tuple[Cell, Measurement]] = {
            "out_of_place": (row.out_of_place, result.out_of_place),
            "in_place": (row.in_place, result.in_place),
        }
        for variant, (cell, measurement) in variants.items():
            entry[variant] = {
                "cpu_time" if report.config.plan.cpu else "time": cell.seconds * 1e6,
                "alg_bw": cell.bandwidth.algorithm,
                "bus_bw": cell.bandwidth.bus,
                "nwrong": cell.wrong,
                "rounds_us": [sample * 1e6 for sample in measurement.samples],
            }
            wrong += cell.wrong or 0
            buses.append(cell.bandwidth.bus)
        entries.append(entry)
    return {
        "results": entries,
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": {
            "bandwidth": sum(buses) / len(buses) if buses else 0.0,
            "okay": "unchecked",
        },
    }


def _ratios(report: Report) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, results in report.results.items():
        if name == OWN:
            continue
        for size, result in results.items():
            ratio = ratio_of(report.config, name, size, report.results[OWN][size], result)
            found.append(
                {
                    "peer": name,
                    "size": size,
                    "asynccoll_us": ratio.own * 1e6,
                    "peer_us": ratio.peer * 1e6,
                    "ratio": ratio.ratio,
                    "rounds": list(ratio.rounds),
                    "target": ratio.target,
                    "verdict": ratio.verdict or None,
                }
            )
    return found
