"""Folds of Python objects as programs: who folds, what travels, who hears of a failure."""

import functools

import pytest
from wires import Wires

from asynccoll.calls.received import Objects
from asynccoll.engine import wire
from asynccoll.engine.programs import folds
from asynccoll.errors import RemoteError
from asynccoll.objects import PICKLES

VALUES = Objects(PICKLES)


def pair(a, b):
    return f"({a}{b})"


def whole(total, ranks):
    return total


def run(make, values, fold=pair, finish=whole):
    """``make(rank)`` gives verb and argument; results by rank."""
    size = len(values)
    wires = Wires(size)
    for rank, value in enumerate(values):
        verb, argument = make(rank)
        mine = fold if rank == 0 else (lambda a, b: 1 / 0)  # only rank 0's function runs
        wires.start(rank, program=verb(VALUES.lent(value), rank, size, *argument, mine, finish, VALUES))
    wires.settle()
    wires.assert_idle()
    return wires, [wires.results(rank)[0] for rank in range(size)]


def to(root):
    return lambda rank: (folds.reduce, [root])


def scan(exclusive):
    return lambda rank: (folds.scan, [exclusive])


ALL = [to(0), to(2), scan(False), scan(True)]
IDS = ["reduce to 0", "reduce to 2", "scan", "exscan"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_reduce_folds_from_the_left_and_only_the_root_has_the_result(size):
    names = [str(rank) for rank in range(size)]
    for root in range(size):
        _, results = run(to(root), names)
        assert results == [functools.reduce(pair, names) if rank == root else None for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_each_rank_has_its_own_prefix(size):
    names = [str(rank) for rank in range(size)]
    right = [functools.reduce(pair, names[: rank + 1]) for rank in range(size)]
    assert run(scan(False), names)[1] == right
    assert run(scan(True), names)[1] == [None, *right[:-1]]


def test_a_fold_that_changes_its_left_operand_does_not_change_earlier_prefixes():
    def extend(a, b):
        a += b
        return a

    values = [[rank] for rank in range(4)]
    assert run(scan(False), values, extend)[1] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert run(scan(True), values, extend)[1] == [None, [0], [0, 1], [0, 1, 2]]
    assert values == [[0], [1], [2], [3]]


def test_results_are_finished_with_the_number_of_ranks_that_they_combine():
    def add(a, b):
        return a + b

    def average(total, ranks):
        return total / ranks

    values = [3, 5, 10, 2]
    assert run(to(1), values, add, average)[1] == [None, 5.0, None, None]
    assert run(scan(False), values, add, average)[1] == [3.0, 4.0, 6.0, 5.0]
    assert run(scan(True), values, add, average)[1] == [None, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("make", ALL[:1] + ALL[2:], ids=IDS[:1] + IDS[2:])
def test_with_one_rank_the_function_is_not_called(make):
    value = [1]
    _, (result,) = run(make, [value], lambda a, b: 1 / 0)
    assert result in ([1], None)
    assert result is not value


def test_an_exscan_does_not_use_the_last_value():
    wires, _ = run(scan(True), ["a", "b", "x" * 1000])
    assert sum(len(frame.payload) for frame in wires.sent(2, 0) if frame.kind == wire.DATA) == 0


def test_large_values_travel_too():
    values = [bytes([rank]) * 100_000 for rank in range(4)]
    assert run(to(3), values, lambda a, b: a + b)[1][3] == b"".join(values)
    for rank, prefix in enumerate(run(scan(False), values, lambda a, b: a + b)[1]):
        assert prefix == b"".join(values[: rank + 1])


@pytest.mark.parametrize("where", ["first fold", "last fold", "finish"])
@pytest.mark.parametrize("make", ALL, ids=IDS)
def test_a_function_that_raises_is_a_remote_error_on_every_rank(make, where):
    """Also on those whose part was done: they wait for rank 0's answer."""
    count = 0

    def fold(a, b):
        nonlocal count
        count += 1
        # An exscan of four folds twice, everything else three times.
        if where == "first fold" or (where == "last fold" and count == (2 if make is ALL[3] else 3)):
            raise LookupError("no such thing")
        return a + b

    def finish(total, ranks):
        if where == "finish":
            raise LookupError("no such thing")
        return total

    _, results = run(make, [1, 2, 3, 4], fold, finish)
    for rank, error in enumerate(results):
        assert isinstance(error, RemoteError), (rank, error)
        assert (error.origin, error.type_name, error.rank) == (0, "LookupError", rank)


class TestAllreduce:
    def run(self, values, fold, finish=whole):
        return run(lambda rank: (folds.allreduce, []), values, fold, finish)[1]

    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
    def test_it_goes_from_the_left_in_rank_order(self, size):
        results = self.run([f"{rank}" for rank in range(size)], lambda a, b: f"({a}{b})")
        expected = "0"
        for rank in range(1, size):
            expected = f"({expected}{rank})"
        assert results == [expected] * size

    def test_large_values_travel_too(self):
        results = self.run([[rank] * 50_000 for rank in range(4)], lambda a, b: a + b)
        assert results[3] == sorted(results[0])
        assert len(results[3]) == 200_000

    def test_every_rank_has_a_copy_of_its_own_and_no_input_is_changed(self):
        values = [[rank] for rank in range(3)]

        def extend(a, b):
            a += b
            return a

        results = self.run(values, extend)
        assert values == [[0], [1], [2]]
        assert results == [[0, 1, 2]] * 3
        assert len({id(result) for result in results}) == 3

    def test_with_one_rank_the_function_is_not_called(self):
        value = [1]
        (result,) = self.run([value], lambda a, b: 1 / 0)
        assert result == [1]
        assert result is not value

    def test_the_whole_is_finished_at_rank_0(self):
        assert self.run([1, 2, 6], lambda a, b: a + b, lambda total, ranks: total / ranks) == [3.0] * 3

    @pytest.mark.parametrize("where", ["fold", "finish"])
    def test_a_function_that_raises_is_a_remote_error_on_every_rank(self, where):
        def fails(*args):
            raise LookupError("no such thing")

        fold, finish = (fails, whole) if where == "fold" else (lambda a, b: a, fails)
        for rank, error in enumerate(self.run([1, 2, 3], fold, finish)):
            assert isinstance(error, RemoteError)
            assert (error.origin, error.type_name, error.rank) == (0, "LookupError", rank)
            assert "no such thing" in str(error)
