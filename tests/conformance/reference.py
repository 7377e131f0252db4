"""What a reduction must give, worked out with plain numpy. Knows dtypes, ops and error bounds, not asynccoll.

Values are numpy arrays of *bits*: the dtype itself, and uint16 for bfloat16. Integers and bool are folded in their own
dtype, so they wrap as numpy's do. Floating point is folded in longdouble and held to the bounds of docs/numerics.md; to
those a complex product adds sqrt(5) u for each multiplication, with which |z| is scaled (Brent, Percival, Zimmermann 2007).
min and max, infinities, NaN and the signs of zeros that are no rounding error are exact, and so is a world of one.
"""

import numpy as np

OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)

UFUNCS = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
NAN_BITS = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC00000,
    "float64": 0x7FF8000000000000,
}
# dtype -> (unit roundoff u of the sums, of the rounding to a half type, half the smallest subnormal)
PRECISION = {
    "float16": (2.0**-24, 2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-24, 2.0**-8, 2.0**-134),
    "float32": (2.0**-24, 0.0, 2.0**-150),
    "float64": (2.0**-53, 0.0, np.longdouble(2) ** -1075),
}


def storage(dtype):
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def part(dtype):
    """The real dtype of an element, or of its parts."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def refused(op, dtype):
    """Whether the reduction is a TypeError by the numerics table."""
    if op == "avg":
        return dtype == "bool" or dtype in INTEGERS
    if op in ("min", "max"):
        return dtype in COMPLEX
    return op in ("band", "bor", "bxor") and (dtype in FLOATS or dtype in COMPLEX)


def numbers(bits, dtype):
    """Bits as floating point numbers of the same precision or more."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits


def rounded(values, dtype):
    """Numbers as bits; bfloat16 by truncation, which is good enough to make inputs."""
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(dtype)


def inputs(dtype, op, size, shape, rng):
    """One array of bits for each of ``size`` ranks. Integers wrap; floats hold NaN, infinities and zeros of both signs."""
    if dtype == "bool":
        return [rng.random(shape) < 0.6 for _ in range(size)]
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return [rng.integers(info.min, info.max, shape, dtype, endpoint=True) for _ in range(size)]
    if dtype in COMPLEX:
        real, imaginary = (_reals(part(dtype), op, size, shape, rng, op != "prod") for _ in range(2))
        made = []
        for re, im in zip(real, imaginary, strict=True):
            value = np.empty(shape, dtype)
            # Products of modulus about 1 neither overflow nor vanish.
            scale = 0.7 if op == "prod" else 1
            value.real, value.imag = re * scale, im * scale
            made.append(value)
        return made
    return _reals(dtype, op, size, shape, rng, True)


def _reals(dtype, op, size, shape, rng, special):
    # Of the specials some are on all ranks, so that zeros meet zeros only, and infinities infinities.
    table = rounded(np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]), dtype)
    everywhere = rng.random(shape) < 0.15
    made = []
    for _ in range(size):
        if op == "prod":
            values = rng.uniform(0.75, 1.35, shape) * rng.choice([-1.0, 1.0], shape)
        else:
            values = rng.normal(0, 4, shape) * 10.0 ** rng.integers(-2, 2, shape)
        bits = np.asarray(rounded(values, dtype))
        if special:
            here = rng.random(shape) < 0.1
            bits = np.where(here, rng.choice(table, shape), bits)
            bits = np.where(everywhere, rng.choice(table[4:], shape), bits)
        made.append(bits)
    return made


def difference(op, dtype, values, result):
    """None if the bits ``result`` are right for the ranks' ``values``, else what is wrong with them."""
    if result.dtype != storage(dtype) or result.shape != values[0].shape:
        return f"{result.dtype}{list(result.shape)} instead of {storage(dtype)}{list(values[0].shape)}"
    if dtype == "bool" or dtype in INTEGERS:
        right = values[0].copy()
        for value in values[1:]:
            right = UFUNCS[op](right, value)
        return _where(result != right, result, right)
    if op in ("min", "max"):
        right = _extreme(op, dtype, values)
        word = f"u{result.dtype.itemsize}"
        return _where(result.view(word) != right.view(word), result, right)
    return _rounding(op, dtype, values, result)


def _where(wrong, result, right, note=""):
    wrong = np.asarray(wrong)
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} wrong; at {at} {result[at]!r} instead of {right[at]!r}{note}"


def _extreme(op, dtype, values):
    best = values[0].copy()
    for value in values[1:]:
        a, b = numbers(best, dtype), numbers(value, dtype)
        if op == "max":
            better = (b > a) | ((a == b) & np.signbit(a) & ~np.signbit(b))
        else:
            better = (b < a) | ((a == b) & ~np.signbit(a) & np.signbit(b))
        best = np.where(better | np.isnan(b), value, best)
    return _canonical(best, dtype)


def _canonical(bits, dtype):
    word = bits.copy().view(f"u{bits.dtype.itemsize}")
    return np.where(np.isnan(numbers(bits, dtype)), word.dtype.type(NAN_BITS[dtype]), word).view(bits.dtype)


def _parts(array):
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "c":
        return array.reshape((*array.shape, 1)).view(array.real.dtype)
    return array.reshape((*array.shape, 1))


@np.errstate(all="ignore")
def _rounding(op, dtype, values, result):
    size, real = len(values), part(dtype)
    wide = np.clongdouble if dtype in COMPLEX else np.longdouble
    stack = np.stack([numbers(value, dtype) for value in values]).astype(wide)
    exact = stack[0]
    for value in stack[1:]:
        exact = exact * value if op == "prod" else exact + value
    if op == "prod":
        scale = np.repeat(np.abs(exact)[..., None], _parts(exact).shape[-1], -1)
        scale = scale * (5**0.5 if dtype in COMPLEX else 1)
    else:
        scale = np.sum([np.abs(_parts(value)) for value in stack], axis=0)
    exact = _parts(exact)
    roundings = size - 1
    if op == "avg":
        exact, scale, roundings = exact / size, scale / size, size
    unit, last, tiny = PRECISION[real]
    bound = scale * (roundings * unit / (1 - roundings * unit))
    if last:
        bound = bound + np.maximum(last * (np.abs(exact) + bound), tiny)
    if op == "avg":
        bound = bound + (tiny if real == "float64" else 2.0**-150)
    if size == 1:
        bound = np.zeros_like(bound)

    found = _parts(result)
    read = numbers(found, real).astype(np.longdouble)
    word = found.view(f"u{found.dtype.itemsize}")
    nan = np.isnan(exact)
    wrong = _where(nan & (word != NAN_BITS[real]), read, exact, " (NaN is to be the canonical one)")
    wrong = wrong or _where(~nan & np.isinf(exact) & (read != exact), read, exact)
    finite = np.isfinite(exact)
    off = np.abs(np.where(finite, read - exact, 0))
    wrong = wrong or _where(finite & ~(off <= bound), read, exact, f" (bound {np.max(bound, initial=0):.3g})")
    if dtype in COMPLEX and op == "prod":
        return wrong
    # A sum is -0.0 only if every operand is; a product's sign is that of its operands.
    zero = np.all([_parts(value) == 0 for value in stack], axis=0) if op != "prod" else finite
    signs = zero & (np.signbit(read) != np.signbit(exact))
    return wrong or _where(signs, read, exact, " (sign)")
