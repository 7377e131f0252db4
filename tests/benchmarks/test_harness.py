import asyncio
from pathlib import Path

import numpy as np
import pytest

from asynccoll.testing import local_world
from benchmarks import harness, report
from benchmarks.collectives import COLLECTIVES
from benchmarks.harness import LARGE, Plan, measure
from benchmarks.nccl_format import result_row
from benchmarks.peers import AsynccollPeer, Calls

FLOAT = np.dtype(np.float32)


class Wrong:
    """A library that gets one element wrong, on one rank."""

    def __init__(self, inner, rank):
        self.inner, self.rank = inner, rank

    def allreduce(self, buffers, op):
        right = self.inner.allreduce(buffers, op)

        def spoiled(call):
            async def calls(number):
                await call(number)
                if self.rank == 1:
                    buffers.recv[-1] += 1

            return calls

        return Calls(spoiled(right.out_of_place), spoiled(right.in_place))


class Idle:
    """A library that does nothing, fast."""

    def allreduce(self, buffers, op):
        async def nothing(number):
            pass

        return Calls(nothing, nothing)


async def measured(make_peers, size, plan):
    """The results of every rank of a world of two; ``make_peers(comm)`` gives (name, peer) pairs."""
    collective = COLLECTIVES["allreduce"]

    async def one(comm):
        buffers, wanted = collective.buffers("sum", size // 4, FLOAT, comm.rank, comm.world_size)
        calls = [(name, collective.calls(peer, buffers, "sum")) for name, peer in make_peers(comm)]
        return await measure(comm, calls, buffers, wanted, plan)

    async with local_world(2, transport="memory") as comms:
        return await asyncio.gather(*map(one, comms))


PLAN = Plan(rounds=3, iterations=2)


@pytest.mark.parametrize("size", [8, 4096, LARGE])
async def test_right_results_are_counted_right_and_every_round_gives_a_sample(size):
    ranks = await measured(lambda comm: [("asynccoll", AsynccollPeer(comm))], size, PLAN)
    for result in (rank["asynccoll"] for rank in ranks):
        assert result.iterations == 2
        for measurement in (result.out_of_place, result.in_place):
            assert measurement.wrong == 0
            assert len(measurement.samples) == 3
            assert measurement.seconds == sorted(measurement.samples)[1] > 0


@pytest.mark.parametrize("size", [8, LARGE])
async def test_one_wrong_element_on_one_rank_is_reported_by_all(size):
    ranks = await measured(lambda comm: [("wrong", Wrong(AsynccollPeer(comm), comm.rank))], size, PLAN)
    # Small: one checked call in each of 3 rounds. Large: each timed call and the one to warm up.
    checked = 3 if size < LARGE else 3 * (2 + 1)
    for rank in ranks:
        assert rank["wrong"].out_of_place.wrong == rank["wrong"].in_place.wrong == checked
    config = report.Config(
        "allreduce", 2, ("wrong",), (size,), "0(list)", "float", "sum", "auto", "uvloop", PLAN
    )
    line = result_row(report.row_of(config, size, size // 4, ranks[0]["wrong"])).split()
    assert line[8] == line[12] == str(checked)
    assert (
        report.wrong_elements(report.Report(config, {}, [], {"wrong": {size: ranks[0]["wrong"]}}))
        == 2 * checked
    )


async def test_a_result_that_is_never_written_is_wrong():
    ranks = await measured(lambda comm: [("idle", Idle())], 4096, PLAN)
    assert ranks[0]["idle"].out_of_place.wrong == 2 * 3 * 1024  # ranks, rounds, elements
    assert ranks[0]["idle"].in_place.wrong > 0


async def test_without_checks_nothing_is_claimed():
    ranks = await measured(lambda comm: [("idle", Idle())], 8, PLAN._replace(checks=0))
    assert ranks[0]["idle"].in_place.wrong is None


async def test_peers_take_turns_in_alternating_order():
    log = []

    class Logged(Idle):
        def __init__(self, name):
            self.name = name

        def allreduce(self, buffers, op):
            async def note(number):
                if not log or log[-1] != self.name:
                    log.append(self.name)

            return Calls(note, note)

    def peers(comm):
        # On one rank only: the ranks of this test share the log.
        return [("a", Logged("a")), ("b", Logged("b"))] if comm.rank == 0 else [("a", Idle()), ("b", Idle())]

    await measured(peers, 8, Plan(rounds=4, iterations=1))
    assert log == ["a", "b", "a", "b", "a"]  # a b | b a | a b | b a


@pytest.mark.parametrize(("average", "wanted"), [(0, 3.0), (1, 2.0), (2, 1.0), (3, 3.0)])
def test_ranks_are_combined_as_asked(average, wanted):
    bench = harness._Bench(
        None, COLLECTIVES["allreduce"].buffers("sum", 1, FLOAT, 0, 2)[0], None, Plan(average=average)
    )
    assert bench._combine(np.array([3.0, 1.0])) == wanted


async def test_ranks_agree_on_the_number_of_calls(monkeypatch):
    monkeypatch.setattr(harness, "_PILOT", 1e-6)
    ranks = await measured(
        lambda comm: [("asynccoll", AsynccollPeer(comm))], 8, Plan(rounds=1, seconds=0.002)
    )
    assert ranks[0]["asynccoll"].iterations == ranks[1]["asynccoll"].iterations >= 3


def test_the_harness_names_no_library():
    text = Path(harness.__file__).read_text()
    assert "gloo" not in text
    assert "torch" not in text
