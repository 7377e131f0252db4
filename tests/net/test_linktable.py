"""Which connections a rank wants, takes and refuses."""

import socket

import pytest

from asynccoll.net.handshake import Hello, Purpose, Status
from asynccoll.net.linktable import LinkTable

RUN = bytes(range(16))


def table(rank=1, size=4, pulse=False):
    return LinkTable(rank, size, 0, RUN, pulse=pulse)


def hello(rank, target=1, *, purpose=Purpose.LINK, run_id=RUN):
    return Hello(purpose, rank, target, 4, 0, run_id)


@pytest.mark.parametrize("pulse", [False, True])
@pytest.mark.parametrize("size", range(2, 9))
def test_each_pair_is_called_by_exactly_one_side(size, pulse):
    """Every pair has one link and, if wanted, one pulse; the link with rank 0 comes from the rendezvous."""
    calls = [
        (purpose, peer, rank) for rank in range(size) for purpose, peer in table(rank, size, pulse).calls()
    ]
    pairs = {(low, high) for high in range(size) for low in range(high)}
    assert len(calls) == len(set(calls))
    assert {(low, high) for purpose, low, high in calls if purpose is Purpose.LINK} == {
        pair for pair in pairs if pair[0] != 0
    }
    pulses = {(low, high) for purpose, low, high in calls if purpose is Purpose.PULSE}
    assert pulses == (pairs if pulse else set())
    for purpose, low, high in calls:
        call = Hello(purpose, high, low, size, 0, RUN)
        assert table(low, size, pulse).judge(call) is Status.ACCEPTED


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (hello(2), Status.ACCEPTED),
        (hello(3), Status.ACCEPTED),
        (hello(1), Status.WRONG_RANK),
        (hello(0), Status.WRONG_RANK),
        (hello(4), Status.WRONG_RANK),
        (hello(2, target=0), Status.WRONG_RANK),
        (hello(2, run_id=bytes(16)), Status.WRONG_RUN),
        (hello(2, purpose=Purpose.PULSE), Status.WRONG_PURPOSE),
        (hello(2, purpose=Purpose.RENDEZVOUS), Status.WRONG_PURPOSE),
    ],
)
def test_who_is_taken(call, status):
    assert table().judge(call) is status


def test_rank_0_takes_no_second_link():
    assert table(0).judge(hello(2, target=0)) is Status.WRONG_PURPOSE
    assert table(0, pulse=True).judge(hello(2, 0, purpose=Purpose.PULSE)) is Status.ACCEPTED


def test_a_second_call_is_a_duplicate_while_the_first_lives():
    held = table()
    here, there = socket.socketpair()
    here.setblocking(False)
    held.take(Purpose.LINK, 2, here)
    assert held.judge(hello(2)) is Status.DUPLICATE
    there.close()
    assert held.judge(hello(2)) is Status.ACCEPTED
    held.close()


def test_a_call_again_replaces_the_dead_connection():
    held = table(0, 2)
    first, second = socket.socketpair()
    held.take(Purpose.LINK, 1, first)
    held.take(Purpose.LINK, 1, second)
    assert first.fileno() == -1
    assert held.release() == ({1: second}, {})
    second.close()


def test_missing_peers_are_those_without_every_connection():
    held = table(pulse=True)
    here, there = socket.socketpair()
    assert held.missing == {0, 2, 3}
    held.take(Purpose.LINK, 2, here)
    assert held.missing == {0, 2, 3}
    held.take(Purpose.PULSE, 2, there)
    assert held.missing == {0, 3}
    held.close()


def test_close_closes_what_was_not_released():
    held = table(pulse=True)
    here, there = socket.socketpair()
    held.take(Purpose.LINK, 2, here)
    held.take(Purpose.PULSE, 2, there)
    held.close()
    assert (here.fileno(), there.fileno()) == (-1, -1)


def test_released_connections_are_in_rank_order_and_stay_open():
    held = table(0, 3)
    here, there = socket.socketpair()
    held.take(Purpose.LINK, 2, here)
    held.take(Purpose.LINK, 1, there)
    links, _ = held.release()
    held.close()
    assert list(links.items()) == [(1, there), (2, here)]
    here.close()
    there.close()
