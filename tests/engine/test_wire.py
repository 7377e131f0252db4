"""Frames are these bytes, whatever machine and version packs them; everything else is refused."""

import msgpack
import pytest
from wires import frames

from asynccoll.engine import wire
from asynccoll.errors import ProtocolError


def test_a_header_has_24_bytes_in_the_documented_places():
    packed = wire.HEADER.pack(0x11, 0x22, 0x4433, 0x88776655, 0x1716151413121110, 0x23222120, 0x33323130)
    assert packed.hex() == "112233445566778810111213141516172021222330313233"
    assert wire.HEADER_SIZE == 24


def test_kinds_have_the_numbers_that_are_on_the_wire():
    kinds = (wire.DATA, wire.START, wire.READY, wire.CREDIT, wire.WANT, wire.ABORT, wire.GOODBYE)
    assert kinds == (1, 2, 3, 4, 5, 6, 7)
    assert wire.EAGER == 1


def test_limits_are_those_that_peers_rely_on():
    assert wire.MAX_DATA == 1024 * 1024
    assert wire.MAX_CONTROL == 64 * 1024


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        (wire.data_header(1, 2, 3, 4, 5), "01 01 0000 02000000 0300000000000000 04000000 05000000"),
        (wire.want_frame(2, 3), "05 00 0000 02000000 0300000000000000 00000000 00000000"),
        (
            wire.ready_frame(2, 3, 0x0102030405),
            "03 00 0000 02000000 0300000000000000 00000000 08000000 0504030201000000",
        ),
        (wire.credit_frame(9), "04 00 0000 00000000 0000000000000000 00000000 08000000 0900000000000000"),
        (
            wire.start_frame(7, 2, 3, 4, (5, 6, 8, 0b101), 9),
            "02 00 0700 02000000 0300000000000000 04000000 16000000"
            "0500000000000000 0600000000000000 08000000 0500",
        ),
        (wire.abort_frame(2, 3, {"a": 1}), "06 00 0000 02000000 0300000000000000 00000000 04000000 81a16101"),
        (wire.goodbye_frame(0, {}), "07 00 0000 00000000 0000000000000000 00000000 01000000 80"),
    ],
    ids=["DATA", "WANT", "READY", "CREDIT", "START", "ABORT", "GOODBYE"],
)
def test_each_frame_is_these_bytes(packed, expected):
    assert packed.hex() == expected.replace(" ", "")


@pytest.mark.parametrize("size", [2, 7, 8, 9, 64, 1000])
def test_a_record_comes_back_whatever_the_world_size(size):
    record = ((1 << 64) - 1, 0, wire.NO_DEADLINE, (1 << size) - 1)
    (start,) = frames(wire.start_frame(0, 0, 0, 0, record, size))
    assert wire.parse_start(memoryview(start.payload), size) == (record, b"")
    assert len(start.payload) == 20 + -(-size // 8)


@pytest.mark.parametrize("size", [2, 8, 9, 64])
@pytest.mark.parametrize("nbytes", [1, 8, 256])
def test_a_block_travels_behind_the_record(size, nbytes):
    block = memoryview(bytes(range(256)))[:nbytes]
    (start,) = frames(wire.start_frame(0, 0, 0, 0, (1, 2, 3, 1), size, block))
    assert wire.parse_start(memoryview(start.payload), size) == ((1, 2, 3, 1), block)


@pytest.mark.parametrize("change", [-1, wire.MAX_BLOCK + 1])
def test_a_record_of_another_length_is_refused(change):
    payload = bytes(20 + 1 + change)
    with pytest.raises(ProtocolError, match="does not fit a group of 8"):
        wire.parse_start(memoryview(payload), 8)


def test_a_record_that_names_ranks_outside_the_group_is_refused():
    with pytest.raises(ProtocolError, match="outside its group of 3"):
        wire.parse_start(memoryview(bytes(20) + b"\x08"), 3)


def test_no_deadline_is_not_a_number_of_milliseconds():
    assert wire.NO_DEADLINE == 2**32 - 1


@pytest.mark.parametrize("length", [0, 7, 9])
def test_a_number_has_8_bytes(length):
    with pytest.raises(ProtocolError, match="expected 8 bytes"):
        wire.parse_u64(memoryview(bytes(length)))


def test_a_control_payload_is_a_map():
    assert wire.control_payload(memoryview(msgpack.packb({"reason": "cancel"}))) == {"reason": "cancel"}
    for other in ([], 1, None, "text"):
        with pytest.raises(ProtocolError, match="not a map"):
            wire.control_payload(memoryview(msgpack.packb(other)))


@pytest.mark.parametrize("payload", [b"", b"\x81", b"\xc1", b"\x80\x80", b"\x81\xa1\xff\x01"])
def test_garbage_in_a_control_payload_is_a_protocol_error(payload):
    with pytest.raises(ProtocolError):
        wire.control_payload(memoryview(payload))


def test_a_body_over_the_limit_never_becomes_a_frame():
    with pytest.raises(ValueError, match="over the limit of 65536"):
        wire.abort_frame(0, 0, {"text": "x" * wire.MAX_CONTROL})
