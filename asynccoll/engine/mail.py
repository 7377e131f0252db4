"""Point to point: messages from one rank to another, matched by source and tag. Knows matching, not values or frames' bytes.

A message has no START round and no abort of a group. A short one travels whole, on eager credit, and waits at its receiver. Of a
long one the description travels first; its payload follows when a receive has matched it (TAKE), straight into its final memory.
Messages of one source are numbered by it, across all its destinations, so a number and the source name one message.

Order: messages of one source and tag are received in the order in which they were sent; of several that fit a receive the one
that arrived first is taken; receives are served in the order in which they were posted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asynccoll.engine import wire
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.group import Group
from asynccoll.engine.operation import InStream, Operation
from asynccoll.engine.outgoing import UNLIMITED, Outgoing
from asynccoll.engine.programs.items import Item, spread
from asynccoll.engine.transfers import RecvBytes, SendBytes, Transfer
from asynccoll.engine.wire import MESSAGES
from asynccoll.errors import ProtocolError

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["INLINE", "Letter", "Mail", "Receive", "Send"]

INLINE: Final = 1 << 15
"""Payloads up to this many bytes travel with their description, if there is credit."""
MAX_LETTERS: Final = 1 << 16
"""Messages of one communicator that may wait for a receive."""
_FINGERPRINT: Final = Fingerprint("message")
_DIGESTS: Final = digests(_FINGERPRINT)


_ENVELOPE: Final = 64
"""Bytes that a waiting message counts for beside its payload, so that small ones are bounded too."""


def _cost(nbytes: int) -> int:
    """Eager credit for a message with so many bytes beside its description, from its sending until it is received."""
    return nbytes + _ENVELOPE if nbytes else 0


class Send(NamedTuple):
    """What `Mail.submit` is to send."""

    to: int
    """Group rank."""
    tag: int
    item: Item
    """Nobody changes it before the operation has ended; one for this rank itself, never."""


class Receive(NamedTuple):
    """What `Mail.submit` is to receive."""

    source: int | None
    """Group rank; None is any."""
    tag: int | None
    place: Callable[[bytes, int], Sequence[memoryview]]
    """Memory for the parts of that description and so many bytes. `ProtocolError` if they do not fit each other."""
    value: Callable[[bytes, Sequence[memoryview], int, int], Any]
    """The result of the operation, from description, parts, source and tag."""


class Letter:
    """One message at its receiver."""

    __slots__ = ("beside", "by", "meta", "nbytes", "parts", "seq", "source", "tag", "taken")

    def __init__(self, source: int, seq: int, tag: int, meta: bytes, nbytes: int) -> None:
        self.source = source
        """Group rank."""
        self.seq = seq
        self.tag = tag
        self.meta = meta
        self.nbytes = nbytes
        self.beside: memoryview | None = None
        """The payload, if it travelled beside the description."""
        self.parts: Sequence[memoryview] | None = None
        """The payload, once it is here in full, in memory of its parts."""
        self.taken: Operation | None = None
        """The transfer under way."""
        self.by: Operation | None = None
        """The receive that waits for the end of the transfer; None if that was cancelled."""

    @property
    def complete(self) -> bool:
        """The payload is here in full."""
        return self.parts is not None or self.beside is not None

    def fits(self, receive: Receive) -> bool:
        """The receive may take it."""
        return self.by is None and receive.source in (None, self.source) and receive.tag in (None, self.tag)


class _Box:
    """The messages of one communicator."""

    __slots__ = ("came", "letters", "posted", "sent")

    def __init__(self) -> None:
        self.sent = 0
        """Messages sent so far."""
        self.came: dict[int, int] = {}
        """Source -> number of the last message that has come from it."""
        self.letters: dict[int, Letter] = {}
        """Arrived and not received, in order of arrival."""
        self.posted: list[tuple[Operation, Receive]] = []
        """Receives that nothing has matched, in order of posting."""


class Mail:
    """The messages of one engine."""

    def __init__(self, engine: Engine, outgoing: Outgoing) -> None:
        self._engine = engine
        self._outgoing = outgoing
        self._boxes: dict[int, _Box] = {}
        """Communicator -> its messages."""

    # -- calls --------------------------------------------------------------------------------------------

    def submit(self, op: Operation, what: Send | Receive) -> None:
        """Start a send or a receive, whose group is set."""
        group = self._engine.group(op.comm)
        box = self._boxes.setdefault(op.comm, _Box())
        op.message = True
        if isinstance(what, Send):
            self._send(group, box, op, what)
            return
        self._enrol(group, op, group.take_local(), what.source)
        for letter in box.letters.values():
            if letter.fits(what):
                self._match(group, box, op, what, letter)
                return
        error = self._engine.unfit(group, op)
        if error is not None:
            self._engine.end(op, error)
            return
        box.posted.append((op, what))

    def _enrol(self, group: Group, op: Operation, seq: int, peer: int | None) -> None:
        """Make ``op`` one of the group's, between this rank and ``peer`` (None: any)."""
        engine = self._engine
        op.seq, op.rank, op.group, op.tells, op.turns, op.heard = seq, group.rank, group.name, ((),), {}, 0
        op.members, op.digests = group.members, _DIGESTS
        op.needs = group.members if peer is None else (group.members[peer],)
        op.started = engine.now
        group.active[seq] = op
        if op.limit is not None:
            op.deadline = engine.now + op.limit
            engine.expect(op.deadline)

    def _send(self, group: Group, box: _Box, op: Operation, what: Send) -> None:
        engine = self._engine
        seq = MESSAGES | group.rank << 40 | box.sent
        box.sent += 1
        self._enrol(group, op, seq, what.to)
        error = engine.unfit(group, op)
        if error is not None:
            engine.end(op, error)
            return
        meta, size = what.item.meta, what.item.nbytes
        peer = group.members[what.to]
        if peer == engine.rank:
            letter = Letter(group.rank, seq, what.tag, meta, size)
            letter.parts = what.item.parts
            engine.returned(op, None)
            engine.finish(op)
            self._arrived(group, box, letter)
            return
        outbox = self._outgoing.boxes[peer]
        cost = _cost(size)
        inline = size <= INLINE and cost <= outbox.credit
        if inline:
            outbox.credit -= cost
        payload = b"".join(what.item.parts) if inline else b""
        frame = wire.message_frame(op.comm, seq, what.tag, meta, size, payload)
        self._outgoing.post(peer, frame)
        if inline:
            engine.returned(op, None)
            engine.finish(op)
        else:
            op.program = self._payload(what)

    @staticmethod
    def _payload(what: Send) -> Generator[Transfer, None, None]:
        for part in what.item.parts:
            yield SendBytes(what.to, part)

    # -- frames -------------------------------------------------------------------------------------------

    def arrived(self, group: Group, peer: int, seq: int, payload: memoryview) -> None:
        """A message, or the description of one."""
        source = group.index[peer]
        box = self._boxes.setdefault(group.comm, _Box())
        tag, nbytes, meta, rest = wire.parse_message(payload)
        if seq >> 40 != (MESSAGES >> 40) | source:
            raise ProtocolError(f"rank {peer} sent a message under another rank's number")
        if seq <= box.came.get(source, 0):  # two under one number would share one transfer
            raise ProtocolError(f"rank {peer} sent the message {seq:#x} twice, or out of turn")
        box.came[source] = seq
        if len(box.letters) >= MAX_LETTERS:
            raise ProtocolError(
                f"rank {peer} sent a message while {MAX_LETTERS} wait to be received on {group.name!r}"
            )
        letter = Letter(source, seq, tag, meta, nbytes)
        if len(rest) == nbytes:
            letter.beside = memoryview(bytes(rest))
        self._arrived(group, box, letter)

    def taken(self, group: Group, peer: int, seq: int) -> None:
        """The receiver wants the payload of a message now."""
        if seq >> 40 != (MESSAGES >> 40) | group.rank:
            raise ProtocolError(f"rank {peer} asked for the payload of a message that this rank has not sent")
        op = group.active.get(seq)
        if op is None or op.program is None or op.needs != (peer,):
            self._outgoing.post(peer, wire.abort_frame(group.comm, seq, {"reason": "cancel"}))
            return
        self._outgoing.granted(op, peer, UNLIMITED)
        self._engine.advance(op)

    def withdrawn(self, group: Group, peer: int, seq: int) -> None:
        """The sender takes a message back, before its payload has come in full."""
        box = self._boxes.setdefault(group.comm, _Box())
        for letter in box.letters.values():
            if letter.seq == seq and letter.source == group.index[peer] and not letter.complete:
                self._drop(group, box, letter)
                return

    # -- matching -----------------------------------------------------------------------------------------

    def _arrived(self, group: Group, box: _Box, letter: Letter) -> None:
        """A message has come, or come back: to the first receive that it fits, or to those that wait."""
        box.letters.setdefault(id(letter), letter)
        if letter.by is not None:
            return
        for op, what in box.posted:
            if letter.fits(what):
                box.posted.remove((op, what))
                self._match(group, box, op, what, letter)
                return

    def _match(self, group: Group, box: _Box, op: Operation, what: Receive, letter: Letter) -> None:
        if letter.complete:
            del box.letters[id(letter)]
            self._owe(group, letter)
            self._deliver(group, op, what, letter)
            return
        letter.by = op
        if letter.taken is not None:
            return  # on its way already, for a receive that was cancelled
        peer = group.members[letter.source]
        try:
            parts = what.place(letter.meta, letter.nbytes)
        except Exception as error:  # noqa: BLE001 (raised from the work, unless the peer is to blame)
            letter.by = None
            del box.letters[id(letter)]
            self._fail(group, op, letter, error)
            return
        transfer = Operation(_FINGERPRINT, _DIGESTS, self._fetch(group, box, letter, parts))
        transfer.comm, transfer.message = group.comm, True
        letter.taken = transfer
        self._enrol(group, transfer, letter.seq, letter.source)
        stream = transfer.inputs[peer] = InStream()
        stream.granted = UNLIMITED  # all of it has a place
        self._outgoing.post(peer, wire.take_frame(group.comm, letter.seq))
        self._engine.advance(transfer)

    def _owe(self, group: Group, letter: Letter) -> None:
        """A message with its payload beside it waits no more: its sender may send as much again."""
        if letter.beside is not None and letter.nbytes:
            self._outgoing.owe(group.members[letter.source], _cost(letter.nbytes))

    def strange(self, peer: int, payload: memoryview) -> None:
        """A message for a communicator that this rank has left: it is dropped."""
        _, nbytes, _, rest = wire.parse_message(payload)
        if nbytes and len(rest) == nbytes:
            self._outgoing.owe(peer, _cost(nbytes))

    def _fetch(
        self, group: Group, box: _Box, letter: Letter, parts: Sequence[memoryview]
    ) -> Generator[Transfer, None, None]:
        for part in parts:
            yield RecvBytes(letter.source, part)
        letter.parts, letter.taken = parts, None
        op, letter.by = letter.by, None
        if op is None:  # cancelled, and nobody has come in its place
            self._arrived(group, box, letter)
        else:
            del box.letters[id(letter)]
            self._deliver(group, op, op.mail, letter)

    def _deliver(self, group: Group, op: Operation, what: Receive, letter: Letter) -> None:
        try:
            if letter.parts is None:
                assert letter.beside is not None
                letter.parts = what.place(letter.meta, letter.nbytes)
                spread(letter.beside, letter.parts)
            result = what.value(letter.meta, letter.parts, letter.source, letter.tag)
        except BaseException as error:  # noqa: BLE001 (raised by unpickling: re-raised from the work)
            self._fail(group, op, letter, error)
            return
        self._engine.returned(op, result)
        self._engine.finish(op)

    def _fail(self, group: Group, op: Operation, letter: Letter, error: BaseException) -> None:
        """``letter`` cannot be made a value: its sender's fault, or this rank's."""
        peer = group.members[letter.source]
        if isinstance(error, ProtocolError) and peer != self._engine.rank:
            self._engine.broken(peer, error)
        if op.error is None:
            self._engine.end(op, error)

    def _drop(self, group: Group, box: _Box, letter: Letter) -> None:
        """The message will not come: whoever has matched it waits on, in its place."""
        del box.letters[id(letter)]
        transfer, letter.taken = letter.taken, None
        if transfer is not None:
            self._engine.recall(transfer)
            group.active.pop(letter.seq, None)
        op, letter.by = letter.by, None
        if op is not None:
            for other in box.letters.values():
                if other.fits(op.mail):
                    self._match(group, box, op, op.mail, other)
                    return
            # It may have been called when ranks were dead already, for this message alone.
            error = self._engine.unfit(group, op)
            if error is not None:
                self._engine.end(op, error)
                return
            box.posted.insert(0, (op, op.mail))

    # -- ends ---------------------------------------------------------------------------------------------

    def overdue(self, op: Operation) -> tuple[set[int], str]:
        """Of a send or receive whose deadline has passed: the group ranks that it waited for, and what it waited for as text."""
        what = op.mail
        if isinstance(what, Send):
            stream = op.outputs.get(op.needs[0]) if op.needs else None
            if stream is not None and stream.granted:
                left = (
                    f"the payload of the message with tag {what.tag} did not leave for rank {what.to} in time"
                )
                return set(), f"{left}. Look for what keeps that rank or its link busy"
            said = f"rank {what.to} did not receive the message with tag {what.tag}"
            return {what.to}, f"{said}. Check that it calls recv for it"
        group, box = self._engine.group(op.comm), self._boxes[op.comm]
        for letter in box.letters.values():
            if letter.by is op:
                came = f"the payload of the message from rank {letter.source} with tag {letter.tag} did not arrive in time"
                return set(), f"{came}. Look for what keeps that rank or its link busy"
        tag = "any tag" if what.tag is None else f"tag {what.tag}"
        source = "any rank" if what.source is None else f"rank {what.source}"
        said = f"no message with {tag} came from {source}"
        others = [
            f"from rank {letter.source} with tag {letter.tag}" for letter in list(box.letters.values())[:3]
        ]
        if others:
            more = ", ..." if len(box.letters) > len(others) else ""
            said += f" ({len(box.letters)} others wait here: {', '.join(others)}{more})"
        # Nobody else could have sent what was to come from this rank itself.
        missing = {what.source} if what.source is not None else set(range(group.size)) - {group.rank}
        return missing, f"{said}. Check source and tag of its send"

    def ended(self, op: Operation) -> None:
        """A send or receive ends with an error: cancelled, timed out, or its peer is gone."""
        group = self._engine.group(op.comm)
        box = self._boxes.get(op.comm)
        if box is None:
            return
        if op.mail is None:  # a transfer: its sender is gone
            for letter in list(box.letters.values()):
                if letter.taken is op:
                    letter.taken = None
                    self._drop(group, box, letter)
            return
        if isinstance(op.mail, Send):
            peer = group.members[op.mail.to]
            if peer not in group.lost:
                self._outgoing.post(peer, wire.abort_frame(op.comm, op.seq, {"reason": "cancel"}))
            return
        box.posted = [(other, what) for other, what in box.posted if other is not op]
        for letter in box.letters.values():
            if letter.by is op:
                letter.by = None  # its payload, on its way, is for the next
                self._arrived(group, box, letter)
                return

    def lost(self, group: Group, peer: int) -> None:
        """A member is gone: what it has only announced will not come."""
        box = self._boxes.get(group.comm)
        if box is not None:
            source = group.index[peer]
            for letter in list(box.letters.values()):
                if letter.source == source and not letter.complete and letter.taken is None:
                    del box.letters[id(letter)]

    def left(self, group: Group) -> None:
        """This rank has left a communicator."""
        box = self._boxes.pop(group.comm, None)
        for letter in box.letters.values() if box is not None else ():
            self._owe(group, letter)
