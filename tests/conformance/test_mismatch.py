"""Ranks that disagree: every one of them raises `CollectiveMismatch` with all ranks' values, and the mesh stays in step."""

import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from faults import in_step, in_virtual_time, read_slowly
from ranks import in_turn, on_all, ordinary, outcomes, sizes

from asynccoll import CollectiveMismatch
from asynccoll.sim.driver import Conditions
from asynccoll.trees import flatten

SIZES = (2, 3, 4)


class Variant(NamedTuple):
    """One way of disagreeing: what most ranks call, what the odd ones call, and how it must be reported."""

    label: str
    field: str
    usual: Callable[[Any], Any]
    usual_value: Any
    odd: Callable[[Any], Any]
    odd_value: Any


def ones(shape, dtype="float32"):
    return np.ones(shape, dtype)


def _shapes():
    odd_lengths = {n: sorted({n + 1, n - 1, 2 * n, 0} - {n}) for n in (1, 7, 1000, 1_000_000)}
    pairs = [((n,), (m,)) for n, odd in odd_lengths.items() for m in odd]
    pairs += [((2, 3), (3, 2)), ((6,), (2, 3)), ((1,), ()), ((0, 3), (3, 0))]
    for usual, odd in pairs:
        yield Variant(
            f"shape {usual} against {odd}",
            "shape",
            lambda comm, shape=usual: comm.allreduce(ones(shape)),
            usual,
            lambda comm, shape=odd: comm.allreduce(ones(shape)),
            odd,
        )
    yield Variant(
        "shape in place",
        "shape",
        lambda comm: comm.allreduce_(ones(7)),
        (7,),
        lambda comm: comm.allreduce_(ones(8)),
        (8,),
    )
    yield Variant(
        "shape of a broadcast's template",
        "shape",
        lambda comm: comm.broadcast(ones(7)),
        (7,),
        lambda comm: comm.broadcast(ones((7, 1))),
        (7, 1),
    )
    yield Variant(
        "shape of a broadcast's out",
        "shape",
        lambda comm: comm.broadcast(ones(70_000), out=ones(70_000)),
        (70_000,),
        lambda comm: comm.broadcast(ones(70_001), out=ones(70_001)),
        (70_001,),
    )


def _dtypes():
    pairs = [
        ("int32", "float32"),
        ("int64", "float64"),
        ("uint8", "int8"),
        ("bool", "uint8"),
        ("complex64", "float64"),
        ("float16", "int16"),
        ("float32", "float64"),
        ("float16", "float32"),
        ("int64", "int32"),
    ]
    for usual, odd in pairs:
        for verb in ("allreduce", "allgather", "broadcast"):
            yield Variant(
                f"dtype {usual} against {odd} in {verb}",
                "dtype",
                lambda comm, verb=verb, dtype=usual: getattr(comm, verb)(ones(9, dtype)),
                usual,
                lambda comm, verb=verb, dtype=odd: getattr(comm, verb)(ones(9, dtype)),
                odd,
            )
    yield Variant(
        "dtype of large arrays",
        "dtype",
        lambda comm: comm.allreduce(ones(300_000, "float32")),
        "float32",
        lambda comm: comm.allreduce(ones(300_000, "int32")),
        "int32",
    )
    yield Variant(
        "dtype of large gathered arrays",
        "dtype",
        lambda comm: comm.allgather(ones(100_000 + comm.rank, "float32")),
        "float32",
        lambda comm: comm.allgather(ones(100_000 + comm.rank, "int32")),
        "int32",
    )


def _ops():
    for usual, odd in (("sum", "max"), ("sum", "prod"), ("min", "max"), ("sum", "avg")):
        for label, value in (
            ("an array", lambda comm: ones(9)),
            ("a large array", lambda comm: ones(90_000)),
            ("an object", lambda comm: 3),
        ):
            yield Variant(
                f"op {usual} against {odd} of {label}",
                "op",
                lambda comm, op=usual, value=value: comm.allreduce(value(comm), op),
                usual,
                lambda comm, op=odd, value=value: comm.allreduce(value(comm), op),
                odd,
            )
    yield Variant(
        "op sum against a callable",
        "op",
        lambda comm: comm.allreduce([comm.rank], "sum"),
        "sum",
        lambda comm: comm.allreduce([comm.rank], lambda a, b: a + b),
        "callable",
    )
    yield Variant(
        "op of trees",
        "op",
        lambda comm: comm.allreduce_tree({"a": ones(3)}),
        "sum",
        lambda comm: comm.allreduce_tree({"a": ones(3)}, "max"),
        "max",
    )


def _paths():
    for label, usual, odd in (
        ("array against list", lambda comm: ones(3), lambda comm: [1.0, 1.0, 1.0]),
        ("large array against float", lambda comm: ones(300_000), lambda comm: 1.0),
        ("numpy scalar against Python's", lambda comm: np.float64(1.0), lambda comm: 1.0),
    ):
        for verb in ("allreduce", "allgather"):
            yield Variant(
                f"{label} in {verb}",
                "path",
                lambda comm, verb=verb, value=usual: getattr(comm, verb)(value(comm)),
                "array",
                lambda comm, verb=verb, value=odd: getattr(comm, verb)(value(comm)),
                "object",
            )
    yield Variant(
        "array with a named op against array with a callable",
        "path",
        lambda comm: comm.allreduce(ones(3)),
        "array",
        lambda comm: comm.allreduce(ones(3), np.add),
        "object",
    )


def _roots():
    for label, value in (
        ("an array", lambda comm, root: ones(9)),
        ("a large array", lambda comm, root: ones(300_000)),
        ("None where it is not the root", lambda comm, root: ones(9) if comm.rank == root else None),
        ("objects", lambda comm, root: {"from": comm.rank}),
    ):
        yield Variant(
            f"root of {label}",
            "root",
            lambda comm, value=value: comm.broadcast(value(comm, 0), root=0),
            0,
            lambda comm, value=value: comm.broadcast(value(comm, 1), root=1),
            1,
        )


def _names():
    calls = {
        "allreduce": lambda comm, name: comm.allreduce(ones(9), name=name),
        "large allreduce": lambda comm, name: comm.allreduce(ones(90_000), name=name),
        "objects": lambda comm, name: comm.allreduce("text", name=name),
        "broadcast": lambda comm, name: comm.broadcast(ones(9), name=name),
        "allgather": lambda comm, name: comm.allgather(ones(9), name=name),
        "barrier": lambda comm, name: comm.barrier(name=name),
        "tree": lambda comm, name: comm.allreduce_tree([ones(9)], name=name),
    }
    for label, call in calls.items():
        for usual, odd in (("a", "b"), (None, "b"), ("a", None)):
            yield Variant(
                f"name {usual} against {odd} of {label}",
                "name",
                lambda comm, call=call, name=usual: call(comm, name),
                usual,
                lambda comm, call=call, name=odd: call(comm, name),
                odd,
            )


def _algorithms():
    for n in (9, 90_000):
        for usual, odd in (("ring", "tree"), ("tree", "doubling"), ("auto", "ring"), ("ring", "auto")):
            yield Variant(
                f"algorithm {usual} against {odd} for {n} elements",
                "algorithm",
                lambda comm, n=n, algorithm=usual: comm.allreduce(ones(n), algorithm=algorithm),
                usual,
                lambda comm, n=n, algorithm=odd: comm.allreduce(ones(n), algorithm=algorithm),
                odd,
            )
    yield Variant(
        "algorithm of allgather",
        "algorithm",
        lambda comm: comm.allgather(ones(9), algorithm="ring"),
        "ring",
        lambda comm: comm.allgather(ones(9), algorithm="doubling"),
        "doubling",
    )


def _structures():
    base = {"w": ones((2, 3)), "b": ones(3), "n": 4}
    for label, tree in (
        ("another key", {"w": ones((2, 3)), "c": ones(3), "n": 4}),
        ("a leaf less", {"w": ones((2, 3)), "b": ones(3)}),
        ("a leaf's dtype", {"w": ones((2, 3), "int32"), "b": ones(3), "n": 4}),
        ("a leaf's shape", {"w": ones((3, 2)), "b": ones(3), "n": 4}),
        ("int against float", {"w": ones((2, 3)), "b": ones(3), "n": 4.0}),
        ("None for a leaf", {"w": ones((2, 3)), "b": None, "n": 4}),
        ("a list for a dict", [ones((2, 3)), ones(3), 4]),
        ("a deeper level", {"w": [ones((2, 3))], "b": ones(3), "n": 4}),
        ("much larger leaves", {"w": ones((2, 300_000)), "b": ones(3), "n": 4}),
    ):
        yield Variant(
            f"structure: {label}",
            "structure",
            lambda comm: comm.allreduce_tree(base),
            flatten(base)[1],
            lambda comm, tree=tree: comm.allreduce_tree(tree),
            flatten(tree)[1],
        )


def _verbs():
    calls = {
        "barrier": lambda comm: comm.barrier(),
        "allreduce": lambda comm: comm.allreduce(ones(9)),
        "broadcast": lambda comm: comm.broadcast(ones(9)),
        "allgather": lambda comm: comm.allgather(ones(9)),
        "allreduce_tree": lambda comm: comm.allreduce_tree([ones(9)]),
    }
    for usual, odd in itertools.permutations(calls, 2):
        yield Variant(f"{usual} against {odd}", "verb", calls[usual], usual, calls[odd], odd)
    yield Variant(
        "barrier against a large allreduce",
        "verb",
        calls["barrier"],
        "barrier",
        lambda comm: comm.allreduce(ones(300_000)),
        "allreduce",
    )


VARIANTS = [
    *_shapes(),
    *_dtypes(),
    *_ops(),
    *_paths(),
    *_roots(),
    *_names(),
    *_algorithms(),
    *_structures(),
    *_verbs(),
]


def odd_ranks(size):
    """Each rank in turn, and each pair where two are not everyone; of many ranks one alone, and one pair."""
    if size > 9:
        return [{size * 2 // 3}, {0, size - 1}]
    return [{rank} for rank in range(size)] + [
        set(pair) for pair in itertools.combinations(range(size), 2) if size > 2
    ]


COMBINATIONS = [(v, size, odd) for v in VARIANTS for size in SIZES for odd in odd_ranks(size)]


def test_the_matrix_is_as_large_as_it_is_said_to_be():
    assert len({variant.label for variant in VARIANTS}) == len(VARIANTS)
    assert len(VARIANTS) == 135
    assert sum(len(odd_ranks(size)) for size in SIZES) == 18
    assert len(COMBINATIONS) == 2430


def of_all(comms, usual, odd):
    """What each rank has: ``odd`` by rank, and ``usual`` on the others."""
    return {comm.rank: odd.get(comm.rank, usual) for comm in comms}


def assert_mismatch(results, field, values):
    """Every rank raised, with every rank's value and call site; no rank got a value."""
    for rank, error in enumerate(results):
        assert type(error) is CollectiveMismatch, error
        assert (error.field, error.values) == (field, values)
        assert error.rank == rank
        assert error.group == "world"
        assert set(error.sites) == set(values)
        assert all(site.startswith("test_mismatch.py:") for site in error.sites.values()), error.sites


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
async def test_every_rank_raises_and_the_next_operations_are_right(world, variant):
    for size in sizes(*SIZES):
        async with world(size) as comms:
            odds = odd_ranks(size)
            for odd in ordinary(odds, odds[VARIANTS.index(variant) % 2 :][:1]):
                results = await outcomes(
                    comms, lambda comm, odd=odd: (variant.odd if comm.rank in odd else variant.usual)(comm)
                )
                values = {
                    rank: variant.odd_value if rank in odd else variant.usual_value for rank in range(size)
                }
                assert_mismatch(results, variant.field, values)
                await in_step(comms)


async def test_three_opinions_are_all_reported(world):
    async with world(4) as comms:
        dtypes = in_turn(comms, ["int32", "float32", "uint32", "float32"])
        results = await outcomes(comms, lambda comm: comm.allreduce(ones(9, dtypes[comm.rank])))
        assert_mismatch(results, "dtype", dict(enumerate(dtypes)))
        await in_step(comms)


async def test_the_first_field_that_differs_is_the_one_reported(world):
    async with world(3) as comms:
        results = await outcomes(
            comms,
            lambda comm: (
                comm.allreduce(ones(9, "int32"), "max", name="b")
                if comm.rank == 1
                else comm.allreduce(ones(8))
            ),
        )
        assert_mismatch(results, "op", of_all(comms, "sum", {1: "max"}))
        await in_step(comms)


async def test_half_types_of_equal_size_are_told_apart(world):
    torch = pytest.importorskip("torch")
    async with world(3) as comms:
        results = await outcomes(
            comms,
            lambda comm: comm.allreduce(torch.ones(9, dtype=torch.bfloat16 if comm.rank else torch.float16)),
        )
        assert_mismatch(results, "dtype", of_all(comms, "bfloat16", {0: "float16"}))
        await in_step(comms)


@pytest.mark.parametrize("size", SIZES)
async def test_a_template_is_held_against_the_roots_array_where_others_pass_none(world, size):
    async with world(size) as comms:
        for root, odd in ordinary(
            list(itertools.permutations(range(size), 2)), [(0, size - 1), (size - 1, 1)]
        ):
            results = await outcomes(
                comms,
                lambda comm, root=root, odd=odd: comm.broadcast(
                    {root: ones((4, 5)), odd: ones((5, 4))}.get(comm.rank), root
                ),
            )
            values = {rank: {root: (4, 5), odd: (5, 4)}.get(rank) for rank in range(size)}
            assert_mismatch(results, "shape", values)
            await in_step(comms)


async def test_an_array_template_does_not_take_an_object(world):
    async with world(3) as comms:
        results = await outcomes(
            comms, lambda comm: comm.broadcast({0: {"no": "array"}, 2: ones(3)}.get(comm.rank))
        )
        assert_mismatch(results, "path", of_all(comms, None, {0: "object", 2: "array"}))
        await in_step(comms)


async def test_a_root_for_which_nobody_has_a_value_is_reported_as_a_root(world):
    # Rank 2 has computed the root wrongly: it thinks that it is the root, and has nothing to give.
    async with world(3) as comms:
        results = await outcomes(
            comms,
            lambda comm: comm.broadcast(ones(9) if comm.rank == 0 else None, 2 if comm.rank == 2 else 0),
        )
        assert_mismatch(results, "root", of_all(comms, 0, {2: 2}))
        await in_step(comms)


async def test_the_message_names_the_odd_rank_first_and_every_call_site(world):
    async with world(4) as comms:
        results = await outcomes(
            comms, lambda comm: comm.allreduce(ones(9, "float64" if comm.rank == 2 else "float32"))
        )
        text = str(results[1])
        size = len(comms)
        if size == 4:
            assert "ranks disagree on dtype: rank 2 has float64; ranks 0, 1, 3 have float32" in text
        assert "ranks disagree on dtype: rank 2 has float64; ranks 0, 1, 3" in text
        assert text.count("test_mismatch.py:") == 1
        assert "Called at: ranks 0, 1, 2, 3" in text
        assert "Make the same call on every rank" in text


async def test_a_call_from_a_file_whose_name_is_not_utf_8_has_its_site_too(world):
    """Python keeps such bytes of a file's name as lone surrogates (PEP 383), which no frame can carry."""
    scope = {}
    code = "def call(comm, value):\n    return comm.allreduce(value)\n"
    exec(compile(code, os.fsdecode(b"/somewhere/caf\xe9.py"), "exec"), scope)
    async with world(3) as comms:
        results = await outcomes(
            comms, lambda comm: scope["call"](comm, ones(9, "float32" if comm.rank else "float64"))
        )
        for rank, error in enumerate(results):
            assert type(error) is CollectiveMismatch, error
            assert (error.field, error.rank) == ("dtype", rank)
            assert error.values == {comm.rank: "float32" if comm.rank else "float64" for comm in comms}
            assert set(error.sites) == set(error.values)
            for site in error.sites.values():
                assert site.startswith("caf")
                assert site.endswith(".py:2")
            str(error).encode()  # so that it can be printed and logged
        await in_step(comms)


async def test_operations_in_another_order_are_found_by_name(world):
    async with world(2) as comms:

        async def both(comm):
            first, second = ("A", "B") if comm.rank == 0 else ("B", "A")
            works = [comm.allreduce(ones(9), name=first), comm.allreduce(ones(9), name=second)]
            return await asyncio.gather(*works, return_exceptions=True)

        per_rank = await on_all(comms, both)
        assert_mismatch([errors[0] for errors in per_rank], "name", of_all(comms, "B", {0: "A"}))
        assert_mismatch([errors[1] for errors in per_rank], "name", of_all(comms, "A", {0: "B"}))
        await in_step(comms)


async def test_operations_around_a_mismatch_complete(world):
    async with world(3) as comms:

        async def three(comm):
            works = [
                comm.allreduce(ones(100_000)),
                comm.allreduce(ones(100_000, "int32" if comm.rank == 1 else "float32")),
                comm.allgather(comm.rank),
            ]
            return await asyncio.gather(*works, return_exceptions=True)

        per_rank = await on_all(comms, three)
        for before, _, after in per_rank:
            np.testing.assert_array_equal(before, np.full(100_000, len(comms), "float32"))
            assert after == list(range(len(comms)))
        assert_mismatch([errors[1] for errors in per_rank], "dtype", of_all(comms, "float32", {1: "int32"}))
        await in_step(comms)


async def test_memory_is_not_touched_after_a_mismatch(world):
    async with world(3) as comms:
        arrays = [ones(400_000, "int32" if comm.rank == 2 else "float32") for comm in comms]

        async def one(comm):
            with pytest.raises(CollectiveMismatch):
                await comm.allreduce_(arrays[comm.rank])
            arrays[comm.rank].view("uint8")[:] = 0xA5

        await on_all(comms, one)
        await in_step(comms)
        assert all((array.view("uint8") == 0xA5).all() for array in arrays)


async def test_a_rank_that_calls_within_the_patience_is_among_the_answers(world):
    async with world(3) as comms:

        async def one(comm):
            if comm.rank == 2:
                await asyncio.sleep(0.2)
            return await comm.allreduce(ones(9, "float32" if comm.rank else "int32"))

        results = await outcomes(comms, one)
        assert_mismatch(results, "dtype", of_all(comms, "float32", {0: "int32"}))
        await in_step(comms)


async def test_a_rank_that_has_not_called_does_not_hold_the_others_up(world):
    async with world(3) as comms:
        loop = asyncio.get_running_loop()
        started = loop.time()
        works = [comm.allreduce(ones(9, "float32" if comm.rank else "int32")) for comm in comms[:-1]]
        results = await asyncio.gather(*works, return_exceptions=True)
        assert_mismatch(results, "dtype", of_all(comms[:-1], "float32", {0: "int32"}))
        if in_virtual_time():
            assert loop.time() - started < 0.6
        with pytest.raises(CollectiveMismatch) as late:
            await comms[-1].allreduce(ones(9))
        right = of_all(comms, "float32", {0: "int32"})
        assert (late.value.field, late.value.values) == ("dtype", right)
        await in_step(comms)


@pytest.mark.fixed_size("two ranks, of which one hears nothing from the other")
async def test_a_rank_that_disagrees_and_then_falls_silent_is_named(world):
    # Its record was enough to see that it makes another call, but not which.
    if not in_virtual_time():
        pytest.skip("needs a link on which nothing arrives any more")
    async with world(2) as comms:
        read_slowly(comms[0], [1], Conditions(delay=1e6))
        started = asyncio.get_running_loop().time()
        comms[0].allreduce(ones(9))
        with pytest.raises(CollectiveMismatch) as caught:
            await comms[1].barrier()
        assert asyncio.get_running_loop().time() - started < 0.6
        assert "rank 0" in str(caught.value)
        assert "structure" not in str(caught.value)  # neither of these calls has one


async def test_calls_at_any_distance_in_time_end_alike(world):
    async with world(4) as comms:
        loop = asyncio.get_running_loop()
        rng = np.random.default_rng(5)
        size = len(comms)
        for _ in range(ordinary(40, 5) if in_virtual_time() else 3):
            delays = rng.uniform(0, 0.2, size)
            odd = int(rng.integers(size))

            async def one(comm, delays=delays, odd=odd):
                await asyncio.sleep(delays[comm.rank])
                return await comm.allreduce(ones(70_000, "int32" if comm.rank == odd else "float32"))

            started = loop.time()
            results = await outcomes(comms, one)
            values = {rank: "int32" if rank == odd else "float32" for rank in range(size)}
            assert_mismatch(results, "dtype", values)
            if in_virtual_time():
                assert loop.time() - started < 0.3
            await in_step(comms)


async def test_large_structures_fit_the_report(world):
    async with world(2) as comms:
        leaves = ordinary(10_000, 1_000)
        trees = [{f"{comm.rank}-{number}": 1.0 for number in range(leaves)} for comm in comms]
        results = await outcomes(comms, lambda comm: comm.allreduce_tree(trees[comm.rank]))
        assert {(type(error), error.field) for error in results} == {(CollectiveMismatch, "structure")}
        await in_step(comms)


async def test_structures_that_differ_far_behind_are_still_told_apart(world):
    async with world(2) as comms:
        trees = [
            {f"{number:06}": 1.0 for number in range(ordinary(5_000, 500))} | {"z": 1.0 if comm.rank else 1}
            for comm in comms
        ]
        results = await outcomes(comms, lambda comm: comm.allreduce_tree(trees[comm.rank]))
        assert {(type(error), error.field) for error in results} == {(CollectiveMismatch, "structure")}
        await in_step(comms)
