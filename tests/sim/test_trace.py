"""The hash of a run: the same for the same events in the same order, another for any other."""

import pytest

from asynccoll.sim.trace import Trace


def hash_of(*events):
    trace = Trace()
    for event in events:
        (trace.note if isinstance(event[1], str) else trace.moved)(*event)
    return trace.hash


EVENTS = [(0.0, 0, 1, 24), (0.5, "rank 1 calls barrier"), (0.5, 1, 0, 24)]


def test_equal_events_have_equal_hashes():
    assert hash_of(*EVENTS) == hash_of(*EVENTS)
    assert len(hash_of(*EVENTS)) == 32


@pytest.mark.parametrize(
    "others",
    [
        EVENTS[:2],
        EVENTS[::-1],
        [(0.1, 0, 1, 24), *EVENTS[1:]],
        [(0.0, 0, 1, 25), *EVENTS[1:]],
        [EVENTS[0], (0.5, "rank 0 calls barrier"), EVENTS[2]],
    ],
)
def test_any_difference_makes_another(others):
    assert hash_of(*EVENTS) != hash_of(*others)


def test_reading_the_hash_changes_nothing_and_it_covers_many_pieces():
    trace, other = Trace(), Trace()
    for at in range(10_000):
        trace.moved(float(at), 0, 1, 10)
        other.moved(float(at), 0, 1, 10)
        if at % 999 == 0:
            assert trace.hash
    assert trace.hash == other.hash
    assert trace.pieces == 10_000


def test_notes_reach_the_listener():
    seen = []
    trace = Trace(lambda now, what: seen.append((now, what)))
    trace.note(1.5, "\ud800 happened")
    trace.moved(2.0, 0, 1, 5)
    assert seen == [(1.5, "\ud800 happened")]
