"""Helpers of the conformance suite: how many ranks there are, one function on all of them, and what each got."""

import asyncio

WORLD_SIZE = None
"""What ``--world-size`` says: the number of ranks of every world, whatever number a test asks for."""


def sizes(*usual):
    """The world sizes for a test that goes through several; the one of ``--world-size`` if there is that."""
    return usual if WORLD_SIZE is None else (WORLD_SIZE,)


def ordinary(usual, wide):
    """``usual``, or with ``--world-size`` what the same test can afford with so many ranks."""
    return usual if WORLD_SIZE is None else wide


def filled(comms, values):
    """One of ``values`` for each rank: the last one again and again where there are more ranks than values."""
    return [values[min(comm.rank, len(values) - 1)] for comm in comms]


def in_turn(comms, values):
    """The same, beginning anew where they end."""
    return [values[comm.rank % len(values)] for comm in comms]


def sum_of_ranks(comms):
    """0 + 1 + 2 + ..."""
    return sum(range(len(comms)))


async def on_all(comms, function):
    """``function(comm)`` on every rank at once; the results in rank order. The first failure is raised."""
    return await asyncio.gather(*(function(comm) for comm in comms))


async def outcomes(comms, function):
    """The same, with exceptions among the results."""
    return await asyncio.gather(*(function(comm) for comm in comms), return_exceptions=True)


async def each(comms, verb, values, *args, **options):
    """``verb`` with its own one of ``values`` on every rank at once; the results in rank order. The first failure is raised."""
    return await asyncio.gather(
        *(getattr(comm, verb)(value, *args, **options) for comm, value in zip(comms, values, strict=True))
    )
