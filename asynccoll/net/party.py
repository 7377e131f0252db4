"""What rank 0 and the others share while the mesh forms: a deadline, a verdict, waiting. Knows no messages."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from asynccoll.errors import AuthenticationError, ProtocolError, RendezvousError
from asynccoll.net.accepting import Strangers
from asynccoll.net.launchers import Placement
from asynccoll.net.scope import TaskScope
from asynccoll.net.sockets import format_address, host_identity

if TYPE_CHECKING:
    from asynccoll.net.tls import Tls

__all__ = ["Party", "Trouble", "text_and_missing"]


class Trouble(Exception):
    """Why the mesh cannot form. Never leaves this package: it becomes a `RendezvousError` on every rank.

    Attributes:
        text: the reason, the same on all ranks.
        missing: the ranks that are not there.
        told: whether it came from rank 0, which then need not be told.
        late_ranks: whether ranks that have not joined yet should still be told by rank 0.
    """

    def __init__(
        self, text: str, missing: Iterable[int] = (), *, told: bool = False, late_ranks: bool = True
    ) -> None:
        super().__init__(text)
        self.text = text
        self.missing = frozenset(missing)
        self.told = told
        self.late_ranks = late_ranks


def text_and_missing(message: Mapping[str, Any]) -> tuple[str, frozenset[int]]:
    """The fields of PROGRESS and FAILED. ProtocolError if they are not what they should be."""
    text, missing = message.get("text"), message.get("missing")
    if (
        not isinstance(text, str)
        or not isinstance(missing, list)
        or not all(type(rank) is int for rank in missing)
    ):
        raise ProtocolError(f"a message {message['kind']!r} is malformed")
    return text, frozenset(missing)


class Party:
    """One rank's side of the rendezvous. Must be made inside the loop that forms the mesh."""

    def __init__(
        self,
        placement: Placement,
        secret: bytes,
        settings: Mapping[str, Any],
        init_timeout: float,
        pulse: bool,
        tls: Tls | None = None,
    ) -> None:
        if placement.host is None or placement.port is None:
            raise ValueError("a world of more than one rank needs the host and port of rank 0")
        self.placement = placement
        self.secret = secret
        # What must be equal on all ranks, as msgpack gives it back.
        self.settings = settings
        # Whether each pair makes a second connection for heartbeats.
        self.pulse = pulse
        # With what every connection begins, or None.
        self.tls = tls
        self.host, self.port = placement.host, placement.port
        self.address = format_address(placement.host, placement.port)
        self.node = host_identity()
        self.pid = os.getpid()
        self.limit = init_timeout
        self.started = asyncio.get_running_loop().time()
        # Loop time at which this rank gives up; None: never.
        self.deadline = self.started + init_timeout if math.isfinite(init_timeout) else None
        self.strangers = Strangers(f"rank {placement.rank} of {placement.size}")
        self.scope = TaskScope(self.fail)
        # The first thing that went wrong; later ones are its consequences.
        self.failure: BaseException | None = None
        self._wake = asyncio.Event()

    def fail(self, error: BaseException) -> None:
        """The mesh cannot form. The first reason stands."""
        if self.failure is None:
            self.failure = error
        self.wake()

    def wake(self) -> None:
        """Something changed that `until` may be waiting for."""
        self._wake.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``; raise the failure if that comes first."""
        while not condition():
            if self.failure is not None:
                raise self.failure
            await self.changed()

    async def changed(self) -> None:
        """Wait for the next `wake`."""
        self._wake.clear()
        await self._wake.wait()

    async def phase(
        self, condition: Callable[[], bool], trouble: Callable[[], Trouble], *, grace: float = 0.0
    ) -> None:
        """`until`, but raise ``trouble()`` at the deadline (plus ``grace`` seconds)."""
        try:
            async with asyncio.timeout_at(None if self.deadline is None else self.deadline + grace):
                await self.until(condition)
        except TimeoutError:
            raise trouble() from None

    @property
    def elapsed(self) -> float:
        """Seconds since this rank began."""
        return asyncio.get_running_loop().time() - self.started

    def error(self, text: str, missing: Iterable[int] = ()) -> RendezvousError:
        """What the caller of `form_mesh` gets to see."""
        return RendezvousError(
            self._sentence(text), address=self.address, elapsed=self.elapsed, missing=missing
        )

    def translate(self, error: RendezvousError, where: str) -> RendezvousError:
        """A handshake's verdict, with the address and the time that the handshake does not know."""
        kind = AuthenticationError if isinstance(error, AuthenticationError) else RendezvousError
        return kind(
            self._sentence(f"{where}: {error}"),
            address=self.address,
            elapsed=self.elapsed,
            missing=error.missing,
        )

    def _sentence(self, text: str) -> str:
        rank, size = self.placement.rank, self.placement.size
        stop = "" if text.endswith((".", "!", "?")) else "."
        return (
            f"rank {rank} of {size}: no mesh at {self.address} after {self.elapsed:.1f} s "
            f"(limit {self.limit:g} s): {text}{stop}"
        )
