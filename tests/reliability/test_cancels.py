"""A hundred cancels on each loop. See `cancels`; thousands by its command."""

import collections

import pytest

from asynccoll.pump import Pump

from . import cancels
from .cancels import MOMENTS, SIZES, WAYS, draw, run


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_they_surface_and_nothing_is_left(loop, monkeypatch):
    monkeypatch.setattr(cancels, "LIMIT", 10.0)  # several hangs are to be told before the test's own deadline
    first = {"asyncio": 0, "uvloop": 50}[loop]  # other numbers of ranks
    failures, moments = run(loop, range(first, first + 100))
    assert failures == []
    assert sum(moments.values()) == 100
    assert moments["before"] > 10
    assert moments["header"] + moments["payload"] > 10  # the others were complete before the moment came


def test_the_points_have_every_way_at_every_moment():
    points = [draw(number, 3) for number in range(1_000)]
    pairs = collections.Counter((point.way, point.moment) for point in points)
    assert set(pairs) == {(way, moment) for way in WAYS for moment in MOMENTS}
    assert {point.origin for point in points} == set(range(3))
    assert points == [draw(number, 3) for number in range(1_000)]
    assert len(SIZES) == 3


def test_a_cancel_that_is_lost_is_told(monkeypatch):
    way, expected = WAYS["cancel of the work"]

    async def lost(given):
        given.work = given.start()
        given.fire = lambda: None
        return await given.work

    monkeypatch.setitem(cancels.WAYS, "cancel of the work", (lost, expected))
    assert way is not lost
    failures, _ = run(
        "asyncio", [number for number in range(40) if draw(number, 2).way == "cancel of the work"]
    )
    assert failures
    assert all(
        "replay: python -m tests.reliability.cancels --loop asyncio --point" in text for text in failures
    )


def test_a_cancel_of_which_the_others_do_not_hear_is_told(monkeypatch):
    monkeypatch.setattr(Pump, "cancel", lambda pump, op: None)
    failures, _ = run("asyncio", range(20))
    assert any("got a result though it called after the cancel" in text for text in failures), failures


def test_what_is_left_over_is_told(monkeypatch):
    counts = cancels.counts
    calls = []

    def growing(comms):
        calls.append(comms)
        return {**counts(comms), "early": len(calls)}

    async def at_once():
        pass

    monkeypatch.setattr(cancels, "counts", growing)
    monkeypatch.setattr(cancels, "settle", at_once)
    failures, _ = run("asyncio", [0])
    assert "counts were" in failures[0]
