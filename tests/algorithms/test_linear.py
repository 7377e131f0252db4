import numpy as np
import pytest

from asynccoll.algorithms import linear
from asynccoll.algorithms.check import prove
from asynccoll.algorithms.start import LINEAR, graph
from asynccoll.algorithms.steps import Finish, Recv, Send

SIZES = range(1, 71)
SMALL = (1, 2, 3, 4, 5, 8)


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_proved(size, counts):
    for count in counts(size):
        for segment in {count + 1, count // 3 + 1}:
            prove(lambda rank: linear.allreduce(rank, size, count, segment), size, count)  # noqa: B023


@pytest.mark.parametrize("size", SMALL)
def test_all_ranks_fold_in_rank_order_whoever_runs_ahead(size, execute, operands, folded):
    for count, segment in ((0, 1), (1, 1), (5, 2), (5, 9)):
        for favourite in range(size):
            schedules = [linear.allreduce(rank, size, count, segment) for rank in range(size)]
            outcome = execute(schedules, operands(size, count), favourite=favourite)
            assert [final.tolist() for final in outcome.finals] == [[folded(size)] * count] * size


@pytest.mark.parametrize("size", SIZES)
def test_steps_and_bytes_are_as_documented(size, execute):
    planes = [np.zeros(3) for _ in range(size)]
    schedules = [linear.allreduce(rank, size, 3, 3) for rank in range(size)]
    outcome = execute(schedules, [(plane, plane) for plane in planes])
    assert outcome.rounds == (2 if size > 1 else 0)
    assert outcome.sent == [3 * (size - 1)] + [3] * (size - 1)


@pytest.mark.parametrize("size", range(3, LINEAR + 1))
def test_its_messages_are_those_of_the_start_round(size):
    for rank in range(size):
        tells, hears = graph(rank, size)
        steps = list(linear.allreduce(rank, size, 1, 1))
        assert [step.peer for step in steps if isinstance(step, Send)] == [to for tos in tells for to in tos]
        assert [step.peer for step in steps if isinstance(step, Recv)] == list(hears)


def test_no_rank_runs_more_than_a_segment_ahead():
    assert list(linear.allreduce(1, 4, 6, 2)) == [
        Send(0, 0, 2),
        Send(0, 2, 4),
        Recv(0, 0, 2),
        Send(0, 4, 6),
        Recv(0, 2, 4),
        Recv(0, 4, 6),
    ]


def test_four_ranks_are_as_drawn():
    assert list(linear.allreduce(0, 4, 1, 1)) == [
        Recv(1, 0, 1, "higher"),
        Recv(2, 0, 1, "higher"),
        Recv(3, 0, 1, "higher"),
        Finish(0, 1),
        Send(1, 0, 1, final=True),
        Send(2, 0, 1, final=True),
        Send(3, 0, 1, final=True),
    ]
    assert list(linear.allreduce(2, 4, 1, 1)) == [Send(0, 0, 1), Recv(0, 0, 1)]


def test_nothing_is_sent_for_nothing():
    assert [list(linear.allreduce(rank, 5, 0, 8)) for rank in range(5)] == [[]] * 5
    assert list(linear.allreduce(0, 1, 4, 8)) == [Finish(0, 4)]
