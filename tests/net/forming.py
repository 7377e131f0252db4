"""Shared by the tests of this directory: placements, meshes in one loop, and a check that nothing is left behind."""

import asyncio
import contextlib
import os
import socket

from asynccoll.net import control
from asynccoll.net.accepting import shake
from asynccoll.net.handshake import NO_RUN, Hello, Purpose, dial
from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import form_mesh
from asynccoll.net.roster import Entry
from asynccoll.net.sockets import host_identity

SECRET = b"the ranks know this"


def free_port(host="127.0.0.1"):
    """A port that was free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def place(rank, size, port, host="127.0.0.1", **more):
    return Placement(rank=rank, size=size, host=host, port=port, **more)


def form(
    rank, size, port, host="127.0.0.1", *, secret=SECRET, init_timeout=20.0, generation=0, fd=None, **options
):
    """One rank's `form_mesh`, not started."""
    placement = place(rank, size, port, host, generation=generation, rendezvous_fd=fd)
    return form_mesh(placement, secret, init_timeout=init_timeout, **options)


async def form_all(size, port, **options):
    """A whole mesh in this loop: the links by rank."""
    return await asyncio.gather(*(form(rank, size, port, **options) for rank in range(size)))


async def failures(*ranks):
    """Run ranks that must all fail; their exceptions in order."""
    outcomes = await asyncio.gather(*ranks, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, Exception), f"a rank got a mesh: {outcome}"
    return outcomes


def close(links):
    for mesh in links:
        mesh.close()


def open_sockets():
    """The internet sockets of this process, by the names the kernel gives them (loops have pairs of their own)."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        found.add(name)
    return found


def other_tasks():
    """The tasks of this loop but for the one that asks (fixtures begin and end in different ones)."""
    return asyncio.all_tasks() - {asyncio.current_task()}


@contextlib.asynccontextmanager
async def nothing_left():
    """Fails if the body leaves a socket or a task."""
    sockets, tasks = open_sockets(), other_tasks()
    yield
    assert other_tasks() == tasks
    assert open_sockets() == sockets


async def exchange(links):
    """Every pair sends its two ranks both ways and must read exactly that: no byte was lost or taken before."""
    loop = asyncio.get_running_loop()
    for name in ("sockets", "pulses"):
        for mesh in links:
            for peer, sock in getattr(mesh, name).items():
                await loop.sock_sendall(sock, bytes([mesh.rank, peer]))
        for mesh in links:
            for peer, sock in getattr(mesh, name).items():
                assert sock.recv(16) == bytes([peer, mesh.rank])


async def proved(
    rank, size, port, *, target=0, purpose=Purpose.RENDEZVOUS, run_id=NO_RUN, secret=SECRET, generation=0
):
    """A connection to a rank that has let us through its handshake: what a process with the secret can get."""
    sock = socket.socket()
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        hello = Hello(purpose, rank, target, size, generation, run_id)
        await shake(sock, dial(secret, hello, os.urandom(32)))
    except BaseException:
        sock.close()
        raise
    return sock


async def joined(rank, size, port, *, listens_at=0, settings=None, **hello):
    """A rank that joins by hand and then does what the test wants."""
    sock = await proved(rank, size, port, **hello)
    entry = Entry(
        rank, size, "", "127.0.0.1", listens_at, host_identity(), os.getpid(), settings or {"pulse": False}
    )
    await control.send(sock, control.encode("join", **entry.as_message()))
    return sock


async def hear(sock, kind):
    """The next message of that kind; others are skipped."""
    while (message := await control.receive(sock))["kind"] != kind:
        pass
    return message


async def attentive(port):
    """Until something listens on ``port``: rank 0 is open."""
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as probe:
            probe.setblocking(False)
            with contextlib.suppress(OSError):
                await loop.sock_connect(probe, ("127.0.0.1", port))
                return
        await asyncio.sleep(0.005)
