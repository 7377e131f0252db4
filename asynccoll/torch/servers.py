"""Servers in processes of their own, whose readiness and death are known. Knows processes and one pipe, not what a server does.

The pipe carries a few JSON texts from the child, and nothing else: that it has begun, that its groups are up, what ended it.
What the child gets is in a file without a name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import IO, TYPE_CHECKING, Any

from asynccoll.errors import AsynccollError
from asynccoll.pickling import text_of
from asynccoll.torch.opening import Limit, Plan, given_method, planned

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["ServerFailed", "ServerProcess", "Startable", "start_server"]

LOOK = 0.25
"""Seconds between two looks at a child beside its sentinel, which a process that the child forked keeps from telling its end."""

FOLLOW = 1.0
"""Seconds between two looks of a child at who its parent is."""

GRACE = 5.0
"""Seconds that a child whose parent has ended gets for ending in its own way, before it is killed."""

_LAST_WORDS = 1.0
"""Seconds for a child that is ending to be reaped, once its sentinel has told."""

_MAX_TEXT = 7_000
"""Characters of a message and of the end of a traceback that a child reports: with both, of 4 bytes each, and nobody reading, the
pipe (64 KiB, pipe(7)) must not hold up its end.
"""


class Startable(ABC):
    """What runs in a server's process: pickled there, given its groups, started.

    Attributes:
        groups: the process groups of `start_server`, in its order; set before `start`. ``GroupMember.NON_GROUP_MEMBER`` where the
            server is not a member.
    """

    groups: list[dist.ProcessGroup]

    @abstractmethod
    def start(self) -> None:
        """Serve until the work is done. torch's default process group is up. The process ends with it."""


class ServerFailed(AsynccollError, RuntimeError):
    """A server's process ended by something else than the return of `Startable.start`.

    Attributes:
        rank: the server's rank.
        name: the name of its process.
        stage: what it was doing: ``"spawn"``, ``"unpickle"``, ``"init_process_group"`` or ``"start"``.
        type_name: qualified name of the exception; empty where a signal or ``os._exit`` ended it.
        remote_traceback: its traceback as text; empty where there is none.
        exitcode: of the process, minus the number of the signal that ended it.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        stage: str,
        exitcode: int | None,
        *,
        type_name: str = "",
        text: str = "",
        remote_traceback: str = "",
    ) -> None:
        self.rank = rank
        self.name = name
        self.stage = stage
        self.exitcode = exitcode
        self.type_name = type_name
        self.remote_traceback = remote_traceback
        doing = {"start": "after its groups were up, in start()", "spawn": "before it could be reached"}.get(
            stage, f"in {stage}"
        )
        if type_name:
            what = f"{type_name}: {text}"
            remedy = f"\n--- traceback of {name} ---\n{remote_traceback.rstrip()}" if remote_traceback else ""
        else:
            what = (
                "without an exception"
                if exitcode is None or exitcode >= 0
                else f"killed by signal {-exitcode}"
            )
            remedy = " Its own output, or the kernel's log, says more."
        super().__init__(
            f"server {name!r} (rank {rank}) ended {doing}, with exit code {exitcode}: {what}.{remedy}"
        )


class ServerProcess(SpawnProcess):
    """The process of a server, as `start_server` returns it: a ``multiprocessing.Process`` that also says how the server is."""

    # Of the parent alone, set by `start_server` once the child runs.
    _rank: int
    _reader: multiprocessing.connection.Connection | None = None
    _lock: threading.Lock
    _stage = "spawn"
    _ready = False
    _report: dict[str, str] | None = None

    def _watch(self, rank: int, reader: multiprocessing.connection.Connection) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._reader = reader

    @property
    def ready(self) -> bool:
        """Its groups have been up, whatever became of it since."""
        self._listen()
        return self._ready

    @property
    def failure(self) -> ServerFailed | None:
        """What ended the server; None while it runs, and where it has returned from ``start`` or exited with code 0.

        Blocks at most a moment.
        """
        self._listen()
        code = self.exitcode
        if code is None:
            return None
        self._listen()  # what it wrote between the two
        return None if code == 0 and self._ready else self._failed(code)

    def wait_ready(self, timeout: float | timedelta | None = None) -> None:
        """Block until the server's groups are up, which is just before its ``start`` is called. Again and again, if you like.

        torch's groups come up on all ranks together: so call it when all ranks are on their way, not one after another.

        Args:
            timeout: seconds, or a timedelta; None: as long as the process lives.

        Raises:
            ServerFailed: the process ended before; raised at once when that happens.
            TimeoutError: it was not ready in time. It goes on.
        """
        limit = _seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            if self.ready:
                return
            if self.exitcode is not None:
                self._listen()
                if self._ready:
                    return
                raise self._failed(self.exitcode)
            left = LOOK if deadline is None else min(LOOK, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(
                    f"server {self.name!r} (rank {self._rank}) was not ready after {limit:g} s: it is in {self._stage}. Every rank "
                    "must open its process group; look at those that have not, or raise timeout="
                )
            reader = self._reader  # another thread may find its end meanwhile
            watched: list[Any] = [self.sentinel] if reader is None else [self.sentinel, reader]
            if self.sentinel in multiprocessing.connection.wait(watched, left):
                self.join(_LAST_WORDS)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process, ``timeout`` seconds at most, but so that Ctrl-C is heard.

        In slices: a signal that comes just before a wait begins does not end it.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            super().join(max(0.0, min(LOOK, deadline - time.monotonic())))
            if self.exitcode is not None or time.monotonic() >= deadline:
                return

    def _listen(self) -> None:
        """Take what the child has said so far."""
        with self._lock:
            try:
                while self._reader is not None and self._reader.poll():
                    said = json.loads(self._reader.recv_bytes())
                    self._stage = str(said["stage"])
                    self._ready = self._ready or self._stage == "start"
                    if "type" in said:
                        self._report = {key: str(value) for key, value in said.items()}
            except (EOFError, OSError, ValueError, KeyError):  # it has ended, maybe within a text
                self._reader = (
                    None  # closed when nobody has it any more: another thread may be waiting for it
                )

    def _failed(self, code: int | None) -> ServerFailed:
        report = self._report or {}
        return ServerFailed(
            self._rank,
            self.name,
            self._stage,
            code,
            type_name=report.get("type", ""),
            text=report.get("text", ""),
            remote_traceback=report.get("traceback", ""),
        )

    def __getstate__(self) -> dict[str, Any]:
        # What the child gets; the parent's own is set later, and nothing of it may go there.
        return {key: value for key, value in vars(self).items() if key not in ("_reader", "_lock")}


def _seconds(timeout: Any) -> float | None:
    """The limit of `ServerProcess.wait_ready`."""
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(f"timeout={timeout!r} is not a number of seconds, a timedelta or None")
    if not limit >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds")
    return float(limit)


class _Parcel:
    """A server and its plan on their way into the process: unpickled there by us, not before, so that a failure can be reported.

    In a file: what goes through the pipe that spawns is read when the child has loaded its main module. Until then a large server
    would hold its caller up, and where that fails the caller would get a broken pipe in place of the reason.
    """

    def __init__(self, server: Startable, init_method: str, plan: Plan) -> None:
        self._server = server
        self._init_method = init_method
        self._plan = plan
        # Open until this process has handed it over.
        self._file: IO[bytes] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Here and not earlier: queues, pipes and locks of multiprocessing pickle only while a process is being spawned.
        try:
            data = ForkingPickler.dumps((self._server, self._init_method, self._plan))
        except Exception as error:
            raise TypeError(
                f"the server {type(self._server).__qualname__} of rank {self._plan.rank} cannot be pickled "
                f"({type(error).__name__}: {text_of(error)}): its class must be at the top of a module, and what cannot be pickled "
                "must be made in start()"
            ) from error
        self._file = _nameless()
        self._file.write(data)
        self._file.flush()
        return _Arrived, (DupFd(self._file.fileno()),)

    def close(self) -> None:
        """It has been handed over, or never will be."""
        if self._file is not None:
            self._file.close()


class _Arrived:
    """What a `_Parcel` is in the child."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor

    def unpack(self) -> tuple[Startable, str, Plan]:
        with open(self._descriptor.detach(), "rb") as file:
            file.seek(0)
            found: tuple[Startable, str, Plan] = pickle.load(file)
        return found


def _nameless() -> IO[bytes]:
    """A file that goes with its last descriptor; in memory, where the system has that."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("asynccoll-server"), "w+b")
    return tempfile.TemporaryFile()


def start_server(
    server: Startable,
    init_method: str | None,
    world_size: int,
    server_rank: int,
    groups: Iterable[Iterable[int]],
    *,
    backend: str = "gloo",
    process_name: str | None = None,
    timeout: Limit | Sequence[Limit] = None,
) -> ServerProcess:
    """Start ``server`` in a process of its own, as rank ``server_rank`` of torch's process group. Returns at once.

    The process is spawned, and a daemon: it ends with this one. There ``init_process_group`` is called with the arguments given
    here, ``server.groups`` is set to its result, and ``server.start()`` is called. Log records of the process begin with its name.

    Args:
        server: pickled into the process. Its class has to be importable there, so not of a script without the usual
            ``if __name__ == "__main__":``.
        init_method, world_size, groups, backend, timeout: as for `init_process_group`.
        server_rank: the server's rank.
        process_name: ``"<class>-<rank>"`` where it is None.

    Returns:
        The process. ``wait_ready(timeout)`` blocks until its groups are up, and raises `ServerFailed` if it dies before;
        ``failure`` tells later what ended it.

    Raises:
        TypeError: the server is not `Startable`, or cannot be pickled. No process is left.
        RuntimeError: ``init_method`` is None, or this process is a daemon, such as a server.
        ValueError: another argument is wrong; the message names it.
    """
    if not isinstance(server, Startable):
        raise TypeError(
            f"server={server!r} is not a Startable: derive its class from asynccoll.torch.Startable"
        )
    plan = planned(world_size, server_rank, groups, backend, timeout)
    where = given_method(init_method)
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            f"start_server() was called in {multiprocessing.current_process().name!r}, which is a daemon (every server is), and a "
            "daemon may have no processes of its own: start all servers from a process that is none"
        )
    name = f"{type(server).__name__}-{plan.rank}" if process_name is None else process_name
    reader, writer = multiprocessing.get_context("spawn").Pipe(duplex=False)
    parcel = _Parcel(server, where, plan)
    process = ServerProcess(target=_serve, name=name, args=(parcel, writer), daemon=True)
    try:
        process.start()
    except BaseException:  # re-raised
        reader.close()
        raise
    finally:
        writer.close()
        parcel.close()
    process._watch(plan.rank, reader)
    return process


# -- in the child -------------------------------------------------------------------------------------------


class _Reporter:
    """The child's end of the pipe."""

    def __init__(self, writer: multiprocessing.connection.Connection) -> None:
        self._writer = writer
        self._stage = ""

    def enter(self, stage: str) -> None:
        """The next thing that may fail."""
        self._stage = stage
        self._say(stage=stage)

    def failed(self, error: BaseException) -> None:
        """What ends the process."""
        self._say(
            stage=self._stage,
            type=type(error).__qualname__,
            text=text_of(error)[:_MAX_TEXT],
            traceback="".join(traceback.format_exception(error))[-_MAX_TEXT:],
        )

    def _say(self, **facts: str) -> None:
        with contextlib.suppress(OSError):  # the parent has gone, or does not want to know
            text = json.dumps(facts, ensure_ascii=False)
            self._writer.send_bytes(text.encode("utf-8", "backslashreplace"))


def _serve(parcel: _Arrived, writer: multiprocessing.connection.Connection) -> None:
    """The child's whole life."""
    _tag_logs(multiprocessing.current_process().name)
    threading.Thread(target=_follow_parent, name="asynccoll-parent", daemon=True).start()
    reporter = _Reporter(writer)
    try:
        reporter.enter("unpickle")
        server, init_method, plan = parcel.unpack()
        import torch.distributed as dist

        reporter.enter("init_process_group")
        server.groups = plan.open(init_method=init_method)
        reporter.enter("start")
        server.start()
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit as error:
        if error.code not in (None, 0):
            reporter.failed(error)
        raise
    except BaseException as error:
        reporter.failed(error)
        raise


def _follow_parent() -> None:
    """End this process when its parent has ended in whatever way: multiprocessing does so only for one that ends in good order.

    By a signal, because torch may be waiting for a peer in native code, for as long as a year.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # Not by its sentinel alone, which any other process that the parent has forked keeps open.
    while parent.is_alive() and os.getppid() == parent.pid:
        parent.join(FOLLOW)
    os.kill(os.getpid(), signal.SIGTERM)
    # Whoever handles that signal in Python does so when torch comes back, which may be never.
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _tag_logs(name: str) -> None:
    """Let what this process logs begin with its name, also where the user's own module has configured logging."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="[%(processName)s] %(levelname)s %(name)s: %(message)s")
        return
    for handler in root.handlers:
        handler.setFormatter(_Tagged(name, handler.formatter or logging.Formatter()))


class _Tagged(logging.Formatter):
    """Another formatter's text, after a name."""

    def __init__(self, name: str, inner: logging.Formatter) -> None:
        super().__init__()
        self._name = name
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return f"[{self._name}] {self._inner.format(record)}"
