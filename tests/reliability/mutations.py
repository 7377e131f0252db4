"""Damage to frames, drawn from a seeded generator. Knows the header's layout, not what frames mean."""

import struct

from asynccoll.engine.wire import HEADER_SIZE

EXTREMES = (
    *(0, 1, 2, 3, 7, 8, 9, 15, 16, 24, 255, 256, 0x7FFF, 0xFFFF, 0x10000, 1 << 20, (1 << 20) + 1),
    *(0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, 1 << 62, (1 << 62) + 1, 1 << 63, (1 << 63) + (1 << 40)),
    *((1 << 63) + (2 << 40) + 1, (1 << 64) - 1),
)
FIELDS = (
    (0, "<B", 8),
    (1, "<B", 8),
    (2, "<H", 16),
    (4, "<I", 32),
    (8, "<Q", 64),
    (16, "<I", 32),
    (20, "<I", 32),
)
"""Offset, format and bits of each field of a header."""
_LENGTH = 20
SMALL = 400
"""Frames that are put together with others are at most that long."""


def _field(rng, data, pool):
    at, code, bits = FIELDS[int(rng.random() * 7)]
    if rng.random() < 0.5:
        value = EXTREMES[int(rng.random() * len(EXTREMES))]
    else:
        value = struct.unpack_from(code, data, at)[0] + (1, -1, 2, 8)[int(rng.random() * 4)]
    struct.pack_into(code, data, at, value & ((1 << bits) - 1))


def _bit(rng, data, pool):
    data[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)


def _payload_bit(rng, data, pool):
    if len(data) > HEADER_SIZE:
        data[HEADER_SIZE + int(rng.random() * (len(data) - HEADER_SIZE))] ^= 1 << int(rng.random() * 8)
    else:
        _bit(rng, data, pool)


def _payload_number(rng, data, pool):
    """An extreme number somewhere in the payload, where the described lengths stand."""
    at = HEADER_SIZE + int(rng.random() * max(1, len(data) - HEADER_SIZE))
    value = EXTREMES[int(rng.random() * len(EXTREMES))]
    code, bits = (("<I", 32), ("<Q", 64), ("<H", 16))[int(rng.random() * 3)]
    if at + bits // 8 <= len(data):
        struct.pack_into(code, data, at, value & ((1 << bits) - 1))
    else:
        _bit(rng, data, pool)


def _resized(rng, data, pool):
    """A payload that is longer or shorter, rightly announced."""
    end = HEADER_SIZE + int(rng.random() * (len(data) - HEADER_SIZE + 1))
    del data[end:]
    if rng.random() < 0.5:
        data += rng.randbytes(1 + int(rng.random() * 40))
    struct.pack_into("<I", data, _LENGTH, len(data) - HEADER_SIZE)


def _spliced(rng, data, pool):
    """The header of one frame, the payload of another, rightly announced."""
    other = pool[int(rng.random() * len(pool))]
    data[HEADER_SIZE:] = other[HEADER_SIZE:]
    struct.pack_into("<I", data, _LENGTH, len(data) - HEADER_SIZE)


def _of_another(rng, data, pool):
    """The kind of one frame, the operation of another."""
    other = pool[int(rng.random() * len(pool))]
    data[4:16] = other[4:16]


def _twice(rng, data, pool):
    if len(data) <= SMALL:
        data += bytes(data)
    else:
        _field(rng, data, pool)


def _cut_short(rng, data, pool):
    """The rest is missing, so what follows is taken for it."""
    del data[1 + int(rng.random() * (len(data) - 1)) :]


def _inserted(rng, data, pool):
    at = int(rng.random() * len(data))
    data[at:at] = rng.randbytes(1 + int(rng.random() * 20))


def _noise(rng, data, pool):
    data[:] = rng.randbytes(HEADER_SIZE + int(rng.random() * 60))


DAMAGES = (
    *(
        _field,
        _field,
        _field,
        _bit,
        _payload_bit,
        _payload_bit,
        _payload_bit,
        _payload_bit,
        _payload_bit,
        _payload_number,
    ),
    *(_payload_number, _resized, _spliced, _of_another, _of_another, _twice),
)
DESYNC = (_cut_short, _inserted, _noise)
"""Rarer, since hardly anything that follows is taken for a frame."""


def mutated(rng, frame, pool):
    """``frame`` with one to three things wrong. ``pool``: frames to take parts from."""
    data = bytearray(frame)
    if rng.random() < 0.03:
        DESYNC[int(rng.random() * 3)](rng, data, pool)
        return data
    chance = rng.random()
    DAMAGES[int(rng.random() * 16)](rng, data, pool)
    if chance < 0.2:
        DAMAGES[int(rng.random() * 16)](rng, data, pool)
        if chance < 0.05:
            DAMAGES[int(rng.random() * 16)](rng, data, pool)
    return data
