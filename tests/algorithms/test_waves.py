import numpy as np
import pytest

from asynccoll.algorithms import ring, waves
from asynccoll.algorithms.check import prove
from asynccoll.algorithms.steps import Finish, Recv, Send

SIZES = range(1, 71)


def first_operand(size, count):
    """Element -> rank whose operand is leftmost: that after the owner of the element's chunk."""
    owner = np.repeat(np.arange(size), [len(part) for part in np.array_split(np.arange(count), size)])
    return lambda element: (int(owner[element]) + 1) % size


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_proved(size, counts):
    for count in counts(size):
        for segment in {1, 2, max(1, count)} if size <= 16 else {max(1, count)}:
            prove(
                lambda rank: waves.allreduce(rank, size, count, segment),  # noqa: B023
                size,
                count,
                first=first_operand(size, count),
            )


@pytest.mark.parametrize("size", [2, 3, 17, 33])
def test_segments_that_do_not_divide_a_chunk_are_proved(size):
    count = 7 * size + 3
    for segment in (2, 3, 5, 7, 8):
        prove(
            lambda rank: waves.allreduce(rank, size, count, segment),  # noqa: B023
            size,
            count,
            first=first_operand(size, count),
        )


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("segment", [1, 3, 1000])
def test_the_steps_are_those_of_the_ring_in_another_order(size, segment):
    # So each element is folded along the same chain of ranks, and has the ring's bits.
    for rank in range(size):
        for count in (size - 1, size, 7 * size + 3):
            mine = list(waves.allreduce(rank, size, count, segment))
            assert sorted(mine, key=repr) == sorted(ring.allreduce(rank, size, count, segment), key=repr)


def test_the_numeric_interpreter_agrees(execute):
    size, count = 5, 23
    inputs = np.random.default_rng(0).integers(-9, 9, (size, count))
    for favourite in range(size):
        planes = [(row.copy(), np.zeros(count, int)) for row in inputs]
        schedules = [waves.allreduce(rank, size, count, 2) for rank in range(size)]
        outcome = execute(schedules, planes, favourite=favourite)
        for final in outcome.finals:
            np.testing.assert_array_equal(final, inputs.sum(0))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_first_results_come_after_as_many_turns_as_there_are_ranks(size):
    segments = 20
    for rank in range(size):
        steps = list(waves.allreduce(rank, size, size * segments, 1))
        early = steps[: [type(step) for step in steps].index(Finish) + 1]
        assert sum(isinstance(step, Recv) for step in early) == size * (size - 1) // 2


@pytest.mark.parametrize("size", [3, 4])
def test_results_come_from_each_chunk_in_turn(size):
    steps = waves.allreduce(0, size, size * 10, 1)
    finals = [
        step.lo for step in steps if isinstance(step, Finish) or (isinstance(step, Recv) and not step.combine)
    ]
    assert len(finals) == len(set(finals)) == size * 10
    chunks = [lo // 10 for lo in finals]
    # Segments of one chunk come in order, and no chunk is more than the length of the ring ahead of another.
    for chunk in range(size):
        assert [lo for lo in finals if lo // 10 == chunk] == list(range(10 * chunk, 10 * chunk + 10))
    for end in range(len(chunks)):
        seen = [chunks[:end].count(chunk) for chunk in range(size)]
        assert max(seen) - min(seen) <= size


def test_one_rank_only_finishes():
    assert list(waves.allreduce(0, 1, 5, 2)) == [Finish(0, 2), Finish(2, 4), Finish(4, 5)]


def test_no_elements_make_no_steps():
    assert list(waves.allreduce(1, 3, 0, 4)) == []


def test_it_sends_what_the_ring_sends():
    for size in (2, 3, 5):
        sent = sum(
            step.hi - step.lo for step in waves.allreduce(1, size, 10 * size, 3) if isinstance(step, Send)
        )
        assert sent == 2 * 10 * (size - 1)
