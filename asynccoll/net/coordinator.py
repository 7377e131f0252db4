"""The rendezvous as rank 0 sees it: collect the ranks, welcome them, see them linked, give the word.

Every verdict is rank 0's. What is wrong with one rank is told to all, and for a moment also to those who come
late, so that nobody sits out a long timeout for a mesh that can no longer form.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asynccoll.errors import ProtocolError, name_ranks
from asynccoll.net import control
from asynccoll.net.accepting import HANDSHAKE_TIMEOUT, Acceptor
from asynccoll.net.handshake import RUN_ID_BYTES, Answer, Hello, Purpose, Status
from asynccoll.net.launchers import Placement
from asynccoll.net.links import Links
from asynccoll.net.linktable import LinkTable
from asynccoll.net.party import Party, Trouble, text_and_missing
from asynccoll.net.roster import Entry, Roster
from asynccoll.net.secret import is_loopback
from asynccoll.net.sockets import close_all, peer_name, reason
from asynccoll.net.station import open_station

if TYPE_CHECKING:
    from asynccoll.net.tls import Tls

__all__ = ["Coordinator"]

PROGRESS_INTERVAL = 0.05
"""Seconds between two reports of who is missing: W joins in a burst cost W messages, not W squared."""

FAREWELL = 2.0
"""Seconds for telling a refusal to ranks that have not called yet, and for those told to close their ends."""


class _Member:
    """A process that has joined, or tried to."""

    def __init__(self, entry: Entry, sock: socket.socket) -> None:
        self.entry = entry
        self.sock = sock
        # Held while a message is being written, so that two never mix.
        self.writing = asyncio.Lock()
        # It has all its links.
        self.linked = False
        # It has closed its end.
        self.gone = False

    async def send(self, message: bytes) -> None:
        """Write ``message``. A broken connection is left for the reader to report, which knows more."""
        async with self.writing:
            try:
                await control.send(self.sock, message)
            except OSError:
                return

    def send_now(self, message: bytes) -> None:
        """Write ``message`` if the kernel takes it whole at once, as it does unless the process has stopped
        reading.
        """
        if not self.writing.locked():
            try:
                self.sock.send(message)
            except OSError:
                return


class Coordinator(Party):
    """Forms the mesh as rank 0."""

    def __init__(
        self,
        placement: Placement,
        secret: bytes,
        settings: Mapping[str, Any],
        init_timeout: float,
        pulse: bool,
        offer: Mapping[str, Any],
        tls: Tls | None = None,
    ) -> None:
        super().__init__(placement, secret, settings, init_timeout, pulse, tls)
        self._offer = offer
        own = Entry(
            rank=0,
            size=placement.size,
            peer=self.address,
            host=self.host,
            port=self.port,
            node=self.node,
            pid=self.pid,
            settings=settings,
        )
        self._roster = Roster(own)
        # Everyone who sent a JOIN, refused or not, in order of arrival.
        self._members: list[_Member] = []
        # Every connection that got through the handshake to register, until `Links` has it or it is closed.
        self._guests: set[socket.socket] = set()
        run_id = os.urandom(RUN_ID_BYTES)
        self._table = LinkTable(0, placement.size, placement.generation, run_id, pulse=pulse)
        # Set when `missing` has changed and the members do not know yet.
        self._news = asyncio.Event()
        # What everybody is told once the mesh has failed.
        self._farewell: bytes | None = None
        # Set just before the first READY: from then on streams carry data.
        self._ready = False
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None

    async def form(self) -> Links:
        """Collect, welcome, confirm. Unless it returns, everything is closed; it leaves no task either
        way.
        """
        try:
            await self._collect()
            await self._stop()
            # No await from here on: all are told, and a cancellation could lose the sockets.
            self._confirm()
            links, pulses = self._table.release()
            # The others have proved themselves and sent no JOIN: rank k, whose answer was lost, has called again.
            self._guests.difference_update(links.values())
        except Trouble as trouble:
            await self._say_farewell(trouble)
            raise self.error(trouble.text, trouble.missing) from trouble.__cause__
        except BaseException as error:
            self._tell_all(
                f"rank 0 at {self.address} was ended by {type(error).__name__}: {error}", frozenset({0})
            )
            raise
        finally:
            try:
                await self._stop()
            finally:  # a second cancellation ends the wait, not the closing
                self._close()
        entries = self._roster.entries
        return Links(
            rank=0,
            size=self.placement.size,
            run_id=self._table.run_id,
            sockets=links,
            pulses=pulses,
            addresses={rank: entries[rank].address for rank in sorted(entries)},
            hosts={rank: entries[rank].node for rank in sorted(entries)},
            welcome=self._offer,
        )

    async def _stop(self) -> None:
        try:
            if self._acceptor is not None:
                await self._acceptor.stop()
        finally:
            await self.scope.stop()

    def _close(self) -> None:
        close_all(self._listener, *self._guests)
        self._table.close()

    async def _collect(self) -> None:
        """Until every rank has joined and has all its links."""
        self._listener = await open_station(self)
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
        self.scope.start(self._report_progress())
        await self.phase(lambda: not self._roster.missing, self._not_joined)
        problem = self._roster.disagreement() or self._roster.unreachable()
        if problem is not None:
            raise Trouble(problem)
        welcome = self._welcome()
        for member in self._members:
            self.scope.start(member.send(welcome))
        await self.phase(lambda: not self._unlinked(), self._not_linked)

    def _judge(self, hello: Hello) -> Answer:
        placement = self.placement
        if hello.generation != placement.generation:
            older = hello.generation < placement.generation
            status = Status.OLD_GENERATION if older else Status.NEW_GENERATION
        elif hello.purpose is not Purpose.RENDEZVOUS:
            status = self._table.judge(hello)
        elif hello.target != 0:
            status = Status.WRONG_RANK
        else:
            # A wrong size or rank is refused after the JOIN, where there is room to say what is wrong.
            status = Status.ACCEPTED
        return Answer(status, 0, placement.size, placement.generation, self._table.run_id)

    def _arrived(self, hello: Hello, sock: socket.socket) -> None:
        if hello.purpose is Purpose.RENDEZVOUS:
            self._guests.add(sock)
            self.scope.start(self._register(hello, sock))
        else:
            self._table.take(hello.purpose, hello.rank, sock)
            self.wake()

    async def _register(self, hello: Hello, sock: socket.socket) -> None:
        """Take the JOIN of a caller who knows the secret, then listen to it to the end."""
        peer = peer_name(sock)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                message = await control.receive(sock)
            if message["kind"] == "failed":  # it cannot listen where it should
                text, missing = text_and_missing(message)
                self.fail(Trouble(f"rank {hello.rank} at {peer}: {text}", missing or {hello.rank}))
                self._guests.discard(sock)
                sock.close()
                return
            entry = Entry.from_message(hello.rank, hello.size, peer, message)
        except (OSError, ProtocolError) as error:  # OSError: the timeout, too
            self.strangers.dropped(
                peer, f"rank {hello.rank} proved itself, but sent no JOIN: {reason(error)}"
            )
            self._guests.discard(sock)
            sock.close()
            return
        member = _Member(entry, sock)
        self._members.append(member)
        if self._farewell is not None:
            member.send_now(self._farewell)
        else:
            problem = self._roster.join(entry)
            if problem is None:
                self._table.take(Purpose.LINK, entry.rank, sock)
                self._news.set()
            else:
                self.fail(Trouble(problem))
        self.wake()
        await self._listen_to(member)

    async def _listen_to(self, member: _Member) -> None:
        rank, who = member.entry.rank, member.entry.describe()
        try:
            while True:
                message = await control.receive(member.sock)
                if message["kind"] == "linked":
                    member.linked = True
                    self.wake()
                elif message["kind"] == "failed":
                    text, missing = text_and_missing(message)
                    raise Trouble(f"rank {rank} at {who}: {text}", missing or {rank})
                else:
                    raise ProtocolError(f"a message {message['kind']!r} does not belong here")
        except OSError as error:
            self.fail(
                Trouble(
                    f"rank {rank} at {who} left while the mesh was forming ({reason(error)}). Look at its output for "
                    "the cause",
                    {rank},
                )
            )
        except ProtocolError as error:
            self.fail(Trouble(f"rank {rank} at {who} broke the protocol: {error}"))
        except Trouble as trouble:
            self.fail(trouble)
        member.gone = True
        self.wake()

    async def _report_progress(self) -> None:
        """Keep the members informed of who is missing, so that each can name them when its own time is up."""
        while self._roster.missing:
            await self._news.wait()
            self._news.clear()
            message = control.encode("progress", text="", missing=sorted(self._roster.missing))
            for member in self._members:
                # One that is slow to read gets the next report.
                if not member.writing.locked():
                    self.scope.start(member.send(message))
            await asyncio.sleep(PROGRESS_INTERVAL)

    def _welcome(self) -> bytes:
        entries = self._roster.entries
        members = [
            [entry.host, entry.port, entry.node, entry.address]
            for entry in (entries[rank] for rank in range(self.placement.size))
        ]
        return control.encode("welcome", run=self._table.run_id, members=members, offer=self._offer)

    def _unlinked(self) -> frozenset[int]:
        """Ranks that have not said that they have all their links, or whose pulse has not arrived here."""
        silent = frozenset(member.entry.rank for member in self._members if not member.linked)
        return silent | self._table.missing

    def _confirm(self) -> None:
        """The point of no return: READY to everyone, without an await in between."""
        if self.failure is not None:
            raise self.failure
        self._ready = True
        ready = control.encode("ready")
        for member in self._members:
            member.send_now(ready)

    def _not_joined(self) -> Trouble:
        missing = self._roster.missing
        return Trouble(
            f"{name_ranks(missing)} did not join within {self.limit:g} s.{self.strangers.note()}{self._only_here()} Check that all "
            f"{self.placement.size} ranks were started and can reach rank 0 at {self.address}",
            missing,
            late_ranks=False,
        )

    def _only_here(self) -> str:
        """A sentence if rank 0 listens for this host alone, and its address does not say so as such; else nothing."""
        if self._listener is None or is_loopback(self.host):
            return ""
        here = self._listener.getsockname()[0]
        if not is_loopback(here):
            return ""
        return (
            f" Rank 0 listens on {here}, which no other host can call: if ranks run elsewhere, give an address of its "
            "network interface in place of "
            f"{self.host!r}."
        )

    def _not_linked(self) -> Trouble:
        missing = self._unlinked()
        return Trouble(
            f"all joined, but {name_ranks(missing)} did not get through to the others within {self.limit:g} s. Check "
            "that hosts can reach one another on all TCP ports",
            missing,
            late_ranks=False,
        )

    def _tell_all(self, text: str, missing: frozenset[int]) -> None:
        """Tell everybody who has joined, once; later ones are told when they come."""
        if self._ready or self._farewell is not None:
            return
        self._farewell = control.encode("failed", text=text, missing=sorted(missing))
        for member in self._members:
            member.send_now(self._farewell)

    def _told_everybody(self, trouble: Trouble) -> bool:
        if not trouble.late_ranks:
            return True
        told = {0} | {member.entry.rank for member in self._members}
        # Where world sizes disagree, the larger world has more ranks to tell.
        size = max([self.placement.size, *(member.entry.size for member in self._members)])
        return all(rank in told for rank in range(size))

    async def _say_farewell(self, trouble: Trouble) -> None:
        """Tell everybody, wait for late ranks where that is of use, and let those told close first.

        Closing before they have read could turn the message into a reset.
        """
        self.fail(trouble)
        self._tell_all(trouble.text, trouble.missing)
        try:
            async with asyncio.timeout(FAREWELL):
                while not (all(member.gone for member in self._members) and self._told_everybody(trouble)):
                    await self.changed()
        except TimeoutError:
            return
