from itertools import islice

import numpy as np
import pytest

from asynccoll.algorithms import ring
from asynccoll.algorithms.check import prove
from asynccoll.algorithms.steps import Finish, Recv, Send

SIZES = range(1, 71)
SMALL = (1, 2, 3, 4, 5, 8, 13)


def first_operand(size, count):
    """Element -> rank whose operand is leftmost: that after the owner of the element's chunk."""
    owner = np.repeat(np.arange(size), [len(part) for part in np.array_split(np.arange(count), size)])
    return lambda element: (int(owner[element]) + 1) % size


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_proved(size, counts):
    for count in counts(size):
        for segment in {1, 2, max(1, count)} if size <= 16 else {max(1, count)}:
            prove(
                lambda rank: ring.allreduce(rank, size, count, segment),  # noqa: B023
                size,
                count,
                first=first_operand(size, count),
            )


@pytest.mark.parametrize("size", [2, 3, 17, 33])
def test_allreduce_in_segments_that_do_not_divide_a_chunk_is_proved(size):
    count = 7 * size + 3
    for segment in (2, 3, 5, 7, 8):
        prove(
            lambda rank: ring.allreduce(rank, size, count, segment),  # noqa: B023
            size,
            count,
            first=first_operand(size, count),
        )


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_is_proved(size, counts, parts, owner):
    for rows in counts(size):
        for inner in (1, 3) if size <= 16 else (1,):
            bounds = parts(size, rows, inner)
            has = owner(bounds)
            for segment in {1, 2, max(1, rows * inner)} if size <= 16 else {max(1, rows)}:
                prove(
                    lambda rank: ring.reduce_scatter(rank, size, bounds, segment),  # noqa: B023
                    size,
                    rows * inner,
                    first=lambda element: (has(element) + 1) % size,  # noqa: B023
                    wanted=lambda rank, element: has(element) == rank,  # noqa: B023
                )


@pytest.mark.parametrize("size", SIZES)
def test_reduce_is_proved(size, counts):
    for count in counts(size):
        for root in sorted({0, size // 3, size - 1}):
            for segment in {1, 2, max(1, count)} if size <= 16 else {max(1, count)}:
                prove(
                    lambda rank: ring.reduce(rank, size, root, count, segment),  # noqa: B023
                    size,
                    count,
                    first=first_operand(size, count),
                    wanted=lambda rank, element: rank == root,  # noqa: B023
                )


@pytest.mark.parametrize("size", range(1, 20))
def test_reduce_is_proved_to_every_root(size):
    count = 2 * size + 1
    for root in range(size):
        prove(
            lambda rank: ring.reduce(rank, size, root, count, 2),  # noqa: B023
            size,
            count,
            first=first_operand(size, count),
            wanted=lambda rank, element: rank == root,  # noqa: B023
        )


@pytest.mark.parametrize("size", SIZES)
def test_allgather_is_proved(size):
    prove(lambda rank: ring.allgather(rank, size), size, size, origin=lambda block: block)


@pytest.mark.parametrize("size", SMALL)
def test_every_chunk_is_folded_in_cyclic_order_whoever_runs_ahead(size, execute, operands, folded):
    for count in range(2 * size + 2):
        first = first_operand(size, count)
        expected = [folded(size, first(element)) for element in range(count)]
        for favourite in range(size):
            schedules = [ring.allreduce(rank, size, count, 1 + favourite % 3) for rank in range(size)]
            outcome = execute(schedules, operands(size, count), favourite=favourite)
            assert [final.tolist() for final in outcome.finals] == [expected] * size


@pytest.mark.parametrize("size", SMALL)
def test_allreduce_sums_numbers(size, execute):
    count = 3 * size + 1
    values = [np.arange(count, dtype=np.int64) * (rank + 1) ** 2 for rank in range(size)]
    schedules = [ring.allreduce(rank, size, count, 2) for rank in range(size)]
    outcome = execute(schedules, [(value, value) for value in map(np.copy, values)])
    for final in outcome.finals:
        np.testing.assert_array_equal(final, np.sum(values, axis=0))


@pytest.mark.parametrize("size", SMALL)
def test_reduce_scatter_leaves_each_rank_its_part_whoever_runs_ahead(size, execute, operands, folded, parts):
    for rows in (0, 1, size, 2 * size + 1):
        bounds = parts(size, rows, 2)
        for favourite in range(size):
            schedules = [ring.reduce_scatter(rank, size, bounds, 1 + favourite % 3) for rank in range(size)]
            outcome = execute(schedules, operands(size, 2 * rows), favourite=favourite)
            for rank, (lo, hi) in enumerate(bounds):
                expected = [folded(size, (rank + 1) % size)] * (hi - lo)
                assert outcome.finals[rank][lo:hi].tolist() == expected


@pytest.mark.parametrize("size", SMALL)
def test_reduce_gives_the_root_every_chunk_whoever_runs_ahead(size, execute, operands, folded):
    count = 2 * size + 1
    first = first_operand(size, count)
    expected = [folded(size, first(element)) for element in range(count)]
    for root in range(size):
        for favourite in (root, 0, size - 1):
            schedules = [ring.reduce(rank, size, root, count, 2) for rank in range(size)]
            outcome = execute(schedules, operands(size, count), favourite=favourite)
            assert outcome.finals[root].tolist() == expected


@pytest.mark.parametrize("size", SMALL)
def test_allgather_puts_every_block_everywhere(size, execute):
    planes = [np.where(np.arange(size) == rank, rank, -1) for rank in range(size)]
    outcome = execute(
        [ring.allgather(rank, size) for rank in range(size)], [(plane, plane) for plane in planes]
    )
    assert [final.tolist() for final in outcome.finals] == [list(range(size))] * size
    assert outcome.rounds == size - 1
    assert outcome.sent == [size - 1] * size


@pytest.mark.parametrize("size", SMALL)
def test_steps_and_bytes_are_as_documented(size, execute, operands):
    count = 4 * size
    schedules = [ring.allreduce(rank, size, count, 2) for rank in range(size)]
    outcome = execute(schedules, operands(size, count))
    assert outcome.rounds == 2 * (size - 1)
    assert outcome.sent == [2 * count * (size - 1) // size] * size


@pytest.mark.parametrize("size", SMALL)
def test_steps_and_bytes_of_the_halves_are_as_documented(size, execute, operands, parts):
    count = 4 * size
    bounds = parts(size, count)
    outcome = execute([ring.reduce_scatter(r, size, bounds, 2) for r in range(size)], operands(size, count))
    assert outcome.rounds == size - 1
    assert outcome.sent == [count - 4] * size
    for root in range(size):
        outcome = execute([ring.reduce(r, size, root, count, 2) for r in range(size)], operands(size, count))
        assert outcome.rounds == (size if size > 1 else 0)
        assert outcome.sent == [count - 4 * (rank == root) for rank in range(size)]


@pytest.mark.parametrize("size", SMALL)
def test_no_element_is_computed_twice(size, execute, operands):
    count = 2 * size + 1
    outcome = execute([ring.allreduce(rank, size, count, 2) for rank in range(size)], operands(size, count))
    assert outcome.folds == dict.fromkeys(range(count), size - 1) if size > 1 else not outcome.folds


@pytest.mark.parametrize("size", SIZES)
def test_chunks_are_split_as_array_split_does(size):
    for count in (0, 1, size - 1, size, size + 1, 1_000_003):
        parts = np.array_split(np.arange(count), size)
        bounds = [ring.chunk(index, size, count) for index in range(size)]
        assert [hi - lo for lo, hi in bounds] == [len(part) for part in parts]
        assert [lo for lo, _ in bounds] == [0, *(hi for _, hi in bounds[:-1])]


def test_empty_chunks_make_no_steps():
    steps = [step for rank in range(6) for step in ring.allreduce(rank, 6, 2, 9)]
    assert all(step.lo < step.hi for step in steps)
    assert sum(isinstance(step, Finish) for step in steps) == 2
    assert list(ring.allreduce(3, 4, 0, 9)) == []


def test_a_rank_alone_finishes_and_talks_to_nobody():
    assert list(ring.allreduce(0, 1, 5, 9)) == [Finish(0, 5)]
    assert list(ring.allgather(0, 1)) == []


def test_two_ranks_exchange_halves_twice():
    assert list(ring.allreduce(0, 2, 5, 9)) == [
        Send(1, 3, 5),
        Recv(1, 0, 3, "lower"),
        Finish(0, 3),
        Send(1, 0, 3, final=True),
        Recv(1, 3, 5),
    ]


def test_a_segment_goes_on_before_the_next_has_come():
    assert list(ring.allreduce(0, 2, 5, 2)) == [
        Send(1, 3, 5),
        Recv(1, 0, 2, "lower"),
        Finish(0, 2),
        Send(1, 0, 2, final=True),
        Recv(1, 2, 3, "lower"),
        Finish(2, 3),
        Send(1, 2, 3, final=True),
        Recv(1, 3, 5),
    ]


def test_steps_are_made_one_at_a_time():
    # A gigabyte over 4,096 ranks: the first steps come without the other eight thousand.
    first, second = islice(ring.allreduce(1, 4096, 1 << 28, 1 << 16), 2)
    assert first == Send(2, 0, 1 << 16)
    assert second == Recv(0, 4095 << 16, 4096 << 16, "lower")


def test_the_halves_of_two_ranks():
    assert list(ring.reduce_scatter(1, 2, [(0, 1), (1, 5)], 9)) == [
        Send(0, 0, 1),
        Recv(0, 1, 5, "lower"),
        Finish(1, 5),
    ]
    assert list(ring.reduce(1, 2, 0, 5, 9))[2:] == [Finish(3, 5), Send(0, 3, 5, final=True)]
    assert list(ring.reduce(0, 2, 0, 5, 9))[2:] == [Finish(0, 3), Recv(1, 3, 5)]
    assert list(ring.reduce_scatter(0, 1, [(0, 5)], 9)) == list(ring.reduce(0, 1, 0, 5, 9)) == [Finish(0, 5)]
