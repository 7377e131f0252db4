"""TLS over a connected socket, from its first byte. Knows records and certificates, not who may join or what is carried.

The descriptor stays ours: the TLS engine works on two buffers in memory, and the bytes between these and the descriptor are moved
here, so that every event loop (and a plain thread) can drive a `TlsSocket` with what it uses for a plain socket.

What the caller hands over is sealed into records at once. Its memory is free when `TlsSocket.send` returns, and nothing has to be
offered a second time: what the descriptor did not take waits sealed, at most `SEAL` bytes of it, until `TlsSocket.flush`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, NoReturn

from asynccoll.errors import AuthenticationError, ProtocolError
from asynccoll.net.handshake import MAGIC, TLS_WANTED, TlsMismatch
from asynccoll.net.sockets import Layered, PeerClosed

__all__ = ["HANDSHAKE_BYTES", "SEAL", "Tls", "TlsSocket"]

HANDSHAKE_BYTES: Final = 1 << 16
"""Most bytes that a TLS handshake may take from the peer: a chain of certificates has a few thousand."""
RECORD: Final = 1 << 14
"""Plain bytes that fit into one record (RFC 8446, section 5.1)."""
SEAL: Final = 1 << 17
"""Plain bytes that are sealed at a time: eight records, one write. They can be neither overtaken nor recalled."""
_UNPROVED_READ: Final = 1 << 12
"""Bytes that are read at a time before the peer has proved itself."""
_LINGER: Final = 1.0
"""Seconds for a peer that is shown out to read why."""


class _Scratch(threading.local):
    """Memory for one read from a descriptor, for each thread that drives sockets."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(1 << 18))


_scratch = _Scratch()


class Tls(NamedTuple):
    """Both sides of a rank: it takes calls from higher ranks and calls lower ones."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    def accepted(self, sock: socket.socket) -> TlsSocket:
        """``sock``, whose peer called, as a connection that is to begin with a TLS handshake. Takes the descriptor over."""
        return TlsSocket(sock, self.server, None)

    def dialed(self, sock: socket.socket, host: str) -> TlsSocket:
        """The same for a connection to ``host``, which the certificate must name if the context checks that."""
        return TlsSocket(sock, self.client, host.partition("%")[0])


class TlsSocket(Layered):
    """A connected stream socket that speaks TLS. Non-blocking; `handshake` comes first, then what a plain socket does."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # typeshed says bytes
        super().__init__(fileno=sock.detach())
        self.setblocking(False)
        self._host = host
        """What was called; None on the side that was."""
        self._proved = False
        """The peer is a rank: reads may be large."""
        self._sealed = memoryview(b"")
        """Records that the descriptor has not taken yet; what `_outgoing` holds comes after them."""
        self._starved = True
        """What the engine has is not a whole record."""
        self._short = True
        """The last read took all that the descriptor had."""
        self._eof = False
        """The descriptor has no more."""
        self._error: OSError | None = None
        """What a read from the descriptor ended in, to be raised once all that came before has been read."""
        self._first = b""
        """How the peer's first bytes begin."""

    # -- the handshake ------------------------------------------------------------------------------------

    async def handshake(self) -> None:
        """See `Layered.handshake`. The caller limits the time; the bytes are limited here."""
        budget = HANDSHAKE_BYTES
        while True:
            done = False
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                raise PeerClosed("the peer closed the connection during the TLS handshake") from error
            except ssl.SSLError as error:
                await self._show_out()
                self._refuse(error)
            await self.flushed()
            if done:
                return
            budget -= await self._more()
            if budget < 0:
                raise ProtocolError(f"the TLS handshake takes more than {HANDSHAKE_BYTES} bytes")

    async def _more(self) -> int:
        """Wait for bytes of the peer and hand them to the TLS engine; how many, 0 at the end."""
        while True:
            try:
                return self._fill()
            except BlockingIOError:
                await self._ready(reading=True)

    async def flushed(self) -> None:
        """See `Layered.flushed`."""
        while not self.flush():
            await self._ready(reading=False)

    async def _ready(self, *, reading: bool) -> None:
        """Wait until the descriptor can be read from or written to."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        descriptor = self.fileno()
        (loop.add_reader if reading else loop.add_writer)(descriptor, wake)
        try:
            await ready
        finally:
            (loop.remove_reader if reading else loop.remove_writer)(descriptor)

    async def _show_out(self) -> None:
        """Let the peer hear why the handshake failed. Closing with bytes unread would turn that into a reset."""
        if self._first.startswith(MAGIC):
            self._sealed = memoryview(TLS_WANTED)
        if not self._sealed and not self._outgoing.pending:
            return  # it is not one of us, and the TLS engine has nothing to say to it
        with contextlib.suppress(OSError):  # TimeoutError, too
            async with asyncio.timeout(_LINGER):
                await self.flushed()
                super().shutdown(socket.SHUT_WR)
                for _ in range(HANDSHAKE_BYTES // _UNPROVED_READ):
                    if not await self._more():
                        return
                    self._incoming.read()

    def channel(self) -> bytes:
        """See `Layered.channel`: the caller's Finished message, a MAC over all of this handshake (RFC 8446, section 4.4.4)."""
        name = self._tls.get_channel_binding("tls-unique")
        if not name:
            raise ProtocolError("the TLS connection has no name: its handshake is not done")
        return name

    def proved(self) -> None:
        """See `Layered.proved`."""
        self._proved = True

    # -- reading ------------------------------------------------------------------------------------------

    def _fill(self) -> int:
        """Move what the descriptor has, up to a limit, to the TLS engine. The number of bytes; 0: it has ended."""
        memory = _scratch.memory if self._proved else _scratch.memory[:_UNPROVED_READ]
        got = super().recv_into(memory)
        if got:
            self._incoming.write(memory[:got])
            if not self._first:
                self._first = bytes(memory[: min(got, len(MAGIC))])
        else:
            self._eof = True
            self._incoming.write_eof()
        self._starved, self._short = False, got < len(memory)
        return got

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As `socket.socket.recv_into`. Fewer bytes than there is room for: what else has come is no whole record."""
        memory = memoryview(buffer)
        room = nbytes or len(memory)
        got = 0
        try:
            while got < room:
                if self._starved and not self._refill(got):
                    return got
                try:
                    taken = self._read(room - got, memory[got:])
                except ssl.SSLWantReadError:
                    self._starved = True
                    continue
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    taken = 0
                if not taken:
                    # Without the peer's last record too: what says that a rank leaves is GOODBYE, which is sealed.
                    self._eof = self._starved = True
                    return got
                got += taken
                if not self._incoming.pending and not self._tls.pending():
                    self._starved = not self._eof
        except ssl.SSLError as error:
            self._starved = True
            if not got:
                self._eof = True
                self._refuse(error)
            self._error = _broken(error)
        finally:
            # The answer to a change of keys, for example. It may also go with the next write.
            if self._outgoing.pending:
                with contextlib.suppress(OSError):
                    self.flush()
        return got

    def _refill(self, got: int) -> bool:
        """Get more for the TLS engine to decrypt. False: the caller has to do with the ``got`` bytes it has."""
        if self._error is not None:
            if got:
                return False
            error, self._error = self._error, None
            self._eof = True
            raise error
        if self._eof or (got and self._short):
            return False
        try:
            self._fill()
        except (BlockingIOError, InterruptedError):
            if got:
                return False
            raise
        except OSError as error:
            if not got:
                raise
            self._error = error
            return False
        return True

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """As `socket.socket.recv`, without flags."""
        buffer = bytearray(min(bufsize, 1 << 18))
        return bytes(buffer[: self.recv_into(buffer)])

    @property
    def holds_input(self) -> bool:
        """See `Layered.holds_input`."""
        whole = not self._starved and self._incoming.pending
        return bool(whole or self._error is not None or self._tls.pending())

    def gone(self) -> bool:
        """See `Layered.gone`."""
        try:
            if not self._eof:
                self._fill()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return self._eof

    # -- writing ------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """See `Layered.flush`."""
        while True:
            if not self._sealed:
                if not self._outgoing.pending:
                    return True
                self._sealed = memoryview(self._outgoing.read())
            try:
                taken = super().send(self._sealed)
            except (BlockingIOError, InterruptedError):
                return False
            self._sealed = self._sealed[taken:]

    def send(self, data: Any, flags: int = 0) -> int:
        """As `socket.socket.send`; the bytes that count as sent are sealed, and may wait for `flush`."""
        return self.sendmsg((data,))

    def sendmsg(
        self,
        buffers: Iterable[Any],
        ancdata: Iterable[Any] = (),
        flags: int = 0,
        address: Any = None,
    ) -> int:
        """As `socket.socket.sendmsg`, buffers only. Small ones share a record with the beginning of the large one after them."""
        if not self.flush():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        joined: list[memoryview] = []
        space = RECORD
        rest = memoryview(b"")
        for buffer in buffers:
            rest = memoryview(buffer).cast("B")
            joined.append(rest[:space])
            rest = rest[space:]
            space -= len(joined[-1])
            if rest:
                break
        head: Any = joined[0] if len(joined) == 1 else b"".join(joined)
        try:
            taken = self._tls.write(head) if len(head) else 0
            if rest:
                taken += self._tls.write(rest[: SEAL - RECORD])
        except ssl.SSLError as error:
            self._refuse(error)
        self.flush()
        return taken

    def shutdown(self, how: int) -> None:
        """As `socket.socket.shutdown`; when writing ends, the peer is told so by TLS too, if that takes no waiting."""
        # Not with records unread: the TLS engine would take them for a broken order and read no more.
        if how != socket.SHUT_RD and not self.holds_input:
            with contextlib.suppress(
                OSError
            ):  # SSLError is one; what is wanted to be read is the peer's own last record
                self._tls.unwrap()
            with contextlib.suppress(OSError):
                self.flush()
        super().shutdown(how)

    def _clear_text(self, *_: Any, **__: Any) -> NoReturn:
        """What of a plain socket would pass TLS by."""
        raise OSError(errno.EOPNOTSUPP, "a TLS connection is used by recv, recv_into, send and sendmsg only")

    sendall = sendto = sendfile = makefile = dup = _clear_text
    recvfrom = recvfrom_into = recvmsg = recvmsg_into = _clear_text

    # -- errors -------------------------------------------------------------------------------------------

    def _refuse(self, error: ssl.SSLError) -> NoReturn:
        """Raise what ``error`` means: to a rank that has been proved, an end of the connection; before, a verdict."""
        if self._proved:
            raise _broken(error) from error
        raise _verdict(error, self._host, self._first) from error


def _broken(error: ssl.SSLError) -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, f"TLS: {_words(error)}")


def _words(error: ssl.SSLError) -> str:
    """What OpenSSL says, without its file names."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or error.strerror or str(error)).replace("_", " ").lower()


_ADVICE: Final = {
    10: "it has expired: renew it",  # X509_V_ERR_CERT_HAS_EXPIRED, and so on (openssl's x509_vfy.h)
    9: "it is not valid yet: look at the clocks of both hosts",
    18: "it is signed by itself: give every rank a certificate of one CA, and that CA as cafile",
    19: "its CA is not among those that this rank trusts: give the same cafile to every rank",
    20: "its CA is not among those that this rank trusts: give the same cafile to every rank",
    21: "its CA is not among those that this rank trusts: give the same cafile to every rank",
    26: "it is not made for this use: a rank's certificate serves both as server and as client",
    62: "it does not name that host: call rank 0 by a name in the certificate, or trust a CA of your own without check_hostname",
    64: "it does not name that address: put it into the certificate, or trust a CA of your own without check_hostname",
}
"""What to do, by the code of the verification error."""

_ALERTS: Final = {
    "UNKNOWN_CA": "it does not trust the CA of this rank's certificate: give the same cafile to every rank",
    "CERTIFICATE_REQUIRED": "this rank shows no certificate: load one into the client context too",
    "CERTIFICATE_EXPIRED": "this rank's certificate has expired: renew it",
    "CERTIFICATE_REVOKED": "this rank's certificate is revoked: make a new one",
    "UNSUPPORTED_CERTIFICATE": "this rank's certificate is not made for clients: a rank's serves both as server and as client",
    "CERTIFICATE_UNKNOWN": "it does not accept this rank's certificate; its log says why",
    "BAD_CERTIFICATE": "it does not accept this rank's certificate; its log says why",
    "HANDSHAKE_FAILURE": "they have no cipher in common, one of them has no certificate, or this rank shows none: "
    "load one into both contexts",
    "PROTOCOL_VERSION": "its server context has no certificate, or they have no version of TLS in common: make contexts alike",
}
"""What an alert of the peer means, by the end of OpenSSL's name for it."""


def _verdict(error: ssl.SSLError, host: str | None, first: bytes) -> Exception:
    """What a failed TLS handshake means: `AuthenticationError` or `TlsMismatch` where trying again is of no use."""
    words = _words(error)
    name = error.reason or ""
    if first.startswith(MAGIC):
        if host is None:
            return TlsMismatch("it does not use TLS, and this rank does: give ssl= to every rank or to none")
        return TlsMismatch(
            "it does not use TLS, and this rank was given ssl=: give ssl= to every rank or to none"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        whose = "its certificate" if host is None else f"the certificate of {host!r}"
        advice = _ADVICE.get(error.verify_code, "look at that certificate")
        return AuthenticationError(f"{whose} is not accepted ({words}): {advice}")
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in name:
        return AuthenticationError("it shows no certificate: its client context has none loaded")
    if "ALERT" in name:
        for end, advice in _ALERTS.items():
            if name.endswith(end):
                return AuthenticationError(f"it refused the TLS handshake ({words}): {advice}")
    if name in ("NO_SHARED_CIPHER", "UNSUPPORTED_PROTOCOL"):
        return ProtocolError(
            f"no TLS with it ({words}): the server context of this rank has no certificate, or they have no version or cipher "
            "of TLS in common"
        )
    return ProtocolError(f"it does not speak TLS as this rank does ({words})")
