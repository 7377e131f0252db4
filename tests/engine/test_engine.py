"""One rank's engine: what comes before the call, where bytes land, deadlines, numbers."""

import random

import pytest
from wires import (
    KIB,
    TAG,
    Wires,
    abort,
    alone,
    data,
    frame,
    kinds,
    operation,
    recv,
    send,
    start_record,
)

from asynccoll.engine import wire
from asynccoll.engine.engine import Engine
from asynccoll.engine.inbound import STAGING
from asynccoll.engine.transfers import FoldBytes
from asynccoll.errors import CollectiveTimeout


class TestEarly:
    def test_bytes_that_come_before_the_call_are_delivered_at_the_call(self):
        wires = alone()
        wires.feed(0, 1, data(0, b"ab") + data(0, b"cd") + start_record())
        into = bytearray(4)
        wires.start(0, recv(1, into), result="done")
        assert into == b"abcd"
        assert wires.results(0) == ["done"]

    def test_a_foreign_call_gets_no_grant(self):
        wires = alone()
        wires.feed(0, 1, data(0, b"bad", tag=TAG ^ 1))
        wires.start(0, recv(1, bytearray(1 << 20)), expected={1: 1 << 20})
        assert wire.READY not in kinds(wires.take(0, 1))

    def test_they_are_kept_apart_by_operation(self):
        wires = alone()
        wires.feed(0, 1, data(1, b"second") + data(0, b"first"))
        memories = bytearray(5), bytearray(6)
        for memory in memories:
            wires.start(0, recv(1, memory))
        assert memories == (b"first", b"second")

    @pytest.mark.parametrize("nbytes", [1000, 64 * KIB], ids=["small", "bulk"])
    def test_a_peer_may_be_ahead_by_256_kib_and_not_by_a_byte_more(self, nbytes):
        wires = Wires(3, [0])
        count = 256 * KIB // nbytes
        for peer in (1, 2):
            for seq in range(count):
                wires.feed(0, peer, data(seq, bytes(nbytes)))
        rest = 256 * KIB - count * nbytes
        if rest:
            wires.feed(0, 1, data(count, bytes(rest)))
        assert not wires.broken[0]
        wires.feed(0, 1, data(count + 1, b"x"))
        assert "without credit" in str(wires.broken[0][1])
        assert 2 not in wires.broken[0]

    def test_a_bulk_frame_beyond_the_limit_is_refused_by_its_header(self):
        wires = alone()
        wires.feed(0, 1, data(0, bytes(64 * KIB)) * 3)
        wires.feed(0, 1, wire.data_header(wire.EAGER, 0, 1, TAG, 64 * KIB + 1))
        assert list(wires.broken[0]) == [1]

    @pytest.mark.parametrize("nbytes", [1, 100_000])
    def test_bytes_without_credit_break_the_peer(self, nbytes):
        wires = alone()
        wires.feed(0, 1, data(0, bytes(nbytes), flags=0))
        assert list(wires.broken[0]) == [1]

    def test_a_record_that_is_no_good_breaks_the_peer_at_the_call_at_the_latest(self):
        wires = Wires(4, [0])
        wires.feed(0, 1, frame(wire.START, 0, bytes(5)))
        op = wires.start(0)
        assert list(wires.broken[0]) == [1]
        wires.agree()
        assert op.error.peers == {1}

    def test_records_for_an_operation_that_has_not_been_called_are_bounded(self):
        # One per round is all that a peer ever sends.
        wires = alone()
        wires.feed(0, 1, frame(wire.START, 0, bytes(1000)) * 2000)
        kept = sum(
            len(payload)
            for early in wires.engines[0].group().early.values()
            for payload in early.records.values()
        )
        assert wires.broken[0] or kept <= 256 * KIB

    def test_aborts_of_an_operation_that_has_not_been_called_are_bounded(self):
        # A peer ends an operation once, or answers once.
        wires = alone()
        wires.feed(0, 1, abort(0, reason="closed", cause="x" * 1000) * 2000)
        early = wires.engines[0].group().early
        assert wires.broken[0] or sum(len(record.aborts) for record in early.values()) <= 16

    def test_a_frame_from_outside_the_communicator_breaks_the_peer(self):
        for outsider in (data(0, b"x"), start_record(), wire.want_frame(7, 0)):
            wires = Wires(3, [0])
            wires.engines[0].add_group(7, (0, 1), "pair")
            changed = bytearray(outsider)
            changed[4:8] = (7).to_bytes(4, "little")
            wires.feed(0, 2, changed)
            assert list(wires.broken[0]) == [2]


class TestLanding:
    BULK = 100_000
    HEAD = wire.data_header(0, 0, 0, TAG, BULK)

    def test_bulk_is_read_straight_into_the_posted_memory(self):
        wires = alone()
        into = bytearray(self.BULK)
        wires.start(0, recv(1, into), result="done")
        wires.feed(0, 1, start_record() + self.HEAD)
        target = wires.engines[0].receive_into(1)
        assert target.obj is into
        assert len(target) == self.BULK
        wires.feed(0, 1, b"a" * self.BULK)
        assert into == b"a" * self.BULK
        assert wires.results(0) == ["done"]

    def test_so_is_the_part_of_a_receive_that_is_still_open(self):
        wires = alone()
        into = bytearray(self.BULK + 10)
        wires.start(0, recv(1, into))
        wires.feed(0, 1, data(0, b"b" * 10) + self.HEAD)
        wires.engines[0].receive_into(1)[:1] = b"c"
        assert into[9:12] == b"bc\0"

    def test_bulk_to_be_folded_is_offered_whole_and_only_during_the_call(self):
        wires = alone()
        pieces = []
        wires.start(0, FoldBytes(1, self.BULK, lambda at, piece: pieces.append((at, bytes(piece)))))
        wires.feed(0, 1, self.HEAD + b"d" * self.BULK)
        assert pieces == [(0, b"d" * self.BULK)]

    def test_bulk_that_is_more_than_the_receive_takes_is_shared_out(self):
        wires = alone()
        first, second = bytearray(30_000), bytearray(self.BULK - 30_000)
        wires.start(0, recv(1, first), recv(1, second))
        wires.feed(0, 1, wire.want_frame(0, 0))
        payload = random.Random(0).randbytes(self.BULK)
        wires.feed(0, 1, self.HEAD + payload)
        assert first + second == payload

    def test_bulk_that_is_folded_in_part_is_kept_apart_from_what_comes_next(self):
        wires = Wires(3, [0])
        rest, other = bytearray(self.BULK - 30_000), []
        wires.start(0, FoldBytes(1, 30_000, lambda at, piece: None), recv(2, bytearray(1)), recv(1, rest))
        wires.start(0, FoldBytes(1, self.BULK, lambda at, piece: other.append(bytes(piece))))
        wires.feed(0, 1, wire.want_frame(0, 0))
        payload = random.Random(0).randbytes(self.BULK)
        wires.feed(0, 1, self.HEAD + payload)
        wires.feed(0, 1, data(1, b"z" * self.BULK, flags=0))
        wires.feed(0, 2, data(0, b"x"))
        assert other == [b"z" * self.BULK]
        assert rest == payload[30_000:]

    def test_an_operation_that_is_complete_refers_to_no_memory(self):
        wires = alone()
        op = wires.start(0, send(1, bytearray(10)), recv(1, bytearray(self.BULK)))
        wires.feed(0, 1, start_record() + self.HEAD + bytes(self.BULK))
        assert wires.ended[0] == [op]
        assert not op.inputs
        assert not op.outputs
        assert op.program is None

    def test_bulk_for_a_program_that_waits_elsewhere_is_kept_without_a_copy(self):
        wires = Wires(3, [0])
        into = bytearray(self.BULK)
        wires.start(0, recv(2, bytearray(1)), recv(1, into))
        wires.feed(0, 1, wire.want_frame(0, 0) + self.HEAD)
        target = wires.engines[0].receive_into(1).obj
        wires.feed(0, 1, b"e" * self.BULK)
        op = wires.engines[0].pending()[0]
        assert op.inputs[1].backlog[0].obj is target
        wires.feed(0, 2, data(0, b"x"))
        assert into == b"e" * self.BULK

    def end(self, wires, op, how):
        engine = wires.engines[0]
        if how == "cancel":
            wires.cancel(0, op)
        elif how == "lost":  # another rank
            wires.lose(0, 2)
            wires.agree()
        elif how == "deadline":
            wires.tick(1.0)
        else:  # another rank ended it
            wires.feed(0, 2, abort(0, reason=how))
        assert engine.pending() == ([op] if how in ("deadline", "mismatch") else [])

    @pytest.mark.parametrize("how", ["cancel", "lost", "deadline", "mismatch", "closed"])
    def test_when_the_operation_ends_nothing_refers_to_its_memory(self, how):
        wires = Wires(3, [0])
        into = bytearray(self.BULK)
        op = wires.start(0, recv(1, into), timeout=1.0)
        wires.feed(0, 1, self.HEAD + b"f" * 40_000)
        self.end(wires, op, how)
        into.clear()  # a BufferError while a view on it exists

    @pytest.mark.parametrize("how", ["cancel", "lost", "deadline", "mismatch", "closed"])
    def test_when_the_operation_ends_the_rest_goes_to_scratch(self, how):
        wires = Wires(3, [0])
        into = bytearray(self.BULK)
        op = wires.start(0, recv(1, into), timeout=1.0)
        wires.feed(0, 1, self.HEAD + b"f" * 40_000)
        self.end(wires, op, how)
        wires.feed(0, 1, b"g" * 60_000)
        assert into == b"f" * 40_000 + bytes(60_000)
        if how != "lost":  # the stream is in step
            answer = bytearray(1)
            wires.start(0, recv(1, answer))
            wires.feed(0, 1, data(1, b"h"))
            assert answer == b"h"

    def test_bulk_for_an_operation_that_has_ended_is_dropped(self):
        wires = alone()
        wires.cancel(0, wires.start(0, recv(1, bytearray(self.BULK))))
        wires.feed(0, 1, self.HEAD + bytes(self.BULK))
        assert not wires.broken[0]

    @pytest.mark.parametrize("nbytes", [1, 100_000])
    def test_payload_for_a_program_that_has_returned_does_no_harm(self, nbytes):
        wires = Wires(3, [0])
        op = wires.start(0, result="done")
        wires.feed(0, 1, wire.want_frame(0, 0) + data(0, bytes(nbytes), flags=0))
        assert wires.engines[0].pending() == [op]
        wires.feed(0, 2, start_record(size=3, round_=0))
        wires.feed(0, 1, start_record(size=3, round_=1))
        assert wires.ended[0] == [op]

    def test_bulk_that_began_before_the_call_and_ends_after_it_is_delivered(self):
        wires = alone()
        wires.feed(0, 1, wire.data_header(wire.EAGER, 0, 0, TAG, 50_000) + b"i" * 20_000)
        into = bytearray(50_000)
        wires.start(0, recv(1, into))
        wires.feed(0, 1, b"j" * 30_000)
        assert into == b"i" * 20_000 + b"j" * 30_000

    def test_frames_split_at_any_byte_end_alike(self):
        message = start_record() + data(0, b"ab") + data(0, b"cde") + start_record(1) + data(1, b"f")
        for cut in range(len(message) + 1):
            wires = alone()
            memories = bytearray(5), bytearray(1)
            for memory in memories:
                wires.start(0, recv(1, memory))
            wires.feed(0, 1, message[:cut])
            wires.feed(0, 1, message[cut:])
            assert memories == (b"abcde", b"f")
            assert len(wires.ended[0]) == 2

    def test_more_bytes_than_the_operation_takes_are_an_error(self):
        wires = alone()
        wires.start(0, recv(1, bytearray(2)))
        wires.feed(0, 1, start_record() + data(0, b"abc"))
        assert "rank 1 sent 1 bytes more" in str(wires.results(0)[0])


class TestDeadlines:
    def test_without_a_limit_there_is_none(self):
        wires = alone()
        wires.start(0)
        assert wires.engines[0].next_deadline is None

    def test_the_earliest_is_the_next(self):
        wires = alone()
        wires.now = 100.0
        for limit in (9.0, 3.0, 5.0):
            wires.start(0, timeout=limit)
        assert wires.engines[0].next_deadline == 103.0

    def test_nothing_happens_before_its_time(self):
        wires = alone()
        wires.start(0, timeout=3.0)
        wires.take(0, 1)
        wires.engines[0].handle_timer(2.999)
        wires.collect(0)
        assert wires.take(0, 1) == []
        assert wires.engines[0].next_deadline == 3.0
        wires.tick(3.0)
        assert kinds(wires.take(0, 1)) == [wire.ABORT]

    def test_the_tightest_limit_of_all_ranks_is_everyones(self):
        wires = Wires(5)
        wires.start(0, timeout=100.0)
        wires.start(1)
        wires.settle()
        wires.now = 1.0
        ops = [wires.start(2, timeout=2.0), wires.start(3, timeout=50.0)]
        wires.settle()
        wires.now = 1.5
        wires.start(4, recv(0, bytearray(1)))  # for ever: rank 0 sends nothing
        wires.settle()
        assert ops[0].deadline == 3.0
        # Remaining time travels in whole milliseconds, so others may be up to a few of them early, never late.
        for engine in wires.engines.values():
            for op in engine.pending():
                assert 2.99 <= op.deadline <= 3.0
        wires.tick(3.0)
        wires.settle()
        (error,) = wires.results(4)
        assert isinstance(error, CollectiveTimeout)
        assert error.limit == pytest.approx(1.5, abs=0.01)
        assert not error.missing

    def test_a_record_carries_the_time_that_is_left(self):
        wires = Wires(8, [0])
        wires.now = 10.0
        wires.start(0, timeout=5.0)
        remaining = [wire.parse_start(memoryview(f.payload), 8)[0][2] for f in wires.take(0, 1)]
        wires.now = 11.25
        wires.feed(0, 1, start_record(size=8))
        remaining += [wire.parse_start(memoryview(f.payload), 8)[0][2] for f in wires.take(0, 2)]
        assert remaining == [5000, 3750]

    @pytest.mark.parametrize(("limit", "expected"), [(None, wire.NO_DEADLINE), (1e9, wire.NO_DEADLINE - 1)])
    def test_a_record_says_that_there_is_no_limit_and_bounds_a_long_one(self, limit, expected):
        wires = alone()
        wires.start(0, timeout=limit)
        assert wire.parse_start(memoryview(wires.take(0, 1)[0].payload), 2)[0][2] == expected

    def test_a_time_that_has_passed_is_zero(self):
        wires = Wires(8, [0])
        wires.start(0, timeout=5.0)
        wires.now = 6.0
        wires.feed(0, 1, start_record(size=8))
        assert wire.parse_start(memoryview(wires.take(0, 2)[0].payload), 8)[0][2] == 0

    def test_the_same_limit_on_all_ranks_stays_what_the_caller_gave(self):
        wires = Wires(3)
        ops = []
        for rank in range(3):
            wires.now = rank / 10000
            ops.append(wires.start(rank, recv((rank + 1) % 3, bytearray(1)), timeout=7.0))
        wires.settle()
        assert [op.limit for op in ops] == [7.0] * 3

    def test_an_operation_that_ended_in_time_leaves_no_timer_that_matters(self):
        wires = Wires(2)
        for rank in range(2):
            wires.start(rank, timeout=3.0)
        wires.settle()
        wires.tick(10.0)
        assert [wires.results(rank) for rank in range(2)] == [[None]] * 2
        assert wires.engines[0].next_deadline is None


class TestTime:
    @pytest.mark.parametrize("how", ["cancel", "close", "lose", "receive", "timer"])
    def test_every_entry_brings_the_time_along(self, how):
        wires = alone()
        wires.now = 10.0
        op = wires.start(0, timeout=2.0)
        wires.now = 12.5
        if how == "cancel":
            wires.cancel(0, op)
        elif how == "close":
            wires.close(0)
        elif how == "lose":
            wires.lose(0, 1)
        elif how == "receive":
            wires.feed(0, 1, abort(0, reason="cancel"))
        else:
            wires.engines[0].handle_timer(12.0)
            wires.engines[0].handle_timer(12.5)
            wires.collect(0)
        assert op.error.elapsed == 2.5

    def test_a_refused_call_starts_when_it_is_refused(self):
        wires = alone()
        wires.now = 10.0
        assert wires.refuse(0, TypeError("no")).started == 10.0


class TestDefects:
    """A defect of the package itself must not leave anybody waiting."""

    def test_a_rank_whose_engine_fails_takes_no_further_part_and_tells_the_others_why(self):
        wires = Wires(3)
        ops = [wires.start(rank) for rank in range(3)]
        wires.engines[0].failed(MemoryError("no 9 bytes"), 0.0)
        wires.collect(0)
        wires.settle()
        for rank, op in enumerate(ops):
            assert op.error.peers == {0}
            says = "" if rank == 0 else ", says rank 0"
            assert op.error.reason == f"internal error: MemoryError: no 9 bytes{says}"
            assert not wires.engines[rank].losses.silent(0)
        assert wires.evicted == {0: [1, 2], 1: [0], 2: [0]}
        wires.engines[0].failed(MemoryError("again"), 0.0)
        assert wires.engines[0].take_events() == []
        assert "no 9 bytes" in wires.start(0).error.reason

    @pytest.fixture(params=[SystemExit(3), KeyboardInterrupt()], ids=["sys.exit", "Ctrl-C"])
    def leaving(self, request):
        """``leaving(behind)``: rank 0 reads a frame whose reduce function raises what ends a process, and bytes behind it.

        Gives the ranks, an operation that waits beside it, and the exception that came out of the engine.
        """

        def read(behind=b""):
            def raises(at, piece):
                raise request.param

            wires = alone()
            other = wires.start(0)
            wires.start(0, FoldBytes(1, 1, raises))
            engine = wires.engines[0]
            data_in = start_record(1) + data(1, b"x") + behind
            engine.receive_into(1)[: len(data_in)] = data_in
            with pytest.raises(type(request.param)) as caught:
                engine.received(1, len(data_in), 0.0)
            return wires, other, caught.value

        return read

    def test_what_a_reduce_function_means_for_the_process_is_no_failure_of_the_engine(self, leaving):
        wires, other, error = leaving()
        engine = wires.engines[0]
        engine.failed(error, 0.0)
        assert engine.pending() == [other]
        assert engine.losses.out == {}

    def test_what_came_behind_it_in_one_read_is_not_left_for_the_next(self, leaving):
        """No more may come: the peer waits for this rank."""
        wires, other, _ = leaving(start_record(0))
        wires.collect(0)
        assert other in wires.ended[0]
        assert other.error is None

    def test_the_driver_is_told_to_read_no_more_from_a_peer_that_was_given_up(self):
        wires = alone()
        engine = wires.engines[0]
        for data_in, expected in [(start_record(), True), (frame(99), False)]:
            engine.receive_into(1)[: len(data_in)] = data_in
            assert engine.received(1, len(data_in), 0.0) is expected


class TestNames:
    def test_groups_number_their_operations_apart(self):
        wires = alone()
        wires.engines[0].add_group(7, (0, 1), "pair")
        seqs = [wires.submit(0, operation(), comm=comm).seq for comm in (0, 7, 7, 0)]
        assert seqs == [0, 0, 1, 1]

    def test_pending_lists_what_is_under_way(self):
        wires = alone()
        ops = [wires.start(0) for _ in range(3)]
        wires.feed(0, 1, start_record(1))
        assert wires.engines[0].pending() == [ops[0], ops[2]]

    def test_a_new_engine_has_nothing_to_say(self):
        engine = Engine(1, 3)
        assert not engine.dirty
        assert engine.take_events() == []
        assert engine.next_deadline is None
        assert not engine.data_to_send(0)
        assert len(engine.receive_into(2)) == STAGING
