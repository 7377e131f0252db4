"""The decoder: the same frames whatever the reads are, bulk payload where the sink wants it, nothing malformed."""

import random

import pytest
from wires import KIB, frame, operation

from asynccoll.engine import inbound, wire
from asynccoll.engine.inbound import Inbound, Landing
from asynccoll.engine.operation import EAGER_STREAM, InStream
from asynccoll.errors import ProtocolError

SMALL = 8 * KIB
"""Payloads up to this size are collected."""


class Sink:
    """Records what it is told; bulk payloads land in `memory` where the test sets one."""

    def __init__(self):
        self.calls = []
        self.memory = None
        self.op = None
        self.placed = []

    def data(self, peer, flags, comm, seq, tag, payload, owned=False):
        self.calls.append(("data", peer, flags, comm, seq, tag, bytes(payload)))

    def place(self, peer, flags, comm, seq, tag, length):
        self.placed.append((peer, flags, comm, seq, tag, length))
        if self.memory is not None:
            return Landing(memoryview(self.memory)[:length], self.op, InStream())
        return Landing(memoryview(bytearray(length)), owned=True)

    def landed(self, peer, flags, landing):
        self.calls.append(("landed", peer, flags, landing))

    def start(self, peer, round_, comm, seq, payload):
        self.calls.append(("start", peer, round_, comm, seq, bytes(payload)))

    def control(self, peer, kind, comm, seq, payload):
        self.calls.append(("control", peer, kind, comm, seq, bytes(payload)))


@pytest.fixture
def sink():
    return Sink()


@pytest.fixture
def decoder(sink):
    return Inbound(5, sink)


def feed(decoder, data, pieces=None):
    """Give ``data`` in reads of the sizes in ``pieces`` (then all the rest), as far as each target takes."""
    left = memoryview(data)
    pieces = iter(pieces or ())
    while left:
        target = decoder.target()
        assert len(target) > 0
        count = min(len(target), len(left), next(pieces, len(left)))
        target[:count] = left[:count]
        decoder.received(count)
        left = left[count:]


def stream(rng, sizes):
    """Frames of all kinds, with DATA payloads of these sizes, and the calls that they must become (placed: data too)."""
    data, calls = b"", []
    for seq, size in enumerate(sizes):
        payload = rng.randbytes(size)
        data += frame(wire.DATA, seq, payload, flags=seq % 2, comm=3, tag=77)
        calls.append(("data", 5, seq % 2, 3, seq, 77, payload))
        kind = rng.choice([wire.START, wire.READY, wire.CREDIT, wire.WANT, wire.ABORT, wire.GOODBYE])
        body = rng.randbytes(rng.choice([0, 8, 30]))
        data += frame(kind, seq, body, round_=4, tag=78)
        calls.append(
            ("start", 5, 4, 0, seq, body) if kind == wire.START else ("control", 5, kind, 0, seq, body)
        )
    return data, calls


def test_a_stream_split_at_any_one_boundary_decodes_alike(sink):
    data, calls = stream(random.Random(1), [1, 15, 64])
    for cut in range(len(data) + 1):
        sink.calls.clear()
        decoder = Inbound(5, sink)
        feed(decoder, data[:cut])
        feed(decoder, data[cut:])
        assert sink.calls == calls


def test_a_stream_that_comes_byte_by_byte_decodes_alike(decoder, sink):
    data, calls = stream(random.Random(2), [1, 100, SMALL, 7])
    feed(decoder, data, [1] * len(data))
    assert sink.calls == calls


@pytest.mark.parametrize("seed", range(20))
def test_large_and_small_frames_in_random_reads_decode_alike(decoder, sink, seed):
    rng = random.Random(seed)
    sizes = [rng.choice([1, 16, SMALL - 1, SMALL, SMALL + 1, 64 * KIB, 70_000, 256 * KIB]) for _ in range(8)]
    data, calls = stream(rng, sizes)
    feed(decoder, data, [rng.randint(1, 40_000) for _ in range(200)])
    assert sink.calls == calls


def test_many_small_frames_are_decoded_from_one_read(decoder, sink):
    data = frame(wire.DATA, 0, b"x" * 40) * 1000
    target = decoder.target()
    assert len(target) >= 64 * KIB
    feed(decoder, data)
    assert len(sink.calls) == 1000
    assert not sink.placed


def test_a_whole_eager_payload_and_the_frames_around_it_come_in_one_read(decoder, sink):
    data = (
        frame(wire.START, 0, bytes(21))
        + frame(wire.DATA, 0, bytes(EAGER_STREAM))
        + frame(wire.CREDIT, 0, bytes(8))
    )
    assert len(decoder.target()) >= len(data)
    feed(decoder, data)
    assert [call[0] for call in sink.calls] == ["start", "data", "control"]
    assert not sink.placed


class TestBulk:
    LENGTH = 100_000
    HEAD = wire.data_header(1, 3, 9, 77, LENGTH)

    def test_the_payload_is_read_straight_into_the_memory_that_the_sink_names(self, decoder, sink):
        sink.memory, sink.op = bytearray(self.LENGTH), operation()
        feed(decoder, self.HEAD)
        assert sink.placed == [(5, 1, 3, 9, 77, self.LENGTH)]
        target = decoder.target()
        assert target.obj is sink.memory
        assert len(target) == self.LENGTH
        target[:10] = b"0123456789"
        decoder.received(10)
        assert len(decoder.target()) == self.LENGTH - 10
        assert bytes(sink.memory[:10]) == b"0123456789"
        decoder.received(self.LENGTH - 10)
        ((name, peer, flags, landing),) = sink.calls
        assert (name, peer, flags) == ("landed", 5, 1)
        assert landing.op is sink.op

    def test_what_came_with_the_header_is_not_lost(self, decoder, sink):
        payload = random.Random(3).randbytes(self.LENGTH)
        feed(decoder, self.HEAD + payload[:5000])
        feed(decoder, payload[5000:])
        assert sink.calls == [("data", 5, 1, 3, 9, 77, payload)]

    def test_a_payload_up_to_8_kib_is_collected_and_a_larger_one_is_placed(self, decoder, sink):
        feed(decoder, wire.data_header(0, 0, 0, 0, SMALL))
        assert not sink.placed
        feed(decoder, bytes(SMALL))
        feed(decoder, wire.data_header(0, 0, 1, 0, SMALL + 1))
        assert [length for *_, length in sink.placed] == [SMALL + 1]

    def test_the_read_after_a_bulk_payload_is_short_so_that_the_next_one_is_not_copied(self, decoder, sink):
        feed(decoder, self.HEAD + bytes(self.LENGTH))
        assert len(decoder.target()) == 4 * KIB
        feed(decoder, frame(wire.WANT))
        assert len(decoder.target()) == inbound.STAGING

    def test_nothing_beyond_the_payload_is_read_into_its_memory(self, decoder, sink):
        sink.memory, sink.op = bytearray(b"." * (self.LENGTH + 50)), operation()
        feed(decoder, self.HEAD + bytes(self.LENGTH) + frame(wire.WANT, 4))
        assert sink.memory[self.LENGTH :] == b"." * 50
        assert sink.calls[1][:3] == ("control", 5, wire.WANT)


class TestRedirect:
    LENGTH = 50_000

    def half(self, decoder, sink):
        sink.memory, sink.op = bytearray(self.LENGTH), operation()
        feed(decoder, wire.data_header(0, 0, 0, 0, self.LENGTH) + b"a" * 20_000)

    def test_the_rest_of_the_payload_goes_to_scratch(self, decoder, sink):
        self.half(decoder, sink)
        decoder.redirect(sink.op)
        assert decoder.target().obj is not sink.memory
        feed(decoder, b"b" * 30_000 + frame(wire.WANT))
        assert bytes(sink.memory) == b"a" * 20_000 + bytes(30_000)
        assert [call[0] for call in sink.calls] == ["data", "control"]

    def test_another_operations_payload_stays_where_it_is(self, decoder, sink):
        self.half(decoder, sink)
        decoder.redirect(operation())
        assert decoder.target().obj is sink.memory

    def test_nothing_under_way_is_no_error(self, decoder, sink):
        decoder.redirect(operation())
        assert len(decoder.target()) == inbound.STAGING


class TestScratch:
    def test_it_is_as_long_as_asked_and_made_once(self, decoder):
        first = decoder.scratch(10_000)
        assert len(first) == 10_000
        assert decoder.scratch(256 * KIB).obj is first.obj
        assert len(decoder.scratch(wire.MAX_DATA)) == wire.MAX_DATA


class TestLargeControl:
    def test_a_control_frame_of_the_largest_size_fits(self, decoder, sink):
        body = random.Random(4).randbytes(wire.MAX_CONTROL)
        data = frame(wire.WANT, 1) + frame(wire.ABORT, 2, body) + frame(wire.WANT, 3)
        feed(decoder, data, [100, 60_000, 7])
        assert [call[2] for call in sink.calls] == [wire.WANT, wire.ABORT, wire.WANT]
        assert sink.calls[1][-1] == body

    def test_many_of_them_need_no_more_memory_than_one(self, decoder, sink):
        for _ in range(20):
            feed(decoder, frame(wire.ABORT, 2, bytes(wire.MAX_CONTROL)), [3000])
        assert len(sink.calls) == 20
        assert len(decoder.staging) <= 2 * 64 * KIB


class TestMalformed:
    @pytest.mark.parametrize("kind", [0, wire.LAST + 1, wire.LAST + 2, 0x47, 255])
    def test_an_unknown_kind_is_refused_before_its_length_is_believed(self, decoder, kind):
        with pytest.raises(ProtocolError, match=f"rank 5 sent a frame of unknown kind {kind}"):
            feed(decoder, wire.HEADER.pack(kind, 0, 0, 0, 0, 0, 1 << 31))

    @pytest.mark.parametrize("length", [0, wire.MAX_DATA + 1, 0xFFFFFFFF])
    def test_a_data_frame_has_1_byte_to_1_mib(self, decoder, sink, length):
        with pytest.raises(ProtocolError, match=f"DATA frame of {length} bytes"):
            feed(decoder, wire.data_header(0, 0, 0, 0, length))
        assert not sink.placed

    @pytest.mark.parametrize("kind", sorted({*range(wire.START, wire.LAST + 1)}))
    def test_a_control_frame_has_at_most_64_kib(self, decoder, kind):
        with pytest.raises(ProtocolError, match="control frame of 65537 bytes"):
            feed(decoder, wire.HEADER.pack(kind, 0, 0, 0, 0, 0, wire.MAX_CONTROL + 1))

    def test_no_frame_is_decoded_twice_even_if_the_sink_raises(self, decoder, sink, monkeypatch):
        seen = []

        def raises_once(peer, kind, comm, seq, payload):
            seen.append(seq)
            if seq == 2:
                raise ZeroDivisionError

        monkeypatch.setattr(sink, "control", raises_once)
        with pytest.raises(ZeroDivisionError):
            feed(decoder, b"".join(frame(wire.WANT, seq) for seq in range(5)))
        feed(decoder, frame(wire.WANT, 5))
        assert seen == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError])
    def test_nor_if_it_raises_at_a_payload_as_a_reduce_function_may(self, decoder, sink, monkeypatch, error):
        seen = []

        def raises_once(peer, flags, comm, seq, tag, payload, owned=False):
            seen.append((seq, bytes(payload)))
            if seq == 1:
                raise error

        monkeypatch.setattr(sink, "data", raises_once)
        with pytest.raises(error):
            feed(decoder, b"".join(frame(wire.DATA, seq, b"%d" % seq) for seq in range(4)))
        feed(decoder, frame(wire.DATA, 4, b"4"))
        assert seen == [(seq, b"%d" % seq) for seq in range(5)]

    @pytest.mark.parametrize("where", ["collected", "in place"])
    def test_nor_if_it_raises_at_a_bulk_payload(self, decoder, sink, monkeypatch, where):
        bulk = b"x" * (SMALL + 1)
        if where == "in place":
            sink.memory, sink.op = bytearray(len(bulk)), operation()
        told = []

        def raises(*args):
            told.append(args)
            raise SystemExit

        with monkeypatch.context() as patch:
            patch.setattr(sink, "landed" if where == "in place" else "data", raises)
            with pytest.raises(SystemExit):
                feed(decoder, frame(wire.DATA, 1, bulk), [100])
        feed(decoder, frame(wire.DATA, 2, b"next"))
        assert len(told) == 1
        assert [(call[4], call[-1]) for call in sink.calls] == [(2, b"next")]

    def test_frames_before_the_malformed_one_count(self, decoder, sink):
        with pytest.raises(ProtocolError):
            feed(decoder, frame(wire.WANT, 1) + frame(99))
        assert len(sink.calls) == 1
