"""``asynccoll soak``: random programs under random faults, every result checked. Knows arguments and tables only."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from asynccoll.testing.soak.plans import TROUBLES, draw
from asynccoll.testing.soak.run import TOLD, Tally, run_plan

__all__ = ["main"]

ALL_RARE: Final = 20_000
"""Seeds from which on each rare branch must have been reached."""
_TOLD_EVERY: Final = 5.0
"""Seconds between two lines of progress."""
_DEFAULT_RANKS: Final = (2, 16)


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code. 1: a seed failed, or a rare branch was not reached. 130: Ctrl-C before the last seed."""
    parser = _parser()
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    log = logging.getLogger("asynccoll")
    level = log.level
    log.setLevel(logging.CRITICAL)  # losses are part of the plan
    try:
        return _soak(options) if options.seed is None else _replay(options)
    finally:
        log.setLevel(level)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asynccoll soak",
        description="Run random programs of collectives on simulated ranks, in virtual time, over links that delay, split, stall "
        "and break, while ranks crash, stop, leave, cancel and disagree. Each seed is one world. Every result is compared with "
        "numpy's, every error with its cause; nothing may hang, and nothing may be left over.",
        epilog="The same seed is the same run, piece for piece: trace_hash says so. With --json the counts are one line on "
        "standard output; progress goes to standard error.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seeds", type=_positive, default=500, metavar="N", help="how many seeds to run (500)"
    )
    parser.add_argument(
        "--first", type=int, default=0, metavar="S", help="the first seed (0): to share a long run out"
    )
    parser.add_argument(
        "--ranks", type=_ranks, default=_DEFAULT_RANKS, metavar="A-B", help="sizes of the worlds (2-16)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="X", help="run this one, and tell everything that happens in it"
    )
    parser.add_argument(
        "--rare",
        action="store_true",
        help=f"fail if a rare branch was not reached, as from {ALL_RARE} seeds on",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of tables")
    parser.add_argument(
        "--faults",
        type=_kinds,
        default=(),
        metavar="A,B",
        help=f"only these, at least one in each seed: {', '.join(TROUBLES)}",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


def _ranks(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low = int(match[1]) if match else 0
    high = int(match[2] or low) if match else 0
    if not 2 <= low <= high <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of world sizes; write 2-16, or 8")
    return low, high


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(text.split(",")))
    strangers = [kind for kind in kinds if kind not in TROUBLES]
    if strangers:
        raise argparse.ArgumentTypeError(f"{strangers[0]!r} is none of {', '.join(TROUBLES)}")
    return kinds


def _replay(options: argparse.Namespace) -> int:
    """Tell one seed's plan and all that happens; the error is raised."""
    plan = draw(options.seed, options.ranks, options.faults)
    print(plan)
    outcome = run_plan(plan, lambda now, what: print(f"{now:14.6f}  {what}"))
    print(f"nothing is wrong; trace {outcome.trace_hash}, {outcome.pieces} pieces")
    return 0


class _Stop:
    """Ctrl-C: the first ends the run after the seed under way, the second at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("stopping after this seed; once more stops at once", file=sys.stderr)


def _soak(options: argparse.Namespace) -> int:
    tally = Tally(options.ranks, options.faults)
    gc.freeze()  # a collection after each seed looks at that seed only
    stop = _Stop()
    previous = signal.signal(signal.SIGINT, stop)
    print(
        f"seeds {options.first} to {options.first + options.seeds - 1}; Ctrl-C ends it early", file=sys.stderr
    )
    began = told = time.monotonic()
    try:
        for seed in range(options.first, options.first + options.seeds):
            failure = tally.run(seed)
            if failure is not None and len(tally.failures) <= TOLD:
                print(f"{failure.kind}, seed {seed}: {failure.text}"[:1000], file=sys.stderr)
                print(f"    replay: {_command(seed, options)}", file=sys.stderr)
            now = time.monotonic()
            if now - told >= _TOLD_EVERY:
                told = now
                rate = tally.seeds / (now - began)
                print(
                    f"{tally.seeds} of {options.seeds} seeds, {rate:.0f} a second, {len(tally.failures)} failed",
                    file=sys.stderr,
                )
            if stop.asked:
                break
    except KeyboardInterrupt:
        print("stopped in the middle of a seed", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, previous)
    seconds = time.monotonic() - began
    summary = {
        "first": options.first,
        "ranks": f"{options.ranks[0]}-{options.ranks[1]}",
        **tally.summary(),
        "seconds": round(seconds, 1),
        "seeds_per_s": round(tally.seeds / seconds, 1) if seconds else 0.0,
    }
    if options.json:
        print(json.dumps(summary))
    else:
        _print_tables(summary)
    incomplete = bool(tally.missing) and (options.rare or tally.seeds >= ALL_RARE)
    if incomplete:
        print(f"never reached: {'; '.join(tally.missing)}", file=sys.stderr)
    if tally.failures or incomplete:
        return 1
    return 130 if tally.seeds < options.seeds else 0  # as a shell reports Ctrl-C: not all was run


def _command(seed: int, options: argparse.Namespace) -> str:
    """What replays a seed."""
    words = ["asynccoll soak --seed", str(seed)]
    if options.ranks != _DEFAULT_RANKS:
        words.append(f"--ranks {options.ranks[0]}-{options.ranks[1]}")
    if options.faults:
        words.append(f"--faults {','.join(options.faults)}")
    return " ".join(words)


def _print_tables(summary: dict[str, Any]) -> None:
    for name, value in summary.items():
        if isinstance(value, dict):
            print(f"\n{name}")
            width = max(map(len, value), default=0)
            for key, count in value.items():
                print(f"  {key:<{width}}  {count:>9}")
            print()
        elif name != "failed" or value:
            print(f"{name:<12} {value}")
