"""The short form of `strangers`: nothing is timed here, and what a crowd meets is told truly."""

import argparse
import asyncio
import socket

from . import strangers


def test_ranks_meet_and_compute_among_strangers():
    options = argparse.Namespace(rate=300, forming=0.5, windows=1, window=0.4, loop="asyncio")
    failures = []
    figures = strangers.run_ranks(options, failures)
    assert not failures
    assert figures["forming"]["strangers"] > 100
    assert figures["collectives"]["refused"] == figures["collectives"]["strangers"] > 50
    assert figures["collectives"]["operations"] > 10


def test_a_rank_joins_one_that_holds_half_open_handshakes():
    figures = asyncio.run(strangers.half_open(300, 1))
    assert figures["held"] == 300


def test_a_crowd_tells_whether_anybody_listened():
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        open_port = listener.getsockname()[1]
        crowd = strangers.Crowd([open_port], 100)
        crowd.run(30, lambda: crowd.calls >= 12)
    assert crowd.outcomes["connected"] + crowd.outcomes["left unanswered"] == crowd.calls
    assert "ECONNREFUSED" not in crowd.outcomes
    crowd = strangers.Crowd([open_port], 100)
    crowd.run(30, lambda: crowd.calls >= 12)
    assert crowd.outcomes == {"ECONNREFUSED": crowd.calls}


def test_each_kind_of_stranger_is_among_them():
    assert len(strangers.SAYINGS) == 6  # as the crowd takes them in turn
    assert len(strangers.SAYINGS["noise"]) == 1 << 20
