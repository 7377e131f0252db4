"""What the command lines of the small benchmarks share. Knows options, local ranks and files, and no figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from asynccoll.launch import launch

__all__ = ["add_limits", "new_parser", "on_ranks", "save"]

T = TypeVar("T")


def new_parser(name: str, description: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.<name>``. Its help ends with what ``doc``, the module's, says after its first line."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=(doc or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_limits(parser: argparse.ArgumentParser, written: str | None = "all rounds") -> None:
    """The last options: ``--timeout``, and ``--json`` for what is ``written`` there (None: no such option)."""
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    if written is not None:
        parser.add_argument("-J", "--json", type=Path, metavar="FILE", help=f"write {written}")


def on_ranks(
    run_rank: Callable[..., T], nproc: int, *arguments: object, timeout: float | None = None
) -> list[T]:
    """What ``run_rank(*arguments)`` gives on each of ``nproc`` local ranks, by `asynccoll.launch.launch`, whose errors it raises.

    Ctrl-C ends the program, with a word on standard error and the code 130.
    """
    try:
        return launch(run_rank, nproc, *arguments, timeout=timeout)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(130) from None


def save(path: Path | None, document: Any) -> None:
    """Write ``document`` to ``path`` as JSON, where one was asked for."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
