"""`local_world`: all ranks of a mesh in one event loop. Knows how to open one, not what is done with it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import socket
from collections.abc import AsyncIterator

from asynccoll.bridged import bridged
from asynccoll.communicator import Communicator, Options, seconds
from asynccoll.net.contexts import Contexts, layer
from asynccoll.net.launchers import Placement
from asynccoll.sim.driver import Conditions, SimNetwork
from asynccoll.world import connect, open_mesh

__all__ = ["local_world"]


@contextlib.asynccontextmanager
async def local_world(
    n: int,
    *,
    transport: str = "tcp",
    timeout: float | None = 60.0,
    safe: bool = False,
    ssl: Contexts | None = None,
    liveness_timeout: float | None = None,
    progress: str = "inline",
    seed: int = 0,
    conditions: Conditions = Conditions(),  # noqa: B008 (frozen)
) -> AsyncIterator[list[Communicator]]:
    """A world of ``n`` ranks in the running loop: a list of communicators in rank order, closed at the end.

    Args:
        n: world size.
        transport: ``"tcp"`` (sockets on loopback) or ``"memory"`` (no sockets; in virtual time on an `asynccoll.sim.loop.SimLoop`).
        timeout: default time limit of an operation, in seconds.
        safe: as for `asynccoll.init`: nothing is pickled.
        ssl: as for `asynccoll.init`: the connections use TLS. Not with ``"memory"``.
        liveness_timeout: as for `asynccoll.init`, over TCP; None: no heartbeats, since all ranks stop together here.
        progress: as for `asynccoll.init`: with ``"thread"`` every rank has a loop and a thread of its own. Not with ``"memory"``.
        seed, conditions: delays and splitting of the in-memory links.
    """
    if n < 1:
        raise ValueError(f"a world has at least one rank, not {n}")
    timeout = seconds(timeout, "timeout", None)
    liveness_timeout = seconds(liveness_timeout, "liveness_timeout", None)
    if progress not in ("inline", "thread"):
        raise ValueError(f"progress={progress!r} does not exist; use 'inline' or 'thread'")
    communicators: list[Communicator] = []
    try:
        if transport == "memory":
            if ssl is not None:
                raise ValueError("ssl= is for transport='tcp': there is nothing to protect in memory")
            if progress == "thread":
                raise ValueError("progress='thread' is for transport='tcp': a simulated network has one loop")
            network = SimNetwork(asyncio.get_running_loop(), n, seed=seed, conditions=conditions)
            communicators += [
                Communicator(driver, options=Options(timeout, safe=safe)) for driver in network.drivers
            ]
        elif transport == "tcp":
            communicators += await _over_tcp(n, timeout, safe, ssl, liveness_timeout, progress)
        else:
            raise ValueError(f"transport={transport!r} does not exist; use 'tcp' or 'memory'")
        yield communicators
    finally:
        await asyncio.gather(*(communicator.close() for communicator in communicators))


async def _over_tcp(
    n: int,
    timeout: float | None,
    safe: bool,
    ssl: Contexts | None,
    liveness_timeout: float | None,
    progress: str,
) -> list[Communicator]:
    tls = layer(ssl)
    if n == 1:
        return [await connect(rank=0, world_size=1, timeout=timeout, safe=safe, progress=progress)]
    secret = secrets.token_bytes(32)
    with socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * n)) as listener:
        port = listener.getsockname()[1]
        places = [
            Placement(
                rank=rank,
                size=n,
                host="127.0.0.1",
                port=port,
                secret=secret,
                local_rank=rank,
                node_rank=0,
                generation=0,
                source="local_world",
                rendezvous_fd=listener.fileno() if rank == 0 else None,
            )
            for rank in range(n)
        ]
        openers = [
            functools.partial(
                open_mesh,
                place,
                secret,
                timeout=timeout,
                init_timeout=60,
                liveness_timeout=liveness_timeout,
                safe=safe,
                tls=tls,
            )
            for place in places
        ]
        return list(
            await asyncio.gather(*(bridged(one) if progress == "thread" else one() for one in openers))
        )
