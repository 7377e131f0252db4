"""What was passed at the call is what counts, byte for byte, however slowly it leaves and whatever the caller does next."""

import hashlib

import carriers
import numpy as np
import pytest
import torch
from ranks import each, filled, on_all, ordinary

from asynccoll.pickling import OUT_OF_BAND

SIZES = {"small": 7, "a frame": 5_000, "large": 60_000}


def digest(array):
    return hashlib.sha256(carriers.bits(array).tobytes()).hexdigest()


def spoil(value):
    """Overwrite a value, as its owner may as soon as the verb has returned."""
    if isinstance(value, dict):
        for part in value.values():
            spoil(part)
        value["later"] = "-1"
    elif isinstance(value, list):
        value[:] = ["-1"] * (len(value) + 1)
    else:
        value[:] = -1


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (np.float64, (1 << 17,)),
        (np.float32, (1 << 8, 1 << 10)),
        (np.int16, (1 << 19,)),
        pytest.param(np.float64, (1 << 20,), marks=pytest.mark.slow),
        pytest.param(np.float32, (1 << 10, 1 << 11), marks=pytest.mark.slow),
        pytest.param(np.int16, (1 << 22,), marks=pytest.mark.slow),
    ],
)
async def test_partial_writes_of_typed_arrays_lose_no_byte(narrow_world, dtype, shape):
    """1 MiB, in the long form 8 MiB: the remainder of a short write is counted in bytes, not in elements or rows."""
    shape = ordinary(shape, (*shape[:-1], shape[-1] // 64))
    async with narrow_world(2) as comms:
        values = [
            np.random.default_rng(comm.rank).integers(-9000, 9000, shape).astype(dtype) for comm in comms
        ]
        for result in await each(comms, "broadcast", filled(comms, [values[0], None])):
            assert digest(result) == digest(values[0])
        for gathered in await each(comms, "allgather", values):
            assert [digest(part) for part in gathered] == [digest(value) for value in values]
        for result in await each(comms, "allreduce_", [value.copy() for value in values]):
            assert digest(result) == digest(sum(values).astype(dtype))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "doubling"])
@pytest.mark.parametrize("count", SIZES.values(), ids=SIZES)
async def test_an_array_filled_right_after_the_call_is_reduced_as_it_was(narrow_world, count, algorithm):
    rng = np.random.default_rng(count)
    count //= ordinary(1, 3)
    async with narrow_world(3) as comms:
        old = [rng.integers(0, 1000, count) for _ in comms]
        values = [one.copy() for one in old]
        outs = [np.empty_like(one) for one in old]
        trees = [{"a": one.copy(), "b": [torch.from_numpy(one.copy())]} for one in old]

        async def rank(comm):
            value, tree = values[comm.rank], trees[comm.rank]
            works = [comm.allreduce(value, algorithm=algorithm)]
            works.append(comm.allreduce(value, out=outs[comm.rank], algorithm=algorithm))
            works.append(comm.allreduce_tree(tree, algorithm=algorithm))
            spoil(value)
            spoil(tree["a"])
            spoil(tree["b"][0])
            tree["b"].append("-1")
            return [await work for work in works]

        total = sum(old).tolist()
        for r, (result, out, tree) in enumerate(await on_all(comms, rank)):
            assert result.tolist() == total, f"rank {r}"
            assert out.tolist() == total, f"rank {r}, out="
            assert tree["a"].tolist() == tree["b"][0].tolist() == total, f"rank {r}, tree"


@pytest.mark.parametrize("count", SIZES.values(), ids=SIZES)
async def test_whole_values_changed_right_after_the_call_arrive_as_they_were(narrow_world, count):
    """Arrays always; of an object all but the memory of its large arrays, which is lent."""
    numbers = np.arange(min(count, ordinary(count, 600)))
    async with narrow_world(3) as comms:
        order = range(len(comms))

        async def rank(comm):
            owned = [
                numbers + comm.rank,
                torch.from_numpy(numbers + comm.rank),
                {"array": numbers + comm.rank, "rank": [comm.rank]},
            ]
            works = [comm.broadcast(value, 1) for value in owned] + [comm.allgather(value) for value in owned]
            works.append(comm.allreduce([owned[2]]))
            if numbers.nbytes >= OUT_OF_BAND:
                owned[2]["array"] = np.zeros(1)
            for value in owned:
                spoil(value)
            return [await work for work in works]

        for array, tensor, record, arrays, tensors, records, joined in await on_all(comms, rank):
            for found, origin in zip((array, tensor, *arrays, *tensors), (1, 1, *order, *order), strict=True):
                assert found.tolist() == (numbers + origin).tolist()
            for found, origin in zip((record, *records, *joined), (1, *order, *order), strict=True):
                assert found.keys() == {"array", "rank"}
                assert found["array"].tolist() == (numbers + origin).tolist()
                assert found["rank"] == [origin]
