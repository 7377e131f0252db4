import numpy as np
import pytest

from asynccoll.algorithms import doubling
from asynccoll.algorithms.check import ScheduleError, prove
from asynccoll.algorithms.dissemination import partners
from asynccoll.algorithms.steps import Finish, Recv, Send

SIZES = range(1, 71)
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 13)
POWERS = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_proved(size, counts):
    for count in counts(size):
        for slab in {count + 1, count // 3 + 1}:
            prove(lambda rank: doubling.allreduce(rank, size, count, slab), size, count)  # noqa: B023


@pytest.mark.parametrize("size", SIZES[1:])
def test_it_is_a_hazard_without_snapshots(size):
    def lending(rank):
        steps = doubling.allreduce(rank, size, 1, 1)
        return [step._replace(snapshot=False) if isinstance(step, Send) else step for step in steps]

    with pytest.raises(ScheduleError, match="may not have been read"):
        prove(lending, size, 1)


@pytest.mark.parametrize("size", SMALL)
def test_all_ranks_fold_in_rank_order_whoever_runs_ahead(size, execute, operands, folded):
    for count, slab in ((0, 1), (1, 1), (5, 2), (5, 9)):
        for favourite in range(size):
            schedules = [doubling.allreduce(rank, size, count, slab) for rank in range(size)]
            outcome = execute(schedules, operands(size, count), favourite=favourite)
            assert [final.tolist() for final in outcome.finals] == [[folded(size)] * count] * size


@pytest.mark.parametrize("size", SMALL)
def test_allreduce_sums_numbers(size, execute):
    values = [np.arange(11, dtype=np.int64) * (rank + 1) ** 2 for rank in range(size)]
    schedules = [doubling.allreduce(rank, size, 11, 4) for rank in range(size)]
    for final in execute(schedules, [(value, value) for value in map(np.copy, values)]).finals:
        np.testing.assert_array_equal(final, np.sum(values, axis=0))


@pytest.mark.parametrize("size", SIZES)
def test_steps_and_bytes_are_as_documented(size, execute):
    planes = [np.zeros(3) for _ in range(size)]
    schedules = [doubling.allreduce(rank, size, 3, 3) for rank in range(size)]
    outcome = execute(schedules, [(plane, plane) for plane in planes])
    rounds = size.bit_length() - 1
    extras = size - 2**rounds
    if extras:
        assert rounds < outcome.rounds <= rounds + 2
    else:
        assert outcome.rounds == rounds
    folded = {rank for rank in range(2 * extras) if rank % 2}
    for rank, sent in enumerate(outcome.sent):
        assert sent == (3 if rank in folded else 3 * rounds + 3 * (rank + 1 in folded))


@pytest.mark.parametrize("size", POWERS)
def test_a_round_meets_the_disseminations_peer(size):
    for rank in range(size):
        peers = [step.peer for step in doubling.allreduce(rank, size, 1, 1) if isinstance(step, Send)]
        assert [(peer, peer) for peer in peers] == list(partners(rank, size))


@pytest.mark.parametrize("size", SMALL)
def test_no_step_is_longer_than_a_slab(size):
    for rank in range(size):
        steps = list(doubling.allreduce(rank, size, 10, 4))
        assert {step.hi - step.lo for step in steps} == {4, 2}


def test_six_ranks_are_as_drawn():
    def snap(peer):
        return Send(peer, 0, 1, snapshot=True)

    schedules = [list(doubling.allreduce(rank, 6, 1, 1)) for rank in range(6)]
    assert schedules[0] == [
        Recv(1, 0, 1, "higher"),
        snap(2),
        Recv(2, 0, 1, "higher"),
        snap(4),
        Recv(4, 0, 1, "higher"),
        Finish(0, 1),
        Send(1, 0, 1, final=True),
    ]
    assert schedules[1] == [Send(0, 0, 1), Recv(0, 0, 1)]
    assert schedules[5] == [
        snap(4),
        Recv(4, 0, 1, "lower"),
        snap(2),
        Recv(2, 0, 1, "lower"),
        Finish(0, 1),
    ]


def test_nothing_is_sent_for_nothing():
    assert [list(doubling.allreduce(rank, 5, 0, 8)) for rank in range(5)] == [[]] * 5
    assert list(doubling.allreduce(0, 1, 4, 8)) == [Finish(0, 4)]
