"""Folds of Python objects as programs: who folds, what travels, who hears of a failure."""

import functools

import numpy as np
import pytest
from wires import Wires, frame, operation

from asynccoll.calls.received import Objects
from asynccoll.engine import wire
from asynccoll.engine.programs import folds, items
from asynccoll.errors import ProtocolError, RemoteError
from asynccoll.objects import PICKLES, pack_control

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


class Watch(Objects):
    """Says when rank 0's own operand is copied, and what was snapshot."""

    def __init__(self):
        super().__init__(PICKLES)
        self.copied = 0
        self.made = []

    def own(self, item):
        self.copied += 1
        return super().own(item)

    def taken(self, value):
        self.made.append(super().taken(value))
        return self.made[-1]


class TestLargeArrays:
    """Values whose buffers are lent: the fold works on copies, made when it begins and not at the call."""

    COUNT = 1 << 18
    """Elements of 8 bytes: two slices of copying."""

    def values(self, size):
        return [np.full(self.COUNT, rank + 1) for rank in range(size)]

    @pytest.mark.parametrize("size", [1, 2, 3, 5])
    def test_no_input_is_changed_and_no_result_is_another_ranks_or_an_inputs_memory(self, size):
        def add(a, b):
            a += b
            return a

        values = self.values(size)
        total = size * (size + 1) // 2
        for make, right in (
            (lambda rank: (folds.allreduce, []), [total] * size),
            (to(0), [total] + [None] * (size - 1)),
            (to(size - 1), [None] * (size - 1) + [total]),
            (scan(False), [(rank + 1) * (rank + 2) // 2 for rank in range(size)]),
            (scan(True), [None] + [rank * (rank + 1) // 2 for rank in range(1, size)]),
        ):
            _, results = run(make, values, add)
            assert [None if result is None else int(result[0]) for result in results] == right
            kept = [result for result in results if result is not None]
            for number, result in enumerate(kept):
                assert (result == result[0]).all()
                assert result.flags.writeable
                assert not any(np.shares_memory(result, other) for other in values + kept[:number])
            assert [int(value[-1]) for value in values] == list(range(1, size + 1))

    def test_rank_0_copies_its_own_when_the_first_other_operand_is_there(self):
        wires, watch = Wires(2), Watch()
        values = self.values(2)
        wires.start(1, program=folds.allreduce(VALUES.lent(values[1]), 1, 2, None, whole, VALUES))
        wires.flush(1)
        wires.read(1, 0)
        wires.start(0, program=folds.allreduce(watch.lent(values[0]), 0, 2, np.add, whole, watch))
        assert watch.copied == 0
        wires.settle()
        assert watch.copied == 1
        assert wires.results(0)[0][0] == wires.results(1)[0][0] == 3

    def test_what_a_function_returns_is_sent_as_it_was_though_the_next_call_writes_there(self):
        shared = np.zeros(self.COUNT)

        def add(a, b):
            return np.add(a, b, out=shared)

        values = self.values(2)
        wires = Wires(2)
        for rank in range(2):
            for factor in (1, 10):
                item = VALUES.lent(values[rank] * factor)
                wires.start(rank, program=folds.allreduce(item, rank, 2, add, whole, VALUES))
        wires.settle()
        for rank in range(2):
            assert [(int(result[0]), int(result[-1])) for result in wires.results(rank)] == [(3, 3), (30, 30)]
            assert not any(np.shares_memory(result, shared) for result in wires.results(rank))

    @pytest.mark.parametrize("size", [2, 3, 5, 8])
    def test_unpickling_that_changes_what_it_got_does_not_change_what_is_sent(self, size):
        values = [Doubles(np.full(self.COUNT, rank + 1)) for rank in range(size)]
        _, results = run(lambda rank: (folds.allreduce, []), values, lambda a, b: a)
        for result in results:
            assert (result.array == 4).all()

    def test_the_tree_folds_on_copies_too(self):
        values = self.values(4)

        def add(a, b):
            a += b
            return a

        wires = Wires(4)
        for rank, value in enumerate(values):
            program = folds.allreduce(VALUES.lent(value), rank, 4, add, whole, VALUES, tree=True)
            wires.start(rank, program=program)
        wires.settle()
        for rank in range(4):
            assert (wires.results(rank)[0] == 10).all()
            assert (values[rank] == rank + 1).all()


class Doubles:
    """Its array is twice as large after each journey, in the memory that it came in."""

    def __init__(self, array):
        self.array = array

    def __setstate__(self, state):
        self.array = state["array"]
        self.array *= 2


@pytest.mark.parametrize("make", [lambda rank: (folds.allreduce, []), *ALL[:3]])
def test_a_description_that_does_not_fit_is_a_protocol_error(make):
    """What rank 1 says of its value: buffers of more bytes than there are in all."""
    wires = Wires(3, [0])
    verb, argument = make(0)
    op = wires.submit(0, operation(program=verb(VALUES.lent(1), 0, 3, *argument, pair, whole, VALUES)))
    message = items._encode(pack_control((100_000).to_bytes(8, "little")), 50_000, None)
    head = len(message).to_bytes(8, "little") + message
    wires.feed(0, 1, frame(wire.DATA, 0, head, flags=1))
    assert isinstance(op.error, ProtocolError)
    assert "50000 bytes" in str(op.error)


class Stays:
    """Pickles, and does not come back."""

    def __reduce__(self):
        return int, ("not a number",)


@pytest.mark.parametrize("make", [lambda rank: (folds.allreduce, []), *ALL[:3]])
def test_a_value_that_does_not_unpickle_is_named_by_the_rank_that_passed_it(make):
    _, results = run(make, [1, Stays(), 3])
    for error in results:
        original = error.original if isinstance(error, RemoteError) else error
        assert isinstance(original, ValueError)
        assert "by unpickling the value of rank 1" in "".join(original.__notes__)
