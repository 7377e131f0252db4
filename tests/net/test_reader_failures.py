"""The reader of one connection fails, whatever the reason: no operation of any rank stays pending, and none starts any more."""

import asyncio
import os

import numpy as np
import pytest

from asynccoll import PeerLost
from asynccoll.engine.inbound import Inbound
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
