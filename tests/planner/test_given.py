"""Arguments of the wrong kind: every function of the planner says in words of its own what it was given, and what to give."""

import numpy as np
import pytest
from naming import shown as named

from asynccoll.planner import ProcessRanks, RankPlan, Topology, choose, estimate, given, ring_cost, ring_order

TOPOLOGY = Topology.from_hosts(["a", "b", "a"])
PLAN = RankPlan.from_roles({"trainer": 2, "server": 1}, machines=2)
RANKS = ProcessRanks.from_num_invocations(2, -1)
HUGE = 10**5000
"""Python refuses to write it: sys.get_int_max_str_digits()."""


@pytest.mark.parametrize("wrong", [None, 5, ["a", "b"], PLAN], ids=named)
@pytest.mark.parametrize(
    "ask",
    [
        lambda wrong: choose("allreduce", 1000, wrong),
        lambda wrong: estimate("allreduce", "ring", 1000, wrong),
        lambda wrong: ring_order(wrong),
        lambda wrong: ring_cost(wrong, [0]),
    ],
    ids=["choose", "estimate", "ring_order", "ring_cost"],
)
def test_what_is_no_topology_is_told_how_to_make_one(ask, wrong):
    with pytest.raises(TypeError) as caught:
        ask(wrong)
    assert f"topology is {wrong!r}; give a Topology, such as Topology.from_hosts(" in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [None, 5, "012", {0, 1, 2}, {0: 1}, [0, "1", 2], [0, 1.0, 2], [True, 0, 2]], ids=named
)
@pytest.mark.parametrize(
    "ask", [lambda order: ring_cost(TOPOLOGY, order), TOPOLOGY.reordered], ids=["ring_cost", "reordered"]
)
def test_an_order_is_a_list_of_integers(ask, wrong):
    with pytest.raises(TypeError) as caught:
        ask(wrong)
    assert str(caught.value).startswith(f"order is {wrong!r}")


@pytest.mark.parametrize("wrong", [None, "1", 0.5, True], ids=named)
@pytest.mark.parametrize(
    "ask",
    [
        lambda rank: TOPOLOGY.link(0, rank),
        lambda rank: TOPOLOGY.link(rank, 0),
        lambda machine: PLAN.ranks_on(machine),
    ],
    ids=["link to", "link from", "ranks_on"],
)
def test_a_rank_and_a_machine_are_integers(ask, wrong):
    if wrong is None and ask(0) == (0, 2):
        assert ask(None) == ()  # the ranks without a machine
        return
    with pytest.raises(TypeError, match="which is not an integer") as caught:
        ask(wrong)
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda: Topology.from_hosts(None), ["hosts is None", "as a list"]),
        # Of a set of strings every interpreter has an order of its own: the ranks would not agree about who is where.
        (lambda: Topology.from_hosts({"a"}), ["hosts is {'a'}", "as a list"]),
        (lambda: Topology.from_hosts({"a": 2}), ["hosts is {'a': 2}", "as a list"]),
        (lambda: Topology.from_hosts(["a", "b"], latency=5), ["latency is 5", "2 rows of 2 numbers"]),
        (lambda: Topology.from_hosts(["a", "b"], latency=[1, 2]), ["latency[0] is 1", "2 rows of 2 numbers"]),
        (lambda: RankPlan.from_roles({"a": 2}, groups={"g": None}), ["group 'g' are None", "write a list"]),
        (lambda: RankPlan.from_roles({"a": 2}, groups={"g": {"a"}}), ["group 'g' are {'a'}", "write a list"]),
        (lambda: PLAN.with_group("g", 5), ["group 'g' are 5", "write a list"]),
        (lambda: RankPlan(None), ["counts is None", '("trainer", 4)']),
        (lambda: RankPlan((("a", 1, 2),)), ["counts is (('a', 1, 2),)", "pairs"]),
        (lambda: RankPlan((("a", 1),), (("g", 0),)), ["group 'g' are 0", "as a list"]),
        (lambda: RankPlan((("a", 1),), (), 5), ["machines is 5", "as a list"]),
    ],
)
def test_lists_are_lists(make, fragments):
    with pytest.raises(TypeError) as caught:
        make()
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: RankPlan.from_roles({"a": HUGE}), ValueError),
        (lambda: RankPlan.from_roles({"a": 2}, machines=HUGE), ValueError),
        (lambda: RankPlan.from_roles({"a": 2}, machines=[0, HUGE]), ValueError),
        (lambda: RankPlan.from_roles({"a": 2}, groups={"g": [HUGE]}), ValueError),
        (lambda: PLAN.role_of(HUGE), ValueError),
        (lambda: PLAN.ranks_on(-HUGE), ValueError),
        (lambda: PLAN.with_group("g", [0], -HUGE), ValueError),
        (lambda: TOPOLOGY.link(0, HUGE), ValueError),
        (lambda: TOPOLOGY.reordered([HUGE]), ValueError),
        (lambda: ring_cost(TOPOLOGY, [HUGE]), ValueError),
        (lambda: ring_order(TOPOLOGY, -HUGE), ValueError),
        (lambda: Topology.from_hosts(["a", "b"], latency=[[0, HUGE], [1, 0]]), ValueError),
        (lambda: ProcessRanks.from_num_invocations(HUGE, -1), ValueError),
        (lambda: ProcessRanks.from_num_invocations(2, -HUGE), ValueError),
        (lambda: RANKS.trainer(HUGE), RuntimeError),
        (lambda: RANKS.process_name(HUGE), ValueError),
    ],
)
def test_a_number_that_python_does_not_write_is_named_by_its_size(make, kind):
    with pytest.raises(kind) as caught:
        make()
    assert "bits>" in str(caught.value) or "too large to be written>" in str(caught.value)


def test_what_is_no_name_or_rank_of_biggraphs():
    with pytest.raises(ValueError, match=r"\['allreduce'\] is no collective with a choice"):
        choose(["allreduce"], 1000, TOPOLOGY)
    for wrong in (True, 0.0, "0"):
        with pytest.raises(ValueError, match=f"there is no rank {wrong!r}"):
            RANKS.process_name(wrong)
        with pytest.raises(RuntimeError, match="Invalid rank for trainer"):
            RANKS.trainer(wrong)
    assert RANKS.process_name(np.int64(1)) == "Trainer-1"
    assert RANKS.trainer(np.int64(1)) == 1
    assert RankPlan.from_roles({"a": 2}, machines=np.array([0, 1])).machines == (0, 1)


def test_a_long_value_is_cut():
    assert given.shown(list(range(100))) == repr(list(range(100)))[:60] + "..."
