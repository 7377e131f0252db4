"""Helpers of the conformance suite: run one function on all ranks, and collect what each got."""

import asyncio


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
