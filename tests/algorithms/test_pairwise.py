import numpy as np
import pytest

from asynccoll.algorithms import pairwise
from asynccoll.algorithms.check import ScheduleError, prove
from asynccoll.algorithms.steps import Recv, Send

SIZES = range(1, 71)
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 13)


@pytest.mark.parametrize("size", SIZES)
def test_everybody_meets_everybody_else_exactly_once(size):
    for rank in range(size):
        met = [peer for peer in pairwise.partners(rank, size) if peer is not None]
        assert sorted(met) == [peer for peer in range(size) if peer != rank]


@pytest.mark.parametrize("size", SIZES)
def test_both_ends_agree_on_whom_they_meet_in_a_round(size):
    table = [pairwise.partners(rank, size) for rank in range(size)]
    for rank, met in enumerate(table):
        for number, peer in enumerate(met):
            assert peer is None or table[peer][number] == rank


@pytest.mark.parametrize("size", SIZES)
def test_there_are_as_few_rounds_as_there_can_be(size):
    for rank in range(size):
        met = pairwise.partners(rank, size)
        assert len(met) == (size - 1 + size % 2 if size > 1 else 0)
        assert met.count(None) == (size % 2 if size > 1 else 0)


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_is_proved(size):
    prove(
        lambda rank: pairwise.alltoall(rank, size),
        size,
        size * size,
        origin=lambda block: block // size,
        wanted=lambda rank, block: rank == block % size,
    )


def test_the_proof_sees_a_block_that_goes_to_the_wrong_rank():
    def astray(rank):
        for step in pairwise.alltoall(rank, 4):
            yield Send(step.peer, rank * 4, rank * 4 + 1, final=True) if type(step) is Send else step

    with pytest.raises(ScheduleError):
        prove(astray, 4, 16, origin=lambda block: block // 4, wanted=lambda rank, block: rank == block % 4)


@pytest.mark.parametrize("size", SMALL)
def test_every_block_arrives_whoever_runs_ahead(size, execute):
    blocks = np.arange(size * size)
    for favourite in range(size):
        planes = [np.where(blocks // size == rank, blocks, -1) for rank in range(size)]
        schedules = [pairwise.alltoall(rank, size) for rank in range(size)]
        outcome = execute(schedules, [(plane, plane) for plane in planes], favourite=favourite)
        for rank, final in enumerate(outcome.finals):
            assert final[rank::size].tolist() == list(range(rank, size * size, size))
        assert outcome.sent == [size - 1] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_sends_before_it_waits(size):
    for rank in range(size):
        steps = list(pairwise.alltoall(rank, size))
        assert [type(step) for step in steps] == [Send, Recv] * (size - 1)
        assert [step.peer for step in steps[::2]] == [step.peer for step in steps[1::2]]


def test_the_rounds_drawn_in_the_module_are_its_own():
    assert pairwise.partners(0, 6) == [5, 1, 2, 3, 4]
    assert pairwise.partners(3, 6) == [2, 5, 4, 0, 1]
    assert pairwise.partners(5, 6) == [0, 3, 1, 4, 2]
    assert pairwise.partners(0, 5) == [None, 1, 2, 3, 4]
