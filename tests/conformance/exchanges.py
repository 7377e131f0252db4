"""Helpers for gather, scatter and alltoall: values of many shapes, values that do not travel, ranks that disagree.

Knows what a failure must look like on every rank, not what the verbs return.
"""

import asyncio

import numpy as np
from faults import in_step, settle, turns
from ranks import outcomes

from asynccoll import CollectiveCancelled, CollectiveMismatch, RemoteError
from asynccoll.sim.driver import Conditions

SHAPES = ((0,), (), (3,), (2, 5), (600,), (4, 0, 3), (1, 1, 1), (40, 20))
"""Empty ones, a 0-d one, small ones, and some beyond 4 KiB as float64."""
BOUNDARIES = (4096, 1 << 16, 1 << 18, 1 << 20)
"""Bytes at which a payload leaves its description, uses up eager credit, fills a segment, and fills several."""
BULK = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 20)


class DoesNotPickle:
    def __reduce__(self):
        raise LookupError("kept at home")


class DoesNotUnpickle:
    """Pickles well, and raises where it is unpickled."""

    def __init__(self, size=0):
        self.size = size

    def __reduce__(self):
        return _explode, (bytes(self.size),)


def _explode(_):
    raise LookupError("made to fail")


def shaped(shape, number):
    return np.full(shape, float(number))


def unfit_outs(size):
    """Lists for ``out=`` where three float64 are to come from each of ``size`` ranks: what is wrong, as an error and its text."""
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    fitting = [np.zeros(3) for _ in range(size - 1)]
    twice = np.zeros(3)
    yield [np.zeros(3)], ValueError, "one per rank"
    yield [*fitting, np.zeros(3, np.float32)], TypeError, "float32"
    yield [*fitting, [0.0] * 3], TypeError, "must be an array"
    yield [*fitting, frozen], ValueError, "read-only"
    yield [*fitting[1:], twice, twice[1:]], ValueError, "same memory"
    yield np.zeros((size, 3)), TypeError, "must be a list"


async def disagree(comms, usual, odd, field):
    """One rank calls ``odd`` and all others ``usual``: every rank hears of it, with all values, and the mesh stays in step."""
    for place in sorted({0, 1, len(comms) - 1}):
        errors = await outcomes(comms, lambda comm, place=place: (odd if comm.rank == place else usual)(comm))
        for error in errors:
            assert type(error) is CollectiveMismatch, (field, place, error)
            assert error.field == field, (place, error)
            assert set(error.values) == set(range(len(comms)))
            assert len({repr(error.values[rank]) for rank in error.values}) > 1
    await in_step(comms)


async def refused_at(comms, rank, call, kind, says, wrong=None):
    """``call`` is refused on ``rank`` with ``kind``, and is a `RemoteError` of it on all others (who call ``wrong``, if given)."""
    errors = await outcomes(comms, lambda comm: (call if comm.rank == rank or wrong is None else wrong)(comm))
    for number, error in enumerate(errors):
        if number == rank:
            assert type(error) is kind, error
            assert says in str(error)
        else:
            assert type(error) is RemoteError, (number, error)
            assert (error.origin, error.type_name) == (rank, kind.__name__)
    await in_step(comms)


async def failed_at(comms, rank, works, kind, right):
    """It fails on ``rank`` while results are made of what arrived. Elsewhere it is a `RemoteError`, or the right result already."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for number, result in enumerate(results):
        if number == rank:
            assert type(result) is kind, result
        elif isinstance(result, BaseException):
            assert type(result) is RemoteError, (number, result)
            assert (result.origin, result.type_name) == (rank, kind.__name__)
        else:
            assert right(number, result), (number, result)
    await in_step(comms)


async def cancelled_by(comms, culprit, call, memory):
    """``call(comm)`` is cancelled on one rank, before all have called and in the middle of the transfer: it ends everywhere.

    ``memory(rank)``: the arrays that ``call`` has lent there. Nothing writes to the culprit's any more.
    """
    for pause in (0, 2, 5, 10, 20):
        callers = comms if pause else comms[:-1]
        works = [call(comm) for comm in callers]
        await turns(pause)
        ended = works[culprit].done()
        assert works[culprit].cancel() is not ended
        for array in memory(culprit):
            array[:] = 7  # as its owner may, now that it is his again
        results = await asyncio.gather(*works, return_exceptions=True)
        results += await outcomes(comms[len(callers) :], call)
        for rank, result in enumerate(results):
            if rank == culprit and not ended:
                assert isinstance(result, asyncio.CancelledError)
            elif isinstance(result, BaseException):
                assert type(result) is CollectiveCancelled
                assert result.origin == culprit
            else:
                assert pause, "a rank has returned before all had called"
        await settle()
        for array in memory(culprit):
            assert (array == 7).all()
        await in_step(comms)
