"""The rendezvous as every rank but 0 sees it: find rank 0, join, link up with the others, wait for the word.

::

    dial rank 0 -> JOIN -> (PROGRESS ...) -> WELCOME -> dial lower ranks, accept higher ones -> LINKED ->
    READY

Once LINKED is sent, only rank 0 decides: this rank then waits for READY or FAILED even a little past its own
deadline, so that it does not give up on a mesh that the others were just told is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from asynccoll.errors import ProtocolError, RendezvousError, name_ranks
from asynccoll.net import control
from asynccoll.net.accepting import Acceptor, listen
from asynccoll.net.dialing import Call, dial
from asynccoll.net.handshake import NO_RUN, RUN_ID_BYTES, Answer, Hello, Purpose
from asynccoll.net.interfaces import interface_address
from asynccoll.net.launchers import Placement
from asynccoll.net.links import Links
from asynccoll.net.linktable import LinkTable
from asynccoll.net.party import Party, Trouble, text_and_missing
from asynccoll.net.roster import Entry
from asynccoll.net.sockets import close_all, format_address, reason

if TYPE_CHECKING:
    from asynccoll.net.tls import Tls

__all__ = ["Joiner"]

READY_GRACE = 2.0
"""Seconds past the deadline for rank 0's last word: it decides at its own deadline, and its clock started
elsewhere.
"""

CALLS_AT_ONCE = 32
"""Dials under way at once, so that a large mesh neither overruns every backlog nor doubles its
descriptors.
"""


class _Member(NamedTuple):
    """One rank, as the welcome describes it."""

    host: str
    port: int
    node: str
    address: str


class Joiner(Party):
    """Forms the mesh as rank ``placement.rank`` > 0."""

    def __init__(
        self,
        placement: Placement,
        secret: bytes,
        settings: Mapping[str, Any],
        init_timeout: float,
        pulse: bool,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(placement, secret, settings, init_timeout, pulse, tls)
        # The authenticated connection to rank 0, until it is handed out as the link with it.
        self._home: socket.socket | None = None
        # Where higher ranks call, and who takes their calls; the highest rank has neither.
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        # None until rank 0 has welcomed everybody.
        self._table: LinkTable | None = None
        self._members: list[_Member] = []
        self._offer: Mapping[str, Any] = {}
        # Links this rank dials, answered or not.
        self._calls: list[Call] = []
        # What rank 0 said last about who is missing; None before it has said anything.
        self._absent: frozenset[int] | None = None
        # Whether rank 0 has heard that all our links are up.
        self._linked = False
        # Set by READY: the mesh is up everywhere.
        self._ready = False

    async def form(self) -> Links:
        """Join and link up. Unless it returns, everything is closed; it leaves no task either way."""
        try:
            home = self._home = await self._find_rank_0()
            table = await self._join(home)
            await self._stop()
            # No await from here on: a cancellation could lose the sockets.
            links, pulses = table.release()
            self._home = None
        except Trouble as trouble:
            if not trouble.told:
                self._report(trouble.text, trouble.missing)
            raise self.error(trouble.text, trouble.missing) from trouble.__cause__
        except BaseException as error:
            self._report(f"it was ended by {type(error).__name__}: {error}")
            raise
        finally:
            try:
                await self._stop()
            finally:  # a second cancellation ends the wait, not the closing
                self._close()
        return Links(
            rank=self.placement.rank,
            size=self.placement.size,
            run_id=table.run_id,
            sockets=links,
            pulses=pulses,
            addresses={rank: member.address for rank, member in enumerate(self._members)},
            hosts={rank: member.node for rank, member in enumerate(self._members)},
            welcome=self._offer,
        )

    async def _stop(self) -> None:
        try:
            if self._acceptor is not None:
                await self._acceptor.stop()
        finally:
            await self.scope.stop()

    def _close(self) -> None:
        close_all(self._listener, self._home)
        if self._table is not None:
            self._table.close()

    def _hello(self, purpose: Purpose, target: int, run_id: bytes) -> Hello:
        placement = self.placement
        return Hello(purpose, placement.rank, target, placement.size, placement.generation, run_id)

    async def _find_rank_0(self) -> socket.socket:
        call = Call(self.host, self.port, self.secret, self._hello(Purpose.RENDEZVOUS, 0, NO_RUN), self.tls)
        try:
            async with asyncio.timeout_at(self.deadline):
                sock, _ = await dial(call)
        except TimeoutError:
            raise Trouble(
                f"rank 0 was not reached within {self.limit:g} s; the last attempt: {call.trouble}. Check that rank 0 "
                f"runs, and that {self.address} is its address",
                {0},
            ) from None
        except RendezvousError as error:
            raise self.translate(error, f"rank 0 at {self.address}") from error
        return sock

    async def _join(self, home: socket.socket) -> LinkTable:
        """From the JOIN to READY."""
        entry = self._open_listener(home)
        self.scope.start(self._read_home(home, control.encode("join", **entry.as_message())))
        await self.phase(lambda: self._table is not None, self._not_welcomed)
        table = self._table
        if table is None:  # the phase has just waited for it; this line tells the type checker
            raise Trouble("rank 0 sent no welcome")
        if self._listener is not None:
            self._acceptor = Acceptor(
                self._listener,
                self.secret,
                self.placement.size,
                self._judge,
                self._arrived,
                self.strangers,
                on_error=self.fail,
                tls=self.tls,
            )
            self._acceptor.start()
        lines = asyncio.Semaphore(CALLS_AT_ONCE)
        for purpose, peer in table.calls():
            # Rank 0 is called where it was found: the address it would give may be one that only it knows.
            host, port = (self.host, self.port) if peer == 0 else self._members[peer][:2]
            call = Call(host, port, self.secret, self._hello(purpose, peer, table.run_id), self.tls)
            self._calls.append(call)
            self.scope.start(self._link(call, table, lines))
        await self.phase(lambda: not table.missing, lambda: self._not_linked(table))
        self._linked = True
        try:
            await control.send(home, control.encode("linked"))
        except OSError as error:
            raise self._rank_0_left(error) from error
        await self.phase(lambda: self._ready, self._not_confirmed, grace=READY_GRACE)
        return table

    def _open_listener(self, home: socket.socket) -> Entry:
        """Listen where the road to rank 0 begins, the one address that is known to lead out of this host, or on the interface
        that was asked for.
        """
        placement = self.placement
        host, *rest = home.getsockname()
        own = format_address(host, rest[0])
        if placement.interface is not None:
            try:
                host, *rest = interface_address(placement.interface, home.family)
            except LookupError as error:
                raise Trouble(
                    f"rank {placement.rank} cannot listen: ASYNCCOLL_SOCKET_IFNAME={placement.interface!r} {error.args[0]}",
                    {placement.rank},
                ) from error
        if placement.rank < placement.size - 1:
            try:
                self._listener = listen((home.family, (host, 0, *rest[1:])), placement.size, reuse=False)
            except OSError as error:
                raise Trouble(
                    f"rank {placement.rank} cannot listen on {host}: {reason(error)}",
                    {placement.rank},
                ) from error
        return Entry(
            rank=placement.rank,
            size=placement.size,
            peer=own,
            host=host,
            port=0 if self._listener is None else self._listener.getsockname()[1],
            node=self.node,
            pid=self.pid,
            settings=self.settings,
        )

    async def _read_home(self, home: socket.socket, join: bytes) -> None:
        try:
            await control.send(home, join)
            while not self._ready:
                self._heard(home, await control.receive(home))
                self.wake()
        except OSError as error:
            self.fail(self._rank_0_left(error))
        except ProtocolError as error:
            self.fail(Trouble(f"rank 0 at {self.address} broke the protocol: {error}"))
        except Trouble as trouble:
            self.fail(trouble)

    def _heard(self, home: socket.socket, message: Mapping[str, Any]) -> None:
        """One message from rank 0."""
        kind = message["kind"]
        if kind == "progress":
            _, self._absent = text_and_missing(message)
        elif kind == "failed":
            text, missing = text_and_missing(message)
            raise Trouble(text, missing, told=True)
        elif kind == "welcome" and self._table is None:
            self._welcomed(home, message)
        elif kind == "ready" and self._linked:
            self._ready = True
        else:
            raise ProtocolError(f"a message {kind!r} does not belong here")

    def _welcomed(self, home: socket.socket, message: Mapping[str, Any]) -> None:
        placement = self.placement
        try:
            run_id, offer = message["run"], message["offer"]
            members = [_Member(*member) for member in message["members"]]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"the welcome is malformed: {error}") from error
        if (
            not isinstance(run_id, bytes)
            or len(run_id) != RUN_ID_BYTES
            or len(members) != placement.size
            or not isinstance(offer, dict)
        ):
            raise ProtocolError("the welcome is malformed")
        self._members, self._offer = members, offer
        self._table = LinkTable(
            placement.rank, placement.size, placement.generation, run_id, pulse=self.pulse
        )
        self._table.take(Purpose.LINK, 0, home)
        self._absent = frozenset()

    def _judge(self, hello: Hello) -> Answer:
        table, placement = self._table, self.placement
        if table is None:
            raise RuntimeError("calls are taken only after the welcome")
        return Answer(table.judge(hello), placement.rank, placement.size, placement.generation, table.run_id)

    def _arrived(self, hello: Hello, sock: socket.socket) -> None:
        """A higher rank's call, proved and judged."""
        if self._table is not None:
            self._table.take(hello.purpose, hello.rank, sock)
            self.wake()

    async def _link(self, call: Call, table: LinkTable, lines: asyncio.Semaphore) -> None:
        peer = call.hello.target
        try:
            async with lines:
                sock, _ = await dial(call)
                table.take(call.hello.purpose, peer, sock)
        except RendezvousError as error:
            where = format_address(call.host, call.port)
            self.fail(Trouble(f"rank {self.placement.rank} cannot link with rank {peer} at {where}: {error}"))
        self.wake()

    def _not_welcomed(self) -> Trouble:
        who = (
            f"{name_ranks(self._absent)} did not join" if self._absent else "rank 0 did not complete the mesh"
        )
        return Trouble(f"{who} within {self.limit:g} s", self._absent or ())

    def _not_linked(self, table: LinkTable) -> Trouble:
        missing = table.missing
        tried = "".join(
            f" Calling rank {call.hello.target} at {format_address(call.host, call.port)}: {call.trouble or 'not tried yet'}."
            for call in self._calls
            if call.hello.target in missing
        )
        return Trouble(
            f"rank {self.placement.rank} has no link with {name_ranks(missing)} within {self.limit:g} s.{tried}"
            f"{self.strangers.note()} Check that hosts can reach one another on all TCP ports",
            missing,
        )

    def _not_confirmed(self) -> Trouble:
        return Trouble(
            f"all joined, but rank 0 did not confirm within {self.limit:g} s that every rank has its links",
            self._absent or (),
        )

    def _rank_0_left(self, error: OSError) -> Trouble:
        return Trouble(
            f"rank 0 at {self.address} left while the mesh was forming ({reason(error)}). Look at its output for the "
            "cause",
            {0},
        )

    def _report(self, text: str, missing: frozenset[int] = frozenset()) -> None:
        """Tell rank 0 why this rank leaves, if that can be done at once. Never after READY: then the stream
        is data.
        """
        if self._home is not None and not self._ready:
            with contextlib.suppress(OSError):  # gone, or no room: it will see the end of the stream
                self._home.send(control.encode("failed", text=text, missing=sorted(missing)))
