"""allreduce_tree: nested containers of arrays and numbers, reduced as one operation and given back as they were."""

import asyncio
import dataclasses
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import carriers
import numpy as np
import pytest
import reference
import torch
from faults import in_step
from ranks import each, filled, in_turn, on_all, ordinary, outcomes, sum_of_ranks

from asynccoll import CollectiveMismatch, RemoteError
from asynccoll.sim.driver import Conditions


class Layer(NamedTuple):
    weight: object
    bias: object


@dataclasses.dataclass
class Model:
    layers: list
    scale: float
    name: None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


@dataclasses.dataclass
class Counted:
    value: object
    count: int = dataclasses.field(default=3, init=False)


def model(rank):
    """One of everything, each number a multiple of rank + 1."""
    k = rank + 1
    return {
        "model": Model(
            [Layer(np.full((2, 3), 1.0 * k), torch.full((3,), 2.0 * k)), Frozen(np.float32(k))], 0.5 * k
        ),
        "steps": 10 * k,
        "tuple": (np.arange(4, dtype=np.int16) * k, [], (), {}, None),
        3: [np.array(k, ">i8"), torch.arange(2) * k, np.full(2, k, np.float16), [[[k]]]],
        "big": np.arange(3000.0) * k,
    }


def flat(tree):
    """The containers' types and the leaves, depth first."""
    if isinstance(tree, dict):
        yield type(tree), list(tree)
        for value in tree.values():
            yield from flat(value)
    elif isinstance(tree, list | tuple):
        yield type(tree), len(tree)
        for value in tree:
            yield from flat(value)
    elif dataclasses.is_dataclass(tree):
        yield type(tree), [field.name for field in dataclasses.fields(tree)]
        for field in dataclasses.fields(tree):
            yield from flat(getattr(tree, field.name))
    elif hasattr(tree, "dtype"):
        yield carriers.kind(tree), carriers.bits(tree).tolist(), tuple(tree.shape)
    else:
        yield type(tree), tree


@pytest.mark.torch
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree", "doubling"])
async def test_a_tree_of_everything_comes_back_summed_in_its_own_containers(world, size, algorithm):
    right = list(flat(model(sum(range(1, size + 1)) - 1)))
    async with world(size) as comms:
        trees = [model(rank) for rank in range(size)]
        results = await each(comms, "allreduce_tree", trees, algorithm=algorithm)
        for rank, result in enumerate(results):
            assert list(flat(result)) == right
            assert list(flat(trees[rank])) == list(flat(model(rank)))  # the input is as it was


@pytest.mark.parametrize("op", reference.OPS)
async def test_every_op_gives_each_leaf_what_a_lone_allreduce_gives(world, op):
    rng = np.random.default_rng(3)
    dtypes = [dtype for dtype in reference.DTYPES if not reference.refused(op, dtype)]
    async with world(3) as comms:
        size = len(comms)
        inputs = {}
        for dtype in dtypes * 2:  # two leaves of each dtype, which travel together
            inputs[f"{dtype} {len(inputs)}"] = reference.inputs(dtype, op, size, (7,), rng)
        trees = [
            {
                name: carriers.hold("numpy/strided", name.split()[0], values[r]).value
                for name, values in inputs.items()
            }
            for r in range(size)
        ]
        results = await each(comms, "allreduce_tree", trees, op)
        for name, values in inputs.items():
            found = [carriers.bits(result[name]) for result in results]
            assert len({one.tobytes() for one in found}) == 1, name
            assert reference.difference(op, name.split()[0], values, found[0]) is None, name


async def test_python_numbers_come_back_as_python_numbers(world):
    async with world(3) as comms:
        size, big = len(comms), ordinary(2**60, 2**56)
        values = [{"i": big, "f": 0.1, "b": comm.rank == 1, "n": -5} for comm in comms]
        for result in await each(comms, "allreduce_tree", values):
            fraction = ordinary(0.1 + 0.1 + 0.1, pytest.approx(0.1 * size))
            assert result == {"i": size * big, "f": fraction, "b": True, "n": -5 * size}
            assert [type(value) for value in result.values()] == [int, float, bool, int]
        for result in await each(comms, "allreduce_tree", values, "max"):
            assert result == {"i": big, "f": 0.1, "b": True, "n": -5}
        averages = await each(comms, "allreduce_tree", [[1.0 * comm.rank, [2.5]] for comm in comms], "avg")
        assert averages == [[(size - 1) / 2, [2.5]]] * size
        for result in await each(comms, "allreduce_tree", [comm.rank for comm in comms]):
            assert (type(result), result) == (int, sum_of_ranks(comms))


async def test_none_is_structure_and_an_empty_tree_is_a_tree(world):
    async with world(3) as comms:
        for tree in (None, {}, [], (), [None], {"a": None, "b": []}, Frozen(None), Layer(None, ())):
            for result in await each(comms, "allreduce_tree", [tree] * len(comms)):
                assert (type(result), result) == (type(tree), tree)
        trees = [{"grad": None, "other": comm.rank} for comm in comms]
        results = await each(comms, "allreduce_tree", trees)
        assert results == [{"grad": None, "other": sum_of_ranks(comms)}] * len(comms)


async def test_dicts_meet_by_key_and_keep_the_callers_order(world):
    async with world(3) as comms:
        orders = in_turn(comms, [["a", "b", "c", 1], ["c", 1, "a", "b"], [1, "b", "c", "a"]])
        values = {"a": 1, "b": 10, "c": 100, 1: 1000}
        trees = [{key: np.array([values[key]]) for key in order} for order in orders]
        for order, result in zip(orders, await each(comms, "allreduce_tree", trees), strict=True):
            assert list(result) == order
            assert {key: value.item() for key, value in result.items()} == {
                k: len(comms) * v for k, v in values.items()
            }


async def test_kinds_of_dict_and_subclasses_of_tuple_are_kept(world):
    async with world(2) as comms:
        size = len(comms)
        trees = [OrderedDict(b=Layer(1, np.ones(2)), a=2), defaultdict(list, b=Layer(1, np.ones(2)), a=2)]
        ordered, defaulted, *_ = await each(comms, "allreduce_tree", in_turn(comms, trees))
        assert type(ordered) is OrderedDict
        assert type(defaulted) is defaultdict
        assert list(ordered) == ["b", "a"]
        for result in (ordered, defaulted):
            assert (type(result["b"]), result["b"].weight, result["a"]) == (Layer, size, 2 * size)
            assert result["b"].bias.tolist() == [size] * 2
        assert defaulted["missing"] == []


async def test_fields_that_init_does_not_take_are_kept(world):
    async with world(2) as comms:
        size = len(comms)
        trees = [Counted(np.full(2, rank + 1.0)) for rank in range(size)]
        for result in await each(comms, "allreduce_tree", trees):
            assert type(result) is Counted
            assert result.value.tolist() == [sum_of_ranks(comms) + size] * 2
            assert result.count == 3 * size


@pytest.mark.torch
async def test_containers_of_leaves_need_not_agree_between_ranks(world):
    async with world(4) as comms:
        numbers = np.arange(5, dtype=np.float32)
        kinds = [numbers, torch.from_numpy(numbers), memoryview(numbers), numbers.astype(">f4")]
        leaves = in_turn(comms, kinds)
        trees = [{"leaf": leaf, "n": [1]} for leaf in leaves]
        for leaf, result in zip(leaves, await each(comms, "allreduce_tree", trees), strict=True):
            assert carriers.kind(result["leaf"]) == carriers.kind(leaf)
            assert carriers.bits(result["leaf"]).tolist() == [len(comms) * n for n in range(5)]
            assert not carriers.share_memory(result["leaf"], leaf)


async def test_leaves_of_one_tree_can_be_kept_and_written_apart(world):
    """They may live in one block of memory, but have no byte in common."""
    async with world(2) as comms:
        trees = [[np.ones(3), np.ones((2, 2)), np.ones(1)]] * len(comms)
        for result in await each(comms, "allreduce_tree", trees):
            for number, leaf in enumerate(result):
                leaf[...] = number
            assert [leaf.tolist() for leaf in result] == [[0] * 3, [[1, 1]] * 2, [2]]


async def test_many_leaves_are_one_operation(world):
    async with world(3) as comms:
        before = [comm.stats()["operations"] for comm in comms]
        trees = [{f"layer {n}": np.full(n % 50, comm.rank, np.float32) for n in range(500)} for comm in comms]
        for result in await each(comms, "allreduce_tree", trees):
            assert all((leaf == sum_of_ranks(comms)).all() for leaf in result.values())
        for comm, count in zip(comms, before, strict=True):
            assert comm.stats()["operations"] - count == 1


async def test_large_trees_and_small_ones_run_at_once(world):
    conditions = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 20)
    async with world(3, conditions=conditions) as comms:

        async def rank(comm):
            works = [
                comm.allreduce_tree({"x": np.full(n, comm.rank + 1.0), "n": n})
                for n in (200_000, 1, 50_000, 0)
            ]
            return await asyncio.gather(*works)

        for results in await on_all(comms, rank):
            for count, result in zip((200_000, 1, 50_000, 0), results, strict=True):
                assert result["n"] == len(comms) * count
                assert result["x"].shape == (count,)
                assert (result["x"] == sum_of_ranks(comms) + len(comms)).all()


@pytest.mark.parametrize(
    ("tree", "op", "place"),
    [
        ({"a": [1, {"b": "text"}]}, "sum", "['a'][1]['b']"),
        ([np.ones(2), {1, 2}], "sum", "[1]"),
        ({"deep": (Layer(np.ones(1), np.zeros(2, "M8[s]")),)}, "sum", "['deep'][0][1]"),
        (Model([1, object()], 1.0), "sum", ".layers[1]"),
        ({"n": [2**63]}, "sum", "['n'][0]"),
        ({"n": [0.5, np.ones(2, np.int32)]}, "avg", "['n'][1]"),
        ({"c": 1j}, "sum", "['c']"),
        ("text", "sum", "itself"),
    ],
)
async def test_a_leaf_that_cannot_be_reduced_is_named(world, tree, op, place):
    async with world(2) as comms:
        for error in await outcomes(comms, lambda comm: comm.allreduce_tree(tree, op)):
            assert type(error) is TypeError
            assert place in str(error)
        errors = await outcomes(
            comms, lambda comm: comm.allreduce_tree(tree if comm.rank == 1 else [1.0], op)
        )
        assert [type(error) for error in errors] == filled(comms, [RemoteError, TypeError, RemoteError])
        await in_step(comms)


async def test_a_callable_is_refused(world):
    async with world(2) as comms:
        for error in await outcomes(comms, lambda comm: comm.allreduce_tree([1], max)):
            assert type(error) is TypeError
            assert "allreduce()" in str(error)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1, 2, 3]),
        ([1], {"0": 1}),
        ({"a": None}, {"a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": np.ones(2)}, {"a": np.ones(3)}),
        ({"a": np.ones((2, 3))}, {"a": np.ones((3, 2))}),
        ({"a": np.ones(2)}, {"a": np.ones(2, np.float32)}),
        ([[1], 2], [1, [2]]),
        ({1: 1}, {"1": 1}),
        (Frozen(1), {"value": 1}),
        ({"a": np.float64(1)}, {"a": np.ones(1)}),
    ],
    ids=str,
)
async def test_trees_that_differ_are_a_mismatch_of_structure(world, one, other):
    async with world(3) as comms:
        trees = filled(comms, [one, other, one])
        for error in await outcomes(comms, lambda comm: comm.allreduce_tree(trees[comm.rank])):
            assert type(error) is CollectiveMismatch
            assert error.field == "structure"
            assert error.values[0] == error.values[2] != error.values[1]
            assert set(error.values) == set(range(len(comms)))
        assert await each(comms, "allreduce_tree", [[1]] * len(comms)) == [[len(comms)]] * len(comms)
