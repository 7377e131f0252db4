import numpy as np
import pytest

from asynccoll.algorithms import binomial, tree
from asynccoll.algorithms.check import prove
from asynccoll.algorithms.steps import Finish, Recv, Send

SIZES = range(1, 71)
SMALL = (1, 2, 3, 4, 5, 6, 8, 13)


def segments(count):
    """Segment lengths worth proving: one segment, three with a rest, and (for few elements) one each."""
    return {count + 1, count // 3 + 1, 1} if count <= 33 else {count // 3 + 1}


def roots(size):
    return sorted({0, size // 3, size - 1})


@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_proved(size, counts):
    for count in counts(size):
        for segment in segments(count):
            prove(lambda rank: tree.allreduce(rank, size, count, segment), size, count)  # noqa: B023


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_is_proved(size, counts):
    for count in counts(size):
        for segment in segments(count):
            for root in roots(size):

                def schedule(rank):
                    return tree.broadcast(rank, size, root, count, segment)  # noqa: B023

                prove(schedule, size, count, origin=lambda element: root)  # noqa: B023


@pytest.mark.parametrize("size", SIZES)
def test_reduce_is_proved(size, counts):
    for count in counts(size):
        for segment in segments(count):
            for root in roots(size):

                def schedule(rank):
                    return tree.reduce(rank, size, root, count, segment)  # noqa: B023

                prove(schedule, size, count, wanted=lambda rank, element: rank == root)  # noqa: B023


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_is_proved(size, counts, parts, owner):
    for rows in counts(size):
        bounds = parts(size, rows, 2)
        has = owner(bounds)
        for segment in segments(2 * rows):
            prove(
                lambda rank: tree.reduce_scatter(rank, size, bounds, segment),  # noqa: B023
                size,
                2 * rows,
                wanted=lambda rank, element: has(element) == rank,  # noqa: B023
            )


@pytest.mark.parametrize("size", range(1, 20))
def test_broadcast_and_reduce_are_proved_from_every_root(size):
    for root in range(size):
        prove(lambda rank: tree.broadcast(rank, size, root, 3, 2), size, 3, origin=lambda element: root)  # noqa: B023
        prove(lambda rank: tree.reduce(rank, size, root, 3, 2), size, 3, wanted=lambda rank, _: rank == root)  # noqa: B023


@pytest.mark.parametrize("size", SMALL)
def test_allreduce_folds_in_rank_order_whoever_runs_ahead(size, execute, operands, folded):
    for count, segment in ((0, 1), (1, 1), (7, 2), (20, 1)):
        for favourite in range(size):
            schedules = [tree.allreduce(rank, size, count, segment) for rank in range(size)]
            outcome = execute(schedules, operands(size, count), favourite=favourite)
            assert [final.tolist() for final in outcome.finals] == [[folded(size)] * count] * size


@pytest.mark.parametrize("size", SMALL)
def test_reduce_gives_the_root_the_fold_in_rank_order(size, execute, operands, folded):
    for root in range(size):
        for favourite in (root, 0, size - 1):
            schedules = [tree.reduce(rank, size, root, 7, 2) for rank in range(size)]
            outcome = execute(schedules, operands(size, 7), favourite=favourite)
            assert outcome.finals[root].tolist() == [folded(size)] * 7


@pytest.mark.parametrize("size", SMALL)
def test_reduce_scatter_gives_each_rank_its_part_of_the_fold_in_rank_order(
    size, execute, operands, folded, parts
):
    for rows in (0, 1, 2 * size + 1):
        bounds = parts(size, rows)
        for favourite in range(size):
            schedules = [tree.reduce_scatter(rank, size, bounds, 2) for rank in range(size)]
            outcome = execute(schedules, operands(size, rows), favourite=favourite)
            for rank, (lo, hi) in enumerate(bounds):
                assert outcome.finals[rank][lo:hi].tolist() == [folded(size)] * (hi - lo)


@pytest.mark.parametrize("size", SMALL)
def test_broadcast_gives_everybody_the_roots_elements(size, execute):
    for root in range(size):
        planes = [np.full(7, rank) for rank in range(size)]
        schedules = [tree.broadcast(rank, size, root, 7, 2) for rank in range(size)]
        outcome = execute(schedules, [(plane, plane) for plane in planes])
        assert [final.tolist() for final in outcome.finals] == [[root] * 7] * size


@pytest.mark.parametrize("size", SMALL)
def test_allreduce_sums_numbers(size, execute):
    values = [np.arange(11, dtype=np.int64) * (rank + 1) ** 2 for rank in range(size)]
    schedules = [tree.allreduce(rank, size, 11, 4) for rank in range(size)]
    for final in execute(schedules, [(value, value) for value in map(np.copy, values)]).finals:
        np.testing.assert_array_equal(final, np.sum(values, axis=0))


@pytest.mark.parametrize("size", SIZES)
def test_steps_and_bytes_are_as_documented(size, execute):
    def run(verb, *arguments):
        planes = [np.zeros(2) for _ in range(size)]
        return execute(
            [verb(rank, size, *arguments) for rank in range(size)], [(plane, plane) for plane in planes]
        )

    depth = (size - 1).bit_length()
    allreduce = run(tree.allreduce, 2, 2)
    assert allreduce.rounds <= 2 * depth
    assert sum(allreduce.sent) == 2 * 2 * (size - 1)
    for root in roots(size):
        broadcast = run(tree.broadcast, root, 2, 2)
        assert broadcast.rounds <= depth
        assert sum(broadcast.sent) == 2 * (size - 1)
        assert broadcast.sent[root] <= 2 * depth
        reduce = run(tree.reduce, root, 2, 2)
        assert reduce.rounds <= depth + (root != 0)
        assert sum(reduce.sent) == 2 * (size - 1) + 2 * (root != 0)
    bounds = [(0, 0)] * (size - 1) + [(0, 2)]
    scattered = run(tree.reduce_scatter, bounds, 2)
    assert scattered.rounds <= depth + 1
    assert sum(scattered.sent) == 2 * (size - 1) + 2 * (size > 1)


@pytest.mark.parametrize("size", SMALL)
def test_no_element_is_computed_twice(size, execute, operands):
    outcome = execute([tree.allreduce(rank, size, 5, 2) for rank in range(size)], operands(size, 5))
    assert outcome.folds == (dict.fromkeys(range(5), size - 1) if size > 1 else {})


def test_the_root_sends_a_segment_down_before_it_takes_the_next():
    assert list(tree.allreduce(0, 2, 3, 2)) == [
        Recv(1, 0, 2, "higher"),
        Finish(0, 2),
        Send(1, 0, 2, final=True),
        Recv(1, 2, 3, "higher"),
        Finish(2, 3),
        Send(1, 2, 3, final=True),
    ]


def test_other_ranks_keep_segments_on_the_way_up_while_they_wait():
    steps = list(tree.allreduce(1, 4, 10, 1))
    ahead = steps.index(Recv(0, 0, 1))
    # Two hops to rank 0 at most, and two back: the fifth segment goes up before the first is awaited.
    assert steps[:ahead] == [Send(0, lo, lo + 1) for lo in range(5)]
    assert steps[ahead + 1] == Send(0, 5, 6)


def test_the_root_of_a_reduce_keeps_segments_on_the_way_up_while_it_waits():
    steps = list(tree.reduce(1, 4, 1, 10, 1))
    ahead = steps.index(Recv(0, 0, 1))
    assert steps[:ahead] == [Send(0, lo, lo + 1) for lo in range(5)]
    assert steps[ahead + 1] == Send(0, 5, 6)


@pytest.mark.parametrize("size", SIZES)
def test_families_agree_and_reach_everybody(size):
    for root in roots(size):
        families = [binomial.family(rank, size, root) for rank in range(size)]
        assert families[root][0] is None
        for rank, (parent, children) in enumerate(families):
            assert rank == root or rank in families[parent][1]
            assert all(families[child][0] == rank for child in children)
        assert sum(len(children) for _, children in families) == size - 1


@pytest.mark.parametrize("size", SIZES)
def test_a_subtree_is_a_block_of_ranks_and_the_largest_comes_first(size):
    families = [binomial.family(rank, size, 0) for rank in range(size)]

    def subtree(rank):
        return [rank, *(found for child in sorted(families[rank][1]) for found in subtree(child))]

    assert subtree(0) == list(range(size))
    for _, children in families:
        lengths = [len(subtree(child)) for child in children]
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("size", SIZES)
def test_a_branch_is_a_rank_and_the_branches_of_its_children_the_nearest_first(size):
    for root in {0, 1 % size, size // 2, size - 1}:
        for rank in range(size):
            _, children = binomial.family(rank, size, root)
            below = [binomial.branch(child, size, root) for child in children]
            below.sort(key=lambda branch: (branch[0] - root) % size)
            assert binomial.branch(rank, size, root) == [rank, *(one for branch in below for one in branch)]
        assert sorted(binomial.branch(root, size, root)) == list(range(size))


def test_family_of_eight_is_as_drawn():
    assert [binomial.family(rank, 8, 0) for rank in range(8)] == [
        (None, [4, 2, 1]),
        (0, []),
        (0, [3]),
        (2, []),
        (0, [6, 5]),
        (4, []),
        (4, [7]),
        (6, []),
    ]


def test_family_rotates_with_the_root():
    assert [binomial.family(rank, 5, 3) for rank in range(5)] == [
        (3, [1]),
        (0, []),
        (3, []),
        (None, [0, 2, 4]),
        (3, []),
    ]
