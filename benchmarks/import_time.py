"""What ``import asynccoll`` adds to its dependencies' own import time. Knows interpreters, not collectives.

``python -m benchmarks.import_time``. Each run is a fresh interpreter that imports numpy, asyncio and uvloop, and then
takes the time of ``import asynccoll``; figures are medians over the runs. CPU time is told beside the time on the clock: it
is steadier on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["main", "one_run", "unwelcome"]

_LIMIT = 120.0
"""Seconds after which an interpreter is given up: the first run may have to compile and read everything from disk."""

_PROGRAM = """
import sys, time
def now():
    return time.perf_counter(), time.process_time()
began = now()
import asyncio, numpy
try:
    import uvloop
except ImportError:
    pass
base = now()
before = set(sys.modules)
import asynccoll
ended = now()
import json
new = sorted(set(sys.modules) - before)
base_ms = [1e3 * (b - a) for a, b in zip(began, base)]
added_ms = [1e3 * (b - a) for a, b in zip(base, ended)]
print(json.dumps({"base_ms": base_ms, "added_ms": added_ms, "modules": new}))
"""

_UNWELCOME = ("torch", "ml_dtypes", "rich", "ssl", "ray")
"""Modules that ``import asynccoll`` must not load."""


class Run(NamedTuple):
    """One interpreter. Milliseconds on the clock, and of CPU."""

    base_ms: tuple[float, float]
    """For the dependencies."""
    added_ms: tuple[float, float]
    """For asynccoll."""
    modules: list[str]
    """What asynccoll loads."""


def one_run() -> Run:
    """Start an interpreter and let it tell."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=_LIMIT, check=True
    )
    found = json.loads(done.stdout)
    return Run(tuple(found["base_ms"]), tuple(found["added_ms"]), found["modules"])


def unwelcome(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` that should not be there."""
    return [name for name in modules if name.partition(".")[0] in _UNWELCOME]


def _line(what: str, times: Sequence[tuple[float, float]]) -> str:
    clock = [wall for wall, _ in times]
    spread = f"{min(clock):.1f}-{max(clock):.1f}"
    cpu = statistics.median(cpu for _, cpu in times)
    return f"{what:24s}{statistics.median(clock):8.1f}  {spread:>15s}  {cpu:8.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if a module is loaded that should not be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.import_time",
        description="Time that `import asynccoll` adds to that of numpy, asyncio and uvloop; medians of fresh interpreters.",
    )
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="interpreters (default 15)")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE", help="write all runs")
    parser.add_argument("-v", "--verbose", action="store_true", help="list the modules that it loads")
    options = parser.parse_args(argv)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    one_run()  # bytecode is written and files are in the cache
    runs = [one_run() for _ in range(options.runs)]
    modules = runs[0].modules
    print(f"{'':>24s}{'ms':>8s}  {'min-max':>15s}  {'CPU ms':>8s}")
    print(_line("numpy, asyncio, uvloop", [run.base_ms for run in runs]))
    print(_line("asynccoll adds", [run.added_ms for run in runs]))
    own = sum(name.partition(".")[0] == "asynccoll" for name in modules)
    print(f"{'modules':24s}{len(modules):8d}  ({own} of asynccoll)")
    if options.verbose:
        print(*modules, sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps([run._asdict() for run in runs], indent=1) + "\n")
    found = unwelcome(modules)
    if found:
        print(f"import asynccoll loads {', '.join(found)}, which it must not", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
