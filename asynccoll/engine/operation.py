"""State of one operation on one rank: its streams, its START round, its inquest. Knows no sockets and no frames.

Laws kept here: bytes of a stream are delivered in order and exactly once; memory that the program lent is referred to only by
`InStream.into` and `OutStream.pending`, and both are emptied by `Operation.release`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from types import CodeType
from typing import Any, Final

from asynccoll.engine.fingerprint import Digests, Fingerprint
from asynccoll.engine.transfers import Program, Swap
from asynccoll.engine.wire import NO_DEADLINE, clipped
from asynccoll.errors import OpContext, ProtocolError

__all__ = ["EAGER_STREAM", "WINDOW", "InStream", "Inquest", "Operation", "OutStream"]

EAGER_STREAM: Final = 1 << 16
"""Bytes that a sender may send per operation and peer without a grant."""
WINDOW: Final = 1 << 20
"""Bytes that a started operation keeps per peer ahead of what its program asks for (a segment)."""


class InStream:
    """Bytes from one peer for one operation."""

    __slots__ = ("arrived", "backlog", "consumed", "filled", "fold", "granted", "into", "total", "wanted")

    def __init__(self) -> None:
        self.into: memoryview | None = None
        """Destination of the posted receive; the caller's memory, or None."""
        self.fold: Callable[[int, memoryview], None] | None = None
        """Consumer of the posted fold, or None. At most one of `into` and `fold` is set."""
        self.filled = 0
        """Bytes of the posted transfer that have arrived."""
        self.total = 0
        """Bytes of the posted transfer; 0 while nothing is posted."""
        self.backlog: deque[memoryview] = deque()
        """Whole pieces that came before the program asked for them; not empty only while nothing is posted."""
        self.consumed = 0
        """Bytes given to completed transfers: the offset of the posted transfer in the stream."""
        self.granted = EAGER_STREAM
        """The peer may send bytes below this offset."""
        self.arrived = 0
        """Bytes of the stream that have come."""
        self.wanted = False
        """The peer asked for a grant before it was clear that it needs one."""

    def post(
        self, into: memoryview | None, fold: Callable[[int, memoryview], None] | None, total: int
    ) -> bool:
        """Post a receive (``into``) or a fold of ``total`` bytes and serve it from the backlog. True if it is complete."""
        self.into, self.fold = into, fold
        self.total, self.filled = total, 0
        backlog = self.backlog
        while backlog and self.filled < total:
            piece = backlog.popleft()
            room = total - self.filled
            if len(piece) > room:
                backlog.appendleft(piece[room:])
                piece = piece[:room]
            self.take(piece)
        return self.complete()

    def count(self, peer: int, nbytes: int) -> None:
        """So many bytes more have come from ``peer``. `ProtocolError` if it was not to send them yet."""
        self.arrived = arrived = self.arrived + nbytes
        if arrived > self.granted:
            raise ProtocolError(
                f"rank {peer} sent {arrived} bytes for an operation, and was to send {self.granted}"
            )

    def take(self, piece: memoryview) -> None:
        """Give ``piece``, which fits, to the posted transfer."""
        filled = self.filled
        self.filled = end = filled + len(piece)
        if self.into is not None:
            self.into[filled:end] = piece
        elif self.fold is not None:
            self.fold(filled, piece)

    def complete(self) -> bool:
        """True, and nothing is posted any more, if the posted transfer has all its bytes."""
        if self.filled < self.total:
            return False
        self.consumed += self.total
        self.into = self.fold = None
        self.filled = self.total = 0
        return True


class OutStream:
    """Bytes to one peer for one operation."""

    __slots__ = ("asked", "granted", "offset", "op", "peer", "pending", "pos", "queued")

    def __init__(self, op: Operation, peer: int) -> None:
        self.op = op
        self.peer = peer
        """World rank of the receiver."""
        self.pending: deque[memoryview] = deque()
        """Lent memory that has not been handed to the outbox in full."""
        self.pos = 0
        """Bytes of ``pending[0]`` that have been handed over."""
        self.offset = 0
        """Bytes of the whole stream that have been handed over."""
        self.granted = 0
        """READY allows bytes below this offset."""
        self.queued = False
        """The outbox holds this stream in its round."""
        self.asked = False
        """A WANT is out."""


class Inquest:
    """Answers being collected before everyone raises: who passed what, or who never came."""

    __slots__ = ("answers", "deadline", "limit", "reason")

    def __init__(self, reason: str, deadline: float, limit: float) -> None:
        self.reason = reason
        """``"mismatch"`` or ``"timeout"``."""
        self.deadline = deadline
        """When to raise with the answers that came."""
        self.limit = limit
        """The timeout in seconds, for the message."""
        self.answers: dict[int, Mapping[str, Any]] = {}
        """Group rank -> what it said. The own answer is in from the start."""


def _unheard(op: Operation) -> None:
    """Nobody waits for the end of ``op`` yet."""


class Operation:
    """One collective on one rank, from the call to its end."""

    __slots__ = (
        "announced",
        "block",
        "comm",
        "deadline",
        "digests",
        "draining",
        "early_records",
        "error",
        "expected",
        "fingerprint",
        "group",
        "heard",
        "inputs",
        "inquest",
        "key",
        "limit",
        "mail",
        "members",
        "message",
        "needs",
        "on_end",
        "outputs",
        "program",
        "rank",
        "refused",
        "remaining",
        "result",
        "round",
        "seq",
        "site",
        "started",
        "swaps",
        "tells",
        "turns",
        "unsent",
        "value_digest",
        "waiting",
    )

    # Set when the engine numbers the call.
    seq: int
    members: tuple[int, ...]
    """Group rank -> world rank."""
    rank: int
    """Own group rank."""
    group: str
    """Name of the communicator."""
    started: float
    tells: tuple[tuple[int, ...], ...]
    """START graph: world ranks to tell after i peers have been heard."""
    turns: Mapping[int, int]
    """START graph: world rank to hear -> its turn."""
    heard: int
    """Bitmap of the group ranks known to have called."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        digests: Digests,
        program: Program | Swap,
        *,
        swaps: bool = False,
        expected: Mapping[int, int] | None = None,
        timeout: float | None = None,
        site: tuple[CodeType, int] | None = None,
        on_end: Callable[[Operation], None] = _unheard,
    ) -> None:
        self.fingerprint = fingerprint
        self.digests = digests
        self.value_digest = digests.value
        """Digest of dtype and shape as far as known: a wildcard takes over what it hears."""
        self.program: Generator[Any, Any, Any] | None = program
        """The body; None once it has returned or the operation was released."""
        self.swaps = swaps
        """The program is a `Swap`."""
        self.block: memoryview | bytes = b""
        """What a swap sends in the present round."""
        self.expected = expected
        """Group rank -> all bytes to come from it, where they always have a place (granted at the start)."""
        self.limit = timeout
        """Time limit in seconds, or None."""
        self.site = site
        """Code and instruction of the caller; made into text only when an error needs it."""
        self.on_end = on_end
        """Called once by the driver when the operation has ended; `error` tells how."""

        self.key: str | None = None
        """Key by which it is matched across the ranks; None: by the order of the calls."""
        self.announced = False
        """It has a key and has not been granted a number yet (`asynccoll.engine.keys`)."""
        self.mail: Any = None
        """What a send or receive of a message asks for (`asynccoll.engine.mail`)."""
        self.message = False
        """A send, a receive or a transfer of a message: no other rank takes part in its end."""
        self.needs: tuple[int, ...] | None = None
        """World ranks without which it cannot complete; None: all members."""
        self.comm = 0
        """Communicator; 0 is the world."""
        self.deadline: float | None = None
        self.remaining = NO_DEADLINE
        """Milliseconds that remained at the call."""
        self.round = 0
        """Peers heard in the START round, which is over when they are as many as `turns`."""
        self.early_records: dict[int, tuple[int, memoryview]] | None = None
        """Round -> bitmap heard and block, for records of rounds not reached yet."""
        self.inputs: dict[int, InStream] = {}
        """World rank -> stream from it."""
        self.outputs: dict[int, OutStream] = {}
        """World rank -> stream to it."""
        self.waiting: InStream | None = None
        """The stream on which the program waits."""
        self.unsent = 0
        """Lent pieces that have not left in full."""
        self.draining = False
        """The program waits until there are none."""
        self.inquest: Inquest | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.refused: Exception | None = None
        """Why it fails before it starts: an argument is wrong."""

    @property
    def finished(self) -> bool:
        """The program has returned, its sends have left and the START round is over."""
        return self.program is None and not self.unsent and self.round == len(self.turns)

    def awaits(self, peer: int) -> bool:
        """It cannot go on without bytes of ``peer``, a world rank: its program waits for them, or its START round does."""
        if self.waiting is not None and self.inputs.get(peer) is self.waiting:
            return True
        turn = self.turns.get(peer, -1)
        return turn >= self.round and (self.early_records is None or turn not in self.early_records)

    def context(self, now: float) -> OpContext:
        """What every error about this operation reports."""
        seq = -1 if self.message or self.key is not None else self.seq
        elapsed = max(0.0, now - self.started)
        return OpContext(self.fingerprint.verb, seq, self.group, self.rank, elapsed, self.key)

    @property
    def label(self) -> str:
        """The operation as lists and errors name it: ``"allreduce #12"``, ``"allreduce key 'a'"``, ``"recv"``."""
        verb = self.fingerprint.verb
        if self.key is not None:
            return f"{verb} key {self.key!r}"
        return verb if self.message else f"{verb} #{self.seq}"

    def answer(self) -> dict[str, Any]:
        """This rank's own answer in an inquest."""
        return {"fields": self.fingerprint.fields(), "site": _describe(self.site)}

    def deliver(self, stream: InStream, piece: memoryview, owned: bool) -> bool:
        """Give ``piece`` to the program's posted receive, the rest to the backlog. True if the program can go on.

        ``owned``: the piece's memory stays valid afterwards, so that the backlog need not copy it.
        """
        if self.waiting is not stream:
            stream.backlog.append(piece if owned else memoryview(bytes(piece)))
            return False
        size, total, fold = len(piece), stream.total, stream.fold
        if size == total and fold is not None:  # the whole of a small operation, as a rule
            fold(0, piece)
            stream.consumed += total
            stream.fold = None
            stream.total = 0
            return True
        room = total - stream.filled
        if size <= room:
            stream.take(piece)
        else:
            stream.take(piece[:room])
            rest = piece[room:]
            stream.backlog.append(rest if owned else memoryview(bytes(rest)))
        return stream.complete()

    def release(self) -> None:
        """Forget every piece of the caller's memory and end the program. The outboxes are recalled by the engine."""
        program, self.program = self.program, None
        self.waiting = None
        self.block = b""
        for stream in self.inputs.values():
            stream.into = stream.fold = None
            stream.backlog.clear()
        self.inputs.clear()
        for out in self.outputs.values():
            out.pending.clear()
        self.unsent = 0
        if program is not None and not getattr(program, "gi_running", False):
            program.close()

    def forget_streams(self) -> None:
        """The operation has ended: what it refers to must not wait for the cycle collector."""
        self.inputs.clear()
        self.outputs.clear()

    def check_drained(self) -> None:
        """Raise `ProtocolError` if a peer sent more bytes than the finished program asked for."""
        for peer, stream in self.inputs.items():
            if stream.backlog:
                extra = sum(map(len, stream.backlog))
                raise ProtocolError(f"rank {peer} sent {extra} bytes more than {self.fingerprint.verb} takes")


def _describe(site: tuple[CodeType, int] | None) -> str:
    """``"train.py:88"``, or empty if it is not known."""
    if site is None:
        return ""
    code, instruction = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return clipped(f"{code.co_filename.rpartition('/')[2]}:{line}", 256)
