"""Cancelling one await: the operation ends on every rank, memory is given back at once, and the mesh stays in step."""

import asyncio
import collections
import gc
import random

import numpy as np
import pytest
from faults import done_at_once, early_bytes, in_step, in_virtual_time, settle, turns
from ranks import on_all, ordinary, outcomes, sum_of_ranks

from asynccoll import CollectiveCancelled
from asynccoll.bridged import Bridged
from asynccoll.sim.driver import Conditions

PATTERN = 0xA5

WORLDS = (2, 3)
ROUNDS = 84
"""Cancels per world size and payload size."""
PAYLOADS = {
    # Pieces smaller than a header, so that cancels fall inside headers too.
    8: Conditions(delay=0.002, piece=16, split=True, buffer=1 << 12),
    1 << 16: Conditions(delay=0.002, piece=1 << 12, split=True, buffer=1 << 15),
    ordinary(1 << 22, 1 << 17): Conditions(delay=0.002, piece=1 << 18, split=True, buffer=1 << 19),
}
VERBS = (
    "allreduce_ ring",
    "allreduce_ tree",
    "allreduce_ doubling",
    "allreduce out",
    "broadcast out",
    "allgather out",
    "gather out",
    "scatter out",
    "alltoall out",
    "reduce ring",
    "reduce tree",
    "reduce_scatter ring",
    "reduce_scatter tree",
    "scan chain",
    "scan doubling",
    "exscan chain",
    "exscan doubling",
    "allreduce_tree",
    "objects",
)


class Case:
    """One operation on all ranks, in memory that the test can take back, with its right result."""

    def __init__(self, verb, nbytes, size, root):
        self.verb, self.size, self.root = verb, size, root
        self.base = np.arange(nbytes // 4, dtype=np.float32) % 1000
        """Integers, so that sums are exact in any order."""
        self.memory = [[bytearray(self.length(rank)) for _ in range(self.outs(rank))] for rank in range(size)]

    def length(self, rank):
        """Bytes of an array that ``rank`` lends."""
        if self.verb.startswith("reduce_scatter"):
            return np.array_split(self.base, self.size)[rank].nbytes
        return self.base.nbytes

    def outs(self, rank):
        """How many arrays ``rank`` lends."""
        if self.verb.startswith("reduce "):
            return int(rank == self.root)
        if self.verb == "gather out":
            return self.size if rank == self.root else 0
        return self.size if self.verb in ("allgather out", "alltoall out") else 1

    def arrays(self, rank):
        return [np.frombuffer(memory, np.float32) for memory in self.memory[rank]]

    def start(self, comm):
        """Start it. Nothing but the operation refers to the memory afterwards."""
        verb, _, algorithm = self.verb.partition(" ")
        own = self.base + comm.rank
        first = self.arrays(comm.rank)
        if self.verb == "gather out":
            return comm.gather(own, self.root, out=first or None)
        if self.verb == "scatter out":
            values = [self.base + rank for rank in range(self.size)] if comm.rank == self.root else None
            return comm.scatter(values, self.root, out=first[0])
        if self.verb == "alltoall out":
            return comm.alltoall([own + 1000 * rank for rank in range(self.size)], out=first)
        if verb == "reduce":
            return comm.reduce(own, "sum", self.root, out=first[0] if first else None, algorithm=algorithm)
        if verb in ("reduce_scatter", "scan", "exscan"):
            return getattr(comm, verb)(own, out=first[0], algorithm=algorithm)
        if verb == "allreduce_":
            first[0][:] = own
            return comm.allreduce_(first[0], algorithm=algorithm or "auto")
        if self.verb == "allreduce out":
            return comm.allreduce(own, out=first[0])
        if self.verb == "broadcast out":
            return comm.broadcast(own if comm.rank == self.root else None, self.root, out=first[0])
        if self.verb == "allgather out":
            return comm.allgather(own, out=first)
        if self.verb == "allreduce_tree":
            return comm.allreduce_tree({"w": own, "n": comm.rank})
        return comm.allreduce([own.tobytes()])

    def check(self, result, rank):
        total = self.sum_of(self.size)
        verb = self.verb.partition(" ")[0]
        if (verb == "reduce" and rank != self.root) or (verb == "exscan" and rank == 0):
            assert result is None
        elif verb == "reduce_scatter":
            np.testing.assert_array_equal(result, np.array_split(total, self.size)[rank])
        elif verb in ("scan", "exscan"):
            np.testing.assert_array_equal(result, self.sum_of(rank + (verb == "scan")))
        elif self.verb == "broadcast out":
            np.testing.assert_array_equal(result, self.base + self.root)
        elif self.verb == "allgather out" or (self.verb == "gather out" and rank == self.root):
            for origin, part in enumerate(result):
                np.testing.assert_array_equal(part, self.base + origin)
        elif self.verb == "gather out":
            assert result is None
        elif self.verb == "scatter out":
            np.testing.assert_array_equal(result, self.base + rank)
        elif self.verb == "alltoall out":
            for origin, part in enumerate(result):
                np.testing.assert_array_equal(part, self.base + origin + 1000 * rank)
        elif self.verb == "allreduce_tree":
            np.testing.assert_array_equal(result["w"], total)
            assert result["n"] == self.size * (self.size - 1) // 2
        elif self.verb == "objects":
            assert result == [(self.base + rank).tobytes() for rank in range(self.size)]
        else:
            np.testing.assert_array_equal(result, total)

    def sum_of(self, ranks):
        """Of the values of so many ranks, the first ones."""
        return self.base * ranks + ranks * (ranks - 1) / 2

    def take_back(self, rank):
        """Fill this rank's memory with the pattern. True if nothing refers to it any more."""
        free = True
        for memory in self.memory[rank]:
            try:
                memory.append(0)  # refused while there is a view of it
            except BufferError:
                free = False
            else:
                del memory[-1]
            memory[:] = bytes([PATTERN]) * len(memory)
        return free

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
        await turns(1)
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


async def attempt(case, comms, rng, length, *, exclusive):
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
            await asyncio.sleep(0)  # a task that has not begun passes a cancel on at its first step only
        await pause(rng.uniform(0, 1.1) * length)
        reached = stage(comms[origin])
    before = work.done()
    free = True
    (awaiter or work).cancel()
    complete = not work.cancelled()
    assert complete == before or (
        complete and isinstance(comms[origin], Bridged)
    )  # whose thread goes on meanwhile
    if complete:
        case.check(work.result(), origin)
    else:
        assert work.cancelled()
        free = case.take_back(origin)
        with pytest.raises(asyncio.CancelledError):
            await (awaiter or work)
    del work, awaiter

    ends = await asyncio.gather(*others.values(), return_exceptions=True)
    for rank, result in zip(list(others), ends, strict=True):
        if isinstance(result, BaseException):
            assert not complete
            assert type(result) is CollectiveCancelled
            assert (result.origin, result.rank) == (origin, rank)
            free = case.take_back(rank) and free
        else:
            case.check(result, rank)
            del others[rank]  # it was complete before the cancel came: its memory holds the result
    del result, ends

    await in_step(comms)
    assert complete or case.untouched(origin)
    assert all(map(case.untouched, others))
    assert free or not exclusive
    return reached


def test_there_are_as_many_cancels_as_it_is_said():
    assert len(WORLDS) * len(PAYLOADS) * ROUNDS == 504


async def cancels(world, size, nbytes, count, *, exclusive):
    """``count`` attempts with all verbs in turn. How many were made at which stage."""
    rng = random.Random(1000 * size + nbytes)
    reached = collections.Counter()
    async with world(size, conditions=PAYLOADS[nbytes]) as comms:
        size, length = len(comms), {}
        for number in range(count):
            case = Case(VERBS[number % len(VERBS)], nbytes, size, root=number % size)
            if case.verb not in length:
                length[case.verb] = await length_of(Case(case.verb, nbytes, size, case.root), comms)
            reached[await attempt(case, comms, rng, length[case.verb], exclusive=exclusive)] += 1
        await settle()
        assert [comm.pending() for comm in comms] == [[]] * size
        assert [early_bytes(comm) for comm in comms] == [0] * size
    return reached


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("nbytes", PAYLOADS)
async def test_a_cancel_at_any_moment_ends_the_operation_everywhere(world, size, nbytes):
    reached = await cancels(world, size, nbytes, ordinary(ROUNDS, len(VERBS)), exclusive=False)
    if in_virtual_time() and sum(reached.values()) == ROUNDS:  # elsewhere it depends on the kernel's timing
        stages = {"at once", "before data", "in header" if nbytes == 8 else "in payload", "complete"}
        assert stages <= reached.keys()


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("nbytes", PAYLOADS)
async def test_nothing_refers_to_the_memory_once_a_cancel_has_returned(world, size, nbytes):
    gc.disable()  # what only the cycle collector finds is not given back
    try:
        await cancels(world, size, nbytes, ordinary(2, 1) * len(VERBS), exclusive=True)
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [2, 20_000, 500_000])
async def test_nothing_refers_to_the_memory_once_an_operation_is_complete(world, count):
    gc.disable()
    try:
        async with world(2) as comms:
            size = len(comms)
            for verb in ("allreduce_", *VERBS[VERBS.index("allreduce out") : -2]):
                # Of many ranks each has the results of all.
                share = size // 2 if verb in ("allgather out", "alltoall out") else 1
                case = Case(verb, 4 * (count // share), size, root=0)
                for rank, result in enumerate(await on_all(comms, case.start)):
                    case.check(result, rank)
                del result
                await turns(2)  # the loop itself holds the future whose callback it is running
                for rank in range(size):
                    assert case.take_back(rank)
                await in_step(comms)
                assert all(map(case.untouched, range(size)))
    finally:
        gc.enable()


async def test_cancel_after_completion_does_nothing(world):
    async with world(3) as comms:
        works = [comm.allreduce(comm.rank) for comm in comms]
        right = [sum_of_ranks(comms)] * len(comms)
        assert await asyncio.gather(*works) == right
        assert [work.cancel() for work in works] == [False] * len(comms)
        assert [work.result() for work in works] == right
        await in_step(comms)


async def test_the_second_cancel_says_that_there_is_nothing_to_cancel(world):
    async with world(2) as comms:
        work = comms[0].barrier()
        assert work.cancel()
        assert not work.cancel()
        await settle()
        for error in await outcomes(comms[1:], lambda comm: comm.barrier()):
            assert type(error) is CollectiveCancelled
        await in_step(comms)


async def test_a_rank_that_calls_after_the_cancel_fails_at_the_call(world):
    async with world(3) as comms:
        assert comms[1].allreduce(np.ones(300_000)).cancel()
        await settle()
        for comm in (comms[0], *comms[2:]):
            work = comm.allreduce(np.ones(300_000))
            assert await done_at_once(work)
            assert isinstance(work.exception(), CollectiveCancelled)
            assert work.exception().origin == 1
        await in_step(comms)


@pytest.mark.inline_only(
    "a mesh in a thread of its own goes on, and is done, while the test waits or makes its next call"
)
async def test_every_rank_may_cancel_at_once(world):
    async with world(3) as comms:
        for nbytes in (8, 1 << 20):
            case = Case("allreduce_", nbytes, len(comms), root=0)
            works = [case.start(comm) for comm in comms]
            assert all(work.cancel() for work in works)
            results = await asyncio.gather(*works, return_exceptions=True)
            assert [type(error) for error in results] == [asyncio.CancelledError] * len(comms)
            await in_step(comms)


@pytest.mark.inline_only(
    "a mesh in a thread of its own goes on, and is done, while the test waits or makes its next call"
)
async def test_one_of_two_that_cancel_is_named_to_the_third(world):
    async with world(3) as comms:
        works = [comm.barrier() for comm in comms[:2]]
        assert all(work.cancel() for work in works)
        await settle()
        for error in await outcomes(comms[2:], lambda comm: comm.barrier()):
            assert type(error) is CollectiveCancelled
            assert error.origin in (0, 1)
        await in_step(comms)


async def test_the_message_names_the_rank_that_cancelled(world):
    async with world(2) as comms:
        comms[1].barrier().cancel()
        await settle()
        with pytest.raises(CollectiveCancelled) as caught:
            await comms[0].barrier()
        text = str(caught.value)
        assert text.startswith("rank 0: barrier #0 on 'world' after 0.0")
        assert "cancelled by rank 1" in text
        assert "the next operation works" in text


@pytest.mark.inline_only(
    "a mesh in a thread of its own goes on, and is done, while the test waits or makes its next call"
)
async def test_operations_around_a_cancelled_one_complete(world):
    async with world(3) as comms:
        size = 600_000
        # A rank receives as much in every world, so that the cancel finds it half-way: far smaller, and it is over by then.
        gathered, last = size // len(comms), len(comms) - 1

        async def three(comm):
            before = comm.allreduce(np.full(size, comm.rank, np.float32))
            middle = comm.allgather(np.ones(gathered, np.float32))
            after = comm.broadcast(np.arange(size) if comm.rank == last else None, root=last)
            if comm.rank == 0:
                await pause(0.05 if in_virtual_time() else 3)
                assert middle.cancel()
            return await asyncio.gather(before, middle, after, return_exceptions=True)

        for rank, (before, middle, after) in enumerate(await on_all(comms, three)):
            np.testing.assert_array_equal(before, np.full(size, sum_of_ranks(comms), np.float32))
            assert type(middle) is (asyncio.CancelledError if rank == 0 else CollectiveCancelled)
            np.testing.assert_array_equal(after, np.arange(size))
        await in_step(comms)


async def test_cancelling_a_gather_cancels_all_its_operations(world):
    async with world(2) as comms:
        together = asyncio.gather(*(comms[0].allreduce(np.ones(100_000)) for _ in range(5)))
        assert together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together
        await settle()
        results = await asyncio.gather(
            *(comm.allreduce(np.ones(100_000)) for comm in comms[1:] for _ in range(5)),
            return_exceptions=True,
        )
        assert {(type(error), error.origin) for error in results} == {(CollectiveCancelled, 0)}
        await in_step(comms)


async def test_a_task_that_is_cancelled_before_its_first_step_cancels_everywhere(world):
    async with world(2) as comms:
        task = asyncio.create_task(comms[0].allreduce(np.ones(100_000)).wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle()
        for error in await outcomes(comms[1:], lambda comm: comm.allreduce(np.ones(100_000))):
            assert (type(error), error.origin) == (CollectiveCancelled, 0)
        await in_step(comms)


async def test_a_shielded_operation_goes_on(world):
    async with world(2) as comms:
        work = comms[0].allreduce(np.ones(100_000))
        shield = asyncio.shield(work)
        shield.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shield
        for total in await on_all(comms[1:], lambda comm: comm.allreduce(np.ones(100_000))):
            np.testing.assert_array_equal(total, await work)
        await in_step(comms)


async def test_a_failing_sibling_in_a_task_group_cancels_the_operation_everywhere(world):
    async with world(3) as comms:

        async def fail():
            await pause(0.001)
            raise LookupError

        async def grouped():
            async with asyncio.TaskGroup() as group:
                group.create_task(comms[1].allreduce(np.ones(1000)).wait())
                group.create_task(fail())

        with pytest.raises(ExceptionGroup) as caught:
            await grouped()
        assert [type(error) for error in caught.value.exceptions] == [LookupError]
        await settle()
        others = [comm for comm in comms if comm.rank != 1]
        results = await outcomes(others, lambda comm: comm.allreduce(np.ones(1000)))
        assert {(type(error), error.origin) for error in results} == {(CollectiveCancelled, 1)}
        await in_step(comms)


async def test_a_thousand_cancels_before_the_others_call(world):
    async with world(2) as comms:
        count = ordinary(1000, 50)
        for _ in range(count):
            assert comms[0].allreduce(np.ones(100)).cancel()
        await settle()
        assert early_bytes(comms[1]) <= 1 << 18
        results = await asyncio.gather(
            *(comm.allreduce(np.ones(100)) for comm in comms[1:] for _ in range(count)),
            return_exceptions=True,
        )
        assert {(type(error), error.origin) for error in results} == {(CollectiveCancelled, 0)}
        await in_step(comms)


async def test_the_receiver_of_a_broadcast_may_cancel(world):
    async with world(3) as comms:
        for root, origin in ((0, 1), (0, 2), (2, 0)):

            async def one(comm, root=root, origin=origin):
                work = comm.broadcast(np.ones(2_000_000) if comm.rank == root else None, root)
                if comm.rank == origin:
                    await pause(0.02 if in_virtual_time() else 2)
                    work.cancel()
                return await work

            for rank, result in enumerate(await outcomes(comms, one)):
                if rank == origin:
                    assert type(result) is asyncio.CancelledError
                else:
                    assert isinstance(result, CollectiveCancelled)
                    assert result.origin == origin
            await in_step(comms)
