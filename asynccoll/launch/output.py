"""Merges what many ranks write, line by line. Knows bytes, lines and terminals; not processes or exit codes.

`Lines` is the pure part: bytes of one stream in, whole lines out. `Output` is a thread around it: it reads
every rank's pipes and writes to the launcher's own standard output and error. It is a thread so that a reader
of the launcher that stands still (a pager, a terminal after Ctrl-S) delays output, and through full pipes the
ranks' writes, but never the launcher's watch over its ranks. Memory stays within `MAX_LINE` bytes a stream.
"""

from __future__ import annotations

import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["MAX_LINE", "PROGRESS_INTERVAL", "Lines", "Output"]

MAX_LINE = 1 << 20
"""Longest line in bytes that is held back until it is whole. A longer one is cut: memory stays bounded."""

PROGRESS_INTERVAL = 10.0
"""Seconds between two updates of a progress bar in a file or pipe: 360 lines an hour, not 36,000."""

_CHUNK = 65536
"""Bytes of one read: the capacity of a pipe on Linux (pipe(7))."""

_ERASE = b"\r\x1b[K"
"""Back to the first column, and clear to the end of the row (ECMA-48 EL)."""

_COLOURS = (36, 33, 32, 35, 34, 31)
"""ECMA-48 SGR foreground colours of ranks 0, 1, ...: cyan, yellow, green, magenta, blue, red, and again."""


class Lines:
    """One stream of one rank: bytes in, whole lines with a prefix out.

    A carriage return starts a line over, as on a terminal: of what a progress bar draws, the last state is
    the line. The states before it are *updates*. On a terminal (``live``) they are to be shown in one row that
    the next one overwrites; elsewhere one in `PROGRESS_INTERVAL` becomes a line.

    Without a prefix (None) bytes pass unchanged, held back only to the end of a line or of an update.
    """

    def __init__(self, prefix: bytes | None, *, live: bool) -> None:
        self.update: bytes | None = (
            None  # the update to show in the row for it, if `feed` left one; terminals only
        )
        self._prefix = prefix
        self._live = live
        self._rest = b""  # the line so far, cut at the front where a carriage return started it over
        self._is_progress = False  # the line so far holds updates
        self._shown = -PROGRESS_INTERVAL  # time of the last update that became a line

    def feed(self, data: bytes, now: float) -> bytes:
        """Take what was read at monotonic time ``now``; return what is to be written."""
        self.update = None
        rest = self._rest + data
        if self._prefix is None:
            end = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
            if len(rest) - end > MAX_LINE:
                end = len(rest)
            self._rest = rest[end:]
            return rest[:end]
        *lines, rest = rest.split(b"\n")
        written = [self._whole(line) for line in lines]
        if lines:
            self._is_progress = False
        # Returns at the very end do not start over yet: a newline may follow them.
        if (start := rest.rstrip(b"\r").rfind(b"\r") + 1) > 0:
            self._is_progress = True
            rest = rest[start:]
        if len(rest) > MAX_LINE:
            written.append(self._whole(rest))
            rest = b""
        elif self._is_progress and rest.strip():
            if self._live:
                self.update = self._prefix + rest.rstrip(b"\r")
            elif now - self._shown >= PROGRESS_INTERVAL:
                self._shown = now
                written.append(self._whole(rest))
        self._rest = rest
        return b"".join(written)

    def close(self) -> bytes:
        """The stream has ended: return what is left of its last line."""
        self.update = None
        rest, self._rest = self._rest, b""
        if self._prefix is None or not rest:
            return rest
        return self._whole(rest)

    def _whole(self, line: bytes) -> bytes:
        line = line.rstrip(b"\r")
        return (self._prefix or b"") + line[line.rfind(b"\r") + 1 :] + b"\n"


def prefix_of(rank: int, nproc: int, *, colour: bool) -> bytes:
    """``b"[3] "``, with the rank as wide as the widest of ``nproc``."""
    text = f"[{rank:>{len(str(nproc - 1))}}]"
    return (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()


class _Stream:
    """A rank's descriptor, what turns its bytes into lines, and where these go."""

    def __init__(self, rank: int, source: int, target: int, lines: Lines) -> None:
        self.rank = rank
        self.source = source
        self.target = target
        self.lines = lines


class Output:
    """A thread that carries the ranks' output to the descriptors ``stdout`` and ``stderr``.

    Args:
        nproc: number of ranks.
        prefix: whether lines begin with the rank.
        colour: whether prefixes that go to a terminal have the rank's colour.
        on_broken: is called in the thread, once, when a write fails; ``error`` tells how. What ranks write
            from then on is read and dropped.
        stdout, stderr: where to write.
    """

    def __init__(
        self,
        nproc: int,
        *,
        prefix: bool,
        colour: bool,
        on_broken: Callable[[], None],
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        self.error: OSError | None = None  # why writing ended, if it did
        self._nproc = nproc
        self._prefix = prefix
        self._colour = colour
        self._on_broken = on_broken
        self._stderr = stderr
        self._targets = (stdout, stderr)
        self._terminals = {fd for fd in self._targets if os.isatty(fd)}
        self._streams: list[_Stream] = []  # open ones
        self._row = False  # an update stands on the terminal, in the row that the next line takes
        self._orders: deque[tuple[str, int | None] | None] = deque()  # notices; None: finish
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self.done, self._done_writer = os.pipe()  # `done` becomes readable when everything is written
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="asynccoll-output", daemon=True)

    def attach(self, rank: int, stdout: int, stderr: int) -> None:
        """Carry what ``rank`` writes to the pipes with these read ends. Before `start`."""
        for source, target in zip((stdout, stderr), self._targets, strict=True):
            live = target in self._terminals
            prefix = prefix_of(rank, self._nproc, colour=self._colour and live) if self._prefix else None
            os.set_blocking(source, False)
            stream = _Stream(rank, source, target, Lines(prefix, live=live))
            self._streams.append(stream)
            self._selector.register(source, selectors.EVENT_READ, stream)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def notice(self, text: str, rank: int | None = None) -> None:
        """Write a line of the launcher's own to standard error, after what ``rank`` has written so far."""
        self._order((text, rank))

    def finish(self) -> None:
        """Write what the pipes hold now, and end: no rank is left. Does not wait: `done` and `close` do."""
        self._order(None)

    def close(self) -> None:
        """Wait for the end that `finish` asked for, and give back the descriptors. The sources stay open."""
        self._thread.join()
        self._selector.close()
        for fd in (self._wake_reader, self._wake_writer, self.done):
            os.close(fd)

    def _order(self, order: tuple[str, int | None] | None) -> None:
        self._orders.append(order)
        os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        if key.data in self._streams:
                            self._read(key.data)
                    elif not self._follow():
                        return
        finally:
            os.close(self._done_writer)

    def _follow(self) -> bool:
        """Carry out what was ordered; False when that was to finish."""
        os.read(self._wake_reader, 4096)
        while self._orders:
            order = self._orders.popleft()
            for stream in [stream for stream in self._streams if order is None or stream.rank == order[1]]:
                self._drain(stream)
            if order is None:
                return False
            self._write(self._stderr, f"{order[0]}\n".encode())
        return True

    def _read(self, stream: _Stream) -> bool:
        """Read once; False where nothing is to be had for now, or ever."""
        try:
            data = os.read(stream.source, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._write(stream.target, stream.lines.feed(data, time.monotonic()), stream.lines.update)
            return True
        self._selector.unregister(stream.source)
        self._streams.remove(stream)
        self._write(stream.target, stream.lines.close())
        return False

    def _drain(self, stream: _Stream) -> None:
        """Write what the pipe of a rank that has ended holds, and its unfinished line."""
        # Bounded: something that left the rank's process group may hold the other end, and write for ever.
        for _ in range(MAX_LINE // _CHUNK):
            if not self._read(stream):
                break
        self._write(stream.target, stream.lines.close())

    def _write(self, target: int, data: bytes, update: bytes | None = None) -> None:
        if target in self._terminals:
            if data and self._row:
                data = _ERASE + data
                self._row = False
            if update is not None:
                data += (_ERASE if self._row else b"") + update
                self._row = True
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[os.write(target, view) :]
            except BlockingIOError:  # whoever gave us this descriptor uses it without blocking
                select.select([], [target], [])
            except OSError as error:
                self.error = error
                self._on_broken()
