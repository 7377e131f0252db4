"""Opens the socket at which rank 0 takes calls, or says why that cannot be. Knows no protocol."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from asynccoll.net.accepting import listen
from asynccoll.net.dialing import Backoff
from asynccoll.net.party import Party, Trouble
from asynccoll.net.secret import names_a_host
from asynccoll.net.sockets import Endpoint, reason, resolve

__all__ = ["open_station"]

PATIENCE = 1.0
"""Seconds to go on trying to listen: a process that is just ending may still hold the port."""

# What says that an address is not one of this machine's, so that the name's next one should be tried. A port
# in use does not: the other ranks would try that address first, and meet whoever holds it.
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})

_TCP_LISTEN = "0A"  # third column of /proc/net/tcp; the kernel's include/net/tcp_states.h


async def open_station(party: Party) -> socket.socket:
    """A listening socket for rank 0, which is the caller's to close. `Trouble` if there is none to be had.

    A listener that the launcher holds (``placement.rendezvous_fd``) is duplicated, and stays open for the
    next mesh. Otherwise the name is resolved, again and again until the deadline, and the first of its
    addresses that belongs to this machine is listened on. A name that means nothing but loopback here (as many
    distributions write a host's own name into its /etc/hosts) means another address on other hosts, which is not
    known here: then all addresses of this machine are listened on.
    """
    fd = party.placement.rendezvous_fd
    if fd is not None:
        return _adopt(fd)
    loop = asyncio.get_running_loop()
    backoff = Backoff()
    patience = loop.time() + min(PATIENCE, party.limit)
    while True:
        refusal: OSError | None = None
        try:
            async with asyncio.timeout_at(party.deadline):
                endpoints = await resolve(party.host, party.port)
        except (
            OSError,
            UnicodeError,
        ) as error:  # OSError: the timeout, too; UnicodeError: no such name in IDNA
            trouble = f"the name {party.host!r} of rank 0 did not resolve ({reason(error)})"
            limit = party.deadline
        else:
            if names_a_host(party.host) and all(map(_on_loopback, endpoints)):
                found = _listen_everywhere(endpoints, party)
            else:
                found = _listen_on_first(endpoints, party.placement.size)
            if isinstance(found, socket.socket):
                return found
            refusal, limit = found, patience
        now = loop.time()
        if limit is not None and now >= limit:
            text = trouble if refusal is None else _explain(refusal, party)
            raise Trouble(text, late_ranks=False) from refusal
        pause = backoff.next()
        await asyncio.sleep(pause if limit is None else min(pause, limit - now))


def _on_loopback(endpoint: Endpoint) -> bool:
    return ipaddress.ip_address(endpoint[1][0]).is_loopback


def _listen_everywhere(endpoints: Sequence[Endpoint], party: Party) -> socket.socket | OSError:
    """Listen on all addresses of the families of ``endpoints``: with both, on one socket, if the system has IPv6."""
    families = {family for family, _ in endpoints}
    wide: list[Endpoint] = []
    if socket.AF_INET6 in families:
        wide.append((socket.AF_INET6, ("::", party.port, 0, 0)))
    if socket.AF_INET in families:
        wide.append((socket.AF_INET, ("0.0.0.0", party.port)))
    return _listen_on_first(wide, party.placement.size, both=len(wide) > 1)


def _listen_on_first(
    endpoints: Sequence[Endpoint], size: int, *, both: bool = False
) -> socket.socket | OSError:
    """Listen on the first endpoint that belongs to this machine, else the reason why the first did not do.

    ``both``: see `listen`.
    """
    first: OSError | None = None
    for endpoint in endpoints:
        try:
            return listen(endpoint, size, reuse=True, both=both)
        except OSError as error:
            first = first or error
            if error.errno not in _NOT_HERE:
                return error
    return first or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def _adopt(fd: int) -> socket.socket:
    name = f"ASYNCCOLL_RENDEZVOUS_FD={fd}"
    try:
        # A duplicate: the launcher's own descriptor stays open, so that the next mesh finds it.
        sock = socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise Trouble(f"{name} is not an open socket ({reason(error)})", late_ranks=False) from error
    try:
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listening = 0
    if not listening:
        sock.close()
        raise Trouble(f"{name} is not a listening socket", late_ranks=False)
    sock.setblocking(False)
    return sock


def _explain(error: OSError, party: Party) -> str:
    """Why rank 0 cannot listen, and what to do about it."""
    text = f"rank 0 cannot listen on {party.address}: {reason(error)}. "
    if error.errno == errno.EADDRINUSE:
        holder = _holder(party.port)
        if holder:
            text += f"The port is held by {holder}. "
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return text + (
                "Under torchrun the agent itself listens on MASTER_PORT: set ASYNCCOLL_MASTER_ADDR and "
                "ASYNCCOLL_MASTER_PORT to a free port on rank 0's host"
            )
        return text + "End the process that uses it, or choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return text + "It is not an address of this machine: rank 0 must run on the host that it names"
    return text + "Choose another address or port"


def _holder(port: int) -> str:
    """The process that listens on ``port``, as far as /proc tells this user; empty where it does not."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == _TCP_LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    if not inodes or not os.path.isdir("/proc/self/fd"):
        return ""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) in inodes for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                own = "this very process" if int(process.name) == os.getpid() else f"pid {process.name}"
                return f"{own} ({command.strip()[:80]})"
        except OSError:
            continue  # another user's, or gone
    return ""
