"""Values as pickles whose large buffers stay where they are. Knows numpy's and torch's values, no peers and no wire.

Pickle protocol 5 hands the memory of a large array to its caller instead of copying it into the pickle. What `pack` gives
therefore refers to the value's own memory: until it has been sent, nobody may write there. Two kinds of values do not do so by
themselves, and have reducers here: tensors, whose own pickling copies their whole storage, and arrays of extension dtypes
(ml_dtypes). The reducers serve one pickler each time; the process-wide `copyreg` table is read and never written.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

__all__ = [
    "MOST_BUFFERS",
    "OUT_OF_BAND",
    "Buffer",
    "Packed",
    "dumps",
    "fresh",
    "loads",
    "pack",
    "qualified_name",
    "text_of",
    "unpack",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

PROTOCOL: Final = 5
"""Read by every Python that asynccoll supports; the newest might not be."""
OUT_OF_BAND: Final = 1 << 14
"""Bytes from which a buffer stays out of the pickle: below, a copy costs less than a transfer of its own."""
MOST_BUFFERS: Final = 1024
"""Buffers that stay out of one pickle, so that the list of their lengths is bounded. Further ones are copied into it."""


_WELL_KNOWN: Final = (frozenset(sys.stdlib_module_names) - {"__main__"}) | {
    "asynccoll",
    "builtins",
    "ml_dtypes",
    "numpy",
    "torch",
}
"""Packages whose classes and functions every rank has."""


class Packed(NamedTuple):
    """A value as bytes: its pickle, and the buffers that are not in it."""

    pickle: Buffer
    buffers: tuple[memoryview, ...] = ()
    """Flat bytes (format ``"B"``), in the order in which `unpack` takes them. The memory is the value's own."""
    foreign: bool = False
    """Rebuilding it needs code that is neither Python's own nor numpy's or torch's: one rank may have it, and another not."""

    def owned(self) -> Packed:
        """The same with buffers of its own: a snapshot."""
        copies = []
        for buffer in self.buffers:
            copy = fresh(buffer.nbytes)
            copy[:] = buffer
            copies.append(copy)
        return Packed(self.pickle, tuple(copies), self.foreign)


def fresh(nbytes: int) -> memoryview:
    """New writable memory of that many bytes, aligned for every dtype; not cleared.

    Raises:
        MemoryError: there is not that much.
    """
    return np.empty(nbytes, np.uint8).data


def pack(value: Any) -> Packed:
    """Pickle a value. Buffers of at least `OUT_OF_BAND` bytes are lent, not copied: only the rest is a snapshot.

    Plain pickle where it can, cloudpickle (lambdas, local functions and classes) where pickle refuses.

    Raises:
        TypeError: neither can. Names the value's type; the cause is the pickler's own error.
    """
    aside = _Aside()
    data, foreign = _pickled(value, aside)
    return Packed(data, tuple(aside.buffers), foreign)


def unpack(data: Buffer, buffers: Sequence[memoryview] = ()) -> Any:
    """Rebuild a value from what `pack` gave. Arrays live in ``buffers``, which are given away. Raises whatever unpickling raises.

    Unpickling runs code of the sender's choice: never call this on bytes of an unauthenticated peer.
    """
    return pickle.loads(data, buffers=buffers)


def dumps(value: Any) -> bytes:
    """`pack` with every buffer in the pickle: a snapshot as a whole."""
    return _pickled(value, None)[0]


def loads(data: Buffer) -> Any:
    """Rebuild a value from `dumps`. See `unpack`."""
    return pickle.loads(data)


# -- picklers -------------------------------------------------------------------------------------------------


class _Aside:
    """Takes the buffers that stay out of a pickle."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """The pickler's question about a buffer: True keeps it in the pickle."""
        memory = buffer.raw()
        if memory.nbytes < OUT_OF_BAND or len(self.buffers) >= MOST_BUFFERS:
            return True
        self.buffers.append(memory)
        return False

    def clear(self) -> None:
        self.buffers.clear()


class _Pickler(pickle.Pickler):
    """pickle with the reducers of this module; notes whether everything in the value is well known."""

    foreign = False

    def reducer_override(self, value: Any) -> Any:
        """pickle's question about each value that is not of one of its own kinds."""
        kind = type(value)
        registered = copyreg.dispatch_table.get(kind)  # the user's own registrations win
        if registered is None:
            if kind is np.ndarray:
                return _reduce_array(value)
            if kind is getattr(
                sys.modules.get("torch"), "Tensor", None
            ):  # loaded, if the value holds a tensor
                return _reduce_tensor(value)
        if not self.foreign:
            # Of a class or a function its own module counts, of anything else that of its class and of its reducer.
            named = (
                value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else kind
            )
            self.foreign = not (_well_known(named) and _well_known(registered))
        return NotImplemented


def _well_known(named: Any) -> bool:
    """A class or function comes from a package that every rank has; so does None, which is neither."""
    module = getattr(named, "__module__", None)
    return named is None or (isinstance(module, str) and module.partition(".")[0] in _WELL_KNOWN)


def _pickled(value: Any, aside: _Aside | None) -> tuple[bytes, bool]:
    stream = io.BytesIO()
    pickler = _Pickler(stream, PROTOCOL, buffer_callback=aside)
    try:
        pickler.dump(value)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 (__reduce__ is the user's code and may raise anything; cloudpickle decides)
        if aside is not None:
            aside.clear()
        try:
            return _cloudpickled(value, aside), True
        except MemoryError:
            raise
        except Exception as error:
            raise TypeError(
                f"cannot pickle this value of type {qualified_name(type(value))} ({type(error).__name__}: "
                f"{text_of(error)}). Send something that pickles: data without sockets, locks, generators or files."
            ) from error
    return stream.getvalue(), pickler.foreign


def _cloudpickled(value: Any, aside: _Aside | None) -> bytes:
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # cloudpickle is untyped
        """Without cloudpickle's rule that a memoryview arrives as bytes: a value arrives as what it is, or not at all."""

        dispatch_table = cloudpickle.CloudPickler.dispatch_table.new_child(
            {**_reducers(), **copyreg.dispatch_table, memoryview: _refuse_memoryview}
        )

    stream = io.BytesIO()
    Pickler(stream, PROTOCOL, buffer_callback=aside).dump(value)
    return stream.getvalue()


def _refuse_memoryview(view: memoryview) -> Any:
    raise TypeError("a memoryview does not pickle; send numpy.asarray(view), or bytes(view)")


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """Exact type -> how it is pickled. Subclasses are not in it: they go through pickling of their own."""
    found: dict[type, Callable[[Any], Any]] = {np.ndarray: _reduce_array}
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # loaded, if the value holds a tensor
    if tensor is not None:
        found[tensor] = _reduce_tensor
    return found


# -- arrays ---------------------------------------------------------------------------------------------------


def _reduce_array(value: Any) -> Any:
    """A large array lends its memory; a read-only one of any size arrives writable, which numpy's own pickles do not."""
    dtype, flags = value.dtype, value.flags
    if dtype.hasobject or not value.nbytes or (value.nbytes < OUT_OF_BAND and flags.writeable):
        return value.__reduce_ex__(PROTOCOL)
    order = "C"
    if flags.c_contiguous:
        flat = value.reshape(-1)
    elif flags.f_contiguous:
        order, flat = "F", value.T.reshape(-1)
    else:
        flat = value.flatten()
    return _array, (pickle.PickleBuffer(flat.view(np.uint8)), dtype, value.shape, order)


def _array(memory: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> Any:
    return np.ndarray(shape, dtype, _writable(memory), order=order)


def _writable(memory: Any) -> Any:
    """``memory`` of a buffer that arrived, where it may be written to: the array in it belongs to this rank alone."""
    view = memoryview(memory)
    if not view.readonly:
        return memory
    # The unpickler hands out a read-only view where the sender's memory was read-only. Behind it is what `fresh` gave.
    owner = view.obj
    if isinstance(owner, np.ndarray) and owner.flags.writeable and owner.nbytes == view.nbytes:
        return owner
    return bytearray(view)


def _reduce_tensor(value: Any) -> Any:
    """A tensor on the CPU as its own elements, not as its storage. `requires_grad` is kept; the graph behind it is not."""
    torch: Any = sys.modules["torch"]
    if value.device.type != "cpu":
        raise TypeError(f"a tensor on device {str(value.device)!r} does not travel: send tensor.cpu()")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.__dict__:
        return value.__reduce_ex__(PROTOCOL)  # what only torch's own pickling knows
    tensor = value.detach().resolve_conj().resolve_neg()
    # Dimensions from the slowest to the fastest: transposed and channels-last tensors are dense in another order.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        order = list(range(tensor.dim()))
        dense = tensor.contiguous()
    flat = dense.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(flat), value.dtype, tuple(dense.shape), order, value.requires_grad)


def _tensor(memory: Any, dtype: Any, shape: tuple[int, ...], order: Sequence[int], grad: bool) -> Any:
    torch: Any = importlib.import_module("torch")
    owned = _writable(memory)
    flat = torch.from_numpy(np.ndarray(memoryview(owned).nbytes, np.uint8, owned))
    tensor = flat.view(dtype).reshape(shape).permute([order.index(dim) for dim in range(len(order))])
    return tensor.requires_grad_() if grad else tensor


# -- words in errors -------------------------------------------------------------------------------------------


def text_of(error: BaseException) -> str:
    """``str(error)``, whatever its own ``__str__`` does."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 (a broken __str__ must not hide the failure it belongs to)
        return f"<its __str__ raised {type(broken).__name__}>"


def qualified_name(cls: type) -> str:
    """Module and name of a class; of a built-in one the name alone."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
