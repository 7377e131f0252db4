"""Ranks as forked processes: everything is imported before, so a mesh of 16 is up in a fraction of a second. Knows no figure.

A `Crew` forks its ranks, hears what they say (dicts, each with the monotonic time ``at``, which all processes of a host share),
tells them to go on, stops and kills them. Whatever happens, none of its processes outlives it.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
import traceback

from tests.reliability.common import LOOPS

DEADLINE = 60.0
"""Seconds for anything that a rank is waited for: a hang is a failure."""


class Hang(AssertionError):
    """A rank did not say or do what was waited for."""


class Rank:
    """The child's side: who it is, and its two pipes."""

    def __init__(self, rank, size, reads, writes):
        self.rank = rank
        self.size = size
        self._reads = reads
        self._writes = writes

    def say(self, kind, **facts):
        """Tell the parent. One write, so that lines never mix."""
        line = json.dumps({"kind": kind, **facts, "at": time.monotonic()}) + "\n"
        os.write(self._writes, line.encode())

    def failed(self, error, **facts):
        """Tell the parent of an exception, ``"failed"``: its type, the ranks and the reason that it gives, its text."""
        peers = sorted(getattr(error, "peers", ()))
        reason = getattr(error, "reason", "")
        self.say("failed", type=type(error).__name__, peers=peers, reason=reason, text=str(error), **facts)

    async def told(self):
        """Until the parent has said `Crew.tell` once more."""
        loop = asyncio.get_running_loop()
        come = loop.create_future()
        loop.add_reader(self._reads, lambda: come.done() or come.set_result(None))
        try:
            await come
            os.read(self._reads, 1)
        finally:
            loop.remove_reader(self._reads)


class Crew:
    """``size`` forked ranks that run ``body(me, *arguments)``; a context manager.

    Args:
        size: number of ranks.
        body: coroutine function; gets a `Rank` and the arguments.
        loop: name of an event loop.
        env: environment variables for all ranks.
        host: where rank 0 listens; ``enter(rank)`` is called in each child first (to change its network, say), and where it is
            given rank 0 makes its listener itself.
    """

    def __init__(self, size, body, *arguments, loop="asyncio", env=None, host="127.0.0.1", enter=None):
        self.size = size
        self.pids = {}
        """Rank -> process, as long as it has not been waited for."""
        self.codes = {}
        """Rank -> exit code, or minus the signal."""
        self.heard = {rank: [] for rank in range(size)}
        """Rank -> what it has said and nobody has asked for."""
        self._tails = {}
        self._selector = selectors.DefaultSelector()
        self._downs = {}
        listener = socket.create_server((host, 0), backlog=4 * size) if enter is None else None
        shared = {
            "ASYNCCOLL_WORLD_SIZE": str(size),
            "ASYNCCOLL_MASTER_ADDR": host,
            "ASYNCCOLL_MASTER_PORT": str(29500 if listener is None else listener.getsockname()[1]),
            "ASYNCCOLL_SECRET": secrets.token_hex(16),
            **(env or {}),
        }
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()  # else the first collection of each child copies every page
        pipes = [(os.pipe(), os.pipe()) for _ in range(size)]
        parent = os.getpid()
        try:
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    _die_with(parent)
                    kept = {pipes[rank][0][0], pipes[rank][1][1]}
                    for fd in {fd for pair in pipes for pipe in pair for fd in pipe} - kept:
                        os.close(fd)
                    own = {"ASYNCCOLL_RANK": str(rank)}
                    if listener is not None and rank == 0:
                        own["ASYNCCOLL_RENDEZVOUS_FD"] = str(listener.fileno())
                    elif listener is not None:
                        listener.close()
                    if enter is not None:
                        enter(rank)
                    me = Rank(rank, size, pipes[rank][0][0], pipes[rank][1][1])
                    _child({**shared, **own}, LOOPS[loop], body, me, arguments)
                self.pids[rank] = pid
        finally:
            gc.unfreeze()
            if listener is not None:
                listener.close()
            for rank, (down, up) in enumerate(pipes):
                os.close(down[0])
                os.close(up[1])
                self._downs[rank] = down[1]
                self._tails[rank] = b""
                self._selector.register(up[0], selectors.EVENT_READ, rank)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in list(self.pids):
            os.kill(self.pids[rank], signal.SIGKILL)
            self._reap(rank)
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        for fd in self._downs.values():
            os.close(fd)

    def tell(self, ranks):
        """Wake these ranks from `Rank.told`."""
        for rank in ranks:
            try:
                os.write(self._downs[rank], b".")
            except BrokenPipeError:
                continue  # it has ended, which its exit code tells

    def send(self, rank, number):
        """Send a signal; the monotonic time just before."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def hear(self, kind, ranks, limit=DEADLINE):
        """Wait until each of ``ranks`` has said something of ``kind``: rank -> the fact. What else they said stays."""
        found = {}
        deadline = time.monotonic() + limit
        while True:
            for rank in ranks:
                for fact in self.heard[rank]:
                    if rank not in found and fact["kind"] == kind:
                        found[rank] = fact
                        self.heard[rank].remove(fact)
                        break
            missing = [rank for rank in ranks if rank not in found]
            if not missing:
                return found
            self._listen(deadline, f"{kind!r} from ranks {missing}")

    def wait(self, ranks, limit=DEADLINE):
        """Wait until these ranks have ended: their exit codes."""
        deadline = time.monotonic() + limit
        while any(rank in self.pids for rank in ranks):
            self._listen(deadline, f"the end of ranks {[rank for rank in ranks if rank in self.pids]}")
        return {rank: self.codes[rank] for rank in ranks}

    def _listen(self, deadline, awaited):
        left = deadline - time.monotonic()
        events = self._selector.select(left) if left > 0 else []
        if not events:
            raise Hang(f"no {awaited}; unread: { {rank: said for rank, said in self.heard.items() if said} }")
        for key, _ in events:
            rank = key.data
            data = os.read(key.fd, 1 << 16)
            *lines, self._tails[rank] = (self._tails[rank] + data).split(b"\n")
            self.heard[rank] += map(json.loads, lines)
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                self._reap(rank)
                if self.codes[rank] not in (0, -signal.SIGKILL, -signal.SIGTERM):
                    raise AssertionError(
                        f"rank {rank} ended with {self.codes[rank]} while waiting for {awaited}"
                    )

    def _reap(self, rank):
        self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids.pop(rank), 0)[1])


def _die_with(parent):
    """Let the kernel end this process when ``parent`` ends, however that comes about."""
    with contextlib.suppress(AttributeError, OSError):  # where there is no prctl, `Crew.__exit__` has to do
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, include/uapi/linux/prctl.h
    if os.getppid() != parent:
        os._exit(1)


def _child(environment, loop_factory, body, me, arguments):
    """Run one rank, and end its process here: nothing of the parent is to run in it."""
    code = 1
    try:
        os.environ.update(environment)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(body(me, *arguments))
        code = 0
    except BaseException:  # noqa: BLE001 (told, and the exit code says so: there is nobody above)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
