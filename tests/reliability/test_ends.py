"""A few ends of each kind. See `ends`; hundreds by its command."""

import pytest

from . import ends
from .ends import DIALECTS, ENDS, LOOPS, Case, draw, every, judge, program, run

CHOSEN = (
    Case("return", "async", "uvloop", pending=True, together=False, launched=False),
    Case("return", "collective", "asyncio", pending=True, together=True, launched=False),
    Case("error", "sync", "uvloop", pending=True, together=False, launched=False),
    Case("sys.exit in a callback", "async", "asyncio", pending=True, together=False, launched=False),
    Case(
        "sys.exit in a callback of a thread", "sync", "asyncio", pending=True, together=False, launched=False
    ),
    Case("SIGINT in the block", "async", "uvloop", pending=True, together=True, launched=False),
    Case("SIGINT", "sync", "asyncio", pending=True, together=False, launched=False),
    Case("SIGTERM, handled", "async", "uvloop", pending=True, together=False, launched=False),
    Case("SIGTERM, which cancels", "async", "asyncio", pending=True, together=False, launched=False),
    Case("close twice", "async", "uvloop", pending=False, together=False, launched=False),
    Case("SIGTERM", "sync", "uvloop", pending=True, together=False, launched=True),
    Case("sys.exit in the block", "async", "asyncio", pending=True, together=True, launched=True),
)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_it_ends_at_once_with_its_code_and_in_silence(case, monkeypatch):
    # How long it takes is a figure of the command's; here a hang is what counts.
    monkeypatch.setattr(ends, "WITHIN", 20.0)
    failures, _ = run(case, 0)
    assert failures == []


def test_every_case_is_a_program():
    for case in every():
        compile(program(case, 0.01), str(case), "exec", dont_inherit=True)


def test_the_first_draws_have_every_end_by_every_facade_on_every_loop():
    kinds = {
        (name, facade, loop)
        for name, end in ENDS.items()
        for facade in DIALECTS
        if facade in end.facades
        for loop in LOOPS
    }
    drawn = draw(300)
    assert len(drawn) == 300
    assert {(case.end, case.facade, case.loop) for case in drawn[: len(kinds)]} == kinds
    assert drawn == draw(300)


class TestJudge:
    """The judge itself can say no."""

    CASE = Case("sys.exit", "async", "asyncio", pending=False, together=True, launched=False)
    ERROR = Case("error", "async", "asyncio", pending=False, together=True, launched=False)
    TRACEBACK = "Traceback (most recent call last):\n  File x\nLookupError: no shard 7\n"

    def test_a_good_end(self):
        assert list(judge(self.CASE, 3, "", 0.1)) == []
        assert list(judge(self.ERROR, 1, self.TRACEBACK, 0.1)) == []

    def test_one_line_about_the_other_rank_is_allowed(self):
        line = (
            "rank 1: barrier #3 on 'world' after 0.1 s: lost rank 0 (connection closed without goodbye). Look"
        )
        assert list(judge(self.CASE, 3, line, 0.1)) == []

    @pytest.mark.parametrize(
        ("case", "code", "errors", "took"),
        [
            (CASE, 0, "", 0.1),
            (CASE, -11, "", 0.1),
            (CASE, 3, "", 2.1),
            (CASE, 3, "Task was destroyed but it is pending!\n", 0.1),
            (CASE, 3, TRACEBACK, 0.1),
            (ERROR, 1, "", 0.1),
            (ERROR, 1, "sys:1: ResourceWarning: unclosed socket\n" + TRACEBACK, 0.1),
            (ERROR, 1, TRACEBACK + "Exception ignored in: x\n", 0.1),
            (ERROR, 1, TRACEBACK.replace("7", "8"), 0.1),
        ],
    )
    def test_others(self, case, code, errors, took):
        assert len(list(judge(case, code, errors, took))) == 1

    def test_what_rank_0_must_hear(self):
        assert list(ends._unheard([{"cause": True}, {"error": "PeerLost", "rank": 1}])) == []
        for said in ([], [{"error": "PeerLost", "rank": 0}], [{"error": "CollectiveTimeout", "rank": None}]):
            assert len(list(ends._unheard(said))) == 1


def test_an_end_that_prints_is_told(monkeypatch):
    monkeypatch.setitem(ends.ENDS, "return", ends.End("print('left over', file=sys.stderr)"))
    failures, _ = run(Case("return", "async", "asyncio", pending=False, together=True, launched=False), 0)
    assert len(failures) == 2
    assert all("left over" in failure for failure in failures)
