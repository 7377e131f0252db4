"""Ranks that leave or die: what ends, with which name, and what goes on without them."""

import pytest
from wires import Wires, alone, data, frame, frames, kinds, operation, recv, send, start_record

from asynccoll.engine import wire
from asynccoll.errors import CommunicatorClosed, PeerLost


class TestGoodbye:
    def bye(self, number, cause="closed"):
        return wire.goodbye_frame(0, {"cause": cause, "next": {0: number}})

    def test_close_tells_each_peer_the_first_number_that_it_takes_no_part_in(self):
        wires = Wires(3, [0])
        wires.start(0)
        wires.start(0)
        wires.close(0, "gone fishing")
        for peer in (1, 2):
            last = wires.take(0, peer)[-1]
            assert last.kind == wire.GOODBYE
            assert wire.control_payload(memoryview(last.payload)) == {
                "cause": "gone fishing",
                "next": {0: 2},
                "keyed": {0: wire.KEYED},
                "ended": False,
            }

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
        wires.start(0, send(2, b"go"), recv(2, into))
        wires.start(1)
        two = wires.start(2, recv(0, bytearray(2)), send(0, b"x"))
        for source, destination in [(1, 0), (2, 0), (0, 1)]:
            wires.flush(source)
            wires.read(source, destination)
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

    def test_what_still_waits_for_it_when_its_bytes_are_at_an_end_fails(self):
        wires = alone()
        waiting, round_, fine = (
            wires.start(0, recv(1, bytearray(2))),
            wires.start(0),
            wires.start(0, recv(1, bytearray(1)), send(1, b"x")),
        )
        for seq in (0, 2):
            wires.feed(0, 1, start_record(seq))
        wires.feed(0, 1, data(0, b"1") + data(2, b"1"))
        wires.feed(0, 1, self.bye(3, "had enough"))
        assert wires.ended[0] == [fine]
        wires.lose(0, 1, "left")
        for op in (waiting, round_):
            assert isinstance(op.error, CommunicatorClosed)
            assert (op.error.origin, op.error.cause) == (1, "had enough")

    def test_so_does_what_comes_to_wait_for_it_later(self):
        wires = Wires(3, [0])
        op = wires.start(0, recv(2, bytearray(1)), recv(1, bytearray(1)))
        for peer, round_ in ((2, 0), (1, 1)):
            wires.feed(0, peer, start_record(round_=round_, size=3, heard=0b111))
        wires.feed(0, 1, self.bye(1))
        wires.lose(0, 1, "left")
        assert not wires.ended[0]
        wires.feed(0, 2, data(0, b"x"))
        assert isinstance(op.error, CommunicatorClosed)
        assert op.error.origin == 1

    def test_a_process_that_ended_without_close_is_named_with_its_own_words(self):
        wires = alone()
        op = wires.start(0, recv(1, bytearray(1)))
        body = {"cause": "the process ended without close()", "next": {0: 0}, "ended": True}
        wires.feed(0, 1, wire.goodbye_frame(0, body))
        assert isinstance(op.error, PeerLost)
        assert op.error.reason == "the process ended without close()"

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
        wires.feed(0, 1, wire.goodbye_frame(0, body))
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


class TestBlame:
    """Who leaves because others died is not to blame: the one that ends second is never the culprit."""

    def bye(self, number, **more):
        return wire.goodbye_frame(0, {"cause": "failed", "next": {0: number}, **more})

    def lost(self, accuser, *dead):
        return wire.lost_frame({"entries": [[accuser, rank, 0, "reset", False] for rank in dead]})

    def test_a_rank_that_leaves_because_of_the_dead_is_not_blamed_itself(self):
        wires = Wires(4, [0])
        pending = [wires.start(0) for _ in range(2)]
        wires.feed(0, 1, self.lost(1, 2, 3) + self.bye(1))
        later = wires.start(0)
        assert [op.error for op in (*pending, later)] == [None] * 3
        wires.agree()
        for op in (*pending, later):
            assert isinstance(op.error, PeerLost)
            assert op.error.peers == {2, 3}
            assert "says rank 1" in op.error.reason

    def test_in_a_group_without_the_dead_it_has_just_left(self):
        wires = Wires(4, [0])
        wires.engines[0].add_group(7, (0, 1), "pair")
        op = wires.submit(0, operation(recv(1, bytearray(1))), comm=7)
        wires.feed(0, 1, self.lost(1, 2) + self.bye(0))
        assert isinstance(op.error, CommunicatorClosed)

    @pytest.mark.parametrize("ended", [1, None, "yes", [0]], ids=repr)
    def test_a_malformed_one_breaks_the_peer(self, ended):
        wires = Wires(3, [0])
        wires.feed(0, 1, self.bye(0, ended=ended))
        assert list(wires.broken[0]) == [1]

    def test_what_was_heard_of_the_dead_ends_what_is_pending_at_a_close(self):
        wires = Wires(3, [0])
        ops = [wires.start(0) for _ in range(2)]
        wires.take(0, 1)
        wires.feed(0, 1, self.lost(1, 2))
        wires.close(0)
        for op in ops:
            assert isinstance(op.error, PeerLost)
            assert op.error.peers == {2}
        told, goodbye = (wire.control_payload(memoryview(f.payload)) for f in wires.take(0, 1))
        assert told["entries"] == [[1, 2, 0, "reset", False]]
        assert goodbye["ended"] is False

    def test_a_process_that_ends_because_of_the_dead_is_not_reported_beside_them(self):
        wires = Wires(3)
        wires.lose(1, 2)
        wires.engines[1].close("the process ended", 0.0, ended=True)
        wires.collect(1)
        op = wires.start(0)
        wires.settle()
        wires.lose(0, 1, "left")
        wires.agree()
        assert isinstance(op.error, PeerLost)
        assert op.error.peers == {2}

    def test_a_process_that_ends_without_a_close_is_lost(self):
        wires = Wires(3)
        pending = [wires.start(rank, recv((rank + 1) % 3, bytearray(1))) for rank in range(3)]
        wires.settle()
        wires.engines[1].close("the process ended", 0.0, ended=True)
        wires.collect(1)
        wires.settle()
        for rank in (0, 2):
            for op in (pending[rank], wires.start(rank)):
                assert isinstance(op.error, PeerLost)
                assert op.error.peers == {1}

    def test_what_it_had_taken_part_in_to_the_end_completes_all_the_same(self):
        wires = Wires(2)
        into = bytearray(1)
        wires.start(0, recv(1, into))
        wires.flush(0)
        wires.read(0, 1)
        wires.start(1, send(0, b"x"))
        wires.engines[1].close("the process ended", 0.0, ended=True)
        wires.collect(1)
        wires.settle()
        assert wires.results(0) == [None]
        assert into == b"x"


class TestPeerLost:
    def test_every_pending_operation_fails_with_its_name(self):
        wires = Wires(3, [0])
        for _ in range(2):
            wires.start(0, recv(1, bytearray(1)))
        wires.lose(0, 2, "connection reset")
        wires.agree()
        for error in wires.results(0):
            assert isinstance(error, PeerLost)
            assert (error.peers, error.reason) == ({2}, "connection reset")

    def test_every_later_one_fails_at_the_call(self):
        wires = Wires(3, [0])
        wires.lose(0, 2)
        wires.agree()
        op = wires.start(0)
        assert wires.ended[0] == [op]
        assert op.error.peer == 2

    def test_a_second_loss_adds_its_name(self):
        wires = Wires(4, [0])
        wires.lose(0, 3)
        wires.agree()
        assert wires.start(0).error.peers == {3}
        wires.lose(0, 1)
        wires.agree()
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
        wires.agree()
        assert not wires.ended[0]
        other = wires.submit(0, operation(), comm=7)
        assert not other.error
        assert not op.error

    def test_ranks_in_errors_are_those_of_the_group(self):
        wires = Wires(4, [0])
        wires.engines[0].add_group(7, (3, 0), "pair")
        op = wires.submit(0, operation(), comm=7)
        wires.lose(0, 3)
        wires.agree()
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
        wires.feed(0, 1, wire.goodbye_frame(0, {"cause": "bye", "next": {0: 1}}) + frame(99))
        assert list(wires.broken[0]) == [1]
        assert isinstance(op.error, PeerLost)

    def test_a_link_that_breaks_between_two_others_costs_one_of_them_its_place(self):
        wires = Wires(4)
        ops = [wires.start(rank, recv((rank + 1) % 4, bytearray(1))) for rank in range(4)]
        wires.settle()
        wires.lose(1, 2)
        wires.lose(2, 1)
        wires.settle()
        assert not any(op.error for op in ops)
        wires.agree()
        for op in ops:
            assert isinstance(op.error, PeerLost)
            assert op.error.peers == {2}
        assert "evicted" in ops[2].error.reason

    def test_every_other_member_is_told_since_its_own_link_may_be_whole(self):
        wires = Wires(3)
        wires.start(1, recv(2, bytearray(1)))
        wires.settle()
        wires.log.clear()
        wires.lose(1, 2, "reset")
        wires.settle()
        assert {a for a, _, data in wires.log if wire.LOST in kinds(frames(data))} >= {0, 1}
        wires.agree()
        wires.start(0, recv(2, bytearray(1)))
        (error,) = wires.results(0)
        assert isinstance(error, PeerLost)
        assert (error.peers, error.reason) == ({2}, "reset, says rank 1")
