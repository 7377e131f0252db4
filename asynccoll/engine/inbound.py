"""Bytes from one peer, cut into frames. Knows frame sizes and where payload lands, not what operations mean.

Small frames are collected in a staging buffer, many per read. The payload of a large DATA frame is read straight into the
memory that the sink names, so that bulk data is not copied on the way in.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from asynccoll.engine.operation import InStream, Operation
from asynccoll.engine.outbox import SEGMENT
from asynccoll.engine.wire import DATA, HEADER, HEADER_SIZE, LAST, MAX_CONTROL, MAX_DATA, START
from asynccoll.errors import ProtocolError

__all__ = ["FrameSink", "Inbound", "Landing"]

_unpack: Final = HEADER.unpack_from
STAGING: Final = (1 << 16) + (1 << 13)
"""Bytes of the staging buffer: a whole eager payload and the frames around it come in one read."""
_COPIED: Final = 1 << 13
"""Payloads up to this size are collected in the staging buffer: one copy is cheaper than one more read."""
_BULK_READ: Final = 1 << 12
"""Bytes offered for the read after a bulk payload: enough for a header and a few control frames, so that little
of the next bulk payload has to be copied."""


class Landing(NamedTuple):
    """Where the payload of a bulk frame goes."""

    memory: memoryview
    """Exactly as long as the payload."""
    op: Operation | None = None
    """The operation whose posted receive ``memory`` belongs to; None: hand the frame to `FrameSink.data` when complete."""
    stream: InStream | None = None
    owned: bool = False
    """``memory`` was allocated for this frame, so nobody needs to copy it."""


class FrameSink(Protocol):
    """What the decoder calls; the engine implements it."""

    def data(
        self, peer: int, flags: int, comm: int, seq: int, tag: int, payload: memoryview, owned: bool = False
    ) -> None:
        """A complete DATA frame. ``payload`` is valid during the call only, unless ``owned``."""

    def place(self, peer: int, flags: int, comm: int, seq: int, tag: int, length: int) -> Landing:
        """A large DATA frame begins: where shall its payload go?"""

    def landed(self, peer: int, flags: int, landing: Landing) -> None:
        """The payload of a frame placed in an operation's own memory is complete."""

    def start(self, peer: int, round_: int, comm: int, seq: int, payload: memoryview) -> None:
        """A complete START frame. ``payload`` is valid during the call only."""

    def control(self, peer: int, kind: int, comm: int, seq: int, payload: memoryview) -> None:
        """A complete frame of another kind. ``payload`` is valid during the call only."""


class Inbound:
    """Decoder of one peer's stream of bytes."""

    __slots__ = (
        "_frame",
        "_landing",
        "_memory",
        "_pos",
        "_scratch",
        "bulk",
        "dead",
        "end",
        "peer",
        "sink",
        "staging",
        "start",
        "view",
    )

    def __init__(self, peer: int, sink: FrameSink) -> None:
        self.peer = peer
        self.sink = sink
        self.staging = bytearray(STAGING)
        self.view = memoryview(self.staging)
        self.start = 0
        """First staged byte that has not been decoded."""
        self.end = 0
        """End of the staged bytes."""
        self.bulk = False
        """The last frame was a bulk one."""
        self.dead = False
        """The peer has been given up: nothing more of it is decoded."""
        self._landing: Landing | None = None
        """Where the bulk payload under way goes, or None between bulk frames."""
        self._memory = self.view
        """``_landing.memory``."""
        self._pos = 0
        """Bytes of it that have arrived."""
        self._scratch = memoryview(b"")
        """See `scratch`."""
        self._frame = (0, 0, 0, 0)
        """flags, comm, seq, tag of the bulk frame under way."""

    def target(self) -> memoryview:
        """Where the next bytes of the peer go. Never empty."""
        if self._landing is not None:
            return self._memory[self._pos :]
        end = self.end
        if self.start == end:
            self.start = self.end = 0
            return self.view[:_BULK_READ] if self.bulk else self.view
        if end == len(self.view):
            self._compact()
        return self.view[self.end :]

    def _compact(self) -> None:
        rest = bytes(self.view[self.start : self.end])
        self.start, self.end = 0, len(rest)
        if 2 * len(rest) >= len(self.view):  # a control frame that does not fit: at most MAX_CONTROL long
            self.staging = bytearray(MAX_CONTROL + STAGING)
            self.view = memoryview(self.staging)
        self.view[: len(rest)] = rest

    def received(self, nbytes: int) -> None:
        """``nbytes`` were written to `target`: decode what is complete. Raises `ProtocolError` on anything malformed."""
        landing = self._landing
        if landing is not None:
            self._pos += nbytes
            if self._pos == len(self._memory):
                self._landing, self._memory = None, self.view  # the memory is its owner's again
                flags, comm, seq, tag = self._frame
                if landing.op is not None:
                    self.sink.landed(self.peer, flags, landing)
                else:
                    self.sink.data(self.peer, flags, comm, seq, tag, landing.memory, landing.owned)
            return
        self.end += nbytes
        self._decode()

    def _decode(self) -> None:
        peer, sink = self.peer, self.sink
        start, end, view = self.start, self.end, self.view
        bulk = False
        while end - start >= HEADER_SIZE:
            kind, flags, round_, comm, seq, tag, length = _unpack(view, start)
            body = start + HEADER_SIZE
            after = body + length
            if kind == START and after <= end:
                # First, so that no frame is ever decoded twice, whatever the sink raises.
                self.start = start = after
                sink.start(peer, round_, comm, seq, view[body:after])
            elif kind == DATA:
                if not 0 < length <= MAX_DATA:
                    raise ProtocolError(
                        f"rank {peer} sent a DATA frame of {length} bytes; 1 to {MAX_DATA} are allowed"
                    )
                if after > end:
                    if length > _COPIED:
                        self._begin(flags, comm, seq, tag, length, view[body:end])
                        start = end = 0
                        bulk = True
                    break
                self.start = start = after
                sink.data(peer, flags, comm, seq, tag, view[body:after])
                if self.dead:
                    return
            else:
                if not START <= kind <= LAST:
                    raise ProtocolError(f"rank {peer} sent a frame of unknown kind {kind}")
                if length > MAX_CONTROL:
                    raise ProtocolError(
                        f"rank {peer} sent a control frame of {length} bytes; {MAX_CONTROL} are allowed"
                    )
                if after > end:
                    break
                self.start = start = after
                sink.control(peer, kind, comm, seq, view[body:after])
                if self.dead:
                    return
        self.bulk = bulk
        self.start, self.end = start, end

    def _begin(self, flags: int, comm: int, seq: int, tag: int, length: int, staged: memoryview) -> None:
        """A bulk payload begins, of which ``staged`` has come."""
        landing = self.sink.place(self.peer, flags, comm, seq, tag, length)
        landing.memory[: len(staged)] = staged
        self._landing, self._memory, self._pos = landing, landing.memory, len(staged)
        self._frame = (flags, comm, seq, tag)

    def redirect(self, op: Operation) -> None:
        """If the bulk payload under way goes to ``op``'s memory, send the rest of it to scratch instead."""
        landing = self._landing
        if landing is not None and landing.op is op:
            self._landing = Landing(self.scratch(len(landing.memory)))
            self._memory = self._landing.memory

    def scratch(self, length: int) -> memoryview:
        """Memory for a payload that is folded or dropped as soon as it is complete: one at a time."""
        if len(self._scratch) < length:
            self._scratch = memoryview(bytearray(min(max(length, SEGMENT), MAX_DATA)))
        return self._scratch[:length]
