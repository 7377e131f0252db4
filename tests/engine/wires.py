"""Engines joined by hand: bytes move only when a test moves them. No loop, no socket, no clock, no thread."""

from typing import NamedTuple

from asynccoll.engine import wire
from asynccoll.engine.engine import Engine, PeerBroken, PeerEvicted
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.losses import PATIENCE
from asynccoll.engine.operation import Operation
from asynccoll.engine.transfers import RecvBytes, SendBytes
from asynccoll.engine.wire import HEADER, HEADER_SIZE

CALL = Fingerprint("test")
"""What all ranks call where the call itself does not matter."""
TAG = digests(CALL).tag
KIB = 1 << 10


class Frame(NamedTuple):
    kind: int
    flags: int
    round: int
    comm: int
    seq: int
    tag: int
    payload: bytes


def frames(data):
    """Whole frames in ``data``, which must not end within one."""
    found = []
    at = 0
    while at < len(data):
        *head, length = HEADER.unpack_from(data, at)
        at += HEADER_SIZE
        assert at + length <= len(data), "the bytes end within a frame"
        found.append(Frame(*head, bytes(data[at : at + length])))
        at += length
    return found


def frame(kind, seq=0, payload=b"", *, flags=0, round_=0, comm=0, tag=TAG):
    """One frame as bytes."""
    return HEADER.pack(kind, flags, round_, comm, seq, tag, len(payload)) + payload


def script(*transfers, result=None):
    """A program that makes these transfers."""
    yield from transfers
    return result


def operation(*transfers, result=None, call=CALL, program=None, key=None, **options):
    """An operation that makes these transfers, or runs ``program``."""
    body = script(*transfers, result=result) if program is None else program
    op = Operation(call, digests(call), body, on_end=lambda op: None, **options)
    op.key = key
    return op


class Wires:
    """Real engines for ``ranks`` of a world of ``size``; what the other ranks send is made up by the test.

    Keeps the driver's duties to the letter: writes only to peers that `Engine.dirty` named, until there is nothing left.
    """

    def __init__(self, size, ranks=None):
        self.size = size
        self.now = 0.0
        self.engines = {rank: Engine(rank, size) for rank in (range(size) if ranks is None else ranks)}
        self.flight = {(a, b): bytearray() for a in range(size) for b in range(size) if a != b}
        """(source, destination) -> bytes written and not yet read."""
        self.due = {rank: {} for rank in self.engines}
        """Rank -> peers to which something may have to be written."""
        self.ended = {rank: [] for rank in self.engines}
        """Rank -> operations in the order in which they ended."""
        self.broken = {rank: {} for rank in self.engines}
        """Rank -> peer -> the `ProtocolError` for which the peer was given up."""
        self.evicted = {rank: [] for rank in self.engines}
        """Rank -> peers whose open connection it gave up."""
        self.log = []
        """(source, destination, bytes) of each write that took something."""

    # -- calls --------------------------------------------------------------------------------------------

    def submit(self, rank, op, comm=0):
        op.comm = comm
        self.engines[rank].submit(op, self.now)
        self.collect(rank)
        return op

    def start(self, rank, *transfers, **options):
        return self.submit(rank, operation(*transfers, **options))

    def refuse(self, rank, error, **options):
        op = operation(**options)
        self.engines[rank].refuse(op, error, self.now)
        self.collect(rank)
        return op

    def cancel(self, rank, op):
        self.engines[rank].cancel(op, self.now)
        self.collect(rank)

    def close(self, rank, cause="closed"):
        self.engines[rank].close(cause, self.now)
        self.collect(rank)

    def lose(self, rank, peer, reason="reset"):
        """``rank`` finds its connection to ``peer`` broken."""
        self.flight[peer, rank].clear()
        self.engines[rank].peer_lost(peer, reason, self.now)
        self.collect(rank)

    def tick(self, now):
        """Let the time be ``now``, and serve the timers that are due."""
        self.now = now
        for rank, engine in self.engines.items():
            deadline = engine.next_deadline
            if deadline is not None and deadline <= now:
                engine.handle_timer(now)
                self.collect(rank)

    def agree(self):
        """Let the time pass that ranks wait for others' word on a loss."""
        self.tick(self.now + PATIENCE)
        self.settle()

    # -- bytes --------------------------------------------------------------------------------------------

    def collect(self, rank):
        engine = self.engines[rank]
        self.due[rank].update(engine.dirty)
        engine.dirty.clear()
        for event in engine.take_events():
            if isinstance(event, PeerBroken):
                self.broken[rank][event.peer] = event.error
            elif isinstance(event, PeerEvicted):
                self.evicted[rank].append(event.peer)
            else:
                self.ended[rank].append(event)

    def resume(self, rank):
        """One turn for what is paused on ``rank``."""
        self.engines[rank].resume(self.now)
        self.collect(rank)

    def write(self, source, destination, limit=None):
        """One write that takes at most ``limit`` bytes; how many it took."""
        engine = self.engines[source]
        data = b"".join(engine.data_to_send(destination))[:limit]
        if data:
            self.flight[source, destination] += data
            self.log.append((source, destination, data))
            engine.sent(destination, len(data))
            self.collect(source)
        else:
            self.due[source].pop(destination, None)
        return len(data)

    def feed(self, rank, peer, data, piece=None):
        """Let ``rank`` read ``data`` from ``peer``, at most ``piece`` bytes at a time, unless it gives the peer up."""
        engine = self.engines[rank]
        left = memoryview(data)
        while left and peer not in self.broken[rank] and peer not in self.evicted[rank]:
            memory = engine.receive_into(peer)
            count = min(len(memory), len(left), piece or len(left))
            assert count, "the engine offered no memory"
            memory[:count] = left[:count]
            engine.received(peer, count, self.now)
            self.collect(rank)
            left = left[count:]

    def read(self, source, destination, limit=None):
        """Let ``destination`` read at most ``limit`` of the bytes under way from ``source``."""
        data = self.flight[source, destination]
        taken = bytes(data[:limit])
        del data[: len(taken)]
        self.feed(destination, source, taken)

    def flush(self, source):
        """Write all that ``source`` may send."""
        for destination in list(self.due[source]):
            while self.write(source, destination):
                pass

    def take(self, source, destination):
        """The frames that ``source`` sends to ``destination``, taken off the wire."""
        while self.write(source, destination):
            pass
        data = self.flight[source, destination]
        found = frames(data)
        data.clear()
        return found

    def settle(self, piece=None):
        """Move bytes, in a fixed order, until nothing moves; reads take at most ``piece`` bytes."""
        moved = True
        while moved:
            moved = False
            for rank, engine in self.engines.items():
                if engine.paused:
                    self.resume(rank)
                    moved = True
            for source in self.engines:
                if self.due[source]:
                    self.flush(source)
                    moved = True
            for (source, destination), data in self.flight.items():
                if data and destination in self.engines:
                    self.read(source, destination, piece)
                    moved = True

    def shuffle(self, rng, largest):
        """The same in a random order: writes and reads of 1 to ``largest`` bytes."""
        while True:
            moves = [(self.write, source, peer) for source in self.engines for peer in self.due[source]]
            moves += [
                (self.read, *pair) for pair, data in self.flight.items() if data and pair[1] in self.engines
            ]
            paused = [rank for rank, engine in self.engines.items() if engine.paused]
            if paused and (not moves or rng.random() < 0.3):
                self.resume(rng.choice(paused))
                continue
            if not moves:
                return
            move, source, destination = rng.choice(moves)
            move(source, destination, rng.randint(1, largest))

    def sent(self, source, destination=None):
        """All frames that ``source`` has written, in order."""
        mine = [data for a, b, data in self.log if a == source and destination in (None, b)]
        return frames(b"".join(mine))

    # -- what is left -------------------------------------------------------------------------------------

    def box(self, source, destination):
        return self.engines[source]._outboxes[destination]

    def results(self, rank):
        """Results and errors in the order in which operations ended."""
        return [op.result if op.error is None else op.error for op in self.ended[rank]]

    def assert_idle(self):
        """Nothing is under way, queued or kept, and all credit is where it belongs."""
        for rank, engine in self.engines.items():
            assert not engine.pending()
            group = engine.group()
            assert not group.early
            assert not any(group.early_bytes.values())
            assert not group.withdrawn
            assert not any(keys.outstanding for keys in engine.keys._matching.values())
            for peer in range(self.size):
                if peer == rank:
                    continue
                box = self.box(rank, peer)
                assert not box.control
                assert not box.streams
                assert not box.current
                assert box.lent is None
                if peer in self.engines:
                    assert box.credit + self.box(peer, rank).owed == 256 * KIB


# -- what tests say often --------------------------------------------------------------------------------------

OTHER = Fingerprint("other")
"""A call that does not fit `CALL`."""


def recv(peer, memory):
    return RecvBytes(peer, memoryview(memory))


def send(peer, data):
    return SendBytes(peer, memoryview(data))


def start_record(seq=0, *, call=CALL, round_=0, size=2, heard=0b10, remaining=wire.NO_DEADLINE):
    """A START frame as rank 1 would send it."""
    strict, value, tag = digests(call)
    return wire.start_frame(round_, 0, seq, tag, (strict, value, remaining, heard), size)


def data(seq, payload, *, flags=wire.EAGER, tag=TAG):
    return frame(wire.DATA, seq, payload, flags=flags, tag=tag)


def abort(seq, **body):
    return wire.abort_frame(0, seq, body)


def kinds(found):
    return [f.kind for f in found]


def alone(size=2):
    """Rank 0, whose peers are made up."""
    return Wires(size, [0])
