"""Reads of one byte change no bit. See `splits`; all verbs in all sizes by its command."""

import random

import numpy as np
import pytest

from . import splits
from .splits import CALLS, COUNTS, MODES, differences, digest, sample


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_of_every_verb_is_the_same_bits(mode, loop, monkeypatch):
    monkeypatch.setitem(COUNTS, mode, (3, 500))
    failures, reads = differences(loop, 2, mode, sample(mode))
    assert failures == []
    assert reads > 10_000


def test_bulk_that_has_to_be_asked_for_is_the_same_bits():
    failures, reads = differences("uvloop", 3, "reads", [("allgather", 20_000), ("allreduce ring", 60_000)])
    assert failures == []
    assert reads > 60_000 * 4


def test_a_difference_is_told_with_the_command_that_replays_it(monkeypatch):
    numbers = random.Random(1)
    monkeypatch.setitem(splits.CALLS, "barrier", lambda comm, count: comm.allreduce(numbers.random()))
    (failure,), _ = differences("asyncio", 2, "reads", [("barrier", 0)])
    assert failure.startswith("barrier of 0 differs")
    assert failure.endswith("splits --loop asyncio --size 2 --mode reads --only 'barrier'")


def test_the_sample_has_every_call():
    assert {name for name, _ in sample("reads")} == set(CALLS)


def test_a_digest_tells_a_bit_a_type_and_a_shape_apart():
    one, other = np.zeros(2, np.float32), np.zeros(2, np.float32)
    other[1] = -0.0
    values = [
        one,
        other,
        one.astype(np.int32),
        one.reshape(1, 2),
        [one],
        {"a": one},
        [0.0, 0.0],
        0,
        False,
        None,
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest([one, 1]) == digest([one.copy(), 1])
