"""What may be sent when: copies and lent memory, grants, eager credit, and whose turn it is."""

import itertools
import random

import pytest
from wires import (
    KIB,
    Wires,
    abort,
    alone,
    data,
    kinds,
    recv,
    send,
    start_record,
)

from asynccoll.engine import wire
from asynccoll.engine.outbox import SEGMENT
from asynccoll.engine.outgoing import UNLIMITED
from asynccoll.engine.transfers import SendBytes

WINDOW = 1024 * KIB


def grants(found):
    return [wire.parse_u64(memoryview(f.payload)) for f in found if f.kind == wire.READY]


class TestGrants:
    @pytest.mark.parametrize("nbytes", [1, 64 * KIB])
    def test_up_to_64_kib_from_a_peer_need_none(self, nbytes):
        wires = Wires(2)
        payload = random.Random(0).randbytes(nbytes)
        into = bytearray(nbytes)
        wires.start(0, send(1, payload))
        wires.start(1, recv(0, into))
        wires.settle()
        assert into == payload
        assert kinds(wires.sent(0)) == [wire.START, wire.DATA]
        assert kinds(wires.sent(1)) == [wire.START]

    def test_beyond_64_kib_the_receiver_grants_what_it_waits_for_and_1_mib_more(self):
        wires = alone()
        wires.start(0, recv(1, bytearray(64 * KIB + 1)))
        assert grants(wires.take(0, 1)) == [64 * KIB + 1 + WINDOW]

    def test_grants_are_renewed_when_half_of_the_window_is_used(self):
        wires = alone()
        segment = WINDOW // 4
        wires.start(0, *(recv(1, bytearray(segment)) for _ in range(8)))
        seen = grants(wires.take(0, 1))
        for _ in range(8):
            wires.feed(0, 1, data(0, bytes(segment), flags=0))
            seen += grants(wires.take(0, 1))
        assert seen == [WINDOW + 1 * segment, WINDOW + 4 * segment, WINDOW + 7 * segment]

    def test_bytes_that_always_have_a_place_are_granted_once_at_the_start(self):
        wires = alone()
        wires.start(0, recv(1, bytearray(1)), recv(1, bytearray(1 << 20)), expected={1: 1 + (1 << 20)})
        assert grants(wires.take(0, 1)) == [UNLIMITED]
        wires.feed(0, 1, data(0, b"x"))
        assert wires.take(0, 1) == []

    def test_few_expected_bytes_are_not_granted(self):
        wires = alone()
        wires.start(0, recv(1, bytearray(1)), expected={1: 64 * KIB})
        assert grants(wires.take(0, 1)) == []

    def test_a_want_is_answered_at_once_by_a_started_operation(self):
        wires = alone()
        wires.start(0, recv(1, bytearray(100)))
        wires.take(0, 1)
        wires.feed(0, 1, wire.want_frame(0, 0))
        assert grants(wires.take(0, 1)) == [100 + WINDOW]

    def test_a_want_that_comes_before_the_call_is_answered_at_the_call(self):
        wires = alone()
        wires.feed(0, 1, wire.want_frame(0, 0))
        assert wires.take(0, 1) == []
        wires.start(0, recv(1, bytearray(100)))
        # First the want is served, then the receive is posted.
        assert grants(wires.take(0, 1)) == [WINDOW]

    def test_a_want_is_answered_even_if_everything_is_granted_already(self):
        # The two frames crossed.
        wires = alone()
        wires.start(0, recv(1, bytearray(1 << 20)), expected={1: 1 << 20})
        wires.take(0, 1)
        wires.feed(0, 1, wire.want_frame(0, 0))
        assert grants(wires.take(0, 1)) == [UNLIMITED]

    def test_a_want_of_a_finished_operation_is_ignored(self):
        wires = alone()
        wires.start(0)
        wires.feed(0, 1, start_record() + wire.want_frame(0, 0))
        assert kinds(wires.take(0, 1)) == [wire.START]
        assert not wires.broken[0]

    def test_a_grant_that_comes_before_the_call_counts(self):
        wires = alone()
        wires.feed(0, 1, wire.ready_frame(0, 0, 1 << 20))
        wires.start(0, send(1, bytes(100_000)))
        sent = wires.take(0, 1)
        assert [(f.kind, f.flags, len(f.payload)) for f in sent[1:]] == [(wire.DATA, 0, 100_000)]

    @pytest.mark.parametrize("nbytes", [4, 5])
    def test_small_data_within_a_grant_or_to_its_end_is_copied_at_the_call(self, nbytes):
        wires = alone()
        wires.feed(0, 1, wire.ready_frame(0, 0, 5))
        memory = bytearray(b"a" * nbytes)
        wires.start(0, send(1, memory))
        memory[:] = b"b" * nbytes  # the program's own again
        assert [f.payload for f in wires.take(0, 1) if f.kind == wire.DATA] == [b"a" * nbytes]

    def test_a_grant_lets_a_parked_stream_go_on(self):
        wires = alone()
        wires.start(0, send(1, bytes(100_000)))
        assert kinds(wires.take(0, 1)) == [wire.START, wire.DATA, wire.WANT]
        wires.feed(0, 1, wire.ready_frame(0, 0, 100_000))
        assert [(f.flags, len(f.payload)) for f in wires.take(0, 1)] == [(0, 100_000 - 64 * KIB)]

    def test_a_late_grant_of_fewer_bytes_takes_nothing_back(self):
        wires = alone()
        wires.start(0, send(1, bytes(100_000)))
        wires.feed(0, 1, wire.ready_frame(0, 0, 1 << 20) + wire.ready_frame(0, 0, 5))
        assert sum(len(f.payload) for f in wires.take(0, 1) if f.kind == wire.DATA) == 100_000

    @pytest.mark.parametrize("seed", range(8))
    def test_a_large_stream_arrives_whole_in_any_interleaving(self, seed):
        rng = random.Random(seed)
        payload = rng.randbytes(3_000_000)
        cuts = sorted(rng.sample(range(3_000_000), 5))
        into = bytearray(3_000_000)
        views = [memoryview(into)[lo:hi] for lo, hi in itertools.pairwise([0, *cuts, 3_000_000])]
        wires = Wires(2)
        wires.start(0, send(1, payload))
        wires.shuffle(rng, 300_000)
        wires.start(1, *(recv(0, view) for view in views))
        wires.shuffle(rng, 300_000)
        assert into == payload
        wires.assert_idle()


class TestSending:
    def test_a_small_payload_is_copied_into_its_frame(self):
        wires = alone()
        memory = bytearray(b"a" * 64 * KIB)
        op = wires.start(0, send(1, memory))
        memory[:] = b"b" * len(memory)
        assert op.unsent == 0
        assert wires.take(0, 1)[1].payload == b"a" * 64 * KIB

    def test_a_large_one_is_lent_and_the_operation_ends_when_it_has_left(self):
        wires = alone()
        memory = bytearray(100_000)
        op = wires.start(0, send(1, memory), result="done")
        wires.feed(0, 1, start_record() + wire.ready_frame(0, 0, 1 << 20))
        assert wires.write(0, 1)  # START
        assert wires.engines[0].data_to_send(1)[-1].obj is memory
        assert wires.write(0, 1, 100_000)
        assert not wires.ended[0]
        assert wires.write(0, 1)
        assert wires.ended[0] == [op]

    def test_a_small_payload_within_the_grant_costs_no_credit(self):
        wires = alone()
        wires.feed(0, 1, wire.ready_frame(0, 0, 1 << 20))
        wires.start(0, send(1, bytes(100)), send(1, bytes(100)))
        assert [f.flags for f in wires.take(0, 1) if f.kind == wire.DATA] == [0, 0]
        assert wires.box(0, 1).credit == 256 * KIB

    def test_a_snapshot_is_not_lent(self):
        wires = alone()
        memory = bytearray(b"a" * 100_000)
        wires.start(0, SendBytes(1, memoryview(memory), snapshot=True))
        memory[:] = b"b" * len(memory)
        wires.feed(0, 1, wire.ready_frame(0, 0, 1 << 20))
        sent = b"".join(f.payload for f in wires.take(0, 1) if f.kind == wire.DATA)
        assert sent == b"a" * 100_000

    def test_a_small_payload_never_overtakes_a_large_one_of_its_stream(self):
        wires = alone()
        wires.start(0, send(1, b"a" * 100_000), send(1, b"b"))
        wires.feed(0, 1, wire.ready_frame(0, 0, 1 << 20))
        sent = b"".join(f.payload for f in wires.take(0, 1) if f.kind == wire.DATA)
        assert sent == b"a" * 100_000 + b"b"

    def test_a_small_payload_waits_when_the_credit_is_used_up(self):
        wires = alone()
        for _ in range(5):
            wires.start(0, send(1, bytes(64 * KIB)))
        sent = wires.take(0, 1)
        assert sum(len(f.payload) for f in sent if f.kind == wire.DATA) == 256 * KIB
        assert [f.seq for f in sent if f.kind == wire.WANT] == [4]
        wires.feed(0, 1, wire.ready_frame(0, 4, 1 << 20))
        assert [(f.seq, f.flags, len(f.payload)) for f in wires.take(0, 1)] == [(4, 0, 64 * KIB)]

    def test_a_stream_has_64_kib_without_a_grant_whatever_its_pieces(self):
        wires = alone()
        wires.start(0, *(send(1, bytes(40_000)) for _ in range(3)))
        sent = [f for f in wires.take(0, 1) if f.kind == wire.DATA]
        assert sum(len(f.payload) for f in sent) <= 64 * KIB
        assert all(f.flags == wire.EAGER for f in sent)

    def test_nothing_is_no_frame(self):
        wires = alone()
        wires.start(0, send(1, b""))
        assert kinds(wires.take(0, 1)) == [wire.START]

    def test_two_operations_share_a_link_segment_by_segment(self):
        wires = alone()
        for seq in range(2):
            wires.start(0, send(1, bytes(4 * SEGMENT)))
            wires.feed(0, 1, wire.ready_frame(0, seq, 1 << 23))
        bulk = [(f.seq, len(f.payload)) for f in wires.take(0, 1) if f.kind == wire.DATA]
        assert bulk == [(0, SEGMENT), (1, SEGMENT)] * 4

    def test_a_barrier_passes_a_bulk_transfer(self):
        wires = alone()
        wires.start(0, send(1, bytes(4 * SEGMENT)))
        wires.feed(0, 1, wire.ready_frame(0, 0, 1 << 23))
        wires.write(0, 1)  # START
        wires.write(0, 1)  # a segment
        wires.start(0)
        order = [(f.kind, f.seq) for f in wires.take(0, 1)]
        assert order.index((wire.START, 1)) == 2


class TestCredit:
    def test_it_comes_back_when_the_operation_has_been_called(self):
        wires = Wires(2)
        for _ in range(4):
            wires.start(0, send(1, bytes(64 * KIB)))
        wires.settle()
        assert wires.box(0, 1).credit == 0
        assert sum(wires.engines[1].group().early_bytes.values()) == 256 * KIB
        for _ in range(4):
            wires.start(1, recv(0, bytearray(64 * KIB)))
        wires.settle()
        assert wires.box(0, 1).credit == 256 * KIB
        wires.assert_idle()

    def test_it_comes_back_at_once_for_an_operation_that_runs(self):
        wires = Wires(2)
        for _ in range(10):
            wires.start(1, recv(0, bytearray(64 * KIB)))
            wires.start(0, send(1, bytes(64 * KIB)))
            wires.settle()
            assert wires.box(0, 1).credit >= 128 * KIB
        wires.assert_idle()

    @pytest.mark.parametrize("then", ["ended", "tombstone"])
    def test_it_comes_back_for_bytes_that_nobody_wants(self, then):
        wires = alone()
        if then == "ended":
            op = wires.start(0)
            wires.cancel(0, op)
        else:
            wires.feed(0, 1, abort(0, reason="cancel"))
        wires.take(0, 1)
        for _ in range(2):
            wires.feed(0, 1, data(0, bytes(64 * KIB)))
        assert [wire.parse_u64(memoryview(f.payload)) for f in wires.take(0, 1)] == [128 * KIB]

    def test_more_than_was_owed_breaks_the_peer(self):
        wires = alone()
        wires.start(0, send(1, bytes(100)))
        wires.feed(0, 1, wire.credit_frame(100))
        assert not wires.broken[0]
        wires.feed(0, 1, wire.credit_frame(1))
        assert "more credit than it was owed" in str(wires.broken[0][1])
