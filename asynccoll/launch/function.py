"""Runs a function on local ranks and brings results and errors home. Knows pickles and jobs; not meshes.

Each rank is a fresh interpreter that does not import the caller's ``__main__``: functions, lambdas and
classes of scripts and notebooks travel by value (cloudpickle), and a script needs no ``if __name__ ==
"__main__"``. Input and output are files in memory that ranks inherit, so that no size fills a pipe while
nobody reads.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import mmap
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, BinaryIO, NoReturn, TypeVar

from asynccoll.errors import CollectiveTimeout, OpContext
from asynccoll.launch.ends import Exit, Overdue
from asynccoll.launch.job import Job
from asynccoll.launch.reports import Failure, describe, lost, pickler, raise_first
from asynccoll.launch.signals import SignalPipe

__all__ = ["launch", "run_child"]

T = TypeVar("T")

_VALUE, _FAILURE = b"V", b"F"
"""First byte of a rank's report: what the pickle after it holds."""

_CHILD = """
import mmap, pickle, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from a half-finished import
source = mmap.mmap(int(sys.argv[1]), 0, access=mmap.ACCESS_READ)
report = int(sys.argv[2])
sys.path[:], sys.argv[:] = pickle.load(source)
from asynccoll.launch.function import run_child
run_child(source, report)
"""
"""What a rank runs. The search path comes first, because whatever follows may be found through it alone."""


def launch(
    fn: Callable[..., T], nproc: int, *args: object, timeout: float | timedelta | None = None
) -> list[T]:
    """Run ``fn(*args)`` on ``nproc`` local processes; return the results in rank order.

    Every rank has the environment that ``asynccoll run`` gives, so ``init()`` inside ``fn`` makes the mesh.
    Output goes where the caller's goes, unchanged; ranks have no input. ``fn``, ``args`` and results may be
    anything that cloudpickle takes, lambdas and functions of notebooks among them; each rank gets its own
    copy of ``args``.

    When one rank fails, the others are stopped and its failure is raised. Ctrl-C (in the main thread)
    interrupts the ranks, waits for at most 5 s, kills what is left and raises `KeyboardInterrupt`; a second
    one kills at once. No process outlives the call, and none outlives a caller that is killed.

    Args:
        fn: a plain function. A coroutine function is refused: wrap it, ``lambda: asynccoll.run(main())``.
        nproc: number of ranks, at least 1.
        args: its arguments, the same on every rank.
        timeout: seconds, or a `timedelta`, for the whole call; None is no limit.

    Raises:
        Exception: the one that ended ``fn`` first, with a note that names the rank and shows its traceback.
        RemoteError: the same for one that cannot be rebuilt here.
        PeerLost: a process ended without a result (killed, or left by ``sys.exit``); ``.peer`` is its rank.
        CollectiveTimeout: the limit passed; ``.missing`` holds the ranks that were still running.
        ValueError: a bad ``nproc`` or ``timeout``.
    """
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"launch: nproc must be an integer of at least 1, not {nproc!r}")
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if limit is not None and not (0 < limit < math.inf):
        raise ValueError(f"launch: timeout must be a positive number of seconds or None, not {timeout!r}")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(
            f"launch: {fn!r} is a coroutine function; pass lambda: asynccoll.run({fn.__name__}(...)) instead"
        )
    with contextlib.ExitStack() as stack:
        source = _memory_file(stack)
        with open(source, "wb", closefd=False) as file:
            pickle.dump((sys.path, sys.argv), file)
            pickler(file).dump((fn, args))
        reports = [_memory_file(stack) for _ in range(nproc)]
        signals = stack.enter_context(SignalPipe([signal.SIGINT]))
        job = stack.enter_context(
            Job(
                nproc,
                lambda rank: [sys.executable, "-P", "-c", _CHILD, str(source), str(reports[rank])],
                pass_fds=lambda rank: (source, reports[rank]),
            )
        )
        cause = job.supervise(timeout=limit, signals=signals)
        if not isinstance(cause, signal.Signals):
            if isinstance(cause, Overdue):
                _raise_overdue(job, cause)
            for end in job.exits:
                if end.returncode or _kind(reports[end.rank]) != _VALUE:
                    _raise_failure(job, end, reports)
            return [_load(report) for report in reports]
    # The handler that was there before gets the signal too; Python's own raises this by itself.
    signal.raise_signal(cause)
    raise KeyboardInterrupt


def run_child(source: BinaryIO | mmap.mmap, report: int) -> None:
    """One rank's life: call the function that ``source`` holds, write its value or failure to ``report``.

    Exits with code 1 after a failure, silently: the launcher tells. `SystemExit` passes: its code says what
    it says.
    """
    import cloudpickle

    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(report, "wb") as file:
        try:
            fn, args = pickle.load(source)
            value = fn(*args)
            file.write(_VALUE)
            cloudpickle.dump(value, file)
        except SystemExit:
            raise
        except BaseException as error:
            file.seek(0)
            file.truncate()
            file.write(_FAILURE)
            pickle.dump(describe(error), file)
            raise SystemExit(1) from error


def _memory_file(stack: contextlib.ExitStack) -> int:
    """A descriptor of an empty file without a name, closed by ``stack``; in memory where the system can."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("asynccoll-launch")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    stack.callback(os.close, fd)
    return fd


def _kind(report: int) -> bytes:
    return os.pread(report, 1, 0)


def _load(report: int) -> Any:
    with open(report, "rb", closefd=False) as file:
        file.seek(1)
        return pickle.load(file)


def _raise_overdue(job: Job, cause: Overdue) -> NoReturn:
    error = CollectiveTimeout(cause.ranks, cause.limit, OpContext("launch", elapsed=job.elapsed))
    error.detail = text = (
        f"{cause}; the job was stopped. Look at what those ranks wait for, or raise timeout=."
    )
    error.args = (text,)
    raise error


def _raise_failure(job: Job, end: Exit, reports: Sequence[int]) -> NoReturn:
    """Raise for the rank that failed first. ``end`` is the first bad end that was observed."""
    failures: dict[int, Failure] = {
        other.rank: _load(reports[other.rank])
        for other in job.exits
        if other.returncode and _kind(reports[other.rank]) == _FAILURE
    }
    if end.rank not in failures:
        raise lost(end, job.nproc, "launch", "before it had returned a result")
    raise_first(failures, job.nproc, "launch", end.elapsed)
