"""Values as pickles: large buffers stay where they are, everything else is a snapshot, and all of it comes back."""

from __future__ import annotations

import copyreg
import dataclasses
import datetime
import functools
import gc
import pickle
import sys
import threading
import warnings
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from naming import shown

from asynccoll import pickling
from asynccoll.pickling import MOST_BUFFERS, OUT_OF_BAND, Packed, dumps, loads, pack, unpack

LARGE = OUT_OF_BAND
"""Elements of at least a byte: enough to stay out of the pickle."""


class RefusesState:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("state")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


class RaisesOnPickle:
    """Raises its errors in turn, one for each pickler that tries it, the last one from then on."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)

    def __reduce__(self) -> Any:
        raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]


@dataclasses.dataclass
class Record:
    name: str
    array: Any


def travelled(value: Any) -> Any:
    """``value`` as another rank gets it."""
    packed = pack(value).owned()
    return unpack(packed.pickle, packed.buffers)


def own_memory(array: np.ndarray[Any, Any], packed: Packed) -> bool:
    """The array's memory is among the buffers."""
    return any(np.shares_memory(array, np.frombuffer(buffer, np.uint8)) for buffer in packed.buffers)


@pytest.mark.parametrize(
    "value",
    [None, 1, 2**100, "text", b"bytes", [1, (2, {3})], {"a": [1.5]}, len],
    ids=shown,
)
def test_python_values_come_back_equal(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads(memoryview(dumps(value))) == value
    assert loads(bytearray(dumps(value))) == value


def test_the_bytes_are_a_snapshot_and_each_load_an_independent_copy() -> None:
    value = [np.arange(3)]
    data = dumps(value)
    value[0][:] = -1
    one, other = loads(data), loads(data)
    one[0][:] = 7
    assert other[0].tolist() == [0, 1, 2]


def test_plain_pickle_protocol_5_is_used_where_it_can() -> None:
    assert dumps({"a": 1}) == pickle.dumps({"a": 1}, 5)


def test_what_pickle_refuses_goes_by_cloudpickle() -> None:
    offset = 10
    assert loads(dumps(lambda value: value + offset))(1) == 11

    class Local:
        field = 3

    assert loads(dumps(Local())).field == 3


@pytest.mark.parametrize(
    "value", [threading.Lock(), (n for n in ()), [threading.Lock()]], ids=["lock", "generator", "nested"]
)
def test_what_neither_can_pickle_is_a_type_error_naming_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match=f"type {type(value).__module__}.".replace("builtins.", "")) as caught:
        dumps(value)
    assert type(value).__qualname__ in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


def test_the_cause_of_a_failed_pickle_is_the_users_own_error() -> None:
    cause = ValueError("mine")
    with pytest.raises(TypeError, match=r"RaisesOnPickle \(ValueError: mine\)") as caught:
        dumps(RaisesOnPickle(cause))
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    "error",
    [MemoryError(), KeyboardInterrupt(), SystemExit(1)],
    ids=shown,
)
def test_running_out_of_memory_and_being_interrupted_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        dumps(RaisesOnPickle(error, ValueError()))
    with pytest.raises(type(error)):
        dumps(RaisesOnPickle(ValueError(), error))


def test_an_error_while_unpickling_comes_out_unchanged() -> None:
    with pytest.raises(KeyError, match="state"):
        loads(dumps(RefusesState()))


# -- buffers ------------------------------------------------------------------------------------------------------

FORMS = {
    "C order": lambda: np.arange(LARGE).reshape(4, -1),
    "Fortran order": lambda: np.asfortranarray(np.arange(LARGE).reshape(4, -1)),
    "strided": lambda: np.arange(2 * LARGE)[::2],
    "reversed": lambda: np.arange(LARGE)[::-1],
    "expanded": lambda: np.broadcast_to(np.arange(4), (LARGE, 4)),
    "big-endian": lambda: np.arange(LARGE).astype(">i8"),
    "half": lambda: np.arange(LARGE).astype(np.float16),
    "bfloat16": lambda: (np.arange(LARGE) % 256).astype(ml_dtypes.bfloat16),
    "float8": lambda: (np.arange(LARGE) % 8).astype(ml_dtypes.float8_e4m3fn),
    "bool": lambda: np.arange(LARGE) % 3 == 0,
    "complex": lambda: np.arange(LARGE) * 1j,
    "dates": lambda: np.arange(LARGE).astype("datetime64[s]"),
    "text": lambda: np.arange(LARGE).astype("U8"),
    "record": lambda: np.zeros(LARGE, [("a", "i4"), ("b", "f8", 2)]),
    "one element": lambda: np.zeros((), f"V{LARGE}"),
    "small": lambda: np.arange(3),
    "small bfloat16": lambda: np.arange(3).astype(ml_dtypes.bfloat16),
    "scalar": lambda: np.array(5.0),
    "empty": lambda: np.zeros((0, 3)),
}


@pytest.mark.parametrize("read_only", [False, True], ids=["writable", "read-only"])
@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
def test_an_array_comes_back_writable_with_its_dtype_shape_and_order(make: Any, read_only: bool) -> None:
    array = make()
    if read_only:
        array.flags.writeable = False
    for result in (travelled({"x": array})["x"], loads(dumps({"x": array}))["x"]):
        assert type(result) is np.ndarray
        assert (result.dtype, result.shape) == (array.dtype, array.shape)
        assert result.tobytes() == array.tobytes()
        assert result.flags.f_contiguous == (array.flags.f_contiguous or result.ndim < 2)
        assert result.flags.writeable or not result.size
        assert not np.shares_memory(result, array)


def test_the_memory_of_a_large_contiguous_array_is_lent_and_no_other() -> None:
    for name in ("C order", "Fortran order", "bfloat16", "text", "record"):
        array = FORMS[name]()
        assert own_memory(array, pack({"x": [array]})), name
        assert len(pack(array).pickle) < 500, name
    for name in ("strided", "expanded"):
        array = FORMS[name]()
        packed = pack(array)
        assert not own_memory(array, packed), name
        assert [len(buffer) for buffer in packed.buffers] == [array.nbytes], name


@pytest.mark.parametrize(
    "value",
    [
        1,
        {"a": [None, True, 1.5, "x", b"y", (1,), {2}]},
        np.zeros(3),
        np.float32(1),
        np.dtype("f4"),
        np.zeros(LARGE),
        torch.zeros(3),
        np.zeros(3, ml_dtypes.bfloat16),
        Counter("ab"),
        datetime.timedelta(1),
        len,
        ValueError("x"),
    ],
    ids=shown,
)
def test_what_python_numpy_and_torch_have_is_not_foreign(value: Any) -> None:
    assert not pack(value).foreign


@pytest.mark.parametrize(
    "value",
    [
        Record("x", 1),
        [1, {"a": Record("x", 1)}],
        Record,
        travelled,
        lambda: 1,
        functools.partial(travelled, 1),
    ],
    ids=shown,
)
def test_what_a_user_has_written_is_foreign(value: Any) -> None:
    assert pack(value).foreign
    assert pack(value).owned().foreign


def test_small_buffers_are_in_the_pickle() -> None:
    fits, small = np.zeros(OUT_OF_BAND, np.uint8), np.zeros(OUT_OF_BAND - 1, np.uint8)
    assert len(pack(fits).buffers) == 1
    assert pack(small).buffers == ()
    assert pack({"x": 1}) == (pickle.dumps({"x": 1}, 5), (), False)


def test_arrays_within_anything_that_pickles_are_lent_too() -> None:
    array = np.arange(LARGE)
    value = (Record("a", array), {"b": [array[: LARGE // 2]]}, np.array([array, None], object))
    packed = pack(value)
    assert len(packed.buffers) == 2  # the same array twice is one
    record, nested, objects = travelled(value)
    assert record.array.tolist() == objects[0].tolist() == array.tolist()
    assert record.array is objects[0]
    assert nested["b"][0].tolist() == array[: LARGE // 2].tolist()


def test_what_goes_by_cloudpickle_lends_too() -> None:
    array, tensor = np.arange(LARGE), torch.arange(LARGE)
    function, one, other = travelled((lambda: array[1] + 1, array, tensor))
    assert (function(), one.tolist(), other.tolist()) == (2, array.tolist(), array.tolist())
    assert len(pack((lambda: 0, array, tensor)).buffers) == 2


def test_there_is_a_most_of_buffers_and_the_rest_is_copied() -> None:
    arrays = [np.full(OUT_OF_BAND, number % 256, np.uint8) for number in range(MOST_BUFFERS + 3)]
    packed = pack(arrays)
    assert len(packed.buffers) == MOST_BUFFERS
    assert [array[0] for array in travelled(arrays)] == [number % 256 for number in range(MOST_BUFFERS + 3)]


def test_a_snapshot_has_memory_of_its_own() -> None:
    array = np.arange(LARGE)
    packed = pack(array).owned()
    array[:] = -1
    assert unpack(packed.pickle, packed.buffers).tolist() == list(range(LARGE))


def test_nothing_refers_to_the_memory_when_the_buffers_are_gone() -> None:
    gc.disable()
    try:
        for value in (lambda x: [x], lambda x: [x, lambda: 0], lambda x: [torch.from_numpy(x)]):
            memory = bytearray(LARGE)
            packed = pack(value(np.frombuffer(memory, np.uint8)))
            with pytest.raises(BufferError):
                memory.append(0)
            assert len(packed.buffers) == 1
            del packed
            memory.append(0)
    finally:
        gc.enable()


def test_other_buffers_of_the_protocol_travel_out_of_band() -> None:
    class Holder:
        def __init__(self, data: Any) -> None:
            self.data = data

        def __reduce_ex__(self, protocol: Any) -> Any:
            return bytes, (pickle.PickleBuffer(self.data),)

    data = bytes(range(256)) * 256
    assert len(pack(Holder(data)).buffers) == 1
    assert travelled(Holder(data)) == data


# -- tensors ------------------------------------------------------------------------------------------------------

STORAGE = torch.arange(4.0 * LARGE)
TENSORS = {
    "plain": lambda: STORAGE.clone(),
    "view": lambda: STORAGE[5 : LARGE + 5],
    "small view": lambda: STORAGE[5:8],
    "transposed": lambda: STORAGE.reshape(4, -1).t(),
    "channels last": lambda: STORAGE.reshape(4, 2, 64, -1).to(memory_format=torch.channels_last),
    "strided": lambda: STORAGE[::2],
    "expanded": lambda: STORAGE[:LARGE].expand(3, LARGE),
    "bfloat16": lambda: STORAGE.to(torch.bfloat16),
    "float8": lambda: STORAGE[:LARGE].to(torch.float8_e4m3fn),
    "bool": lambda: STORAGE > 7,
    "complex": lambda: STORAGE[:LARGE] * 1j,
    "conjugate": lambda: (STORAGE[:LARGE] * 1j).conj(),
    "scalar": lambda: torch.tensor(5, dtype=torch.int8),
    "empty": lambda: torch.zeros(0, 3),
}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal elements of equal types, for dtypes too that know no comparison."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = [
        tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)
    ]
    return torch.equal(*bits)


@pytest.mark.torch
@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_comes_back_with_its_dtype_shape_and_layout(make: Any) -> None:
    tensor = make()
    for result in (travelled([tensor])[0], loads(dumps([tensor]))[0]):
        assert type(result) is torch.Tensor
        assert same(result, tensor)
        assert result.is_contiguous() == tensor.is_contiguous() or make in (
            TENSORS["strided"],
            TENSORS["expanded"],
        )
        assert not result.requires_grad
        before = tensor.clone()
        result.zero_()
        assert same(tensor, before)


@pytest.mark.torch
def test_a_view_ships_its_own_elements_and_lends_their_memory() -> None:
    view = STORAGE[5 : LARGE + 5]
    packed = pack([view])
    assert [len(buffer) for buffer in packed.buffers] == [view.numel() * 4]
    assert own_memory(view.numpy(), packed)
    assert len(pack(STORAGE[5:8]).pickle) < 300
    assert own_memory(STORAGE.numpy(), pack(STORAGE.reshape(4, -1).t()))


@pytest.mark.torch
def test_requires_grad_is_kept_and_the_graph_is_not() -> None:
    leaf = torch.ones(LARGE, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        result = travelled(tensor)
        assert result.requires_grad
        assert result.is_leaf


@pytest.mark.torch
def test_tensors_of_one_storage_arrive_apart_and_one_tensor_twice_arrives_once() -> None:
    base = torch.zeros(LARGE)
    one, other, again = travelled((base, base[1:], base))
    assert one is again
    one.fill_(1)
    assert other.sum() == 0


@pytest.mark.torch
@pytest.mark.parametrize("value", [lambda t: t, lambda t: [t], lambda t: torch.nn.Parameter(t)])
def test_a_tensor_on_another_device_is_a_type_error_that_says_cpu(value: Any) -> None:
    with pytest.raises(TypeError, match=r"\.cpu\(\)"):
        pack({"w": value(torch.empty(3, device="meta"))})


SUBCLASSES = {
    "matrix": lambda: np.matrix(np.ones((200, 200))),
    "masked": lambda: np.ma.array(np.ones((200, 200)), mask=np.eye(200)),
    "recarray": lambda: np.rec.array([(1, 2.0)] * LARGE, dtype=[("a", "i4"), ("b", "f8")]),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("make", SUBCLASSES.values(), ids=SUBCLASSES)
def test_subclasses_of_arrays_go_through_their_own_pickling(make: Any) -> None:
    array = make()
    result = travelled(array)
    assert type(result) is type(array)
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert np.ma.allequal(result, array) if array.dtype.names is None else (result == array).all()
    if type(array) is np.ma.MaskedArray:
        assert (result.mask == array.mask).all()


@pytest.mark.torch
def test_parameters_and_special_tensors_stay_what_they_are() -> None:
    parameter = torch.nn.Parameter(STORAGE[:LARGE].clone())
    result = travelled(parameter)
    assert type(result) is torch.nn.Parameter
    assert torch.equal(result, parameter)
    assert own_memory(parameter.detach().numpy(), pack(parameter))
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(travelled(sparse).to_dense(), torch.eye(3))
    marked = torch.ones(3)
    marked.label = "mine"  # type: ignore[attr-defined]
    assert travelled(marked).label == "mine"
    model = torch.nn.Linear(200, 200)
    copy = travelled(model)
    assert torch.equal(copy(torch.ones(200)), model(torch.ones(200)))
    assert len(pack(model).buffers) == 1


def test_no_table_of_the_process_is_changed_and_the_users_own_wins(monkeypatch: Any) -> None:
    before = dict(copyreg.dispatch_table)
    pack([np.zeros(LARGE), torch.zeros(LARGE)])
    assert copyreg.dispatch_table == before
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (str, ("mine",)))
    assert travelled([np.zeros(LARGE)]) == ["mine"]


def test_torch_is_not_asked_for_unless_it_is_there(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert set(pickling._reducers()) == {np.ndarray}
    assert travelled([1]) == [1]


def test_packing_a_tensor_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack([torch.zeros(LARGE), torch.nn.Parameter(torch.zeros(3)), torch.zeros(3, requires_grad=True)])
