"""Topologies: hosts, links, JSON, and what is refused."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccoll.planner import Link, Topology
from asynccoll.planner.topology import LOCAL, REMOTE

LATENCY = [[0, 1e-5, 2e-5], [3e-5, 0, 4e-5], [5e-5, 6e-5, 0]]
BANDWIDTH = [[0, 1e9, 2e9], [3e9, 0, 4e9], [5e9, 6e9, 0]]
PLAIN = Topology.from_hosts(["a", "b", "a"])
MEASURED = Topology.from_hosts(["a", "b", "a"], latency=LATENCY, bandwidth=BANDWIDTH)


def test_each_rank_has_a_host():
    assert PLAIN.world_size == 3
    assert PLAIN.ranks == (0, 1, 2)
    assert PLAIN.hosts == ("a", "b", "a")
    assert PLAIN.ranks_on("a") == (0, 2)
    with pytest.raises(ValueError, match="no host 'c'; there is: a, b"):
        PLAIN.ranks_on("c")


def test_links_are_what_was_measured_and_else_assumed():
    assert MEASURED.link(1, 2) == Link(4e-5, 4e9)
    assert MEASURED.link(2, 1) == Link(6e-5, 6e9)
    assert PLAIN.link(0, 2) == LOCAL
    assert PLAIN.link(0, 1) == REMOTE
    half = Topology.from_hosts(["a", "b", "a"], latency=LATENCY)
    assert half.link(0, 1) == Link(1e-5, REMOTE.bandwidth)
    assert (PLAIN.measured, half.measured, MEASURED.measured) == (False, True, True)
    with pytest.raises(ValueError, match="no rank 3; use 0 to 2"):
        PLAIN.link(0, 3)
    with pytest.raises(ValueError, match="no rank -1"):
        PLAIN.link(-1, 0)


def test_a_message_takes_the_latency_and_its_bytes():
    assert Link(1e-3, 1e6).seconds(500) == pytest.approx(1.5e-3)


def test_arrays_of_numpy_and_any_diagonal_are_taken():
    latency = np.array(LATENCY)
    np.fill_diagonal(latency, np.nan)
    assert Topology.from_hosts(("a", "b", "a"), latency=latency, bandwidth=np.array(BANDWIDTH)) == MEASURED
    assert pickle.loads(pickle.dumps(MEASURED)) == MEASURED
    assert len({MEASURED, PLAIN, Topology.from_json(MEASURED.to_json())}) == 2


def test_a_topology_does_not_change():
    with pytest.raises(AttributeError):
        PLAIN.hosts = ()


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_topology_comes_back_from_json_as_it_was(data):
    size = data.draw(st.integers(1, 5))
    hosts = data.draw(st.lists(st.sampled_from(["a", "ü-1", "x y"]), min_size=size, max_size=size))

    def matrix(least, most):
        row = st.lists(st.floats(least, most), min_size=size, max_size=size)
        return data.draw(st.none() | st.lists(row, min_size=size, max_size=size))

    topology = Topology.from_hosts(hosts, latency=matrix(0, 1), bandwidth=matrix(1, 1e12))
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert again.to_json() == topology.to_json()


def test_another_order_has_the_same_links():
    turned = MEASURED.reordered((2, 0, 1))
    assert turned.hosts == ("a", "a", "b")
    order = (2, 0, 1)
    for a in range(3):
        for b in range(3):
            if a != b:
                assert turned.link(a, b) == MEASURED.link(order[a], order[b])
    assert PLAIN.reordered([1]).hosts == ("b",)
    for wrong in ((), (0, 0), (3,), (-1,)):
        with pytest.raises(ValueError, match="name ranks from 0 to 2"):
            PLAIN.reordered(wrong)


@pytest.mark.parametrize(
    ("hosts", "matrices", "error", "said"),
    [
        ([], {}, ValueError, "hosts is empty"),
        ("abc", {}, TypeError, "give the name of each rank's host"),
        ([1], {}, TypeError, "host of rank 0 is 1"),
        (["a", ""], {}, ValueError, "host of rank 1 is ''"),
        (["a", "b\n"], {}, ValueError, "host of rank 1"),
        (["a", "b"], {"latency": [[0, 1]]}, ValueError, "latency has 1 rows for 2 ranks"),
        (["a", "b"], {"latency": [[0, 1], [1]]}, ValueError, r"latency\[1\] has 1 numbers for 2 ranks"),
        (
            ["a", "b"],
            {"latency": [[0, -1], [1, 0]]},
            ValueError,
            r"latency\[0\]\[1\] is -1; it must be from 0",
        ),
        (["a", "b"], {"latency": [[0, 1], [float("nan"), 0]]}, ValueError, r"latency\[1\]\[0\] is nan"),
        (["a", "b"], {"latency": [[0, 1e300], [1, 0]]}, ValueError, r"latency\[0\]\[1\] is 1e\+300"),
        (
            ["a", "b"],
            {"bandwidth": [[0, 0], [1, 0]]},
            ValueError,
            r"bandwidth\[0\]\[1\] is 0; it must be from 1",
        ),
        (["a", "b"], {"bandwidth": [[0, float("inf")], [1, 0]]}, ValueError, "is inf"),
        (["a", "b"], {"bandwidth": [[0, "9"], [1, 0]]}, TypeError, "'9', which is not a number"),
        (["a", "b"], {"bandwidth": [[0, None], [1, 0]]}, TypeError, "None, which is not a number"),
        (["a", "b"], {"bandwidth": [[0, True], [1, 0]]}, TypeError, "True, which is not a number"),
    ],
)
def test_what_makes_no_topology_is_refused(hosts, matrices, error, said):
    with pytest.raises(error, match=said):
        Topology.from_hosts(hosts, **matrices)


def changed(**fields):
    return json.dumps({**json.loads(MEASURED.to_json()), **fields})


def test_null_on_the_diagonal_of_json_is_nothing_said():
    rows = [[None if a == b else 1e-5 for b in range(3)] for a in range(3)]
    assert Topology.from_json(changed(latency=rows)).link(0, 1).latency == 1e-5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (changed(hosts="abc"), "'hosts'"),
        (changed(hosts=["a", "b", 3]), "'hosts'"),
        (changed(hosts=[]), "hosts is empty"),
        (changed(hosts=["a"]), "latency has 3 rows for 1 ranks"),
        (changed(latency=[1, 2, 3]), "'latency'"),
        (changed(latency=[["1", 2, 3]] * 3), "'latency'"),
        (changed(latency=[[0, None, 0]] * 3), "'latency'"),
        (changed(bandwidth=[[True, 2, 3]] * 3), "'bandwidth'"),
        (changed(bandwidth=[[0, -2, 3]] * 3), "bandwidth[0][1] is -2"),
        (changed(bandwidth=[[0, 10**400, 3]] * 3), "bandwidth[0][1]"),
        (changed(bandwidth=5), "'bandwidth' is 5"),
    ],
)
def test_garbled_json_is_refused_with_the_field(text, named):
    with pytest.raises(ValueError) as raised:
        Topology.from_json(text)
    assert named in str(raised.value)
    assert "asynccoll.Topology" in str(raised.value)


def test_it_says_what_it_is_in_few_words():
    assert repr(MEASURED) == "<Topology 3 ranks on 2 hosts, links measured>"
    assert repr(PLAIN) == "<Topology 3 ranks on 2 hosts, links assumed>"


@pytest.mark.parametrize(
    "value",
    [1j, [1], np.complex128(1), np.ma.masked, np.bool_(True), b"1", object()],
    ids=lambda value: type(value).__name__,
)
def test_only_real_numbers_are_measurements(value):
    with pytest.raises(TypeError, match=r"latency\[0\]\[1\] is .*not a number"):
        Topology.from_hosts(["a", "b"], latency=[[0, value], [1, 0]])


def test_an_order_may_be_an_array():
    topology = Topology.from_hosts(["a", "b", "c"])
    assert topology.reordered(np.array([2, 0])).hosts == ("c", "a")
    with pytest.raises(ValueError, match="order is"):
        topology.reordered(np.array([], int))
