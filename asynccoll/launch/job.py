"""One job: starts ranks, watches them, stops them. Knows processes and descriptors; not what they run."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from asynccoll.errors import name_ranks
from asynccoll.launch import guard
from asynccoll.launch.ends import Cause, Exit, Overdue
from asynccoll.launch.environment import rank_environment
from asynccoll.launch.signals import SignalPipe

__all__ = ["GRACE", "Job"]

GRACE = 5.0
"""Seconds from asking a rank to end to SIGKILL: time for a small checkpoint, short enough to wait for."""

BACKLOG = 128
"""Connections that may wait for rank 0's accept, at least. Linux cuts it to net.core.somaxconn (4096)."""


class _Member:
    """One rank's process. ``process.returncode`` is None until its end was observed."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.end = -1  # descriptor that becomes readable when the process has ended; -1 before it was made
        self.group = process.pid  # its process group; 0 once that is known to be empty


class Job:
    """``nproc`` processes with the environment of ranks. A context manager: leaving it kills what is left.

    Args:
        nproc: number of ranks, at least 1.
        command: gives the argument vector of a rank.
        capture: True: standard output and error of every rank are pipes (`streams`). False: both are
            inherited.
        reads: rank 0 has the launcher's standard input. The other ranks have none.
        pass_fds: gives the descriptors that a rank inherits, beside rank 0's listening socket.
        grace: seconds between asking ranks to end and SIGKILL.
        environ: what the environment of every rank starts from; None is `os.environ`.

    Entering raises `OSError` where a process cannot be started; those that were started are stopped before.
    """

    def __init__(
        self,
        nproc: int,
        command: Callable[[int], Sequence[str]],
        *,
        capture: bool = False,
        reads: bool = False,
        pass_fds: Callable[[int], Sequence[int]] = lambda rank: (),
        grace: float = GRACE,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.nproc = nproc
        self.exits: list[Exit] = []  # in the order in which the ends were observed
        self._command = command
        self._capture = capture
        self._reads = reads
        self._pass_fds = pass_fds
        self._grace = grace
        self._environ = os.environ if environ is None else environ
        self._members: list[_Member] = []  # by rank
        self._running: dict[int, _Member] = {}  # those whose end was not observed yet, by rank
        self._guard: subprocess.Popen[bytes] | None = None
        self._selector: selectors.BaseSelector  # made by `_start`: ends of members, and signals
        self._open = contextlib.ExitStack()  # everything that `close` has to give back
        self._began = 0.0  # monotonic time of the start
        self._kill_at: float | None = None  # monotonic time; None: not asked to end yet, inf: killed

    def __enter__(self) -> Job:
        if not hasattr(os, "killpg"):
            raise OSError(
                "this platform has no process groups, which local ranks are held together by: start each rank yourself, with "
                "ASYNCCOLL_RANK, ASYNCCOLL_WORLD_SIZE, ASYNCCOLL_MASTER_ADDR and ASYNCCOLL_MASTER_PORT set"
            )
        try:
            self._start()
        except BaseException:  # re-raised: no rank may be left running, Ctrl-C or not
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks whose end was not observed yet, in ascending order."""
        return tuple(sorted(self._running))

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def streams(self, rank: int) -> tuple[int, int]:
        """Descriptors to read ``rank``'s output and error from (``capture`` only); `close` closes them."""
        process = self._members[rank].process
        if process.stdout is None or process.stderr is None:
            raise ValueError("this job does not capture output: construct it with capture=True")
        return process.stdout.fileno(), process.stderr.fileno()

    def signal(self, number: int) -> None:
        """Send signal ``number`` to every rank and what it started, except what made a session of its own."""
        for member in self._members:
            if member.group:
                guard.kill_group(member.group, number)

    def supervise(
        self,
        *,
        timeout: float | None = None,
        keep_going: bool = False,
        signals: SignalPipe | None = None,
        notify: Callable[[str, int | None], None] = lambda text, rank: None,
        on_end: Callable[[Exit], None] = lambda end: None,
    ) -> Cause | None:
        """Wait until every rank has ended; stop the rest at the first failure, at the limit, or on a signal.

        To stop is to send SIGTERM (or the signal that is the cause), and SIGKILL after the grace. A signal
        that arrives while ranks are being stopped kills them at once. SIGTSTP suspends ranks and launcher
        until SIGCONT.

        Args:
            timeout: seconds from the start of the job; None is no limit.
            keep_going: a rank that fails does not stop the others, which may `shrink`; it is the cause all the same.
            signals: an open pipe, for callers that handle signals.
            notify: is given one line of text for people, and the rank that it is about or None.
            on_end: is given the end of every rank, as it is observed.

        Returns the cause of the stop, or None where every rank exited with code 0.
        """
        cause: Cause | None = None
        limit = None if timeout is None else self._began + timeout
        if signals is not None:
            self._selector.register(signals.fd, selectors.EVENT_READ)
        while self._running or self._left_behind():
            if not self._running and self._kill_at is None:
                self._ask(signal.SIGTERM)  # every rank is done: what they left behind goes with them
            ended = self._wait(limit if self._kill_at is None else self._kill_at)
            for number in () if signals is None else signals.read():
                if number == signal.SIGTSTP:
                    self._suspend()
                elif self._kill_at is not None:
                    self._kill()
                else:
                    cause = signal.Signals(number)
                    if cause != signal.SIGPIPE:
                        notify(
                            f"{cause.name}: stopping {name_ranks(self.running)} (once more kills at once)",
                            None,
                        )
                    self._ask(signal.SIGTERM if cause == signal.SIGPIPE else cause)
            for member in ended:
                end = self._reap(member)
                on_end(end)
                if end.returncode and keep_going and self._kill_at is None:
                    cause = cause or end
                    notify(
                        f"{end}; {name_ranks(self.running)} go on" if self._running else str(end), end.rank
                    )
                elif end.returncode and self._kill_at is None:
                    cause = end
                    notify(f"{end}; stopping the others" if self._running else str(end), end.rank)
                    self._ask(signal.SIGTERM)
            now = time.monotonic()
            if self._kill_at is None:
                if timeout is not None and limit is not None and now >= limit and self._running:
                    cause = Overdue(timeout, self.running)
                    notify(f"{cause}; stopping the job", None)
                    self._ask(signal.SIGTERM)
            elif now >= self._kill_at:
                if self._running:
                    notify(f"{name_ranks(self.running)} did not end within {self._grace:g} s; killed", None)
                self._kill()
        return cause

    def close(self) -> None:
        """Kill and reap what is left, and give back every descriptor. Twice is silent."""
        self.signal(signal.SIGKILL)
        for member in list(self._running.values()):
            self._reap(member)
        for member in self._members:
            member.group = 0  # killed: its number is anybody's now
        self._open.close()

    def _start(self) -> None:
        listener = self._open.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.bind(("127.0.0.1", 0))
        listener.listen(max(BACKLOG, 2 * self.nproc))
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._began = time.monotonic()
        self._start_guard()
        secret = secrets.token_hex(32)
        port: int = listener.getsockname()[1]
        output = subprocess.PIPE if self._capture else None
        for rank in range(self.nproc):
            inherited = tuple(self._pass_fds(rank)) + ((listener.fileno(),) if rank == 0 else ())
            process = subprocess.Popen(
                self._command(rank),
                env=rank_environment(self._environ, rank, self.nproc, port, secret, listener.fileno()),
                stdin=None if self._reads and rank == 0 else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                bufsize=0,
                pass_fds=inherited,
                start_new_session=True,
            )
            member = _Member(rank, process)
            self._members.append(member)
            self._running[rank] = member
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    self._open.callback(stream.close)
            self._tell_guard("+", member.group)
            member.end = _end_descriptor(process)
            self._selector.register(member.end, selectors.EVENT_READ, member)

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(self._grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._open.callback(self._end_guard, self._guard)

    def _tell_guard(self, sign: str, group: int) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            # Somebody killed the guard: the job is as good as before, it only lost its insurance.
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(f"{sign}{group}\n".encode())

    @staticmethod
    def _end_guard(process: subprocess.Popen[bytes]) -> None:
        process.kill()  # before its input ends, or it would look for something to stop
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _wait(self, due: float | None) -> list[_Member]:
        """Members whose processes have ended, in order; none at monotonic time ``due``, or on a signal."""
        timeout = None if due is None or due == math.inf else max(0.0, due - time.monotonic())
        if not self._running:
            timeout = guard.POLL if timeout is None else min(timeout, guard.POLL)
        return [key.data for key, _ in self._selector.select(timeout) if key.data is not None]

    def _reap(self, member: _Member) -> Exit:
        """Collect ``member``, whose process has ended or was killed."""
        process = member.process
        end = Exit(member.rank, process.pid, process.wait(), self.elapsed)
        del self._running[member.rank]
        if member.end >= 0:
            self._selector.unregister(member.end)
            os.close(member.end)
        self.exits.append(end)
        self._drop_if_empty(member)
        return end

    def _drop_if_empty(self, member: _Member) -> None:
        if not guard.group_alive(member.group):
            # From here on the number may be given to a stranger's group: it must never be signalled again.
            self._tell_guard("-", member.group)
            member.group = 0

    def _left_behind(self) -> bool:
        """True while ended ranks' groups are not empty, and were not killed."""
        for member in self._members:
            if member.group:
                self._drop_if_empty(member)
        return self._kill_at != math.inf and any(member.group for member in self._members)

    def _ask(self, number: int) -> None:
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped process acts on nothing else but SIGKILL
        self._kill_at = time.monotonic() + self._grace

    def _kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._kill_at = math.inf

    def _suspend(self) -> None:
        self.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.signal(signal.SIGCONT)  # reached when something has continued the launcher


def _end_descriptor(process: subprocess.Popen[bytes]) -> int:
    """A descriptor that becomes readable when ``process`` has ended. Reading it does not reap."""
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, a kernel before 5.3, or a sandbox that forbids it
        reader, writer = os.pipe()

        def wait() -> None:
            process.wait()
            os.close(writer)

        threading.Thread(target=wait, name=f"asynccoll-wait-{process.pid}", daemon=True).start()
        return reader
