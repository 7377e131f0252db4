"""The order of a ring: by hosts, or the cheapest by what was measured; the best there is where it says so."""

import itertools
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccoll.planner import RingCost, Topology, ring_cost, ring_order, rings
from asynccoll.planner.drawing import changes_of_host
from asynccoll.planner.rings import EXACT


def measured(seed, size, hosts=3, symmetric=False):
    chance = random.Random(seed)
    names = [f"host{chance.randrange(hosts)}" for _ in range(size)]
    rows = [
        [(2e-5 if names[a] == names[b] else 1e-4) * chance.uniform(1, 2) for b in range(size)]
        for a in range(size)
    ]
    if symmetric:
        rows = [[rows[min(a, b)][max(a, b)] for b in range(size)] for a in range(size)]
    return Topology.from_hosts(names, latency=rows)


def brute_force(topology, nbytes):
    orders = ((0, *rest) for rest in itertools.permutations(range(1, topology.world_size)))
    return min(ring_cost(topology, order, nbytes) for order in orders)


def relabelled(topology, seed):
    order = list(topology.ranks)
    random.Random(seed).shuffle(order)
    return topology.reordered(order)


some_hosts = st.lists(st.sampled_from("abcd"), min_size=1, max_size=24)


@settings(max_examples=100, deadline=None)
@given(some_hosts)
def test_without_a_matrix_each_host_is_entered_once(hosts):
    topology = Topology.from_hosts(hosts)
    order = ring_order(topology)
    assert sorted(order) == list(topology.ranks)
    assert order[0] == 0
    different = len(set(hosts))
    assert changes_of_host(topology, order) == (different if different > 1 else 0)
    for host in set(hosts):
        here = [rank for rank in order if hosts[rank] == host]
        assert here == sorted(here)


@settings(max_examples=100, deadline=None)
@given(some_hosts, st.integers(0, 99))
def test_without_a_matrix_other_numbers_for_the_ranks_change_no_cost(hosts, seed):
    topology = Topology.from_hosts(hosts)
    other = relabelled(topology, seed)
    assert ring_cost(other, ring_order(other)) == ring_cost(topology, ring_order(topology))


def test_interleaved_hosts_are_put_together():
    assert ring_order(Topology.from_hosts(["a", "b", "a", "b", "a"])) == (0, 2, 4, 1, 3)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", range(1, 8))
def test_of_few_ranks_it_is_the_best_of_all(size, symmetric):
    for seed in range(4):
        topology = measured(seed, size, symmetric=symmetric)
        order = ring_order(topology, 1000)
        assert sorted(order) == list(topology.ranks)
        assert ring_cost(topology, order, 1000) == brute_force(topology, 1000)


def test_the_slowest_link_counts_before_the_sum():
    # 0-1-2-3 has the smaller sum, and one link of 9; 0-2-1-3 has 5 everywhere.
    rows = [[0] * 4 for _ in range(4)]
    for a, b, time in ((0, 1, 1), (1, 2, 5), (2, 3, 1), (3, 0, 9), (0, 2, 5), (1, 3, 5)):
        rows[a][b] = rows[b][a] = time * 1e-3
    topology = Topology.from_hosts(["h"] * 4, latency=rows)
    order = ring_order(topology, 0)
    assert order == (0, 2, 1, 3) or order == (0, 1, 3, 2)
    assert ring_cost(topology, order, 0).slowest == pytest.approx(5e-3)
    assert ring_cost(topology, order, 0) == brute_force(topology, 0)


def test_of_equal_rings_that_with_fewer_changes_of_host_is_taken():
    size = 6
    rows = [[1e-4] * size] * size
    bands = [[1e9] * size] * size
    for hosts in ("ababab", "aabbab"):
        topology = Topology.from_hosts(hosts_of(hosts), latency=rows, bandwidth=bands)
        assert changes_of_host(topology, ring_order(topology)) == 2


def test_the_least_difference_in_time_counts_before_changes_of_host():
    # In femtoseconds: 0-1-2-3 takes 38 and changes hosts four times, the two others 39 and twice.
    rows = [[10e-15] * 4 for _ in range(4)]
    for a, b in ((0, 1), (1, 2)):
        rows[a][b] = rows[b][a] = 9e-15
    size, bands = 4, [[1e9] * 4] * 4
    assert ring_order(Topology.from_hosts(list("abab"), latency=rows, bandwidth=bands), 0) == tuple(
        range(size)
    )


@pytest.mark.parametrize("size", [4, 5, 9])
def test_the_sum_after_a_change_is_that_of_the_changed_ring(size):
    chance = random.Random(size)
    weights = [[chance.randrange(1000) for _ in range(size)] for _ in range(size)]
    order = chance.sample(range(size), size)
    sums = rings._Sums(weights, order)
    seen = set()
    for change in rings._changes(size):
        changed = rings._changed(order, *change)
        assert sorted(changed) == list(range(size))
        assert sums.after(*change) == rings._score(weights, weights, changed)[1], change
        seen.add(change[3])
    assert seen == {True, False}


def hosts_of(letters):
    return [f"host-{letter}" for letter in letters]


def test_of_equal_rings_the_first_in_the_dictionary_is_taken():
    for size in (4, 9, EXACT + 3):
        topology = Topology.from_hosts(["h"] * size, latency=[[1e-4] * size] * size)
        assert ring_order(topology) == topology.ranks


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, EXACT), st.booleans())
def test_other_numbers_for_the_ranks_change_no_cost(seed, size, symmetric):
    topology = measured(seed, size, symmetric=symmetric)
    other = relabelled(topology, seed)
    assert ring_cost(other, ring_order(other)) == ring_cost(topology, ring_order(topology))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(EXACT + 1, 26), st.booleans())
def test_of_many_ranks_it_is_no_worse_than_the_order_of_the_ranks_or_by_hosts(seed, size, symmetric):
    topology = measured(seed, size, symmetric=symmetric)
    order = ring_order(topology)
    assert sorted(order) == list(topology.ranks)
    assert order[0] == 0
    cost = ring_cost(topology, order)
    assert cost <= ring_cost(topology, topology.ranks)
    assert cost <= ring_cost(topology, ring_order(Topology.from_hosts(topology.hosts)))


@pytest.mark.parametrize("seed", range(3))
def test_of_many_ranks_no_change_makes_it_better(seed):
    topology = measured(seed, 14)
    order = list(ring_order(topology))
    best = ring_cost(topology, order)
    for a, b in itertools.combinations(range(15), 2):
        turned = order[:a] + order[a:b][::-1] + order[b:]
        assert ring_cost(topology, turned) >= best
    for at in range(14):
        rest = order[:at] + order[at + 1 :]
        for to in range(14):
            assert ring_cost(topology, [*rest[:to], order[at], *rest[to:]]) >= best


@pytest.mark.parametrize("seed", range(3))
def test_a_hidden_good_ring_of_many_ranks_is_found(seed):
    # Fast links along one ring, slow ones everywhere else: nothing but that ring will do.
    size = 20
    hidden = list(range(size))
    random.Random(seed).shuffle(hidden)
    chance = random.Random(seed + 100)
    rows = [[chance.uniform(2, 9) * 1e-3 for _ in range(size)] for _ in range(size)]
    for a, b in zip(hidden, hidden[1:] + hidden[:1], strict=True):
        rows[a][b] = rows[b][a] = 1e-4
    topology = Topology.from_hosts(["h"] * size, latency=rows)
    assert ring_cost(topology, ring_order(topology, 0), 0).slowest == pytest.approx(1e-4)


def test_the_cost_is_the_slowest_link_and_the_sum():
    rows = [[0, 1, 2], [3, 0, 4], [5, 6, 0]]
    topology = Topology.from_hosts(["h"] * 3, latency=rows, bandwidth=[[100] * 3] * 3)
    assert ring_cost(topology, (0, 1, 2), 50) == RingCost(5.5, 11.5)
    assert ring_cost(topology, (0, 2, 1), 0) == RingCost(6.0, 11.0)
    assert ring_cost(topology, (1, 2, 0), 50) == ring_cost(topology, (0, 1, 2), 50)
    assert ring_cost(Topology.from_hosts(["h"]), (0,)) == RingCost(0.0, 0.0)


def test_what_is_no_order_is_refused():
    topology = Topology.from_hosts(["a"] * 3)
    for order in ((), (0, 1), (0, 1, 1), (0, 1, 3)):
        with pytest.raises(ValueError, match="name each rank from 0 to 2 once"):
            ring_cost(topology, order)
    with pytest.raises(ValueError, match="nbytes is -1"):
        ring_cost(topology, (0, 1, 2), -1)
    with pytest.raises(ValueError, match="nbytes is -1"):
        ring_order(topology, -1)


def test_the_order_is_the_same_in_every_interpreter(tmp_path):
    topologies = [measured(1, 7), measured(2, 13), Topology.from_hosts(list("cabacb"))]
    program = (
        "import sys\nfrom asynccoll.planner import Topology, choose, ring_order\n"
        "for line in open(sys.argv[1]):\n"
        "    topology = Topology.from_json(line)\n"
        "    print(ring_order(topology), choose('allreduce', 100_000, topology))\n"
    )
    file = tmp_path / "topologies"
    file.write_text("\n".join(topology.to_json() for topology in topologies))
    said = [
        subprocess.run(
            [sys.executable, "-c", program, str(file)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].splitlines()[1].startswith(f"{ring_order(topologies[1])} ")
