"""Frames of a faulty peer, beside those of `test_malformed`: none makes a wrong result or takes memory without bounds."""

import pytest
from wires import KIB, Wires, data, frame, operation, recv, start_record

from asynccoll.engine import wire
from asynccoll.engine.losses import PATIENCE
from asynccoll.engine.mail import Receive, Send
from asynccoll.engine.programs.items import Item
from asynccoll.errors import PeerLost, ProtocolError

MANY = 4500
"""More small messages than there is credit for."""


def place(meta, nbytes):
    return [memoryview(bytearray(nbytes))]


def post(wires, rank, what):
    op = operation()
    op.comm, op.mail = 0, what
    wires.engines[rank].message(op, 0.0)
    wires.collect(rank)
    return op


def waiting(wires, rank=1):
    """A receive of anything from rank 0 that gives the payload's first bytes."""
    return post(wires, rank, Receive(0, None, place, lambda meta, parts, source, tag: bytes(parts[0][:8])))


def letter(nbytes):
    return Send(0, 0, Item(b"", (memoryview(bytes(nbytes)),)))


class TestMessages:
    def test_who_takes_a_message_of_its_own_is_given_up(self):
        wires = Wires(2, [1])
        op = waiting(wires)
        wires.feed(1, 0, wire.message_frame(0, wire.MESSAGES, 0, b"", 100_000, b""))
        wires.feed(1, 0, wire.take_frame(0, wire.MESSAGES))
        assert list(wires.broken[1]) == [0]
        assert op.result is None

    @pytest.mark.parametrize("again", [wire.MESSAGES + 1, wire.MESSAGES])
    def test_a_number_that_has_come_does_not_come_again(self, again):
        """Two transfers under one number: the first would never end."""
        wires = Wires(2, [1])
        ops = [waiting(wires), waiting(wires)]
        wires.feed(1, 0, wire.message_frame(0, wire.MESSAGES + 1, 0, b"", 100_000, b""))
        wires.feed(1, 0, wire.message_frame(0, again, 0, b"", 100_000, b""))
        assert list(wires.broken[1]) == [0]
        assert not wires.engines[1].pending()
        assert {type(op.error).__name__ for op in ops} == {"PeerLost"}

    def test_a_receive_that_loses_its_message_does_not_wait_for_the_dead(self):
        """Called when one rank is dead, for a message of another that is here already, and of which no payload comes."""
        wires = Wires(3, [0])
        wires.lose(0, 1)
        wires.tick(PATIENCE)
        wires.feed(0, 2, wire.message_frame(0, wire.MESSAGES | 2 << 40, 0, b"", 100_000, b""))
        wires.feed(0, 2, wire.goodbye_frame(0, {"cause": "closed", "next": {0: 0}}))
        op = post(wires, 0, Receive(None, None, place, lambda *_: "never"))
        assert op.error is None
        wires.lose(0, 2, "left")
        assert isinstance(op.error, PeerLost)
        assert op.error.peers == {1}
        assert not wires.engines[0].pending()

    def test_a_receive_is_not_granted_a_number(self):
        wires = Wires(2, [1])
        op = waiting(wires)
        wires.feed(1, 0, wire.grant_frame(0, wire.KEYED, 0))
        assert list(wires.broken[1]) == [0]
        assert op.result is None

    def test_a_receive_is_not_unkeyed(self):
        wires = Wires(2, [1])
        op = waiting(wires)
        wires.feed(1, 0, wire.unkey_frame(0, 0, {"reason": "cancel", "origin": 0}))
        assert op.error is None
        wires.feed(1, 0, wire.message_frame(0, wire.MESSAGES, 0, b"", 3, b"abc"))
        assert op.result == b"abc"

    def test_nothing_behind_a_message_that_breaks_the_protocol_is_decoded(self):
        wires = Wires(2, [1])

        def refuse(meta, nbytes):
            raise ProtocolError("bad")

        post(wires, 1, Receive(0, None, refuse, lambda *_: None))
        bad = wire.message_frame(0, wire.MESSAGES, 0, b"", 10, b"x" * 10)
        wires.feed(1, 0, bad + data(0, b"y" * 20_000, flags=0)[:5000])
        assert list(wires.broken[1]) == [0]

    def test_a_message_whose_payload_does_not_fit_ends_its_receive_before_it_is_asked_for(self):
        wires = Wires(2, [1])

        def refuse(meta, nbytes):
            raise ProtocolError("they do not fit")

        op = post(wires, 1, Receive(0, None, refuse, lambda *_: None))
        wires.feed(1, 0, wire.message_frame(0, wire.MESSAGES, 0, b"", 100_000, b""))
        assert isinstance(op.error, PeerLost)
        assert list(wires.broken[1]) == [0]
        assert not wires.engines[1].pending()

    def test_only_its_sender_takes_a_message_back(self):
        wires = Wires(3, [0])
        seq = wire.MESSAGES | 1 << 40
        wires.feed(0, 1, wire.message_frame(0, seq, 0, b"", 100_000, b""))
        wires.feed(0, 2, wire.abort_frame(0, seq, {}))
        waiting_for_it = post(wires, 0, Receive(1, None, place, lambda meta, parts, *_: len(parts[0])))
        wires.feed(0, 1, data(seq, b"z" * 100_000, tag=0, flags=0)[:24])
        assert waiting_for_it.error is None
        assert any(f.kind == wire.TAKE for f in wires.take(0, 1))

    @pytest.mark.parametrize("nbytes", [4, 32 * KIB])
    def test_messages_that_nobody_receives_are_bounded_at_the_receiver(self, nbytes):
        wires = Wires(2)
        for _ in range(MANY):
            post(wires, 1, letter(nbytes))
            wires.settle()
        kept = sum(len(one.beside or b"") for one in wires.engines[0].mail._boxes[0].letters.values())
        assert kept <= 256 * KIB
        assert len(wires.engines[0].mail._boxes[0].letters) == MANY
        assert not wires.broken[0]
        receives = []
        for _ in range(MANY):
            receives.append(post(wires, 0, Receive(1, None, place, lambda meta, parts, *_: len(parts[0]))))
            wires.settle()
        assert [op.result for op in receives] == [nbytes] * MANY
        assert len(wires.ended[1]) == MANY
        wires.assert_idle()


class TestStreams:
    @pytest.mark.parametrize("nbytes", [64 * KIB, 1 << 20])
    def test_bytes_beyond_the_grant_break_the_peer(self, nbytes):
        wires = Wires(3, [0])
        wires.start(0, recv(2, bytearray(8)), recv(1, bytearray(8)))
        for _ in range(3):
            wires.feed(0, 1, data(0, b"z" * nbytes, flags=0))
        assert list(wires.broken[0]) == [1]

    def test_a_record_that_is_too_long_is_not_kept(self):
        wires = Wires(2, [0])
        wires.feed(0, 1, frame(wire.START, 1, b"q" * 65536))
        assert list(wires.broken[0]) == [1]

    def test_the_longest_that_there_can_be_is(self):
        wires = Wires(2, [0])
        wires.feed(0, 1, frame(wire.START, 1, b"q" * wire.longest_record(2)))
        assert not wires.broken[0]


class TestClosing:
    def test_a_grant_that_crosses_a_close_is_ignored(self):
        wires = Wires(2)
        wires.submit(1, operation(key="k"))
        wires.flush(1)
        wires.read(1, 0)
        wires.submit(0, operation(key="k"))
        wires.flush(0)
        wires.close(1)
        wires.settle()
        assert not wires.broken[1]
        (error,) = wires.results(0)
        assert type(error).__name__ == "CommunicatorClosed"
        assert error.origin == 1

    def test_thousands_of_groups_are_left_at_once(self):
        wires = Wires(2)
        for number in range(3000):
            for engine in wires.engines.values():
                engine.add_group(1_000_000 + number, (0, 1), f"g{number}")
        ops = []
        for comm in (1_000_000, 1_002_999):
            op = operation(recv(1, bytearray(1)))
            op.comm = comm
            ops.append(op)
            wires.submit(0, op)
        wires.settle()
        wires.close(1)
        wires.settle()
        assert [type(op.error).__name__ for op in ops] == ["CommunicatorClosed"] * 2
        assert not wires.broken[0]

    @pytest.mark.parametrize("number", [-5, True, 1.5])
    def test_a_goodbye_with_an_odd_number_breaks_the_peer(self, number):
        wires = Wires(2, [0])
        wires.feed(0, 1, start_record())
        wires.feed(0, 1, wire.goodbye_frame(0, {"cause": "x", "next": {0: number}}))
        assert list(wires.broken[0]) == [1]
