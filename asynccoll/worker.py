"""A worker's life: functions come over a socket, results go back. Knows the worker's own process; not who started it.

The main thread has the event loop with the mesh, and runs every function there. A second thread reads the socket, so that an
interrupt, or the end of whoever started this, is heard while a function computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, BinaryIO, Final

from asynccoll import sync, world
from asynccoll.errors import NotInitialized
from asynccoll.launch.frames import FAILURE, HEAD, RUN, VALUE, frame, length_of
from asynccoll.launch.reports import describe

__all__ = ["serve"]

_LAST_SECONDS: Final = 1.5
"""Seconds that a function may still run once the socket has ended: then the process ends, whatever it is doing."""

_AGAIN: Final = 0.02
"""Seconds between two signals of one interrupt."""


def serve(channel: socket.socket, source: BinaryIO, facade: bool) -> None:
    """Run what comes until the socket ends. ``facade``: open the mesh of `asynccoll.sync` too."""
    channel.set_inheritable(False)
    world.run(_Worker(channel, source, facade).live())


class _Unpickler(pickle.Unpickler):
    """Gives all functions of a script or notebook one namespace, that of this process' ``__main__``, so that what one run has
    put in its globals is there in the next."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _at_home(found) if (module, name) == ("cloudpickle.cloudpickle", "_make_function") else found


def _at_home(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_function(code: Any, its_globals: dict[str, Any] | None, *rest: Any) -> Any:
        if its_globals is not None and its_globals.get("__name__") == "__main__":
            its_globals = sys.modules["__main__"].__dict__
        return make(code, its_globals, *rest)

    return make_function


class _Worker:
    def __init__(self, channel: socket.socket, source: BinaryIO, facade: bool) -> None:
        self._channel = channel
        self._source = source
        self._facade = facade
        self._runs: asyncio.Queue[tuple[int, bool, bytes] | None] = asyncio.Queue()
        """What is to be run; None: the socket has ended."""
        self._running = -1
        """Number of the run whose function is being executed, or -1."""
        self._stopped = -1
        """Number of the latest run that was interrupted: maybe before it began."""
        self._heard = -1
        """Number of the latest run whose function has been told of it."""

    async def live(self) -> None:
        """Open the meshes and run what comes."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        signal.signal(signal.SIGINT, self._interrupted)
        threading.Thread(target=self._read, name="asynccoll-worker", daemon=True).start()
        try:
            await self._open()
        except Exception as error:  # noqa: BLE001 (told to whoever started this, who ends it)
            self._send(FAILURE, pickle.dumps(describe(error)))
            await self._runs.get()
            return
        self._send(VALUE, pickle.dumps(None))
        while (run := await self._runs.get()) is not None:
            await self._run(*run)
        await self._close()

    async def _open(self) -> None:
        await world.init()
        if self._facade:
            sync.init()

    async def _close(self) -> None:
        if self._facade:
            sync.shutdown()
        await world.shutdown()

    async def _run(self, number: int, anew: bool, call: bytes) -> None:
        import cloudpickle

        try:
            if anew:
                await self._close()
                await self._open()
            function, args = _Unpickler(io.BytesIO(call)).load()
            try:
                self._running = number
                if self._stopped == number:
                    raise KeyboardInterrupt
                value = function(*args)
                if inspect.isawaitable(value):
                    value = await value
            finally:  # an interrupt that comes just here is caught below
                self._running = -1
            if left := self._left():
                raise RuntimeError(
                    f"the function has returned while {', '.join(left[:5])} was under way: await everything that it starts"
                )
            kind, payload = VALUE, cloudpickle.dumps(value)
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 (told to whoever started this, and raised there)
            self._running = -1
            if isinstance(error, asyncio.CancelledError) and self._task is not None:
                self._task.uncancel()
            kind, payload = FAILURE, pickle.dumps(describe(error))
        self._send(kind, payload)

    def _left(self) -> list[str]:
        """Operations that a function has left under way: they would be matched with those of the next one."""
        with contextlib.suppress(NotInitialized):  # the function has closed it
            left = world.get_communicator().pending()
            if self._facade:
                left += sync.get_communicator().pending()
            return left
        return []

    def _send(self, kind: bytes, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more: the reading thread hears of it, too
            self._channel.sendall(frame(kind, payload))

    def _interrupted(self, number: int, where: FrameType | None) -> None:
        """SIGINT: raise in code that runs, cancel a coroutine that waits, and else do nothing."""
        if self._running < 0 or self._heard == self._running:
            return
        self._heard = self._running
        if asyncio.current_task(self._loop) is self._task:
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._cancel, self._running)

    def _cancel(self, number: int) -> None:
        """Cancel the coroutine of a run, unless it has ended meanwhile."""
        if self._task is not None and self._running == number:
            self._task.cancel()

    # -- in the reading thread ----------------------------------------------------------------------------

    def _read(self) -> None:
        # It may be an error: whoever started this was killed with bytes of ours unread. That is an end as well.
        with contextlib.suppress(OSError):
            while head := self._source.read(HEAD):
                payload = self._source.read(length_of(head))
                if head[:1] == RUN:
                    number, anew, call = pickle.loads(payload)
                    self._loop.call_soon_threadsafe(self._runs.put_nowait, (number, anew, call))
                else:
                    self._stopped = pickle.loads(payload)
                    self._interrupt()
        self._loop.call_soon_threadsafe(self._runs.put_nowait, None)
        time.sleep(_LAST_SECONDS)
        os._exit(1)

    def _interrupt(self) -> None:
        """Interrupt the main thread, if it is still at the run that is to end."""
        end = time.monotonic() + _LAST_SECONDS
        while self._heard != self._stopped == self._running and time.monotonic() < end:
            # To the main thread, so that a system call there ends; the handler runs there, too. And again, because a signal that
            # comes right before a system call does not end it: the interpreter looks for signals before and after, not within.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(_AGAIN)
