"""What the suites of reduce, reduce_scatter, scan and exscan have in common: calls to sample, and ways to be cancelled.

Knows worlds and errors, not what a verb computes.
"""

import asyncio

import carriers
import numpy as np
from faults import in_step
from matrix import REDUCTIONS
from ranks import on_all, ordinary, outcomes

from asynccoll import CollectiveCancelled, RemoteError
from asynccoll.sim.driver import Conditions

WORLDS = (1, 2, 3, 4, 5, 8)
BULK = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 20)
LARGE = 100_003


def counts(size):
    """Numbers of elements around which an algorithm for ``size`` ranks could go wrong."""
    return ordinary([*range(2 * size + 2), 1000], [0, 1, size - 1, size + 1, 1000])


def sample(size, algorithms):
    """(op, dtype, count, algorithm, number): every op and dtype with every algorithm, the counts in turn."""
    number = 0
    for algorithm in algorithms:
        for op, dtype in REDUCTIONS:
            yield op, dtype, counts(size)[number % len(counts(size))], algorithm, number
            number += 1


def held(size, dtype, values, number, form="1-d"):
    """One array per rank in a container and layout of its own, with those bits."""
    names = [carriers.of_rank("mixed", rank, dtype, form, "new", number) for rank in range(size)]
    for rank, name in enumerate(names):
        if name.endswith("/expanded"):
            values[rank] = np.broadcast_to(values[rank][:1], values[rank].shape).copy()
    return [carriers.hold(name, dtype, bits) for name, bits in zip(names, values, strict=True)]


async def cancelled(comms, start, rank, through=lambda other: False):
    """``rank`` cancels right after the call: it ends for all, lent memory is free, and the mesh is in step.

    ``start(comm, memory)`` starts the operation, ``memory`` (a bytearray of 8 `LARGE` bytes) for its result. ``through(other)``:
    that rank needs nothing that ``rank`` sends late, so it may have its result.
    """
    memories = [bytearray(8 * LARGE) for _ in comms]
    works = [start(comm, memory) for comm, memory in zip(comms, memories, strict=True)]
    assert works[rank].cancel()
    results = await asyncio.gather(*works, return_exceptions=True)
    for at, error in enumerate(results):
        if at == rank:
            assert type(error) is asyncio.CancelledError
        elif isinstance(error, BaseException) or not through(at):
            assert type(error) is CollectiveCancelled, (at, error)
            assert error.origin == rank
    ended = [
        memory for memory, error in zip(memories, results, strict=True) if isinstance(error, BaseException)
    ]
    del works, results, error
    for memory in ended:
        memory.append(0)  # refused while there is a view of it
    await in_step(comms)


async def fail(comms, call):
    """``call(comm, function)`` with a function that raises: `RemoteError` everywhere, and the mesh is in step."""

    def choke(a, b):
        raise LookupError(f"cannot join {a} and {b}")

    for error in await outcomes(comms, lambda comm: call(comm, choke)):
        assert type(error) is RemoteError, error
        assert error.origin == 0
        assert error.type_name == "LookupError"
        assert "cannot join" in str(error)
    await in_step(comms)


async def refused(comms, call, kind, text):
    """A wrong argument is an error of that kind, which says what to do, on every rank that passes it; and the mesh is in step."""
    for error in await outcomes(comms, call):
        assert type(error) is kind, error
        assert text in str(error), error
    await in_step(comms)


async def all_bits(comms, start, repeats):
    """Bytes of the results of each rank, over so many calls one after the other and at once."""

    async def rank(comm):
        found = [await start(comm) for _ in range(repeats)]
        found += await asyncio.gather(*(start(comm) for _ in range(repeats)))
        return {b"" if result is None else carriers.bits(result).tobytes() for result in found}

    return await on_all(comms, rank)
