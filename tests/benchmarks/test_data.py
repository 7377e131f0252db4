import functools

import numpy as np
import pytest

from benchmarks import data

UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.mark.parametrize("op", data.OPS)
@pytest.mark.parametrize("name", [name for name in data.DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_expected_result_is_what_numpy_computes_in_any_order(op, name, world_size):
    dtype = data.dtype_of(name)
    parts = [data.contribution(op, 20_000, dtype, rank, world_size) for rank in range(world_size)]
    for order in (parts, parts[::-1]):
        result = functools.reduce(lambda a, b: UFUNCS[op](a, b, dtype=dtype), order)
        if op == "avg":
            result = (result / world_size).astype(dtype) if dtype.kind == "f" else result // world_size
        assert np.array_equal(result, data.expected(op, 20_000, dtype, world_size))


def test_ranks_contribute_different_values():
    dtype = np.dtype(np.float32)
    assert not np.array_equal(
        data.contribution("sum", 100, dtype, 0, 2), data.contribution("sum", 100, dtype, 1, 2)
    )


def test_a_chunk_at_a_wrong_place_is_seen():
    wanted = data.expected("sum", 1 << 18, np.dtype(np.float32), 4)
    for distance in (1, 1 << 10, 1 << 16):
        assert data.count_wrong(np.roll(wanted, distance), wanted) > wanted.size // 2


def test_each_wrong_element_counts_and_nan_is_wrong():
    wanted = data.expected("sum", 100, np.dtype(np.float32), 2)
    result = wanted.copy()
    assert data.count_wrong(result, wanted) == 0
    result[[3, 50]] += 1
    result[99] = np.nan
    assert data.count_wrong(result, wanted) == 3


@pytest.mark.parametrize("name", [name for name in data.DTYPES if name != "bfloat16"])
def test_poison_is_wrong_everywhere(name):
    wanted = data.expected("sum", 10_000, data.dtype_of(name), 2)
    memory = wanted.copy()
    data.poison(memory, wanted)
    assert data.count_wrong(memory, wanted) == wanted.size


def test_a_sum_that_is_not_exact_is_refused():
    with pytest.raises(ValueError, match="not exact in float16"):
        data.expected("sum", 1, np.dtype(np.float16), 1000)


def test_bfloat16_without_ml_dtypes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="pip install ml_dtypes"):
        data.dtype_of("bfloat16")
