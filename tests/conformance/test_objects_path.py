"""Reductions of Python values: a strict left fold in rank order at rank 0, exact, on copies."""

import asyncio
import copy
import decimal
import fractions
import functools
import itertools
import operator
from collections import Counter

import numpy as np
import pytest
import torch
from faults import in_step, in_virtual_time
from ranks import each, filled, in_turn, on_all, ordinary, outcomes, sizes, sum_of_ranks

from asynccoll import CollectiveMismatch, RemoteError, associative
from asynccoll.sim.driver import Conditions

ALGORITHMS = ("auto", "ring", "tree", "doubling")


def pair(a, b):
    return f"({a}{b})"


@pytest.mark.parametrize("size", [*range(1, 10), 13, 16, 17, 33])
async def test_the_fold_is_strictly_from_the_left_in_rank_order(world, size):
    names = [f"r{rank} " for rank in range(size)]
    async with world(size) as comms:
        for algorithm in ALGORITHMS:
            results = await each(comms, "allreduce", names, pair, algorithm=algorithm)
            assert results == [functools.reduce(pair, names)] * size, algorithm


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
async def test_functions_that_do_not_commute_see_the_ranks_in_order(world, size):
    rng = np.random.default_rng(size)
    matrices = [rng.integers(-3, 4, (2, 2)) for _ in range(size)]
    async with world(size) as comms:
        products = await each(comms, "allreduce", matrices, np.matmul)
        for product in products:
            np.testing.assert_array_equal(product, functools.reduce(np.matmul, matrices))
        differences = await each(comms, "allreduce", [2.0**rank for rank in range(size)], operator.sub)
        assert differences == [functools.reduce(operator.sub, [2.0**rank for rank in range(size)])] * size
        first = await each(comms, "allreduce", list(range(size)), lambda a, b: a)
        assert first == [0] * size


def times(left, right):
    """2x2 matrices of Python integers: exact, and no two of these commute."""
    (a, b), (c, d) = left
    (e, f), (g, h) = right
    return (a * e + b * g, a * f + b * h), (c * e + d * g, c * f + d * h)


def chained(left, right):
    left += right
    return left


ASSOCIATIVE = {times: associative(times), chained: associative(chained)}


async def test_every_fold_is_that_of_functools_reduce_in_rank_order(world):
    """W from 1 to 33, by every verb that folds, for functions without laws and for those that are declared associative."""
    kinds = (
        (pair, lambda rank: f"r{rank}"),
        (times, lambda rank: ((rank + 1, 2), (3, rank - 5))),
        (chained, lambda rank: [rank]),
    )
    for size in sizes(*(range(1, 34) if in_virtual_time() else (2, 3, 5, 8, 13))):
        async with world(size) as comms:
            for function, make in kinds:
                values = [make(rank) for rank in range(size)]
                prefixes = list(itertools.accumulate(values, copied(function)))
                total, root = prefixes[-1], (5 * size + 1) % size
                assert total == functools.reduce(copied(function), values)
                for op in filter(None, (function, ASSOCIATIVE.get(function))):

                    async def rank(comm, op=op, values=values, root=root):
                        return await asyncio.gather(
                            comm.allreduce(values[comm.rank], op),
                            comm.reduce(values[comm.rank], op, root),
                            comm.scan(values[comm.rank], op),
                            comm.exscan(values[comm.rank], op),
                        )

                    for at, found in enumerate(await on_all(comms, rank)):
                        before = prefixes[at - 1] if at else None
                        assert found == [total, total if at == root else None, prefixes[at], before], (
                            size,
                            op,
                            at,
                        )
                assert values == [make(rank) for rank in range(size)]


def copied(function):
    """It, on a copy of its first argument."""
    return lambda left, right: function(copy.copy(left), right)


async def test_only_rank_0_calls_its_function(world):
    calls = []
    async with world(4) as comms:

        def function_of(rank):
            def add(a, b):
                calls.append((rank, a, b))
                return a + b

            return add

        results = await on_all(comms, lambda c: c.allreduce(10**c.rank, function_of(c.rank)))
        ones = [int("1" * (comm.rank + 1)) for comm in comms]
        assert results == [ones[-1]] * len(comms)
        assert calls == [(0, one, 10 ** (n + 1)) for n, one in enumerate(ones[:-1])]


@pytest.mark.fixed_size("a world of one")
async def test_in_a_world_of_one_the_function_is_not_called(world):
    async with world(1) as comms:
        value = {"a": [1]}
        (result,) = await each(comms, "allreduce", [value], lambda a, b: 1 / 0)
        assert result == value
        assert result is not value
        assert result["a"] is not value["a"]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_integers_are_exact_beyond_64_bits(world, size):
    async with world(size) as comms:
        values = [2**63 + rank for rank in range(size)]
        total, product = sum(values), functools.reduce(operator.mul, values)
        assert await each(comms, "allreduce", values) == [total] * size
        assert await each(comms, "allreduce", values, "prod") == [product] * size
        assert await each(comms, "allreduce", [-(10**200)] * size) == [-(10**200) * size] * size


NAMED = [
    ("sum", [1, 2, 3], 6),
    ("sum", [0.1, 0.2, 0.3], (0.1 + 0.2) + 0.3),
    ("sum", [1, 0.5, True], 2.5),
    ("sum", ["a", "b", "c"], "abc"),
    ("sum", [[0], [1, 1], [2]], [0, 1, 1, 2]),
    ("sum", [(0,), (), (2,)], (0, 2)),
    ("sum", [b"x", b"y", b"z"], b"xyz"),
    ("sum", [Counter("aab"), Counter("bc"), Counter("c")], Counter(a=2, b=2, c=2)),
    ("sum", [fractions.Fraction(1, 3)] * 3, fractions.Fraction(1)),
    ("sum", [decimal.Decimal("0.1")] * 3, decimal.Decimal("0.3")),
    ("sum", [1j, 2j, 3], 3 + 3j),
    ("sum", [True, True, False], 2),
    ("avg", [1, 2, 6], 3.0),
    ("avg", [1, 2, 4], 7 / 3),
    ("avg", [2**60, 2**60, 2**60 + 3], (3 * 2**60 + 3) / 3),
    ("avg", [fractions.Fraction(1), 0, 1], fractions.Fraction(2, 3)),
    ("prod", [2, 3, 7], 42),
    ("prod", [0.1, 0.2, 0.3], (0.1 * 0.2) * 0.3),
    ("prod", [[1, 2], 2, 1], [1, 2, 1, 2]),
    ("min", [3, 1, 2], 1),
    ("max", ["b", "c", "a"], "c"),
    ("max", [[1], [1, 0], [0, 9]], [1, 0]),
    ("min", [1, True, 1.0], 1),
    ("max", [True, 1, 1.0], True),
    ("band", [7, 14, 6], 6),
    ("bor", [1, 2, 4], 7),
    ("bxor", [1, 3, 8], 10),
    ("band", [True, False, True], False),
    ("bor", [{1}, {2}, {1, 3}], {1, 2, 3}),
    ("band", [{1, 2, 3}, {2, 3}, {3, 2, 9}], {2, 3}),
    ("bxor", [{1}, {1, 2}, {3}], {2, 3}),
    ("bor", [{"a": 1}, {"b": 2}, {"a": 3}], {"a": 3, "b": 2}),
    ("bor", [Counter("aab"), Counter("bb"), Counter("a")], Counter(a=2, b=2)),
]


FOLDS = {
    "sum": operator.add,
    "avg": operator.add,
    "prod": operator.mul,
    "min": lambda a, b: min(a, b),
    "max": lambda a, b: max(a, b),
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}


@pytest.mark.parametrize(("op", "values", "right"), NAMED)
async def test_named_ops_are_those_of_python(world, op, values, right):
    async with world(3) as comms:
        values = filled(comms, values)
        if len(comms) > 3:
            right = functools.reduce(FOLDS[op], values)
            right = right / len(comms) if op == "avg" else right
        results = await each(comms, "allreduce", values, op)
    for result in results:
        assert (type(result), result) == (type(right), right)


async def test_plain_buffers_of_bytes_and_strings_are_objects(world):
    async with world(2) as comms:
        size = len(comms)
        for first, second in ((bytearray(b"ab"), bytearray(b"c")), (np.str_("ab"), np.str_("c"))):
            values = filled(comms, [first, second])
            assert await each(comms, "allreduce", values) == [first + second * (size - 1)] * size


async def test_sets_join_by_a_lambda(world):
    async with world(3) as comms:
        values = in_turn(comms, [{1}, {2, 3}, {1, 4}])
        assert await each(comms, "allreduce", values, lambda a, b: a | b) == [{1, 2, 3, 4}] * len(comms)
        assert values == in_turn(comms, [{1}, {2, 3}, {1, 4}])


@pytest.mark.torch
async def test_a_function_of_arrays_gets_each_rank_as_it_is_and_decides_the_result(world):
    async with world(3) as comms:
        size = len(comms)
        arrays = in_turn(comms, [np.array([3, 1]), np.array([2, 5]), np.array([9, 0])])
        for result in await each(comms, "allreduce", arrays, np.maximum):
            assert result.tolist() == [9, 5]
        tensors = [torch.tensor([1.0, float(rank)]) for rank in range(size)]
        for result in await each(comms, "allreduce", tensors, torch.add):
            assert result.tolist() == [size, sum_of_ranks(comms)]
        ragged = [np.arange(rank) for rank in range(size)]
        joined = await each(comms, "allreduce", ragged, lambda a, b: np.concatenate([a, b]))
        assert [result.tolist() for result in joined] == [[n for r in range(size) for n in range(r)]] * size
        mixed = filled(comms, [1, "two", None])
        kinds = await each(comms, "allreduce", mixed, lambda a, b: [a, b])
        assert kinds == [functools.reduce(lambda a, b: [a, b], mixed)] * size


async def test_a_memoryview_reaches_a_function_as_what_it_is_or_not_at_all(world):
    """As raw bytes its elements would be gone, and any sum of them wrong."""
    async with world(2) as comms:
        views = [memoryview(np.array([1, 2], np.int32)) for _ in comms]
        results = await outcomes(
            comms, lambda c: c.allreduce(views[c.rank], lambda a, b: a.tolist() + b.tolist())
        )
        for result in results:
            assert result == [1, 2] * len(comms) or type(result) is TypeError, result


@pytest.mark.parametrize("size", [1, 2, 4])
async def test_a_function_that_changes_its_first_argument_does_not_reach_the_callers(world, size):
    def extend(a, b):
        a.extend(b)
        return a

    def update(a, b):
        a.update(b)
        return a

    def add(a, b):
        a += b
        return a

    def ruin(a, b):
        b.clear()
        a.append(0)
        return a

    async with world(size) as comms:
        for function, make, read in (
            (extend, lambda rank: [rank, [rank]], None),
            (update, lambda rank: {rank: [rank]}, None),
            (add, lambda rank: np.full(3, rank), lambda x: x.tolist()),
            (add, lambda rank: torch.full((3,), rank), lambda x: x.tolist()),
            (ruin, lambda rank: [rank], None),
            ("sum", lambda rank: [rank, [rank]], None),
            ("bor", lambda rank: {rank}, None),
        ):
            read = read or (lambda x: x)
            values = [make(rank) for rank in range(size)]
            results = await each(comms, "allreduce", values, function)
            assert [read(value) for value in values] == [read(make(rank)) for rank in range(size)]
            assert len({id(one) for one in values + results}) == 2 * size
            assert [read(result) for result in results] == [read(results[0])] * size
            others = [read(result) for result in results[1:]]
            if isinstance(results[0], list | set | dict):
                results[0].clear()
            else:
                results[0][:] = -1
            assert [read(result) for result in results[1:]] == others


async def test_no_verb_hands_a_function_the_callers_own_value(world):
    """The function changes both of its arguments; what was passed stays as it is, and no two results are one object."""

    def spoil(a, b):
        a.append(b.pop())
        return a

    cases = [(chained, lambda rank: [rank]), (ASSOCIATIVE[chained], lambda rank: [rank])]
    cases += [(spoil, lambda rank: [rank, rank]), (operator.iadd, lambda rank: np.full(3, rank))]
    cases += [("sum", lambda rank: [rank])]
    async with world(4) as comms:
        for (function, make), verb in itertools.product(cases, ("allreduce", "reduce", "scan", "exscan")):
            values = [make(rank) for rank in range(len(comms))]
            results = [one for one in await each(comms, verb, values, function) if one is not None]
            for rank, value in enumerate(values):
                np.testing.assert_array_equal(value, make(rank))
            assert len({id(one) for one in [*values, *results]}) == len(values) + len(results)
            kept = [copy.deepcopy(one) for one in results[1:]]
            results[0][:] = results[0][:0] if isinstance(results[0], list) else -1
            for one, before in zip(results[1:], kept, strict=True):
                np.testing.assert_array_equal(one, before)


async def test_parts_of_results_are_independent_too(world):
    async with world(3) as comms:
        results = await on_all(comms, lambda c: c.allreduce([[c.rank]]))
        right = [[rank] for rank in range(len(comms))]
        assert results == [right] * len(comms)
        results[0][1].append("mine")
        assert results[1:] == [right] * (len(comms) - 1)


@pytest.mark.parametrize("count", [1000, 5000, 70_000, 300_000])
async def test_values_of_every_size_are_folded(world, count):
    conditions = Conditions(delay=0.002, piece=1 << 16, split=True, buffer=1 << 19)
    async with world(4, conditions=conditions) as comms:
        count //= ordinary(1, 10)
        values = [bytes([rank]) * (count + rank) for rank in range(len(comms))]
        assert await each(comms, "allreduce", values) == [b"".join(values)] * len(comms)


async def test_many_folds_run_at_once_and_keep_apart(world):
    async with world(3) as comms:

        async def rank(comm):
            works = [comm.allreduce((number, comm.rank), lambda a, b: a + b) for number in range(50)]
            works += [comm.allreduce(np.full(3, number)) for number in range(50)]
            return await asyncio.gather(*works)

        size = len(comms)
        for results in await on_all(comms, rank):
            joined = [tuple(x for rank in range(size) for x in (n, rank)) for n in range(50)]
            assert results[:50] == joined
            assert [result.tolist() for result in results[50:]] == [[size * n] * 3 for n in range(50)]


async def test_what_a_function_raises_reaches_every_rank_and_the_next_operation_works(world):
    def choke(a, b):
        raise LookupError(f"cannot join {a} and {b}")

    async with world(3) as comms:
        for error in await outcomes(comms, lambda c: c.allreduce(c.rank, choke)):
            assert type(error) is RemoteError
            assert error.origin == 0
            assert error.type_name == "LookupError"
            assert "cannot join 0 and 1" in str(error)
        for error in await outcomes(comms, lambda c: c.allreduce("a" if c.rank == 1 else 1)):
            assert type(error) is RemoteError
            assert error.type_name == "TypeError"
        await in_step(comms)


async def test_objects_take_no_out_and_are_not_reduced_in_place(world):
    async with world(2) as comms:
        for attempt in (
            lambda c: c.allreduce([1], out=np.zeros(1)),
            lambda c: c.allreduce(np.ones(1), max, out=np.zeros(1)),
            lambda c: c.allreduce_([1]),
            lambda c: c.allreduce_(np.ones(1), max),
            lambda c: c.allreduce(1, 3.5),
        ):
            for error in await outcomes(comms, attempt):
                assert type(error) is TypeError, error
        for error in await outcomes(comms, lambda c: c.allreduce(1, "median")):
            assert type(error) is ValueError
            assert "median" in str(error)
        await in_step(comms)


async def test_a_callable_on_one_rank_and_a_name_on_another_is_a_mismatch(world):
    async with world(2) as comms:
        errors = await outcomes(comms, lambda c: c.allreduce([1], (lambda a, b: a) if c.rank else "sum"))
        for error in errors:
            assert type(error) is CollectiveMismatch
            assert error.field == "op"
            assert set(error.values) == set(range(len(comms)))
