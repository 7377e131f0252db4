"""Peers that read slowly or late cost a bounded amount of memory, and nothing stands still because everybody writes."""

import asyncio
import socket

import numpy as np
import pytest
from faults import (
    all_turn,
    done_at_once,
    early_bytes,
    held_bytes,
    in_step,
    in_virtual_time,
    not_reading,
    read_slowly,
    settle,
    tiny_world,
    turns,
)
from ranks import on_all, ordinary

from asynccoll.sim.driver import Conditions

MAX_PENDING = 1 << 15
"""Operations that one rank may have under way on a communicator: a promise of docs/verbs.md."""
EAGER_CREDIT = 1 << 18
"""Bytes per peer and direction for operations that the receiver has not started: a promise of docs/wire.md."""
SEGMENT = 1 << 20
WINDOW = 1 << 20
"""Bytes per peer that a started operation takes ahead of what it asks for: 4 segments."""
OVERHEAD = 1 << 17
"""Headers and control records of a thousand operations."""
SLOW = Conditions(delay=0.03, piece=1 << 14, buffer=1 << 16)
"""About a megabyte per second."""
FAST = Conditions(delay=0.002, piece=1 << 18, split=True, buffer=1 << 18)
TIGHT = Conditions(delay=0.0001, piece=1 << 13, split=True, buffer=1 << 12)
"""As little as a socket with buffers of 4 KiB holds."""


class Gauge:
    """Samples what the engines hold while something else runs."""

    def __init__(self, comms, measure=held_bytes):
        self.comms = comms
        self.measure = measure
        self.most = 0

    async def __aenter__(self):
        self.task = asyncio.create_task(self._watch())
        return self

    async def _watch(self):
        while True:
            self.most = max([self.most, *map(self.measure, self.comms)])
            await (asyncio.sleep(0.01) if in_virtual_time() else asyncio.sleep(0))

    async def __aexit__(self, *_):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def tight(world, size, timeout=30.0):
    """A world whose links hold about 4 KiB."""
    return world(size, conditions=TIGHT, timeout=timeout) if in_virtual_time() else tiny_world(size, timeout)


async def test_every_connection_sends_small_frames_at_once(world):
    async with world(4) as comms:
        if in_virtual_time():
            pytest.skip("has no sockets")
        options = [
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for comm in comms
            for sock in comm._pump._sockets.values()
        ]
        assert len(options) == len(comms) * (
            len(comms) - 1
        )  # both ends: the one that connected and the one that accepted
        assert all(options)


@pytest.mark.parametrize("window", [1, 8])
async def test_a_slow_reader_among_fast_ones_costs_a_bounded_buffer(world, window):
    async with world(3, timeout=600.0) as comms:
        size, count = 1 << 20, ordinary(20, 10) if in_virtual_time() else 100
        if in_virtual_time():
            read_slowly(comms[1], [comm.rank for comm in comms if comm.rank != 1], SLOW)

        async def one(comm):
            under_way = []
            for number in range(count):
                value = np.full(size // 4, number, np.float32) if comm.rank == 0 else None
                under_way.append(comm.broadcast(value))
                if len(under_way) == window:
                    assert (await under_way.pop(0))[-1] == number - window + 1
            for work in under_way:
                await work

        async with Gauge(comms) as gauge:
            if in_virtual_time():
                await on_all(comms, one)
            else:
                everyone = asyncio.gather(*map(one, comms))
                while not everyone.done():
                    with not_reading(comms[1]):  # reads in one turn of the loop out of ten
                        await turns(9)
                    await turns(2)  # one to be told that there is something, one to read it
                await everyone
        # What a rank has not asked for yet: a window per operation under way, and one of them is lent memory only.
        assert gauge.most < (window + 1) * (1 << 20) + EAGER_CREDIT + SEGMENT + OVERHEAD
        await in_step(comms)


async def test_bulk_for_a_rank_that_does_not_read_stays_in_the_senders_memory(world):
    async with world(3, conditions=FAST) as comms:
        count = ordinary(40, 10)
        works = [comms[0].broadcast(np.full(1 << 18, n, np.float32)) for n in range(count)]  # 1 MiB each
        works += [comm.broadcast() for comm in comms[2:] for _ in range(count)]
        async with Gauge(comms) as gauge:
            await (asyncio.sleep(2.0) if in_virtual_time() else turns(300))
        # Rank 1 has called nothing: eager bytes and records are all that may lie around on its account.
        assert held_bytes(comms[1]) <= 2 * EAGER_CREDIT + OVERHEAD
        assert gauge.most <= 2 * EAGER_CREDIT + 2 * SEGMENT + OVERHEAD + (1 << 20)
        works += [comms[1].broadcast() for _ in range(count)]
        for number, result in enumerate(await asyncio.gather(*works)):
            assert result[0] == number % count
        await in_step(comms)


@pytest.mark.fixed_size("three ranks of which one is late: the others' objects are 16 MiB each")
async def test_what_comes_before_it_is_asked_for_is_bounded_by_the_window(world):
    # Rank 0 folds rank 1's object before rank 2's, and rank 1 is late: rank 2's 16 MiB wait in rank 2's own memory.
    async with world(3, conditions=FAST) as comms:
        works = [comms[rank].allreduce([bytes(1 << 24)]) for rank in (0, 2)]
        await (asyncio.sleep(5.0) if in_virtual_time() else all_turn(300))
        assert WINDOW // 2 < held_bytes(comms[0]) <= WINDOW + SEGMENT + OVERHEAD
        assert held_bytes(comms[2]) <= SEGMENT + OVERHEAD
        works.append(comms[1].allreduce([b"late"]))
        for first, second, third in await asyncio.gather(*works):
            assert (len(first), second, len(third)) == (1 << 24, b"late", 1 << 24)
        await in_step(comms)


@pytest.mark.fixed_size("two ranks, and three, that run ahead by four times the credit")
@pytest.mark.parametrize("size", [2, 3])
async def test_a_thousand_small_operations_before_the_other_rank_calls_any(world, size):
    async with world(size) as comms:
        late = size - 2  # the middle one of three
        ahead = [comm for comm in comms if comm.rank != late]
        count, length = 1000, 256  # 1 KiB each, four times the credit

        def start(comm, number):
            return comm.allreduce(np.full(length, number + comm.rank, np.float32), algorithm="ring")

        async with Gauge(comms, early_bytes) as gauge:
            works = [[start(comm, number) for number in range(count)] for comm in ahead] + [[]]
            await (asyncio.sleep(2.0) if in_virtual_time() else turns(300))
            per_peer = comms[late]._pump.engine.group().early_bytes
            assert all(held <= EAGER_CREDIT for held in per_peer.values())
            assert early_bytes(comms[late]) == sum(per_peer.values()) > EAGER_CREDIT // 2
            for comm in ahead:
                assert held_bytes(comm) <= size * EAGER_CREDIT + OVERHEAD
            for number in range(count):
                works[-1].append(start(comms[late], number))
                if number % 100 == 0:
                    await turns(1)
        assert gauge.most <= (size - 1) * EAGER_CREDIT
        total = size * (size - 1) // 2
        for row in works:
            for number, work in enumerate(row):
                result = await work
                assert result[0] == result[-1] == size * number + total
        await in_step(comms)
        assert [early_bytes(comm) for comm in comms] == [0] * size


@pytest.mark.fixed_size("two ranks that take turns")
async def test_two_ranks_that_take_turns_at_running_ahead(world):
    async with world(2) as comms:
        for burst in range(20):
            leader, follower = comms[burst % 2], comms[1 - burst % 2]
            ahead = [
                leader.allreduce(np.full(2000, n, np.float32)) for n in range(60)
            ]  # 8 kB each, twice the credit
            await (asyncio.sleep(0.05) if in_virtual_time() else turns(5))
            behind = [follower.allreduce(np.full(2000, n, np.float32)) for n in range(60)]
            results = await asyncio.gather(*ahead, *behind)
            assert [result[0] for result in results] == [2 * n for n in range(60)] * 2
        await in_step(comms)


@pytest.mark.fixed_size("the credit of one pair of ranks")
async def test_credit_of_operations_that_failed_is_given_back(world):
    async with world(2) as comms:
        for _ in range(30):  # 30 x 32 KiB would use the credit up three times
            works = [comms[0].allreduce(np.ones(4096)) for _ in range(2)]
            await settle()
            works[0].cancel()
            await settle()
            works += [comms[1].allreduce(np.ones(4096)), comms[1].allreduce(1, timeout=-1)]
            assert all([await done_at_once(work) for work in works[-2:]])
            await asyncio.gather(*works, return_exceptions=True)
        await settle()
        assert [early_bytes(comm) for comm in comms] == [0, 0]
        for number in range(30):
            result = await asyncio.gather(*(comm.allreduce(np.full(8000, number)) for comm in comms))
            assert result[0][0] == 2 * number
        for comm, peer in ((comms[0], 1), (comms[1], 0)):
            box = comm._pump.engine._outboxes[peer]
            owed = comms[peer]._pump.engine._outboxes[comm.rank].owed
            assert box.credit + owed == EAGER_CREDIT
        await in_step(comms)


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "tree"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
async def test_everybody_writing_into_tiny_buffers_does_not_stand_still(world, size, algorithm):
    async with tight(world, size) as comms:
        for number in range(2 if in_virtual_time() else 3):
            count = ordinary(1 << 16, 1 << 12)
            values = [np.arange(count, dtype=np.float32) + comm.rank + number for comm in comms]
            results = await on_all(
                comms, lambda comm, values=values: comm.allreduce(values[comm.rank], algorithm=algorithm)
            )
            for result in results:
                np.testing.assert_array_equal(result, sum(values))
        await in_step(comms)


@pytest.mark.parametrize("size", [2, 3, 5])
async def test_twenty_rings_of_a_mebibyte_in_tiny_buffers(world, size):
    if in_virtual_time():
        pytest.skip("the shorter form above covers the simulation; this one is about kernel buffers")
    async with tight(world, size) as comms:
        for number in range(20):
            value = np.full(1 << 18, number, np.float32)
            for result in await on_all(
                comms, lambda comm, value=value: comm.allreduce(value, algorithm="ring")
            ):
                assert result[0] == result[-1] == size * number
        await in_step(comms)


async def test_many_operations_at_once_in_tiny_buffers(world):
    async with tight(world, 3) as comms:
        size, large, small = len(comms), *ordinary((20_000, 5_000), (2_000, 100))

        async def one(comm):
            works = []
            for number in range(10):
                root = number % size
                works.append(comm.allreduce(np.full(large, number, np.float32), algorithm="ring"))
                works.append(comm.allgather(np.full(small + comm.rank, number, np.float32)))
                works.append(comm.broadcast(np.full(large, number) if comm.rank == root else None, root))
                works.append(comm.allreduce([number]))
            return await asyncio.gather(*works)

        for results in await on_all(comms, one):
            for number in range(10):
                total, parts, value, joined = results[4 * number : 4 * number + 4]
                assert total[0] == total[-1] == size * number
                lengths = [(small + r, number) for r in range(size)]
                assert [(len(part), part[-1]) for part in parts] == lengths
                assert value[0] == value[-1] == number
                assert joined == [number] * size
        await in_step(comms)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
async def test_three_rings_of_64_mebibytes_in_tiny_buffers(world, size):
    if in_virtual_time():
        pytest.skip("about kernel buffers")
    async with tight(world, size, 600.0) as comms:
        for number in range(3):
            value = np.full(1 << 24, number, np.float32)
            for result in await on_all(
                comms, lambda comm, value=value: comm.allreduce(value, algorithm="ring")
            ):
                assert result[0] == result[-1] == size * number


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_32768_operations_ahead_are_right_and_one_more_is_refused(world):
    async with world(2, timeout=600.0) as comms:
        ahead = [comms[0].allreduce(np.full(2, n)) for n in range(MAX_PENDING)]
        for call in (lambda: comms[0].allreduce(np.full(2, -1.0)), comms[0].barrier):
            with pytest.raises(RuntimeError, match="32768 operations of communicator 'world' are under way"):
                call()
        await settle()
        assert early_bytes(comms[1]) <= EAGER_CREDIT
        for number in range(MAX_PENDING):
            assert (await comms[1].allreduce(np.full(2, number)))[0] == 2 * number
        for number, total in enumerate(await asyncio.gather(*ahead)):
            assert total.tolist() == [2 * number] * 2
        # The refused calls took no number, and there is room again.
        await in_step(comms)
