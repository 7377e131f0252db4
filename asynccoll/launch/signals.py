"""Signals as bytes on a descriptor, for code that must not stop half-way. Knows no jobs or ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SignalPipe"]


def _stay(number: int, frame: FrameType | None) -> None:
    """The handler while a pipe is open: the byte that the interpreter writes to the pipe says it all."""


class SignalPipe:
    """Context manager that turns ``numbers`` into bytes on ``fd`` and restores their handlers afterwards.

    A `KeyboardInterrupt` may come between any two bytecodes, for example after a process was started and
    before it was noted down. Inside this context signals wait until `read` asks for them. One that nobody
    asked for is raised again when the context ends. Signals that were ignored stay ignored (nohup). In any
    thread but the main one no signal arrives here, because Python handles them in the main thread alone;
    `inject` works everywhere.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.fd = -1  # readable when `read` has something; -1 while the context is not open
        self._writer = -1  # the other end
        self._numbers = tuple(numbers)
        self._outer: int | None = None  # the wakeup descriptor before ours; None: not replaced
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int] = {}  # replaced handlers

    def __enter__(self) -> SignalPipe:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            try:
                self._outer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
                for number in self._numbers:
                    handler = signal.getsignal(number)
                    if handler is not None and handler != signal.SIG_IGN:
                        self._previous[number] = handler
                        signal.signal(number, _stay)
            except BaseException:  # re-raised: handlers and descriptors go back, Ctrl-C or not
                self._close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._close():
            if number in self._previous:
                signal.raise_signal(number)

    def read(self) -> list[int]:
        """The signal numbers that came since the last call, each once, in order of arrival. Does not wait."""
        try:
            data = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        arrived: list[int] = []
        for number in data:
            if number in self._previous or number == signal.SIGPIPE:
                if number not in arrived:
                    arrived.append(number)
            elif self._outer is not None and self._outer >= 0:
                # Not ours: an event loop that waits in this thread owns it, and would miss it for ever.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._outer, bytes([number]))
        return arrived

    def inject(self, number: signal.Signals) -> None:
        """Make `read` report ``number`` (SIGPIPE, which Python ignores) as if it had come. For any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([number]))

    def _close(self) -> list[int]:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._outer is not None:
            signal.set_wakeup_fd(self._outer)
        pending = self.read()
        os.close(self.fd)
        os.close(self._writer)
        self.fd = self._writer = -1
        return pending
