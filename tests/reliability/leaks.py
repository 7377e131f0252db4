"""Operations by the million: memory, descriptors, tasks, threads and children are afterwards what they were.

::

    python -m tests.reliability.leaks                    # all of `KINDS`, a few minutes
    python -m tests.reliability.leaks --kind cancels --count 100000

Two ranks in one event loop, over sockets. Every kind runs its `WARM` share first, so that pools and caches are filled. Then
count, over the second half, the slope of the resident memory in bytes for each operation, and the blocks of Python's own
allocator, which show a single object that is kept where pages of memory do not; and over all what `counted` counts.
"""

import argparse
import array
import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import resource
import socket
import sys
import threading
import time
from typing import NamedTuple

import numpy as np

from asynccoll.errors import AsynccollError, CollectiveCancelled, CollectiveTimeout
from asynccoll.net.accepting import shake
from asynccoll.net.handshake import NO_RUN, Hello, Purpose, dial
from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import form_mesh
from asynccoll.testing import local_world

from .common import LOOPS, conclude, tell

WARM = 0.05
SAMPLES = 200
SLOPE = 1.0
"""Bytes of resident memory for each operation, where there are enough of them to tell that from a page or two."""
ENOUGH = 100_000
PAGES = 4 << 20
"""Bytes that the resident memory may grow by where there are fewer."""
BLOCKS = 0.01
"""Blocks for each operation."""
SLACK = 150
"""Blocks that come and go with the moment: caches of the loop, of asyncio and of the interpreter."""
SECRET = b"the ranks know this"


# -- what is done ----------------------------------------------------------------------------------------------


async def small(comms, number):
    await asyncio.gather(*(comm.allreduce(one) for comm, one in zip(comms, ONES, strict=True)))


async def varying(comms, number):
    size = VARYING[number % len(VARYING)]
    value = np.ones(size, np.uint8)
    await asyncio.gather(*(comm.allreduce(value) for comm in comms))


async def objects(comms, number):
    await asyncio.gather(*(comm.allgather({"n": number, "x": "x" * (number % 100)}) for comm in comms))


async def groups(comms, number):
    made = [comm.new_group([1, 0] if number % 2 else [0, 1]) for comm in comms]
    await asyncio.gather(*(group.allreduce(number) for group in made))
    for group in made:
        await group.close()
    await asyncio.gather(*(comm.barrier() for comm in comms))


async def keyed(comms, number):
    await asyncio.gather(*(comm.allreduce(number, key=f"key {number}") for comm in comms))


async def messages(comms, number):
    sent = comms[0].send(ONES[0], 1, tag=number % 7), comms[1].send([number], 0)
    await asyncio.gather(*sent, comms[1].recv(0), comms[0].recv())


async def cancels(comms, number):
    """In turn before the other rank has called, and after."""
    works = [comms[number % 2].allreduce(ONES[0])]
    if number % 3:
        works[0].cancel()
    if number % 3 == 1:
        await asyncio.sleep(0)
    works.append(comms[1 - number % 2].allreduce(ONES[1]))
    works[0].cancel()
    for result in await asyncio.gather(*works, return_exceptions=True):
        # It may be complete as soon as both have called.
        assert isinstance(result, asyncio.CancelledError | CollectiveCancelled | np.ndarray), result


async def timeouts(comms, number):
    late = asyncio.gather(*(comm.allreduce(ONES[0], timeout=1e-9) for comm in comms), return_exceptions=True)
    assert all(isinstance(result, CollectiveTimeout | np.ndarray) for result in await late)


async def streams(comms, number):
    async def whole(comm):
        async for _ in comm.allreduce_stream(PART):
            pass

    await asyncio.gather(*(whole(comm) for comm in comms))


async def handshakes(port, number):
    """A caller with another secret, one that talks nonsense, and one that says nothing."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        if number % 3 == 0:
            hello = Hello(Purpose.RENDEZVOUS, 1, 0, 2, 0, NO_RUN)
            with contextlib.suppress(AsynccollError, OSError):
                await shake(sock, dial(b"another", hello, os.urandom(32)))
        elif number % 3 == 1:
            with contextlib.suppress(OSError):
                await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\n\r\n" + bytes(300))
                await loop.sock_recv(sock, 1)


async def meshes(_, number):
    async with local_world(2) as comms:
        await asyncio.gather(*(comm.allreduce(number) for comm in comms))


async def watched(_, number):
    """With heartbeats, and so with a thread that serves them."""
    async with local_world(2, liveness_timeout=30.0) as comms:
        await asyncio.gather(*(comm.allreduce(number) for comm in comms))


VARYING = [int(2 ** random.Random(number).uniform(0, 18)) for number in range(300)]
"""More than what the caches of schedules hold, and less than that of digests, which is full only after thousands of shapes."""
ONES = [np.ones(1) for _ in range(2)]
PART = np.ones(1000)


@contextlib.asynccontextmanager
async def _mesh():
    async with local_world(2) as comms:
        yield comms


@contextlib.asynccontextmanager
async def _open_rank():
    """Rank 0 waits for rank 1, which comes at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [Placement(rank=rank, size=2, host="127.0.0.1", port=port) for rank in range(2)]
    waiting = asyncio.create_task(form_mesh(places[0], SECRET, init_timeout=3_000))
    while True:
        with socket.socket() as probe:
            probe.setblocking(False)
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_connect(probe, ("127.0.0.1", port))
                break
        await asyncio.sleep(0.005)
    yield port
    for links in await asyncio.gather(waiting, form_mesh(places[1], SECRET, init_timeout=60)):
        links.close()


@contextlib.asynccontextmanager
async def _nothing():
    yield None


class Kind(NamedTuple):
    """What is done again and again."""

    step: object
    count: int
    """How often in the long form."""
    short: int
    """How often in the suite."""
    around: object = _mesh


KINDS = {
    "small": Kind(small, 1_000_000, 20_000),
    "varying": Kind(varying, 10_000, 800),
    "objects": Kind(objects, 10_000, 500),
    "groups": Kind(groups, 2_000, 500),
    "keyed": Kind(keyed, 2_000, 500),
    "messages": Kind(messages, 2_000, 500),
    "cancels": Kind(cancels, 2_000, 500),
    "timeouts": Kind(timeouts, 2_000, 500),
    "streams": Kind(streams, 2_000, 500),
    "handshakes": Kind(handshakes, 2_000, 500, _open_rank),
    "meshes": Kind(meshes, 200, 60, _nothing),
    "watched": Kind(watched, 200, 60, _nothing),
}


# -- what is counted -------------------------------------------------------------------------------------------


def rss():
    """Resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def slope(numbers, sizes):
    """Bytes for each operation over the second half of the samples: a straight line through them."""
    half = len(numbers) // 2
    return float(np.polyfit(numbers[half:], sizes[half:], 1)[0])


def counted():
    """What must be the same before and after."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "children": len(multiprocessing.active_children()),
    }


async def _settled():
    """All that is only waiting for its turn is gone."""
    for _ in range(5):
        await asyncio.sleep(0)
        gc.collect()


async def measure(kind, count):
    """What ``count`` operations of that kind leave behind: figures, and what is wrong with them."""
    outside = counted()
    async with kind.around() as around:
        for number in range(max(100, int(count * WARM))):
            await kind.step(around, number)
        await _quiet(kind, around)
        before, blocks, memory = counted(), 0, rss()
        every = max(1, count // SAMPLES)
        numbers, sizes = (
            array.array("q", bytes(8 * (count // every))) for _ in range(2)
        )  # no object for each sample
        for number in range(count):
            if number == count // 2:
                await _quiet(kind, around)
                blocks = sys.getallocatedblocks()
            await kind.step(around, number)
            if number % every == every - 1:
                numbers[number // every], sizes[number // every] = number, rss()
        await _quiet(kind, around)
        left = sys.getallocatedblocks() - blocks
        after, grown = counted(), rss() - memory
    await _settled()
    figures = {
        "operations": count,
        "rss_bytes_per_operation": round(slope(numbers, sizes), 3),
        "rss_grown": grown,
        "blocks": left,
    }
    wrong = [
        f"{name} were {before[name]} and are {after[name]}" for name in before if before[name] != after[name]
    ]
    end = counted()
    wrong += [
        f"{name} were {outside[name]} and are {end[name]} at the end"
        for name in end
        if outside[name] != end[name]
    ]
    if gc.garbage:
        wrong.append(f"the collector holds {gc.garbage[:3]}")
    if left > SLACK + BLOCKS * count:
        wrong.append(f"{left} blocks more after the second half of {count} operations")
    if count >= ENOUGH and figures["rss_bytes_per_operation"] >= SLOPE:
        wrong.append(f"{figures['rss_bytes_per_operation']} bytes of memory for each operation")
    if count < ENOUGH and grown > PAGES:
        wrong.append(f"{grown} bytes of memory more")
    return figures, wrong


async def _quiet(kind, around):
    if kind.around is _open_rank:  # its side of the handshakes ends when it has seen the callers go
        for _ in range(200):
            await asyncio.sleep(0.005)
            if len(asyncio.all_tasks()) <= 2 + 1:
                break
    await _settled()


def run(name, count, loop):
    """Figures of ``count`` operations of the kind ``name``, and what is wrong."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(measure(KINDS[name], count))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=list(KINDS), help="one kind only")
    parser.add_argument("--count", type=int, help="instead of what each kind has in the long form")
    parser.add_argument("--loop", choices=list(LOOPS), default=list(LOOPS)[-1])
    options = parser.parse_args()
    failures, all_figures = [], {}
    for name in KINDS if options.kind is None else (options.kind,):
        began = time.monotonic()
        count = options.count or KINDS[name].count
        figures, wrong = run(name, count, options.loop)
        all_figures[name] = figures
        tell(f"{name}: {figures}, {time.monotonic() - began:.1f} s")
        replay = f"python -m tests.reliability.leaks --loop {options.loop} --kind {name} --count {count}"
        failures += [f"{name}: {text}; replay: {replay}" for text in wrong]
    return conclude(failures, loop=options.loop, **all_figures)


if __name__ == "__main__":
    sys.exit(main())
