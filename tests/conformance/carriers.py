"""How a rank may hold an array: containers and layouts. Knows numpy, torch and buffers, not asynccoll.

A carrier is named ``container/layout``. `hold` puts given bits (see `reference`) into one, with the memory around them
filled, so that a write outside the elements is seen.
"""

import array
import math

import ml_dtypes
import numpy as np
import reference
import torch

LAYOUTS = {
    "numpy": (
        *("contiguous", "strided", "transposed", "reversed", "expanded", "offset", "unaligned"),
        *("fortran", "big-endian", "read-only"),
    ),
    "torch": ("contiguous", "strided", "transposed", "expanded", "offset", "fortran"),
    "memoryview": ("contiguous", "strided", "reversed", "big-endian", "read-only"),
    "array": ("contiguous",),
    "scalar": ("contiguous",),
}
SINGLE = tuple(f"{container}/{layout}" for container, layouts in LAYOUTS.items() for layout in layouts)
CARRIERS = (*SINGLE, "mixed")
UNWRITABLE = ("expanded", "read-only")

TYPECODES = {
    np.dtype(code): code
    for code in "bBhHiIlLfd"  # of two codes for one dtype the later: "l" for int64
}
FILLER = 0x5A


def carries_dtype(carrier, dtype):
    container, _, layout = carrier.partition("/")
    if container == "array":
        return dtype in reference.INTEGERS or dtype in ("float32", "float64")
    return dtype != "bfloat16" or (container in ("numpy", "torch", "mixed") and layout != "big-endian")


def carries_form(carrier, form):
    if carrier == "scalar/contiguous":
        return form == "0-d"
    return form == "1-d" or carrier != "array/contiguous"


def carries_mode(carrier, mode):
    container, _, layout = carrier.partition("/")
    return mode != "inplace" or (container != "scalar" and layout not in UNWRITABLE)


def of_rank(carrier, rank, dtype, form, mode, start):
    """The carrier that ``rank`` uses: "mixed" is another one on each rank."""
    if carrier != "mixed":
        return carrier
    fit = [
        one
        for one in SINGLE
        if carries_dtype(one, dtype) and carries_form(one, form) and carries_mode(one, mode)
    ]
    return fit[(start + 7 * rank) % len(fit)]  # 7: neighbours differ in the container, too


class Held:
    """A value as it is passed to a verb, and the memory that it lives in."""

    def __init__(self, value, base, cut):
        self.value = value
        self.base = base
        self.cut = cut
        """From a copy of the base to the view with the value's elements."""
        self.before = base.copy()

    def damage(self, written=None):
        """None if the memory is as it was, apart from the elements, if ``written`` (bits) was to be put there."""
        shadow = self.before.copy()
        if written is not None:
            self.cut(shadow)[...] = written
        if shadow.tobytes() == self.base.tobytes():
            return None
        return (
            "its memory was changed" if written is None else "its memory holds something else than the result"
        )


def hold(carrier, dtype, bits):
    """The elements ``bits`` in that carrier. Where the layout repeats elements, ``bits`` must too."""
    container, _, layout = carrier.partition("/")
    if container == "array":
        value = array.array(TYPECODES[bits.dtype], bits.tobytes())
        return Held(value, np.frombuffer(value, bits.dtype), lambda base: base)
    base, cut = _cut(layout, bits)
    view = cut(base)
    if layout == "expanded":
        base[...] = bits[:1] if bits.ndim else bits
    else:
        view[...] = bits
    if layout == "read-only":
        view = view[...]
        view.flags.writeable = False
    held = Held(view, base, cut)
    if container == "scalar":
        held.value = _numpy(view, dtype)[()]
        held.base = held.before  # a scalar has its own memory
    elif container == "torch":
        held.value = _tensor(layout, base, view, dtype)
    else:
        held.value = _numpy(view, dtype)
        if container == "memoryview":
            held.value = memoryview(held.value)
    return held


def _numpy(view, dtype):
    return view.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else view


def _tensor(layout, base, view, dtype):
    bfloat16 = dtype == "bfloat16"
    if layout in ("expanded", "offset"):  # by torch itself: its own strides and storage offset
        tensor = torch.from_numpy(base.view(np.int16) if bfloat16 else base)
        if layout == "expanded":
            tensor = tensor.expand(view.shape)
        else:
            tensor = tensor[3 : 3 + view.size].view(view.shape)
    else:
        tensor = torch.from_numpy(view.view(np.int16) if bfloat16 else view)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def _filled(shape, dtype):
    base = np.empty(shape, dtype)
    if base.size:
        base.reshape(-1).view(np.uint8)[:] = FILLER if dtype != np.bool_ else 1
    return base


def _cut(layout, bits):
    """The memory for ``bits`` in that layout, and the function that cuts the elements out of it."""
    shape, dtype, count = bits.shape, bits.dtype, bits.size
    turned = shape[::-1]
    match layout:
        case "strided" if not shape:
            return _filled(3, dtype), lambda base: base[1:2].reshape(())
        case "strided":
            return _filled((*shape[:-1], 2 * shape[-1] + 1), dtype), lambda base: base[..., 1::2]
        case "transposed" if shape:
            base = _filled((*turned[:-1], turned[-1] + 1), dtype)
            return base, lambda base: base[..., : turned[-1]].T
        case "fortran":
            return _filled(turned, dtype), lambda base: base.T
        case "reversed" if shape:
            return _filled(shape, dtype), lambda base: base[(slice(None, None, -1),) * base.ndim]
        case "expanded" if shape:
            return _filled((min(1, shape[0]), *shape[1:]), dtype), lambda base: np.broadcast_to(base, shape)
        case "offset":
            return _filled(count + 5, dtype), lambda base: base[3 : 3 + count].reshape(shape)
        case "unaligned":
            base = _filled(count * dtype.itemsize + 2, np.uint8)
            return base, lambda base: base[1:-1].view(dtype).reshape(shape)
        case "big-endian":
            return _filled(shape, dtype.newbyteorder(">")), lambda base: base
    return _filled(shape, dtype), lambda base: base


def kind(value):
    """What must be the same in a value and in its result: container, dtype, byte order."""
    if isinstance(value, torch.Tensor):
        return f"torch {value.dtype}"
    if isinstance(value, array.array):
        return f"array.array({value.typecode})"
    if isinstance(value, memoryview):
        return f"memoryview({value.format})"
    return f"{type(value).__name__} {value.dtype.str} {value.dtype.name}"


def memory(value):
    """A value's elements in place, as numpy bits of whatever strides and byte order."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return (
            value.view(torch.int16).numpy().view(np.uint16)
            if value.dtype == torch.bfloat16
            else value.numpy()
        )
    found = np.asarray(value)
    return found.view(np.uint16) if found.dtype == ml_dtypes.bfloat16 else found


def bits(value):
    """A copy of a value's elements: native byte order, contiguous."""
    found = memory(value)
    return np.array(found.astype(found.dtype.newbyteorder("=")), order="C")


def share_memory(one, other):
    """Whether two values have a byte in common."""
    if isinstance(one, np.generic) or isinstance(other, np.generic):
        return False
    return np.shares_memory(memory(one), memory(other))


def shape_of(form, count):
    """A shape of ``count`` elements and of that form."""
    if form == "0-d":
        return ()
    if form == "1-d":
        return (count,)
    rows = next(n for n in range(math.isqrt(count) or 1, 0, -1) if count % n == 0)
    if count == 0:
        return (0, 3) if form == "2-d" else (3, 0, 2)
    return (rows, count // rows) if form == "2-d" else (rows, 1, count // rows)
