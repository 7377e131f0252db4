"""`local`: ranks on this host that stay, for functions from a script or a notebook. Knows processes and pickles; not meshes.

The workers are a `Job`: it is watched by a thread, so that nothing here waits for processes. Each has a socket to this process:
functions go out, results come back (`asynccoll.launch.frames`; the other end is `asynccoll.worker`). The end of that socket tells
either side that the other is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import os
import pickle
import select
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from asynccoll.background import LoopThread, result_of
from asynccoll.errors import NotInitialized

if TYPE_CHECKING:
    from asynccoll.launch.ends import Exit
    from asynccoll.launch.job import Job
    from asynccoll.launch.signals import SignalPipe

__all__ = ["LocalWorkers", "SyncLocalWorkers", "local", "sync_local"]

_PATIENCE: Final = 1.0
"""Seconds that workers get to end by themselves, or to come back from a function that was interrupted."""
_GRACE: Final = 0.5
"""Seconds from asking what is left to end (SIGTERM) to killing it. Both together are the longest end of a world."""
_WAKE: Final = 0.25
"""Seconds after which a loop that waits for workers looks up: a notebook kernel cancels a cell that awaits from its signal handler,
which a sleeping loop does not notice."""
_OUTPUT_SECONDS: Final = 1.0
"""How long the end waits for a reader of this process's output that stands still."""


class _Reply(NamedTuple):
    """What a worker has answered; ``kind`` is empty if it is gone."""

    kind: bytes
    payload: bytes = b""


class LocalWorkers:
    """Workers on this host, one for each rank, from `local`. ``async with``, or await it and call `close`.

    They live from one `run` to the next: what a function leaves in its globals is there for the next one, and the communicator
    stays open. After a run that failed or was interrupted the ranks may be out of step, so the next run begins with a new one.
    """

    def __init__(self, nproc: int, facade: bool = False) -> None:
        if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
            raise ValueError(f"local: the number of workers must be an integer of at least 1, not {nproc!r}")
        self._nproc = nproc
        self._facade = facade
        self._job: Job | None = None
        self._signals: SignalPipe | None = None
        """How the watching thread is told to stop the job; open as long as it runs."""
        self._telling = threading.Lock()
        """Held while `_signals` is used or taken away."""
        self._ended: asyncio.Future[None] | None = None
        """Done when every worker's process has ended and its output is written."""
        self._writers: list[asyncio.StreamWriter] = []
        self._listeners: list[asyncio.Task[None]] = []
        self._replies: list[asyncio.Future[_Reply]] = []
        """What each worker will answer to the latest run, or to its start. Never fails."""
        self._turn = asyncio.Lock()
        """Held by a run: they go one after the other."""
        self._number = 0
        self._anew = False
        """The next run begins with new meshes."""
        self._first: Exit | None = None
        """The first end of a worker's process that was observed."""
        self._closing = False
        self._overdue = False
        """Workers did not come back from an interrupt, and were stopped for it."""

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._nproc

    @property
    def closed(self) -> bool:
        """`close` has been called, or a worker has died."""
        return self._closing or self._ended is None or self._ended.done()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._nproc}{' closed' if self.closed else ''}>"

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        if self._ended is not None:
            raise RuntimeError("these workers have been started already; call asynccoll.local() for others")
        try:
            await self._start()
        except BaseException:  # re-raised: no worker may be left, Ctrl-C or not
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(*args)`` on every worker; the results in rank order.

        ``fn`` may be a coroutine function, or return anything that can be awaited, such as a `Work`: the worker awaits it.
        Inside, the module's functions work on the workers' communicator (`asynccoll.rank`, `asynccoll.get_communicator`, the
        verbs). Functions, arguments and results may be anything that cloudpickle takes, what a notebook defines included.
        Functions of ``__main__`` share one namespace in each worker; names that they use and that ``__main__`` has here are
        sent along, and replace what is there.

        Several runs at once go one after the other. Cancelling interrupts the functions (`KeyboardInterrupt` in code that runs,
        `asyncio.CancelledError` in a coroutine that waits); workers that have not come back after a second are stopped.

        Raises:
            Exception: the one that ended ``fn`` first, with a note that names the rank and shows its traceback. The functions of
                the other ranks are interrupted.
            RemoteError: the same for one that cannot be rebuilt here, or that is no `Exception`.
            PeerLost: a worker's process has ended; the message names its rank and exit code. Every later run raises it, too.
            NotInitialized: they are closed, or were not started.
        """
        from asynccoll.launch.frames import RUN, frame
        from asynccoll.launch.reports import pickler

        async with self._turn:
            if self._replies:
                await asyncio.wait(self._replies)  # those of an interrupted run
            self._check()
            call = io.BytesIO()
            pickler(call).dump((fn, args))
            self._number += 1
            self._expect()
            message = frame(RUN, pickle.dumps((self._number, self._anew, call.getvalue())))
            self._anew = True  # until it is known that this one has ended well
            for writer in self._writers:
                writer.write(message)
            results = [pickle.loads(payload) for payload in await self._answers()]
            self._anew = False
            return results

    async def close(self) -> None:
        """End all workers, within two seconds, whatever they are doing. Twice is silent. Pending runs raise."""
        self._closing = True
        if self._ended is None:
            return
        for writer in self._writers:
            writer.close()
        try:
            await asyncio.wait([self._ended], timeout=_PATIENCE)
        finally:
            self._stop()
        await asyncio.shield(self._ended)
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        for writer in self._writers:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    # -- the workers' processes ---------------------------------------------------------------------------

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        started: asyncio.Future[None] = loop.create_future()
        mine, theirs = zip(*(socket.socketpair() for _ in range(self._nproc)), strict=True)
        threading.Thread(
            target=self._watch, args=(loop, theirs, started, self._ended), name="asynccoll-local", daemon=True
        ).start()
        self._expect()
        try:
            await started
        finally:
            for rank, sock in enumerate(mine):
                reader, writer = await asyncio.open_unix_connection(sock=sock)
                self._writers.append(writer)
                self._listeners.append(loop.create_task(self._listen(rank, reader)))
        hello = pickle.dumps((sys.path, sys.argv, self._facade))
        for writer in self._writers:
            writer.write(hello)
        await self._answers()

    def _watch(
        self,
        loop: asyncio.AbstractEventLoop,
        theirs: tuple[socket.socket, ...],
        started: asyncio.Future[None],
        ended: asyncio.Future[None],
    ) -> None:
        """The watching thread: start the workers, carry their output, and be there until all have ended."""

        def tell(future: asyncio.Future[None], error: BaseException | None = None) -> None:
            def end() -> None:
                if not future.done():
                    future.set_exception(error) if error is not None else future.set_result(None)

            # Where the loop is closed nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        try:
            self._supervise(theirs, lambda: tell(started))
        except BaseException as error:  # noqa: BLE001 (raised where the workers are started)
            tell(started, error)
        finally:
            for sock in theirs:
                sock.close()
            tell(ended)

    def _supervise(self, theirs: tuple[socket.socket, ...], started: Callable[[], None]) -> None:
        from asynccoll.launch.frames import CHILD
        from asynccoll.launch.job import Job
        from asynccoll.launch.output import Output
        from asynccoll.launch.signals import SignalPipe

        with contextlib.ExitStack() as stack:
            self._signals = signals = stack.enter_context(SignalPipe([]))
            stack.callback(self._supervised)
            self._job = job = Job(
                self._nproc,
                lambda rank: [sys.executable, "-P", "-c", CHILD, str(theirs[rank].fileno())],
                capture=True,
                pass_fds=lambda rank: (theirs[rank].fileno(),),
                grace=_GRACE,
            )
            stack.enter_context(job)
            for sock in theirs:
                sock.close()  # or their end would not be seen here
            colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
            output = Output(self._nproc, prefix=True, colour=colour, on_broken=lambda: None)
            for rank in range(self._nproc):
                output.attach(rank, *job.streams(rank))
            output.start()
            started()
            try:
                job.supervise(signals=signals, on_end=self._on_end)
            finally:
                output.finish()
                if select.select([output.done], [], [], _OUTPUT_SECONDS)[0]:
                    output.close()

    def _on_end(self, end: Exit) -> None:
        """In the watching thread: a worker's process has ended. The job stops the others, unless its exit code was 0."""
        if self._first is None:
            self._first = end
            if not end.returncode and not self._closing:
                self._stop()

    def _stop(self) -> None:
        """Ask the watching thread to end what is left."""
        import signal

        with self._telling:
            if self._signals is not None:
                self._signals.inject(signal.SIGPIPE)

    def _supervised(self) -> None:
        """In the watching thread: there is nothing to stop any more."""
        with self._telling:
            self._signals = None

    # -- what they answer ---------------------------------------------------------------------------------

    def _expect(self) -> None:
        loop = asyncio.get_running_loop()
        self._replies = [loop.create_future() for _ in range(self._nproc)]

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Hand on what worker ``rank`` answers, until it is gone."""
        from asynccoll.launch.frames import HEAD, length_of

        assert self._ended is not None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(HEAD)
                reply = _Reply(head[:1], await reader.readexactly(length_of(head)))
                self._replies[rank].set_result(reply)
        if not self._closing:
            # Its process is ending, as a rule, and how is still to be seen.
            await asyncio.wait([self._ended], timeout=_PATIENCE)
            self._stop()
        await asyncio.shield(self._ended)
        for reply_ in self._replies:
            if not reply_.done():
                reply_.set_result(_Reply(b""))

    async def _answers(self) -> list[bytes]:
        """What all workers answer. Raises for the first that failed, once all have come back or are gone."""
        from asynccoll.launch.frames import FAILURE, VALUE

        replies = self._replies
        pending = set(replies)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=_WAKE, return_when=asyncio.FIRST_COMPLETED
                )
                if pending and any(reply.result().kind != VALUE for reply in done):
                    self._interrupt()
                    await asyncio.wait(pending)
                    break
        except asyncio.CancelledError:
            self._interrupt()
            raise
        answers = [reply.result() for reply in replies]
        failures = {
            rank: pickle.loads(one.payload) for rank, one in enumerate(answers) if one.kind == FAILURE
        }
        if failures and (self._overdue or all(one.kind for one in answers)):
            from asynccoll.launch.reports import raise_first

            raise_first(failures, self._nproc, "local", self._elapsed(), Exception)
        self._check()
        return [one.payload for one in answers]

    def _interrupt(self) -> None:
        """Interrupt the functions that still run; workers that do not come back from it are stopped."""
        from asynccoll.launch.frames import INTERRUPT, frame

        message = frame(INTERRUPT, pickle.dumps(self._number))
        waiting = [rank for rank, reply in enumerate(self._replies) if not reply.done()]
        for rank in waiting:
            if not self._writers[rank].is_closing():
                self._writers[rank].write(message)
        replies = self._replies

        def give_up() -> None:
            if replies is self._replies and not all(reply.done() for reply in replies):
                self._overdue = True
                self._stop()

        asyncio.get_running_loop().call_later(_PATIENCE, give_up)

    def _elapsed(self) -> float:
        return 0.0 if self._job is None else self._job.elapsed

    def _check(self) -> None:
        """Raise if the workers are not all there."""
        from asynccoll.launch.reports import lost

        if self._closing or self._ended is None:
            raise NotInitialized("these workers are closed; start others with asynccoll.local()")
        if not self._ended.done():
            return
        if self._overdue:
            raise NotInitialized(
                "a function did not end when it was interrupted, so its worker and all others were stopped; "
                "start others with asynccoll.local()"
            )
        assert self._first is not None
        raise lost(self._first, self._nproc, "local", "while it was to run functions")


def local(n: int) -> LocalWorkers:
    """``n`` local worker processes with an open mesh: ``async with asynccoll.local(4) as workers: await workers.run(fn)``.

    Each is a fresh interpreter, started as `asynccoll run` starts ranks, with ``init()`` done. Their output appears here, each line
    with the rank in front; they have no input. They end with the block, within two seconds, and by themselves if this process
    dies, however it does. In a notebook ``workers = await asynccoll.local(4)`` keeps them for several cells, until
    ``await workers.close()``.

    Raises:
        ValueError: ``n`` is not an integer of at least 1.
        OSError: a process could not be started.
    """
    return LocalWorkers(n)


class SyncLocalWorkers:
    """The blocking form of `LocalWorkers`: ``with asynccoll.sync.local(4) as workers: workers.run(fn)``.

    Inside ``fn`` the verbs of `asynccoll.sync` work as well, where it is a plain function.
    """

    def __init__(self, n: int) -> None:
        self._workers = LocalWorkers(n, facade=True)
        self._thread = LoopThread("asynccoll-local-loop")
        atexit.register(self.close)
        try:
            self._wait(self._workers.__aenter__())
        except BaseException:  # re-raised: whatever ends the wait, Ctrl-C too, nothing may be left behind
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._workers.world_size

    @property
    def closed(self) -> bool:
        """`close` has been called, or a worker has died."""
        return self._workers.closed

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(*args)`` on every worker; the results in rank order: see `LocalWorkers.run`.

        Ctrl-C interrupts the functions.
        """
        if not self._thread.alive:
            raise NotInitialized("these workers are closed; start others with asynccoll.sync.local()")
        results: list[Any] = self._wait(self._workers.run(fn, *args))
        return results

    def close(self) -> None:
        """End all workers, within two seconds, whatever they are doing. Twice is silent."""
        if self._thread.alive:
            try:
                self._wait(self._workers.close())
            finally:
                self._thread.stop()
                atexit.unregister(self.close)

    def _wait(self, coroutine: Any) -> Any:
        future = self._thread.run(coroutine)
        try:
            return result_of(future)
        except BaseException:  # re-raised
            future.cancel()  # after Ctrl-C it is still under way; after any other exception this does nothing
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._workers).replace("<LocalWorkers", "<SyncLocalWorkers", 1)


def sync_local(n: int) -> SyncLocalWorkers:
    """``n`` local worker processes, started at the call: see `asynccoll.local`. A context manager; `close` ends them, too."""
    return SyncLocalWorkers(n)
