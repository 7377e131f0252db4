"""The engine: operations in, frames out, for one rank of a mesh. Does no I/O, reads no clock, starts no thread.

The driver's duties: write what `data_to_send` gives and report it with `sent`; read into `receive_into` and report it with
`received`; call `handle_timer` at `next_deadline`, and `resume` in a turn of its own while something is `paused`; report a broken
connection with `peer_lost`; after each of these flush the peers in `dirty` and handle `take_events`. Every entry that may look at
time takes ``now`` in seconds on a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

from asynccoll.engine.aborts import Aborts, refusal
from asynccoll.engine.arrivals import Arrivals
from asynccoll.engine.departures import Departures
from asynccoll.engine.group import Early, Group
from asynccoll.engine.keys import Keys
from asynccoll.engine.losses import Kind, Losses
from asynccoll.engine.mail import Mail
from asynccoll.engine.operation import EAGER_STREAM, WINDOW, InStream, Operation
from asynccoll.engine.outgoing import UNLIMITED, Outgoing
from asynccoll.engine.peers import PeerBroken, PeerEvicted, Peers
from asynccoll.engine.rounds import Rounds
from asynccoll.engine.transfers import Drain, FoldBytes, Pause, SendBytes
from asynccoll.errors import ProtocolError

__all__ = ["Engine", "Event", "PeerBroken", "PeerEvicted"]

WORLD: Final = 0
"""Id of the communicator of all ranks."""


Event: TypeAlias = Operation | PeerBroken | PeerEvicted


class Engine:
    """All communicators of one rank in a mesh of ``size`` ranks. See the module docstring for the driver's duties."""

    def __init__(self, rank: int, size: int, name: str = "world") -> None:
        self.rank = rank
        """World rank."""
        self.size = size
        self.safe = False
        """Unpickle nothing that a peer sends, exceptions neither."""
        self.now = 0.0
        """The latest time that the driver gave."""
        self.closing = False
        """`close` was called: what still comes is of no consequence."""
        self._groups: dict[int, Group] = {}
        self._outgoing = Outgoing(rank, size)
        self._outboxes = self._outgoing.boxes
        self.dirty = self._outgoing.dirty
        """Peers for which there may be something new to write, in order. The driver takes them out."""
        self.peers = Peers(self, self._groups, self._outgoing)
        self._gone, self._inbounds = self.peers.gone, self.peers.inbounds
        self.events: list[Event] = []
        """What has ended and was not told yet: see `take_events`."""
        self.next_deadline: float | None = None
        """When to call `handle_timer`, or None. It may be earlier than anything that happens."""
        self.paused: deque[Operation] = deque()
        """Operations that wait for `resume`, in turn. Some may have ended meanwhile."""
        self._aborts = Aborts(self, self._outgoing)
        self.mail = Mail(self, self._outgoing)
        """Point to point."""
        self.losses = Losses(self, self._outgoing)
        """Who is dead."""
        self.departures = Departures(self, self._groups, self.losses, self._aborts)
        """What ends with those who die or leave."""
        self.keys = Keys(self, self._outgoing, self._aborts, self.departures)
        """Keyed operations that have no number yet."""
        self._rounds = Rounds(self, self._outgoing, self._aborts)
        self.arrivals = Arrivals(
            self, self._groups, self._outgoing, self._aborts, self.departures, self._rounds
        )
        self.add_group(WORLD, tuple(range(size)), name)

    # -- what the communicator calls ----------------------------------------------------------------------

    def add_group(self, comm: int, members: tuple[int, ...], name: str) -> Group:
        """Make the communicator ``comm`` known. ``members``: group rank -> world rank; this rank is one of them.

        No communication: what the other members have sent for it already is played back.
        """
        if self.arrivals.known(comm):
            raise ValueError(f"the id {comm:#x} of communicator {name!r} is in use already")
        group = Group(comm, members, members.index(self.rank), name)
        self._groups[comm] = group
        self.departures.inherit(group, self._groups[WORLD])
        self.arrivals.made(comm)
        return group

    def leave_group(self, comm: int, cause: str, now: float) -> None:
        """End what is pending on a communicator and tell its members. It may not be used afterwards."""
        self.now = now
        group = self._groups[comm]
        for op in list(group.active.values()):
            self.departures.leave(group, op, cause)
        for member in group.members:
            if member != self.rank and member not in group.lost and member not in self._groups[WORLD].left:
                self._outgoing.post(member, self.departures.farewell(cause, [group]))
        for early in group.early.values():
            self._outgoing.release(early)
        del self._groups[comm]
        self.mail.left(group)
        self.keys.left(comm)
        self.arrivals.left(group)

    def submit(self, op: Operation, now: float) -> None:
        """Give ``op`` the next number of its communicator and start it; with a key, as soon as it is granted a number."""
        self.now = now
        group = self._enrol(op)
        if op.key is not None:
            self.keys.submit(group, op)
            return
        self._number(group, op)
        if op.limit is not None:
            op.deadline = now + op.limit
        self.begin(group, op)

    def begin(self, group: Group, op: Operation) -> None:
        """Start ``op``, which has its number."""
        early = group.early.pop(op.seq, None)
        error = self.departures.unfit(group, op)
        if error is not None:
            if early is not None:
                self._outgoing.release(early)
            self._aborts.end(op, error)
            return
        group.active[op.seq] = op
        if op.deadline is not None:
            self.expect(op.deadline)
        if early is not None and early.aborts:
            self._outgoing.release(early)
            op.inquest = None
            self._aborts.late_arrival(op, early)
            return
        if op.inquest is not None:  # its deadline has passed while the grant was on its way
            if early is not None:
                self._outgoing.release(early)
            self._aborts.time_out(op)
            return
        if op.turns and not self._rounds.start(op):
            if early is not None:
                self._outgoing.release(early)
            return
        if early is not None and not self._take_early(op, early):
            return
        if op.expected is not None:
            for peer, nbytes in op.expected.items():
                if nbytes > EAGER_STREAM:
                    self._outgoing.grant(op, op.members[peer], UNLIMITED)
        if not op.swaps:
            self.advance(op)

    def message(self, op: Operation, now: float) -> None:
        """Start ``op``, a send or a receive of a message."""
        self.now = now
        self.mail.submit(op, op.mail)

    def refuse(self, op: Operation, error: Exception, now: float) -> None:
        """``op`` failed before it started (an argument is wrong): it takes its number, or its use of the key, so that the ranks
        stay in step.
        """
        self.now = now
        group = self._enrol(op)
        if op.key is not None:
            self.keys.refuse(group, op, error)
            return
        self._number(group, op)
        early = group.early.pop(op.seq, None)
        if early is not None:
            self._outgoing.release(early)
        self._aborts.broadcast(op, refusal(error, self.safe))
        self._aborts.end(op, error)

    def _enrol(self, op: Operation) -> Group:
        group = self._groups[op.comm]
        op.members, op.rank, op.group = group.members, group.rank, group.name
        op.tells, op.turns, op.heard = group.tells, group.turns, 1 << group.rank
        op.started = self.now
        return group

    @staticmethod
    def _number(group: Group, op: Operation) -> None:
        op.seq = group.next_seq
        group.next_seq += 1

    def cancel(self, op: Operation, now: float) -> None:
        """End ``op`` on every rank because its awaiter was cancelled. Its memory is free when this returns."""
        self.now = now
        group = self._groups.get(op.comm)
        if group is not None and group.active.get(op.seq) is op:
            self._aborts.cancel(op)

    def close(self, cause: str, now: float, *, ended: bool = False) -> None:
        """End what is pending and say goodbye to every peer. No operation may be submitted afterwards.

        ``ended``: the process ends without having closed, so the peers are to report this rank as lost; what it has taken
        part in to the end still completes on them.
        """
        self.now, self.closing = now, True
        if self.losses.accusations or self.losses.out:
            ended = False  # it ends because others have died, and is not to be reported beside them
        for group in self._groups.values():
            for op in list(group.active.values()):
                self.departures.leave(group, op, cause, ended)
            self.keys.departed(group)
        for goodbye in self.departures.farewells(cause, self._groups.values(), ended):
            for peer in self._outboxes:
                self._outgoing.post(peer, goodbye)

    def pending(self) -> list[Operation]:
        """Operations under way, in the order of their communicators and numbers."""
        return [op for group in self._groups.values() for op in group.active.values()]

    def group(self, comm: int = WORLD) -> Group:
        """State of one communicator."""
        return self._groups[comm]

    # -- what the driver calls ----------------------------------------------------------------------------

    def receive_into(self, peer: int) -> memoryview:
        """Memory for the next bytes from ``peer``: never empty; valid until the next call into the engine."""
        inbound = self._inbounds.get(peer)
        if inbound is None:
            inbound = self.peers.inbound(peer, self.arrivals)
        return inbound.target()

    def received(self, peer: int, nbytes: int, now: float) -> bool:
        """``nbytes`` from ``peer`` were written to the memory that `receive_into` gave. False: read no more from it."""
        self.now = now
        try:
            self._inbounds[peer].received(nbytes)
        except ProtocolError as error:
            self.broken(peer, error)
            return False
        except (KeyboardInterrupt, SystemExit) as error:
            # A reduce function's: what came behind that frame must not wait for more bytes.
            if error is self.losses.exiting and peer in self._inbounds:
                self.received(peer, 0, now)
            raise
        return peer not in self._gone

    def failed(self, error: BaseException, now: float) -> None:
        """``error`` came out of this engine where nothing expects one: see `Losses.resign`."""
        self.now = now
        self.losses.resign(error)

    def data_to_send(self, peer: int) -> Sequence[memoryview | bytes]:
        """Parts to write to ``peer`` next, in order; empty if there is nothing. The same until `sent` is called."""
        return self._outboxes[peer].gather()

    def sent(self, peer: int, nbytes: int) -> bool:
        """The first ``nbytes`` of `data_to_send` have been written. False: there is nothing more to write."""
        box = self._outboxes[peer]
        op = box.sent(nbytes)
        if op is not None and op.finished:
            self.finish(op)
        elif op is not None and op.draining and not op.unsent:
            op.draining = False
            self.paused.append(op)  # what follows may be a user's code, which does not belong into a write
        return bool(box.current or box.control or box.streams)

    def take_events(self) -> list[Event]:
        """What has ended since the last call: operations (with result or error) and peers that broke the protocol."""
        events, self.events = self.events, []
        return events

    def handle_timer(self, now: float) -> None:
        """Fail what is overdue at ``now``."""
        self.now = now
        self.next_deadline = None
        self.losses.handle_timer(now)
        for op in self.pending():
            inquest = op.inquest
            if inquest is not None:
                if inquest.deadline <= now:
                    self._aborts.conclude(op)
                else:
                    self.expect(inquest.deadline)
            elif op.deadline is not None:
                if op.deadline <= now:
                    self._aborts.time_out(op)
                else:
                    self.expect(op.deadline)

    def resume(self, now: float) -> None:
        """Run the next slice of one paused operation."""
        self.now = now
        while self.paused:
            op = self.paused.popleft()
            if op.program is not None:
                self.advance(op)
                return

    def peer_lost(self, peer: int, reason: str, now: float, *, silent: bool = False) -> None:
        """The connection to ``peer`` ended. What needs it fails when the ranks have agreed who is dead. ``silent``: nothing came,
        not even an end; the peer may be alive.
        """
        self.now = now
        self.peers.lost(peer, reason, Kind.SILENT if silent else Kind.ENDED)

    def silent(self, peer: int, reason: str, now: float) -> None:
        """Nothing was heard from ``peer`` for the liveness timeout, and its connection is open."""
        self.now = now
        if peer not in self._gone and not self.left(peer):
            self.losses.accuse(peer, Kind.SILENT, reason)

    def evicted(self, by: int, now: float) -> None:
        """``by`` has given this rank up, and says so by another way than the connection."""
        self.now = now
        self.losses.evicted(by)

    # -- programs -----------------------------------------------------------------------------------------

    def advance(self, op: Operation) -> None:
        """Run the program until it waits or returns."""
        program = op.program
        if program is None:
            return
        members, inputs = op.members, op.inputs
        try:
            while True:
                transfer = next(program)
                if type(transfer) is SendBytes:
                    rank, data, snapshot = transfer
                    self._outgoing.send(op, members[rank], data, snapshot)
                    continue
                if type(transfer) is Pause:
                    self.paused.append(op)
                    return
                if type(transfer) is Drain:
                    if op.unsent:
                        op.draining = True
                        return
                    continue
                into = fold = None
                if type(transfer) is FoldBytes:
                    rank, total, fold = transfer
                else:
                    rank, into = transfer
                    total = len(into)
                peer = members[rank]
                stream = inputs.get(peer)
                if stream is None:
                    stream = inputs[peer] = InStream()
                end, granted = stream.consumed + total, stream.granted
                if end > granted or (granted > EAGER_STREAM and end > granted - WINDOW // 2):
                    self._outgoing.grant(op, peer, end + WINDOW)
                if not stream.post(into, fold, total):
                    op.waiting = stream
                    if peer in self._gone:
                        self.departures.starve(self._groups[op.comm], op, peer)
                    return
        except StopIteration as stop:
            if self.returned(op, stop.value) and op.finished:
                self.finish(op)
        except BaseException as error:  # noqa: BLE001 (raised by the program: re-raised on every rank)
            self._aborts.fail(op, error)

    def returned(self, op: Operation, result: object) -> bool:
        """The program of ``op`` has returned. False if it ends badly all the same."""
        op.program, op.result = None, result
        try:
            op.check_drained()
        except ProtocolError as error:
            self._aborts.fail(op, error)
            return False
        return True

    def _take_early(self, op: Operation, early: Early) -> bool:
        """Give a starting operation what came before it. False if it has ended (or is about to) because of that."""
        self._outgoing.release(early)
        for peer, upto in early.grants.items():
            self._outgoing.granted(op, peer, upto)
        for peer, tag, payload in early.payload:
            if tag != op.digests.tag:
                self._aborts.disagree(op)
                return False
            stream = op.inputs.setdefault(peer, InStream())
            stream.arrived += len(payload)  # what came before the call was checked when it came
            stream.backlog.append(payload)
        for peer in sorted(early.wants):
            self._outgoing.wanted(op, peer)
        for peer, record in early.records.items():
            try:
                self._rounds.receive(op, peer, memoryview(record))
            except ProtocolError as error:
                self.broken(peer, error)
            if op.inquest is not None or op.error is not None:
                return False
        return True

    def left(self, peer: int) -> bool:
        """The peer has said goodbye."""
        return self.peers.left(peer)

    def scratch(self, peer: int, length: int) -> memoryview:
        """Memory for a payload of ``peer`` that is folded or dropped as soon as it is complete."""
        return self._inbounds[peer].scratch(length)

    def broken(self, peer: int, error: ProtocolError) -> None:
        """The peer broke the protocol: give it up."""
        self.peers.broken(peer, error)

    # -- shared with `Mail` --------------------------------------------------------------------------------

    def unfit(self, group: Group, op: Operation) -> Exception | None:
        """Why ``op`` cannot complete, given who has died or left."""
        return self.departures.unfit(group, op)

    def end(self, op: Operation, error: BaseException) -> None:
        """End ``op`` with ``error``; re-raises what is meant for the process."""
        self._aborts.fail(op, error)

    # -- shared with `Aborts` -------------------------------------------------------------------------------

    def expect(self, deadline: float) -> None:
        """See to it that `handle_timer` is called by ``deadline``."""
        if self.next_deadline is None or deadline < self.next_deadline:
            self.next_deadline = deadline

    def recall(self, op: Operation) -> None:
        """Take back every reference to the caller's memory: what is queued, half written, or being read into."""
        for peer in op.outputs:
            self._outboxes[peer].recall(op)
        for inbound in self._inbounds.values():
            inbound.redirect(op)
        op.release()

    def push(self, group: Group, frame: bytes) -> None:
        """Send a control frame to every other live member of a group."""
        for member in group.members:
            if member != self.rank and member not in group.lost and member not in group.left:
                self._outgoing.post(member, frame)

    def reply(self, peer: int, frame: bytes) -> None:
        """Send a control frame to one peer."""
        self._outgoing.post(peer, frame)

    def finish(self, op: Operation, error: BaseException | None = None) -> None:
        """Put an operation that has ended, with a result or by ``error``, among the events."""
        op.error = error
        op.forget_streams()
        self._groups[op.comm].active.pop(op.seq, None)
        self.events.append(op)
