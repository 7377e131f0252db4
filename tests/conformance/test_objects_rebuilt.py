"""A value that one rank alone cannot rebuild: an error on every rank, and the next operation is right."""

import numpy as np
import pytest
from faults import in_step
from ranks import outcomes

from asynccoll import RemoteError, pickling

MOST = 200
"""More than any verb below unpickles."""


class Fragile:
    """Unpickling it fails the ``left``-th time, wherever that is."""

    left = 0

    def __reduce__(self):
        return Fragile.made, ()

    @staticmethod
    def made():
        Fragile.left -= 1
        if Fragile.left == 0:
            raise LookupError("not here")
        return Fragile()


VERBS = {
    "allgather": lambda comm, value: comm.allgather(value),
    "allreduce": lambda comm, value: comm.allreduce(value, lambda a, b: a),
    "alltoall": lambda comm, value: comm.alltoall([value] * comm.world_size),
    "broadcast": lambda comm, value: comm.broadcast(value, 1),
    "exscan": lambda comm, value: comm.exscan(value, lambda a, b: a),
    "gather": lambda comm, value: comm.gather(value, 1),
    "reduce": lambda comm, value: comm.reduce(value, lambda a, b: b, 1),
    "scan": lambda comm, value: comm.scan(value, lambda a, b: b),
    "scatter": lambda comm, value: comm.scatter([value] * comm.world_size if comm.rank == 1 else None, 1),
}


@pytest.mark.fixed_size("tries each of so many unpicklings")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("verb", VERBS)
async def test_no_rank_has_a_result_if_one_cannot_rebuild_its_own(world, verb, large):
    """Each unpickling of the operation in turn is the one that fails."""
    async with world(3) as comms:
        for number in range(1, MOST):
            Fragile.left = number
            value = [Fragile(), np.zeros(50_000)] if large else Fragile()
            ends = await outcomes(comms, lambda comm, value=value: VERBS[verb](comm, value))
            if not any(isinstance(end, BaseException) for end in ends):
                break
            for rank, end in enumerate(ends):
                assert isinstance(end, LookupError | RemoteError), (number, rank, end)
            assert any(isinstance(end, RemoteError) and end.type_name == "LookupError" for end in ends)
            await in_step(comms)
        assert 1 < number < MOST


@pytest.mark.fixed_size("the memory of one rank is short")
@pytest.mark.parametrize("verb", ["allgather", "broadcast", "scatter"])
async def test_no_rank_has_a_result_if_one_has_no_memory_for_a_large_one(world, verb, monkeypatch):
    fresh, seen = pickling.fresh, 0

    def short(nbytes):
        nonlocal seen
        if nbytes > 1 << 21:
            seen += 1
            if seen == last:
                raise MemoryError(f"no {nbytes} bytes")
        return fresh(nbytes)

    monkeypatch.setattr(pickling, "fresh", short)
    async with world(3) as comms:
        for last in range(1, MOST):
            seen = 0
            value = {"x": np.zeros(1 << 19)}
            ends = await outcomes(comms, lambda comm, value=value: VERBS[verb](comm, value))
            if not any(isinstance(end, BaseException) for end in ends):
                break
            for rank, end in enumerate(ends):
                assert isinstance(end, MemoryError | RemoteError), (last, rank, end)
            await in_step(comms)
        assert 1 < last < MOST
