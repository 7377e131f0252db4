"""``asynccoll run``: a script on N local ranks. Knows options and exit codes; processes are `Job`'s."""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import math
import os
import select
import signal
import sys
from collections.abc import Sequence

from asynccoll.launch.ends import exit_code
from asynccoll.launch.job import GRACE, Job
from asynccoll.launch.output import Output, prefix_of
from asynccoll.launch.signals import SignalPipe

__all__ = ["main"]

_TAKES_VALUE = ("-n", "--nproc", "--timeout", "--grace")
"""Own options that are followed by a value: what the search for the script has to step over."""

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP") if hasattr(signal, name)
)

_EPILOG = """\
examples:
  asynccoll run -n 4 train.py --lr 0.1
  asynccoll run -n 2 --timeout 600 -m package.module

Everything after SCRIPT or MODULE is the script's own. Each output line is prefixed with
the rank that wrote it. When one rank fails, the others are stopped.

exit code:
  0    every rank exited with code 0
  N    the first rank that failed did so with code N (128 + number for a signal)
  2    a mistake on this command line; nothing was started
  124  --timeout passed
  130  Ctrl-C (a second one kills at once); 143 SIGTERM; 129 hang-up
  141  whoever read the output went away
"""


def main(argv: Sequence[str]) -> int:
    """Parse ``argv`` (without the command's name), run the job, return its exit code."""
    own, target = _split(list(argv))
    parser = _parser()
    try:
        options = parser.parse_args(own)
        command = _command(parser, target)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    return _run(options, [sys.executable, *command])


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """``argv`` up to the script or ``-m``, and from there on.

    By hand, because argparse interprets what follows a positional: ``--`` and options that look like its own.
    """
    index = 0
    while index < len(argv):
        argument = argv[index]
        if argument == "--":
            return argv[:index], argv[index + 1 :]
        if not argument.startswith("-") or argument.startswith("-m"):
            break
        index += 2 if argument in _TAKES_VALUE else 1
    return argv[:index], argv[index:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asynccoll run",
        usage="asynccoll run -n N [options] SCRIPT [ARGUMENT ...]\n"
        "       asynccoll run -n N [options] -m MODULE [ARGUMENT ...]",
        description="Run a Python script, or a module, on N ranks on this host.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", "--nproc", type=_count, required=True, metavar="N", help="number of ranks, >= 1"
    )
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="stop the job after this time (default: no limit)"
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=GRACE,
        metavar="SECONDS",
        help="time from asking ranks to end to killing them (default: %(default)g)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="a rank that fails does not stop the others, for programs that shrink(); the exit code is still the first failure's",
    )
    parser.add_argument(
        "--no-prefix", dest="prefix", action="store_false", help="whole lines, but without the rank in front"
    )
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return value


def _command(parser: argparse.ArgumentParser, target: list[str]) -> list[str]:
    """The interpreter's arguments for ``target``. What cannot start fails here, not on every rank."""
    if target and target[0].startswith("-m"):
        words = [target[0][2:], *target[1:]] if target[0] != "-m" else target[1:]
        if not words:
            parser.error("-m needs the name of a module")
        if not _importable(words[0].partition(".")[0]):
            parser.error(f"no module named {words[0]!r} (looked in {os.getcwd()} and on the search path)")
        return ["-m", *words]
    if not target:
        parser.error("no script: give the path of one, or -m and the name of a module")
    if not os.path.exists(target[0]):
        parser.error(f"no such script: {target[0]!r} (looked in {os.getcwd()})")
    return target


def _importable(name: str) -> bool:
    """Whether ``python -m`` would find the top-level module ``name``. Imports nothing."""
    if importlib.machinery.PathFinder.find_spec(name, [os.getcwd()]) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it is loaded here, and was not loaded in the usual way
        return True


def _run(options: argparse.Namespace, command: list[str]) -> int:
    _open_standard_descriptors()
    # Where a parent ignores SIGCHLD the kernel forgets exit codes, and every rank would seem to succeed.
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(SignalPipe(_SIGNALS))
        job = Job(
            options.nproc,
            lambda rank: command,
            capture=True,
            reads=True,
            grace=options.grace,
            environ=_environ(options),
        )
        try:
            stack.enter_context(job)
        except OSError as error:
            return _fail(f"cannot start {options.nproc} ranks: {error}")
        output = Output(
            options.nproc,
            prefix=options.prefix,
            colour=not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
            on_broken=lambda: signals.inject(signal.SIGPIPE),
        )
        for rank in range(options.nproc):
            output.attach(rank, *job.streams(rank))
        output.start()
        try:
            cause = job.supervise(
                timeout=options.timeout,
                keep_going=options.keep_going,
                signals=signals,
                notify=lambda text, rank: output.notice(f"asynccoll run: {text}", rank),
            )
        finally:
            output.finish()
            given_up = _wait_for(output, signals)
        if given_up:
            return exit_code(cause or given_up)
        output.close()
        if output.error is not None and not isinstance(output.error, BrokenPipeError):
            return _fail(f"cannot write the ranks' output: {output.error}")
        return exit_code(cause or (None if output.error is None else signal.SIGPIPE))


def _wait_for(output: Output, signals: SignalPipe) -> signal.Signals | None:
    """Wait until all output is written. Returns a signal that arrives before: a reader stands still."""
    while True:
        ready, _, _ = select.select([output.done, signals.fd], [], [])
        if output.done in ready:
            return None
        for number in signals.read():
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number != signal.SIGPIPE:
                return signal.Signals(number)


def _environ(options: argparse.Namespace) -> dict[str, str]:
    """The launcher's environment; for a terminal, with the width that is left beside the prefix."""
    environ = dict(os.environ)
    terminal = next((fd for fd in (1, 2) if os.isatty(fd)), None)
    if terminal is not None:
        taken = len(prefix_of(0, options.nproc, colour=False)) if options.prefix else 0
        width = os.get_terminal_size(terminal).columns - taken
        if width > 0:  # a terminal may not know its width, and say 0
            environ.setdefault("COLUMNS", str(width))
    return environ


def _open_standard_descriptors() -> None:
    """Fill those of descriptors 0 to 2 that are closed: no pipe or socket of ours must land there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _fail(text: str) -> int:
    os.write(2, f"asynccoll run: {text}\n".encode())
    return 1
