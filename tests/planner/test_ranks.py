"""Plans of roles: blocks, groups, machines, JSON, and what is refused."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccoll.planner import ProcessRanks, RankPlan

ROLES = {"trainer": 4, "parameter_server": 4, "lock_server": 1}
PLAN = RankPlan.from_roles(ROLES)

some_roles = st.dictionaries(
    st.text("abcä_-. é", min_size=1, max_size=8).filter(lambda name: name == name.strip()),
    st.integers(0, 9),
    min_size=1,
    max_size=5,
).filter(lambda roles: sum(roles.values()))


def test_roles_are_blocks_in_the_given_order():
    assert PLAN.world_size == 9
    assert PLAN.roles == ROLES
    assert list(PLAN.roles) == list(ROLES)
    assert PLAN.ranks("trainer") == (0, 1, 2, 3)
    assert PLAN.ranks("parameter_server") == (4, 5, 6, 7)
    assert PLAN.ranks("lock_server") == (8,)
    assert RankPlan.from_roles(dict(reversed(ROLES.items()))).ranks("trainer") == (5, 6, 7, 8)


@settings(max_examples=60, deadline=None)
@given(some_roles)
def test_role_and_index_lead_back_to_the_rank(roles):
    plan = RankPlan.from_roles(roles)
    ranks = list(range(plan.world_size))
    assert [plan.ranks(plan.role_of(rank))[plan.index_of(rank)] for rank in ranks] == ranks
    assert [rank for role in plan.roles for rank in plan.ranks(role)] == ranks


@settings(max_examples=60, deadline=None)
@given(some_roles, st.data())
def test_a_plan_comes_back_from_json_as_it_was(roles, data):
    machines = data.draw(st.none() | st.integers(1, max(roles.values())))
    plan = RankPlan.from_roles(roles, machines=machines)
    members = data.draw(st.lists(st.integers(0, plan.world_size - 1), min_size=1, unique=True))
    plan = plan.with_group("some", members, repeat=data.draw(st.integers(1, 3)))
    again = RankPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert list(again.groups) == list(plan.groups)
    assert again.to_json() == plan.to_json()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_does_not_change():
    with pytest.raises(AttributeError):
        PLAN.counts = ()
    PLAN.roles["trainer"] = 99
    PLAN.groups.clear()
    assert PLAN.roles == ROLES
    assert len(PLAN.groups) == 3


def test_by_default_each_role_that_has_ranks_is_a_group():
    plan = RankPlan.from_roles({"a": 2, "none": 0, "b": 1})
    assert list(plan.groups.items()) == [("a", (0, 1)), ("b", (2,))]
    assert RankPlan.from_roles(ROLES, groups={}).groups == {}


def test_groups_hold_roles_and_ranks_in_the_order_given():
    plan = RankPlan.from_roles(ROLES, groups={"z": ["lock_server", "trainer"], "a": [5, 4], "same": [5, 4]})
    assert list(plan.groups.items()) == [("z", (8, 0, 1, 2, 3)), ("a", (5, 4)), ("same", (5, 4))]


def test_a_group_that_is_there_several_times_is_several_groups():
    plan = PLAN.with_group("stripe", ["trainer", 8], repeat=3)
    assert list(plan.groups)[3:] == ["stripe.0", "stripe.1", "stripe.2"]
    assert {plan.groups[name] for name in list(plan.groups)[3:]} == {(0, 1, 2, 3, 8)}
    assert PLAN.with_group("one", [0]).groups["one"] == (0,)
    assert len(PLAN.groups) == 3


def test_machine_i_has_rank_i_of_each_role():
    plan = RankPlan.from_roles(ROLES, machines=4)
    assert [plan.ranks_on(machine) for machine in range(4)] == [(0, 4, 8), (1, 5), (2, 6), (3, 7)]
    assert [plan.machine_of(rank) for rank in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert plan.ranks_on(None) == ()
    assert plan.num_machines == 4


def test_neighbours_share_a_machine_where_there_are_more_ranks_than_machines():
    plan = RankPlan.from_roles({"worker": 7, "logger": 1}, machines=3)
    assert [plan.ranks_on(machine) for machine in range(3)] == [(0, 1, 2, 7), (3, 4), (5, 6)]


def test_the_machine_of_each_rank_can_be_given():
    plan = RankPlan.from_roles({"a": 2, "b": 2}, machines=[1, 0, None, np.int64(1)])
    assert plan.ranks_on(1) == (0, 3)
    assert plan.ranks_on(None) == (2,)
    assert RankPlan.from_json(plan.to_json()) == plan


def test_without_machines_nothing_is_said_about_them():
    assert PLAN.num_machines == 0
    assert PLAN.machine_of(3) is None
    with pytest.raises(ValueError, match="machines="):
        PLAN.ranks_on(0)


def test_integers_of_numpy_become_pythons():
    plan = RankPlan((("a", np.int64(3)),), [("g", np.array([2, 0]))], np.array([0, 1, 1]))
    assert plan == RankPlan((("a", 3),), (("g", (2, 0)),), (0, 1, 1))
    assert hash(plan)
    assert json.loads(plan.to_json())["groups"] == [["g", [2, 0]]]
    assert plan.role_of(np.int32(2)) == "a"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"roles": {}}, ValueError, "0 ranks together; use 1 to"),
        ({"roles": {"a": 0}}, ValueError, "0 ranks together"),
        ({"roles": {"a": -1}}, ValueError, "role 'a' has -1 ranks"),
        ({"roles": {"a": 1 << 30}}, ValueError, "role 'a' has 1073741824 ranks"),
        ({"roles": {"a": 1 << 20, "b": 1}}, ValueError, "1048577 ranks together"),
        ({"roles": {"a": 1.0}}, TypeError, "role 'a' is 1.0, which is not an integer"),
        ({"roles": {"a": True}}, TypeError, "role 'a' is True"),
        ({"roles": {"": 1}}, ValueError, "name of a role is ''"),
        ({"roles": {" a": 1}}, ValueError, "no blanks at its ends"),
        ({"roles": {"a\n": 1}}, ValueError, "printable"),
        ({"roles": {1: 1}}, TypeError, "name of a role is 1"),
        ({"roles": [("a", 1)]}, TypeError, "write {"),
        ({"groups": {"g": []}}, ValueError, "group 'g' is empty"),
        ({"groups": {"g": [0, 0]}}, ValueError, "group 'g' names a rank twice"),
        ({"groups": {"g": ["trainer", 3]}}, ValueError, "group 'g' names a rank twice"),
        ({"groups": {"g": [9]}}, ValueError, "group 'g' holds rank 9, and there is none; use 0 to 8"),
        ({"groups": {"g": [-1]}}, ValueError, "holds rank -1"),
        ({"groups": {"g": [1.5]}}, TypeError, "1.5"),
        ({"groups": {"g": ["nobody"]}}, ValueError, "no role 'nobody'; there is: trainer"),
        ({"groups": {"g": "trainer"}}, TypeError, r"write a list, \['trainer'\]"),
        ({"machines": 0}, ValueError, "0 machines, and the largest role has 4 ranks; use 1 to 4"),
        ({"machines": 5}, ValueError, "5 machines, and the largest role has 4 ranks"),
        ({"machines": "4"}, TypeError, "'4'"),
        ({"machines": [0] * 8}, ValueError, "8 machines are given for 9 ranks"),
        ({"machines": [0] * 8 + [2]}, ValueError, "there is a machine 2"),
        ({"machines": [0] * 8 + [-1]}, ValueError, "there is a machine -1"),
        ({"machines": [0] * 8 + [0.5]}, TypeError, "machine of rank 8 is 0.5"),
    ],
)
def test_what_makes_no_plan_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        RankPlan.from_roles(**{"roles": ROLES, **arguments})


def test_what_is_not_in_a_plan_is_refused_with_what_is():
    with pytest.raises(
        ValueError, match="there is no role 'x'; there is: trainer, parameter_server, lock_server"
    ):
        PLAN.ranks("x")
    for ask in (PLAN.role_of, PLAN.index_of, PLAN.machine_of):
        with pytest.raises(ValueError, match="rank 9, and there is none; use 0 to 8"):
            ask(9)
        with pytest.raises(ValueError, match="rank -1"):
            ask(-1)
        with pytest.raises(TypeError):
            ask(True)
    with pytest.raises(ValueError, match="no machine 4; use 0 to 3"):
        RankPlan.from_roles(ROLES, machines=4).ranks_on(4)
    with pytest.raises(ValueError, match="two groups of the name 'trainer'"):
        PLAN.with_group("trainer", [0])
    with pytest.raises(ValueError, match="repeat=0"):
        PLAN.with_group("g", [0], repeat=0)


def changed(**fields):
    return json.dumps({**json.loads(PLAN.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no JSON"),
        (b"\xff\xfe\xfd", "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "'document'"),
        ("{}", "'format' is missing"),
        (changed(format="other"), "'format'"),
        (changed(version=2), "'version' is 2"),
        (changed(version=True), "'version' is True"),
        (changed(more=1), "'more' is unknown"),
        ('{"version": 1, "version": 1}', "'version' is there twice"),
        ('{"version": NaN}', "NaN"),
        (changed(roles={"a": 1}), "'roles'"),
        (changed(roles=[["a", 1.5]]), "'roles'"),
        (changed(roles=[["a", 1, 2]]), "'roles'"),
        (changed(roles=[["a", True]]), "'roles'"),
        (changed(roles=[["a", 5], ["a", 4]]), "'roles' is wrong: there are two roles of the name 'a'"),
        (changed(roles=[["\ud800", 9]]), "'roles' is wrong"),
        (changed(groups=None), "'groups'"),
        (changed(groups=[["g", [10]]]), "'groups' is wrong: group 'g' holds rank 10"),
        (changed(groups=[["g", [0]], ["g", [0]]]), "'groups' is wrong"),
        (changed(machines=4), "'machines'"),
        (changed(machines=[0, 1]), "'machines' is wrong: 2 machines"),
        (changed(machines=[0] * 8 + [7]), "'machines' is wrong"),
    ],
)
def test_garbled_json_is_refused_with_the_field(text, named):
    with pytest.raises(ValueError) as raised:
        RankPlan.from_json(text)
    assert named in str(raised.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_json_with_a_character_changed_is_refused_or_another_plan(data):
    text = RankPlan.from_roles(ROLES, machines=4).to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.characters(max_codepoint=300)) + text[at + 1 :]
    try:
        plan = RankPlan.from_json(text)
    except ValueError:
        return
    assert RankPlan.from_json(plan.to_json()) == plan


def test_only_text_is_read():
    with pytest.raises(TypeError, match="not a dict"):
        RankPlan.from_json({})


def test_it_says_what_it_is_in_few_words():
    assert repr(RankPlan.from_roles(ROLES, machines=4)) == (
        "<RankPlan trainer=4 parameter_server=4 lock_server=1, 3 groups, 4 machines>"
    )


@pytest.mark.parametrize("name", [5, None, "", "x ", "a\n"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_a_name_is_one_however_often_the_group_is_there(name, repeat):
    with pytest.raises((TypeError, ValueError), match="the name of a group is"):
        RankPlan.from_roles({"a": 2}).with_group(name, ["a"], repeat)


@pytest.mark.parametrize("groups", [[], 5, "ab"])
def test_groups_are_a_mapping(groups):
    with pytest.raises(TypeError, match="groups is"):
        RankPlan.from_roles({"a": 2}, groups=groups)


def test_groups_that_would_fill_the_memory_are_refused_before_they_do():
    plan = RankPlan.from_roles({"a": 2})
    for make in (
        lambda: plan.with_group("g", ["a"], repeat=10**12),
        lambda: plan.with_group("g", [], repeat=10**12),
        lambda: ProcessRanks.from_num_invocations(1, 200_000).groups(),
        lambda: ProcessRanks.from_num_invocations(1, 200_000).plan(),
    ):
        with pytest.raises(ValueError, match="members together"):
            make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asynccoll.planner.ranks.MOST_MEMBERS", 4)
        plan.with_group("g", ["a"])
        with pytest.raises(ValueError, match="members together"):
            RankPlan(plan.counts, (("g", (0, 1)), ("h", (0, 1)), ("i", (0,))))
