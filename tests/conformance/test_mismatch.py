"""Ranks that disagree: every one of them raises `CollectiveMismatch` with all ranks' values, and the mesh stays in step."""

import asyncio
import itertools
import os
import re

import numpy as np
import pytest
from faults import in_step, in_virtual_time, read_slowly
from mismatches import REFUSALS, SIZES, VARIANTS, VERBS, attempt, odd_ranks, ones, sample_of
from ranks import in_turn, on_all, ordinary, outcomes, sizes

from asynccoll import CollectiveMismatch
from asynccoll.engine.fingerprint import FIELDS
from asynccoll.sim.driver import Conditions


def test_the_matrix_is_as_large_as_it_is_said_to_be():
    assert len({variant.label for variant in (*VARIANTS, *REFUSALS)}) == 760
    assert (len(VARIANTS), len(REFUSALS)) == (726, 34)
    assert sum(len(odd_ranks(size)) for size in SIZES) == 54
    assert {variant.field for variant in VARIANTS} == set(FIELDS)
    for verb in VERBS:
        assert any(
            re.search(rf"\b{verb}\b", variant.label) for variant in VARIANTS if variant.field == "name"
        )


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


@pytest.mark.parametrize("variant", [*VARIANTS, *REFUSALS], ids=lambda variant: variant.label)
async def test_every_rank_raises_and_the_next_operations_are_right(world, variant):
    """One odd rank and one odd pair of each world: all of them are for the command line."""
    turn = VARIANTS.index(variant) if variant in VARIANTS else REFUSALS.index(variant)
    for size in sizes(*(SIZES if in_virtual_time() else [SIZES[turn % len(SIZES)]])):
        async with world(size) as comms:
            started = asyncio.get_running_loop().time()
            odds = sample_of(size, turn)
            for odd in ordinary(odds, odds[:1]):
                assert await attempt(comms, variant, odd) is None
            if in_virtual_time():
                assert asyncio.get_running_loop().time() - started < 1.0


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


@pytest.mark.parametrize("size", [2, 3, 4])
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


async def test_of_operations_in_another_order_both_names_and_both_places_are_shown(world):
    async with world(2) as comms:

        async def first(comm):
            return await comm.allreduce(ones(9), name="loss of the head")

        async def second(comm):
            return await comm.allreduce(ones(9), name="loss of the tail")

        lines = [f"test_mismatch.py:{one.__code__.co_firstlineno + 1}" for one in (first, second)]
        for error in await outcomes(comms, lambda comm: (second if comm.rank else first)(comm)):
            assert type(error) is CollectiveMismatch
            assert error.field == "name"
            assert error.sites == of_all(comms, lines[1], {0: lines[0]})
            for text in ("rank 0 has 'loss of the head'", "have" if len(comms) > 2 else "rank 1 has", *lines):
                assert text in str(error)
            assert "'loss of the tail'" in str(error)
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
