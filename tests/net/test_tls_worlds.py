"""Worlds over TLS: every verb, large arrays, cancels, losses, the end. More with the conformance suite: ``--worlds tls-uvloop``."""

import asyncio
import concurrent.futures
import contextlib
import socket
import struct

import certificates
import numpy as np
import pytest
from forming import free_port, nothing_left, open_sockets

import asynccoll
import asynccoll.sync
from asynccoll import CollectiveCancelled, PeerLost
from asynccoll.communicator import Communicator, Options
from asynccoll.engine.engine import Engine
from asynccoll.net.contexts import layer
from asynccoll.net.driver import NetDriver
from asynccoll.net.sockets import receive_exactly
from asynccoll.net.tls import TlsSocket
from asynccoll.testing import local_world


def world(size, **options):
    return local_world(size, ssl=certificates.contexts(), **options)


def die(comm, *, reset=False):
    """Drop every connection of ``comm`` as the death of its process would: no goodbye."""
    driver = comm._pump
    driver.closed = True
    driver.stop_timer()
    if driver._watch is not None:
        driver._watch.heard.clear()
        driver._watch.end()
    for peer, sock in list(driver._sockets.items()):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        driver.drop(peer)


async def on_all(comms, function):
    return await asyncio.gather(*(function(comm) for comm in comms))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
async def test_every_verb(size):
    async with nothing_left(), world(size) as comms:
        ranks = list(range(size))
        total = sum(ranks)
        for value, expected in (
            (np.arange(1000.0), np.arange(1000.0)),
            (np.ones(100_000), np.ones(100_000)),
        ):
            for result in await on_all(comms, lambda comm, v=value: comm.allreduce(v + comm.rank)):
                assert np.array_equal(result, expected * size + total)
            sums = await on_all(comms, lambda comm, v=value: comm.reduce(v, root=size - 1))
            assert np.array_equal(sums[-1], expected * size)
            parts = await on_all(comms, lambda comm, v=value: comm.reduce_scatter(v))
            assert np.array_equal(np.concatenate(parts), expected * size)
            for result in await on_all(
                comms, lambda comm, v=value: comm.broadcast(v if comm.rank == 0 else None)
            ):
                assert np.array_equal(result, expected)
            for result in await on_all(comms, lambda comm, v=value: comm.allgather(v + comm.rank)):
                assert all(np.array_equal(part, expected + rank) for rank, part in enumerate(result))
        words = [f"rank {rank}" for rank in ranks]
        assert await on_all(comms, lambda comm: comm.gather(words[comm.rank])) == [words] + [None] * (
            size - 1
        )
        assert await on_all(comms, lambda comm: comm.scatter(words if comm.rank == 0 else None)) == words
        assert await on_all(comms, lambda comm: comm.alltoall([(comm.rank, to) for to in ranks])) == [
            [(source, rank) for source in ranks] for rank in ranks
        ]
        assert await on_all(comms, lambda comm: comm.scan(comm.rank)) == [
            sum(ranks[: rank + 1]) for rank in ranks
        ]
        assert (await on_all(comms, lambda comm: comm.exscan(1)))[1:] == ranks[1:]
        sends = [comm.send({"from": comm.rank}, (comm.rank + 1) % size) for comm in comms]
        assert await on_all(comms, lambda comm: comm.recv()) == [
            {"from": (rank - 1) % size} for rank in ranks
        ]
        await asyncio.gather(*sends)
        await on_all(comms, lambda comm: comm.barrier())
        halves = await asyncio.gather(*(comm.split(comm.rank % 2) for comm in comms))
        assert await on_all(halves, lambda half: half.allreduce(1)) == [half.world_size for half in halves]


async def test_every_link_is_tls_and_sends_small_frames_at_once():
    async with world(3, liveness_timeout=30.0) as comms:
        links = [sock for comm in comms for sock in comm._pump._sockets.values()]
        links += [sock for comm in comms for sock in comm._pump._watch.sockets.values()]
        assert len(links) == 12
        for sock in links:
            assert isinstance(sock, TlsSocket)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_a_large_allreduce_is_right_everywhere(size):
    count = (64 << 20) // 4
    async with world(size) as comms:
        arrays = [np.arange(count, dtype=np.int32) * (rank + 1) for rank in range(size)]
        await on_all(comms, lambda comm: comm.allreduce_(arrays[comm.rank]))
        expected = np.arange(count, dtype=np.int32) * (size * (size + 1) // 2)
        for array in arrays:
            assert np.array_equal(array, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_an_array_beyond_two_gib_is_right_everywhere():
    count = 2**31 + 1
    async with world(2, timeout=500) as comms:
        period = np.arange(251, dtype=np.uint8)  # a prime, so that a shift by a power of two shows
        arrays = [np.resize(period * (rank + 1), count) for rank in range(2)]
        await on_all(comms, lambda comm: comm.allreduce_(arrays[comm.rank]))
        block = 251 << 16
        for array in arrays:
            for lo in range(0, count, block):
                part = array[lo : lo + block]
                assert np.array_equal(part, np.resize(period * 3, len(part))), lo


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13])
async def test_a_cancel_in_the_middle_gives_the_memory_back_and_the_next_operation_is_right(turns):
    count = (24 << 20) // 8  # at most 1 MiB is read from a peer in a turn, so it takes more than 30 turns
    async with world(3) as comms:
        arrays = [np.full(count, comm.rank + 1.0) for comm in comms]
        works = [comm.allreduce_(array) for comm, array in zip(comms, arrays, strict=True)]
        for _ in range(turns):
            await asyncio.sleep(0)
        assert works[1].cancel()
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        assert isinstance(outcomes[1], asyncio.CancelledError)
        for outcome in (outcomes[0], outcomes[2]):
            assert type(outcome) is CollectiveCancelled
            assert outcome.origin == 1
        for array in arrays:
            array[:] = -1.0  # what is still to be sent of the old values must not come from here
        results = await on_all(comms, lambda comm: comm.allreduce(np.full(count, 2.0**comm.rank)))
        for array, result in zip(arrays, results, strict=True):
            assert (result == 7.0).all()
            assert (array == -1.0).all()


@contextlib.asynccontextmanager
async def proved_ends(buffer=None):
    """Both ends of a connection that is ready for a driver; what one has sent is there for the other at once."""
    tls = layer(certificates.contexts())
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        if buffer is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    with tls.dialed(ends[0], "127.0.0.1") as here, tls.accepted(ends[1]) as there:
        await asyncio.gather(here.handshake(), there.handshake())
        here.proved()
        there.proved()
        yield here, there


def rank_over(sock, rank):
    """Rank 0 or 1 of 2, whose link is ``sock``."""
    driver = NetDriver(Engine(rank, 2), asyncio.get_running_loop(), {1 - rank: sock})
    return Communicator(driver, options=Options(30.0))


async def test_the_end_of_a_message_that_does_not_fit_goes_when_there_is_room():
    # All of it is sealed at once, and nothing follows that would push it.
    async with proved_ends(buffer=4096) as (here, there):
        zero = rank_over(here, 0)
        sending = zero.send(b"x" * 30_000, 1)
        while not here._sealed:
            await asyncio.sleep(0)
        assert not zero._pump.engine.data_to_send(1)
        one = rank_over(there, 1)
        assert await one.recv() == b"x" * 30_000
        await sending
        await asyncio.gather(zero.close(), one.close())


async def test_what_came_before_the_driver_is_read_by_it():
    async with proved_ends() as (here, there):
        zero = rank_over(here, 0)
        early = zero.allreduce(1)
        while not there.holds_input:
            await asyncio.sleep(0)
            there.gone()  # takes what there is off the descriptor
        one = rank_over(there, 1)
        assert await asyncio.gather(early, one.allreduce(1)) == [2, 2]
        await asyncio.gather(zero.close(), one.close())


async def test_what_the_handshake_left_sealed_is_written_by_the_driver():
    async with proved_ends(buffer=4096) as (here, there), asyncio.timeout(20):
        while here.flush():
            here.send(bytes(50_000))
        zero = rank_over(here, 0)
        while here._sealed:
            await receive_exactly(there, 1000)
        await zero.close()


@pytest.mark.parametrize("reset", [False, True], ids=["end of stream", "reset"])
async def test_a_link_that_breaks_is_a_lost_rank(reset):
    async with nothing_left(), world(3) as comms:
        works = [comm.allreduce(np.ones(1 << 20)) for comm in comms[:2]]
        await asyncio.sleep(0)
        die(comms[2], reset=reset)
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert type(outcome) is PeerLost
            assert outcome.peers == {2}


async def test_the_survivors_of_a_loss_go_on_over_tls():
    async with world(3, liveness_timeout=30.0) as comms:
        works = [comm.allreduce(np.ones(1 << 20)) for comm in comms[:2]]
        die(comms[2])
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert type(outcome) is PeerLost
        pair = await asyncio.gather(*(comm.shrink() for comm in comms[:2]))
        assert await on_all(pair, lambda comm: comm.allreduce(np.ones(3).sum())) == [6.0, 6.0]


async def test_frames_that_cross_a_close_do_not_spoil_it():
    async with nothing_left():
        for _ in range(20):
            async with world(3) as comms:
                await on_all(comms, lambda comm: comm.barrier())
                await asyncio.gather(*(comm.allreduce(np.ones(50_000)) for comm in comms))


def test_the_blocking_facade_takes_it_too():
    address, contexts = f"tcp://127.0.0.1:{free_port()}", certificates.contexts()

    def run(rank):
        with asynccoll.sync.connect(
            address, rank=rank, world_size=2, secret="x", ssl=contexts, init_timeout=30
        ) as comm:
            return comm.allreduce(np.full(100_000, rank + 1.0))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for result in pool.map(run, range(2)):
            assert (result == 3.0).all()


async def test_a_world_in_memory_has_nothing_to_protect():
    with pytest.raises(ValueError, match="ssl="):
        async with local_world(2, transport="memory", ssl=certificates.contexts()):
            pass


async def test_a_world_of_one_takes_the_argument_and_opens_nothing():
    before = open_sockets()
    async with asynccoll.connect(rank=0, world_size=1, ssl=certificates.contexts()) as comm:
        assert await comm.allreduce(3) == 3
        assert open_sockets() == before


@pytest.mark.parametrize("wrong", [True, "cert.pem"])
async def test_what_is_no_context_is_refused_before_anything_is_opened(wrong):
    for size in (1, 2):
        with pytest.raises(ValueError, match=r"asynccoll\.tls"):
            await asynccoll.connect("tcp://127.0.0.1:1", rank=0, world_size=size, ssl=wrong)
