"""A rank dies: every pending operation of the others fails with `PeerLost` that names it, and nothing hangs or floods."""

import asyncio
import gc
import itertools
import logging
import random
import re

import numpy as np
import pytest
import verbs
from faults import crash, done_at_once, in_virtual_time, loop_complaints, settle, turns
from ranks import on_all, ordinary, outcomes, sizes, sum_of_ranks

from asynccoll import CommunicatorClosed, PeerLost
from asynccoll.sim.driver import Conditions

SMALL, LARGE = 9, ordinary(100_000, 3_000)
"""Elements of float64 that take one frame, and several segments."""
CALLS = {
    f"{verb}{f' by {algorithm}' if algorithm else ''} of {count}": (verb, algorithm, count)
    for count in (SMALL, LARGE)
    for verb, algorithm in verbs.CALLS
    if verb != "barrier" or count == SMALL
}
LONG = [label for label, (verb, _, count) in CALLS.items() if count == LARGE or verb == "barrier"]


def start(comm, call):
    verb, algorithm, count = CALLS[call]
    return verbs.start(comm, verb, count, algorithm=algorithm)


def assert_lost(error, dead, rank):
    assert type(error) is PeerLost, error
    assert (error.peer, error.peers) == (dead, {dead})
    assert error.rank == rank
    assert error.group == "world"
    # What this rank saw, or what another one saw and told: "..., says rank 2".
    assert re.match(
        r"connection (closed without goodbye|broken: (Connection reset|Broken pipe))", error.reason
    )
    assert f"lost rank {dead} (" in str(error)


def survivors_of(comms, *dead):
    return [comm for comm in comms if comm.rank not in dead]


@pytest.mark.parametrize("reset", [False, True], ids=["end of stream", "reset"])
@pytest.mark.parametrize("size", [2, 3, 4])
async def test_every_pending_operation_names_the_rank_that_did_not_come(world, size, reset):
    for dead in ordinary(range(size), (0, size * 2 // 3)):
        async with world(size) as comms:
            survivors = survivors_of(comms, dead)
            works = [(comm, start(comm, call)) for comm in survivors for call in CALLS]
            await turns(3)
            crash(comms[dead], reset=reset)
            results = await asyncio.gather(*(work for _, work in works), return_exceptions=True)
            for (comm, _), error in zip(works, results, strict=True):
                assert_lost(error, dead, comm.rank)
            assert [comm.pending() for comm in survivors] == [[]] * (size - 1)


@pytest.mark.parametrize("call", LONG)
async def test_a_death_at_any_moment_of_an_operation(world, call):
    rng = random.Random(call)
    verb, _, count = CALLS[call]
    for number in range(ordinary(12, 4) if in_virtual_time() else 6):
        async with world(2 + number % 3, timeout=5.0) as comms:
            size = len(comms)
            dead = rng.randrange(size)
            works = [start(comm, call) for comm in comms]
            if in_virtual_time():
                await asyncio.sleep(rng.choice([0.001, 0.01, 0.1, 0.5]) * rng.random())
            else:
                await turns(rng.randrange(12))
            before = [work.done() for work in works]
            crash(comms[dead])
            survivors = survivors_of(comms, dead)
            results = await asyncio.gather(*(works[comm.rank] for comm in survivors), return_exceptions=True)
            for comm, result in zip(survivors, results, strict=True):
                if isinstance(result, BaseException):
                    assert_lost(result, dead, comm.rank)
                    assert not before[comm.rank]
                else:
                    assert verbs.right(comm, verb, count, result)
            assert [comm.pending() for comm in survivors] == [[]] * (size - 1)


@pytest.mark.fixed_size("what the kernel does with one connection")
async def test_a_reset_behind_unread_data_is_noticed(world):
    # The dead rank leaves bytes unread, so its kernel resets the connection: the survivor sees an error condition on the
    # socket while there is still data to read in front of it, and is woken only once for both by some loops.
    async with world(2, timeout=5.0) as comms:
        for _ in range(100):
            comms[0].allreduce(np.ones(9))  # bytes that rank 1 never reads
        work = comms[0].broadcast(root=1)
        crash(comms[1]) if in_virtual_time() else leave_unread(comms[1])
        with pytest.raises(PeerLost) as caught:
            await work
        assert_lost(caught.value, 1, 0)


def leave_unread(comm):
    """Send some bytes of an operation, and die without having read anything."""
    comm.allreduce(np.ones(9))
    comm.allreduce(np.ones(9))
    crash(comm)


async def test_survivors_hear_of_it_within_a_round_trip(world):
    if not in_virtual_time():
        pytest.skip("asserts elapsed time")
    async with world(4) as comms:
        works = [comm.barrier() for comm in comms[:-1]]
        await asyncio.sleep(1.0)
        died = asyncio.get_running_loop().time()
        crash(comms[-1])
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert_lost(error, len(comms) - 1, error.rank)
            assert 1.0 < error.elapsed < 1.0 + 0.01
        assert asyncio.get_running_loop().time() - died < 0.01


async def test_every_later_operation_fails_at_once(world):
    async with world(3) as comms:
        crash(comms[1])
        await settle()
        for call, comm in itertools.product(CALLS, survivors_of(comms, 1)):
            work = start(comm, call)
            assert await done_at_once(work)
            assert_lost(work.exception(), 1, comm.rank)


async def test_a_call_with_a_bad_argument_after_a_loss_ends_too(world):
    async with world(2) as comms:
        crash(comms[1])
        await settle()
        work = comms[0].allreduce(np.ones(9), op="no such op")
        assert await done_at_once(work)
        assert isinstance(work.exception(), ValueError | PeerLost)
        assert comms[0].pending() == []


async def test_closing_after_a_loss_is_quick(world):
    async with world(4) as comms:
        loop = asyncio.get_running_loop()
        works = [comm.allreduce(np.ones(300_000)) for comm in comms]
        await turns(2)
        crash(comms[2])
        survivors = survivors_of(comms, 2)
        await asyncio.gather(*(works[comm.rank] for comm in survivors), return_exceptions=True)
        started = loop.time()
        await asyncio.gather(*(comm.close() for comm in survivors))
        if in_virtual_time():
            assert loop.time() - started < 0.5


async def test_of_two_deaths_only_the_dead_are_named(world):
    (size,) = sizes(4)
    for dead in ordinary(itertools.combinations(range(4), 2), [(0, 1), (size // 2, size - 1)]):
        async with world(size) as comms:
            survivors = survivors_of(comms, *dead)
            works = [comm.allreduce(np.ones(300_000)) for comm in survivors]
            await turns(2)
            for rank in dead:
                crash(comms[rank])
            for error in await asyncio.gather(*works, return_exceptions=True):
                assert type(error) is PeerLost
                assert error.peers
                assert error.peers <= set(dead)
            await settle()
            later = await outcomes(survivors, lambda comm: comm.barrier())
            assert [error.peers for error in later] == [set(dead)] * len(survivors)


async def test_a_survivor_that_leaves_because_of_a_loss_is_not_blamed(world):
    for seed in range(ordinary(40, 6) if in_virtual_time() else 10):
        async with world(4, **({"seed": seed} if in_virtual_time() else {})) as comms:
            dead = seed % 4 * len(comms) // 4
            works = {}

            async def work_until_it_fails(comm, works=works):
                async with comm:  # leaves at once when an operation fails
                    # Some ranks are operations ahead of others.
                    works[comm.rank] = [comm.allreduce(np.ones(1000)) for _ in range(1 + comm.rank % 4)]
                    await asyncio.gather(*works[comm.rank])

            survivors = survivors_of(comms, dead)
            tasks = [asyncio.create_task(work_until_it_fails(comm)) for comm in survivors]
            await asyncio.sleep(0.01)
            crash(comms[dead])
            await asyncio.gather(*tasks, return_exceptions=True)
            for comm in survivors:
                for work in works[comm.rank]:
                    assert_lost(work.exception(), dead, comm.rank)


async def test_a_death_after_a_goodbye_is_no_loss(world):
    async with world(3) as comms:
        work = comms[0].barrier()
        closing = asyncio.create_task(comms[1].close())
        await settle()
        crash(comms[1])
        with pytest.raises(CommunicatorClosed) as caught:
            await work
        assert caught.value.origin == 1
        await closing


async def test_an_operation_that_was_complete_keeps_its_result(world):
    async with world(3) as comms:
        works = [comm.allreduce(comm.rank) for comm in comms]
        right = [sum_of_ranks(comms)] * len(comms)
        assert await asyncio.gather(*works) == right
        crash(comms[2])
        await settle()
        assert [work.result() for work in works] == right


@pytest.mark.inline_only(
    "a mesh in a thread of its own goes on, and is done, while the test waits or makes its next call"
)
async def test_memory_is_not_touched_after_a_loss(world):
    async with world(3) as comms:
        arrays = [np.ones(1_000_000, np.float32) for _ in comms]

        async def one(comm):
            with pytest.raises(PeerLost):
                await comm.allreduce_(arrays[comm.rank])
            arrays[comm.rank].view("uint8")[:] = 0xA5

        tasks = [asyncio.create_task(one(comm)) for comm in comms[:-1]]
        comms[-1].allreduce_(arrays[-1])
        await (asyncio.sleep(0.05) if in_virtual_time() else turns(3))
        crash(comms[-1])
        await asyncio.gather(*tasks)
        await settle()
        for array in arrays[:-1]:
            assert (array.view("uint8") == 0xA5).all()


async def test_a_loss_with_a_hundred_operations_that_nobody_awaits_does_not_flood_the_log(world, caplog):
    with loop_complaints() as complaints, caplog.at_level(logging.DEBUG):
        async with world(3) as comms:
            survivors = comms[:-1]
            for _ in range(100):
                for comm in survivors:
                    comm.allreduce(np.ones(9))
            await settle()
            crash(comms[-1])
            await settle()
            assert [comm.pending() for comm in survivors] == [[]] * len(survivors)
            gc.collect()
            await turns(2)
    assert complaints == []
    lines = [record for record in caplog.records if record.name.startswith("asynccoll")]
    assert len(lines) <= len(survivors)  # one cause, and all survivors are in this process


async def test_a_loss_that_nobody_awaits_is_told_once(world, caplog):
    with caplog.at_level(logging.DEBUG):
        async with world(2) as comms:
            for _ in range(100):
                comms[0].allreduce(np.ones(9))
            await settle()
            crash(comms[1])
            await settle()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("asynccoll")]
    assert len(lines) == 1
    assert re.search(r"\brank 1\b", lines[0])


async def test_a_failure_that_nobody_awaits_is_told_by_the_loop(world):
    with loop_complaints() as complaints:
        async with world(2) as comms:
            await outcomes(comms[:1], lambda comm: comm.allreduce(1, timeout=0.05))  # awaited: silent
            comms[1].allreduce(1)
            await settle()
            gc.collect()
            await turns(2)
            assert len(complaints) == 1
            complaints.clear()
            comms[0].allreduce(1, "no such op")
            await outcomes(comms[1:], lambda comm: comm.allreduce(1))
            gc.collect()
            await turns(2)
            assert len(complaints) == 1


async def test_works_that_are_not_kept_still_finish(world):
    async with world(2) as comms:
        results = []
        count = ordinary(300, 60)
        for number in range(count):
            comms[0].allreduce(np.full(9, number)).add_done_callback(
                lambda work: results.append(work.result()[0])
            )
            if number % 50 == 0:
                gc.collect()
        size = len(comms)
        for number in range(count):
            for total in await on_all(comms[1:], lambda comm, n=number: comm.allreduce(np.full(9, n))):
                assert total[0] == size * number
        await settle()
        assert results == [size * number for number in range(count)]


async def test_a_broken_peer_is_cut_off_and_named(world):
    # A peer that sends what is not the wire format is as good as dead, but says why.
    async with world(3, conditions=Conditions(delay=0.002)) as comms:
        works = [comm.barrier() for comm in comms[:2]]
        comms[2]._pump.engine._outboxes[0].control.append(b"\xff" * 24)
        comms[2]._pump.write(0)
        with pytest.raises(PeerLost) as caught:
            await works[0]
        assert caught.value.peer == 2
        assert "unknown kind 255" in caught.value.reason
        crash(comms[2])
        with pytest.raises(PeerLost):
            await works[1]
