"""The TCP driver where a stream ends, the engine turns away in the middle of a read, or a reader fails for whatever reason."""

import asyncio
import logging
import os
import socket
import struct

import numpy as np
import pytest

from asynccoll.communicator import Communicator, Options
from asynccoll.engine import wire
from asynccoll.engine.engine import Engine
from asynccoll.engine.inbound import Inbound
from asynccoll.errors import PeerLost
from asynccoll.net.driver import NetDriver
from asynccoll.testing import local_world

DEADLINE = 5.0
"""Seconds for everything to end. It is turns of the loop; a hang is a failure."""


def start_all(comm):
    """Some of every kind: small, in bulk, of objects, keyed, a message; started and pending."""
    return [
        comm.barrier(),
        comm.allreduce(np.ones(3)),
        comm.allreduce(np.ones(300_000)),
        comm.allgather({"rank": comm.rank}),
        comm.allreduce(1, key="one"),
        comm.recv(),
    ]


def fails(monkeypatch, method, decoder, error):
    """``Inbound.method`` of one decoder raises ``error`` from now on."""
    ordinary = getattr(Inbound, method)

    def raises(self, *args):
        if self is decoder:
            raise error
        return ordinary(self, *args)

    monkeypatch.setattr(Inbound, method, raises)


ERRORS = {
    "out of memory": MemoryError("no 1000 bytes"),
    "a cancellation": asyncio.CancelledError(),
    "a defect": ZeroDivisionError("a defect"),
    "a missing file": FileNotFoundError(2, "no such file"),
}


def break_reader(comms, kind, method, monkeypatch):
    """Let rank 1 fail at the next bytes that it reads from rank 0."""
    if kind == "a bad frame":
        os.write(comms[0]._pump._sockets[1].fileno(), b"\xff" * 64)
    else:
        engine = comms[1]._pump.engine
        fails(monkeypatch, method, engine.peers.inbounds[0], ERRORS[kind])
        comms[0].send("bytes", 1, tag=9)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("a bad frame", ""),
        *((kind, method) for kind in ERRORS for method in ("target", "received", "_decode")),
    ],
)
async def test_everything_ends_and_nothing_starts_when_a_reader_fails(kind, method, monkeypatch):
    loop = asyncio.get_running_loop()
    told = []
    loop.set_exception_handler(lambda loop, context: told.append(context.get("exception")))
    async with local_world(3) as comms:
        await asyncio.gather(*(comm.barrier() for comm in comms))
        before = asyncio.all_tasks()
        works = start_all(comms[1]) + start_all(comms[2])  # they wait for rank 0
        break_reader(comms, kind, method, monkeypatch)
        async with asyncio.timeout(DEADLINE):
            ends = await asyncio.gather(*works, return_exceptions=True)
        for end in ends:
            assert isinstance(end, PeerLost), ends
        assert [comm.pending() for comm in comms[1:]] == [[], []]
        async with asyncio.timeout(DEADLINE):
            later = [comm.barrier() for comm in comms] + [comm.allreduce(np.ones(9)) for comm in comms]
            for end in await asyncio.gather(*later, return_exceptions=True):
                assert isinstance(end, PeerLost), end
        assert asyncio.all_tasks() == before
    if kind not in ("a bad frame", "a cancellation"):
        assert told == [ERRORS[kind]]  # and not again at every turn of the loop


@pytest.fixture
async def one_rank():
    """Rank 0 of 2, and the socket of its peer, which the test plays."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        mine, _ = listener.accept()
    mine.setblocking(False)
    loop = asyncio.get_running_loop()
    comm = Communicator(NetDriver(Engine(0, 2), loop, {1: mine}), options=Options(None))
    driver = comm._pump
    lost, drop = [], driver.drop

    def counted(rank):
        if rank in driver._sockets:
            lost.append(rank)
        drop(rank)

    driver.drop = counted
    yield comm, peer, lost
    peer.close()
    await comm.close()


HEADER = wire.data_header(wire.EAGER, 0, 0, 0, 100)


@pytest.mark.parametrize(
    "said",
    [b"", HEADER[:1], HEADER[:23], HEADER, HEADER + bytes(99), wire.data_header(0, 0, 0, 0, 100_000)[:24]],
    ids=[
        "nothing",
        "1 byte",
        "all but one of a header",
        "a header",
        "all but one of a frame",
        "a bulk header",
    ],
)
@pytest.mark.parametrize("how", ["end", "reset"])
async def test_an_end_within_a_frame_is_a_loss_once(one_rank, caplog, said, how):
    comm, peer, lost = one_rank
    works = [comm.allreduce(np.ones(4)), comm.barrier(), comm.recv(1)]
    with caplog.at_level(logging.WARNING, "asynccoll"):
        peer.sendall(said)
        await asyncio.sleep(0)
        if how == "reset":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(outcome, PeerLost)
            assert outcome.peers == {1}
    assert lost == [1]
    assert len([record for record in caplog.records if record.name == "asynccoll"]) == 1
    assert not comm._pump._sockets


async def test_a_peer_given_up_in_the_middle_of_a_read_is_lost_once_and_not_read_on(one_rank):
    """What breaks the protocol, a goodbye, and the end of the stream, all in one read."""
    comm, peer, lost = one_rank
    work = comm.barrier()
    peer.sendall(struct.pack("<BBHIQII", 99, 0, 0, 0, 0, 0, 0) + wire.goodbye_frame(0, {"cause": "x"}))
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="unknown kind 99"):
        await work
    await asyncio.sleep(0)
    assert lost == [1]
    assert not comm._pump._sockets


async def test_a_rank_may_close_while_it_is_being_told(one_rank):
    """The end of an operation closes the communicator, with more frames of the same read still to come."""
    comm, peer, _ = one_rank
    closing = []
    work = comm.recv(1)
    work.add_done_callback(lambda _: closing.append(asyncio.ensure_future(comm.close())))
    letters = [wire.message_frame(0, wire.MESSAGES | 1 << 40 | at, 0, b"", 3, b"abc") for at in range(3)]
    peer.sendall(b"".join(letters))
    await asyncio.wait([work])
    await asyncio.sleep(0)
    peer.close()
    await asyncio.gather(*closing)
    assert comm.closed
    assert not comm._pump._sockets
