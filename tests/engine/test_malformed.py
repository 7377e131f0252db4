"""Whatever bytes a peer sends, the engine goes on or gives that peer up: nothing else is raised, and memory is bounded."""

import random
import struct

import pytest
from wires import CALL, KIB, TAG, Wires, frame

from asynccoll.engine import wire
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.transfers import FoldBytes, RecvBytes, SendBytes
from asynccoll.errors import PeerLost

FRAMES = 2500
"""Mutated frames for each of the seeds below: 20,000 in all."""

EXTREMES = [
    0,
    1,
    2,
    7,
    8,
    15,
    16,
    255,
    256,
    0x7FFF,
    0xFFFF,
    0x10000,
    1 << 20,
    0x7FFFFFFF,
    0xFFFFFFFF,
    (1 << 64) - 1,
]
RECORD = {"type": "ValueError", "message": "m", "traceback": "t", "pickle": None}
BODIES = [
    {"reason": "cancel"},
    {"reason": "closed", "cause": "x"},
    {"reason": "error", "error": RECORD},
    {"reason": "mismatch", "limit": 0.0, "fields": CALL.fields(), "site": "a.py:1"},
    {"reason": "timeout", "limit": 1.5, "fields": CALL.fields(), "site": ""},
    {"reason": "answer", "absent": True},
    {"reason": "answer", "present": True},
]
FIELDS = [(0, "B"), (1, "B"), (2, "H"), (4, "I"), (8, "Q"), (16, "I"), (20, "I")]
"""Offset and format of each field of a header."""


def busy_rank():
    """Rank 0 of 3 in the midst of everything: peers 1 and 2 are made up."""
    wires = Wires(3, [0])
    wires.start(0)
    wires.feed(0, 2, start(0, 0))
    wires.feed(0, 1, start(0, 1))
    assert len(wires.ended[0]) == 1
    wires.start(0, RecvBytes(1, memoryview(bytearray(10))), timeout=5.0)
    wires.start(0, RecvBytes(1, memoryview(bytearray(100_000))))
    wires.start(0, FoldBytes(1, 100_000, lambda at, piece: None))
    wires.start(0, SendBytes(1, memoryview(bytearray(300_000))), call=Fingerprint("other"))
    wires.start(0, RecvBytes(1, memoryview(bytearray(4))), key="a", timeout=5.0)
    wires.start(0, key="b")
    wires.take(0, 1)
    return wires


def start(seq, round_, value=0):
    strict, _, tag = digests(CALL)
    return wire.start_frame(round_, 0, seq, tag, (strict, value, wire.NO_DEADLINE, 7), 3)


def valid(rng):
    """A frame that peer 1 might send."""
    seq = rng.choice([0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 70_000, wire.KEYED])
    match rng.randrange(11):
        case 8:
            return wire.key_frame(0, rng.choice(EXTREMES), rng.choice(["a", "b", "", "ä" * 256]))
        case 9:
            return wire.unkey_frame(
                0, seq, rng.choice([*BODIES, {"reason": "lost", "ranks": [2], "why": "x"}])
            )
        case 10:
            return wire.grant_frame(0, wire.KEYED + rng.choice([0, 1]), seq)
        case 0:
            return start(seq, rng.choice([0, 1]), rng.choice([0, 5]))
        case 1:
            return wire.ready_frame(0, seq, rng.choice(EXTREMES))
        case 2:
            return wire.want_frame(0, seq)
        case 3:
            return wire.credit_frame(rng.choice([0, 1, 64 * KIB]))
        case 4:
            return wire.abort_frame(0, seq, rng.choice(BODIES))
        case 5:
            return wire.goodbye_frame(0, {"cause": "bye", "next": {0: rng.randrange(8)}})
        case _:
            size = rng.choice([1, 8, 10, 11, 1000, 9000, 30_000])
            return frame(wire.DATA, seq, bytes(size), flags=rng.choice([0, 1]), tag=TAG)


def mutated(rng):
    """A valid frame with one or two things wrong."""
    data = bytearray(valid(rng))
    for _ in range(rng.randint(1, 2)):
        match rng.randrange(7):
            case 0 | 1:
                at, code = rng.choice(FIELDS)
                value = rng.choice(EXTREMES) & ((1 << 8 * struct.calcsize(code)) - 1)
                if at + struct.calcsize(code) <= len(data):
                    struct.pack_into("<" + code, data, at, value)
            case 2:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 3:
                del data[rng.randrange(len(data)) :]
                data = data or bytearray(1)
            case 4:
                at = rng.randrange(len(data) + 1)
                data[at:at] = rng.randbytes(rng.randint(1, 30))
            case 5:  # a payload of another length, rightly announced
                payload = rng.randbytes(rng.randint(0, 60))
                data[24:] = payload
                if len(data) >= 24:
                    struct.pack_into("<I", data, 20, len(data) - 24)
            case _:
                data += valid(rng)
    return bytes(data)


def held(wires):
    """Bytes that the engine keeps for frames that it has not handed on."""
    engine = wires.engines[0]
    group = engine.group()
    early = sum(len(payload) for e in group.early.values() for *_, payload in e.payload)
    records = sum(len(payload) for e in group.early.values() for payload in e.records.values())
    backlog = sum(len(piece) for op in engine.pending() for s in op.inputs.values() for piece in s.backlog)
    staged = sum(len(inbound.staging) for inbound in engine._inbounds.values())
    return early + records + backlog + staged


def abuse(rng, make, count):
    """Feed ``count`` frames from ``make`` to busy ranks; each goes on until it gives the peer up."""
    fed = given_up = 0
    while fed < count:
        wires = busy_rank()
        for _ in range(rng.randint(1, 10)):
            data = make(rng)
            wires.feed(0, 1, data, rng.choice([None, 1, 7] if len(data) < 300 else [None, 5000]))
            fed += 1
            if wires.broken[0]:
                break
        assert held(wires) < 1 << 20
        assert set(wires.broken[0]) <= {1}
        # What was kept for later must not make trouble later.
        for _ in range(3):
            wires.start(0, RecvBytes(1, memoryview(bytearray(4))))
        wires.flush(0)
        wires.tick(6.0)
        wires.tick(7.0)
        wires.feed(0, 2, start(2, 0))
        assert set(wires.broken[0]) <= {1}
        if wires.broken[0]:
            given_up += 1
            if not wires.engines[0].left(1):
                assert not wires.engines[0].pending()
                assert any(isinstance(error, PeerLost) for error in wires.results(0))
    return given_up


@pytest.mark.parametrize("seed", range(8))
def test_mutated_frames_break_the_peer_or_are_harmless(seed):
    assert abuse(random.Random(seed), mutated, FRAMES) > FRAMES // 20


@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_break_the_peer(seed):
    assert abuse(random.Random(seed), lambda rng: rng.randbytes(rng.randint(24, 200)), 500) > 450


def odd(rng, depth=2):
    """Any value that msgpack carries."""
    choices = [None, True, -1, 1 << 63, 0.5, float("nan"), "", "cancel", "mismatch", b"\x80", "ä" * 50]
    if depth:
        inner = odd(rng, depth - 1)
        choices += [[inner], {"a": inner}, {1: inner}, CALL.fields(), RECORD]
    return rng.choice(choices)


def odd_body(rng):
    """An ABORT or GOODBYE whose map holds wrong things."""
    if rng.random() < 0.2:
        return wire.goodbye_frame(0, {"cause": odd(rng), "next": rng.choice([odd(rng), {0: odd(rng)}])})
    body = dict(rng.choice(BODIES))
    key = rng.choice([*body, "reason", "error", "fields", "site", "limit", "cause", "absent"])
    if rng.random() < 0.3 and isinstance(body.get("error"), dict):
        body["error"] = {**RECORD, rng.choice([*RECORD, "more"]): odd(rng)}
    elif rng.random() < 0.3 and isinstance(body.get("fields"), dict):
        body["fields"] = {**body["fields"], rng.choice([*body["fields"], "more"]): odd(rng)}
    else:
        body[key] = odd(rng)
    return wire.abort_frame(0, rng.choice([0, 1, 2, 3, 4, 5, 6]), body)


@pytest.mark.parametrize("seed", range(4))
def test_well_formed_maps_with_wrong_contents_break_the_peer_or_are_harmless(seed):
    assert abuse(random.Random(seed), odd_body, 1000) > 20
