"""The pytest plugin of the package: the fixture `asynccoll_world`. Knows how to hand it out, not how a world is made."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from asynccoll import Communicator

__all__ = ["asynccoll_world"]

World: TypeAlias = "Callable[..., AbstractAsyncContextManager[list[Communicator]]]"


@pytest.fixture
def asynccoll_world() -> World:
    """`asynccoll.testing.local_world`, checked: ``async with asynccoll_world(4) as comms:`` gives four ranks in the test's loop.

    The test fails if it leaves its block in good order while an operation is still under way on some rank: nobody would ever know
    what became of it.
    """
    from asynccoll.testing import local_world  # here, so that pytest runs which never ask do not load it

    @contextlib.asynccontextmanager
    async def world(n: int, **options: Any) -> AsyncIterator[list[Communicator]]:
        async with local_world(n, **options) as communicators:
            yield communicators
            left = {comm.rank: comm.pending() for comm in communicators if not comm.closed and comm.pending()}
        if left:
            pytest.fail(
                "operations were still under way at the end of the world: "
                + "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in left.items())
                + ". Await them, or cancel them."
            )

    return world
