import numpy as np
import pytest

from asynccoll.algorithms import dissemination
from asynccoll.algorithms.check import prove

SIZES = range(1, 71)
SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 13)


@pytest.mark.parametrize("size", SIZES)
def test_after_the_rounds_every_rank_has_heard_from_all(size):
    graph = [dissemination.partners(rank, size) for rank in range(size)]
    heard = [{rank} for rank in range(size)]
    for number in range((size - 1).bit_length()):
        sources = [rounds[number][1] for rounds in graph]
        heard = [heard[rank] | heard[source] for rank, source in enumerate(sources)]
    assert heard == [set(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
def test_no_rank_has_heard_from_all_one_round_earlier(size):
    # The converse: the rounds are as few as they can be, so a round cut off would show in the test above.
    rounds = len(dissemination.partners(0, size))
    assert 2**rounds >= size
    assert size == 1 or 2 ** (rounds - 1) < size


@pytest.mark.parametrize("size", SIZES)
def test_both_ends_agree_on_every_edge(size):
    graph = [dissemination.partners(rank, size) for rank in range(size)]
    for rank, rounds in enumerate(graph):
        for number, (send_to, recv_from) in enumerate(rounds):
            assert rank not in (send_to, recv_from)
            assert graph[send_to][number][1] == rank
            assert graph[recv_from][number][0] == rank


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_powers_of_two_exchange_over_one_link_a_round(size):
    for rank in range(size):
        assert dissemination.partners(rank, size) == tuple(
            (rank ^ 2**number, rank ^ 2**number) for number in range(size.bit_length() - 1)
        )


def test_partners_of_other_sizes_are_at_powers_of_two_round_the_ring():
    assert dissemination.partners(0, 6) == ((1, 5), (2, 4), (4, 2))
    assert dissemination.partners(5, 6) == ((0, 4), (1, 3), (3, 1))
    assert dissemination.partners(0, 1) == ()


@pytest.mark.parametrize("size", SIZES)
def test_allgather_is_proved(size):
    prove(lambda rank: dissemination.allgather(rank, size), size, size, origin=lambda block: block)


@pytest.mark.parametrize("size", SIZES)
def test_allgather_takes_as_few_rounds_and_bytes_as_documented(size, execute):
    planes = [np.where(np.arange(size) == rank, rank, -1) for rank in range(size)]
    schedules = [dissemination.allgather(rank, size) for rank in range(size)]
    outcome = execute(schedules, [(plane, plane) for plane in planes])
    assert outcome.rounds == (size - 1).bit_length()
    assert outcome.sent == [size - 1] * size


@pytest.mark.parametrize("size", SMALL)
def test_allgather_puts_every_block_everywhere_whoever_runs_ahead(size, execute):
    for favourite in range(size):
        planes = [np.where(np.arange(size) == rank, rank, -1) for rank in range(size)]
        schedules = [dissemination.allgather(rank, size) for rank in range(size)]
        outcome = execute(schedules, [(plane, plane) for plane in planes], favourite=favourite)
        assert [final.tolist() for final in outcome.finals] == [list(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
def test_allgather_meets_the_partners(size):
    for rank in range(size):
        steps = list(dissemination.allgather(rank, size))
        pairs = dissemination.partners(rank, size)
        assert list(dict.fromkeys(step.peer for step in steps)) == list(
            dict.fromkeys(p for pair in pairs for p in pair)
        )
