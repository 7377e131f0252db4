"""Notices rare branches from outside: over the shoulders of the engines of one world. Knows when each name in `rare` is true.

Each look is a wrapper around a method of one instance, so that production code holds no trace of it and pays nothing for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from asynccoll.engine import wire
from asynccoll.engine.aborts import Disagrees, FoldFailed
from asynccoll.engine.engine import Engine
from asynccoll.engine.group import Early, Group
from asynccoll.engine.losses import Kind
from asynccoll.engine.operation import Operation
from asynccoll.engine.wire import HEADER_SIZE
from asynccoll.errors import CollectiveTimeout, PeerLost
from asynccoll.sim.driver import SimDriver
from asynccoll.testing.soak.rare import NAMES

__all__ = ["Watch"]

_KNOWN: Final = frozenset(NAMES)
_TOMBSTONES: Final = {
    "cancel": "a call finds a tombstone of a cancel",
    "mismatch": "a call finds a tombstone of a mismatch",
    "timeout": "a call finds a tombstone of a timeout",
    "error": "a call finds a tombstone of an error",
}


def _before(target: Any, name: str, look: Callable[..., object]) -> None:
    """Call ``look`` with the arguments of each call of a method, before it runs."""
    method = getattr(target, name)

    def watched(*args: Any, **options: Any) -> Any:
        look(*args, **options)
        return method(*args, **options)

    setattr(target, name, watched)


def _after(target: Any, name: str, look: Callable[..., object]) -> None:
    """Call ``look`` with the result and the arguments of each call of a method, after it has run."""
    method = getattr(target, name)

    def watched(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        look(result, *args, **options)
        return result

    setattr(target, name, watched)


class Watch:
    """Counts, into ``rare``, what the ranks behind ``drivers`` come across."""

    def __init__(self, drivers: list[SimDriver], rare: Counter[str]) -> None:
        self.rare = rare
        for driver in drivers:
            _Eyes(driver, self.see)
        pulses = drivers[0].network.pulses
        if pulses is not None:
            _after(pulses, "heard_again", lambda *_: self.see("silence ends in time"))

    def see(self, name: str) -> None:
        """Something rare has happened."""
        assert name in _KNOWN, name
        self.rare[name] += 1


class _Eyes:
    """What is watched of one rank."""

    def __init__(self, driver: SimDriver, see: Callable[[str], None]) -> None:
        self.driver = driver
        self.engine: Engine = driver.engine
        self.see = see
        self.failed: set[tuple[int, int]] = set()
        """(communicator, number) of operations that ended with an error here."""
        self.by_time = False
        """The engine's timer is being handled."""
        self._watch_streams()
        self._watch_frames()
        self._watch_aborts()
        self._watch_keys()
        self._watch_departures()
        self._watch_losses()

    # -- streams ------------------------------------------------------------------------------------------

    def _watch_streams(self) -> None:
        _after(self.driver, "take", self._taken)
        _before(self.driver, "ended", self._stream_ended)
        _after(self.driver, "write", self._written)
        _after(self.driver, "awake", lambda *_: self.see("a stopped rank goes on"))
        _after(self.engine, "sent", self._sent)

    def _inside(self, peer: int) -> str:
        inbound = self.engine._inbounds.get(peer)
        if inbound is None:
            return ""
        if inbound._landing is not None:
            return "payload"
        left = inbound.end - inbound.start
        return "" if not left else "header" if left < HEADER_SIZE else "payload"

    def _taken(self, _: object, peer: int, piece: memoryview) -> None:
        where = self._inside(peer)
        if where:
            self.see(f"a read ends inside a {where}")

    def _stream_ended(self, peer: int) -> None:
        engine = self.engine
        if self.driver.parted(peer) or engine.left(peer):
            return
        if self.driver.network.link(peer, engine.rank).reset:
            self.see("a connection is reset")
        where = self._inside(peer)
        self.see(
            f"a stream ends inside a {where}" if where else "a stream ends between frames, without goodbye"
        )

    def _written(self, _: object, peer: int) -> None:
        link = self.driver._links.get(peer)
        if link is not None and link.waiting:
            self.see("a link is full")

    def _sent(self, more: bool, peer: int, nbytes: int) -> None:
        if more and self.engine._outboxes[peer].current:
            self.see("a write is partial")

    # -- frames -------------------------------------------------------------------------------------------

    def _watch_frames(self) -> None:
        arrivals = self.engine.arrivals
        _before(arrivals, "data", self._data)
        _after(arrivals, "place", self._placed)
        _before(arrivals, "start", self._start)
        _before(arrivals, "control", self._control)
        _after(self.engine._rounds, "receive", self._received_record)
        _before(self.engine, "finish", self._finished)

    def _strange(self, comm: int) -> None:
        left = comm in self.engine.arrivals._left
        self.see(f"a frame for a communicator that {'was left' if left else 'is not made yet'}")

    def _crossed(self, what: str, group: Group, seq: int, after: bool = False) -> None:
        """A frame for an operation that is not under way."""
        if group.awaits(seq):
            self.see(f"{what} before the call")
        elif (group.comm, seq) in self.failed:
            self.see(f"{what} after an abort")
        elif after:
            self.see(f"{what} after the end")

    def _data(
        self, peer: int, flags: int, comm: int, seq: int, tag: int, payload: memoryview, owned: bool = False
    ) -> None:
        group = self.engine._groups.get(comm)
        if group is None:
            self._strange(comm)
            return
        op = group.active.get(seq)
        if op is None:
            self._crossed("payload", group, seq)
        elif op.inquest is not None:
            self.see("payload during an inquest")
        elif tag != op.digests.tag:
            self.see("a payload shows that the calls differ")

    def _placed(self, landing: Any, *_: object) -> None:
        if landing.op is not None:
            self.see("a payload lands in the caller's memory")

    def _start(self, peer: int, round_: int, comm: int, seq: int, payload: memoryview) -> None:
        group = self.engine._groups.get(comm)
        if group is None:
            self._strange(comm)
        elif seq not in group.active:
            self._crossed("START", group, seq)

    def _received_record(self, _: object, op: Operation, peer: int, payload: memoryview) -> None:
        if op.early_records:
            self.see("START of a later turn before an earlier one")
        if op.inquest is not None and op.inquest.reason == "mismatch" and len(op.inquest.answers) == 1:
            self.see("a START record shows that the calls differ")

    def _control(self, peer: int, kind: int, comm: int, seq: int, payload: memoryview) -> None:
        if kind == wire.CREDIT:
            self.see("credit is given back")
            return
        if kind == wire.WANT:
            self.see("a sender is out of credit")
        group = self.engine._groups.get(comm)
        if group is None:
            self._strange(comm)
        elif seq not in group.active and kind in (wire.READY, wire.WANT, wire.ABORT):
            name = {wire.READY: "READY", wire.WANT: "WANT", wire.ABORT: "ABORT"}[kind]
            if kind == wire.ABORT and not group.awaits(seq) and (comm, seq) not in self.failed:
                self.see("ABORT after a result")
            else:
                self._crossed(name, group, seq, after=kind == wire.READY)

    def _finished(self, op: Operation, error: BaseException | None = None) -> None:
        if error is not None:
            self.failed.add((op.comm, op.seq))
        group = self.engine._groups.get(op.comm)
        if group is None:
            return
        if error is None and group.left:
            self.see("an operation completes after a goodbye")
        if (
            error is None
            and self.engine.losses.out
            and not any(one in self.engine.losses.out for one in op.members)
        ):
            self.see("a group without the lost goes on")
        if isinstance(error, CollectiveTimeout) and not op.message:
            self.see("a timeout names a missing rank" if error.missing else "a timeout with nobody missing")
        if isinstance(error, PeerLost):
            self.see(
                "call after a loss" if op.seq not in group.active else "loss in the middle of an operation"
            )
            if len(error.peers) > 1:
                self.see("two ranks lost by one operation")

    # -- aborts -------------------------------------------------------------------------------------------

    def _watch_aborts(self) -> None:
        aborts = self.engine._aborts
        _before(aborts, "late_arrival", self._late_arrival)
        _before(aborts, "conclude", self._concluded)
        _before(aborts, "received", self._abort_received)
        _before(aborts, "fail", self._failed)
        _before(self.engine, "cancel", self._cancelled)
        _before(self.engine, "refuse", lambda *_: self.see("an argument is refused"))

    def _late_arrival(self, op: Operation, early: Early) -> None:
        for body in early.aborts.values():
            name = _TOMBSTONES.get(str(body.get("reason")))
            if name is not None:
                self.see(name)

    def _concluded(self, op: Operation) -> None:
        inquest = op.inquest
        if inquest is not None and not op.announced:
            patience = inquest.deadline <= self.engine.now
            self.see(f"an inquest ends {'by patience' if patience else 'with all answers'}")

    def _abort_received(
        self, group: Group, peer: int, seq: int, op: Operation | None, body: Mapping[str, Any]
    ) -> None:
        reason = None if op is None or op.inquest is None else op.inquest.reason
        if {reason, body.get("reason")} == {"timeout", "mismatch"}:
            self.see("a timeout and a mismatch in one operation")

    def _failed(self, op: Operation, error: BaseException) -> None:
        if isinstance(error, FoldFailed):
            self.see("a reduce function raises")
        elif isinstance(error, Disagrees):
            self.see("a payload shows that the calls differ")

    def _cancelled(self, op: Operation, now: float) -> None:
        engine = self.engine
        group = engine._groups.get(op.comm)
        if group is None or group.active.get(op.seq) is not op:
            self.see("cancel of what is complete")
            return
        if op.announced:
            self.see("a keyed call is cancelled before its grant")
        if op.inquest is not None:
            self.see("cancel during an inquest")
        if op.program is None:
            self.see("cancel after the last byte")
        elif not any(stream.arrived for stream in op.inputs.values()) and not op.round:
            self.see("cancel before any byte")
        if engine.losses.deadline is not None:
            self.see("cancel while a loss is being decided")
        for inbound in engine._inbounds.values():
            if inbound._landing is not None and inbound._landing.op is op:
                self.see("cancel inside a payload that is being read")
        for box in engine._outboxes.values():
            if box.lent is not None and box.lent.op is op:
                self.see("cancel with a segment half written")

    # -- keys ---------------------------------------------------------------------------------------------

    def _watch_keys(self) -> None:
        keys = self.engine.keys
        _before(keys, "_begin", self._granted)
        _before(keys, "_ended", self._key_ended)
        _before(keys, "time_out", lambda *_: self.see("a keyed timeout asks rank 0 who is missing"))
        _before(keys, "give_up", lambda *_: self.see("rank 0 does not say who is missing"))

    def _granted(self, group: Group, number: int) -> None:
        if number in group.withdrawn:
            self.see("a keyed withdrawal crosses the grant")

    def _key_ended(self, group: Group, number: int, body: Mapping[str, Any]) -> None:
        if body.get("reason") == "over":
            self.see("all ranks have come to a withdrawn key")
        elif body.get("origin") != group.rank:
            self.see("a keyed call ends by another rank's reason")

    # -- leaving ------------------------------------------------------------------------------------------

    def _watch_departures(self) -> None:
        departures = self.engine.departures
        _before(departures, "goodbye", self._goodbye)
        _before(departures, "starve", self._starves)
        _before(departures, "leave", self._leaves)
        _before(departures, "inherit", self._made)

    def _goodbye(self, peer: int, comm: int, body: Mapping[str, Any]) -> None:
        busy = any(group.active for group in self.engine._groups.values())
        self.see(f"goodbye {'in the middle of an operation' if busy else 'with nothing under way'}")

    def _starves(self, group: Group, op: Operation, peer: int) -> None:
        if peer in group.left:
            self.see("an operation waits for one that left")

    def _leaves(self, group: Group, op: Operation, cause: str, ended: bool = False) -> None:
        if group.active.get(op.seq) is op and self.engine.departures.blamed(group):
            self.see("a rank leaves because of the dead")

    def _made(self, group: Group, world: Group) -> None:
        out = self.engine.losses.out
        if any(member in world.left or member in out for member in group.members):
            self.see("a new group has a member that is gone")

    # -- losses -------------------------------------------------------------------------------------------

    def _watch_losses(self) -> None:
        losses = self.engine.losses
        _before(self.engine, "peer_lost", self._peer_lost)
        _before(losses, "accuse", self._accused)
        _before(losses, "heard", self._heard)
        _before(losses, "handle_timer", lambda now: setattr(self, "by_time", True))
        _after(losses, "handle_timer", lambda *_: setattr(self, "by_time", False))
        _before(losses, "_decide", self._decided)
        _before(losses, "_evict", self._evicted)
        _before(losses, "evicted", self._told)

    def _peer_lost(self, peer: int, reason: str, now: float, *, silent: bool = False) -> None:
        engine = self.engine
        if engine.left(peer):
            self.see("loss of a rank that has left")
        elif engine.closing:
            self.see("loss while closing")
        elif not any(group.active for group in engine._groups.values()):
            self.see("loss with nothing under way")

    def _accused(self, peer: int, kind: Kind, reason: str) -> None:
        losses = self.engine.losses
        if kind is Kind.SILENT:
            self.see("silent loss")
        if losses.deadline is not None and peer not in losses.suspects():
            self.see("a loss while another is being decided")

    def _heard(self, peer: int, body: Mapping[str, Any]) -> None:
        rank, out = self.engine.rank, self.engine.losses.out
        for accuser, accused, _, _, final in body["entries"]:
            if final and accused not in out and rank not in out:
                mine = accused == rank
                self.see(
                    "an evicted rank hears so by its link"
                    if mine
                    else "a verdict is adopted from another rank"
                )
            elif not final and accuser != peer:
                self.see("an accusation is passed on")

    def _told(self, by: int) -> None:
        if self.engine.rank not in self.engine.losses.out:
            self.see("an evicted rank hears so by a heartbeat")

    def _decided(self, culprits: frozenset[int]) -> None:
        if culprits:
            self.see(f"a loss is decided {'after 200 ms' if self.by_time else 'by all witnesses'}")
        accusations = self.engine.losses.accusations
        if any((accused, accuser) in accusations for accuser, accused in accusations):
            self.see("two ranks accuse one another")

    def _evicted(self, culprits: Mapping[int, Any]) -> None:
        drivers = self.driver.network.drivers
        for rank in culprits:
            if drivers[rank].frozen:
                self.see("a stopped rank is evicted")
            elif not drivers[rank].closed:
                self.see("a living rank is evicted")
