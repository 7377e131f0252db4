"""Frames for communicators: not made yet, left, or not the sender's."""

import pytest
from wires import KIB, Wires, alone, data, frame, operation, recv, send, start_record

from asynccoll.engine import unmade, wire
from asynccoll.errors import CommunicatorClosed, PeerLost

PAIR = 7


def moved(sent, comm=PAIR):
    """The frame, for another communicator."""
    changed = bytearray(sent)
    changed[4:8] = comm.to_bytes(4, "little")
    return bytes(changed)


def make(wires, rank, members=(0, 1)):
    group = wires.engines[rank].add_group(PAIR, members, "pair")
    wires.collect(rank)
    return group


class TestNotMadeYet:
    @pytest.mark.parametrize("nbytes", [1, 9 * KIB, 64 * KIB])
    def test_what_comes_before_is_played_back_when_it_is_made(self, nbytes):
        wires = Wires(2)
        payload = bytes(range(256)) * (nbytes // 256 + 1)
        make(wires, 0)
        first = wires.submit(0, operation(send(1, payload[:nbytes])), comm=PAIR)
        wires.settle()
        assert not wires.ended[0]
        make(wires, 1)
        into = bytearray(nbytes)
        second = wires.submit(1, operation(recv(0, into)), comm=PAIR)
        wires.settle()
        assert into == payload[:nbytes]
        assert wires.ended == {0: [first], 1: [second]}
        wires.assert_idle()

    def test_bytes_beyond_the_credit_wait_for_it(self):
        wires = Wires(2)
        make(wires, 0)
        memory = bytes(range(250)) * 2000
        wires.submit(0, operation(send(1, memory)), comm=PAIR)
        wires.settle()
        make(wires, 1)
        into = bytearray(len(memory))
        wires.submit(1, operation(recv(0, into)), comm=PAIR)
        wires.settle()
        assert into == memory
        wires.assert_idle()

    def test_other_communicators_go_on_meanwhile(self):
        wires = Wires(2)
        make(wires, 0)
        for _ in range(5):
            wires.submit(0, operation(send(1, b"x" * 60_000)), comm=PAIR)
        for rank in range(2):
            wires.start(rank, send(1 - rank, b"world"), recv(1 - rank, bytearray(5)))
        wires.settle()
        assert len(wires.ended[0]) == len(wires.ended[1]) == 1

    def test_bytes_without_credit_break_the_peer(self):
        wires = alone()
        wires.feed(0, 1, moved(data(0, b"x", flags=0)))
        assert "without credit for communicator 7" in str(wires.broken[0][1])

    def test_what_is_kept_of_a_peer_is_bounded(self, monkeypatch):
        monkeypatch.setattr(unmade, "_LIMIT", 10_000)
        wires = alone()
        for comm in range(1, 60):
            wires.feed(0, 1, moved(start_record(), comm))
        assert not wires.broken[0]
        for comm in range(60, 120):
            wires.feed(0, 1, moved(start_record(), comm))
        assert "call new_group" in str(wires.broken[0][1])

    def test_playing_back_frees_the_bound(self, monkeypatch):
        monkeypatch.setattr(unmade, "_LIMIT", 1000)
        wires = alone()
        for comm in range(1, 100):
            wires.feed(0, 1, moved(start_record(), comm))
            wires.engines[0].add_group(comm, (0, 1), "pair")
        assert not wires.broken[0]

    def test_a_frame_that_makes_no_sense_breaks_the_peer_when_it_is_played_back(self):
        wires = alone()
        wires.feed(0, 1, moved(frame(wire.READY, 0, b"short")))
        assert not wires.broken[0]
        make(wires, 0)
        assert wires.broken[0]

    def test_a_member_that_has_died_meanwhile_is_missing_from_the_start(self):
        wires = Wires(3, [0])
        wires.feed(0, 1, moved(start_record()))
        wires.lose(0, 1)
        wires.agree()
        make(wires, 0)
        op = wires.submit(0, operation(recv(1, bytearray(1))), comm=PAIR)
        assert isinstance(op.error, PeerLost)

    def test_a_loss_that_is_not_agreed_yet_ends_it_then(self):
        wires = Wires(3, [0])
        wires.lose(0, 1)
        make(wires, 0)
        op = wires.submit(0, operation(recv(1, bytearray(1))), comm=PAIR)
        assert op.error is None
        wires.agree()
        assert isinstance(op.error, PeerLost)

    def test_so_is_one_that_has_left(self):
        wires = Wires(3, [0])
        wires.feed(0, 1, wire.goodbye_frame(0, {"cause": "done", "next": {0: 5}}))
        make(wires, 0)
        op = wires.submit(0, operation(), comm=PAIR)
        assert isinstance(op.error, CommunicatorClosed)
        assert op.error.cause == "done"


class TestMembers:
    def test_a_frame_from_a_rank_that_is_no_member_breaks_it(self):
        wires = Wires(3, [0])
        make(wires, 0, (0, 1))
        wires.feed(0, 2, moved(data(0, b"x")))
        assert "rank 2 is not in communicator 7" in str(wires.broken[0][2])

    def test_so_does_one_that_came_before_it_was_made(self):
        wires = Wires(3, [0])
        wires.feed(0, 2, moved(start_record()))
        make(wires, 0, (0, 1))
        assert list(wires.broken[0]) == [2]

    def test_an_id_is_used_once(self):
        wires = alone()
        make(wires, 0)
        with pytest.raises(ValueError, match="in use"):
            make(wires, 0)
        wires.engines[0].leave_group(PAIR, "closed", 0.0)
        with pytest.raises(ValueError, match="in use"):
            make(wires, 0)


class TestLeaving:
    def test_pending_operations_end_on_all_members(self):
        wires = Wires(3)
        for rank in range(3):
            make(wires, rank, (0, 1, 2))
            wires.submit(rank, operation(recv((rank + 1) % 3, bytearray(1))), comm=PAIR)
        wires.engines[1].leave_group(PAIR, "had enough", 0.0)
        wires.collect(1)
        wires.settle()
        for rank in range(3):
            (error,) = wires.results(rank)
            assert isinstance(error, CommunicatorClosed)
            assert (error.origin, error.cause) == (1, "had enough")

    def test_later_ones_fail_on_the_others_and_the_world_goes_on(self):
        wires = Wires(2)
        for rank in range(2):
            make(wires, rank)
        wires.engines[1].leave_group(PAIR, "closed", 0.0)
        wires.collect(1)
        wires.settle()
        op = wires.submit(0, operation(), comm=PAIR)
        assert isinstance(op.error, CommunicatorClosed)
        for rank in range(2):
            wires.start(rank, result="fine")
        wires.settle()
        assert wires.results(0)[1] == wires.results(1)[0] == "fine"

    def test_who_makes_it_after_a_member_has_left_is_told(self):
        wires = Wires(2)
        make(wires, 1)
        wires.engines[1].leave_group(PAIR, "closed", 0.0)
        wires.collect(1)
        wires.settle()
        make(wires, 0)
        op = wires.submit(0, operation(), comm=PAIR)
        assert isinstance(op.error, CommunicatorClosed)

    def test_what_still_comes_is_dropped_and_its_credit_given_back(self):
        wires = Wires(2)
        for rank in range(2):
            make(wires, rank)
        wires.submit(0, operation(send(1, b"x" * 60_000)), comm=PAIR)
        wires.engines[1].leave_group(PAIR, "closed", 0.0)
        wires.collect(1)
        wires.settle()
        assert not wires.broken[1]
        wires.assert_idle()
