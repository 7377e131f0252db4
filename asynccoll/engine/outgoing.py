"""Everything that goes out to the peers, and by whose leave. Knows outboxes, grants and credit; not programs or errors."""

from __future__ import annotations

from typing import Final

from asynccoll.engine import wire
from asynccoll.engine.group import Early
from asynccoll.engine.operation import EAGER_STREAM, WINDOW, InStream, Operation, OutStream
from asynccoll.engine.outbox import Outbox

__all__ = ["UNLIMITED", "Outgoing"]

UNLIMITED: Final = 1 << 62
"""A grant for a stream whose bytes always have a place."""
_COPY_LIMIT: Final = EAGER_STREAM
"""Payloads up to this size are copied into their frame."""


class Outgoing:
    """The outboxes of one rank."""

    __slots__ = ("boxes", "dirty")

    def __init__(self, rank: int, size: int) -> None:
        self.boxes: dict[int, Outbox] = {peer: Outbox() for peer in range(size) if peer != rank}
        """World rank -> what is to be written to it."""
        self.dirty: dict[int, None] = {}
        """Peers to flush, in the order in which they became so (a dict, so that the order is deterministic)."""

    def post(self, peer: int, frame: bytes) -> None:
        """Queue a control frame."""
        self.boxes[peer].control.append(frame)
        self.dirty[peer] = None

    def send(self, op: Operation, peer: int, data: memoryview | bytes, snapshot: bool) -> None:
        """Send ``data``: copied into its frame if it is small and may go, else queued in the caller's memory."""
        size = len(data)
        if not size:
            return
        box = self.boxes[peer]
        stream = op.outputs.get(peer)
        if stream is None:
            stream = op.outputs[peer] = OutStream(op, peer)
        self.dirty[peer] = None
        if size <= _COPY_LIMIT and not stream.pending:
            end = stream.offset + size
            flags = 0
            if end > stream.granted and end <= EAGER_STREAM and size <= box.credit:
                box.credit -= size
                flags = wire.EAGER
            if flags or end <= stream.granted:
                stream.offset = end
                box.control.append(wire.data_header(flags, op.comm, op.seq, op.digests.tag, size) + data)
                return
        stream.pending.append(memoryview(bytes(data)) if snapshot else memoryview(data))
        op.unsent += 1
        box.queue(stream)

    def grant(self, op: Operation, peer: int, upto: int) -> None:
        """Tell ``peer`` that bytes of ``op``'s stream below ``upto`` have a place, unless it knows."""
        stream = op.inputs.get(peer)
        if stream is None:
            stream = op.inputs[peer] = InStream()
        if upto > stream.granted or stream.wanted:
            stream.wanted = False
            stream.granted = max(stream.granted, upto)
            self.boxes[peer].control.append(wire.ready_frame(op.comm, op.seq, stream.granted))
            self.dirty[peer] = None

    def granted(self, op: Operation, peer: int, upto: int) -> None:
        """``peer`` takes our bytes of ``op`` below ``upto``."""
        stream = op.outputs.get(peer)
        if stream is None:
            stream = op.outputs[peer] = OutStream(op, peer)
        stream.granted = max(stream.granted, upto)
        if stream.pending:
            self.boxes[peer].queue(stream)
            self.dirty[peer] = None

    def wanted(self, op: Operation, peer: int) -> None:
        """``peer`` has no credit left for its bytes of ``op``: give it a grant."""
        stream = op.inputs.get(peer)
        if stream is None:
            stream = op.inputs[peer] = InStream()
        stream.wanted = True
        self.grant(op, peer, stream.consumed + stream.total + WINDOW)

    def owe(self, peer: int, nbytes: int) -> None:
        """Note that eager bytes of ``peer`` have been taken over by their operation."""
        if self.boxes[peer].owe(nbytes):
            self.dirty[peer] = None

    def release(self, early: Early) -> None:
        """The payload kept for an operation is taken over or not needed any more: the peers get their credit back."""
        for peer, _, payload in early.payload:
            early.group.early_bytes[peer] -= len(payload)
            self.owe(peer, len(payload))
