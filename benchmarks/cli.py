"""The command line of a collective's benchmark. Knows options and exit codes; ranks do the measuring."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from asynccoll.algorithms import registry
from asynccoll.errors import AsynccollError
from asynccoll.launch import launch
from benchmarks import data, peers
from benchmarks.collectives import COLLECTIVES
from benchmarks.harness import Plan
from benchmarks.ranks import LOOPS, run_rank
from benchmarks.report import OWN, Config, to_json, wrong_elements
from benchmarks.sizes import parse_list, parse_size, sweep

__all__ = ["main"]

_EPILOG = """\
Peers take turns: in each round one library makes its calls, then the other, in alternating order. A time is the
median over the rounds of the mean time of a call, by default that of the slowest rank. From 1 MiB on there is a
barrier before each call, outside the time. Every round checks results on every rank, to the last bit.
Standard output has nccl-tests' columns; lines of its own start with #. docs/benchmarks.md says how to read them.

exit code: 0, 1 if a result was wrong or a rank failed, 2 for a mistake on the command line, 130 for Ctrl-C,
141 if whoever read the output went away.
"""


def main(collective: str, argv: Sequence[str] | None = None) -> int:
    """Run the benchmark of ``collective``; returns the exit code. `KeyboardInterrupt` passes, with no rank left behind."""
    args = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(collective)
    options = parser.parse_args(args)
    config = _config(parser, collective, options, args)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.parent}")
    started = _now()
    try:
        report = launch(run_rank, config.nproc, config, timeout=options.timeout)[0]
    except BrokenPipeError:
        # The reader of our output went away. Nothing is left to say, and nothing may complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (AsynccollError, OSError, MemoryError) as error:
        print(f"{parser.prog}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    assert report is not None  # rank 0 has one
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(report, started, _now()), indent=1) + "\n")
    return 1 if wrong_elements(report) else 0


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _positive(text: str) -> int:
    number = _natural(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _natural(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return number


def _factor(text: str) -> int:
    number = _natural(text)
    if number < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return number


def _parser(collective: str) -> argparse.ArgumentParser:
    title = COLLECTIVES[collective].title
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{collective}",
        description=f"Time asynccoll's {collective} beside a peer's, in the same processes ({title} of nccl-tests).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what runs").add_argument
    add(
        "--nproc", type=_positive, default=2, metavar="N", help="ranks, as processes on this host (default 2)"
    )
    add(
        "--peer",
        choices=["none", *(name for name in peers.PEERS if name != OWN)],
        default="gloo",
        help="library to compare with (default gloo, which comes with torch)",
    )
    add("--loop", choices=LOOPS, default="uvloop", help="event loop of asynccoll (default uvloop)")
    add(
        "--algorithm",
        choices=["auto", *registry.names(collective)],
        default="auto",
        help="asynccoll's algorithm (default auto)",
    )
    add(
        "-d",
        "--datatype",
        choices=list(data.DTYPES),
        default="float",
        metavar="TYPE",
        help=", ".join(data.DTYPES),
    )
    add("-o", "--op", choices=data.OPS, default="sum", metavar="OP", help=", ".join(data.OPS))

    add = parser.add_argument_group("sizes", "bytes, with K, M or G for powers of 1024").add_argument
    add("-b", "--minbytes", type=parse_size, default=8, metavar="SIZE", help="smallest (default 8)")
    add("-e", "--maxbytes", type=parse_size, default=64 << 20, metavar="SIZE", help="largest (default 64M)")
    add("-f", "--stepfactor", type=_factor, default=2, metavar="F", help="times F each (default 2)")
    add("-i", "--stepbytes", type=parse_size, metavar="SIZE", help="plus SIZE each, instead of -f")
    add("--sizes", type=parse_list, metavar="S,S,...", help="exactly these, instead of -b, -e, -f and -i")

    add = parser.add_argument_group("how it is timed").add_argument
    add("--rounds", type=_positive, default=5, metavar="R", help="rounds per size (default 5)")
    add(
        "-n",
        "--iters",
        type=_natural,
        default=0,
        metavar="N",
        help="timed calls per round (default: by time)",
    )
    add("--seconds", type=_seconds, default=0.2, help="length of a round without -n (default 0.2)")
    add(
        "-w",
        "--warmup_iters",
        type=_natural,
        default=1,
        metavar="N",
        help="untimed calls per round (default 1)",
    )
    add(
        "-a",
        "--average",
        type=int,
        choices=range(4),
        default=3,
        help="over ranks: 0 rank 0, 1 mean, 2 minimum, 3 maximum (default 3)",
    )
    add(
        "-c",
        "--check",
        type=_natural,
        default=1,
        metavar="N",
        help="checked calls per round; 0: none (default 1)",
    )
    add(
        "-C",
        "--report_cputime",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: CPU time of each rank's process instead of time (default 0)",
    )
    add("--timeout", type=_seconds, metavar="SECONDS", help="give up after this long")
    add("-J", "--json", type=Path, metavar="FILE", help="write a report with all rounds")
    return parser


def _config(
    parser: argparse.ArgumentParser, collective: str, options: argparse.Namespace, args: list[str]
) -> Config:
    """The options as a `Config`; ends the program, with advice, if something is not there or does not go together."""
    if options.sizes is not None:
        sizes, step = options.sizes, "0(list)"
    else:
        by_step = options.stepbytes is not None
        if by_step and options.stepbytes == 0:
            parser.error("-i 0 never gets to the largest size")
        step = f"{options.stepbytes}(bytes)" if by_step else f"{options.stepfactor}(factor)"
        sizes = list(
            sweep(options.minbytes, options.maxbytes, factor=options.stepfactor, step=options.stepbytes)
        )
        if not sizes:
            parser.error(f"-b {options.minbytes} is larger than -e {options.maxbytes}")
    if options.loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        parser.error("uvloop is not installed: pip install uvloop, or use --loop asyncio")
    names = (OWN,) if options.peer == "none" else (OWN, options.peer)
    for name in names:
        reason = peers.missing(name, options.datatype, options.op)
        if reason is not None:
            parser.error(reason)
    try:
        dtype = data.dtype_of(options.datatype)
        data.expected(options.op, 1, dtype, options.nproc)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    if min(sizes) < dtype.itemsize:
        parser.error(f"{min(sizes)} bytes hold no {options.datatype}: the smallest size is {dtype.itemsize}")
    return Config(
        collective,
        options.nproc,
        names,
        tuple(dict.fromkeys(size // dtype.itemsize * dtype.itemsize for size in sizes)),
        step,
        options.datatype,
        options.op,
        options.algorithm,
        options.loop,
        Plan(
            options.rounds,
            options.iters,
            options.warmup_iters,
            options.check,
            options.average,
            options.seconds,
            bool(options.report_cputime),
        ),
        tuple(args),
    )
