"""A small operation behind queued bulk: how many bytes of the bulk leave before its frames do. Bytes, not times."""

import asyncio

import numpy as np
import pytest

from asynccoll.communicator import Communicator, Options
from asynccoll.engine import wire
from asynccoll.engine.outbox import SEGMENT
from asynccoll.engine.rounds import Rounds
from asynccoll.sim.driver import Conditions, SimDriver, SimNetwork

BULK = 16
NBYTES = 1 << 20
CONTROL = 4096
"""Bytes of other control frames that may go before, in the same write."""
BOUND = SEGMENT + wire.HEADER_SIZE + CONTROL
"""The rest of the segment that is half written, and control frames."""


def offset_of(stream, kind, seq):
    """Where the frame of that kind and number stands in a stream of bytes, or None."""
    at = 0
    while at + wire.HEADER_SIZE <= len(stream):
        found, _, _, _, number, _, length = wire.HEADER.unpack_from(stream, at)
        if (found, number) == (kind, seq):
            return at
        at += wire.HEADER_SIZE + length
    return None


class Watch:
    """What has been written on each link, and where it stood when a START record was queued."""

    def __init__(self, monkeypatch, network):
        self.network = network
        self.streams = {}
        """(source, destination) -> bytes that have arrived."""
        self.queued = []
        """(source, destination, number, bytes written before) of each record."""
        take, tell = SimDriver.take, Rounds._tell

        def taken(driver, peer, piece):
            self.streams.setdefault((peer, driver.engine.rank), bytearray()).extend(piece)
            take(driver, peer, piece)

        def told(rounds, op, remaining):
            rank = rounds._engine.rank
            for peer in op.tells[op.round]:
                self.queued.append((rank, peer, op.seq, self.written(rank, peer)))
            tell(rounds, op, remaining)

        monkeypatch.setattr(SimDriver, "take", taken)
        monkeypatch.setattr(Rounds, "_tell", told)

    def written(self, source, destination):
        link = self.network.drivers[source].link(destination)
        return len(self.streams.get((source, destination), b"")) + len(link.held)

    def ahead(self, seq):
        """For each record of the operation: bytes that went between its being queued and its leaving."""
        return [
            offset_of(self.streams[source, peer], wire.START, seq) - before
            for source, peer, number, before in self.queued
            if number == seq
        ]


async def behind_bulk(comms, moved, small):
    """Start the bulk, let ``moved`` bytes of it leave each rank, make the small calls; the bulk that each rank has left then."""
    arrays = [[np.full(NBYTES // 4, rank, "f4") for _ in range(BULK)] for rank in range(len(comms))]
    bulk = [comm.allreduce_(array, algorithm="ring") for comm in comms for array in arrays[comm.rank]]
    while min(comm.stats()["bytes_sent"] for comm in comms) < moved:
        await asyncio.sleep(0.0001)
    works = [small(comm) for comm in comms]
    await asyncio.gather(*works)
    left = [sum(f"allreduce #{n}" in comm.pending() for n in range(BULK)) for comm in comms]
    await asyncio.gather(*bulk)
    for rank in arrays:
        for array in rank:
            assert (array == sum(range(len(comms)))).all()
    return left


SMALL = {
    "barrier": lambda comm: comm.barrier(),
    "allreduce": lambda comm: comm.allreduce(np.ones(1)),
    "keyed": lambda comm: comm.barrier(key="a"),
}


@pytest.mark.parametrize("moved", [0, 1, 3_000_000])
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_at_most_one_segment_of_bulk_goes_before_the_frames_of_a_small_operation(
    monkeypatch, size, kind, moved
):
    network = SimNetwork(
        asyncio.get_running_loop(), size, conditions=Conditions(delay=0.001, piece=100_001, buffer=1 << 17)
    )
    watch = Watch(monkeypatch, network)
    comms = [Communicator(driver, options=Options(timeout=None)) for driver in network.drivers]
    positions = {}

    def small(comm):
        positions[comm.rank] = watch.written(comm.rank, 0) if comm.rank else 0
        return SMALL[kind](comm)

    left = await behind_bulk(comms, moved, small)
    assert min(left) == BULK  # none of the bulk has ended: the small one went past all of it
    seq = wire.KEYED if kind == "keyed" else BULK
    ahead = watch.ahead(seq)
    assert len(ahead) >= size
    assert max(ahead) <= BOUND
    if kind == "keyed":
        for rank in range(1, size):
            assert offset_of(watch.streams[rank, 0], wire.KEY, 0) - positions[rank] <= BOUND
    await asyncio.gather(*(comm.close() for comm in comms))
