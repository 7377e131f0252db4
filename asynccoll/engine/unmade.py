"""What peers send for communicators that this rank has not made yet. Knows frames and a bound, not what they mean.

Making a communicator takes no communication, so a member may use it before another has made it. Its frames are kept, within
a bound for each peer, and played back when the communicator is made.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asynccoll.errors import ProtocolError

__all__ = ["Frame", "Unmade"]

_LIMIT: Final = 1 << 23
"""Bytes kept of one peer, for all communicators: more than 32,768 operations under way can send without a grant."""
_OVERHEAD: Final = 128
"""Bytes that a kept frame costs besides its payload, about."""


class Frame(NamedTuple):
    """One frame, as it came."""

    peer: int
    kind: int
    flags: int
    round_: int
    seq: int
    tag: int
    payload: memoryview

    @property
    def cost(self) -> int:
        """Bytes that it counts for."""
        return len(self.payload) + _OVERHEAD


class Unmade:
    """Frames for unknown communicators."""

    __slots__ = ("_bytes", "_frames")

    def __init__(self) -> None:
        self._frames: dict[int, list[Frame]] = {}
        """Id of the communicator -> frames in the order in which they came."""
        self._bytes: dict[int, int] = {}
        """World rank -> cost of its frames."""

    def keep(self, comm: int, frame: Frame) -> None:
        """Keep a frame; `ProtocolError` if its sender has sent too many."""
        held = self._bytes.get(frame.peer, 0) + frame.cost
        if held > _LIMIT:
            raise ProtocolError(
                f"rank {frame.peer} sent more than {_LIMIT} bytes for communicators that this rank has not made; every member "
                "of a group has to call new_group, in the same order"
            )
        self._bytes[frame.peer] = held
        self._frames.setdefault(comm, []).append(frame)

    def take(self, comm: int) -> list[Frame]:
        """The frames kept for ``comm``, which is made now."""
        frames = self._frames.pop(comm, [])
        for frame in frames:
            self._bytes[frame.peer] -= frame.cost
        return frames

    def forget(self, peer: int, but: int) -> None:
        """The peer is gone. Its frames of kind ``but`` stay: they mean something without it."""
        self._bytes.pop(peer, None)
        for comm in list(self._frames):
            kept = [frame for frame in self._frames[comm] if frame.peer != peer or frame.kind == but]
            if kept:
                self._frames[comm] = kept
            else:
                del self._frames[comm]
            for frame in kept:
                if frame.peer == peer:
                    self._bytes[peer] = self._bytes.get(peer, 0) + frame.cost
