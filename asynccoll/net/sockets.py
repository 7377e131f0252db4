"""TCP sockets under any event loop: making, reading exactly, naming. Knows no protocol, nor what a layer over one does.

Every socket here is non-blocking and ours: it is driven by the loop's ``sock_*`` methods, never by a
transport, so that whoever owns it next finds no reader registered and no byte taken that was not asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "Endpoint",
    "Layered",
    "PeerClosed",
    "channel_of",
    "close_all",
    "format_address",
    "host_identity",
    "peer_name",
    "plain_host",
    "prepare",
    "reason",
    "receive_exactly",
    "reset_by_peer",
    "resolve",
    "send_all",
]

Endpoint: TypeAlias = "tuple[socket.AddressFamily, tuple[Any, ...]]"
"""Address family and socket address, as ``socket.connect`` and ``socket.bind`` take them."""


class PeerClosed(ConnectionError):
    """The stream ended where more was due."""


class Layered(socket.socket):
    """A stream socket with a layer (TLS) over its descriptor, in which bytes may wait that a selector does not see.

    It is read, written and closed as any non-blocking socket. What it may hold back is what the methods here are about.
    """

    async def handshake(self) -> None:
        """Set the layer up with the peer: before anything else, and once."""
        raise NotImplementedError

    def channel(self) -> bytes:
        """What both ends of this connection, and no other, call it, once the handshake is done."""
        raise NotImplementedError

    def proved(self) -> None:
        """The peer has proved what it is: from now on it may cost memory, and what breaks the layer is an OSError."""
        raise NotImplementedError

    @property
    def holds_input(self) -> bool:
        """Bytes (or an error) wait inside: read again, the selector will not tell."""
        raise NotImplementedError

    def flush(self) -> bool:
        """Write what was sent and still waits inside, without waiting. False: wait until the descriptor takes more."""
        raise NotImplementedError

    async def flushed(self) -> None:
        """Wait until nothing that was sent is left inside. The loop must not have a writer for the descriptor."""
        raise NotImplementedError

    def gone(self) -> bool:
        """Whether the peer has closed or reset the connection. Loses no byte."""
        raise NotImplementedError


def prepare(sock: socket.socket) -> socket.socket:
    """Make a stream socket non-blocking and send small frames at once (Nagle's delay would cost 40 ms a
    frame).
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes and not one more. ConnectionError if the peer closes before."""
    loop = asyncio.get_running_loop()
    buffer = bytearray(count)
    view = memoryview(buffer)
    got = 0
    while got < count:
        if isinstance(sock, Layered) and sock.holds_input:  # uvloop waits for the descriptor before it tries
            try:
                n = sock.recv_into(view[got:])
            except BlockingIOError:
                continue
        else:
            n = await loop.sock_recv_into(sock, view[got:])
        if n == 0:
            raise PeerClosed(f"the peer closed the connection after {got} of {count} bytes")
        got += n
    return bytes(buffer)


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Write ``data`` whole."""
    await asyncio.get_running_loop().sock_sendall(sock, data)
    if isinstance(sock, Layered):
        await sock.flushed()


def reset_by_peer(sock: socket.socket) -> bool:
    """Whether the peer has closed or reset the connection and left nothing to read. Takes no byte."""
    if isinstance(sock, Layered):
        return sock.gone()
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def channel_of(sock: socket.socket) -> Callable[[], bytes]:
    """What asks for the name of the layer's connection; a plain socket's has none."""
    return sock.channel if isinstance(sock, Layered) else bytes


def close_all(*sockets: socket.socket | None) -> None:
    """Close every socket given."""
    for sock in sockets:
        if sock is not None:
            sock.close()


def plain_host(host: str) -> str:
    """A numeric address as people write it: over IPv4 to a socket of both families, the kernel says ``::ffff:127.0.0.1``."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped) if mapped is not None else host


def format_address(host: str, port: int) -> str:
    """``host:port``, IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_name(sock: socket.socket) -> str:
    """``host:port`` of the other end, for messages."""
    try:
        host, port, *_ = sock.getpeername()
    except OSError:
        return "an address unknown (already gone)"
    return format_address(plain_host(host), port)


def reason(error: Exception) -> str:
    """What the system says, in its own words and number; asyncio words some errors anew, without saying more."""
    if isinstance(error, OSError) and error.errno is not None:
        words = os.strerror(error.errno) if error.errno > 0 else error.strerror  # a resolver's are negative
        return f"{words} (errno {error.errno})"
    return str(error) or "timed out"


async def resolve(host: str, port: int) -> list[Endpoint]:
    """Where ``host`` is, best first. OSError (``socket.gaierror``) if the name does not resolve.

    Addresses and ``localhost`` are answered at once. Other names go through the loop's resolver, which
    asyncio runs in a thread.
    """
    if host.lower().rstrip(".") == "localhost":
        # RFC 6761, section 6.3: always loopback. The same order on every rank, whatever /etc/hosts says.
        return [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port, 0, 0))]
    kind, flags = socket.SOCK_STREAM, 0
    try:
        ipaddress.ip_address(host)
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=kind)
    else:
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        found = socket.getaddrinfo(host, port, type=kind, flags=flags)
    # dict: some resolvers list an address once for each line of /etc/hosts that has it.
    return list(dict.fromkeys(_unmapped(family, address) for family, _, _, _, address in found))


def _unmapped(family: socket.AddressFamily, address: tuple[Any, ...]) -> Endpoint:
    """An address of IPv4 that is written as one of IPv6 is one of IPv4: a socket for IPv6 alone could not listen there."""
    host = plain_host(address[0])
    return (family, address) if host == address[0] else (socket.AF_INET, (host, address[1]))


def host_identity() -> str:
    """A text that two processes share exactly if they share a kernel and its loopback interface.

    Readable host name first, then a digest: containers of one machine often share a boot id but not a
    network, and hosts made from one image often share a name.
    """
    name = socket.gethostname()
    facts = [name]
    try:
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        facts.append(os.readlink("/proc/self/ns/net"))
    except OSError:
        pass  # not Linux, or /proc is hidden: the name has to do
    return f"{name}/{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:16]}"
