"""Random programs under random faults: what seeds draw, what is judged, and that the harness notices what is wrong."""

import asyncio
import logging
from collections import Counter

import pytest
from processes import outputs

from asynccoll.engine.inbound import Inbound
from asynccoll.engine.losses import Losses
from asynccoll.engine.outbox import Outbox
from asynccoll.errors import AsynccollError
from asynccoll.sim.driver import SimDriver
from asynccoll.sim.loop import Stuck
from asynccoll.testing.soak import plans
from asynccoll.testing.soak.errors import Leak, Stray, Wrong
from asynccoll.testing.soak.judge import Judge
from asynccoll.testing.soak.plans import LOCAL, TROUBLES, draw
from asynccoll.testing.soak.rare import NAMES
from asynccoll.testing.soak.run import Outcome, Tally, run_plan
from asynccoll.testing.soak.steps import FIELDS, MESSAGES
from asynccoll.testing.soak.world import World

SEEDS = 500
RARER = {
    "a frame for a communicator that was left",
    "a new group has a member that is gone",
    "a payload shows that the calls differ",
    "a rank leaves because of the dead",
    "a reduce function raises",
    "a stream ends inside a header",
    "a timeout and a mismatch in one operation",
    "a timeout with nobody missing",
    "an operation completes after a goodbye",
    "an operation waits for one that left",
    "cancel during an inquest",
    "cancel inside a payload that is being read",
    "cancel while a loss is being decided",
    "cancel with a segment half written",
    "rank 0 does not say who is missing",
    "shrink again because another rank is lost",
    "READY after an abort",
    "WANT after an abort",
}
"""Branches that not every 500 seeds reach."""


@pytest.fixture(autouse=True)
def quiet(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL, "asynccoll")
    monkeypatch.setattr(
        "asynccoll.sim.loop._THREAD_SECONDS", 0.01
    )  # pytest's own thread has nothing to hand in


@pytest.fixture(scope="module")
def seen():
    """Names of the rare branches that the seeds of this module have reached, with counts."""
    return Counter()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_seeds(first, seen):
    for seed in range(first, first + 25):
        try:
            seen.update(run_plan(draw(seed)).rare)
            seen["seeds"] += 1
        except Exception as error:
            error.add_note(f"replay: asynccoll soak --seed {seed}")
            raise


def test_the_seeds_reach_the_rare_branches_but_for_the_rarest(seen):
    if seen["seeds"] < SEEDS:
        pytest.skip("counts what the seeds above have seen, and not all of them ran in this process")
    assert not [name for name in NAMES if not seen[name] and name not in RARER]


def test_there_are_more_than_forty_names_and_none_twice():
    assert len(NAMES) == len(set(NAMES)) > 40
    assert set(NAMES) >= RARER


@pytest.mark.parametrize("kind", sorted(TROUBLES))
def test_each_kind_of_trouble_alone(kind):
    faults = Counter()
    for seed in range(12):
        faults += run_plan(draw(seed, kinds=[kind])).faults
    assert faults[kind] >= 3


def test_a_large_world():
    outcome = run_plan(draw(1, (40, 40), ["crash"]))
    assert outcome.faults["crash"] >= 1


class TestPlans:
    def test_five_hundred_seeds_draw_everything(self):
        drawn = [draw(seed) for seed in range(SEEDS)]
        assert {plan.size for plan in drawn} >= set(range(2, 9))
        assert 9 <= max(plan.size for plan in drawn) <= 16
        assert {trouble.kind for plan in drawn for trouble in plan.troubles} == set(TROUBLES)
        assert {len(plan.troubles) for plan in drawn} == {0, 1, 2, 3, 4}
        assert {step.kind for plan in drawn for step in plan.program.steps} == {*FIELDS, MESSAGES}
        assert {1, 1 << 16} <= {plan.conditions.piece for plan in drawn}
        assert {1, 1 << 18} <= {plan.conditions.buffer for plan in drawn}
        keyed = {
            trouble.kind
            for plan in drawn
            for trouble in plan.troubles
            if trouble.step < len(plan.keys) and plan.keys[trouble.step] is not None
        }
        assert keyed == set(TROUBLES)
        assert any(plan.keys.count("a") > 1 for plan in drawn)
        assert any(step.group is not None for plan in drawn for step in plan.program.steps)
        assert any(plan.orders[0] != plan.orders[1] for plan in drawn)
        assert {plan.after for plan in drawn} == {"shrink", "restart", "close"}

    def test_two_thousand_seeds_see_every_field_that_may_differ(self):
        details = {
            trouble.detail for seed in range(2000) for trouble in draw(seed, kinds=["mismatch"]).troubles
        }
        assert details == {field for fields in FIELDS.values() for field in fields}

    def test_a_seed_draws_the_same_plan_again(self):
        assert str(draw(3)) == str(draw(3))
        assert str(draw(3)) != str(draw(4))

    def test_sizes_and_kinds_can_be_chosen(self):
        drawn = [draw(seed, (9, 12), ["cancel", "crash"]) for seed in range(50)]
        assert {plan.size for plan in drawn} == {9, 10, 11, 12}
        assert {trouble.kind for plan in drawn for trouble in plan.troubles} == {"cancel", "crash"}
        assert all(plan.troubles for plan in drawn)


def test_the_same_seed_is_the_same_trace_in_any_process():
    code = (
        "from asynccoll.testing.soak.run import Tally\ntally = Tally()\n"
        "for seed in range(40, 46):\n    tally.run(seed)\nprint(tally.summary()['trace_hash'])"
    )
    assert len(outputs(code, ("0", "7"))) == 1


class TestTally:
    def test_it_counts_each_kind_of_failure_and_goes_on(self, monkeypatch):
        ends = iter([Stuck("a"), Leak("b"), Wrong("c"), Stray("d"), AsynccollError("e"), KeyError("f"), None])

        def run(plan, *, collect):
            end = next(ends)
            if end is not None:
                raise end
            return Outcome("hash", 3, Counter(crash=1), Counter({NAMES[0]: 2}))

        monkeypatch.setattr("asynccoll.testing.soak.run.run_plan", run)
        tally = Tally()
        kinds = [getattr(tally.run(seed), "kind", None) for seed in range(7)]
        assert kinds == ["hangs", "leaks", "wrong", "stray", "wrong", "stray", None]
        summary = tally.summary()
        assert [summary[name] for name in ("seeds", "hangs", "wrong", "leaks", "stray")] == [7, 1, 2, 1, 2]
        assert summary["failed"] == list(range(6))
        assert (summary["faults"], summary["pieces"]) == ({"crash": 1}, 3)
        assert summary["rare"] == {name: 2 * (name == NAMES[0]) for name in NAMES}
        assert tally.missing == list(NAMES[1:])

    def test_a_seed_that_never_ends_is_a_hang(self, monkeypatch):
        def spin(plan, *, collect):
            while True:
                pass

        monkeypatch.setattr("asynccoll.testing.soak.run.run_plan", spin)
        monkeypatch.setattr("asynccoll.testing.soak.run.WALL_LIMIT", 0.05)
        assert Tally().run(0).kind == "hangs"


class TestTheHarnessNotices:
    """A harness that cannot fail proves nothing."""

    def worlds(self, *kinds, seeds=40):
        for seed in range(seeds):
            plan = draw(seed, kinds=kinds or ["slow"])
            if len(plan.troubles) == 1:
                run_plan(plan)

    def test_a_byte_that_is_wrong(self, monkeypatch):
        def flipped(self, peer, piece, take=SimDriver.take):
            changed = bytearray(piece)
            if len(changed) > 100:
                changed[-1] ^= 1
            take(self, peer, memoryview(changed))

        monkeypatch.setattr(SimDriver, "take", flipped)
        with pytest.raises((Wrong, Leak, Stray, Stuck, AsynccollError)):
            self.worlds()

    def test_a_piece_that_is_lost(self, monkeypatch):
        seen = 0

        def lossy(self, peer, piece, take=SimDriver.take):
            nonlocal seen
            seen += 1
            if seen != 5:
                take(self, peer, piece)

        monkeypatch.setattr(SimDriver, "take", lossy)
        with pytest.raises((Wrong, Leak, Stray, Stuck, AsynccollError)):
            self.worlds()

    @pytest.mark.parametrize("kind", sorted({*LOCAL, "crash", "leave", "stop"} - {"hurry", "late"}))
    def test_an_error_that_nobody_caused(self, monkeypatch, kind):
        program = Judge.program

        def innocent(self):
            self.plan.troubles.clear()
            self.world.struck.clear()
            self.world.left.clear()
            self.dead.clear()
            self.touched.clear()
            program(self)

        monkeypatch.setattr(Judge, "program", innocent)
        with pytest.raises((Wrong, Stray)):
            self.worlds(kind)

    def test_credit_that_is_not_given_back(self, monkeypatch):
        monkeypatch.setattr(Outbox, "owe", lambda self, nbytes: False)
        with pytest.raises(Leak, match="credit"):
            self.worlds()

    def test_memory_that_is_written_to_after_it_was_given_back(self, monkeypatch):
        monkeypatch.setattr(Inbound, "redirect", lambda self, op: None)
        with pytest.raises(Wrong, match="after it had been given back"):
            self.worlds("cancel", seeds=400)

    def test_a_loss_that_is_not_told(self, monkeypatch):
        monkeypatch.setattr(Losses, "_tell", lambda self, decided=None: None)
        with pytest.raises((Wrong, Stuck)):
            self.worlds("fin", "stall")

    def test_a_verdict_that_names_a_living_rank(self, monkeypatch):
        monkeypatch.setattr(
            "asynccoll.engine.losses.verdict",
            lambda accusations, out=(): frozenset({0, *(accused for _, accused in accusations)}) - set(out),
        )
        with pytest.raises((Wrong, Stuck)):
            self.worlds("crash")

    def test_silence_that_nobody_notices(self, monkeypatch):
        monkeypatch.setattr(SimDriver, "silent", lambda self, peer, seconds: None)
        with pytest.raises(Stuck):
            self.worlds("stop")

    def test_a_loss_that_is_told_late(self, monkeypatch):
        monkeypatch.setattr("asynccoll.engine.losses.PATIENCE", 5.0)
        with pytest.raises(Wrong, match="hears of"):
            self.worlds("fin", seeds=200)

    def test_a_task_that_is_left(self, monkeypatch):
        close = World.close

        async def leaky(self):
            await close(self)
            self.forgotten = asyncio.ensure_future(asyncio.Event().wait())

        monkeypatch.setattr(World, "close", leaky)
        with pytest.raises(Leak, match="after closing"):
            self.worlds()


def test_troubles_are_drawn_by_the_weights_of_one_table():
    assert set(LOCAL) < set(TROUBLES)
    assert all(weight > 0 for weight in TROUBLES.values())
    assert set(plans.STAGES) == {"settle", "shrink", "close"}
