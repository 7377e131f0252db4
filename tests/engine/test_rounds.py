"""START rounds: who tells whom, that nobody is done before all have called, and what must agree."""

import itertools
import random

import numpy as np
import pytest
from wires import (
    CALL,
    OTHER,
    TAG,
    Wires,
    alone,
    data,
    frames,
    kinds,
    recv,
    send,
    start_record,
)

from asynccoll.algorithms.start import graph
from asynccoll.buffers import DTYPES
from asynccoll.engine import wire
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.programs import reductions
from asynccoll.errors import CollectiveMismatch, PeerLost, ProtocolError
from asynccoll.reduction import arithmetic


class TestStartRound:
    @pytest.mark.parametrize("size", range(2, 18))
    def test_records_go_along_the_start_graph(self, size):
        wires = Wires(size)
        for rank in range(size):
            wires.start(rank)
        wires.settle()
        for rank in range(size):
            sent = [(b, frames(data)) for a, b, data in wires.log if a == rank]
            assert [(b, f.kind, f.round) for b, found in sent for f in found] == [
                (peer, wire.START, turn)
                for turn, peers in enumerate(graph(rank, size).tells)
                for peer in peers
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

    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    def test_payload_along_its_graph_needs_no_write_of_its_own(self, size):
        wires = Wires(size)
        for rank in range(size):
            part = reductions.Part(np.ones(10, "f4"), arithmetic("sum", DTYPES["float32"]), along_start(size))
            wires.start(rank, program=reductions.allreduce(part, rank, size, lambda p=part: p.storage))
        wires.settle()
        for rank in range(size):
            assert wires.results(rank)[0].tolist() == [size] * 10
            mine = [frames(data) for source, _, data in wires.log if source == rank]
            assert list(map(kinds, mine)) == [[wire.START, wire.DATA]] * told(rank, size)

    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    def test_a_swap_needs_no_frame_but_the_records(self, size):
        wires = Wires(size)
        swaps = [start_swap(wires, rank, size) for rank in range(size)]
        wires.settle()
        for rank, op in enumerate(swaps):
            assert wires.results(rank)[0].tolist() == [size] * 10
            assert op.heard == (1 << size) - 1
            mine = [frames(data) for source, _, data in wires.log if source == rank]
            assert list(map(kinds, mine)) == [[wire.START]] * told(rank, size)
        wires.assert_idle()

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

    def test_a_record_out_of_turn_waits_for_its_turn(self):
        wires = Wires(4, [0])
        op = wires.start(0)
        wires.feed(0, 2, start_record(size=4, heard=0b0100))
        wires.feed(0, 3, start_record(size=4, heard=0b1000))
        assert op.round == 0
        assert not wires.ended[0]
        wires.feed(0, 1, start_record(size=4, heard=0b0010))
        assert op.heard == 0b1111
        assert len(wires.ended[0]) == 1

    @pytest.mark.parametrize("called", [True, False])
    @pytest.mark.parametrize(("rank", "size", "peer"), [(1, 4, 2), (1, 3, 2), (0, 8, 3), (0, 5, 2)])
    def test_a_record_from_a_rank_that_is_not_to_tell_this_one_breaks_the_peer(
        self, rank, size, peer, called
    ):
        wires = Wires(size, [rank])
        if called:
            wires.start(rank)
        wires.feed(rank, peer, start_record(size=size))
        assert list(wires.broken[rank]) == [peer]

    @pytest.mark.parametrize("called", [True, False])
    def test_so_does_a_second_record(self, called):
        wires = Wires(4, [0])
        if called:
            wires.start(0)
        for _ in range(2):
            assert not wires.broken[0]
            wires.feed(0, 1, start_record(size=4, heard=0b0010))
        assert list(wires.broken[0]) == [1]

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


def along_start(size):
    """The algorithm that moves along the START graph."""
    return "linear" if size in (3, 4) else "doubling"


def told(rank, size):
    """How many peers the rank tells in a START round."""
    return sum(map(len, graph(rank, size).tells))


def start_swap(wires, rank, size, dtype="f4"):
    algorithm = along_start(size)
    part = reductions.Part(np.ones(10, dtype), arithmetic("sum", DTYPES[np.dtype(dtype).name]), algorithm)
    turns = reductions.swap_turns(algorithm, rank, size, 10, part.arithmetic.partial.itemsize)
    return wires.start(rank, program=reductions.swap(part, turns, size, lambda: part.storage), swaps=True)


class TestSwap:
    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    @pytest.mark.parametrize("seed", range(5))
    def test_any_order_of_calls_reads_and_writes_gives_the_same(self, size, seed):
        rng = random.Random(seed)
        wires = Wires(size)
        calls = [rank for rank in range(size) for _ in range(3)]
        rng.shuffle(calls)
        for rank in calls:
            start_swap(wires, rank, size)
            if rng.random() < 0.5:
                wires.shuffle(rng, 60)
        wires.shuffle(rng, 60)
        for rank in range(size):
            assert [result.tolist() for result in wires.results(rank)] == [[size] * 10] * 3
        wires.assert_idle()

    @pytest.mark.parametrize("early", [True, False])
    @pytest.mark.parametrize("nbytes", [0, 39, 41, 256])
    def test_a_block_of_another_size_breaks_the_protocol(self, nbytes, early):
        wires = alone()
        frame = block_record(nbytes)
        if early:
            wires.feed(0, 1, frame)
        start_swap(wires, 0, 2)
        if not early:
            wires.feed(0, 1, frame)
        assert "block" in str(wires.broken[0][1])
        (error,) = wires.results(0)
        assert isinstance(error, PeerLost)

    def test_so_does_a_block_for_an_operation_that_swaps_nothing(self):
        wires = alone()
        wires.start(0, recv(1, bytearray(3)))
        wires.feed(0, 1, block_record(8))
        assert "block of 8 bytes" in str(wires.broken[0][1])

    def test_payload_beside_it_breaks_the_protocol(self):
        wires = alone()
        op = start_swap(wires, 0, 2)
        wires.feed(0, 1, data(0, b"x" * 40) + block_record(40))
        assert isinstance(op.error, ProtocolError)

    def test_a_disagreeing_record_is_a_mismatch_whatever_its_block(self):
        wires = alone()
        op = start_swap(wires, 0, 2)
        wires.feed(0, 1, start_record(call=OTHER))
        assert op.inquest is not None
        assert op.program is None

    def test_when_it_is_cancelled_nothing_refers_to_its_memory(self):
        wires = alone()
        op = start_swap(wires, 0, 2)
        wires.cancel(0, op)
        assert op.block == b""
        assert op.program is None
        wires.feed(0, 1, block_record(40))
        assert not wires.broken[0]


def block_record(nbytes):
    strict, value, tag = digests(CALL)
    record = (strict, value, wire.NO_DEADLINE, 0b10)
    return wire.start_frame(0, 0, 0, tag, record, 2, bytes(nbytes))
