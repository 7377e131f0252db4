"""Hundreds of each kind, tens of thousands of small operations. See `leaks`; the millions by its command."""

import asyncio
import socket

import pytest

from . import leaks
from .leaks import KINDS, run, slope


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept(kind):
    figures, wrong = run(kind, KINDS[kind].short, "uvloop")
    assert wrong == [], figures


@pytest.mark.parametrize("kind", ["groups", "cancels", "handshakes"])
def test_nothing_is_kept_on_the_other_loop(kind):
    figures, wrong = run(kind, KINDS[kind].short, "asyncio")
    assert wrong == [], figures


def leaking(monkeypatch, what):
    """Run barriers of which each leaves ``what`` behind."""
    kept = []

    async def step(comms, number):
        await asyncio.gather(*(comm.barrier() for comm in comms))
        kept.append(what(number))

    monkeypatch.setitem(KINDS, "small", KINDS["small"]._replace(step=step))
    try:
        return run("small", 500, "asyncio")
    finally:
        for one in kept:
            if hasattr(one, "close"):
                one.close()


@pytest.mark.parametrize(
    "what", [lambda number: [number], lambda number: 1000 + number], ids=["lists", "numbers"]
)
def test_a_single_object_for_each_operation_is_seen(what, monkeypatch):
    _, (wrong,) = leaking(monkeypatch, what)
    assert "blocks more" in wrong


def test_descriptors_are_seen(monkeypatch):
    _, wrong = leaking(monkeypatch, lambda number: socket.socket())
    assert any("descriptors were" in text for text in wrong)


def test_the_slope_is_that_of_the_second_half():
    numbers = list(range(100))
    assert slope(numbers, [7.0 * min(number, 40) for number in numbers]) == pytest.approx(0.0)
    assert slope(numbers, [3.0 * number for number in numbers]) == pytest.approx(3.0)


def test_a_slope_of_the_memory_is_told_where_there_are_enough_operations(monkeypatch):
    grown = iter(range(0, 1 << 40, 4096))
    monkeypatch.setattr(leaks, "rss", lambda: next(grown))
    monkeypatch.setattr(leaks, "ENOUGH", 100)
    _, (wrong,) = run("cancels", 200, "asyncio")
    assert wrong == "4096.0 bytes of memory for each operation"
