"""Broken links, stopped ranks and silence, as the drivers see them; and faults as values."""

import asyncio
import random

import numpy as np
import pytest

from asynccoll.communicator import Communicator, Options
from asynccoll.errors import PeerLost
from asynccoll.sim.driver import Conditions, SimNetwork
from asynccoll.sim.faults import Crash, Cut, Partition, Stall, checked, draw_conditions, draw_faults


def world(size, liveness=None, **conditions):
    network = SimNetwork(
        asyncio.get_running_loop(), size, conditions=Conditions(**conditions), liveness_timeout=liveness
    )
    return network, [Communicator(driver, options=Options(timeout=None)) for driver in network.drivers]


def now():
    return asyncio.get_running_loop().time()


async def errors(works):
    return await asyncio.gather(*works, return_exceptions=True)


async def close(comms):
    await asyncio.gather(*(comm.close() for comm in comms))


class TestLinks:
    @pytest.mark.parametrize(
        ("reset", "reason"), [(False, "connection closed without goodbye"), (True, "connection reset")]
    )
    async def test_a_cut_is_seen_at_both_ends(self, reset, reason):
        network, comms = world(2)
        network.sever(0, 1, reset=reset)
        for rank, error in enumerate(await errors([comm.barrier() for comm in comms])):
            assert (error.peers, error.reason) == ({1 - rank}, reason)
        await close(comms)

    async def test_what_is_under_way_arrives_before_an_end_but_not_before_a_reset(self):
        for reset in (False, True):
            network, comms = world(2, delay=0.1, piece=10)
            network.link(0, 1).write([b"x" * 100])
            pieces = []
            network.drivers[1].take = lambda peer, piece, pieces=pieces: pieces.append(len(piece))
            network.sever(0, 1, reset=reset)
            await asyncio.sleep(10)
            assert sum(pieces) == (0 if reset else 100)
            await close(comms)

    async def test_nothing_arrives_over_a_stalled_link_until_it_heals(self):
        network, comms = world(2)
        network.stall(0, 1)
        works = [comm.allreduce(np.ones(10)) for comm in comms]
        await asyncio.sleep(50)
        assert not any(work.done() for work in works)
        network.heal(0, 1)
        for total in await asyncio.gather(*works):
            np.testing.assert_array_equal(total, np.full(10, 2.0))
        assert now() == 50
        await close(comms)

    async def test_a_slow_rank_slows_its_links_only(self):
        network, comms = world(3)
        network.slow(1, 0.5, 100)
        assert network.link(0, 1).conditions == network.link(1, 2).conditions == Conditions(0.5, 100)
        assert network.link(0, 2).conditions == Conditions()
        await close(comms)


class TestStoppedRanks:
    async def test_a_stopped_rank_reads_nothing_and_its_timers_wait(self):
        network, comms = world(2)
        work = comms[0].barrier(timeout=5)
        other = comms[1].barrier(timeout=100)
        network.freeze(0)
        await asyncio.sleep(20)
        assert not work.done()
        network.thaw(0)
        await asyncio.sleep(1)
        assert work.done()
        await errors([work, other])
        await close(comms)

    async def test_what_was_written_to_it_meanwhile_is_there_when_it_goes_on(self):
        network, comms = world(2, buffer=500)
        network.freeze(1)
        sent = [comms[0].send(bytes(100), 1, tag=at) for at in range(50)]
        await asyncio.sleep(1)
        network.thaw(1)
        for at in range(50):
            assert await comms[1].recv(0, tag=at) == bytes(100)
        await asyncio.gather(*sent)
        await close(comms)


class TestSilence:
    async def test_a_stopped_rank_is_lost_after_the_timeout_and_hears_so_when_it_goes_on(self):
        network, comms = world(3, liveness=2.0)
        works = [comm.barrier() for comm in comms[:2]]
        network.freeze(2)
        for error in await errors(works):
            assert error.peers == {2}
        assert now() == 2.0
        network.thaw(2)
        with pytest.raises(PeerLost, match="evicted") as caught:
            await comms[2].barrier()
        assert caught.value.peers == {2}
        await close(comms)

    async def test_a_watcher_that_was_stopped_itself_begins_anew(self):
        network, comms = world(2, liveness=2.0)
        network.stall(0, 1)
        network.freeze(0)
        network.freeze(1)
        await asyncio.sleep(10)
        network.thaw(0)
        network.thaw(1)
        await asyncio.sleep(1.9)
        assert not network.drivers[0].engine.losses.accusations
        await asyncio.sleep(0.2)
        assert network.drivers[0].engine.losses.accusations
        await close(comms)

    async def test_silence_that_ends_in_time_leaves_no_timer(self):
        loop = asyncio.get_running_loop()
        network, comms = world(3, liveness=2.0)
        network.stall(0, 1)
        network.freeze(2)
        await asyncio.sleep(1.5)
        network.heal(0, 1)
        network.thaw(2)
        assert not [handle for handle in loop._scheduled if not handle.cancelled()]
        await asyncio.gather(*(comm.barrier() for comm in comms))
        await close(comms)

    async def test_a_link_that_is_too_full_to_say_so_does_not_keep_an_eviction_from_being_heard(self):
        network, comms = world(2, liveness=2.0, buffer=1)
        works = [comm.barrier() for comm in comms]
        network.stall(0, 1)
        await asyncio.sleep(3)
        assert network.drivers[0].untold
        network.heal(0, 1)
        await asyncio.sleep(3)
        assert [{rank for error in await errors(works) for rank in error.peers}] == [{0, 1}]
        await close(comms)


class TestMoments:
    async def test_pieces_are_counted_at_one_rank_or_between_two(self):
        network, comms = world(3)
        seen = []
        network.after(2, frozenset([1]), lambda: seen.append("at 1"))
        network.after(1, frozenset([0, 2]), lambda: seen.append("between 0 and 2"))
        call_off = network.after(1, frozenset([0]), lambda: seen.append("never"))
        call_off()
        call_off()
        for source, target in ((0, 1), (1, 2), (2, 1), (1, 0), (2, 0), (2, 0)):
            network.moved(source, target, 10)
        assert seen == ["at 1", "between 0 and 2"]
        await close(comms)


class TestValues:
    def test_faults_of_strangers_are_refused(self):
        good = [Crash(1), Cut(0, 1), Partition(frozenset([0])), Stall(0, 1.0, at=3)]
        assert checked(good, 2) == good
        with pytest.raises(ValueError, match="names rank 5"):
            checked([Partition(frozenset([1, 5]))], 2)

    def test_drawn_ones_fit_their_world_and_are_of_every_kind(self):
        drawn = draw_faults(random.Random(1), 3, 200)
        assert checked(drawn, 3) == drawn
        assert {type(fault).__name__ for fault in drawn} == {
            *("Crash", "Stall", "Slow", "Cancel", "Cut", "Partition")
        }
        assert draw_faults(random.Random(1), 1, 5) == []

    def test_drawn_conditions_differ(self):
        assert len({draw_conditions(random.Random(seed)) for seed in range(100)}) > 20
