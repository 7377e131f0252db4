"""Keyed operations: matched in any order, ended before their grant by whoever ends them, nothing left behind."""

import gc
import random
import weakref

import numpy as np
import pytest
from wires import CALL, OTHER, Wires, alone, frame, kinds, operation, recv, send, start_record

from asynccoll.engine import matching, wire
from asynccoll.engine.group import MAX_PENDING
from asynccoll.errors import (
    CollectiveCancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    PeerLost,
    ProtocolError,
    RemoteError,
)

SIZES = [2, 3, 4, 5]


def ring(wires, rank, key, value=0, **options):
    """Each rank passes a byte on: the result is the one of the rank before."""
    into = bytearray(1)
    transfers = ()
    if wires.size > 1:
        transfers = send((rank + 1) % wires.size, bytes([value])), recv((rank - 1) % wires.size, into)
    return wires.start(rank, *transfers, result=into, key=key, **options)


def waiting(wires, rank, key="a", **options):
    """A keyed operation that completes as soon as all have called it."""
    return wires.start(rank, key=key, **options)


def assert_in_step(wires, *keys):
    """The next operations of all ranks work, with each of ``keys`` and without one."""
    for rank in wires.engines:
        wires.ended[rank].clear()
        ops = [ring(wires, rank, key, rank) for key in (*keys, None)]
        assert all(op.error is None for op in ops)
    wires.settle()
    for rank in wires.engines:
        assert wires.results(rank) == [bytes([(rank - 1) % wires.size])] * (len(keys) + 1)
    wires.assert_idle()


def errors(wires):
    return [wires.results(rank)[0] for rank in wires.engines]


class TestMatching:
    @pytest.mark.parametrize("size", [1, *SIZES])
    def test_operations_that_are_called_in_another_order_on_each_rank_meet_by_their_keys(self, size):
        wires = Wires(size)
        ops = {}
        for rank in range(size):
            for value in random.Random(rank).sample(range(40), 40):
                ops[rank, value] = ring(wires, rank, f"key {value}", value)
        wires.settle()
        for (_, value), op in ops.items():
            assert op.result == bytes([value if size > 1 else 0])
        assert {op.seq for op in ops.values()} == {wire.KEYED + number for number in range(40)}
        wires.assert_idle()

    @pytest.mark.parametrize("size", SIZES)
    def test_the_uses_of_one_key_are_in_order(self, size):
        wires = Wires(size)
        ops = {(rank, n): ring(wires, rank, "a", n) for rank in range(size) for n in range(20)}
        wires.settle()
        assert [ops[rank, n].result for rank in range(size) for n in range(20)] == [
            bytes([n]) for _ in range(size) for n in range(20)
        ]
        wires.assert_idle()

    def test_they_take_no_number_of_the_others(self):
        wires = Wires(2)
        first = [ring(wires, 0, key, 1) for key in ("a", None, "b", None)]
        second = [ring(wires, 1, key, 1) for key in (None, "b", None, "a")]
        assert [op.seq for op in first if op.key is None] == [0, 1]
        wires.settle()
        assert all(op.result == b"\1" for op in first + second)
        wires.assert_idle()

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("seed", range(15))
    def test_whatever_the_interleaving(self, size, seed):
        rng = random.Random(seed)
        wires = Wires(size)
        calls = [[rng.choice(["a", "b", "c", None]) for _ in range(25)]] * size
        calls = [rng.sample(names, 25) for names in calls]
        ops, uses = {}, {}
        while any(calls):
            rank = rng.choice([rank for rank in range(size) if calls[rank]])
            key = calls[rank].pop()
            n = uses[rank, key] = uses.get((rank, key), -1) + 1
            ops[rank, key, n] = ring(wires, rank, key, n)
            if rng.random() < 0.3:
                wires.shuffle(rng, rng.choice([1, 30, 1000]))
        wires.shuffle(rng, 200)
        assert all(op.result == bytes([n]) for (_, _, n), op in ops.items())
        wires.assert_idle()

    @pytest.mark.parametrize("nbytes", [100, 50_000, 300_000])
    def test_what_comes_before_the_own_grant_is_kept(self, nbytes):
        wires = Wires(3)
        data = random.Random(1).randbytes(nbytes)
        into = bytearray(nbytes)
        wires.start(1, send(2, data), key="a")
        wires.start(2, recv(1, into), result=into, key="a")
        wires.start(0, key="a")
        for source in (1, 2):
            wires.flush(source)
            wires.read(source, 0)
        wires.flush(0)
        wires.read(0, 1)  # rank 1 has its grant, and rank 2 has not
        wires.flush(1)
        wires.read(1, 2)
        group = wires.engines[2].group()
        assert list(group.early) == [wire.KEYED]
        assert sum(group.early_bytes.values()) <= 65_536
        wires.settle()
        assert wires.results(2) == [data]
        wires.assert_idle()

    def test_groups_have_their_own(self):
        wires = Wires(3)
        for rank in range(3):
            wires.engines[rank].add_group(7, (2, 1, 0), "back")
        ops = []
        for rank in range(3):
            for comm in random.Random(rank).sample([0, 7], 2):
                ops.append(wires.submit(rank, operation(result=comm, key="a"), comm))
        wires.settle()
        assert all(op.result == op.comm for op in ops)
        assert {op.seq for op in ops} == {wire.KEYED}
        wires.assert_idle()

    def test_a_key_of_a_group_that_rank_0_has_not_made_waits_for_it(self):
        wires = Wires(2)
        wires.engines[1].add_group(7, (0, 1), "pair")
        op = wires.submit(1, operation(key="a"), 7)
        wires.settle()
        wires.engines[0].add_group(7, (0, 1), "pair")
        wires.collect(0)
        wires.submit(0, operation(key="a"), 7)
        wires.settle()
        assert op in wires.ended[1]
        assert op.error is None

    def test_a_disagreement_under_a_key_is_a_mismatch(self):
        wires = Wires(3)
        for rank in range(3):
            waiting(wires, rank, call=OTHER if rank == 1 else CALL)
        wires.settle()
        for error in errors(wires):
            assert isinstance(error, CollectiveMismatch)
            assert (error.field, error.values) == ("verb", {0: "test", 1: "other", 2: "test"})
            assert (error.key, error.seq) == ("a", -1)
        assert_in_step(wires, "a")

    def test_any_text_is_a_key(self):
        wires = Wires(2)
        keys = ["", "ä" * 256, "\ud800", "a\0b", "\U0001f600" * 256]
        for rank in range(2):
            for key in keys[:: 1 if rank else -1]:
                ring(wires, rank, key, keys.index(key))
        wires.settle()
        assert sorted(wires.results(0)) == [bytes([n]) for n in range(5)]
        wires.assert_idle()


class TestCancel:
    @pytest.mark.parametrize("size", SIZES)
    def test_before_the_grant_it_ends_for_those_who_wait_and_those_who_come(self, size):
        for origin in range(size):
            for late in set(range(size)) - {origin}:
                wires = Wires(size)
                ops = {rank: waiting(wires, rank) for rank in range(size) if rank != late}
                wires.settle()
                wires.cancel(origin, ops[origin])
                assert wires.ended[origin] == [ops[origin]]
                wires.settle()
                waiting(wires, late)
                waiting(wires, late)  # the next use is not touched
                wires.settle()
                for rank in range(size):
                    error = wires.results(rank)[0]
                    assert isinstance(error, CollectiveCancelled)
                    assert (error.origin, error.key, error.rank) == (origin, "a", rank)
                    assert "test key 'a' on 'world'" in str(error)
                for rank in set(range(size)) - {late}:
                    waiting(wires, rank)
                wires.settle()
                assert all(wires.results(rank)[1:] == [None] for rank in range(size))
                assert_in_step(wires, "a", "b")

    def test_its_memory_is_free_at_once(self):
        for rank in range(2):
            wires = Wires(2)
            memory = np.zeros(1000, np.uint8)
            gone = weakref.ref(memory)
            op = wires.start(rank, send(1 - rank, memory), key="a")
            wires.settle()
            wires.cancel(rank, op)
            del memory
            gc.collect()
            assert gone() is None

    @pytest.mark.parametrize("size", SIZES)
    def test_it_may_cross_with_the_grant(self, size):
        for origin in range(1, size):
            wires = Wires(size)
            ops = [waiting(wires, rank) for rank in range(size)]
            for rank in range(1, size):
                wires.flush(rank)
                wires.read(rank, 0)
            assert wires.engines[0].group().next_keyed == wire.KEYED + 1
            wires.cancel(origin, ops[origin])
            wires.settle()
            assert [error.origin for error in errors(wires)] == [origin] * size
            assert_in_step(wires, "a")

    def test_two_may_cancel_at_once(self):
        wires = Wires(3)
        ops = [waiting(wires, rank) for rank in range(2)]
        wires.settle()
        for rank, op in enumerate(ops):
            wires.cancel(rank, op)
        wires.settle()
        waiting(wires, 2)
        wires.settle()
        assert [error.origin for error in errors(wires)] == [0, 1, 0]
        assert_in_step(wires, "a")

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("seed", range(20))
    def test_at_any_moment_everyone_gets_a_result_or_hears_who_cancelled(self, size, seed):
        rng = random.Random(seed)
        wires = Wires(size)
        ops = {}
        origin = rng.randrange(size)
        for rank in rng.sample(range(size), size):
            for key in rng.sample("abc", 3):
                ops[rank, key] = ring(wires, rank, key, rank)
                if rng.random() < 0.5:
                    for _ in range(rng.randrange(6)):
                        moves = [pair for pair, data in wires.flight.items() if data]
                        wires.flush(rank)
                        if moves:
                            wires.read(*rng.choice(moves), rng.randint(1, 50))
        wires.cancel(origin, ops[origin, "b"])
        wires.shuffle(rng, 100)
        for (rank, key), op in ops.items():
            if op.error is None:
                assert op.result == bytes([(rank - 1) % size])
            else:
                assert key == "b"
                assert isinstance(op.error, CollectiveCancelled)
                assert op.error.origin == origin
        assert_in_step(wires, "a", "b", "c")


class TestRefusal:
    @pytest.mark.parametrize("size", SIZES)
    def test_it_takes_its_use_of_the_key(self, size):
        for origin in range(size):
            for last in (True, False):
                wires = Wires(size)
                others = [rank for rank in range(size) if rank != origin]
                order = [*others, origin] if last else [origin, *others]
                for rank in order:
                    if rank == origin:
                        wires.refuse(rank, ValueError("no"), key="a")
                    else:
                        waiting(wires, rank)
                    wires.settle()
                for rank in others:
                    (error,) = wires.results(rank)
                    assert isinstance(error, RemoteError)
                    assert (error.origin, error.type_name, error.key) == (origin, "ValueError", "a")
                assert isinstance(wires.results(origin)[0], ValueError)
                assert_in_step(wires, "a")

    def test_alone(self):
        wires = Wires(1)
        wires.refuse(0, ValueError("no"), key="a")
        assert isinstance(wires.results(0)[0], ValueError)
        assert_in_step(wires, "a")

    @pytest.mark.parametrize("origin", [0, 1, 2])
    def test_who_waits_hears_of_it_though_another_has_not_called(self, origin):
        """It would wait for ever otherwise: that one may be about to wait for it."""
        wires = Wires(3)
        waits = (origin + 1) % 3
        waiting(wires, waits)
        wires.settle()
        wires.refuse(origin, ValueError("no"), key="a")
        wires.settle()
        (error,) = wires.results(waits)
        assert (error.origin, error.type_name) == (origin, "ValueError")
        wires.refuse((origin + 2) % 3, ValueError("me too"), key="a")
        wires.settle()
        assert_in_step(wires, "a")

    def test_it_may_be_of_a_use_that_has_ended(self):
        wires = Wires(3)
        wires.cancel(1, waiting(wires, 1))
        wires.settle()
        wires.refuse(0, ValueError("no"), key="a")
        wires.refuse(2, ValueError("no"), key="a")
        wires.settle()
        assert_in_step(wires, "a")


class TestTimeout:
    @pytest.mark.parametrize("size", SIZES)
    def test_before_the_grant_all_who_wait_hear_who_has_not_come(self, size):
        for origin in range(size):
            for late in set(range(size)) - {origin}:
                wires = Wires(size)
                for rank in set(range(size)) - {late}:
                    waiting(wires, rank, timeout=2.0 if rank == origin else 50.0)
                wires.settle()
                wires.tick(1.9)
                assert not any(wires.ended.values())
                wires.tick(2.0)
                wires.settle()
                wires.tick(3.0)
                for rank in set(range(size)) - {late}:
                    (error,) = wires.results(rank)
                    assert isinstance(error, CollectiveTimeout)
                    if late or rank == 0:
                        assert error.missing == {late}
                        assert error.elapsed == 2.0
                    elif rank == origin:  # rank 0 answers, although it has not called
                        assert error.missing == {late}
                    assert (error.limit, error.key) == (2.0, "a")
                op = waiting(wires, late)
                wires.settle()
                assert isinstance(op.error, CollectiveTimeout)
                assert op.error.missing == {late}
                assert "before the others gave up" in str(op.error)
                assert_in_step(wires, "a")

    def test_where_rank_0_does_not_answer_it_is_missing_and_the_late_grant_ends_it_for_all(self):
        wires = Wires(3)
        ops = [waiting(wires, rank, timeout=2.0 if rank == 2 else None) for rank in range(3)]
        wires.flush(1)
        wires.tick(2.0)
        wires.tick(2.5)
        assert isinstance(ops[2].error, CollectiveTimeout)
        assert ops[2].error.missing == {0}
        wires.settle()
        wires.tick(4.0)
        assert all(isinstance(op.error, CollectiveTimeout) for op in ops)
        assert ops[1].error.missing == frozenset()
        assert_in_step(wires, "a")

    def test_it_may_cross_with_the_grant(self):
        wires = Wires(2)
        ops = [waiting(wires, 0), waiting(wires, 1, timeout=2.0)]
        wires.flush(1)
        wires.read(1, 0)
        wires.tick(2.0)
        wires.settle()
        wires.tick(3.0)
        for op in ops:
            assert isinstance(op.error, CollectiveTimeout)
            assert op.error.missing == frozenset()
        assert_in_step(wires, "a")

    def test_the_time_counts_from_the_call_and_the_tightest_holds_for_all(self):
        wires = Wires(2)
        ops = [wires.start(0, recv(1, bytearray(1)), key="a", timeout=2.0)]
        wires.settle()
        wires.tick(1.5)
        ops.append(wires.start(1, recv(0, bytearray(1)), key="a", timeout=100.0))
        wires.settle()
        assert [op.deadline for op in ops] == pytest.approx([2.0, 2.0], abs=0.002)
        wires.tick(1.9)
        assert not any(wires.ended.values())
        wires.tick(2.01)
        wires.settle()
        for op in ops:
            assert isinstance(op.error, CollectiveTimeout)
            assert op.error.missing == frozenset()
        assert_in_step(wires, "a")


class TestDepartures:
    @pytest.mark.parametrize("size", SIZES)
    def test_a_rank_that_closes_names_the_key_here_and_there(self, size):
        for origin in range(size):
            wires = Wires(size)
            for rank in range(size - 1):
                waiting(wires, rank, "step 7")
            wires.settle()
            wires.close(origin, "gone fishing")
            wires.settle()
            waiting(wires, size - 1, "step 7") if origin != size - 1 else None
            for rank in range(size):
                for error in wires.results(rank):
                    assert isinstance(error, CommunicatorClosed)
                    assert (error.origin, error.key, error.cause) == (origin, "step 7", "gone fishing")
                    assert "key 'step 7'" in str(error)
            assert not any(engine.pending() for engine in wires.engines.values())
            assert not any(engine.group().withdrawn for engine in wires.engines.values())

    @pytest.mark.parametrize("size", SIZES)
    def test_a_rank_that_closes_before_its_grant_has_arrived(self, size):
        for origin in range(1, size):
            wires = Wires(size)
            for rank in range(size):
                waiting(wires, rank)
            for rank in range(1, size):
                wires.flush(rank)
                wires.read(rank, 0)
            wires.close(origin)
            wires.settle()
            for rank in range(size):
                (error,) = wires.results(rank)
                assert isinstance(error, CommunicatorClosed)
                assert error.origin == origin

    def test_a_rank_that_left_after_its_part_is_not_needed_any_more(self):
        wires = Wires(3)
        into = bytearray(1)
        op = wires.start(0, recv(1, into), result=into, key="a")
        other = wires.start(1, recv(0, bytearray(1)), send(0, b"x"), key="a")
        last = waiting(wires, 2)
        wires.settle()
        assert wires.ended[2] == [last]
        wires.close(2)
        wires.settle()
        assert op.error is None
        assert wires.engines[0].group().left[2].keyed == op.seq + 1
        assert wires.engines[0].pending() == [op]
        wires.cancel(1, other)
        wires.settle()
        assert op.error.origin == 1

    def test_what_was_granted_before_a_rank_left_completes(self):
        wires = Wires(3)
        for rank in range(3):
            waiting(wires, rank)
        wires.settle()
        wires.start(0, key="late")
        wires.close(2)
        wires.settle()
        assert wires.results(1) == [None]
        assert wires.results(0)[0] is None
        assert wires.results(0)[1].origin == 2

    @pytest.mark.parametrize("size", SIZES)
    def test_a_rank_that_dies_ends_them_on_all_also_where_the_link_to_it_has_not_broken(self, size):
        for dead in range(size):
            wires = Wires(size)
            survivors = [rank for rank in range(size) if rank != dead]
            for rank in survivors:
                for key in "ab":
                    waiting(wires, rank, key)
            wires.settle()
            wires.lose(survivors[-1], dead)
            wires.settle()
            wires.agree()
            for rank in survivors:
                assert len(wires.results(rank)) == 2
                for error in wires.results(rank):
                    assert isinstance(error, PeerLost)
                    assert error.peers == {dead}
                op = waiting(wires, rank, "later")
                assert isinstance(op.error, PeerLost)
                assert op.error.peers == {dead}
            assert wire.UNKEY not in kinds(wires.sent(survivors[-1]))

    def test_so_it_does_those_that_come_before_it_is_agreed(self):
        wires = Wires(3)
        wires.lose(0, 2)
        op = waiting(wires, 1)
        wires.settle()
        wires.agree()
        assert isinstance(op.error, PeerLost)
        assert op.error.peers == {2}

    def test_a_group_of_others_goes_on(self):
        wires = Wires(3)
        for rank in range(2):
            wires.engines[rank].add_group(7, (1, 0), "pair")
        for rank in range(2):
            wires.lose(rank, 2)
            wires.submit(rank, operation(key="a", result="done"), 7)
        wires.settle()
        assert wires.results(0) == wires.results(1) == ["done"]

    def test_leaving_a_group_ends_its_keys_and_no_others(self):
        wires = Wires(2)
        for rank in range(2):
            wires.engines[rank].add_group(7, (0, 1), "pair")
        mine = wires.submit(0, operation(key="a"), 7)
        theirs = wires.submit(1, operation(key="b"), 7)
        world = waiting(wires, 0, "w")
        wires.settle()
        wires.engines[0].leave_group(7, "done with it", 0.0)
        wires.collect(0)
        wires.settle()
        assert (mine.error.key, theirs.error.key) == ("a", "b")
        assert mine.error.origin == theirs.error.origin == 0
        waiting(wires, 1, "w")
        wires.settle()
        assert world.error is None
        assert wires.ended[0][-1] is world


class TestBounds:
    def test_nothing_is_kept_of_ten_thousand_keys(self):
        wires = Wires(2)
        for n in range(10_000):
            for rank in range(2):
                waiting(wires, rank, f"key {n}")
            if n % 100 == 99:
                wires.settle()
                wires.log.clear()
        wires.settle()
        wires.assert_idle()

    def test_what_waits_and_what_was_withdrawn_count_as_under_way(self):
        wires = Wires(2)
        for rank in range(2):
            group = wires.engines[rank].group()
            for n in range(MAX_PENDING):
                op = waiting(wires, rank, f"{rank} {n}")
                if n % 2:
                    wires.cancel(rank, op)
            assert group.crowded
            wires.settle()
            assert group.crowded
            waiting(wires, 1 - rank, f"{rank} 1")
            wires.settle()
            assert not group.crowded

    def test_a_peer_that_announces_for_ever_is_given_up(self, monkeypatch):
        monkeypatch.setattr(matching, "MAX_ANNOUNCED", 100)
        wires = alone(3)
        for n in range(101):
            assert not wires.broken[0]
            wires.feed(0, 1, wire.key_frame(0, n, f"key {n}"))
        assert isinstance(wires.broken[0][1], ProtocolError)
        assert not wires.engines[0].keys._matching

    @pytest.mark.parametrize(
        "data",
        [
            frame(wire.KEY, 0, b"\xff"),
            frame(wire.KEY, 0, b"x" * 257),
            wire.key_frame(0, 5, "a") + wire.key_frame(0, 5, "a"),
            wire.grant_frame(0, wire.KEYED, 0),
            wire.unkey_frame(0, 0, {"reason": "over"}),
            wire.unkey_frame(0, 0, {"reason": "mismatch"}),
            wire.unkey_frame(0, 0, {"reason": "lost", "ranks": [1]}),
            wire.unkey_frame(0, 0, {"reason": ["cancel"]}),
            wire.unkey_frame(0, 0, {"reason": "error", "error": {"type": "x"}}),
            wire.unkey_frame(0, 0, {"reason": "closed", "cause": "x" * 65_490}),
            frame(wire.UNKEY, 0, b"\x93"),
        ],
    )
    def test_what_rank_0_does_not_take(self, data):
        wires = alone()
        wires.feed(0, 1, data)
        assert isinstance(wires.broken[0][1], ProtocolError)

    @pytest.mark.parametrize(
        "data",
        [
            wire.key_frame(0, 0, "a"),
            wire.grant_frame(0, wire.KEYED, 17),
            wire.grant_frame(0, wire.KEYED + 1, 0),
            wire.grant_frame(0, 3, 0),
            frame(wire.GRANT, wire.KEYED, b"1234"),
            wire.unkey_frame(0, 0, {"reason": "cancel"}),
            wire.unkey_frame(0, 0, {"reason": "cancel", "origin": 2}),
            wire.unkey_frame(0, 0, {"reason": "timeout", "origin": 0, "missing": [5]}),
        ],
    )
    def test_what_another_rank_does_not_take(self, data):
        wires = Wires(2, [1])
        waiting(wires, 1)
        wires.feed(1, 0, data)
        assert isinstance(wires.broken[1][0], ProtocolError)
        assert isinstance(wires.results(1)[0], PeerLost)

    def test_no_frame_names_an_operation_before_its_grant(self):
        wires = alone()
        op = waiting(wires, 0)
        assert op.seq >= 1 << 64
        assert kinds(wires.take(0, 1)) == []
        wires.feed(0, 1, start_record(wire.KEYED))
        assert list(wires.engines[0].group().early) == [wire.KEYED]
        wires.feed(0, 1, wire.key_frame(0, 0, "a"))
        assert wires.results(0) == [None]
