"""Who holds a key: everywhere alike, evenly, and moved only where it must be."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccoll.planner import RankPlan
from asynccoll.planner.placing import holder

keys = st.recursive(
    st.text(max_size=8) | st.binary(max_size=8) | st.integers(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


PINNED = {
    "entity_0": 6,
    "entity_1": 6,
    "": 4,
    b"entity_0": 5,
    0: 7,
    7: 4,
    -1: 7,
    1 << 64: 4,
    ("rel", 3): 7,
    ("rel", (3, b"x")): 6,
    (): 5,
}


def test_places_are_those_of_every_version():
    # Data lies where an earlier version put it: these numbers never change.
    plan = RankPlan.from_roles({"trainer": 4, "parameter_server": 4})
    found = [plan.place(key, "parameter_server") for key in PINNED]
    assert found == list(PINNED.values())


def test_each_holder_has_its_share():
    counts = collections.Counter(holder(f"key {number}", 8) for number in range(8000))
    assert sorted(counts) == list(range(8))
    # 1000 expected, with a standard deviation of 30.
    assert all(850 < count < 1150 for count in counts.values())


def test_one_more_holder_takes_its_share_and_nothing_else_moves():
    names = [("key", number) for number in range(2000)]
    moved = 0
    for name in names:
        before, after = holder(name, 7), holder(name, 8)
        if before != after:
            assert after == 7
            moved += 1
    assert 180 < moved < 320  # 250 expected


@settings(max_examples=60, deadline=None)
@given(keys, keys, st.integers(1, 9))
def test_equal_keys_have_one_place(one, other, count):
    assert 0 <= holder(one, count) < count
    assert holder(one, 1) == 0
    if one == other:
        assert holder(one, count) == holder(other, count)


def test_keys_that_look_alike_are_different_keys():
    alike = [
        1,
        "1",
        b"1",
        (1,),
        ("1",),
        ((1,),),
        ("1", ""),
        ("", "1"),
        (),
        "",
        b"",
        0,
        -1,
        255,
        "i1:1",
        (1, "1"),
    ]
    places = {tuple(holder((key, salt), 1000) for salt in range(3)) for key in alike}
    assert len(places) == len(alike)


def test_what_equals_a_key_has_its_place():
    class Name(str):
        pass

    for number in range(20):
        assert holder(np.int64(number), 50) == holder(number, 50)
        assert holder(Name(number), 50) == holder(str(number), 50)


def test_keys_of_any_size_have_a_place():
    for key in (10**5000, -(10**5000), "\udc80", "x" * 100_000):
        assert 0 <= holder(key, 5) < 5


@pytest.mark.parametrize("key", [1.0, None, True, ["a"], {"a"}, bytearray(b"a"), ("a", None), (False,)])
def test_other_keys_are_refused(key):
    with pytest.raises(TypeError, match="a key is a str, bytes, int or a tuple of these"):
        holder(key, 3)


def test_keys_in_one_another_for_ever_are_refused():
    key = ()
    for depth in range(1, 5001):  # of more than some hundreds Python itself cannot write the key
        key = (key,)
        if depth in (40, 5000):
            with pytest.raises(ValueError, match="tuples in one another"):
                holder(key, 3)


def test_somebody_must_be_there():
    with pytest.raises(ValueError, match="at least one"):
        holder("a", 0)
    plan = RankPlan.from_roles({"a": 1, "none": 0})
    with pytest.raises(ValueError, match="role 'none' has no ranks"):
        plan.place("key", "none")
    with pytest.raises(ValueError, match="no role 'x'"):
        plan.place("key", "x")


def test_a_place_is_a_rank_of_the_role():
    plan = RankPlan.from_roles({"a": 3, "b": 3})
    for number in range(50):
        assert plan.place(number, "b") == plan.place(number, "a") + 3
