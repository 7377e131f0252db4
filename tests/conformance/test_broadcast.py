"""Broadcast: the root's value on every rank, whatever its size, whoever the root, whatever the others pass."""

import array
import asyncio
import dataclasses
import itertools

import carriers
import ml_dtypes
import numpy as np
import pytest
import reference
import torch
from ranks import each, filled, in_turn, on_all, outcomes, sum_of_ranks

from asynccoll import CollectiveMismatch, RemoteError
from asynccoll.sim.driver import Conditions

BOUNDARIES = (4096, 1 << 16, 1 << 18, 1 << 20)
"""Bytes at which a payload leaves its description, uses up eager credit, fills a segment, and fills several."""
BULK = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 20)


@dataclasses.dataclass
class Settings:
    rate: float
    layers: list


OBJECTS = (
    None,
    True,
    10**40,
    "text",
    b"bytes",
    bytearray(b"more"),
    [1, (2, {3})],
    Settings(0.5, [np.arange(3), "x"]),
    {"large": bytes(100_000), "array": np.arange(20_000)},
)


def equal(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, Settings):
        return one.rate == other.rate and equal(one.layers, other.layers)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


@pytest.mark.parametrize("size", range(1, 10))
async def test_every_root_reaches_every_rank(world, size):
    """Arrays beside their description, of one frame and of several, and objects; no rank but the root passes a value."""
    async with world(size) as comms:
        for root in range(size):
            values = [np.arange(count) * (root + 1) for count in (0, 1, 100, 600, 9000)]
            values += [{"root": root, "list": [root] * 50}, None, np.float32(root)]

            async def rank(comm, root=root, values=values):
                passed = values if comm.rank == root else [None] * len(values)
                return await asyncio.gather(*(comm.broadcast(value, root) for value in passed))

            for number, results in enumerate(await on_all(comms, rank)):
                for value, result in zip(values, results, strict=True):
                    assert equal(result, value), f"root {root}, rank {number}: {result!r}"


@pytest.mark.parametrize("size", [12, 16, 17, 24, 33])
async def test_every_root_of_a_large_world_reaches_every_rank(world, size):
    async with world(size) as comms:

        async def rank(comm):
            works = [
                comm.broadcast(np.arange(5) + root if comm.rank == root else None, root)
                for root in range(size)
            ]
            return await asyncio.gather(*works)

        for number, results in enumerate(await on_all(comms, rank)):
            for root, result in enumerate(results):
                assert result.tolist() == [root, root + 1, root + 2, root + 3, root + 4], (root, number)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(("size", "root"), [(2, 1), (3, 0), (6, 4)])
async def test_sizes_around_each_boundary_arrive_whole(world, size, root, boundary):
    rng = np.random.default_rng(boundary)
    async with world(size, conditions=BULK) as comms:
        for count in (boundary - 1, boundary, boundary + 1):
            value = rng.integers(0, 256, count, np.uint8)
            for form in (value, torch.from_numpy(value), value.tobytes(), [value]):
                values = [form if rank == root else None for rank in range(size)]
                for number, result in enumerate(await each(comms, "broadcast", values, root)):
                    found = result[0] if type(form) is list else result
                    assert type(result) is type(form)
                    assert (
                        bytes(found if isinstance(found, bytes) else carriers.bits(found)) == value.tobytes()
                    ), f"{type(form).__name__} of {count} bytes at rank {number}"


@pytest.mark.torch
@pytest.mark.parametrize("dtype", reference.DTYPES)
async def test_every_layout_of_the_root_arrives_with_the_same_bits(world, dtype):
    """NaN payloads and negative zeros too: nothing is computed. Byte order is the root's own affair."""
    rng = np.random.default_rng(1)
    word = reference.storage(dtype)
    async with world(2) as comms:
        for carrier in (one for one in carriers.SINGLE if carriers.carries_dtype(one, dtype)):
            form = next(f for f in ("2-d", "1-d", "0-d") if carriers.carries_form(carrier, f))
            shape = carriers.shape_of(form, 1 if form == "0-d" else 12)
            noise = rng.integers(0, 256, (*shape, word.itemsize), np.uint8)
            bits = (noise % 2 if dtype == "bool" else noise).view(word)[..., 0]
            if carrier.endswith("/expanded"):
                bits = np.broadcast_to(bits[:1], shape).copy()
            held = carriers.hold(carrier, dtype, bits)
            own, *others = await each(comms, "broadcast", filled(comms, [held.value, None]))
            assert carriers.kind(own) == carriers.kind(held.value), carrier
            plain = carriers.hold(carrier.partition("/")[0] + "/contiguous", dtype, bits)
            for other in others:
                assert carriers.kind(other) == carriers.kind(plain.value), carrier
            for result in (own, *others):
                assert carriers.bits(result).tobytes() == bits.tobytes(), carrier
                assert carriers.memory(result).shape == shape, carrier
                assert not carriers.share_memory(result, held.value), carrier
            assert held.damage() is None, carrier


@pytest.mark.torch
async def test_the_roots_container_arrives_where_none_was_passed_and_ones_own_where_an_array_was(world):
    def forms(numbers):
        numbers = np.array(numbers, np.float32)
        yield numbers
        yield torch.from_numpy(numbers.copy())
        yield array.array("f", numbers.tobytes())
        yield memoryview(numbers.copy())
        yield numbers.astype(">f4")

    async with world(3) as comms:
        for given, template in itertools.product(forms(range(6)), forms([0] * 6)):
            results = await each(comms, "broadcast", filled(comms, [given, None, template]))
            own, theirs, *mine = map(carriers.kind, results)
            assert own == carriers.kind(given)
            assert theirs == own.replace(">", "<")
            assert set(mine) == {carriers.kind(template)}
            for result in results:
                assert carriers.bits(result).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.torch
async def test_bfloat16_of_ml_dtypes_arrives_as_that_and_as_tensor_by_template(world):
    value = np.array([1.0, -2.5], ml_dtypes.bfloat16)
    async with world(3) as comms:
        template = torch.zeros(2, dtype=torch.bfloat16)
        results = await each(comms, "broadcast", filled(comms, [value, None, template]))
    dtypes = [ml_dtypes.bfloat16, ml_dtypes.bfloat16, torch.bfloat16]
    assert [result.dtype for result in results] == filled(comms, dtypes)
    for result in results:
        assert carriers.bits(result).tolist() == carriers.bits(value).tolist()


async def test_a_template_is_not_written_to(world):
    async with world(2) as comms:
        for template in (np.zeros(4), torch.zeros(4, dtype=torch.float64), np.zeros(8)[::2]):
            results = await each(comms, "broadcast", filled(comms, [np.ones(4), template]))
            assert results[1].tolist() == [1] * 4
            assert template.tolist() == [0] * 4
            assert not carriers.share_memory(results[1], template)
        frozen = np.zeros(4)
        frozen.flags.writeable = False  # good enough to say what is expected
        results = await each(comms, "broadcast", filled(comms, [np.ones(4), frozen]))
        assert results[1].tolist() == [1] * 4


@pytest.mark.parametrize("number", range(len(OBJECTS)))
async def test_objects_arrive_equal_and_independent(world, number):
    value = OBJECTS[number]
    async with world(3) as comms:
        results = await on_all(comms, lambda comm: comm.broadcast(value if comm.rank == 1 else None, 1))
    for result in results:
        assert equal(result, value), result
    if isinstance(value, list | dict | bytearray | Settings):
        assert len({id(result) for result in [value, *results]}) == len(comms) + 1


async def test_what_other_ranks_pass_is_ignored_unless_it_is_an_array(world):
    async with world(4) as comms:
        for value in (np.arange(3.0), {"a": 1}):
            passed = filled(comms, [value, "ignored", {"ignored": True}, 3])
            results = await each(comms, "broadcast", passed)
            assert all(equal(result, value) for result in results), results


@pytest.mark.parametrize("count", [0, 5, 9_000])
async def test_out_receives_the_array_on_every_rank(world, count):
    value = np.arange(count, dtype=np.float32)
    async with world(4) as comms:
        names = ["numpy/big-endian", "numpy/strided", "numpy/offset", "torch/strided"]
        held = [carriers.hold(name, "float32", np.zeros(count, np.float32)) for name in in_turn(comms, names)]
        results = await on_all(
            comms, lambda c: c.broadcast(value if c.rank == 2 else None, 2, out=held[c.rank].value)
        )
        for one, result in zip(held, results, strict=True):
            assert result is one.value
            assert carriers.bits(result).tolist() == value.tolist()
            assert one.damage(value) is None
        outs = [value.copy() if c.rank == 2 else np.zeros(count, np.float32) for c in comms]
        results = await on_all(
            comms, lambda c: c.broadcast(outs[c.rank] if c.rank == 2 else None, 2, out=outs[c.rank])
        )
        for out, result in zip(outs, results, strict=True):
            assert result is out
            assert out.tolist() == value.tolist()


async def test_a_read_only_array_can_be_broadcast_and_the_result_can_be_written(world):
    frozen = np.frombuffer(np.arange(4.0).tobytes())
    assert not frozen.flags.writeable
    async with world(3) as comms:
        for form in (frozen, memoryview(frozen), np.broadcast_to(np.float64(2), (3, 2))):
            for result in await each(comms, "broadcast", filled(comms, [None, form, None]), 1):
                assert np.asarray(result).tolist() == np.asarray(form).tolist()
                assert np.asarray(result).flags.writeable


async def test_a_template_or_out_of_another_dtype_or_shape_is_a_mismatch_on_every_rank(world):
    async with world(3) as comms:
        for value, template in (
            (np.ones(4), np.ones(4, np.float32)),
            (np.ones(4), np.ones(5)),
            (np.ones((2, 3)), np.ones((3, 2))),
            (np.ones(9000), np.ones(9001)),
            ({"an": "object"}, np.ones(3)),
        ):
            for options in (False, True):

                def attempt(comm, options=options, value=value, template=template):
                    if comm.rank == 0:
                        return comm.broadcast(value)
                    if comm.rank == 1:
                        return comm.broadcast(None)
                    return comm.broadcast(None, out=template) if options else comm.broadcast(template)

                for error in await outcomes(comms, attempt):
                    assert type(error) is CollectiveMismatch, (error, options)
                assert (template == 1).all()
        totals = await on_all(comms, lambda comm: comm.allreduce(comm.rank))
        assert totals == [sum_of_ranks(comms)] * len(comms)


async def test_an_impossible_root_is_an_error_on_every_rank(world):
    async with world(2) as comms:
        size = len(comms)
        for root, kind in ((size, ValueError), (-1, ValueError), (1.0, TypeError), ("0", TypeError)):
            for error in await outcomes(comms, lambda comm, root=root: comm.broadcast(1, root)):
                assert type(error) is kind
                assert str(root) in str(error)
        errors = await outcomes(comms, lambda comm: comm.broadcast(1, size + 3 if comm.rank == 1 else 0))
        assert [type(error) for error in errors] == [
            ValueError if rank == 1 else RemoteError for rank in range(size)
        ]
        values = filled(comms, ["in step", None])
        assert await each(comms, "broadcast", values, np.int64(0)) == ["in step"] * size
