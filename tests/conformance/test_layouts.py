"""Views of any layout go in and come back whole: what is read, what is written, and what stays untouched in between."""

import array
import functools
import itertools

import carriers
import numpy as np
import pytest
import torch
from faults import in_step
from ranks import each, on_all, outcomes, sum_of_ranks

from asynccoll import RemoteError

ALGORITHMS = ("ring", "tree", "doubling")
BASE = np.arange(48, dtype=np.float64).reshape(6, 8)

VIEWS = {
    "every other element": lambda: BASE.reshape(-1).copy()[::2],
    "every third column": lambda: BASE.copy()[:, ::3],
    "transposed": lambda: BASE.copy().T,
    "reversed": lambda: BASE.reshape(-1).copy()[::-1],
    "reversed rows": lambda: BASE.copy()[::-1],
    "a column": lambda: BASE.copy()[:, 2],
    "a block": lambda: BASE.copy()[1:4, 2:5],
    "the diagonal": lambda: np.einsum("ii->i", BASE.copy()[:, :6]),
    "Fortran order": lambda: np.asfortranarray(BASE),
    "axes moved": lambda: np.moveaxis(BASE.copy().reshape(2, 3, 8), 0, 2),
    "a field of records": lambda: np.array([(1, x) for x in range(9)], "i4,f8")["f1"],
    "unaligned": lambda: np.frombuffer(bytearray(b"?" + BASE[1].tobytes()), np.float64, 8, 1),
    "big-endian": lambda: BASE.astype(">f8"),
    "torch with an offset": lambda: torch.arange(20.0)[3:11],
    "torch with strides": lambda: torch.arange(24.0).view(4, 6)[:, ::2],
    "torch transposed": lambda: torch.arange(24.0).view(4, 6).t(),
}
OVERLAPPING = {
    "broadcast": lambda: np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,)),
    "a sliding window": lambda: np.lib.stride_tricks.as_strided(np.arange(6.0), (4, 3), (8, 8)),
    "torch expanded": lambda: torch.ones(1, 3).expand(2, 3),
}


def as_numpy(value):
    return np.array(carriers.bits(value))


def whole(view):
    """The memory under a view, as numpy bytes: the numpy array that owns it, or torch's storage."""
    if isinstance(view, torch.Tensor):
        return np.asarray(view.untyped_storage()).view(np.uint8)
    owner = view
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if isinstance(owner.base, bytearray):
        return np.frombuffer(owner.base, np.uint8)
    return owner.ravel(order="K").view(np.uint8)


@pytest.mark.torch
@pytest.mark.parametrize("layout", VIEWS)
async def test_the_sum_of_views_is_that_of_contiguous_copies(world, layout):
    async with world(3) as comms:
        for algorithm in ALGORITHMS:
            views = [VIEWS[layout]() for _ in comms]
            before = [whole(view).tobytes() for view in views]
            total = sum(as_numpy(view) for view in views)
            results = await each(comms, "allreduce", views, algorithm=algorithm)
            for view, old, result in zip(views, before, results, strict=True):
                np.testing.assert_array_equal(as_numpy(result), total, err_msg=algorithm)
                assert whole(view).tobytes() == old
                assert carriers.kind(result) == carriers.kind(view)
                assert not carriers.share_memory(result, view)


@pytest.mark.torch
@pytest.mark.parametrize("layout", VIEWS)
async def test_in_place_fills_the_view_and_leaves_what_is_between(world, layout):
    async with world(3) as comms:
        for algorithm in ALGORITHMS:
            views = [VIEWS[layout]() for _ in comms]
            expected = VIEWS[layout]()
            carriers.memory(expected)[...] = sum(as_numpy(view) for view in views)
            results = await each(comms, "allreduce_", views, algorithm=algorithm)
            for view, result in zip(views, results, strict=True):
                assert result is view
                assert whole(view).tobytes() == whole(expected).tobytes(), algorithm


@pytest.mark.torch
@pytest.mark.parametrize("layout", VIEWS)
async def test_out_may_be_any_view(world, layout):
    async with world(3) as comms:
        outs = [VIEWS[layout]() for _ in comms]
        dtype = carriers.bits(outs[0]).dtype
        values = [np.full(outs[0].shape, comm.rank + 1, dtype) for comm in comms]
        expected = VIEWS[layout]()
        carriers.memory(expected)[...] = sum_of_ranks(comms) + len(comms)
        results = await on_all(comms, lambda comm: comm.allreduce(values[comm.rank], out=outs[comm.rank]))
    for rank in range(len(comms)):
        assert results[rank] is outs[rank]
        assert whole(outs[rank]).tobytes() == whole(expected).tobytes()
        assert (values[rank] == rank + 1).all()


@pytest.mark.torch
@pytest.mark.parametrize("layout", OVERLAPPING)
async def test_elements_that_share_memory_are_read_but_never_written(world, layout):
    async with world(2) as comms:
        views = [OVERLAPPING[layout]() for _ in comms]
        before = as_numpy(views[0])
        for result in await each(comms, "allreduce", views):
            np.testing.assert_array_equal(as_numpy(result), len(comms) * before)
        for attempt in (
            lambda comm: comm.allreduce_(views[comm.rank]),
            lambda comm: comm.allreduce(as_numpy(views[comm.rank]), out=views[comm.rank]),
        ):
            for error in await outcomes(comms, attempt):
                assert type(error) is ValueError
                assert "same memory" in str(error)
        for view in views:
            np.testing.assert_array_equal(as_numpy(view), before)
        await in_step(comms)


async def test_read_only_memory_is_read_but_never_written(world):
    frozen = np.arange(5.0)
    frozen.flags.writeable = False
    unwritable = (frozen, memoryview(frozen), np.frombuffer(bytes(40)), np.float64(3))
    async with world(2) as comms:
        for value in unwritable:
            for result in await each(comms, "allreduce", [value] * len(comms)):
                np.testing.assert_array_equal(result, len(comms) * np.asarray(value))
            errors = await outcomes(comms, lambda comm, value=value: comm.allreduce_(value))
            assert [type(error) for error in errors] == [ValueError] * len(comms), errors
        assert frozen.tolist() == [0, 1, 2, 3, 4]


async def test_unsuitable_memory_on_one_rank_is_an_error_on_all(world):
    frozen = np.ones(3)
    frozen.flags.writeable = False
    async with world(3) as comms:
        errors = await outcomes(comms, lambda comm: comm.allreduce_(frozen if comm.rank == 1 else np.ones(3)))
        assert type(errors.pop(1)) is ValueError
        assert {(type(error), error.origin) for error in errors} == {(RemoteError, 1)}
        await in_step(comms)


@pytest.mark.parametrize(
    ("out", "error", "says"),
    [
        (np.zeros(4), ValueError, "shape (3,)"),
        (np.zeros((3, 1)), ValueError, "shape (3,)"),
        (np.zeros(3, np.float32), TypeError, "float64"),
        (np.zeros(3, np.int64), TypeError, "float64"),
        (np.frombuffer(bytes(24)), ValueError, "read-only"),
        ([0.0, 0.0, 0.0], TypeError, "list"),
        (array.array("d", [0, 0]), ValueError, "shape (3,)"),
    ],
    ids=["longer", "2-d", "narrower", "integers", "read-only", "list", "shorter"],
)
async def test_an_out_that_does_not_fit_is_refused_before_anything_is_written(world, out, error, says):
    before = carriers.bits(np.asarray(out)).tobytes()
    async with world(2) as comms:
        for found in await outcomes(comms, lambda comm: comm.allreduce(np.ones(3), out=out)):
            assert type(found) is error
            assert says in str(found)
        assert carriers.bits(np.asarray(out)).tobytes() == before
        await in_step(comms)


async def test_out_may_be_the_input_but_not_a_shifted_view_of_it(world):
    async with world(2) as comms:
        size = len(comms)
        values = [np.arange(5.0) + r for r in range(size)]
        for value, result in zip(
            values,
            await on_all(comms, lambda c: c.allreduce(values[c.rank], out=values[c.rank])),
            strict=True,
        ):
            assert result is value
            assert value.tolist() == [size * n + sum_of_ranks(comms) for n in range(5)]
        memory = [np.arange(6.0) for _ in comms]
        errors = await outcomes(comms, lambda c: c.allreduce(memory[c.rank][:-1], out=memory[c.rank][1:]))
        assert [type(error) for error in errors] == [ValueError] * size
        assert all(one.tolist() == [0, 1, 2, 3, 4, 5] for one in memory)


async def test_big_endian_in_is_big_endian_out(world):
    async with world(3) as comms:
        for dtype, shape in itertools.product((">f4", ">i8", ">u2", ">c16", ">f2"), ((), (0,), (7,), (2, 3))):
            values = [np.full(shape, r + 1, dtype) for r in range(len(comms))]
            total = np.full(shape, sum_of_ranks(comms) + len(comms))
            for result in await each(comms, "allreduce", values):
                assert (result.dtype.str, result.shape) == (dtype, shape)
                np.testing.assert_array_equal(result, total)
            for value, result in zip(values, await each(comms, "allreduce_", values), strict=True):
                assert result is value
                np.testing.assert_array_equal(value, total)


async def test_a_scalar_stays_a_scalar_and_0_d_stays_0_d(world):
    async with world(2) as comms:
        size = len(comms)
        for scalar in (
            np.float32(1.5),
            np.int8(100),
            np.bool_(True),
            np.complex128(1 + 2j),
            np.uint64(2**63),
        ):
            with np.errstate(over="ignore"):
                right = functools.reduce(np.add, [scalar] * size)
            for result in await each(comms, "allreduce", [scalar] * size):
                assert type(result) is type(scalar)
                assert result == right
            for result in await each(comms, "allreduce", [np.array(scalar)] * size):
                assert (type(result), result.shape, result.dtype) == (np.ndarray, (), scalar.dtype)
                assert result == right
        tensor = torch.tensor(2.5)
        for result in await each(comms, "allreduce", [tensor] * size):
            assert (type(result), result.shape, result.item()) == (torch.Tensor, (), 2.5 * size)
        memory = [
            torch.tensor(2.5, dtype=torch.float64) if comm.rank % 2 else np.array(2.5) for comm in comms
        ]
        for one, result in zip(memory, await each(comms, "allreduce_", memory), strict=True):
            assert result is one
            assert one.item() == 2.5 * size


async def test_empty_arrays_keep_their_shape(world):
    async with world(3) as comms:
        for shape in ((0,), (0, 4), (3, 0, 2)):
            for make in (np.zeros, torch.zeros):
                for result in await each(comms, "allreduce", [make(shape) for _ in comms]):
                    assert (type(result), tuple(result.shape)) == (type(make(shape)), shape)
                arrays = [make(shape) for _ in comms]
                for value, result in zip(arrays, await each(comms, "allreduce_", arrays), strict=True):
                    assert result is value


@pytest.mark.torch
async def test_lazy_views_of_torch_are_resolved(world):
    """A conjugate or negative view holds other numbers than its memory does."""
    numbers = torch.tensor([1 + 2j, -3 + 0.5j])
    async with world(2) as comms:
        size = len(comms)
        for view, own in ((numbers.conj(), [1 - 2j, -3 - 0.5j]), (numbers.conj().imag, [-2, -0.5])):
            for result in await each(comms, "allreduce", [view] * size):
                assert result.tolist() == [size * number for number in own]
        memory = [numbers.clone() for _ in comms]
        await on_all(comms, lambda comm: comm.allreduce_(memory[comm.rank].conj()))
        for one in memory:
            assert one.tolist() == [size * (1 + 2j), size * (-3 + 0.5j)]


@pytest.mark.torch
async def test_a_parameter_is_a_tensor_whose_gradient_is_left_alone(world):
    async with world(2) as comms:
        parameters = [torch.nn.Parameter(torch.full((3,), comm.rank + 1.0)) for comm in comms]
        total = [float(sum_of_ranks(comms) + len(comms))] * 3
        for result in await each(comms, "allreduce", parameters):
            assert (type(result), result.requires_grad, result.tolist()) == (torch.Tensor, False, total)
        for parameter, result in zip(parameters, await each(comms, "allreduce_", parameters), strict=True):
            assert result is parameter
            assert (parameter.requires_grad, parameter.grad, parameter.tolist()) == (True, None, total)


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_no_result_shares_memory_with_an_input(world, size):
    """Neither within a rank nor, all ranks being in one process, between ranks."""
    async with world(size) as comms:
        for make in (np.ones, torch.ones):
            values = [make(5) for _ in comms]
            results = list(await each(comms, "allreduce", values))
            results += await each(comms, "broadcast", values)
            for gathered in await each(comms, "allgather", values):
                results += gathered
            trees = await each(comms, "allreduce_tree", [{"a": value} for value in values])
            results += [tree["a"] for tree in trees]
            found = values + results
            if size > 9:  # there are too many pairs: each with its neighbours
                pairs = [(one, other) for n, one in enumerate(found) for other in found[n + 1 : n + 10]]
            else:
                pairs = itertools.combinations(found, 2)
            for one, other in pairs:
                assert not carriers.share_memory(one, other)
            for value in values:
                assert value.tolist() == [1] * 5
            for result in results:
                result[:] = -1  # its owner may write to it
