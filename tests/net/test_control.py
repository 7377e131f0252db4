"""Control messages: what goes in comes out, and nothing too long or too odd does."""

import asyncio
import socket
import struct

import msgpack
import pytest

from asynccoll.errors import ProtocolError
from asynccoll.net import control


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


async def test_a_message_arrives_and_nothing_behind_it_is_read(pair):
    here, there = pair
    fields = {"run": b"\x00\xff", "members": [["::1", 5], []], "offer": {1: None, "a": 1.5}}
    await control.send(here, control.encode("welcome", **fields))
    here.send(b"DATA")
    assert await control.receive(there) == {"kind": "welcome", **fields}
    assert there.recv(100) == b"DATA"


async def test_a_message_in_small_pieces_arrives(pair):
    here, there = pair
    receiving = asyncio.ensure_future(control.receive(there))
    for byte in control.encode("ready"):
        here.send(bytes([byte]))
        await asyncio.sleep(0)
    assert await receiving == {"kind": "ready"}


async def test_the_longest_message_arrives(pair):
    here, there = pair
    overhead = len(control.encode("x", body=b"")) - 4
    message = control.encode("x", body=bytes(control.MAX_CONTROL - overhead - 4))
    sending = asyncio.ensure_future(control.send(here, message))
    assert len((await control.receive(there))["body"]) > control.MAX_CONTROL - 32
    await sending


def test_a_longer_one_is_not_sent():
    with pytest.raises(ValueError, match="more than"):
        control.encode("x", body=bytes(control.MAX_CONTROL))


@pytest.mark.parametrize("length", [control.MAX_CONTROL + 1, 2**32 - 1])
async def test_a_longer_one_is_refused_before_memory_is_taken(pair, length):
    here, there = pair
    here.send(struct.pack("!I", length))
    with pytest.raises(ProtocolError, match="longer than"):
        await control.receive(there)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x00",
        msgpack.packb([1]),
        msgpack.packb({"no": "kind"}),
        msgpack.packb({"kind": 5}),
        msgpack.packb({"kind": "x"}) + b"\x00",
        msgpack.packb({"kind": "x"})[:-1],
        b"\xdf\xff\xff\xff\xff",  # a map of 2^32 - 1 entries that are not there
        b"\x81" * 2000,  # nested maps
        b"\x81\xa4kind\xa1\xff",  # text that is not UTF-8
        b"\x82\xa4kind\xa1x\x90\x01",  # a list as key
    ],
)
def test_nonsense_is_a_protocol_error(body):
    with pytest.raises(ProtocolError):
        control.decode(body)


@pytest.mark.parametrize("sent", [b"", b"\0\0", struct.pack("!I", 7) + b"abc"])
async def test_the_end_of_the_stream_is_a_connection_error(pair, sent):
    here, there = pair
    here.send(sent)
    here.close()
    with pytest.raises(ConnectionError):
        await control.receive(there)


def test_what_is_offered_looks_as_it_will_elsewhere():
    assert control.normalise({"a": (1, 2), 3: b"x"}, 100, "offer") == {"a": [1, 2], 3: b"x"}


def test_too_large_an_offer_is_named():
    with pytest.raises(ValueError, match="offer takes"):
        control.normalise({"a": bytes(100)}, 50, "offer")


def test_what_msgpack_cannot_carry_is_a_type_error():
    with pytest.raises(TypeError):
        control.normalise({"a": object()}, 50, "offer")
