"""Frames for a peer that does not read wait their turn, untouched. See `queues`; how long each takes is the command's."""

import asyncio

import pytest

from asynccoll.engine.outbox import Outbox

from .common import LOOPS
from .queues import queue

COUNT = 2_000


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_none_is_lost_and_each_is_looked_at_once(loop, monkeypatch):
    looked_at = []
    gather = Outbox.gather

    def counted(box):
        # Each frame that waits is joined to the others by one call alone: the one that finds nothing offered to the socket.
        if not box.current:
            looked_at.append(len(box.control))
        return gather(box)

    monkeypatch.setattr(Outbox, "gather", counted)
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        _, waiting, heard = runner.run(queue(COUNT))
    assert heard == COUNT
    assert waiting > 40 * COUNT  # half of all, at least: the socket takes a few
    assert sum(looked_at) < 3 * (2 * COUNT)  # those of both ranks, and of what comes after
