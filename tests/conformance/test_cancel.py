"""Cancelling one await: the operation ends on every rank, memory is given back at once, and the mesh stays in step."""

import asyncio
import collections
import random

import numpy as np
import pytest
from faults import early_bytes, in_step, in_virtual_time, settle, turns
from ranks import on_all, outcomes

from asynccoll import CollectiveCancelled
from asynccoll.sim.driver import Conditions

PATTERN = 0xA5

WORLDS = (2, 3)
ROUNDS = 50
"""Cancels per world size and payload size."""
PAYLOADS = {
    # Pieces smaller than a header, so that cancels fall inside headers too.
    8: Conditions(delay=0.002, piece=16, split=True, buffer=1 << 12),
    1 << 16: Conditions(delay=0.002, piece=1 << 12, split=True, buffer=1 << 15),
    1 << 22: Conditions(delay=0.002, piece=1 << 18, split=True, buffer=1 << 19),
}
VERBS = (
    "allreduce_ ring",
    "allreduce_ tree",
    "allreduce_ doubling",
    "allreduce out",
    "broadcast out",
    "allgather out",
    "allreduce_tree",
    "objects",
)


class Case:
    """One operation on all ranks, in memory that the test can take back, with its right result."""

    def __init__(self, verb, nbytes, size, root):
        self.verb, self.size, self.root = verb, size, root
        self.base = np.arange(nbytes // 4, dtype=np.float32) % 1000
        """Integers, so that sums are exact in any order."""
        self.memory = [
            [bytearray(self.base.nbytes) for _ in range(size if verb == "allgather out" else 1)]
            for _ in range(size)
        ]

    def arrays(self, rank):
        return [np.frombuffer(memory, np.float32) for memory in self.memory[rank]]

    def start(self, comm):
        """Start it. Nothing but the operation refers to the memory afterwards."""
        verb, algorithm = (self.verb.split() + ["auto"])[:2]
        own = self.base + comm.rank
        first = self.arrays(comm.rank)
        if verb == "allreduce_":
            first[0][:] = own
            return comm.allreduce_(first[0], algorithm=algorithm)
        if self.verb == "allreduce out":
            return comm.allreduce(own, out=first[0])
        if self.verb == "broadcast out":
            return comm.broadcast(own if comm.rank == self.root else None, self.root, out=first[0])
        if self.verb == "allgather out":
            return comm.allgather(own, out=first)
        if self.verb == "allreduce_tree":
            return comm.allreduce_tree({"w": own, "n": comm.rank})
        return comm.allreduce([own.tobytes()])

    def check(self, result):
        total = self.base * self.size + self.size * (self.size - 1) / 2
        if self.verb == "broadcast out":
            np.testing.assert_array_equal(result, self.base + self.root)
        elif self.verb == "allgather out":
            for rank, part in enumerate(result):
                np.testing.assert_array_equal(part, self.base + rank)
        elif self.verb == "allreduce_tree":
            np.testing.assert_array_equal(result["w"], total)
            assert result["n"] == self.size * (self.size - 1) // 2
        elif self.verb == "objects":
            assert result == [(self.base + rank).tobytes() for rank in range(self.size)]
        else:
            np.testing.assert_array_equal(result, total)

    def take_back(self, rank):
        """Nothing refers to this rank's memory any more (resizing it would raise BufferError); fill it with the pattern."""
        for memory in self.memory[rank]:
            memory.append(0)
            del memory[-1]
            memory[:] = bytes([PATTERN]) * len(memory)

    def untouched(self, rank):
        return all(memory.count(PATTERN) == len(memory) for memory in self.memory[rank])


async def pause(moment):
    """Wait for a moment: virtual seconds in the simulation, turns of the loop over TCP."""
    if in_virtual_time():
        await asyncio.sleep(moment)
    else:
        await turns(round(moment))


async def length_of(case, comms):
    """How long the operation takes, in the unit of `pause`."""
    loop = asyncio.get_running_loop()
    started, count = loop.time(), 0
    results = asyncio.gather(*(case.start(comm) for comm in comms))
    if in_virtual_time():
        await results
        return loop.time() - started
    while not results.done():
        await asyncio.sleep(0)
        count += 1
    return count


def stage(comm):
    """How far the operation is on this rank."""
    engine = comm._pump.engine
    ops = engine.pending()
    if not ops:
        return "complete"
    if any(inbound._landing is not None for inbound in engine._inbounds.values()):
        return "in payload"
    if any(inbound.start != inbound.end for inbound in engine._inbounds.values()):
        return "in header"
    if not any(stream.consumed or stream.filled for stream in ops[0].inputs.values()):
        return "before data"
    return "between frames"


async def attempt(case, comms, rng, length):
    """Cancel the operation on one rank at a seeded moment, and see what becomes of it everywhere. The stage it was at."""
    origin = rng.randrange(case.size)
    late = rng.choice([None, *range(case.size)])  # this rank calls a little later than the others
    lag = rng.uniform(0, length / 2)

    async def peer(comm):
        if comm.rank == late:
            await pause(lag)
        return await case.start(comm)

    others = {comm.rank: asyncio.create_task(peer(comm)) for comm in comms if comm.rank != origin}
    if origin == late:
        await pause(lag)
    work = case.start(comms[origin])
    awaiter = None
    reached = "at once"
    if rng.random() < 0.9:
        if rng.random() < 0.5:
            awaiter = asyncio.create_task(work.wait())
            await asyncio.sleep(0)  # a task that has not begun to wait would not pass a cancel on
        await pause(rng.uniform(0, 1.1) * length)
        reached = stage(comms[origin])
    complete = work.done()
    (awaiter or work).cancel()
    if complete:
        case.check(work.result())
    else:
        assert work.cancelled()
        case.take_back(origin)
        with pytest.raises(asyncio.CancelledError):
            await (awaiter or work)
    del work, awaiter

    for rank, task in others.items():
        try:
            case.check(await task)
        except CollectiveCancelled as error:
            assert not complete
            assert (error.origin, error.rank) == (origin, rank)
            case.take_back(rank)
        else:
            del task
            others[rank] = None  # it was complete before the cancel came: its memory holds the result

    await in_step(comms)
    assert complete or case.untouched(origin)
    for rank, task in others.items():
        assert task is None or case.untouched(rank)
    return reached


def test_there_are_as_many_cancels_as_it_is_said():
    assert len(WORLDS) * len(PAYLOADS) * ROUNDS == 300


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("nbytes", PAYLOADS)
async def test_a_cancel_at_any_moment_ends_the_operation_everywhere(world, size, nbytes):
    rng = random.Random(1000 * size + nbytes)
    reached = collections.Counter()
    async with world(size, conditions=PAYLOADS[nbytes]) as comms:
        length = {}
        for number in range(ROUNDS):
            case = Case(VERBS[number % len(VERBS)], nbytes, size, root=number % size)
            if case.verb not in length:
                length[case.verb] = await length_of(case, comms)
            reached[await attempt(case, comms, rng, length[case.verb])] += 1
        await settle()
        assert [comm.pending() for comm in comms] == [[]] * size
        assert [early_bytes(comm) for comm in comms] == [0] * size
    if in_virtual_time():  # elsewhere it depends on the kernel's timing
        assert reached["at once"] >= 1
        assert reached["before data"] >= 5
        assert reached["complete"] >= 1
        assert reached["in header" if nbytes == 8 else "in payload"] >= 5
