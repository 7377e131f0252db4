"""Frames for communicators that are made later: kept in order, within a bound for each peer, and what an end leaves of them."""

import pytest

from asynccoll.engine import unmade
from asynccoll.engine.unmade import Frame, Unmade
from asynccoll.errors import ProtocolError

LETTER, OTHER = 7, 8
"""Kinds of frames: what means something without its sender, and what does not."""
MOST = unmade._LIMIT - unmade._OVERHEAD
"""Bytes of payload that one frame of a peer may have."""


def frame(peer, kind=OTHER, size=1, seq=0):
    return Frame(peer, kind, 0, 0, seq, 0, memoryview(bytes(size)))


@pytest.fixture
def kept():
    return Unmade()


def test_they_come_back_in_their_order_and_once(kept):
    frames = [frame(peer, seq=seq) for seq, peer in enumerate([2, 1, 2])]
    for one in frames:
        kept.keep(5, one)
    kept.keep(6, frame(1, seq=9))
    assert kept.take(5) == frames
    assert kept.take(5) == []
    assert [one.seq for one in kept.take(6)] == [9]


def test_the_bound_is_each_peers_own_and_over_all_communicators(kept):
    kept.keep(5, frame(1, size=MOST))
    kept.keep(5, frame(2, size=MOST))
    for comm in (5, 6):
        with pytest.raises(ProtocolError, match=r"rank 1 sent more .* call new_group"):
            kept.keep(comm, frame(1))
    assert len(kept.take(5)) == 2


def test_what_was_taken_no_longer_counts(kept):
    kept.keep(5, frame(1, size=MOST))
    kept.take(5)
    kept.keep(6, frame(1, size=MOST))
    assert len(kept.take(6)) == 1


def test_of_a_peer_that_is_gone_its_letters_stay_and_nothing_of_others_goes(kept):
    for peer in (1, 2):
        for kind in (LETTER, OTHER):
            kept.keep(5, frame(peer, kind))
    kept.keep(6, frame(1, OTHER))
    kept.forget(1, but=LETTER)
    assert [(one.peer, one.kind) for one in kept.take(5)] == [(1, LETTER), (2, LETTER), (2, OTHER)]
    assert kept.take(6) == []


@pytest.mark.parametrize("kind", [LETTER, OTHER])
def test_of_a_peer_that_is_gone_what_stays_counts_and_what_goes_does_not(kept, kind):
    """Letters of a rank that has left still take the memory that they take."""
    kept.keep(5, frame(1, kind, size=MOST))
    kept.keep(5, frame(2, size=MOST))
    kept.forget(1, but=LETTER)
    if kind == LETTER:
        with pytest.raises(ProtocolError, match="rank 1 sent more"):
            kept.keep(6, frame(1))
    else:
        kept.keep(6, frame(1, size=MOST))
    with pytest.raises(ProtocolError, match="rank 2 sent more"):
        kept.keep(6, frame(2))
