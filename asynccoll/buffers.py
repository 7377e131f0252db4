"""Arrays as flat numpy memory, whatever container holds them. Knows nothing of ops, peers or wire formats.

`describe` says whether a value takes the array path and, if so, gives an `Array`: its dtype and shape, a
snapshot (`Array.pack`), the caller's own memory (`Array.view`, `Array.lend`) and the way back into a value of
the caller's kind (`Array.wrap`). Everything between is one-dimensional, C-contiguous, native-endian numpy
memory, so that ranks may hold numpy arrays here and torch tensors there.

torch and ml_dtypes are never imported: a tensor is known by ``sys.modules["torch"]``, which is there when a
tensor is, and ml_dtypes' bfloat16 by the name of its dtype. bfloat16 is stored and travels as uint16 bits.
"""

from __future__ import annotations

import array
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from asynccoll.overlap import overlaps_itself, partly_shared, shared

__all__ = [
    "DTYPES",
    "Array",
    "DType",
    "Flat",
    "describe",
    "flat_bytes",
    "matches_out",
    "rebuild",
    "share_memory",
]

Flat: TypeAlias = npt.NDArray[Any]
"""A one-dimensional C-contiguous numpy array in a storage dtype (native byte order)."""


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type of the array path. There is one record per name, so records compare by identity."""

    name: str
    """Canonical name, the same in every container and on the wire."""
    itemsize: int
    """Bytes per element."""
    storage: np.dtype[Any]
    """numpy's dtype for the bits: the type itself, except bfloat16, which is stored as uint16."""
    kind: str
    """``"b"`` bool, ``"i"`` signed, ``"u"`` unsigned, ``"f"`` floating, ``"c"`` complex."""

    def __repr__(self) -> str:
        return f"DType({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)


def _named(name: str) -> DType:
    return DTYPES[name]


def _record(name: str) -> DType:
    storage = np.dtype(np.uint16 if name == "bfloat16" else name)
    return DType(name, storage.itemsize, storage, "f" if name == "bfloat16" else storage.kind)


DTYPES: dict[str, DType] = {
    name: _record(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Every dtype of the array path by its canonical name."""

_BFLOAT16 = DTYPES["bfloat16"]
_NUMPY = {dtype.storage: dtype for dtype in DTYPES.values() if dtype is not _BFLOAT16}
_BY_KIND = {(dtype.kind, dtype.itemsize): dtype for dtype in _NUMPY.values()}
_TORCH = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
_BYTE = np.dtype(np.uint8)

# numpy numbers its own types below this, those of extension packages from it (NPY_USERDEF, ndarraytypes.h).
_FIRST_EXTENSION_DTYPE = 256

# Codes of the struct module and PEP 3118 for numbers that numpy has, after an optional byte order mark.
_NUMBER_FORMATS = frozenset("?bBhHiIlLqQefd") | {"Zf", "Zd"}


class Array:
    """A value of the array path. This class is numpy's plain ndarray; the other containers derive from it."""

    __slots__ = ("_memory", "count", "dtype", "nbytes", "shape")

    def __init__(self, dtype: DType, memory: npt.NDArray[Any]) -> None:
        self._memory = memory  # the caller's own; itemsize of dtype.storage, any strides, maybe byte-swapped
        self.dtype = dtype
        self.shape: tuple[int, ...] = memory.shape
        self.count: int = memory.size
        self.nbytes: int = memory.nbytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype.name}, {self.shape})"

    def pack(self) -> Flat:
        """Snapshot: a fresh, flat, writable, native-endian copy of the elements in C order."""
        memory = self._memory
        if memory.dtype.isnative:
            return memory.flatten()
        return memory.astype(self.dtype.storage, order="C").reshape(-1)

    def view(self) -> Flat | None:
        """The elements in place without a copy, or None where they are not C-contiguous and native.

        May be read-only. A numpy scalar, which has no memory to share, gives a private copy.
        """
        memory = self._memory
        if memory.flags.c_contiguous and memory.dtype.isnative:
            return memory.ravel()
        return None

    def lend(self) -> tuple[Flat, Callable[[], None] | None]:
        """Flat writable memory for a result that belongs in the caller's own value, filled with its elements.

        Returns:
            The flat array, and None where it is the caller's memory itself. Where it had to be a copy
            (strides, byte order), a function that stores it into the caller's memory and touches nothing
            between its elements.

        Raises:
            ValueError: the value is read-only, or several of its elements are the same memory.
        """
        memory = self._memory
        flags = memory.flags
        if flags.carray and memory.dtype.isnative:
            return memory.ravel(), None
        if not flags.writeable:
            raise ValueError(
                f"cannot write a result into this {self._kind()}: it is read-only. Pass a writable copy."
            )
        self._refuse_overlap(memory.strides)
        flat = self.pack()

        def write_back() -> None:
            memory[...] = flat.reshape(memory.shape)

        return flat, write_back

    def wrap(self, flat: Flat, shape: tuple[int, ...] | None = None) -> Any:
        """A value of the caller's container type and byte order around ``flat``, not copied where possible.

        Args:
            flat: elements in the storage dtype, given away: the new value may live in this memory.
            shape: of the new value; the described value's own if None. Where the container cannot have that
                shape (numpy scalar, array.array) the new value is a numpy array.
        """
        if not flat.flags.behaved:  # aligned and writable, as a new value must be
            flat = flat.copy()
        if shape is None:
            shape = self.shape
        return flat if flat.shape == shape else flat.reshape(shape)

    def _refuse_overlap(self, strides: Sequence[int]) -> None:
        if overlaps_itself(self.shape, strides, self.dtype.itemsize):
            raise ValueError(
                f"cannot write a result into this {self._kind()} of shape {self.shape}: several of its "
                "elements are the same memory (broadcast, expanded or overlapping windows). Pass a copy."
            )

    @property
    def container(self) -> str:
        """What `rebuild` needs on another rank to make a value of this kind."""
        return "numpy"

    def _kind(self) -> str:
        return "numpy array"


class _NumpyArray(Array):
    """An ndarray whose dtype is not the storage dtype: other byte order, ml_dtypes' bfloat16, C aliases."""

    __slots__ = ("_own",)

    def __init__(self, dtype: DType, value: npt.NDArray[Any]) -> None:
        self._own = value.dtype
        super().__init__(dtype, value.view(dtype.storage.newbyteorder(value.dtype.byteorder)))

    def wrap(self, flat: Flat, shape: tuple[int, ...] | None = None) -> Any:
        # The memory's dtype is the storage dtype in the caller's byte order.
        carried = flat.astype(self._memory.dtype, copy=not flat.flags.behaved)
        return carried.view(self._own).reshape(self.shape if shape is None else shape)


class _Scalar(_NumpyArray):
    """A numpy scalar: immutable, so it is never lent."""

    __slots__ = ()

    def lend(self) -> NoReturn:
        raise ValueError("cannot write a result into a numpy scalar: it is immutable. Pass a 0-d array.")

    def wrap(self, flat: Flat, shape: tuple[int, ...] | None = None) -> Any:
        value = super().wrap(flat, shape)
        return value[()] if value.shape == () else value

    @property
    def container(self) -> str:
        return "scalar"

    def _kind(self) -> str:
        return "numpy scalar"


class _Buffer(_NumpyArray):
    """An `array.array` or a typed memoryview."""

    __slots__ = ("_typecode",)

    def __init__(self, dtype: DType, value: npt.NDArray[Any], typecode: str | None) -> None:
        super().__init__(dtype, value)
        self._typecode = typecode  # of the array.array; None for a memoryview

    def wrap(self, flat: Flat, shape: tuple[int, ...] | None = None) -> Any:
        value = super().wrap(flat, shape)
        if self._typecode is None:
            return memoryview(value)
        if value.ndim != 1:
            return value
        typed = array.array(self._typecode)
        typed.frombytes(flat_bytes(value))
        return typed

    @property
    def container(self) -> str:
        return "memoryview" if self._typecode is None else f"array:{self._typecode}"

    def _kind(self) -> str:
        return "memoryview" if self._typecode is None else "array.array"


class _Tensor(Array):
    """A torch tensor on the CPU."""

    __slots__ = ("_tensor",)

    def __init__(self, dtype: DType, tensor: Any) -> None:
        torch: Any = sys.modules["torch"]
        # Conjugate and negative views are lazy: numpy can only have them resolved, into a copy.
        resolved = tensor.resolve_conj().resolve_neg()
        self._tensor = None if resolved is tensor else tensor  # kept only where `_memory` is such a copy
        if dtype is _BFLOAT16:
            memory = resolved.view(torch.int16).numpy().view(dtype.storage)
        else:
            memory = resolved.numpy()
        super().__init__(dtype, memory)

    def lend(self) -> tuple[Flat, Callable[[], None] | None]:
        lazy = self._tensor
        if lazy is None:
            return super().lend()
        self._refuse_overlap([stride * self.dtype.itemsize for stride in lazy.stride()])
        flat = self.pack()

        def write_back() -> None:
            lazy.copy_(self.wrap(flat))

        return flat, write_back

    def wrap(self, flat: Flat, shape: tuple[int, ...] | None = None) -> Any:
        torch: Any = sys.modules["torch"]
        if not flat.flags.behaved:  # torch warns of read-only memory
            flat = flat.copy()
        if self.dtype is _BFLOAT16:
            tensor = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(flat)
        return tensor.view(self.shape if shape is None else shape)

    @property
    def container(self) -> str:
        return "torch"

    def _kind(self) -> str:
        return "torch tensor"


def describe(value: Any) -> Array | None:
    """The `Array` of a value that takes the array path; None for a value that travels as an object.

    Array path: numpy arrays (`numpy.memmap` included) and numpy scalars, torch tensors on the CPU,
    `array.array`, and memoryviews whose format is a number. A plain ``memoryview(b"...")`` has format ``"B"``
    and is uint8; bytes and bytearray themselves are objects, as are `numpy.str_` and `numpy.bytes_`, which
    are str and bytes.

    Raises:
        TypeError: the value is an array, but of a dtype, layout, device or subclass without a defined result.
    """
    if type(value) is np.ndarray:
        found = _NUMPY.get(value.dtype)
        # The table finds equal dtypes; C's aliases (long long beside long) are equal, yet foreign to ufuncs.
        if found is not None and found.storage.num == value.dtype.num:
            return Array(found, value)
        return _NumpyArray(_numpy_dtype(value.dtype), value)
    if isinstance(value, np.generic):
        if isinstance(value, (str, bytes)):
            return None
        return _Scalar(_numpy_dtype(value.dtype), np.asarray(value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return _describe_tensor(value, torch)
    if isinstance(value, np.memmap):
        return describe(value.view(np.ndarray))
    if isinstance(value, np.ndarray):
        raise TypeError(
            f"{_type_name(value)} is a subclass of numpy.ndarray with rules of its own: pass "
            "numpy.asarray(value) to work on its elements, or put it in a list to send it as an object"
        )
    if isinstance(value, array.array):
        return _describe_buffer(memoryview(value), value.typecode)
    if isinstance(value, memoryview):
        return _describe_buffer(value, None)
    return None


def _describe_tensor(value: Any, torch: Any) -> Array:
    tensor = value.detach()  # a Parameter, like every class that only marks a tensor, gives a plain tensor
    if type(tensor) is not torch.Tensor:
        raise TypeError(
            f"{_type_name(value)} is a subclass of torch.Tensor with rules of its own: pass a plain tensor "
            "(.as_subclass(torch.Tensor), for a DTensor .to_local() or .full_tensor())"
        )
    if tensor.device.type != "cpu":
        raise TypeError(f"this tensor is on device {str(tensor.device)!r}: pass tensor.cpu()")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"this tensor is not dense (layout {layout}): pass tensor.to_dense()")
    dtype = _TORCH.get(str(tensor.dtype))
    if dtype is None:
        _refuse_dtype(str(tensor.dtype), ".to(...)")
    return _Tensor(dtype, tensor)


def _describe_buffer(view: memoryview, typecode: str | None) -> Array:
    form = typecode or view.format
    if (form[1:] if form[0] in "@=<>!" else form) not in _NUMBER_FORMATS:
        raise TypeError(
            f"a buffer of format {form!r} has no dtype that asynccoll can reduce or send as an array: "
            "pass numbers (memoryview.cast), or bytes(...) to send it as an object"
        )
    value = np.asarray(view)
    return _Buffer(_numpy_dtype(value.dtype), value, typecode)


def _numpy_dtype(dtype: np.dtype[Any]) -> DType:
    if dtype.num < _FIRST_EXTENSION_DTYPE:
        found = _BY_KIND.get((dtype.kind, dtype.itemsize))
    else:
        found = _BFLOAT16 if dtype.name == "bfloat16" else None
    if found is None:
        _refuse_dtype(str(dtype), ".astype(...)")
    return found


def _refuse_dtype(name: str, convert: str) -> NoReturn:
    raise TypeError(
        f"dtype {name} is not one that asynccoll can reduce or send as an array ({', '.join(DTYPES)}): "
        f"convert with {convert}, or put the value in a list to send it as an object"
    )


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def matches_out(array: Array, out: Array, shape: tuple[int, ...] | None = None) -> None:
    """Check that ``out`` can take a result of ``array``'s dtype and of ``shape`` (None: ``array``'s shape).

    Raises:
        TypeError: another dtype.
        ValueError: another shape, read-only memory, or memory that overlaps the input's other than by being
            exactly the same view of it.
    """
    if shape is None:
        shape = array.shape
    if out.dtype is not array.dtype:
        raise TypeError(f"out must be {array.dtype.name} of shape {shape}, not {out.dtype.name}")
    if out.shape != shape:
        raise ValueError(f"out must be {array.dtype.name} of shape {shape}, not of shape {out.shape}")
    mine, theirs = array._memory, out._memory
    if isinstance(out, _Scalar) or not theirs.flags.writeable:
        raise ValueError(f"out must be writable memory: this {out._kind()} is read-only")
    if partly_shared(mine, theirs):
        raise ValueError(
            "out overlaps the input in memory without being the same view: pass the input itself as out, "
            "or memory apart from it"
        )


def share_memory(arrays: Sequence[Array]) -> bool:
    """Whether any two of the arrays have memory in common."""
    memories = [array._memory for array in arrays if array.count]
    return any(shared(one, two) for number, one in enumerate(memories) for two in memories[:number])


def flat_bytes(flat: Flat) -> memoryview:
    """The memory of a one-dimensional contiguous array as a flat memoryview of bytes (format ``"B"``).

    Every buffer is cast so before a transport sees it: after a short write asyncio slices by element.
    """
    return flat.view(_BYTE).data


def rebuild(container: str, dtype: DType, shape: tuple[int, ...], flat: Flat) -> Any:
    """A value of the kind that `Array.container` named on the sending rank, around ``flat``.

    Imports torch or ml_dtypes where the kind needs it: only a rank that is sent such a value and has none of its own.

    Raises:
        ImportError: the package of that kind is not installed here.
        ValueError: there is no such kind.
    """
    model: Any
    if container == "torch":
        torch: Any = importlib.import_module("torch")
        model = torch.empty(0, dtype=getattr(torch, dtype.name))
    elif dtype is _BFLOAT16:
        model = np.empty(0, importlib.import_module("ml_dtypes").bfloat16)
    elif container == "numpy":
        model = np.empty(0, dtype.storage)
    elif container == "scalar":
        model = dtype.storage.type(0)
    elif container == "memoryview":
        model = memoryview(np.empty(0, dtype.storage))  # type: ignore[arg-type,unused-ignore]  # numpy's stubs differ by version
    elif container.startswith("array:"):
        model = array.array(container[6:])
    else:
        raise ValueError(f"there is no container {container!r}")
    described = describe(model)
    assert described is not None
    return described.wrap(flat, shape)
