"""Frames of the peers, each to the operation that it is for. Knows which operations there are, not how bytes were read.

A frame may be for an operation that has ended here (it is dropped), that has not been called yet (`Early` keeps it), or of a
communicator that has not been made yet (`Unmade` keeps it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from asynccoll.engine import wire
from asynccoll.engine.aborts import Aborts
from asynccoll.engine.departures import Departures
from asynccoll.engine.group import Group
from asynccoll.engine.inbound import Landing
from asynccoll.engine.operation import InStream
from asynccoll.engine.outbox import EAGER_CREDIT
from asynccoll.engine.outgoing import Outgoing
from asynccoll.engine.rounds import Rounds
from asynccoll.engine.unmade import Frame, Unmade
from asynccoll.errors import ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["Arrivals"]


_UNUSED: Final = InStream()
"""What a stream is before its first byte."""


class Arrivals:
    """The `FrameSink` of all of one engine's peers."""

    def __init__(
        self,
        engine: Engine,
        groups: Mapping[int, Group],
        outgoing: Outgoing,
        aborts: Aborts,
        departures: Departures,
        rounds: Rounds,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._outgoing = outgoing
        self._aborts = aborts
        self._departures = departures
        self._rounds = rounds
        self._unmade = Unmade()
        self._left: dict[int, set[int]] = {}
        """Communicator that this rank has left -> members that have not: what they still send for it is dropped."""

    def data(
        self, peer: int, flags: int, comm: int, seq: int, tag: int, payload: memoryview, owned: bool = False
    ) -> None:
        """A complete DATA frame."""
        group = self._group(comm, peer)
        if group is None:
            self._strange(comm, Frame(peer, wire.DATA, flags, 0, seq, tag, payload), owned)
            return
        op = group.active.get(seq)
        if op is None:
            if group.awaits(seq):
                kept = payload if owned else memoryview(bytes(payload))
                if not group.keep_payload(peer, flags, seq, tag, kept):
                    self._outgoing.owe(peer, len(payload))
            elif flags:
                self._outgoing.owe(peer, len(payload))
            return
        if flags:
            self._outgoing.owe(peer, len(payload))
        if tag != op.digests.tag:
            self._aborts.disagree(op)
        elif op.inquest is None:
            stream = op.inputs.get(peer)
            if stream is None:
                stream = op.inputs[peer] = InStream()
            stream.count(peer, len(payload))
            try:
                ready = op.deliver(stream, payload, owned)
            except BaseException as error:  # noqa: BLE001 (raised by the reduction: re-raised on every rank)
                self._aborts.fail(op, error)
                return
            if ready:
                op.waiting = None
                self._engine.advance(op)

    def place(self, peer: int, flags: int, comm: int, seq: int, tag: int, length: int) -> Landing:
        """Memory for a bulk payload: the posted receive itself where that is possible."""
        group = self._group(comm, peer)
        if group is None:
            return Landing(memoryview(bytearray(length)), owned=True)
        op = group.active.get(seq)
        if op is not None and op.inquest is None and tag == op.digests.tag:
            stream = op.inputs.get(peer)
            if (stream or _UNUSED).arrived + length > (stream or _UNUSED).granted:
                raise ProtocolError(
                    f"rank {peer} sent {length} bytes for an operation, and was not to send so many"
                )
            if stream is not None and op.waiting is stream:
                filled = stream.filled
                if stream.into is not None and filled + length <= stream.total:
                    return Landing(stream.into[filled : filled + length], op, stream)
                if stream.fold is not None:
                    return Landing(self._engine.scratch(peer, length))
            return Landing(memoryview(bytearray(length)), owned=True)
        if group.awaits(seq):
            group.limit_early(peer, flags, length)
            return Landing(memoryview(bytearray(length)), owned=True)
        return Landing(self._engine.scratch(peer, length))

    def landed(self, peer: int, flags: int, landing: Landing) -> None:
        """The payload of a posted receive is in place."""
        if flags:
            self._outgoing.owe(peer, len(landing.memory))
        op, stream = landing.op, landing.stream
        if op is None or stream is None or op.waiting is not stream:
            return  # the operation has ended meanwhile
        stream.count(peer, len(landing.memory))
        stream.filled += len(landing.memory)
        if stream.complete():
            op.waiting = None
            self._engine.advance(op)

    def start(self, peer: int, round_: int, comm: int, seq: int, payload: memoryview) -> None:
        """A complete START frame."""
        group = self._group(comm, peer)
        if group is None:
            self._strange(comm, Frame(peer, wire.START, 0, round_, seq, 0, payload))
            return
        op = group.active.get(seq)
        if op is not None:
            self._rounds.receive(op, peer, payload)
        elif seq >= wire.MESSAGES:
            raise ProtocolError(f"rank {peer} sent a START record for a message")
        elif group.awaits(seq):
            group.early_of(seq).keep_record(peer, bytes(payload))

    def control(self, peer: int, kind: int, comm: int, seq: int, payload: memoryview) -> None:
        """A complete frame of a kind other than DATA and START."""
        if kind == wire.CREDIT:
            box = self._outgoing.boxes[peer]
            box.credit += wire.parse_u64(payload)
            if box.credit > EAGER_CREDIT:
                raise ProtocolError(f"rank {peer} gave back more credit than it was owed")
            return
        group = self._group(comm, peer)
        if group is None:
            self._strange(comm, Frame(peer, kind, 0, 0, seq, 0, payload))
            return
        if kind == wire.GOODBYE:
            self._departures.goodbye(peer, comm, wire.control_payload(payload))
            return
        if kind == wire.LOST:
            self._engine.losses.heard(peer, wire.control_payload(payload))
            return
        if kind >= wire.KEY:
            self._key(group, peer, kind, seq, payload)
            return
        if seq >= wire.MESSAGES:
            self._message(group, peer, kind, seq, payload)
            return
        op = group.active.get(seq)
        if kind == wire.READY:
            upto = wire.parse_u64(payload)
            if op is not None:
                self._outgoing.granted(op, peer, upto)
            elif group.awaits(seq):
                group.early_of(seq).grants[peer] = upto
        elif kind == wire.WANT:
            if op is not None:
                self._outgoing.wanted(op, peer)
            elif group.awaits(seq):
                group.early_of(seq).wants.add(peer)
        elif kind == wire.ABORT:
            self._aborts.received(group, peer, seq, op, wire.control_payload(payload))
        else:
            raise ProtocolError(f"rank {peer} sent a frame of kind {kind} for an operation")

    def _key(self, group: Group, peer: int, kind: int, seq: int, payload: memoryview) -> None:
        keys = self._engine.keys
        if kind == wire.KEY:
            keys.announced(group, peer, seq, payload)
        elif kind == wire.GRANT:
            keys.granted(group, peer, seq, payload)
        else:
            keys.unkeyed(group, peer, seq, payload)

    def _message(self, group: Group, peer: int, kind: int, seq: int, payload: memoryview) -> None:
        mail = self._engine.mail
        if kind == wire.MESSAGE:
            mail.arrived(group, peer, seq, payload)
        elif kind == wire.TAKE:
            mail.taken(group, peer, seq)
        elif kind == wire.ABORT:
            mail.withdrawn(group, peer, seq)
        else:
            raise ProtocolError(f"rank {peer} sent a frame of kind {kind} for a message")

    # -- communicators -------------------------------------------------------------------------------------

    def made(self, comm: int) -> None:
        """A communicator was made: play back what has come for it."""
        for peer, kind, flags, round_, seq, tag, payload in self._unmade.take(comm):
            try:
                if kind == wire.DATA:
                    self.data(peer, flags, comm, seq, tag, payload, owned=True)
                elif kind == wire.START:
                    self.start(peer, round_, comm, seq, payload)
                else:
                    self.control(peer, kind, comm, seq, payload)
            except ProtocolError as error:
                self._engine.broken(peer, error)
        for peer in self._groups[comm].lost:  # what it had only announced will not come
            self._engine.mail.lost(self._groups[comm], peer)

    def left(self, group: Group) -> None:
        """This rank has left a communicator. Its id is forgotten when all others have, which then send nothing more for it."""
        others = {peer for peer in group.members if peer not in group.left and peer not in group.lost}
        others.discard(self._engine.rank)
        if others:
            self._left[group.comm] = others

    def known(self, comm: int) -> bool:
        """The id is in use, by this rank or by one that has not left."""
        return comm in self._groups or comm in self._left

    def forget(self, peer: int) -> None:
        """The connection to ``peer`` has ended."""
        self._unmade.forget(peer, but=wire.MESSAGE)  # what it sent before it left is received all the same
        for comm in list(self._left):
            self._left_too(comm, peer)

    def _left_too(self, comm: int, peer: int) -> None:
        """Nothing more will come from ``peer`` for a communicator that this rank has left."""
        others = self._left[comm]
        others.discard(peer)
        if not others:
            del self._left[comm]

    def _group(self, comm: int, peer: int) -> Group | None:
        """The communicator, or None if it is not known here; `ProtocolError` if ``peer`` is not in it."""
        group = self._groups.get(comm)
        if group is not None and peer not in group.index:
            raise ProtocolError(f"rank {peer} is not in communicator {comm}")
        return group

    def _strange(self, comm: int, frame: Frame, owned: bool = False) -> None:
        """A frame for a communicator that is not made, or was left."""
        if comm in self._left:
            if frame.kind == wire.GOODBYE:
                self._left_too(comm, frame.peer)
            elif frame.flags:
                self._outgoing.owe(frame.peer, len(frame.payload))
            elif frame.kind == wire.MESSAGE:
                self._engine.mail.strange(frame.peer, frame.payload)
        elif frame.kind == wire.DATA and not frame.flags:
            raise ProtocolError(
                f"rank {frame.peer} sent {len(frame.payload)} bytes without credit for communicator {comm}, which is not made here"
            )
        else:
            kept = frame if owned else frame._replace(payload=memoryview(bytes(frame.payload)))
            self._unmade.keep(comm, kept)
