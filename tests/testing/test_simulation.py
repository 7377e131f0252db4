"""`Simulation`: a program on simulated ranks, its faults, and what each rank gets. All in virtual time."""

import asyncio
import logging

import numpy as np
import pytest
from processes import outputs

import asynccoll
from asynccoll.errors import CollectiveCancelled, CommunicatorClosed, PeerLost
from asynccoll.testing import (
    Cancel,
    Conditions,
    Crash,
    Crashed,
    Cut,
    Partition,
    Restart,
    Simulation,
    Slow,
    Stall,
    Stopped,
    Stuck,
)

PLAIN = Conditions()
QUICK = Conditions(delay=0.001)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "asynccoll")  # losses are what these tests are about


async def train(comm, steps=20):
    """A step every tenth of a second; the last sum."""
    total = None
    for _ in range(steps):
        await asyncio.sleep(0.1)
        total = await comm.allreduce(np.ones(100) * comm.rank)
    return float(total[0])


def test_each_rank_runs_main_once_and_results_are_in_rank_order():
    async def main(comm):
        return comm.rank, comm.world_size, await comm.allgather(comm.rank * 10)

    sim = Simulation(3, seed=1)
    assert sim.run(main) == [(rank, 3, [0, 10, 20]) for rank in range(3)]
    assert (sim.generation, sim.faults, dict(sim.struck)) == (0, [], {})


def test_an_hour_passes_in_a_moment_and_is_told():
    async def main(comm):
        await asyncio.sleep(3600)
        await comm.barrier()

    sim = Simulation(2, conditions=PLAIN)
    sim.run(main)
    assert sim.time == 3600


def test_an_exception_of_main_is_that_ranks_result_and_closes_its_communicator():
    async def main(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        await comm.barrier()

    zero, one = Simulation(2).run(main)
    assert isinstance(one, KeyError)
    assert isinstance(zero, CommunicatorClosed)
    assert zero.origin == 1


def test_an_exception_says_why_the_rank_left():
    async def main(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        await comm.barrier()

    zero, _ = Simulation(2).run(main)
    assert "KeyError" in zero.cause


class TestTheSameRun:
    FAULTS = (Crash(2, at=0.5), Stall(1, 0.3, at=0.2))

    def hash(self, seed=7, **options):
        sim = Simulation(4, seed=seed, faults=self.FAULTS, **options)
        sim.run(train)
        return sim.trace_hash

    def test_the_same_arguments_give_the_same_trace(self):
        assert self.hash() == self.hash()

    def test_another_seed_gives_another(self):
        assert self.hash() != self.hash(8)

    def test_run_twice_on_one_simulation_is_the_same_too(self):
        sim = Simulation(3, seed=5, faults="random")
        first = [repr(result) for result in sim.run(train)], sim.trace_hash, sim.time
        assert first == ([repr(result) for result in sim.run(train)], sim.trace_hash, sim.time)

    def test_other_processes_and_hash_seeds_make_no_difference(self):
        code = (
            "import asyncio, logging\nfrom asynccoll.testing import *\n"
            "logging.disable(logging.CRITICAL)\n"
            "async def main(comm):\n    for at in range(5):\n        await comm.allgather({'a': at, 'b': comm.rank})\n"
            "sim = Simulation(4, seed=3, faults=[Partition(frozenset({0, 3}), seconds=9, after=30)])\n"
            "sim.run(main)\nprint(sim.trace_hash)\n"
        )
        assert len(outputs(code, ("0", "1", "2"))) == 1

    def test_faults_can_be_drawn_and_are_told(self):
        assert Simulation(4, seed=3, faults=3).faults == Simulation(4, seed=3, faults=3).faults
        assert len(Simulation(4, seed=3, faults=3).faults) == 3
        counts = {len(Simulation(4, seed=seed, faults="random").faults) for seed in range(60)}
        assert counts == {0, 1, 2, 3, 4}

    @pytest.mark.parametrize("seed", range(25))
    def test_random_faults_never_hang_a_program_whose_operations_have_limits(self, seed):
        results = Simulation(4, seed=seed, faults="random").run(train)
        for result in results:
            ours = asynccoll.AsynccollError | asyncio.CancelledError | Crashed | Stopped
            assert result == 6.0 or isinstance(result, ours)


class TestCrash:
    def test_survivors_name_the_dead(self):
        sim = Simulation(4, seed=7, faults=[Crash(2, at=0.55)])
        results = sim.run(train)
        assert isinstance(results[2], Crashed)
        assert [result.peers for rank, result in enumerate(results) if rank != 2] == [{2}] * 3
        assert sim.struck == {"crash": 1}

    def test_after_counts_the_pieces_that_reach_the_rank(self):
        seen = []
        sim = Simulation(
            2,
            faults=[Crash(1, after=3)],
            conditions=PLAIN,
            listener=lambda now, what: seen.append(what),
        )
        results = sim.run(train)
        assert isinstance(results[1], Crashed)
        assert results[0].peers == {1}
        assert any(what.startswith("fault: Crash") for what in seen)

    def test_two_at_once_are_both_named_by_all(self):
        results = Simulation(5, seed=1, faults=[Crash(1, at=0.5), Crash(3, at=0.5)]).run(train)
        survivors = [result.peers for result in results if isinstance(result, PeerLost)]
        assert len(survivors) == 3
        assert all(peers <= {1, 3} for peers in survivors)

    def test_what_is_still_to_do_on_the_dead_rank_never_runs(self):
        done = []

        async def main(comm):
            async def later():
                await asyncio.sleep(1)
                done.append(comm.rank)

            await asyncio.gather(later(), later())
            try:
                await comm.barrier()
            except BaseException:
                await asyncio.sleep(0)
                done.append("caught")
                raise

        Simulation(3, faults=[Crash(1, at=0.5)]).run(main)
        assert sorted(map(str, done)) == ["0", "0", "2", "2", "caught", "caught"]

    def test_the_survivors_shrink_and_go_on(self):
        async def main(comm):
            try:
                return await train(comm)
            except PeerLost:
                smaller = await comm.shrink()
                return smaller.ranks, await smaller.allreduce(comm.rank)

        results = Simulation(4, seed=2, faults=[Crash(1, at=0.5)]).run(main)
        assert [results[rank] for rank in (0, 2, 3)] == [((0, 2, 3), 5)] * 3


class TestRestart:
    def test_all_ranks_start_again_and_go_on_from_what_they_had_saved(self):
        saved = {"step": 0}
        began = []

        async def main(comm):
            first = await comm.broadcast(saved["step"] if comm.rank == 0 else None)
            began.append(first)
            for step in range(first, 20):
                await asyncio.sleep(0.1)
                assert await comm.allreduce(1) == 3
                if comm.rank == 0:
                    saved["step"] = step + 1
            return step

        sim = Simulation(3, seed=4, faults=[Restart(2, at=1.0)])
        assert sim.run(main) == [19] * 3
        assert sim.generation == 1
        assert began[:3] == [0] * 3
        assert len(set(began[3:])) == 1
        assert 0 < began[3] < 15


class TestStall:
    def test_one_shorter_than_the_liveness_timeout_is_no_loss(self):
        sim = Simulation(3, faults=[Stall(1, 4.5, at=0.5)], conditions=QUICK)
        assert sim.run(train) == [3.0] * 3
        assert sim.time > 6.0

    def test_one_for_good_is_noticed_after_the_liveness_timeout(self):
        ends = {}

        async def main(comm):
            try:
                await train(comm)
            finally:
                ends[comm.rank] = asyncio.get_running_loop().time()

        sim = Simulation(4, faults=[Stall(3, at=0.5)], conditions=QUICK, liveness_timeout=2.0)
        results = sim.run(main)
        assert isinstance(results[3], Stopped)
        assert [result.peers for result in results[:3]] == [{3}] * 3
        assert all(2.5 <= ends[rank] < 3.0 for rank in range(3))

    def test_one_that_ends_too_late_names_itself(self):
        sim = Simulation(4, faults=[Stall(3, 20.0, at=0.5)], conditions=QUICK, liveness_timeout=2.0)
        results = sim.run(train)
        assert [result.peers for result in results] == [{3}] * 4
        assert "evicted" in results[3].reason

    def test_none_of_the_ranks_tasks_runs_meanwhile(self):
        ticks = []

        async def main(comm):
            async def tick():
                for _ in range(40):
                    await asyncio.sleep(0.1)
                    if comm.rank == 1:
                        ticks.append(asyncio.get_running_loop().time())

            async with asyncio.TaskGroup() as group:
                group.create_task(tick())
            await comm.barrier()

        assert Simulation(2, faults=[Stall(1, 2.0, at=1.05)], conditions=PLAIN).run(main) == [None, None]
        assert not [now for now in ticks if 1.05 < now < 3.05]
        assert len(ticks) == 40

    def test_without_a_liveness_timeout_a_stopped_rank_hangs_the_others(self):
        sim = Simulation(2, faults=[Stall(1, at=0.5)], timeout=None, liveness_timeout=None)
        with pytest.raises(Stuck, match=r"rank 0 waits in allreduce #\d+"):
            sim.run(train)


class TestCut:
    @pytest.mark.parametrize("how", ["fin", "rst", "stall"])
    def test_one_of_the_two_is_given_up_by_all_and_names_itself(self, how):
        results = Simulation(5, faults=[Cut(1, 3, how, at=0.5)], conditions=QUICK).run(train)
        peers = {result.peers for result in results}
        assert peers == {frozenset([3])}

    def test_a_stall_that_ends_in_time_is_no_loss(self):
        sim = Simulation(3, faults=[Cut(0, 1, "stall", 4.0, at=0.5)], conditions=QUICK)
        assert sim.run(train) == [3.0] * 3

    def test_those_who_heard_the_goodbye_do_not_wait_for_one_who_did_not(self):
        # Rank 0 has done its part and left. Rank 2 has not heard of it, gives rank 0 up, and passes nothing on to rank 6.
        async def main(comm):
            await asyncio.sleep(1.0 if comm.rank == 0 else 0.0)
            await comm.barrier()

        sim = Simulation(8, faults=[Cut(0, 2, "stall", 10.0, after=1)], timeout=None, conditions=PLAIN)
        results = sim.run(main)
        assert results[0] is None
        assert isinstance(results[2], PeerLost)
        assert all(result is None or result.peers == {0} for result in results)


class TestPartition:
    async def main(self, comm):
        try:
            return await train(comm)
        except PeerLost:
            smaller = await comm.shrink()
            return await smaller.allgather(comm.rank)

    @pytest.mark.parametrize("side", [{3}, {0}, {2, 3}, {0, 3}])
    def test_the_larger_side_goes_on_or_of_equal_ones_that_with_rank_0(self, side):
        results = Simulation(4, faults=[Partition(frozenset(side), at=0.5)], conditions=QUICK).run(self.main)
        sides = [sorted(side), sorted(set(range(4)) - side)]
        larger = max(sides, key=lambda ranks: (len(ranks), -min(ranks)))
        for rank, result in enumerate(results):
            if rank in larger:
                assert result == larger
            else:
                assert isinstance(result, PeerLost)
                assert result.peers == set(larger)


class TestOtherFaults:
    def test_a_cancelled_rank_ends_the_operation_everywhere(self):
        results = Simulation(3, seed=1, faults=[Cancel(1, after=10)]).run(train)
        assert isinstance(results[1], asyncio.CancelledError)
        assert any(isinstance(result, CollectiveCancelled) and result.origin == 1 for result in results)

    def test_a_slow_rank_takes_longer_and_the_sums_are_right(self):
        times = []
        for faults in ([], [Slow(1, at=0.0)]):
            sim = Simulation(3, seed=1, faults=faults, conditions=PLAIN)
            assert sim.run(train) == [3.0] * 3
            times.append(sim.time)
        assert times[1] > times[0]

    def test_a_fault_that_comes_too_late_does_not_strike(self):
        sim = Simulation(2, faults=[Crash(1, at=100.0)], conditions=PLAIN)
        assert sim.run(train) == [1.0] * 2
        assert sim.time < 10
        assert not sim.struck


class TestStuck:
    def test_a_program_that_hangs_is_told_with_what_it_waits_for(self):
        async def main(comm):
            if comm.rank == 1:
                await comm.barrier()
            else:
                await asyncio.get_running_loop().create_future()

        with pytest.raises(Stuck, match=r"rank 1 waits in barrier #0\. The run: Simulation\(2, seed=0"):
            Simulation(2, timeout=None).run(main)

    def test_one_that_never_ends_is_stuck_at_the_limit(self):
        async def main(comm):
            while True:
                await asyncio.sleep(100)

        with pytest.raises(Stuck, match="not over after 5000 virtual seconds"):
            Simulation(2, limit=5000).run(main)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "at least one rank"),
        ({"n": 2, "faults": "some"}, "faults='some' does not exist"),
        ({"n": 2, "faults": [Crash(2)]}, "ranks 0 to 1"),
        ({"n": 2, "faults": [Cut(1, 1)]}, "from itself"),
        ({"n": 2, "timeout": -1}, "timeout=-1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Simulation(**arguments)


@pytest.mark.parametrize("moment", [{"at": -1}, {"after": 0}, {"at": float("nan")}])
def test_a_fault_has_a_moment_that_can_come(moment):
    with pytest.raises(ValueError, match="is not a number of"):
        Crash(0, **moment)
