"""Liveness in the simulation: who hears nothing of whom, and for how long. Knows stopped ranks and stalled links, not frames.

Real ranks beat on a second connection. Here the network knows when no beat could arrive: the observer's patience runs while its
peer is stopped or dead, or while the link from it is stalled, and anew when the observer itself was stopped. Whoever can be heard
again says whom it has given up. A beat that could arrive is not sent, so that a program which would hang has no timer left, and is
found.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynccoll.sim.driver import SimDriver, SimNetwork

__all__ = ["Pulses"]


class Pulses:
    """The liveness detectors of all ranks of a network."""

    def __init__(self, network: SimNetwork, timeout: float) -> None:
        self.timeout = timeout
        """Seconds of silence that make a rank lost."""
        self._network = network
        self._clocks: dict[tuple[int, int], asyncio.TimerHandle] = {}
        """(observer, peer) -> when its patience ends."""

    def listen(self) -> None:
        """Something has changed: start the clocks of those who hear nothing from now on, stop those of the others."""
        drivers = self._network.drivers
        for observer in drivers:
            for peer in drivers:
                if observer is not peer:
                    self._check(observer, peer)

    def parted(self, observer: int, peer: int) -> None:
        """``observer`` listens to ``peer`` no more."""
        clock = self._clocks.pop((observer, peer), None)
        if clock is not None:
            clock.cancel()

    def _check(self, observer: SimDriver, peer: SimDriver) -> None:
        pair = observer.engine.rank, peer.engine.rank
        deaf = observer.frozen or observer.closed
        mute = peer.frozen or peer.crashed or peer.link(pair[0]).stalled
        if pair[0] in peer.untold and not (deaf or mute or peer.closed):
            observer.evicted(pair[1])
        quiet = mute and not deaf and not observer.parted(pair[1])
        clock = self._clocks.get(pair)
        if quiet and clock is None:
            self._clocks[pair] = self._network.loop.call_later(self.timeout, self._expire, observer, peer)
        elif not quiet and clock is not None:
            clock.cancel()
            del self._clocks[pair]
            if not mute:
                self.heard_again(*pair)

    def heard_again(self, observer: int, peer: int) -> None:
        """``peer`` was silent for less than the timeout."""

    def _expire(self, observer: SimDriver, peer: SimDriver) -> None:
        pair = observer.engine.rank, peer.engine.rank
        del self._clocks[pair]
        observer.silent(pair[1], self.timeout)
