"""Reduce functions declared associative: a tree, in rank order, by every rank's own function."""

import asyncio
import functools

import pytest
from ranks import on_all, outcomes

from asynccoll import CollectiveMismatch, RemoteError, associative


@associative
def join(left, right):
    left += right
    return left


@associative
def product(left, right):
    """2x2 matrices: associative, and no two of them commute."""
    (a, b), (c, d) = left
    (e, f), (g, h) = right
    return (a * e + b * g, a * f + b * h), (c * e + d * g, c * f + d * h)


@associative
def refuse(left, right):
    raise LookupError(f"not {left} and {right}")


def other(left, right):
    return left


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13])
async def test_it_folds_in_rank_order_whatever_the_brackets(world, size):
    async with world(size) as comms:
        size = len(comms)
        lists = [[rank] for rank in range(size)]
        assert (
            await on_all(comms, lambda comm: comm.allreduce(lists[comm.rank], join))
            == [list(range(size))] * size
        )
        assert lists == [[rank] for rank in range(size)]
        matrices = [((rank + 1, 2), (3, rank + 2)) for rank in range(size)]
        expected = functools.reduce(product.function, matrices)
        assert (
            await on_all(comms, lambda comm: comm.allreduce(matrices[comm.rank], product))
            == [expected] * size
        )
        for root in {0, size - 1, size // 2}:
            results = await on_all(comms, lambda comm, root=root: comm.reduce([comm.rank], join, root))
            assert results == [list(range(size)) if rank == root else None for rank in range(size)]


async def test_every_rank_gets_a_result_of_its_own(world):
    async with world(4) as comms:
        results = await on_all(comms, lambda comm: comm.allreduce([comm.rank], join))
        results[0].append("mine")
        assert all(result == list(range(len(comms))) for result in results[1:])


@pytest.mark.fixed_size("which rank folds which blocks")
async def test_what_it_raises_is_told_by_the_rank_that_combined(world):
    async with world(4) as comms:
        for error in await outcomes(comms, lambda comm: comm.allreduce(comm.rank, refuse)):
            assert type(error) is RemoteError
            assert error.type_name == "LookupError"
            assert error.origin in (0, 2)
        assert await on_all(comms, lambda comm: comm.allreduce(1)) == [4] * 4


@associative
def choosy(left, right):
    if left == [2]:
        raise ValueError("x")
    return left + right


@associative
def muddled(left, right):
    return len(right) if left == [2] else left + right


@pytest.mark.fixed_size("which rank folds which blocks")
async def test_what_one_rank_of_the_tree_raises_or_muddles_is_told_to_all_with_its_rank(world):
    async with world(4) as comms:
        for root in (None, 0, 3):
            for function, origin, kind, says in (
                (choosy, 2, "ValueError", "x"),  # rank 2 combines its own and that of rank 3
                (muddled, 0, "TypeError", "can only concatenate list"),  # where a number meets a list
            ):

                def call(comm, function=function, root=root):
                    if root is None:
                        return comm.allreduce([comm.rank], function)
                    return comm.reduce([comm.rank], function, root)

                for error in await outcomes(comms, call):
                    assert type(error) is RemoteError
                    assert (error.origin, error.type_name) == (origin, kind)
                    assert says in str(error)
                    assert "test_associative.py" in error.remote_traceback
                assert (
                    await on_all(comms, lambda comm: comm.allreduce([comm.rank], join)) == [[0, 1, 2, 3]] * 4
                )


async def test_functions_of_different_names_and_undeclared_ones_are_a_mismatch(world):
    async with world(3) as comms:
        for odd in (associative(other), other, "sum"):
            results = await outcomes(
                comms, lambda comm, odd=odd: comm.allreduce([1], odd if comm.rank == 1 else join)
            )
            for error in results:
                assert type(error) is CollectiveMismatch
                assert error.field == "op"
                assert str(error.values[0]).endswith("test_associative.join")
            assert await on_all(comms, lambda comm: comm.allreduce(1)) == [len(comms)] * len(comms)


async def test_a_cancel_in_the_middle_leaves_the_mesh_in_step(world):
    async with world(4) as comms:
        works = [comm.allreduce([comm.rank] * 10_000, join) for comm in comms]
        await asyncio.sleep(0)
        works[2].cancel()
        await asyncio.gather(*works, return_exceptions=True)
        assert await on_all(comms, lambda comm: comm.allreduce(1)) == [len(comms)] * len(comms)


@pytest.mark.parametrize(
    ("function", "error"), [(lambda a, b: a, ValueError), (functools.partial(max), TypeError), (3, TypeError)]
)
def test_a_function_needs_a_name_of_its_own(function, error):
    with pytest.raises(error, match="associative"):
        associative(function)


def test_its_name_is_shown():
    assert repr(join).endswith("test_associative.join)")
