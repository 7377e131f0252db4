"""What is to be written to one peer, and in which order. Knows credit and segments, not programs or errors.

Order: control frames and small payloads first (in the order in which they were pushed), then bulk streams in turn, one segment
each. Small payloads are copied into their frame; bulk segments stay in the caller's memory until they have been written.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from asynccoll.engine.operation import EAGER_STREAM, Operation, OutStream
from asynccoll.engine.wire import EAGER, credit_frame, data_header, want_frame

__all__ = ["EAGER_CREDIT", "LEAST", "SEGMENT", "Outbox", "passed_on"]

EAGER_CREDIT: Final = 1 << 18
"""Bytes that may be under way to a peer for operations that it has not started."""
SEGMENT: Final = 1 << 20
"""Bytes of one bulk frame: large enough that a header and a system call cost little, small enough to stay in cache
while it is combined and to let other operations in between."""
LEAST: Final = 1 << 18
"""Least bytes that ranks pass on to one another at a time, in a tree or a chain."""
_PIECES: Final = 8
_CREDIT_LAZY: Final = EAGER_CREDIT >> 3
"""Owed credit that is given back with the next write."""
_CREDIT_URGENT: Final = EAGER_CREDIT >> 1
"""Owed credit for which a write is made."""
_ALIGN: Final = 15
"""Bulk frames are cut at multiples of 16 bytes, so that each holds whole elements of any dtype."""


def passed_on(nbytes: int) -> int:
    """Bytes of ``nbytes`` that a rank of a tree or chain passes on at a time: an eighth, but `LEAST` to `SEGMENT`."""
    return min(SEGMENT, max(LEAST, nbytes // _PIECES))


class Outbox:
    """Queue of frames to one peer."""

    __slots__ = ("control", "credit", "current", "lent", "owed", "streams")

    def __init__(self) -> None:
        self.control: deque[bytes] = deque()
        """Complete frames: control, and payload small enough to be copied."""
        self.streams: deque[OutStream] = deque()
        """Streams with lent memory that may be sent, in turn."""
        self.current: deque[memoryview | bytes] = deque()
        """Parts that have been offered to the driver and not yet written."""
        self.lent: OutStream | None = None
        """Stream whose caller's memory is the last part of `current`, or None."""
        self.credit = EAGER_CREDIT
        """Eager bytes that may still be sent."""
        self.owed = 0
        """Eager credit to give back to the peer."""

    def owe(self, nbytes: int) -> bool:
        """Note that ``nbytes`` of the peer's eager bytes were taken over. True if a write is due for it."""
        self.owed += nbytes
        return self.owed >= _CREDIT_URGENT

    def queue(self, stream: OutStream) -> None:
        """Put a stream with pending memory in the round."""
        if not stream.queued:
            stream.queued = True
            self.streams.append(stream)

    def gather(self) -> deque[memoryview | bytes]:
        """The parts to write next; empty if there is nothing that may be sent."""
        current = self.current
        if current:
            return current
        control = self.control
        if self.owed >= _CREDIT_LAZY and (control or self.streams or self.owed >= _CREDIT_URGENT):
            control.append(credit_frame(self.owed))
            self.owed = 0
        if control:
            if len(control) == 1:
                current.append(control.popleft())
            else:
                current.append(b"".join(control))
                control.clear()
        elif self.streams:
            self._next_segment()
            if control:  # a WANT was pushed: it goes with this write
                current.appendleft(b"".join(control))
                control.clear()
        return current

    def _next_segment(self) -> None:
        """Move one segment of the next stream that may send to `current`; park the streams that may not."""
        streams = self.streams
        while streams:
            stream = streams.popleft()
            piece = stream.pending[0]
            left = len(piece) - stream.pos
            flags = 0
            room = stream.granted - stream.offset
            if room <= 0:
                flags = EAGER
                room = min(EAGER_STREAM - stream.offset, self.credit)
            take = min(left, room, SEGMENT)
            if take < left:
                take &= ~_ALIGN
            if take <= 0:
                stream.queued = False
                if not stream.asked:
                    stream.asked = True
                    self.control.append(want_frame(stream.op.comm, stream.op.seq))
                continue
            if flags:
                self.credit -= take
            op = stream.op
            self.current.append(data_header(flags, op.comm, op.seq, op.digests.tag, take))
            self.current.append(piece[stream.pos : stream.pos + take])
            self.lent = stream
            stream.pos += take
            stream.offset += take
            if stream.pos == len(piece):
                stream.pending.popleft()
                stream.pos = 0
            if stream.pending:
                streams.append(stream)
            else:
                stream.queued = False
            return

    def sent(self, nbytes: int) -> Operation | None:
        """Note that ``nbytes`` of `gather` were written. The operation one of whose lent pieces has now left, or None."""
        current = self.current
        if self.lent is None and len(current) == 1 and nbytes == len(current[0]):
            current.clear()
            return None
        while nbytes:
            head = current[0]
            size = len(head)
            if nbytes < size:
                current[0] = memoryview(head)[nbytes:]
                return None
            nbytes -= size
            current.popleft()
        if current or self.lent is None:
            return None
        stream, self.lent = self.lent, None
        if stream.pos == 0:  # the piece that this segment belonged to was its last
            stream.op.unsent -= 1
            return stream.op
        return None

    def recall(self, op: Operation) -> None:
        """Give back the memory of ``op``: drop what is queued, copy the tail of the segment that is half written."""
        stream = self.lent
        if stream is not None and stream.op is op:
            self.lent = None
            if self.current:
                self.current[-1] = bytes(self.current[-1])
        for out in op.outputs.values():
            if out.queued and out in self.streams:
                self.streams.remove(out)
                out.queued = False

    def clear(self) -> None:
        """Forget everything: the peer is gone."""
        self.control.clear()
        self.streams.clear()
        self.current.clear()
        self.lent = None
