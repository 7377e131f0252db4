"""The short form of `frames`, the same in every run, and that it sees a defect."""

import asyncio
import logging
import random
from pathlib import Path

import numpy as np
import pytest

from asynccoll.engine.programs import reductions, scans
from asynccoll.engine.wire import LAST
from asynccoll.sim.loop import SimLoop

from . import frames, mutations, tapes


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, "asynccoll")


def test_damaged_frames_end_the_peer_or_nothing():
    figures, failures = frames.run_memory(4_000, seed=1)
    assert not failures
    assert figures["given up"] > 500
    assert len(figures["refusals"]) > 25
    assert {"result", "PeerLost", "ProtocolError", "RemoteError"} <= figures["outcomes"].keys()


def test_a_rank_over_tcp_survives_them():
    figures, failures = frames.run_socket(400, seed=1)
    assert not failures
    assert figures["damaged"] >= 400
    assert figures["given up"] > 20


def test_at_the_door_nothing_is_unpickled_and_nobody_admitted():
    figures, failures = frames.run_listener(600, seed=1)
    assert not failures
    assert (figures["pickles"], figures["admitted"]) == (0, 0)


def test_the_command_sees_an_error_of_another_type(monkeypatch, tmp_path):
    for module in (reductions, scans):
        monkeypatch.setattr(module, "whole_elements", np.frombuffer)
    monkeypatch.setattr(frames.tempfile, "tempdir", str(tmp_path))
    _, failures = frames.run_memory(6_000, seed=1)
    found = [failure for failure in failures if "multiple of element size" in failure]
    assert found
    with pytest.raises(frames.Failed, match="multiple of element size"):
        frames.replay(str(next(Path(tmp_path).glob("*.json"))))


def test_recordings_have_frames_of_every_kind():
    with tapes.pickles_watched(), asyncio.Runner(loop_factory=SimLoop) as runner:
        recordings = runner.run(tapes.record_all())
    kinds = {frame[0] for one in recordings for _, frame in one.frames}
    assert set(range(1, LAST + 1)) <= kinds


def test_damage_is_the_same_for_the_same_seed():
    pool = [bytes(range(24)) + bytes(8), bytes(40)]
    for damage in (*mutations.DAMAGES, *mutations.DESYNC):
        once, again = bytearray(pool[0]), bytearray(pool[0])
        damage(random.Random(3), once, pool)
        damage(random.Random(3), again, pool)
        assert once == again
