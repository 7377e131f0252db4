"""The in-memory links: seeded, bounded, split and delayed like sockets, and closed like sockets."""

import asyncio

import numpy as np
import pytest
import uvloop

from asynccoll.communicator import Communicator, Options
from asynccoll.errors import CommunicatorClosed, NotInitialized, PeerLost
from asynccoll.sim.driver import Conditions, SimDriver, SimNetwork
from asynccoll.sim.loop import SimLoop

ROUGH = Conditions(delay=0.01, piece=3000, split=True, buffer=5000)


@pytest.fixture
def deliveries(monkeypatch):
    """(time, source, destination, bytes) of every piece that is delivered."""
    seen = []
    take = SimDriver.take

    def watched(self, peer, piece):
        seen.append((self.loop.time(), peer, self.engine.rank, bytes(piece)))
        take(self, peer, piece)

    monkeypatch.setattr(SimDriver, "take", watched)
    return seen


def network(size, **options):
    made = SimNetwork(asyncio.get_running_loop(), size, **options)
    return made, [Communicator(driver, options=Options(timeout=None)) for driver in made.drivers]


async def work(comms, count=5000):
    """Some collectives with results that show a lost or swapped byte."""

    async def rank(comm):
        total = await comm.allreduce(np.arange(count, dtype="i8") * (comm.rank + 1))
        values = await comm.allgather(bytes([comm.rank]) * 3000)
        return total, values

    size = len(comms)
    for total, values in await asyncio.gather(*map(rank, comms)):
        np.testing.assert_array_equal(total, np.arange(count) * (size * (size + 1) // 2))
        assert values == [bytes([other]) * 3000 for other in range(size)]


async def close(comms):
    await asyncio.gather(*(comm.close() for comm in comms))


def trace(seen, conditions, seed):
    async def main():
        _, comms = network(3, conditions=conditions, seed=seed)
        await work(comms)
        await close(comms)

    seen.clear()
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())
    return list(seen)


class TestSeed:
    def test_the_same_seed_makes_the_same_deliveries(self, deliveries):
        assert trace(deliveries, ROUGH, 5) == trace(deliveries, ROUGH, 5)

    def test_another_seed_makes_others(self, deliveries):
        assert trace(deliveries, ROUGH, 5) != trace(deliveries, ROUGH, 6)

    def test_without_delay_and_splitting_it_makes_no_difference(self, deliveries):
        assert trace(deliveries, Conditions(), 5) == trace(deliveries, Conditions(), 6)


class TestConditions:
    async def test_by_default_no_time_passes(self, deliveries):
        _, comms = network(3)
        await work(comms)
        assert deliveries
        assert {time for time, *_ in deliveries} == {0.0}
        await close(comms)

    async def test_pieces_are_no_larger_than_asked(self, deliveries):
        _, comms = network(2, conditions=Conditions(piece=100))
        await work(comms)
        sizes = [len(piece) for *_, piece in deliveries]
        assert max(sizes) == 100
        await close(comms)

    async def test_splitting_draws_sizes_from_1_to_a_piece(self, deliveries):
        _, comms = network(2, conditions=Conditions(piece=10, split=True))
        await work(comms, 200)
        assert {len(piece) for *_, piece in deliveries} == set(range(1, 11))
        await close(comms)

    async def test_one_byte_at_a_time_works(self, deliveries):
        _, comms = network(3, conditions=Conditions(piece=1, buffer=1))
        await work(comms, 20)
        assert {len(piece) for *_, piece in deliveries} == {1}
        await close(comms)

    async def test_each_piece_is_late_by_at_most_the_delay_and_none_overtakes(self):
        made, comms = network(2, conditions=Conditions(delay=0.5, piece=50))
        link = made.drivers[0].link(1)
        loop = asyncio.get_running_loop()
        arrived = []
        made.drivers[1].take = lambda peer, piece: arrived.append((loop.time(), bytes(piece)))
        link.write([bytes([n]) * 50 for n in range(20)])
        await asyncio.sleep(100)
        assert [piece[0] for _, piece in arrived] == list(range(20))
        gaps = np.diff([0.0, *(time for time, _ in arrived)])
        assert all(gaps >= 0)
        assert 0.1 < gaps.max() <= 0.5
        del made.drivers[1].take
        for driver in made.drivers:
            driver.crash()
        assert all(comm.closed for comm in comms)

    async def test_a_link_holds_no_more_than_its_buffer_and_the_writer_waits(self, monkeypatch):
        made, comms = network(2, conditions=Conditions(buffer=1000, piece=300))
        link_type = type(made.drivers[0].link(1))
        write = link_type.write
        held, taken = [], []

        def watched(link, parts):
            taken.append(write(link, parts))
            held.append(len(link.held))
            return taken[-1]

        monkeypatch.setattr(link_type, "write", watched)
        await work(comms)
        assert max(held) == 1000
        assert 0 in taken
        await close(comms)

    async def test_bytes_are_counted_at_both_ends(self):
        made, comms = network(2, conditions=ROUGH)
        await work(comms)
        await asyncio.sleep(1000)
        one, two = made.drivers
        assert one.bytes_sent == two.bytes_received > 40_000
        assert two.bytes_sent == one.bytes_received > 40_000
        await close(comms)


@pytest.mark.parametrize("factory", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_any_loop_will_do(factory):
    async def main():
        _, comms = network(3, conditions=Conditions(piece=500, split=True, buffer=700))
        await work(comms)
        await close(comms)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


class TestEnd:
    async def test_a_crash_is_a_loss_for_all_others(self):
        made, comms = network(3, conditions=ROUGH)
        works = [comm.barrier() for comm in comms[:2]]
        made.drivers[2].crash()
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(error, PeerLost)
            assert (error.peers, error.reason) == ({2}, "connection closed without goodbye")
        await close(comms)

    async def test_what_was_sent_before_a_crash_arrives(self):
        made, comms = network(2, conditions=ROUGH)
        works = [comm.broadcast(b"x" * 1000 if comm.rank == 0 else None) for comm in comms]
        await works[0]
        made.drivers[0].crash()
        assert await works[1] == b"x" * 1000
        await close(comms)

    async def test_closing_says_goodbye_and_leaves_nothing(self):
        loop = asyncio.get_running_loop()
        _, comms = network(3, conditions=ROUGH)
        await work(comms)
        await asyncio.gather(*(comm.barrier(timeout=1e6) for comm in comms))
        await close(comms)
        await close(comms)
        assert not [handle for handle in loop._scheduled if not handle.cancelled()]
        with pytest.raises(NotInitialized):
            comms[0].barrier()

    async def test_a_rank_that_stays_hears_why_the_other_left(self):
        _, comms = network(2, conditions=ROUGH)
        work = comms[1].barrier()
        await comms[0]._close("went home")
        with pytest.raises(CommunicatorClosed, match="went home"):
            await work
        await comms[1].close()

    async def test_a_peer_closes_its_end_when_it_has_heard_the_goodbye(self):
        loop = asyncio.get_running_loop()
        _, comms = network(2)
        await work(comms)
        await comms[0].close()
        assert loop.time() == 0.0
        await comms[1].close()

    async def test_a_deaf_peer_costs_a_second(self):
        loop = asyncio.get_running_loop()
        made, comms = network(2)
        made.drivers[1].ended = lambda peer: None
        await comms[0].close()
        assert loop.time() == 1.0
        del made.drivers[1].ended
        await comms[1].close()

    async def test_its_streams_end_also_where_its_bytes_could_not_leave_in_time(self):
        made, comms = network(2, conditions=Conditions(buffer=1000))
        made.stall(0, 1)
        waiting, _ = [comm.reduce(np.ones(1000), root=0) for comm in comms]
        await comms[1].close()  # most of its bytes do not fit the link
        made.heal(0, 1)
        with pytest.raises(PeerLost):
            await waiting
        await comms[0].close()

    async def test_a_peer_that_breaks_the_protocol_is_dropped_at_both_ends(self):
        made, comms = network(2)
        works = [comm.barrier() for comm in comms]
        link = made.drivers[0].link(1)
        link.held.clear()
        link.write([b"\xff" * 100])
        with pytest.raises(PeerLost, match="unknown kind 255"):
            await works[1]
        await works[0]  # what it was owed had arrived
        with pytest.raises(PeerLost, match="lost rank 1"):
            await comms[0].barrier()
        await close(comms)
