"""Helpers of the failure half of the suite: die without a word, check that the mesh is in step, count what engines hold.

They reach below the public surface on purpose: a process that dies does not call an API. Nothing here knows a verb's rules.
"""

import asyncio
import concurrent.futures
import contextlib
import socket
import struct
import threading

import numpy as np
from ranks import on_all

from asynccoll import background
from asynccoll.bridged import Bridged, BridgedWork
from asynccoll.communicator import Communicator, Options
from asynccoll.engine.engine import Engine
from asynccoll.net.driver import NetDriver
from asynccoll.sim.driver import SimDriver
from asynccoll.sim.loop import SimLoop


def in_virtual_time():
    """The running loop is the simulation's, so elapsed time is exact."""
    return isinstance(asyncio.get_running_loop(), SimLoop)


def inside(comm, function):
    """What ``function()`` returns, called in the thread in which the driver of ``comm`` lives."""
    if not isinstance(comm, Bridged) or not comm._thread.alive:
        return function()
    answer = concurrent.futures.Future()
    comm._thread.soon(lambda: answer.set_result(function()))
    return answer.result(10)


def crash(comm, *, reset=False):
    """Drop every connection of ``comm`` as the death of its process would: no goodbye, no more progress.

    ``reset``: the peers see a reset instead of an end of stream (over TCP).
    """
    driver = comm._pump
    if isinstance(driver, SimDriver):
        driver.crash()
        return

    def die():
        driver.closed = True
        driver.stop_timer()
        for peer, sock in list(driver._sockets.items()):
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            driver.drop(peer)

    inside(comm, die)


async def in_step(comms):
    """The ranks agree on where they are: two operations of two kinds give the right results, and nothing is left over."""
    await on_all(comms, lambda comm: comm.barrier())
    size = len(comms)
    totals = await on_all(comms, lambda comm: comm.allreduce(np.arange(5.0) + comm.rank))
    expected = np.arange(5.0) * size + size * (size - 1) / 2
    for total in totals:
        np.testing.assert_array_equal(total, expected)
    assert [comm.pending() for comm in comms] == [[]] * size


async def turns(count):
    """Let the loop go round ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def all_turn(count):
    """Let the loop go round ``count`` times, and in each of them those of meshes with ``progress="thread"`` too."""
    for _ in range(count):
        await asyncio.sleep(0)
        turned = [(thread, threading.Event()) for thread in list(background._threads)]
        for thread, event in turned:
            background.hand_over(thread.loop, event.set)
        for thread, event in turned:
            while thread.alive and not event.wait(0.05):
                pass


async def done_at_once(work):
    """It was done when the call returned; with ``progress="thread"``, when the call has been to the mesh's thread and back."""
    if isinstance(work, BridgedWork):
        await all_turn(3)
    return work.done()


async def settle():
    """Give frames that are under way and lead to no result the time to arrive: one to two round trips."""
    if in_virtual_time():
        await asyncio.sleep(1.0)
    else:
        await all_turn(50)


def early_bytes(comm):
    """Payload bytes that the engine of ``comm`` holds for operations that have not been called there."""
    return sum(
        len(payload)
        for group in comm._pump.engine._groups.values()
        for early in group.early.values()
        for _, _, payload in early.payload
    )


def held_bytes(comm):
    """Bytes that the engine of ``comm`` holds in memory of its own: queued to be written, early, or not yet asked for."""
    engine = comm._pump.engine
    total = early_bytes(comm)
    for box in engine._outboxes.values():
        total += sum(map(len, box.control))
        lent = box.current[-1] if box.lent is not None and box.current else None
        total += sum(len(part) for part in box.current if part is not lent)
    for op in engine.pending():
        for stream in op.inputs.values():
            total += sum(map(len, stream.backlog))
    return total


def read_slowly(comm, peers, conditions):
    """In the simulation: from now on everything from ``peers`` to ``comm`` travels under ``conditions``."""
    network = comm._pump.network
    for peer in peers:
        network.link(peer, comm.rank).conditions = conditions


@contextlib.contextmanager
def not_reading(comm):
    """Over TCP: ``comm`` reads nothing inside, as a rank whose loop is held does not."""
    driver = comm._pump
    loop = driver.loop

    def stop():
        for sock in driver._sockets.values():
            loop.remove_reader(sock.fileno())

    def go_on():
        for peer, sock in driver._sockets.items():
            loop.add_reader(sock.fileno(), driver._readable, peer, sock)

    inside(comm, stop)
    try:
        yield
    finally:
        inside(comm, go_on)


@contextlib.asynccontextmanager
async def tiny_world(size, timeout):
    """A world over TCP whose socket buffers hold 4 KiB, from before the handshake on: later the kernel goes on with packets
    that do not fit, and crawls from one retransmission to the next."""
    loop = asyncio.get_running_loop()
    sockets = [{} for _ in range(size)]
    with socket.socket() as listener:
        shrink(listener)
        listener.bind(("127.0.0.1", 0))
        listener.listen(size * size)
        for low in range(size):
            for high in range(low + 1, size):
                dialer = shrink(socket.socket())
                dialer.connect(listener.getsockname())
                sockets[high][low], (sockets[low][high], _) = dialer, listener.accept()
    for sock in (sock for links in sockets for sock in links.values()):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    comms = [
        Communicator(NetDriver(Engine(rank, size), loop, sockets[rank]), options=Options(timeout))
        for rank in range(size)
    ]
    try:
        yield comms
    finally:
        await on_all(comms, lambda comm: comm.close())


def shrink(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return sock


@contextlib.contextmanager
def loop_complaints():
    """What the running loop's exception handler is told inside: a list of messages."""
    loop = asyncio.get_running_loop()
    messages = []
    previous = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: messages.append(context["message"]))
    try:
        yield messages
    finally:
        loop.set_exception_handler(previous)
