"""How operations end badly: cancel, local failure, mismatch, timeout. Knows ABORT bodies, not bytes.

A cancel or a local failure is told to every member once and ends the operation there. A mismatch or a timeout opens an
*inquest*: each member that takes part answers once to all, so that everyone raises with the same, complete answers; whoever
has not answered after half a second is left out.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from asynccoll.engine.fingerprint import first_difference
from asynccoll.engine.group import Early, Group
from asynccoll.engine.operation import Inquest, Operation
from asynccoll.engine.outgoing import Outgoing
from asynccoll.engine.wire import MAX_CONTROL, abort_frame, clipped
from asynccoll.errors import (
    CollectiveCancelled,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    ProtocolError,
    RemoteError,
)
from asynccoll.objects import capture, restore

if TYPE_CHECKING:
    from asynccoll.engine.engine import Engine

__all__ = ["PATIENCE", "Aborts", "Disagrees", "FoldFailed", "refusal", "valid_ranks", "well_formed"]

PATIENCE: Final = 0.5
"""Seconds to wait for answers in an inquest."""

_SILENT: Final = "another call (it did not say which in time)"
"""Value of a rank that disagrees and has not answered."""


class FoldFailed(Exception):
    """A user's reduce function raised: `RemoteError` on every rank, the one that ran it included."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


class Disagrees(Exception):
    """What a peer sent does not fit this rank's call: the ranks compare their calls and raise `CollectiveMismatch`."""


def refusal(error: BaseException, safe: bool = False) -> dict[str, Any]:
    """ABORT body that carries ``error`` to the other ranks; without the original where that is too large."""
    info = capture(error, safe)
    for part, limit in (("type", 1 << 10), ("message", 1 << 13), ("traceback", 1 << 14)):
        info[part] = clipped(info[part], limit)
    if info["pickle"] is not None and len(info["pickle"]) > MAX_CONTROL // 2:
        info["pickle"] = None
    return {"reason": "error", "error": info}


def valid_ranks(ranks: Any, size: int) -> bool:
    """Whether ``ranks``, from a peer, is a list of ranks of a group of ``size``."""
    return isinstance(ranks, list) and all(isinstance(rank, int) and 0 <= rank < size for rank in ranks)


def well_formed(reason: str, body: Mapping[str, Any]) -> bool:
    """Whether an ABORT body has what its reason needs."""
    match reason:
        case "error":
            restore(body.get("error"), safe=True)  # raises ProtocolError
            return True
        case "mismatch" | "timeout":
            return isinstance(body.get("fields", {}), dict)
        case "answer" | "cancel" | "closed":
            return "fields" not in body
    return False


def _forget_locals(error: BaseException) -> None:
    """Empty the frames behind an error that the awaiter will keep: the program's frames refer to lent memory."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


class Aborts:
    """The endings of one engine's operations."""

    def __init__(self, engine: Engine, outgoing: Outgoing) -> None:
        self._engine = engine
        self._outgoing = outgoing

    # -- endings ------------------------------------------------------------------------------------------

    def end(self, op: Operation, error: BaseException) -> None:
        """End ``op`` here with ``error``; its memory is free afterwards."""
        if op.message:
            self._engine.mail.ended(op)
        self._engine.recall(op)
        self._engine.finish(op, error)

    def broadcast(self, op: Operation, body: Mapping[str, Any]) -> None:
        """Tell every other member that ``op`` ends; of a message its other end is told when it matters."""
        if op.message:
            return
        if op.announced:
            self._engine.keys.withdraw(op, body)
            return
        self._engine.push(self._engine.group(op.comm), abort_frame(op.comm, op.seq, dict(body)))

    def cancel(self, op: Operation) -> None:
        """This rank's awaiter was cancelled."""
        self.broadcast(op, {"reason": "cancel"})
        self.end(op, CollectiveCancelled(op.rank, op.context(self._engine.now)))

    def fail(self, op: Operation, error: BaseException) -> None:
        """The operation's program or reduction raised ``error`` on this rank."""
        if isinstance(error, Disagrees):
            self.disagree(op)
            return
        if isinstance(error, FoldFailed):
            body = refusal(error.original, self._engine.safe)
            self.broadcast(op, body)
            self.end(op, self._remote(op, op.rank, body))
            return
        body = refusal(error, self._engine.safe)
        self.broadcast(op, body)
        if not isinstance(error, Exception):  # not for a future to raise: SystemExit, CancelledError ...
            self.end(op, self._remote(op, op.rank, body))
            if isinstance(error, KeyboardInterrupt | SystemExit):
                self._engine.losses.exiting = error
                raise error  # it is meant for the process
            return
        if isinstance(error, CollectiveError) and error.rank < 0:
            error.place(op.context(self._engine.now))
        _forget_locals(error)
        self.end(op, error)

    # -- inquests -----------------------------------------------------------------------------------------

    def disagree(self, op: Operation) -> None:
        """A frame shows that a peer makes another call."""
        if op.inquest is None:
            self._open(op, "mismatch", 0.0)
            self._answer(op)
            self.consider(op)

    def time_out(self, op: Operation) -> None:
        """The deadline of ``op`` has passed."""
        if op.message:
            missing, waited_for = self._engine.mail.overdue(op)
            context = op.context(self._engine.now)
            self.end(op, CollectiveTimeout(missing, op.limit or 0.0, context, waited_for=waited_for))
            return
        if op.announced:
            self._engine.keys.time_out(op)
            return
        self._open(op, "timeout", op.limit or 0.0)
        self._answer(op)
        self.consider(op)

    def late_arrival(self, op: Operation, early: Early) -> None:
        """The call comes after the others have ended the operation."""
        for rank, body in early.aborts.items():
            reason = body.get("reason")
            if reason == "mismatch":
                if op.inquest is None:
                    self._open(op, "mismatch", 0.0)
                    self._answer(op)
                assert op.inquest is not None
                op.inquest.answers[rank] = body
            elif reason == "timeout":
                self.end(op, self._timeout(op, {op.rank}, body, " before the others gave up"))
                return
            else:
                self.end(op, self.error_of(op, rank, body))
                return
        self.consider(op)

    def consider(self, op: Operation) -> None:
        """Conclude the inquest if every member that can answer has answered."""
        inquest = op.inquest
        if inquest is None or op.error is not None:
            return
        group = self._engine.group(op.comm)
        for member, rank in group.index.items():
            if rank in inquest.answers or member in group.left or member in group.lost:
                continue
            return
        if inquest.reason == "mismatch" and any("absent" in answer for answer in inquest.answers.values()):
            return  # a rank that has not called yet may do so within the time
        self.conclude(op)

    def conclude(self, op: Operation) -> None:
        """Raise with the answers that are in."""
        inquest = op.inquest
        assert inquest is not None
        if op.announced:
            self._engine.keys.give_up(op)
            return
        if inquest.reason == "timeout":
            present = {rank for rank, answer in inquest.answers.items() if "absent" not in answer}
            missing = set(range(len(op.members))) - present
            body = {"limit": inquest.limit}
            self.end(op, self._timeout(op, missing, body, ""))
            return
        values = {rank: a["fields"] for rank, a in inquest.answers.items() if "fields" in a}
        sites = {rank: str(a["site"]) for rank, a in inquest.answers.items() if a.get("site")}
        field, column = first_difference(values)
        silent = [rank for rank in range(len(op.members)) if rank not in values]
        if silent and len(set(map(repr, column.values()))) < 2:  # who differs has not said in what
            field = "verb"
            column = {rank: fields.get(field) for rank, fields in values.items()} | dict.fromkeys(
                silent, _SILENT
            )
        self.end(op, CollectiveMismatch(field, column, op.context(self._engine.now), sites=sites))

    def _open(self, op: Operation, reason: str, limit: float) -> None:
        """Take the memory back at once; the awaiter hears when the answers are in."""
        engine = self._engine
        op.inquest = Inquest(reason, engine.now + PATIENCE, limit)
        engine.recall(op)
        engine.expect(op.inquest.deadline)

    def _answer(self, op: Operation) -> None:
        """Tell every member what this rank called."""
        inquest = op.inquest
        assert inquest is not None
        answer = op.answer()
        inquest.answers[op.rank] = answer
        self.broadcast(op, {"reason": inquest.reason, "limit": inquest.limit, **answer})

    # -- frames -------------------------------------------------------------------------------------------

    def received(
        self, group: Group, peer: int, seq: int, op: Operation | None, body: Mapping[str, Any]
    ) -> None:
        """An ABORT from ``peer``."""
        rank = group.index[peer]
        reason = body.get("reason")
        if not isinstance(reason, str) or not well_formed(reason, body):
            raise ProtocolError(f"rank {peer} sent a malformed ABORT (reason {reason!r:.100})")
        if op is None:
            if group.awaits(seq):
                if reason != "answer":
                    self._entomb(group.early_of(seq), rank, body)
                if reason in ("timeout", "mismatch"):
                    self._reply(group, peer, seq, {"absent": True})
            elif reason == "timeout":  # complete here, so this rank did take part
                self._reply(group, peer, seq, {"present": True})
            return
        if reason in ("mismatch", "timeout"):
            if op.inquest is None:
                limit = body.get("limit")
                self._open(op, reason, float(limit) if isinstance(limit, float | int) else 0.0)
                self._answer(op)
            self._note(op, rank, body)
        elif reason == "answer":
            if op.inquest is not None:
                self._note(op, rank, body)
        else:
            self.end(op, self.error_of(op, rank, body))

    def _entomb(self, early: Early, rank: int, body: Mapping[str, Any]) -> None:
        """An operation that has not been called here has ended: keep why, drop its bytes."""
        self._outgoing.release(early)
        early.payload.clear()
        early.aborts.setdefault(rank, body)

    def _note(self, op: Operation, rank: int, body: Mapping[str, Any]) -> None:
        assert op.inquest is not None
        op.inquest.answers[rank] = body
        self.consider(op)

    def _reply(self, group: Group, peer: int, seq: int, body: dict[str, Any]) -> None:
        self._engine.reply(peer, abort_frame(group.comm, seq, {"reason": "answer", **body}))

    # -- errors from bodies -------------------------------------------------------------------------------

    def error_of(self, op: Operation, rank: int, body: Mapping[str, Any]) -> CollectiveError:
        """What ``op`` fails with because of what ``rank`` has said."""
        context = op.context(self._engine.now)
        reason = body.get("reason")
        if reason == "cancel":
            return CollectiveCancelled(rank, context)
        if reason == "closed":
            cause = str(body.get("cause", "closed"))
            if body.get("ended") is True:
                return self._engine.departures.error(self._engine.group(op.comm), [rank], cause, op)
            return CommunicatorClosed(rank, context, cause=cause)
        return self._remote(op, rank, body)

    def _remote(self, op: Operation, rank: int, body: Mapping[str, Any]) -> RemoteError:
        type_name, message, trace, original = restore(body["error"], self._engine.safe)
        return RemoteError(
            rank,
            type_name,
            message,
            op.context(self._engine.now),
            remote_traceback=trace,
            original=original,
        )

    def _timeout(
        self, op: Operation, missing: set[int], body: Mapping[str, Any], note: str
    ) -> CollectiveTimeout:
        limit = body.get("limit")
        return CollectiveTimeout(
            missing, limit if isinstance(limit, float | int) else 0.0, op.context(self._engine.now), note=note
        )
