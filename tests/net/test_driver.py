"""The TCP driver where a stream ends, or the engine turns away, in the middle of a read."""

import asyncio
import logging
import socket
import struct

import numpy as np
import pytest

from asynccoll.communicator import Communicator, Options
from asynccoll.engine import wire
from asynccoll.engine.engine import Engine
from asynccoll.errors import PeerLost
from asynccoll.net.driver import NetDriver


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
