"""One rank's engine: START rounds, grants and credit, where bytes land, deadlines, and peers that go."""

import itertools
import random

import numpy as np
import pytest
from wires import CALL, KIB, TAG, Wires, frame, frames, operation

from asynccoll.buffers import DTYPES
from asynccoll.engine import wire
from asynccoll.engine.engine import UNLIMITED, Engine
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.programs import reductions
from asynccoll.engine.transfers import FoldBytes, RecvBytes, SendBytes
from asynccoll.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorClosed, PeerLost
from asynccoll.reduction import arithmetic

WINDOW = 1024 * KIB
OTHER = Fingerprint("other")


def recv(peer, memory):
    return RecvBytes(peer, memoryview(memory))


def send(peer, data):
    return SendBytes(peer, memoryview(data))


def start_record(seq=0, *, call=CALL, round_=0, size=2, heard=0b10, remaining=wire.NO_DEADLINE):
    """A START frame as rank 1 would send it."""
    strict, value, tag = digests(call)
    return wire.start_frame(round_, 0, seq, tag, wire.Record(strict, value, remaining, heard), size)


def data(seq, payload, *, flags=wire.EAGER, tag=TAG):
    return frame(wire.DATA, seq, payload, flags=flags, tag=tag)


def abort(seq, **body):
    return wire.abort_frame(0, seq, body)


def kinds(found):
    return [f.kind for f in found]


def alone(size=2):
    """Rank 0, whose peers are made up."""
    return Wires(size, [0])


# -- START -----------------------------------------------------------------------------------------------------


class TestStartRound:
    @pytest.mark.parametrize("size", range(2, 18))
    def test_records_go_along_the_hypercube_at_powers_of_two_and_the_dissemination_graph_elsewhere(
        self, size
    ):
        wires = Wires(size)
        for rank in range(size):
            wires.start(rank)
        wires.settle()
        distances = [1 << k for k in range((size - 1).bit_length())]
        for rank in range(size):
            if size & (size - 1) == 0:
                expected = [rank ^ distance for distance in distances]
            else:
                expected = [(rank + distance) % size for distance in distances]
            sent = [(b, frames(data)) for a, b, data in wires.log if a == rank]
            assert [(b, f.kind, f.round) for b, found in sent for f in found] == [
                (peer, wire.START, round_) for round_, peer in enumerate(expected)
            ]
            assert len(wires.ended[rank]) == 1
        wires.assert_idle()

    @pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
    def test_at_its_end_every_rank_has_been_heard(self, size):
        wires = Wires(size)
        ops = [wires.start(rank) for rank in range(size)]
        wires.settle()
        assert [op.heard for op in ops] == [(1 << size) - 1] * size

    @pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
    def test_no_rank_ends_before_all_have_called(self, size):
        for late in range(size):
            wires = Wires(size)
            for rank in range(size):
                if rank != late:
                    wires.start(rank, send((rank + 1) % size, b"x"))
            wires.settle()
            assert not any(wires.ended.values())

    def test_a_world_of_one_needs_none(self):
        wires = Wires(1)
        op = wires.start(0, result="done")
        assert wires.results(0) == ["done"]
        assert op.seq == 0

    def test_the_record_and_the_first_payload_share_one_write(self):
        wires = alone()
        wires.start(0, send(1, b"payload"))
        (parts,) = [list(wires.engines[0].data_to_send(1))]
        assert len(parts) == 1
        assert kinds(frames(parts[0])) == [wire.START, wire.DATA]

    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_recursive_doubling_needs_no_write_of_its_own_for_it(self, size):
        wires = Wires(size)
        for rank in range(size):
            part = reductions.Part(np.ones(10, "f4"), arithmetic("sum", DTYPES["float32"]), "doubling")
            wires.start(rank, program=reductions.allreduce(part, rank, size, lambda p=part: p.storage))
        wires.settle()
        for rank in range(size):
            assert wires.results(rank)[0].tolist() == [size] * 10
            mine = [frames(data) for source, _, data in wires.log if source == rank]
            assert list(map(kinds, mine)) == [[wire.START, wire.DATA]] * (size.bit_length() - 1)

    def test_payload_does_not_wait_for_it(self):
        wires = alone()
        into = bytearray(3)
        op = wires.start(0, recv(1, into), result="done")
        wires.feed(0, 1, data(0, b"abc"))
        assert into == b"abc"
        assert op.program is None
        assert not wires.ended[0]
        wires.feed(0, 1, start_record())
        assert wires.results(0) == ["done"]

    def test_a_record_of_a_later_round_waits_for_its_turn(self):
        wires = Wires(4, [0])
        op = wires.start(0)
        wires.feed(0, 2, start_record(round_=1, size=4, heard=0b1100))
        assert op.round == 0
        assert not wires.ended[0]
        wires.feed(0, 1, start_record(round_=0, size=4, heard=0b0010))
        assert op.heard == 0b1111
        assert len(wires.ended[0]) == 1

    @pytest.mark.parametrize(("peer", "round_"), [(1, 1), (2, 0), (1, 2), (3, 0)])
    def test_a_record_from_a_rank_that_has_no_part_in_the_round_breaks_the_peer(self, peer, round_):
        wires = Wires(4, [0])
        wires.start(0)
        wires.feed(0, peer, start_record(round_=round_, size=4))
        assert list(wires.broken[0]) == [peer]

    def test_operations_of_one_communicator_do_not_wait_for_one_another(self):
        wires = Wires(2)
        first, second = bytearray(1), bytearray(1)
        wires.start(0, recv(1, first))
        wires.start(0, recv(1, second))
        wires.start(1, recv(0, bytearray(1)))
        wires.start(1, send(0, b"2"))
        wires.settle()
        assert second == b"2"
        assert [op.seq for op in wires.ended[0]] == [1]

    @pytest.mark.parametrize("seed", range(5))
    def test_numbers_are_given_in_call_order_whatever_the_order_of_the_ends(self, seed):
        rng = random.Random(seed)
        wires = Wires(3)
        ops = [[wires.start(rank, result=number) for number in range(5)] for rank in range(3)]
        wires.shuffle(rng, 20)
        assert [[op.seq for op in mine] for mine in ops] == [[0, 1, 2, 3, 4]] * 3
        assert [[op.result for op in mine] for mine in ops] == [[0, 1, 2, 3, 4]] * 3
        wires.assert_idle()


class TestWhatMustAgree:
    @pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
    def test_one_odd_rank_makes_every_rank_raise_with_all_values(self, size):
        for odd in range(size):
            wires = Wires(size)
            for rank in range(size):
                wires.start(rank, call=OTHER if rank == odd else CALL)
            wires.settle()
            for rank in range(size):
                (error,) = wires.results(rank)
                assert isinstance(error, CollectiveMismatch)
                assert error.field == "verb"
                assert error.values == {r: "other" if r == odd else "test" for r in range(size)}
            wires.assert_idle()

    @pytest.mark.parametrize("size", [2, 3, 4, 5])
    def test_wildcards_go_with_any_value_but_two_values_never_go_together(self, size):
        calls = [
            Fingerprint("broadcast", "array", dtype=dtype, root=0, loose_path=True)
            for dtype in ("int8", "int16")
        ] + [Fingerprint("broadcast", root=0, loose_path=True)]
        for chosen in itertools.product(calls, repeat=size):
            wires = Wires(size)
            for rank, call in enumerate(chosen):
                wires.start(rank, call=call)
            wires.settle()
            ends = [wires.results(rank) for rank in range(size)]
            if {calls[0], calls[1]} <= set(chosen):
                assert all(
                    isinstance(error, CollectiveMismatch) and error.field == "dtype" for (error,) in ends
                )
            else:
                assert ends == [[None]] * size

    def test_payload_of_another_call_is_never_taken(self):
        wires = alone()
        into = bytearray(3)
        wires.start(0, recv(1, into))
        wires.feed(0, 1, data(0, b"bad", tag=TAG ^ 1))
        assert into == bytes(3)
        assert wires.engines[0].pending()[0].inquest is not None

    def test_bulk_payload_of_another_call_is_never_taken(self):
        wires = alone()
        into = bytearray(100_000)
        wires.start(0, recv(1, into))
        wires.feed(0, 1, data(0, b"x" * 100_000, flags=0, tag=TAG ^ 1))
        assert into == bytes(100_000)
        assert wires.engines[0].pending()[0].inquest is not None

    def test_payload_of_another_call_is_not_taken_where_it_came_before_the_call_either(self):
        wires = alone()
        into = bytearray(3)
        wires.feed(0, 1, data(0, b"bad", tag=TAG ^ 1))
        wires.start(0, recv(1, into))
        assert into == bytes(3)
        assert wires.engines[0].pending()[0].inquest is not None

    def test_a_foreign_record_that_came_before_the_call_counts(self):
        wires = alone()
        wires.feed(0, 1, start_record(call=OTHER))
        wires.start(0)
        assert wire.ABORT in kinds(wires.take(0, 1))


# -- grants and credit -----------------------------------------------------------------------------------------


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
        segment = 256 * KIB
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
            wires.start(0, send(1, bytes(1 << 20)))
            wires.feed(0, 1, wire.ready_frame(0, seq, 1 << 21))
        bulk = [(f.seq, len(f.payload)) for f in wires.take(0, 1) if f.kind == wire.DATA]
        assert bulk == [(0, 256 * KIB), (1, 256 * KIB)] * 4

    def test_a_barrier_passes_a_bulk_transfer(self):
        wires = alone()
        wires.start(0, send(1, bytes(1 << 20)))
        wires.feed(0, 1, wire.ready_frame(0, 0, 1 << 21))
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


class TestEarly:
    def test_bytes_that_come_before_the_call_are_delivered_at_the_call(self):
        wires = alone()
        wires.feed(0, 1, data(0, b"ab") + data(0, b"cd") + start_record())
        into = bytearray(4)
        wires.start(0, recv(1, into), result="done")
        assert into == b"abcd"
        assert wires.results(0) == ["done"]

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

    def test_records_for_an_operation_that_has_not_been_called_are_bounded(self):
        # One per round is all that a peer ever sends.
        wires = alone()
        wires.feed(0, 1, frame(wire.START, 0, bytes(1000)) * 2000)
        kept = sum(
            len(payload) for early in wires.engines[0].group().early.values() for payload in early.records.values()
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

    def test_a_frame_for_a_communicator_that_nobody_knows_breaks_the_peer(self):
        for kind in (wire.DATA, wire.START, wire.READY, wire.WANT, wire.ABORT):
            wires = alone()
            wires.feed(0, 1, frame(kind, 0, bytes(8), comm=99, flags=kind == wire.DATA))
            assert "communicator 99" in str(wires.broken[0][1])


# -- where bytes land ------------------------------------------------------------------------------------------


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
        payload = random.Random(0).randbytes(self.BULK)
        wires.feed(0, 1, self.HEAD + payload)
        assert first + second == payload

    def test_bulk_for_a_program_that_waits_elsewhere_is_kept_without_a_copy(self):
        wires = Wires(3, [0])
        into = bytearray(self.BULK)
        wires.start(0, recv(2, bytearray(1)), recv(1, into))
        wires.feed(0, 1, self.HEAD)
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


# -- deadlines -------------------------------------------------------------------------------------------------


class TestDeadlines:
    def test_without_a_limit_there_is_none(self):
        wires = alone()
        wires.start(0)
        assert wires.engines[0].next_deadline() is None

    def test_the_earliest_is_the_next(self):
        wires = alone()
        wires.now = 100.0
        for limit in (9.0, 3.0, 5.0):
            wires.start(0, timeout=limit)
        assert wires.engines[0].next_deadline() == 103.0

    def test_nothing_happens_before_its_time(self):
        wires = alone()
        wires.start(0, timeout=3.0)
        wires.take(0, 1)
        wires.engines[0].handle_timer(2.999)
        wires.collect(0)
        assert wires.take(0, 1) == []
        assert wires.engines[0].next_deadline() == 3.0
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
        wires = Wires(4, [0])
        wires.now = 10.0
        wires.start(0, timeout=5.0)
        remaining = [wire.parse_record(memoryview(f.payload), 4).remaining_ms for f in wires.take(0, 1)]
        wires.now = 11.25
        wires.feed(0, 1, start_record(size=4))
        remaining += [wire.parse_record(memoryview(f.payload), 4).remaining_ms for f in wires.take(0, 2)]
        assert remaining == [5000, 3750]

    @pytest.mark.parametrize(("limit", "expected"), [(None, wire.NO_DEADLINE), (1e9, wire.NO_DEADLINE - 1)])
    def test_a_record_says_that_there_is_no_limit_and_bounds_a_long_one(self, limit, expected):
        wires = alone()
        wires.start(0, timeout=limit)
        assert wire.parse_record(memoryview(wires.take(0, 1)[0].payload), 2).remaining_ms == expected

    def test_a_time_that_has_passed_is_zero(self):
        wires = Wires(4, [0])
        wires.start(0, timeout=5.0)
        wires.now = 6.0
        wires.feed(0, 1, start_record(size=4))
        assert wire.parse_record(memoryview(wires.take(0, 2)[0].payload), 4).remaining_ms == 0

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
        assert wires.engines[0].next_deadline() is None


# -- peers that go ---------------------------------------------------------------------------------------------


class TestGoodbye:
    def bye(self, number, cause="closed"):
        return wire.goodbye_frame({"cause": cause, "next": {0: number}})

    def test_close_tells_each_peer_the_first_number_that_it_takes_no_part_in(self):
        wires = Wires(3, [0])
        wires.start(0)
        wires.start(0)
        wires.close(0, "gone fishing")
        for peer in (1, 2):
            last = wires.take(0, peer)[-1]
            assert last.kind == wire.GOODBYE
            assert wire.control_payload(memoryview(last.payload)) == {"cause": "gone fishing", "next": {0: 2}}

    def test_close_ends_what_is_pending_here_and_on_the_peers(self):
        wires = Wires(3)
        for rank in range(3):
            wires.start(rank, recv((rank + 1) % 3, bytearray(1)))
        wires.close(1, "had enough")
        wires.settle()
        for rank in range(3):
            (error,) = wires.results(rank)
            assert isinstance(error, CommunicatorClosed)
            assert (error.origin, error.cause) == (1, "had enough")

    def test_an_operation_that_the_leaver_has_ended_goes_on_without_it(self):
        wires = Wires(3)
        into = bytearray(1)
        wires.start(0, recv(2, into))
        wires.start(1)
        two = wires.start(2, recv(1, bytearray(0)), send(0, b"x"))
        for source, destination in [(1, 2), (0, 1), (1, 0), (2, 1)]:
            wires.flush(source)
            wires.read(source, destination)
        wires.flush(1)
        assert len(wires.ended[1]) == 1
        wires.close(1)
        wires.flush(1)
        wires.read(1, 0)
        wires.lose(0, 1, "left")
        wires.settle()
        assert into == b"x"
        assert wires.ended[2] == [two]
        assert wires.results(0) == [None]

    def test_later_operations_fail_at_the_call_and_name_the_leaver(self):
        wires = alone()
        wires.feed(0, 1, self.bye(2, "job done"))
        for expected in (False, False, True, True):
            wires.start(0)
            ended = [error for error in wires.results(0) if isinstance(error, CommunicatorClosed)]
            assert bool(ended) == expected
        (error, _) = ended
        assert (error.origin, error.cause, error.seq) == (1, "job done", 2)

    def test_pending_operations_with_a_later_number_fail_at_once(self):
        wires = alone()
        for _ in range(3):
            wires.start(0, recv(1, bytearray(1)))
        wires.feed(0, 1, self.bye(1))
        assert [op.seq for op in wires.ended[0]] == [1, 2]

    def test_the_end_of_the_connection_after_it_is_no_loss(self):
        wires = alone()
        wires.feed(0, 1, self.bye(0))
        assert wires.engines[0].left(1)
        wires.lose(0, 1, "left")
        wires.start(0)
        assert isinstance(wires.results(0)[0], CommunicatorClosed)

    def test_nothing_is_sent_to_a_rank_that_has_left(self):
        wires = Wires(3, [0])
        op = wires.start(0)
        wires.take(0, 1)
        wires.take(0, 2)
        wires.feed(0, 1, self.bye(1))
        wires.cancel(0, op)
        assert wires.take(0, 1) == []
        assert kinds(wires.take(0, 2)) == [wire.ABORT]

    @pytest.mark.parametrize(
        "body",
        [{}, {"next": {0: 1}}, {"cause": "x"}, {"cause": 1, "next": {}}, {"cause": "x", "next": {0: "1"}}],
    )
    def test_a_malformed_one_breaks_the_peer(self, body):
        wires = alone()
        wires.feed(0, 1, wire.goodbye_frame(body))
        assert "malformed goodbye" in str(wires.broken[0][1])

    @pytest.mark.parametrize(
        "text", ["x" * 100_000, "ä" * 60_000, "\ud800"], ids=["long", "wide", "surrogate"]
    )
    def test_any_cause_can_be_told(self, text):
        # It is made from the exception with which `async with` was left: any text at all.
        wires = Wires(2)
        for rank in range(2):
            wires.start(rank, recv(1 - rank, bytearray(1)))
        wires.close(0, text)
        wires.settle()
        assert [type(error) for rank in range(2) for error in wires.results(rank)] == [CommunicatorClosed] * 2
        assert wires.engines[1].left(0)


class TestPeerLost:
    def test_every_pending_operation_fails_with_its_name(self):
        wires = Wires(3, [0])
        for _ in range(2):
            wires.start(0, recv(1, bytearray(1)))
        wires.lose(0, 2, "connection reset")
        for error in wires.results(0):
            assert isinstance(error, PeerLost)
            assert (error.peers, error.reason) == ({2}, "connection reset")

    def test_every_later_one_fails_at_the_call(self):
        wires = Wires(3, [0])
        wires.lose(0, 2)
        op = wires.start(0)
        assert wires.ended[0] == [op]
        assert op.error.peer == 2

    def test_a_second_loss_adds_its_name(self):
        wires = Wires(4, [0])
        wires.lose(0, 3)
        wires.lose(0, 1)
        assert wires.start(0).error.peers == {1, 3}

    def test_nothing_more_is_written_to_it_and_its_memory_is_free(self):
        wires = alone()
        memory = bytearray(100_000)
        wires.start(0, send(1, memory))
        wires.write(0, 1)
        wires.write(0, 1, 1000)
        wires.lose(0, 1)
        assert not wires.engines[0].data_to_send(1)
        wires.start(0, send(1, memory))
        assert not wires.engines[0].data_to_send(1)
        memory.clear()

    def test_a_communicator_without_it_goes_on(self):
        wires = Wires(3, [0])
        wires.engines[0].add_group(7, (0, 1), "pair")
        op = wires.submit(0, operation(), comm=7)
        wires.lose(0, 2)
        assert not wires.ended[0]
        other = wires.submit(0, operation(), comm=7)
        assert not other.error
        assert not op.error

    def test_ranks_in_errors_are_those_of_the_group(self):
        wires = Wires(4, [0])
        wires.engines[0].add_group(7, (3, 0), "pair")
        op = wires.submit(0, operation(), comm=7)
        wires.lose(0, 3)
        assert (op.error.peer, op.error.rank, op.error.group) == (0, 1, "pair")

    def test_a_peer_that_breaks_the_protocol_is_lost_for_that_reason(self):
        wires = alone()
        op = wires.start(0)
        wires.feed(0, 1, frame(99))
        assert list(wires.broken[0]) == [1]
        assert op.error.reason.startswith("protocol error: rank 1 sent a frame of unknown kind")

    def test_so_is_one_that_does_so_after_its_goodbye(self):
        # It says that it took part in number 0, but what it owes will never come.
        wires = alone()
        op = wires.start(0, recv(1, bytearray(1)))
        wires.feed(0, 1, wire.goodbye_frame({"cause": "bye", "next": {0: 1}}) + frame(99))
        assert list(wires.broken[0]) == [1]
        assert isinstance(op.error, PeerLost)

    def test_a_link_that_breaks_between_two_others_ends_the_operation_here_too(self):
        # They report one another lost and leave in good order; what they owe will never come.
        wires = Wires(3)
        ops = [wires.start(rank, recv((rank + 1) % 3, bytearray(1))) for rank in range(3)]
        wires.settle()
        wires.lose(1, 2)
        wires.lose(2, 1)
        for rank in (1, 2):
            assert isinstance(ops[rank].error, PeerLost)
            wires.close(rank, "failed")
        wires.settle()
        for rank in (1, 2):
            wires.lose(0, rank, "left")
        assert isinstance(ops[0].error, PeerLost | CommunicatorClosed)


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
        assert engine.take_dirty() == ()
        assert engine.events() == []
        assert engine.next_deadline() is None
        assert not engine.data_to_send(0)
        assert len(engine.receive_into(2)) == 64 * KIB
