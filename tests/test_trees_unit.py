"""Flattening by itself: order of the leaves, the text that ranks compare, places in messages, the way back.

What a reduced tree looks like is the business of the conformance suite.
"""

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

from asynccoll.trees import flatten


class Layer(NamedTuple):
    weight: Any
    bias: Any


@dataclasses.dataclass
class Model:
    layers: list
    step: int = 0


def arrays(*shapes, dtype="f4"):
    return [np.zeros(shape, dtype) for shape in shapes]


def paths(tree):
    return [leaf.path for leaf in flatten(tree)[0]]


def text(tree):
    return flatten(tree)[1]


def rebuilt(tree):
    """The tree with its leaves numbered in traversal order."""
    leaves, _, rebuild = flatten(tree)
    return rebuild(list(range(len(leaves))))


class TestOrder:
    def test_leaves_come_in_traversal_order_with_their_places(self):
        a, b, c, d = arrays(1, 2, 3, 4)
        tree = {"x": [a, (b,)], "y": Model([Layer(c, d)])}
        assert paths(tree) == [
            "['x'][0]",
            "['x'][1][0]",
            "['y'].layers[0][0]",
            "['y'].layers[0][1]",
            "['y'].step",
        ]

    def test_dicts_are_walked_by_sorted_key_whatever_their_own_order(self):
        a, b, c = arrays(1, 2, 3)
        one, two = {"b": b, "a": a, "c": c}, {"c": c, "a": a, "b": b}
        assert paths(one) == paths(two) == ["['a']", "['b']", "['c']"]
        assert text(one) == text(two)

    def test_keys_of_different_types_can_be_sorted(self):
        (a,) = arrays(1)
        assert paths({2: a, "b": a, 1: a, (0, 1): a}) == ["[1]", "[2]", "['b']", "[(0, 1)]"]

    def test_an_array_alone_is_a_leaf_without_a_place(self):
        assert paths(np.zeros(3)) == [""]

    def test_none_is_no_leaf(self):
        assert paths([None, np.zeros(1), None]) == ["[1]"]


class TestText:
    @pytest.mark.parametrize(
        "other",
        [
            [np.zeros((2, 3), "f4")],  # one leaf less
            [np.zeros((2, 3), "f4"), np.zeros((1, 3), "f4")],  # another shape
            [np.zeros((2, 3), "f4"), np.zeros(3, "f8")],  # another dtype
            {"a": np.zeros((2, 3), "f4"), "b": np.zeros(3, "f4")},
            [[np.zeros((2, 3), "f4"), np.zeros(3, "f4")]],
            [[np.zeros((2, 3), "f4")], np.zeros(3, "f4")],
            [np.zeros((2, 3), "f4"), np.zeros(3, "f4"), None],
            [None, np.zeros((2, 3), "f4"), np.zeros(3, "f4")],
            [np.zeros((2, 3), "f4"), np.zeros(3, "f4"), []],
            Model(arrays((2, 3), 3)),
        ],
        ids=range(10),
    )
    def test_trees_that_do_not_correspond_have_different_texts(self, other):
        assert text(arrays((2, 3), 3)) != text(other)

    def test_contents_make_no_difference(self):
        assert text({"a": np.zeros(3), "n": 1}) == text({"a": np.ones(3), "n": 2})

    def test_python_numbers_correspond_to_arrays_of_no_dimensions(self):
        assert text([1, 2.5, True]) == text([np.zeros((), "i8"), np.zeros((), "f8"), np.zeros((), "?")])

    def test_the_fields_and_the_type_of_a_dataclass_count(self):
        @dataclasses.dataclass
        class Other:
            layers: list
            step: int = 0

        assert text(Model([])) != text(Other([]))


class TestRebuild:
    def test_containers_keep_their_types(self):
        (a,) = arrays(1)
        tree = {"l": [a], "t": (a, a), "n": Layer(a, None), "m": Model([a], 5)}
        assert rebuilt(tree) == {
            "l": [0],
            "m": Model([1], 2),
            "n": Layer(3, None),
            "t": (4, 5),
        }
        assert type(rebuilt(tree)["n"]) is Layer

    def test_dicts_keep_the_callers_order_and_type(self):
        (a,) = arrays(1)
        made = rebuilt(collections.OrderedDict([("b", a), ("a", a)]))
        assert type(made) is collections.OrderedDict
        assert list(made.items()) == [("b", 1), ("a", 0)]
        assert list(rebuilt({"b": a, "a": a})) == ["b", "a"]

    def test_empty_containers_come_back(self):
        tree = {"a": [], "b": {}, "c": ()}
        assert rebuilt(tree) == tree

    def test_it_can_be_done_again(self):
        leaves, _, rebuild = flatten([np.zeros(1), 2])
        assert len(leaves) == 2
        assert rebuild([5, 6]) == [5, 6]
        assert rebuild([7, 8]) == [7, 8]

    def test_the_tree_itself_is_not_changed(self):
        tree = {"a": [np.zeros(1)]}
        made = rebuilt(tree)
        assert made["a"] is not tree["a"]
        assert isinstance(tree["a"][0], np.ndarray)


class TestLeaves:
    @pytest.mark.parametrize(
        ("number", "dtype"), [(7, "int64"), (-(1 << 63), "int64"), (2.5, "float64"), (True, "bool")]
    )
    def test_python_numbers_travel_as_arrays_and_come_back_as_themselves(self, number, dtype):
        ((leaf,), _, _) = flatten(number)
        assert leaf.array.dtype.name == dtype
        assert leaf.array.shape == ()
        back = leaf.result(leaf.array.pack())
        assert back == number
        assert type(back) is type(number)

    def test_a_numpy_scalar_is_an_array(self):
        ((leaf,), _, _) = flatten(np.float64(2.5))
        assert leaf.python is None

    def test_an_int_beyond_64_bits_is_refused_with_its_place(self):
        for number in (1 << 63, -(1 << 63) - 1):
            with pytest.raises(TypeError, match=r"leaf \['n'\] is an int beyond 64 bits"):
                flatten({"n": number})

    @pytest.mark.parametrize(
        "value", ["text", b"bytes", object(), {1, 2}, 1j], ids=lambda v: type(v).__name__
    )
    def test_what_cannot_be_reduced_is_refused_with_its_place(self, value):
        with pytest.raises(TypeError, match=r"leaf \['a'\]\[1\]"):
            flatten({"a": [1, value]})

    def test_a_leaf_alone_is_called_itself(self):
        with pytest.raises(TypeError, match="leaf itself"):
            flatten("text")

    def test_a_dataclass_type_is_no_tree(self):
        with pytest.raises(TypeError, match="leaf itself"):
            flatten(Model)
