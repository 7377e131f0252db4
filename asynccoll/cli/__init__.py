"""The command line ``asynccoll``. Knows the names of its commands; imports one when it is used.

A command ``asynccoll NAME`` is a module ``asynccoll.cli.NAME`` with ``main(argv: list[str]) -> int``, which
returns the exit code, and a line in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "run": "run a script on N local ranks",
    "plan": "draw who is which rank: roles, machines, groups, and the order of a ring",
    "soak": "run random programs under simulated faults, and check everything",
}
"""Command -> what it does, as ``asynccoll --help`` says it. Order is the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (None: the process's own arguments) names; return its exit code.

    Exit code 2 is a mistake on the command line, told on standard error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        command = importlib.import_module(f"asynccoll.cli.{arguments[0]}")
        code: int = command.main(arguments[1:])
        return code
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="asynccoll",
        description="Exact, ranked collective communication that Python programs can await.",
        epilog="commands:\n"
        + "".join(f"  {name:<{width}}  {what}\n" for name, what in COMMANDS.items())
        + "\n'asynccoll COMMAND --help' tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    return 2


def _version() -> str:
    try:
        return version("asynccoll")
    except PackageNotFoundError:
        return "(not installed)"
