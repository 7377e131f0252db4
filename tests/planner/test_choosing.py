"""Algorithms by a model of links: what the model says of known cases, and that it walks the schedules that run."""

import numpy
import pytest

from asynccoll.algorithms import registry
from asynccoll.engine import outbox
from asynccoll.engine.programs import reductions
from asynccoll.planner import Topology, choose, choosing, estimate, ring_cost, ring_order
from asynccoll.planner.choosing import COMBINED, MESSAGE
from asynccoll.planner.topology import REMOTE

VERBS = [
    "allreduce",
    "allreduce_stream",
    "allgather",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "scan",
    "exscan",
]
FAST, SLOW = 1e-5, 1e-2
PAIR = Topology.from_hosts(["a", "b"])


def world(size, latency=FAST, bandwidth=1e9):
    return Topology.from_hosts(
        [f"host{rank // 4}" for rank in range(size)],
        latency=[[latency] * size] * size,
        bandwidth=[[bandwidth] * size] * size,
    )


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_it_chooses_what_the_registry_knows_and_is_the_fastest(verb, size):
    topology = world(size)
    for nbytes in (0, 1, 5000, 1 << 20, 3 << 22):
        name = choose(verb, nbytes, topology)
        assert name in registry.names(verb)
        times = {each: estimate(verb, each, nbytes, topology) for each in registry.names(verb)}
        assert times[name] == min(times.values())
        if verb not in ("scan", "exscan"):
            registry.schedule(verb, name)


def test_every_verb_with_a_choice_is_known():
    assert {verb for verb in (*registry.DEFAULT, *VERBS) if registry.names(verb)} == set(VERBS)


def test_small_arrays_take_few_hops_and_large_ones_few_bytes():
    topology = world(16)
    assert choose("allreduce", 8, topology) == "doubling"
    assert choose("allreduce", 256 << 20, topology) == "ring"
    assert choose("scan", 8, topology) == "doubling"
    assert choose("scan", 256 << 20, topology) == "chain"
    assert choose("reduce_scatter", 256 << 20, topology) == "ring"


def test_slow_answers_speak_for_few_hops():
    nbytes = 1 << 20
    assert choose("allreduce", nbytes, world(16, FAST)) == "ring"
    assert choose("allreduce", nbytes, world(16, SLOW)) != "ring"


def test_one_message_takes_what_the_model_says():
    # A broadcast between two ranks is one message: out of a processor, over the link, into a processor.
    nbytes = 1000
    expected = MESSAGE + REMOTE.latency + nbytes / REMOTE.bandwidth + MESSAGE
    assert estimate("broadcast", "tree", nbytes, PAIR) == pytest.approx(expected)
    assert estimate("reduce", "tree", nbytes, PAIR) == pytest.approx(expected + nbytes / COMBINED)
    assert estimate("allreduce", "linear", nbytes, PAIR) == pytest.approx(2 * expected + nbytes / COMBINED)


def test_messages_leave_and_come_in_one_after_the_other():
    size, nbytes, band = 5, 100_000, 1e8
    each = nbytes / band
    topology = world(size, 0.0, band)
    # Rank 0 takes four arrays in and sends four out, through one port each way.
    found = estimate("allreduce", "linear", nbytes, topology)
    assert 8 * each < found < 8 * each + 20 * MESSAGE + 5 * nbytes / COMBINED


def test_the_ring_moves_the_least_bytes():
    size, nbytes, band = 4, 4 << 20, 1e8
    found = estimate("allreduce", "ring", nbytes, world(size, 0.0, band))
    least = 2 * (size - 1) / size * nbytes / band
    assert least <= found < 1.2 * least


def test_a_slow_link_slows_what_goes_over_it():
    rows = [[1e9] * 4 for _ in range(4)]
    rows[2][3] = 1e6
    slow = Topology.from_hosts(["h"] * 4, bandwidth=rows)
    fast = Topology.from_hosts(["h"] * 4, bandwidth=[[1e9] * 4] * 4)
    for name in ("ring", "doubling"):
        assert estimate("allreduce", name, 1 << 20, slow) > 5 * estimate("allreduce", name, 1 << 20, fast)
    # Nothing goes from rank 2 to rank 3 here.
    assert estimate("allreduce", "linear", 1 << 20, slow) == estimate("allreduce", "linear", 1 << 20, fast)
    # In another order the slow link is not on the ring.
    better = slow.reordered((0, 1, 3, 2))
    assert estimate("allreduce", "ring", 1 << 20, better) < estimate("allreduce", "ring", 1 << 20, slow) / 5


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_takes_no_time_and_more_takes_longer(verb):
    topology = world(5)
    for name in registry.names(verb):
        assert estimate(verb, name, 0, topology) == 0
        assert estimate(verb, name, 1 << 20, world(1)) == 0
        times = [estimate(verb, name, nbytes, topology) for nbytes in (1, 1 << 12, 1 << 20, 1 << 24, 1 << 28)]
        assert times == sorted(times)
        assert times[0] > 0
        assert times[-1] > times[0]


@pytest.mark.parametrize("size", [4, 7, 16])
@pytest.mark.parametrize(
    ("verb", "name", "nbytes"),
    [
        ("allreduce", "tree", 40 << 20),
        ("allreduce", "doubling", 3 << 20),
        ("allreduce", "ring", 160 << 20),
        ("scan", "doubling", 3 << 20),
        ("scan", "chain", 40 << 20),
    ],
)
def test_many_segments_take_what_walking_all_of_them_takes(verb, name, nbytes, size, monkeypatch):
    topology = world(size)
    short = estimate(verb, name, nbytes, topology)
    monkeypatch.setattr(choosing, "_WALKED", 10**6)
    monkeypatch.setattr(choosing, "_MOST_STEPS", 10**12)
    assert short == pytest.approx(estimate(verb, name, nbytes, topology), rel=0.02)


@pytest.mark.parametrize("size", [2, 5, 64])
@pytest.mark.parametrize("name", ["ring", "tree", "doubling", "linear"])
def test_arrays_are_cut_as_the_engine_cuts_them(name, size):
    for nbytes in (1, 1 << 18, 5 << 20, 1 << 28, 1 << 34):
        for verb, early in (("allreduce", False), ("allreduce_stream", True)):
            expected = reductions.segment_length(name, size, nbytes, 1, early=early)
            assert choosing._segment(verb, name, nbytes, size) == expected
    assert choosing.SEGMENT == outbox.SEGMENT


@pytest.mark.parametrize("size", range(1, 10))
def test_the_messages_of_a_scan_meet(size):
    for steps in (choosing._chain, choosing._doubling_scan):
        sent, read = [], []
        for rank in range(size):
            for step in steps(rank, size, 10, 4):
                sends = type(step).__name__ == "Send"
                (sent if sends else read).append(
                    (rank, step.peer, step.lo) if sends else (step.peer, rank, step.lo)
                )
        assert sorted(sent) == sorted(read)


def test_what_has_no_choice_is_refused_with_what_has():
    with pytest.raises(
        ValueError, match=r"'barrier' is no collective with a choice of algorithms; there is: .*allreduce"
    ):
        choose("barrier", 8, PAIR)
    with pytest.raises(
        ValueError, match="algorithm 'star' does not exist for allreduce; there is: ring, tree"
    ):
        estimate("allreduce", "star", 8, PAIR)
    for call in (lambda: choose("allreduce", -1, PAIR), lambda: estimate("allreduce", "ring", -1, PAIR)):
        with pytest.raises(ValueError, match="nbytes is -1"):
            call()


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [
        (-1, ValueError),
        pytest.param(-(10**5000), ValueError, id="far below 0"),
        (1 + (1 << 80), ValueError),
        pytest.param(10**5000, ValueError, id="far above"),
        (1.5, TypeError),
        (float("nan"), TypeError),
        (float("inf"), TypeError),
        (True, TypeError),
        ("5", TypeError),
        (None, TypeError),
    ],
)
def test_what_is_no_number_of_bytes_is_refused_before_it_becomes_a_time(nbytes, error):
    for ask in (
        lambda: choose("allreduce", nbytes, PAIR),
        lambda: estimate("allgather", "ring", nbytes, PAIR),
        lambda: ring_order(PAIR, nbytes),
        lambda: ring_cost(PAIR, (0, 1), nbytes),
    ):
        with pytest.raises(error, match="nbytes is"):
            ask()


def test_any_number_of_bytes_up_to_the_most_has_a_time():
    slowest = world(5, latency=1e6, bandwidth=1.0)
    for verb in VERBS:
        assert choose(verb, 1 << 80, slowest) in registry.names(verb)
    assert ring_cost(slowest, range(5), 1 << 80).slowest > 1 << 79
    assert estimate("allreduce", "ring", numpy.int64(7), PAIR) == estimate("allreduce", "ring", 7, PAIR)
