"""``safe=True``: arrays and plain values as ever, and not one pickle, in either direction."""

import pickle

import numpy as np
import pytest
from ranks import on_all, outcomes

from asynccoll import CollectiveMismatch, RemoteError

PLAIN = [None, True, -(2**63), 1.5, "text", b"bytes", [1, [2.0, None]], {"a": {"b": [1]}, 7: "seven"}]


@pytest.fixture
def no_pickle(monkeypatch):
    """Any use of pickle fails from here on."""

    def refuse(*args, **options):
        raise AssertionError("pickle was used")

    for name in ("dumps", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


async def test_plain_values_go_through_every_verb(world, no_pickle):
    async with world(3, safe=True) as comms:
        for value in PLAIN:
            assert await on_all(
                comms, lambda comm, value=value: comm.broadcast(value if comm.rank == 1 else None, 1)
            ) == [value] * len(comms)
            assert await on_all(comms, lambda comm, value=value: comm.allgather(value)) == [
                [value] * len(comms)
            ] * len(comms)
        assert await on_all(comms, lambda comm: comm.allreduce([comm.rank])) == [
            list(range(len(comms)))
        ] * len(comms)
        assert await on_all(
            comms, lambda comm: comm.allreduce(2 if comm.rank < 9 else 1, lambda a, b: a * b)
        ) == [2 ** min(len(comms), 9)] * len(comms)
        last = len(comms) - 1
        assert (await on_all(comms, lambda comm: comm.gather(comm.rank)))[0] == list(range(len(comms)))
        assert await on_all(comms, lambda comm: comm.scan(str(comm.rank), lambda a, b: a + b)) == [
            "".join(map(str, range(rank + 1))) for rank in range(len(comms))
        ]
        await comms[0].send({"to": last}, last)
        assert await comms[last].recv(0) == {"to": last}


async def test_arrays_are_as_ever(world, no_pickle):
    async with world(3, safe=True) as comms:
        size = len(comms)
        results = await on_all(comms, lambda comm: comm.allreduce(np.full((3, 5), comm.rank, "f2").T))
        assert all((result == sum(range(size))).all() for result in results)
        gathered = await on_all(comms, lambda comm: comm.allgather(np.arange(comm.rank)))
        assert [[len(one) for one in row] for row in gathered] == [list(range(size))] * size


@pytest.mark.parametrize("value", [object(), {1, 2}, 2**80, lambda: 0, [np.zeros(2)], 1 + 2j])
async def test_what_needs_pickle_is_refused_here_and_told_elsewhere(world, no_pickle, value):
    async with world(2, safe=True) as comms:
        for call in (
            lambda c: c.allgather(value),
            lambda c: c.allreduce(value, max),
            lambda c: c.broadcast(value, c.rank),
        ):
            results = await outcomes(comms[:1], call)
            assert isinstance(results[0], TypeError)
            assert "safe=True" in str(results[0])
            others = await outcomes(comms[1:], lambda comm: comm.barrier())
            assert all(isinstance(error, RemoteError) for error in others)
        assert await on_all(comms, lambda comm: comm.allreduce(1)) == [len(comms)] * len(comms)


async def test_an_exception_travels_as_text_alone(world):
    async with world(2, safe=True) as comms:

        def divide(left, right):
            return left / 0

        for error in await outcomes(comms, lambda comm: comm.allreduce(1, divide)):
            assert type(error) is RemoteError
            assert (error.type_name, error.original) == ("ZeroDivisionError", None)
            assert "division by zero" in error.remote_traceback


async def test_tuples_arrive_as_lists(world):
    async with world(2, safe=True) as comms:
        assert await on_all(comms, lambda comm: comm.broadcast((1, (2,)) if comm.rank == 0 else None)) == [
            [1, [2]]
        ] * len(comms)


async def test_a_rank_that_pickles_does_not_get_through(world):
    async with world(2, safe=True) as comms, world(2) as others:
        comms[1]._place = others[1]._place  # as if it had been opened without
        for error in await outcomes(comms, lambda comm: comm.allgather("x")):
            assert type(error) is CollectiveMismatch
            assert error.field == "path"
            assert set(error.values.values()) == {"plain value", "object"}
        pending = comms[0].recv()
        comms[1].send({"a": 1}, 0)
        with pytest.raises(TypeError, match="no plain value"):
            await pending
        assert await on_all(comms, lambda comm: comm.barrier()) == [None] * len(comms)
