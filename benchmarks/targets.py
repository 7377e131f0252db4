"""What asynccoll is to reach, as a share of a peer's time. Knows numbers, not how they are measured.

They hold for a float32 sum over TCP on loopback, on uvloop, with ``algorithm="auto"``, on a machine with at least two
cores; `benchmarks/` compares, the tests do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["TARGETS", "target", "verdict"]

_K, _M = 1 << 10, 1 << 20

TARGETS: Final[Mapping[tuple[str, int], tuple[tuple[int, int, float], ...]]] = {
    ("gloo", 2): ((0, 4 * _K, 0.35), (64 * _K, 64 * _K, 0.35), (_M, _M, 0.7), (16 * _M, 256 * _M, 0.9)),
    ("gloo", 4): ((0, 4 * _K, 0.45), (64 * _K, 64 * _K, 0.15), (_M, _M, 0.3), (16 * _M, 256 * _M, 0.75)),
}
"""(peer, world size) -> (smallest, largest size in bytes, share) for an allreduce. Sizes between the bands have no target."""


def target(peer: str, world_size: int, size: int) -> float | None:
    """The share of ``peer``'s time to stay within; None where none is set."""
    for smallest, largest, share in TARGETS.get((peer, world_size), ()):
        if smallest <= size <= largest:
            return share
    return None


def verdict(ratio: float, share: float) -> str:
    """``"ok"`` or ``"over"``."""
    return "ok" if ratio <= share else "over"
