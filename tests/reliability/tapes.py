"""Recorded streams of a mesh, and a rank that reads from a tape. Knows what ranks call and how frames are cut; damages nothing.

`SCENARIOS` are short programs of a rank; `record` runs one with honest ranks and keeps every frame that one of them is sent, in
the order in which it came. `Tape` is the driver of a rank whose peers are such a recording.
"""

import asyncio
import contextlib
import pickle
from typing import NamedTuple
from unittest import mock

import numpy as np

from asynccoll.communicator import Communicator, Options
from asynccoll.engine.engine import Engine
from asynccoll.engine.wire import HEADER, HEADER_SIZE
from asynccoll.pump import Pump

SIZE = 4
"""Ranks of a recorded world."""
KIB = 1 << 10


class Tape(Pump):
    """A driver whose links are whatever is fed to it. What it writes goes to ``sink(peer, bytes)``."""

    def __init__(self, engine, loop, sink=None):
        super().__init__(engine, loop)
        self.sink = sink
        self.dropped = set()
        """Peers that the engine has given up."""

    def write(self, peer):
        engine = self.engine
        while parts := engine.data_to_send(peer):
            if self.sink is not None:
                self.sink(peer, b"".join(parts))
            engine.sent(peer, sum(map(len, parts)))

    def drop(self, peer):
        self.dropped.add(peer)

    def feed(self, peer, data):
        """Let the rank read ``data``, unless it gives the peer up meanwhile."""
        engine, at, end = self.engine, 0, len(data)
        now = self.loop.time()
        while at < end and peer not in self.dropped:
            memory = engine.receive_into(peer)
            count = min(len(memory), end - at)
            memory[:count] = data[at : at + count]
            going = engine.received(peer, count, now)
            if engine.dirty or engine.events or engine.paused or engine.next_deadline is not None:
                self.flush()
            if not going:
                return
            at += count

    def lose(self, peer, reason):
        """The link to ``peer`` ends."""
        if peer not in self.dropped:
            self.dropped.add(peer)
            self.engine.peer_lost(peer, reason, self.loop.time())
            self.flush()

    async def close(self, cause):
        if not self.closed:
            self.closed = True
            self.engine.close(cause, self.loop.time())
            self.flush()
            self.stop_timer()


def joined(left, right):
    """A reduce function that takes whatever comes."""
    return f"{left}{right}"


def floats(comm, count):
    return np.arange(float(count)) + comm.rank


def _small(comm):
    yield comm.barrier()
    yield comm.allreduce(floats(comm, 4))
    yield comm.allreduce_(floats(comm, 40), "max")
    yield comm.scan(floats(comm, 3))
    yield comm.exscan(floats(comm, 3))
    yield comm.reduce(floats(comm, 5), root=0)
    yield comm.reduce_scatter(floats(comm, 9))
    yield comm.allreduce_tree({"a": floats(comm, 2), "b": 1})


def _moving(comm):
    yield comm.broadcast(floats(comm, 6) if comm.rank == 1 else None, root=1)
    yield comm.allgather(floats(comm, comm.rank + 1))
    yield comm.gather(floats(comm, 7), root=0)
    yield comm.scatter([floats(comm, to) for to in range(SIZE)] if comm.rank == 2 else None, root=2)
    yield comm.alltoall([floats(comm, to + 1) for to in range(SIZE)])


def _objects(comm):
    yield comm.allreduce(f"{comm.rank}.", joined)
    yield comm.broadcast({"from": comm.rank} if comm.rank == 1 else None, root=1)
    yield comm.allgather([comm.rank, "x" * 40])
    yield comm.gather(comm.rank, root=0)
    yield comm.alltoall([[comm.rank, to] for to in range(SIZE)])
    yield comm.scan("a", joined)


def _bulk(comm):
    yield comm.allreduce(floats(comm, 5_000), algorithm="ring")
    yield comm.allgather(floats(comm, 2_000 + comm.rank))
    for root in (3, 0, 1):
        yield comm.broadcast(floats(comm, 12_000) if comm.rank == root else None, root=root)


def _keyed(comm):
    for key in ("a", "b") if comm.rank % 2 else ("b", "a"):
        yield comm.allreduce(floats(comm, 4), key=key)
    yield comm.barrier(key="c")
    if comm.rank != 2:
        yield comm.barrier(key="never by rank 2")


def _messages(comm):
    if comm.rank:
        yield comm.send(floats(comm, 4), 0, tag=comm.rank)
        yield comm.send(["text", comm.rank], 0)
        yield comm.send(floats(comm, 9_000), 0, tag=7)
        yield comm.recv(0)
    else:
        for _ in range(7):
            yield comm.recv()
        for peer in range(1, SIZE):
            yield comm.send(floats(comm, 20), peer)


def _groups(comm):
    for ranks in ((0, 1, 2), (3, 0), (2, 1, 0, 3)):
        group = comm.new_group(ranks)
        if group is not None:
            yield group.allreduce(floats(comm, 4))
            yield group.barrier()
    yield comm.barrier()


def _troubled(comm):
    """One call of each way to fail, between two that succeed."""
    yield comm.barrier()
    work = comm.allreduce(floats(comm, 4))
    if comm.rank == 1:
        work.cancel()
    yield work
    yield comm.allreduce(floats(comm, 4 + (comm.rank == 2)))  # a mismatch
    yield comm.allreduce(floats(comm, 4), "avg" if comm.rank != 3 else "nonsense")  # refused on rank 3
    yield comm.broadcast(_Unpicklable() if comm.rank == 1 else None, root=1)
    yield comm.barrier()


def _lost(comm):
    """Rank 3 dies in the midst of it."""
    yield comm.barrier()
    if comm.rank != 3:
        yield comm.allreduce(floats(comm, 4))
        yield comm.recv(3)
        yield comm.barrier(key="k")
        yield comm.new_group((0, 1, 2)).allreduce(floats(comm, 3))


DIES = {_lost: 3}
"""Program -> the rank that dies when all that it can do is done."""


class _Unpicklable:
    def __reduce__(self):
        raise ValueError("it does not pickle")


SCENARIOS = (_small, _moving, _objects, _bulk, _keyed, _messages, _groups, _troubled, _lost)
SAFE = tuple(program for program in SCENARIOS if program not in (_troubled, _lost))
"""Those that mean the same with ``safe=True`` on every rank."""


class Recording(NamedTuple):
    """What ``rank`` is sent by honest peers while it runs a scenario."""

    rank: int
    program: object
    safe: bool
    frames: tuple
    """(peer, bytes of one frame), in the order in which they came."""


def cut(data):
    """The whole frames at the beginning of ``data``, as bytes, and what is left."""
    found, at = [], 0
    while at + HEADER_SIZE <= len(data):
        end = at + HEADER_SIZE + HEADER.unpack_from(data, at)[-1]
        if end > len(data):
            break
        found.append(bytes(data[at:end]))
        at = end
    return found, data[at:]


async def record(victim, program, safe):
    """Run ``program`` on `SIZE` honest ranks joined by hand, in a loop of virtual time."""
    loop = asyncio.get_running_loop()
    flight = {(a, b): bytearray() for a in range(SIZE) for b in range(SIZE)}
    tapes = []
    for rank in range(SIZE):

        def sink(peer, data, rank=rank):
            flight[rank, peer] += data

        tapes.append(Tape(Engine(rank, SIZE), loop, sink))
    comms = [Communicator(tape, options=Options(None, safe=safe)) for tape in tapes]
    kept, rest = [], dict.fromkeys(range(SIZE), b"")

    def move():
        moved = False
        for (source, destination), data in flight.items():
            if data:
                taken, moved = bytes(data), True
                data.clear()
                if destination == victim:
                    whole, rest[source] = cut(rest[source] + taken)
                    kept.extend((source, frame) for frame in whole)
                tapes[destination].feed(source, taken)
        return moved

    works = [list(program(comm)) for comm in comms]
    while move():
        await asyncio.sleep(0)
    dead = DIES.get(program)
    if dead is not None:
        for tape in tapes:
            if tape is not tapes[dead]:
                tape.lose(dead, "it died")
        tapes[dead].sink = None
    await asyncio.sleep(1.0)  # the timers of an inquest run out
    while move():
        await asyncio.sleep(0)
    for rank in range(SIZE - 1, -1, -1):
        if rank != dead:
            await comms[rank].close()
            move()
    for work in (work for row in works for work in row):
        if work.done() and not work.cancelled():
            work.exception()
    return Recording(victim, program, safe, tuple(kept))


async def record_all():
    """A recording of every scenario for rank 0, who grants keys and hubs trees, and for rank 1; with pickles and without."""
    return [
        await record(victim, program, safe)
        for victim in (0, 1)
        for safe, programs in ((False, SCENARIOS), (True, SAFE))
        for program in programs
    ]


class Refusal(pickle.UnpicklingError):
    """Bytes that no honest rank has sent were not unpickled."""


@contextlib.contextmanager
def pickles_watched():
    """Count the calls of ``pickle.loads``; once ``known`` is sealed, load only what was loaded before.

    An authenticated peer may send any pickle and it is loaded: what a damaged one does says nothing about the package, and may
    do anything to this process.
    """
    watch = Watch()
    with (
        mock.patch.object(pickle, "loads", watch.loads),
        mock.patch.object(pickle, "load", watch.refuse),
        mock.patch.object(pickle, "Unpickler", watch.refuse),
    ):
        yield watch


class Watch:
    """See `pickles_watched`."""

    def __init__(self):
        self.calls = 0
        self.sealed = False
        self._loads = pickle.loads
        self._known = set()

    def loads(self, data, **options):
        self.calls += 1
        key = bytes(data)
        if not self.sealed:
            self._known.add(key)
        elif key not in self._known:
            raise Refusal("not a recorded pickle")
        return self._loads(data, **options)

    def refuse(self, *args, **options):
        self.calls += 1
        raise Refusal("nothing of the package unpickles in this way")
