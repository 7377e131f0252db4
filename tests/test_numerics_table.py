"""docs/numerics.md states, for every dtype and op, what happens: each cell of its table is held to the code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asynccoll.buffers import DTYPES, DType
from asynccoll.reduction import OPS, arithmetic

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"


def table() -> dict[tuple[str, str], str]:
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    start = next(i for i, row in enumerate(rows) if row[:2] == ["dtype", "sum"] and len(row) > 4)
    header, cells = rows[start], {}
    for row in rows[start + 2 :]:
        if len(row) != len(header):
            break
        for op, cell in zip(header[1:], row[1:], strict=True):
            assert (row[0], op) not in cells, f"{row[0]} has two rows"
            cells[row[0], op] = cell
    return cells


CELLS = table()


def pair(op: str, dtype: DType, one: object, two: object) -> np.ndarray:
    """The op over two ranks' single elements, given and returned in the storage dtype."""
    rule = arithmetic(op, dtype)
    mine, theirs = np.array([one], rule.storage), np.array([two], rule.storage)
    planes = [rule.plane(mine), rule.plane(theirs)]
    rule.load(mine, planes[0])
    rule.load(theirs, planes[1])
    rule.combine_higher(*planes)
    rule.finish(planes[0], mine, 2)
    return mine


def is_refused(op: str, dtype: DType) -> None:
    with pytest.raises(TypeError, match=rf"{op} of {dtype.name} "):
        arithmetic(op, dtype)


def is_logical(truth: Callable[[bool, bool], bool]) -> Callable[[str, DType], None]:
    def check(op: str, dtype: DType) -> None:
        assert dtype.name == "bool"
        for one in (False, True):
            for two in (False, True):
                assert pair(op, dtype, one, two).tolist() == [truth(one, two)]

    return check


def wraps(op: str, dtype: DType) -> None:
    info = np.iinfo(dtype.storage)
    exact = {"sum": operator.add, "prod": operator.mul}[op](int(info.max), int(info.max))
    assert exact > info.max
    assert pair(op, dtype, info.max, info.max).tolist() == [(exact - info.min) % 2**info.bits + info.min]


def is_exact(op: str, dtype: DType) -> None:
    fold = {"min": min, "max": max, "band": operator.and_, "bor": operator.or_, "bxor": operator.xor}[op]
    # Elements are compared as stored: bits of bfloat16 are in order for positive values.
    values = [0x3F81, 0x3F80, 0x0001] if dtype.name == "bfloat16" else [3, 5, 1]
    for one in values:
        for two in values:
            assert pair(op, dtype, one, two).tolist() == [fold(one, two)]


def rounds_in_its_own_dtype(op: str, dtype: DType) -> None:
    rule = arithmetic(op, dtype)
    assert rule.partial == rule.storage
    assert not rule.separate
    assert not rule.order_sensitive
    one, two = np.array([1.1], dtype.storage), np.array([3.3], dtype.storage)
    wanted = {"sum": one + two, "avg": (one + two) / 2, "prod": one * two}[op]
    assert pair(op, dtype, one[0], two[0]).tobytes() == wanted.tobytes()


def rounds_in_float32(op: str, dtype: DType) -> None:
    rule = arithmetic(op, dtype)
    assert rule.partial == np.float32
    assert rule.separate
    # 1 + ulp + ulp of the half type: lost at once in half arithmetic with ties to even, kept in float32.
    one = np.array([0x3C00 if dtype.name == "float16" else 0x3F80] * 2, np.uint16).view(rule.storage)
    plane = rule.plane(one)
    rule.load(one, plane)
    assert plane.tolist() == [1, 1]
    plane += np.float32(2.0**-20)
    combined = plane.copy()
    rule.combine_lower(combined, plane)
    wanted = np.float32(1 + 2.0**-20) * (2 if op != "prod" else np.float32(1 + 2.0**-20))
    assert combined.tolist() == [wanted] * 2


def is_computed_by_one_rank(op: str, dtype: DType) -> None:
    assert arithmetic(op, dtype).order_sensitive


MEANINGS: dict[str, Callable[[str, DType], None]] = {
    "TypeError": is_refused,
    "or": is_logical(operator.or_),
    "and": is_logical(operator.and_),
    "xor": is_logical(operator.xor),
    "wraps": wraps,
    "exact": is_exact,
    "rounds": rounds_in_its_own_dtype,
    "float32": rounds_in_float32,
    "one rank": is_computed_by_one_rank,
}


def test_the_table_has_every_dtype_and_op_once_and_no_other() -> None:
    assert list(CELLS) == [(name, op) for name in DTYPES for op in OPS]


def test_every_word_of_the_table_is_explained_below_it_and_used() -> None:
    text = PAGE.read_text(encoding="utf-8")
    explained = {
        word for words in re.findall(r"^- \*\*(.+?)\*\*:", text, re.MULTILINE) for word in words.split(", ")
    }
    assert explained == set(MEANINGS) == set(CELLS.values())


@pytest.mark.parametrize(("name", "op"), CELLS)
def test_the_cell_is_what_the_code_does(name: str, op: str) -> None:
    MEANINGS[CELLS[name, op]](op, DTYPES[name])


def test_the_canonical_nan_is_the_one_the_page_gives() -> None:
    text = PAGE.read_text(encoding="utf-8")
    given = dict(re.findall(r"(b?float\d+) `([0-9a-f]+)`", text.replace("\n", " ")))
    assert set(given) == {name for name, dtype in DTYPES.items() if dtype.kind == "f"}
    for name, digits in given.items():
        dtype = DTYPES[name]
        bits = np.dtype(f"u{dtype.itemsize}")
        negative_nan = np.array([-1], np.dtype(f"i{dtype.itemsize}")).view(dtype.storage)[0]
        for op in ("sum", "min", "max"):
            assert f"{pair(op, dtype, negative_nan, negative_nan).view(bits)[0]:x}" == digits
