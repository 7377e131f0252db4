"""Which announcements belong together: the n-th use of a key on each rank, and nothing kept of what is over."""

import random
from collections import defaultdict

import pytest

from asynccoll.engine import matching
from asynccoll.engine.matching import OVER, Answer, Matching
from asynccoll.errors import ProtocolError

CANCEL = {"reason": "cancel"}


def told(origin, **more):
    return {"reason": "cancel", "origin": origin} | more


class TestAnnounce:
    def test_the_last_rank_to_come_grants_it_to_all(self):
        keys = Matching(3)
        assert keys.announce(2, 5, "a") == []
        assert keys.announce(0, 7, "a") == []
        assert keys.announce(1, 6, "a") == [Answer(0, 7, None), Answer(1, 6, None), Answer(2, 5, None)]
        assert keys.outstanding == 0

    def test_alone_it_is_granted_at_once(self):
        assert Matching(1).announce(0, 0, "a") == [Answer(0, 0, None)]

    def test_the_nth_use_of_each_rank_belongs_together(self):
        keys = Matching(2)
        for number in range(3):
            assert keys.announce(0, number, "a") == []
        for number in range(3):
            assert keys.announce(1, 10 + number, "a") == [
                Answer(0, number, None),
                Answer(1, 10 + number, None),
            ]
        assert keys.outstanding == 0

    def test_keys_do_not_meet(self):
        keys = Matching(2)
        assert keys.announce(0, 0, "a") == []
        assert keys.announce(1, 0, "b") == []
        assert keys.outstanding == 2

    def test_a_number_is_used_once(self):
        keys = Matching(2)
        keys.announce(1, 0, "a")
        with pytest.raises(ProtocolError, match="rank 1 announced two"):
            keys.announce(1, 0, "b")

    def test_a_rank_that_announces_for_ever_is_stopped(self, monkeypatch):
        monkeypatch.setattr(matching, "MAX_ANNOUNCED", 10)
        keys = Matching(2)
        for number in range(10):
            keys.announce(1, number, f"key {number}")
        with pytest.raises(ProtocolError, match="rank 1 announced more than 10"):
            keys.announce(1, 10, "one more")
        for number in range(10):
            keys.announce(0, number, f"key {number}")
        assert keys.announce(1, 10, "one more") == []


class TestWithdraw:
    def test_those_who_wait_and_those_who_come_are_told_and_the_origin_when_it_is_over(self):
        keys = Matching(3)
        keys.announce(0, 4, "a")
        keys.announce(1, 5, "a")
        assert keys.withdraw(0, 4, CANCEL) == [Answer(1, 5, told(0))]
        assert keys.outstanding == 1
        assert keys.announce(2, 6, "a") == [Answer(2, 6, told(0)), Answer(0, 4, OVER)]
        assert keys.outstanding == 0

    def test_a_timeout_tells_the_rank_itself_who_had_not_come(self):
        keys = Matching(3)
        keys.announce(1, 5, "a")
        body = {"reason": "timeout", "origin": 1, "limit": 2.0, "missing": [0, 2]}
        assert keys.withdraw(1, 5, {"reason": "timeout", "limit": 2.0}) == [Answer(1, 5, body)]
        assert keys.announce(0, 1, "a") == [Answer(0, 1, body)]

    def test_the_second_to_withdraw_has_been_told_before(self):
        keys = Matching(3)
        keys.announce(0, 4, "a")
        keys.announce(1, 5, "a")
        keys.withdraw(0, 4, CANCEL)
        assert keys.withdraw(1, 5, CANCEL) == []
        assert keys.withdraw(0, 4, CANCEL) == []
        assert keys.announce(2, 6, "a") == [Answer(2, 6, told(0)), Answer(0, 4, OVER)]

    def test_nothing_is_done_to_what_has_been_granted_or_was_never_announced(self):
        keys = Matching(2)
        keys.announce(0, 0, "a")
        keys.announce(1, 0, "a")
        assert keys.withdraw(0, 0, CANCEL) == keys.withdraw(1, 99, CANCEL) == []

    def test_the_next_use_is_not_touched(self):
        keys = Matching(2)
        keys.announce(0, 0, "a")
        keys.announce(0, 1, "a")
        keys.withdraw(0, 0, CANCEL)
        assert keys.announce(1, 0, "a") == [Answer(1, 0, told(0)), Answer(0, 0, OVER)]
        assert keys.announce(1, 1, "a") == [Answer(0, 1, None), Answer(1, 1, None)]
        assert keys.outstanding == 0

    def test_what_it_ended_counts_against_the_rank_that_withdrew_and_no_other(self, monkeypatch):
        monkeypatch.setattr(matching, "MAX_ANNOUNCED", 2)
        keys = Matching(3)
        for number in range(2):
            keys.announce(0, number, "a")
            keys.announce(1, number, "a")
            keys.withdraw(1, number, CANCEL)
        keys.announce(0, 2, "b")
        with pytest.raises(ProtocolError):
            keys.announce(1, 2, "b")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_each_announcement_has_one_last_answer(size, seed):
    rng = random.Random(seed)
    keys = Matching(size)
    calls = [[rng.choice("abc") for _ in range(30)] for _ in range(size)]
    for names in calls:  # the same uses of each key, in another order
        names[:] = calls[0]
        rng.shuffle(names)
    use_of, answers = {}, defaultdict(list)
    withdrawn = {}
    while any(calls):
        rank = rng.choice([rank for rank in range(size) if calls[rank]])
        number = 30 - len(calls[rank])
        key = calls[rank].pop()
        use_of[rank, number] = key, sum(k == key for (r, _), (k, _) in use_of.items() if r == rank)
        found = keys.announce(rank, number, key)
        if rng.random() < 0.2 and not found:
            withdrawn.setdefault(use_of[rank, number], rank)
            found = found + keys.withdraw(rank, number, CANCEL)
        for answer in found:
            answers[answer.rank, answer.number].append(answer.body)
    assert keys.outstanding == 0
    assert not any(keys._live)
    for call, use in use_of.items():
        (body,) = answers[call]
        if use not in withdrawn:
            assert body is None
        elif call[0] == withdrawn[use]:
            assert body is OVER
        else:
            assert body == told(withdrawn[use])
