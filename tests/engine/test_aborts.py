"""Bad ends: who hears what, when everyone raises, and that the mesh is in step afterwards."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from wires import KIB, OTHER, Wires, frame, operation, recv, send

from asynccoll.engine import wire
from asynccoll.engine.aborts import Disagrees, FoldFailed, refusal
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.transfers import FoldBytes
from asynccoll.errors import (
    CollectiveCancelled,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    PeerLost,
    RemoteError,
)

BULK = 1 << 20


def waiting(wires, rank, **options):
    """An operation in which ``rank`` waits for a byte that never comes."""
    return wires.start(rank, recv((rank + 1) % wires.size, bytearray(1)), **options)


def error_of(wires, rank):
    (error,) = wires.results(rank)
    return error


def assert_in_step(wires):
    """The next operation of all ranks works."""
    for rank in wires.engines:
        after = (rank + 1) % wires.size
        before = (rank - 1) % wires.size
        into = bytearray(1)
        wires.start(rank, send(after, bytes([rank])), recv(before, into), result=into)
    wires.settle()
    for rank in wires.engines:
        assert wires.results(rank)[-1] == bytes([(rank - 1) % wires.size])
    wires.assert_idle()


# -- cancel ----------------------------------------------------------------------------------------------------


class TestCancel:
    @pytest.mark.parametrize("size", [2, 3, 5, 8])
    def test_every_rank_hears_once_who_cancelled(self, size):
        wires = Wires(size)
        ops = [waiting(wires, rank) for rank in range(size)]
        wires.settle()
        wires.cancel(size - 1, ops[-1])
        wires.settle()
        for rank in range(size):
            error = error_of(wires, rank)
            assert isinstance(error, CollectiveCancelled)
            assert (error.origin, error.rank, error.seq, error.op) == (size - 1, rank, 0, "test")
        assert [f.kind for f in wires.sent(size - 1)].count(wire.ABORT) == size - 1
        assert not any(f.kind == wire.ABORT for rank in range(size - 1) for f in wires.sent(rank))
        assert_in_step(wires)

    def test_a_rank_that_calls_later_fails_at_the_call_and_takes_the_number(self):
        wires = Wires(3)
        wires.cancel(0, wires.start(0))
        wires.settle()
        for rank in (1, 2):
            op = wires.start(rank, send(0, b"never"))
            assert (op.seq, op.error.origin) == (0, 0)
            assert wires.ended[rank] == [op]
        wires.settle()
        assert_in_step(wires)

    def test_a_rank_that_has_ended_keeps_its_result(self):
        wires = Wires(2)
        wires.start(0, result="done")
        op = wires.start(1, recv(0, bytearray(1)))
        wires.settle()
        wires.cancel(1, op)
        wires.settle()
        assert wires.results(0) == ["done"]
        assert_in_step(wires)

    def test_after_the_end_it_does_nothing(self):
        wires = Wires(2)
        ops = [wires.start(rank, result="done") for rank in range(2)]
        wires.settle()
        wires.log.clear()
        wires.cancel(0, ops[0])
        wires.settle()
        assert wires.log == []
        assert wires.results(0) == ["done"]

    def test_both_may_cancel_at_once(self):
        wires = Wires(2)
        for rank, op in enumerate([waiting(wires, rank) for rank in range(2)]):
            wires.cancel(rank, op)
        wires.settle()
        assert [error_of(wires, rank).origin for rank in range(2)] == [0, 1]
        assert_in_step(wires)

    @pytest.mark.parametrize(
        "state", ["queued", "offered", "half sent", "parked", "between segments", "small"]
    )
    def test_whatever_of_it_was_sent_its_memory_is_free_at_once_and_does_not_travel_later(self, state):
        wires = Wires(2)
        memory = np.full(BULK if state != "small" else 1000, 0xAA, np.uint8)
        gone = weakref.ref(memory)
        into = bytearray(len(memory) + 1)  # one byte more than ever comes
        if state != "parked":
            wires.start(1, recv(0, into))
            wires.settle()
        op = wires.start(0, send(1, memory), recv(1, bytearray(1)))
        if state == "parked":
            wires.settle()
        elif state not in ("queued", "small"):
            wires.read(1, 0)  # the grant
            wires.write(0, 1)  # START
            if state == "offered":
                wires.engines[0].data_to_send(1)
            elif state == "half sent":
                wires.write(0, 1, 100_000)
            elif state == "between segments":
                wires.write(0, 1)
        memory[:] = 0xAA
        wires.cancel(0, op)
        memory[:] = 0xBB  # it is the caller's again
        del memory
        gc.collect()
        assert gone() is None
        wires.settle()
        assert 0xBB not in into
        if state == "parked":
            wires.start(1, recv(0, into))
            wires.settle()
        assert error_of(wires, 1).origin == 0
        assert_in_step(wires)

    def test_memory_that_is_being_received_into_is_free_at_once(self):
        wires = Wires(2)
        into = np.zeros(BULK, np.uint8)
        op = wires.start(1, recv(0, into))
        wires.start(0, send(1, b"\xaa" * BULK))
        wires.flush(1)
        wires.read(1, 0)
        wires.flush(0)
        wires.read(0, 1, 300_000)
        wires.cancel(1, op)
        into[:] = 0
        wires.settle()
        assert not into.any()
        assert_in_step(wires)

    def test_another_operation_on_the_same_link_is_not_disturbed(self):
        wires = Wires(2)
        memories = [bytearray(BULK) for _ in range(3)]
        for memory in memories:
            wires.start(1, recv(0, memory))
        wires.settle()
        ops = [wires.start(0, send(1, bytes([1 + n]) * BULK)) for n in range(3)]
        wires.read(1, 0)
        for _ in range(4):
            wires.write(0, 1, 200_000)
        wires.cancel(0, ops[1])
        wires.settle()
        assert memories[0] == b"\x01" * BULK
        assert memories[2] == b"\x03" * BULK
        assert [type(end) for end in wires.results(1)].count(CollectiveCancelled) == 1
        assert_in_step(wires)


# -- failures ----------------------------------------------------------------------------------------------------


class NeedsTwo(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def failing(error, *transfers):
    yield from transfers
    raise error


class TestFailure:
    def test_the_rank_that_failed_raises_its_own_error_and_the_others_a_remote_one(self):
        wires = Wires(3)
        error = ValueError("bad value")
        wires.start(0, recv(1, bytearray(1)))
        wires.start(1, program=failing(error))
        wires.start(2, recv(1, bytearray(1)))
        wires.settle()
        assert error_of(wires, 1) is error
        for rank in (0, 2):
            remote = error_of(wires, rank)
            assert isinstance(remote, RemoteError)
            assert (remote.origin, remote.type_name, remote.rank) == (1, "ValueError", rank)
            assert isinstance(remote.original, ValueError)
            assert "bad value" in str(remote)
            assert "failing" in remote.remote_traceback
        assert_in_step(wires)

    @pytest.mark.parametrize("where", ["posted", "backlog", "bulk"])
    def test_a_fold_that_raises_ends_it_everywhere(self, where):
        def fold(offset, piece):
            raise ZeroDivisionError("in the fold")

        wires = Wires(2)
        nbytes = 100_000 if where == "bulk" else 10
        sender, folding = (send(1, bytes(nbytes)), recv(1, bytearray(1))), FoldBytes(0, nbytes, fold)
        if where == "backlog":
            wires.start(0, *sender)
            wires.settle()
            wires.start(1, folding)
        else:
            wires.start(1, folding)
            wires.settle()
            wires.start(0, *sender)
        wires.settle()
        assert isinstance(error_of(wires, 1), ZeroDivisionError)
        assert error_of(wires, 0).type_name == "ZeroDivisionError"
        assert_in_step(wires)

    def test_a_reduce_function_that_raises_is_a_remote_error_on_its_own_rank_too(self):
        wires = Wires(2)
        waiting(wires, 1)
        wires.start(0, program=failing(FoldFailed(KeyError("k"))))
        wires.settle()
        for rank in range(2):
            error = error_of(wires, rank)
            assert isinstance(error, RemoteError)
            assert (error.origin, error.type_name) == (0, "KeyError")
            assert isinstance(error.original, KeyError)
        assert_in_step(wires)

    @pytest.mark.parametrize(
        ("error", "passed_on"),
        [(SystemExit(3), True), (KeyboardInterrupt(), True), (asyncio.CancelledError(), False)],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_no_exception_ends_it_everywhere_too_and_goes_on_to_the_process_if_meant_for_it(
        self, error, passed_on
    ):
        wires = Wires(2)
        waiting(wires, 1)
        if passed_on:
            with pytest.raises(type(error)):
                wires.start(0, program=failing(error))
            wires.collect(0)
        else:
            wires.start(0, program=failing(error))
        wires.settle()
        for rank in range(2):
            remote = error_of(wires, rank)
            assert isinstance(remote, RemoteError)
            assert remote.origin == 0
            assert remote.type_name.endswith(type(error).__name__)
        assert_in_step(wires)

    def test_a_program_that_finds_a_disagreement_makes_the_ranks_compare_their_calls(self):
        wires = Wires(2)
        wires.start(0, program=failing(Disagrees("what came is no array")), call=Fingerprint("test", "array"))
        waiting(wires, 1, call=Fingerprint("test", "array"))
        wires.settle()
        assert all(isinstance(error_of(wires, rank), CollectiveMismatch) for rank in range(2))
        assert_in_step(wires)

    def test_a_collective_error_without_a_place_gets_the_operations(self):
        wires = Wires(2)
        wires.now = 5.0
        error = CollectiveError("broken")
        wires.start(0, program=failing(error, recv(1, bytearray(1))))
        wires.now = 7.5
        wires.start(1, send(0, b"x"))
        wires.settle()
        assert (error.op, error.seq, error.group, error.rank, error.elapsed) == ("test", 0, "world", 0, 2.5)

    def test_an_exception_that_cannot_be_rebuilt_travels_as_text(self):
        wires = Wires(2)
        wires.start(0, program=failing(NeedsTwo("one", "two")))
        waiting(wires, 1)
        wires.settle()
        remote = error_of(wires, 1)
        assert remote.original is None
        assert remote.type_name == "test_aborts.NeedsTwo"

    @pytest.mark.parametrize(
        "error",
        [ValueError("x" * 60_000), ValueError("ä" * 30_000), OSError(5, b"x" * 50_000), ValueError("\ud800")],
        ids=["long", "wide", "data", "surrogate"],
    )
    def test_any_exception_at_all_ends_it_on_every_rank(self, error):
        wires = Wires(2)
        waiting(wires, 1)
        wires.settle()
        wires.start(0, program=failing(error))
        wires.settle()
        assert error_of(wires, 0) is error
        assert error_of(wires, 1).type_name == type(error).__name__
        assert_in_step(wires)

    def test_a_refusal_fits_in_a_frame(self):
        for error in (ValueError("x" * 60_000), ValueError("ä" * 30_000), OSError(5, b"x" * 65_000)):
            assert len(wire.abort_frame(0, 0, refusal(error))) <= wire.HEADER_SIZE + wire.MAX_CONTROL

    def test_a_refusal_keeps_the_text_and_bounds_each_part(self):
        kind = type("K" * 2_000, (Exception,), {})
        try:
            raise kind("m" * 5_000)
        except kind as raised:
            raised.__notes__ = ["n" * 50_000]
            info = refusal(raised, safe=True)["error"]
        assert info["message"] == "m" * 5_000
        assert len(info["type"]) == 1 << 10
        assert len(info["traceback"]) == 1 << 14
        assert refusal(ValueError("m" * 10_000))["error"]["message"] == "m" * (1 << 13)


class TestRefuse:
    def test_a_call_that_failed_before_it_started_takes_its_number_and_fails_everywhere(self):
        wires = Wires(3)
        error = TypeError("out= must be an array")
        wires.start(0)
        op = wires.refuse(1, error)
        wires.settle()
        late = wires.start(2)
        wires.settle()
        assert (op.seq, late.seq) == (0, 0)
        assert error_of(wires, 1) is error
        assert [error_of(wires, rank).type_name for rank in (0, 2)] == ["TypeError"] * 2
        assert_in_step(wires)

    def test_what_came_for_it_before_is_dropped_and_paid_back(self):
        wires = Wires(2)
        for _ in range(4):
            wires.start(0, send(1, bytes(64 * KIB)))
        wires.settle()
        for _ in range(4):
            wires.refuse(1, TypeError("no"))
        wires.settle()
        assert all(isinstance(error, RemoteError) for error in wires.results(0))
        assert_in_step(wires)

    def test_two_refusals_of_one_operation_meet(self):
        wires = Wires(2)
        for rank in range(2):
            wires.refuse(rank, TypeError(f"rank {rank}"))
        wires.settle()
        assert [str(error_of(wires, rank)) for rank in range(2)] == ["rank 0", "rank 1"]
        assert_in_step(wires)


# -- mismatch ----------------------------------------------------------------------------------------------------


class TestMismatch:
    def test_who_differs_from_one_that_has_left_waits_for_no_answer(self):
        wires = Wires(2, [0])
        wires.feed(0, 1, frame(wire.DATA, 0, b"x", flags=wire.EAGER, tag=digests(OTHER).tag))
        behind_it = {"cause": "closed", "next": {0: 1}}
        wires.feed(0, 1, wire.goodbye_frame(0, behind_it))
        waiting(wires, 0)
        assert isinstance(error_of(wires, 0), CollectiveMismatch)

    def test_memory_is_free_before_the_answers_are_in(self):
        wires = Wires(2)
        memory = bytearray(BULK)
        wires.start(0, send(1, memory))
        wires.flush(0)
        wires.flight[0, 1].clear()
        wires.feed(0, 1, frame(wire.DATA, 0, b"x", flags=1, tag=1))
        assert not wires.ended[0]
        memory.clear()  # a BufferError while a view on it exists

    def test_a_rank_answers_once(self):
        wires = Wires(4)
        for rank in range(4):
            wires.start(rank, call=OTHER if rank == 2 else Fingerprint("test"))
        wires.settle()
        for rank in range(4):
            aborts = [destination for source, destination, _ in wires.log if source == rank]
            assert [f.kind for f in wires.sent(rank)].count(wire.ABORT) == 3
            assert set(aborts) == {0, 1, 2, 3} - {rank}

    def test_call_sites_are_told(self):
        code = (lambda: None).__code__
        wires = Wires(2)
        wires.start(0, site=(code, 0))
        wires.start(1, call=OTHER)
        wires.settle()
        line = f"test_aborts.py:{code.co_firstlineno}"
        assert [error_of(wires, rank).sites for rank in range(2)] == [{0: line}, {0: line}]

    def test_a_rank_that_has_not_called_has_half_a_second(self):
        wires = Wires(3)
        wires.now = 10.0
        wires.start(0)
        wires.start(1, call=OTHER)
        wires.settle()
        assert not any(wires.ended.values())
        wires.tick(10.499)
        assert not any(wires.ended.values())
        wires.tick(10.5)
        for rank in (0, 1):
            assert error_of(wires, rank).values == {0: "test", 1: "other"}

    def test_a_rank_that_calls_within_it_is_among_the_answers(self):
        wires = Wires(3)
        wires.start(0)
        wires.start(1, call=OTHER)
        wires.settle()
        wires.tick(0.3)
        wires.start(2)
        wires.settle()
        for rank in range(3):
            assert error_of(wires, rank).values == {0: "test", 1: "other", 2: "test"}
        assert_in_step(wires)

    def test_a_rank_that_calls_after_it_raises_the_same(self):
        wires = Wires(3)
        wires.start(0)
        wires.start(1, call=OTHER)
        wires.settle()
        wires.tick(0.5)
        wires.now = 20.0
        wires.start(2)
        wires.settle()
        assert error_of(wires, 2).values == {0: "test", 1: "other", 2: "test"}
        assert_in_step(wires)

    def test_an_answer_after_the_end_is_ignored(self):
        wires = Wires(2)
        wires.start(0)
        wires.feed(0, 1, frame(wire.DATA, 0, b"x", flags=1, tag=1))
        wires.tick(0.5)
        assert isinstance(error_of(wires, 0), CollectiveMismatch)
        wires.flight[0, 1].clear()
        wires.flush(0)
        wires.start(1, call=OTHER)
        wires.settle()
        assert len(wires.ended[0]) == 1

    @pytest.mark.parametrize("letter", ["x", "\U0001f600", "\ud800"], ids=["plain", "wide", "surrogate"])
    def test_any_name_of_256_characters_can_be_told(self, letter):
        wires = Wires(2)
        for rank in range(2):
            wires.start(rank, call=Fingerprint("barrier", name=letter * 255 + str(rank)))
        wires.settle()
        assert [error_of(wires, rank).field for rank in range(2)] == ["name", "name"]

    def test_a_cancel_ends_it(self):
        wires = Wires(3)
        op = wires.start(0)
        wires.start(1, call=OTHER)
        wires.settle()
        wires.cancel(0, op)
        wires.settle()
        assert error_of(wires, 1).origin == 0


# -- timeout -----------------------------------------------------------------------------------------------------


class TestTimeout:
    @pytest.mark.parametrize("missing", [{2}, {0, 3}, {1, 2, 3}])
    def test_everyone_names_the_ranks_that_have_not_called(self, missing):
        wires = Wires(4)
        for rank in {0, 1, 2, 3} - missing:
            wires.start(rank, timeout=2.0)
        wires.settle()
        wires.tick(2.0)
        wires.settle()
        for rank in {0, 1, 2, 3} - missing:
            error = error_of(wires, rank)
            assert isinstance(error, CollectiveTimeout)
            assert (error.missing, error.limit, error.elapsed) == (missing, 2.0, 2.0)

    def test_one_deadline_is_enough_for_all(self):
        wires = Wires(3)
        wires.start(0, timeout=2.0)
        wires.start(1)
        wires.settle()
        wires.tick(2.0)
        wires.settle()
        assert [error_of(wires, rank).missing for rank in (0, 1)] == [{2}, {2}]
        assert error_of(wires, 1).limit == 2.0

    def test_a_rank_that_calls_afterwards_is_told_that_it_was_late(self):
        wires = Wires(3)
        for rank in (0, 1):
            wires.start(rank, timeout=2.0)
        wires.settle()
        wires.tick(2.0)
        wires.settle()
        wires.now = 9.0
        wires.start(2)
        wires.settle()
        error = error_of(wires, 2)
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == {2}
        assert "before the others gave up" in str(error)
        assert_in_step(wires)

    def test_where_all_have_called_nobody_is_missing(self):
        wires = Wires(3)
        for rank in range(3):
            waiting(wires, rank, timeout=2.0)
        wires.settle()
        wires.tick(2.0)
        wires.settle()
        assert [error_of(wires, rank).missing for rank in range(3)] == [set()] * 3
        assert_in_step(wires)

    def test_a_rank_that_has_ended_it_counts_as_present(self):
        wires = Wires(2)
        wires.start(0, result="done", timeout=2.0)
        wires.start(1, recv(0, bytearray(1)), timeout=2.0)
        wires.settle()
        assert wires.results(0) == ["done"]
        wires.tick(2.0)
        wires.settle()
        assert error_of(wires, 1).missing == set()
        assert_in_step(wires)

    def test_a_silent_rank_holds_it_up_for_half_a_second(self):
        wires = Wires(2, [0])
        wires.start(0, timeout=2.0)
        wires.take(0, 1)
        wires.tick(2.0)
        assert wires.engines[0].next_deadline == 2.5
        wires.tick(2.499)
        assert not wires.ended[0]
        wires.tick(2.5)
        assert error_of(wires, 0).missing == {1}

    def test_memory_is_free_when_the_time_is_up(self):
        wires = Wires(2, [0])
        memory = bytearray(BULK)
        wires.start(0, send(1, memory), timeout=2.0)
        wires.take(0, 1)
        wires.tick(2.0)
        assert not wires.ended[0]
        memory.clear()


# -- peers that go during an inquest -----------------------------------------------------------------------------


class TestDuringAnInquest:
    def opened(self):
        """Ranks 0 and 1 of 3 have timed out and wait for the answer of rank 2."""
        wires = Wires(3, [0, 1])
        for rank in (0, 1):
            wires.start(rank, timeout=1.0)
        wires.settle()
        wires.tick(1.0)
        wires.settle()
        assert not wires.ended[0]
        return wires

    def test_a_death_is_reported_instead(self):
        wires = self.opened()
        for rank in (0, 1):
            wires.lose(rank, 2, "reset")
        wires.settle()
        error = error_of(wires, 0)
        assert isinstance(error, PeerLost)
        assert error.peers == {2}

    def test_a_rank_that_leaves_is_reported_instead_if_it_took_no_part(self):
        wires = self.opened()
        wires.feed(0, 2, wire.goodbye_frame(0, {"cause": "bye", "next": {0: 0}}))
        assert isinstance(error_of(wires, 0), CommunicatorClosed)

    def test_a_rank_that_leaves_after_it_took_part_is_not_waited_for(self):
        wires = self.opened()
        wires.feed(0, 2, wire.goodbye_frame(0, {"cause": "bye", "next": {0: 1}}))
        error = error_of(wires, 0)  # at its goodbye, not only at the end of its connection
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == {2}


# -- frames ------------------------------------------------------------------------------------------------------


RECORD = {"type": "ValueError", "message": "m", "traceback": "t", "pickle": None}
MALFORMED = [
    {},
    {"reason": "because"},
    {"reason": None},
    {"reason": ["cancel"]},
    {"reason": {"cancel": 1}},
    {"reason": "error"},
    {"reason": "error", "error": "text"},
    {"reason": "error", "error": {}},
    {"reason": "error", "error": {**RECORD, "message": 5}},
    {"reason": "error", "error": {**RECORD, "pickle": "text"}},
    {"reason": "mismatch", "fields": None},
    {"reason": "mismatch", "fields": [1]},
    {"reason": "answer", "fields": "text"},
    {"reason": "cancel", "fields": {}},
    {"reason": "lost", "ranks": [2]},
]


class TestMalformed:
    @pytest.mark.parametrize("body", MALFORMED, ids=repr)
    def test_a_malformed_abort_breaks_the_peer(self, body):
        wires = Wires(3, [0])
        op = wires.start(0)
        wires.feed(0, 1, wire.abort_frame(0, 0, body))
        assert list(wires.broken[0]) == [1]
        wires.agree()
        assert isinstance(op.error, PeerLost)

    @pytest.mark.parametrize("body", MALFORMED, ids=repr)
    def test_so_does_one_that_comes_before_the_call(self, body):
        wires = Wires(3, [0])
        wires.feed(0, 1, wire.abort_frame(0, 0, body))
        op = wires.start(0)
        assert list(wires.broken[0]) == [1]
        wires.agree()
        assert isinstance(op.error, PeerLost)

    @pytest.mark.parametrize(
        "body",
        [
            {"reason": "timeout"},
            {"reason": "timeout", "limit": "long"},
            {"reason": "timeout", "limit": float("nan")},
            {"reason": "mismatch"},
            {"reason": "mismatch", "fields": {}, "site": 5},
            {"reason": "mismatch", "fields": {"verb": [1, [2]], "shape": {}}, "site": ["a"]},
            {"reason": "closed", "cause": 7},
        ],
        ids=repr,
    )
    def test_missing_or_odd_details_are_no_reason_to_fall_over(self, body):
        for early in (False, True):
            wires = Wires(2, [0])
            if not early:
                wires.start(0)
            wires.feed(0, 1, wire.abort_frame(0, 0, body))
            if early:
                wires.start(0)
            wires.tick(1.0)
            assert not wires.broken[0]
            assert str(error_of(wires, 0))


class TestTombstones:
    def test_the_first_word_counts(self):
        wires = Wires(3, [0])
        wires.feed(0, 1, wire.abort_frame(0, 0, {"reason": "cancel"}))
        wires.feed(0, 2, wire.abort_frame(0, 0, {"reason": "closed", "cause": "x"}))
        assert isinstance(wires.start(0).error, CollectiveCancelled)

    def test_it_stands_for_its_own_operation_only(self):
        wires = Wires(2, [0])
        wires.feed(0, 1, wire.abort_frame(0, 1, {"reason": "cancel"}))
        assert wires.start(0).error is None
        assert wires.start(0).error.origin == 1
        assert not wires.engines[0].group().early

    def test_nothing_is_sent_by_the_late_caller(self):
        wires = Wires(2, [0])
        wires.feed(0, 1, wire.abort_frame(0, 0, {"reason": "cancel"}))
        wires.start(0, send(1, bytes(BULK)))
        assert wires.take(0, 1) == []

    @pytest.mark.parametrize(
        ("reason", "answered"), [("timeout", True), ("mismatch", True), ("cancel", False)]
    )
    def test_a_rank_that_has_not_called_says_so_where_it_is_asked(self, reason, answered):
        wires = Wires(2, [0])
        wires.feed(0, 1, wire.abort_frame(0, 0, {"reason": reason}))
        bodies = [wire.control_payload(memoryview(f.payload)) for f in wires.take(0, 1)]
        assert bodies == ([{"reason": "answer", "absent": True}] if answered else [])

    @pytest.mark.parametrize(
        ("reason", "answered"), [("timeout", True), ("mismatch", False), ("cancel", False)]
    )
    def test_a_rank_that_has_ended_it_says_so_to_those_who_time_out(self, reason, answered):
        wires = Wires(2, [0])
        wires.cancel(0, wires.start(0))
        wires.take(0, 1)
        wires.feed(0, 1, wire.abort_frame(0, 0, {"reason": reason}))
        bodies = [wire.control_payload(memoryview(f.payload)) for f in wires.take(0, 1)]
        assert bodies == ([{"reason": "answer", "present": True}] if answered else [])


def test_an_operation_that_ended_badly_is_told_once():
    wires = Wires(2)
    op = waiting(wires, 0)
    wires.start(1, call=OTHER)
    wires.settle()
    wires.tick(1.0)
    wires.lose(0, 1)
    wires.cancel(0, op)
    assert wires.ended[0] == [op]


def test_operations_hold_no_memory_after_a_bad_end():
    op = operation(send(1, bytearray(BULK)))
    wires = Wires(2, [0])
    wires.submit(0, op)
    wires.take(0, 1)
    wires.cancel(0, op)
    assert not op.inputs
    assert not any(out.pending for out in op.outputs.values())
