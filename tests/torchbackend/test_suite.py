"""The comparison of two backends notices what is worse, and only that."""

import pytest

torch = pytest.importorskip("torch")

from tests.torchbackend.cells import CRASH, FAILED, HANG, OK, PART, Cell, where  # noqa: E402
from tests.torchbackend.scenarios import verdict, worse  # noqa: E402
from tests.torchbackend.suite import (  # noqa: E402
    SCENARIOS,
    Refused,
    Wrong,
    attempt,
    bits,
    difference,
    expect,
    plain,
    refusals,
)

pytestmark = pytest.mark.torch


def answers(**values):
    return plain(values)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (torch.tensor([1.0, 2.0]), ""),
        (torch.tensor([1.0, 2.0 + 1e-6]), ""),
        (torch.tensor([1.0, 2.5]), "x: off by 0.5"),
        (torch.tensor([1.0, float("nan")]), "x: off by nan"),
        (torch.tensor([1.0, 2.0], dtype=torch.float64), "x: float64[2] instead of float32[2]"),
        (torch.tensor([1.0]), "x: float32[1] instead of float32[2]"),
        (Refused("no"), "x: refused: no"),
        (Wrong("3"), "x: wrong: 3"),
    ],
)
def test_tensors_are_compared_by_value_type_and_shape(other, found):
    assert difference(answers(x=torch.tensor([1.0, 2.0])), answers(x=other)).startswith(found)
    assert bool(found) == bool(difference(answers(x=torch.tensor([1.0, 2.0])), answers(x=other)))


def test_whole_numbers_are_compared_exactly():
    one, two = torch.tensor([2**40]), torch.tensor([2**40 + 1])
    assert difference(answers(x=one), answers(x=two))
    expect(one, one)
    with pytest.raises(AssertionError):
        expect(two, one)


def test_what_gloo_refuses_or_does_wrong_excuses_anything():
    for no in (Refused("no"), Wrong("3")):
        assert not difference(answers(x=no, y=1), answers(x=torch.ones(2), y=1))


def test_answers_that_are_missing_are_a_difference():
    assert difference(answers(x=1, y=2), answers(x=1))
    assert difference(answers(x=[1, 2]), answers(x=[1]))
    assert difference(answers(x="a"), answers(x="b"))


def test_bits_tell_values_apart_that_are_equal():
    zero, negative = torch.tensor([0.0]), torch.tensor([-0.0])
    assert bits(plain([zero])) == bits(plain([zero.clone()]))
    assert bits(plain([zero])) != bits(plain([negative]))


def test_an_attempt_tells_a_refusal_from_a_wrong_result():
    def refuse():
        raise RuntimeError("no")

    found = {
        "a": attempt(refuse),
        "b": attempt(lambda: expect(torch.ones(1), torch.zeros(1))),
        "c": attempt(lambda: 1),
    }
    assert refusals(found) == ["a", "b (wrong result)"]


NAME = "DDP"


def table(gloo, other):
    return {(NAME, "gloo", 2): gloo, (NAME, "asynccoll", 2): other}


@pytest.mark.parametrize(
    ("gloo", "other", "bad"),
    [
        (OK, OK, False),
        (OK, PART, False),
        (OK, FAILED, True),
        (OK, HANG, True),
        (PART, FAILED, True),
        (FAILED, FAILED, False),
        (FAILED, HANG, True),
        (FAILED, CRASH, True),
        (CRASH, OK, False),
        (HANG, FAILED, False),
    ],
)
def test_a_cell_is_worse_by_how_it_ended(gloo, other, bad):
    assert bool(worse(table(Cell(gloo), Cell(other)))) == bad


def test_answers_unlike_those_of_gloo_fail():
    gloo, other = Cell(OK, answers=[{"x": 1}, {"x": 1}]), Cell(OK, answers=[{"x": 1}, {"x": 2}])
    cell = verdict(SCENARIOS[NAME], gloo, other)
    assert (cell.state, cell.note) == (FAILED, "rank 1, unlike gloo: x: 2 instead of 1")
    assert worse(table(gloo, cell))
    assert verdict(SCENARIOS[NAME], gloo, gloo) == gloo


def test_a_failure_has_no_excuse_without_gloo():
    assert worse({(NAME, "asynccoll", 2): Cell(FAILED)})
    assert not worse({(NAME, "asynccoll", 2): Cell(OK)})


def test_where_it_hangs_is_read_from_the_main_threads_stack():
    log = (
        'Timeout (0:00:19)!\nThread 0x1 (most recent call first):\n  File "/a/b/other.py", line 3 in run\n\n'
        'Thread 0x2 (most recent call first):\n  File "/a/b/wait.py", line 7 in wait\n  File "/a/test.py", line 8 in run\n'
    )
    assert where(log) == "wait.py:7 in wait < test.py:8 in run"
