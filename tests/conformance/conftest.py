"""One suite, three worlds: the simulated network in virtual time, and TCP on either loop."""

import asyncio
import contextlib
import socket
import zlib

import pytest
import uvloop

from asynccoll.net import accepting, dialing
from asynccoll.sim.driver import Conditions
from asynccoll.sim.loop import SimLoop
from asynccoll.testing import local_world


@pytest.hookimpl
def pytest_asyncio_loop_factories(config, item):
    return {"sim": SimLoop, "asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class World:
    """Opens worlds of the kind that the running loop stands for."""

    def __init__(self, seed):
        self.seed = seed

    @contextlib.asynccontextmanager
    async def __call__(self, n, **options):
        if isinstance(asyncio.get_running_loop(), SimLoop):
            options.setdefault("seed", self.seed)
            options.setdefault(
                "conditions", Conditions(delay=0.002, piece=1 << 15, split=True, buffer=1 << 16)
            )
            options["transport"] = "memory"
        async with local_world(n, **options) as comms:
            yield comms


@pytest.fixture
def world(request):
    # A seed of its own for each test, the same in every run.
    return World(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def narrow_world(world, monkeypatch):
    """A `world` whose links hold 4 KiB: nearly every write is a partial one, and what is sent stays queued for long."""
    sockets = []

    def narrowed(prepare):
        def prepare_narrow(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sockets.append(sock)
            return prepare(sock)

        return prepare_narrow

    @contextlib.asynccontextmanager
    async def open_narrow(n):
        # Not split: a full link whose reads are split at random is refilled in ever smaller pieces.
        conditions = Conditions(delay=0.0001, piece=1001, buffer=4096)
        async with world(n, conditions=conditions) as comms:
            assert sockets or isinstance(asyncio.get_running_loop(), SimLoop)
            yield comms

    for module in (accepting, dialing):
        monkeypatch.setattr(module, "prepare", narrowed(module.prepare))
    return open_narrow
