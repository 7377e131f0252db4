"""Worlds of random schedules: right results, typed errors, no hang, nothing left. See `schedules`; more by its command."""

import logging

import pytest
import schedules
from schedules import FIELDS, TROUBLES, draw, run_seed

from asynccoll.engine.inbound import Inbound
from asynccoll.engine.outbox import Outbox
from asynccoll.errors import AsynccollError
from asynccoll.sim.driver import SimDriver
from asynccoll.sim.loop import Stuck

SEEDS = 150


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_ten_worlds(first, caplog):
    caplog.set_level(logging.ERROR, "asynccoll")
    for seed in range(first, first + 10):
        try:
            run_seed(seed)
        except Exception as error:
            error.add_note(f"replay: python -m tests.sim.schedules --seed {seed}")
            raise


def test_the_seeds_of_the_default_run_see_everything():
    plans = [draw(seed) for seed in range(SEEDS)]
    assert {plan.size for plan in plans} == set(range(2, 9))
    assert {plan.trouble.kind for plan in plans} == set(TROUBLES)
    assert {step.kind for plan in plans for step in plan.steps} == set(FIELDS)
    assert {1, 1 << 16} <= {plan.conditions.piece for plan in plans}
    assert {1, 1 << 18} <= {plan.conditions.buffer for plan in plans}
    keyed = {plan.trouble.kind for plan in plans if plan.keys[plan.trouble.step] is not None}
    assert keyed == set(TROUBLES)
    assert any(plan.orders[0] != plan.orders[1] for plan in plans)
    assert any(plan.keys.count("a") > 1 for plan in plans)


def test_a_thousand_seeds_see_every_field_that_may_differ():
    details = {draw(seed).trouble.detail for seed in range(1000)}
    assert details - {""} == {field for fields in FIELDS.values() for field in fields}


def test_a_seed_draws_the_same_plan_again():
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


class TestTheHarnessNotices:
    """A harness that cannot fail proves nothing."""

    def worlds(self, *kinds):
        for seed in range(300):
            if draw(seed).trouble.kind in kinds:
                run_seed(seed)

    def test_a_byte_that_is_wrong(self, monkeypatch):
        def flipped(self, peer, piece, take=SimDriver.take):
            changed = bytearray(piece)
            if len(changed) > 100:
                changed[-1] ^= 1
            take(self, peer, memoryview(changed))

        monkeypatch.setattr(SimDriver, "take", flipped)
        with pytest.raises((schedules.Wrong, schedules.Stray, Stuck, AsynccollError)):
            self.worlds("none")

    def test_a_piece_that_is_lost(self, monkeypatch):
        seen = 0

        def lossy(self, peer, piece, take=SimDriver.take):
            nonlocal seen
            seen += 1
            if seen != 5:
                take(self, peer, piece)

        monkeypatch.setattr(SimDriver, "take", lossy)
        with pytest.raises((schedules.Wrong, schedules.Stray, Stuck, AsynccollError)):
            self.worlds("none")

    @pytest.mark.parametrize("kind", ["cancel", "mismatch", "refusal"])
    def test_an_error_that_nobody_caused(self, monkeypatch, kind):
        judge = schedules.World._judge

        def innocent(self):
            self.plan.trouble = self.plan.trouble._replace(kind="none")
            judge(self)

        monkeypatch.setattr(schedules.World, "_judge", innocent)
        with pytest.raises(schedules.Wrong, match="an error without trouble"):
            self.worlds(kind)

    def test_credit_that_is_not_given_back(self, monkeypatch):
        monkeypatch.setattr(Outbox, "owe", lambda self, nbytes: False)
        with pytest.raises(schedules.Stray, match="credit"):
            self.worlds("none")

    def test_memory_that_is_written_to_after_it_was_given_back(self, monkeypatch):
        monkeypatch.setattr(Inbound, "redirect", lambda self, op: None)
        with pytest.raises(schedules.Wrong, match="after it had been given back"):
            self.worlds("cancel")
