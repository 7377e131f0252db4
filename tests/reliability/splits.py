"""Reads of one byte and the smallest socket buffers: every verb gives the same bits as in an ordinary run.

Runs under any interpreter that has the package's dependencies, without pytest, so that one command serves every version of
Python::

    python3.13 -m tests.reliability.splits
    python -m tests.reliability.splits --loop uvloop --size 3 --mode turns --only allgather

The handshake is split too. Modes: ``reads`` reads one byte at a time until there is no more, ``turns`` one byte in each turn of the
loop, so that everything else of the process comes between any two bytes.
"""

import argparse
import asyncio
import contextlib
import hashlib
import platform
import random
import secrets
import socket
import sys
import time
from unittest import mock

import numpy as np

from asynccoll.engine.engine import Engine
from asynccoll.net import dialing, driver, joiner, station
from asynccoll.net.launchers import Placement
from asynccoll.world import open_mesh

from .common import LOOPS, conclude, tell

BUFFER = 4096
"""Bytes that a socket's buffers hold: the least with which the kernel gets along, since its own records count."""
MODES = {"reads": driver.SLICE, "turns": 1}
"""Bytes that a driver reads in one turn of the loop."""
SIZES = (2, 3, 4)
COUNTS = {"reads": (0, 1, 3, 1_000, 30_000), "turns": (0, 1, 1_000)}
"""Elements of float32. The most of them are beyond 64 KiB: bulk, which has to be asked for."""
LIMIT = 120.0
"""Seconds that one sample may take: a hang is a failure."""


class _NarrowLoop:
    """An event loop that gives one byte to who asks for several: the handshake reads through it."""

    async def sock_recv_into(self, sock, buffer):
        return await super().sock_recv_into(sock, memoryview(buffer)[:1])


def _narrow(factory):
    """The class of the loops that ``factory`` makes, made to read byte by byte."""
    probe = factory()
    probe.close()
    return type("NarrowLoop", (_NarrowLoop, type(probe)), {})


@contextlib.contextmanager
def narrow(mode):
    """Inside, meshes read one byte at a time and their sockets hold `BUFFER` bytes. Gives the number of reads, in a list."""
    reads = [0]
    receive_into = Engine.receive_into

    def one_byte(engine, peer):
        reads[0] += 1
        return receive_into(engine, peer)[:1]

    def shrunk(make):
        # Before the connection is made: later the kernel goes on with packets that do not fit, and crawls.
        def made(*args, **options):
            sock = make(*args, **options)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            return sock

        return made

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Engine, "receive_into", one_byte))
        stack.enter_context(mock.patch.object(driver, "SLICE", MODES[mode]))
        for module in (station, joiner):
            stack.enter_context(mock.patch.object(module, "listen", shrunk(module.listen)))
        stack.enter_context(mock.patch.object(dialing, "prepare", shrunk(dialing.prepare)))
        yield reads


# -- what is called --------------------------------------------------------------------------------------------


def own(rank, count):
    """What a rank brings along: floats whose sum depends on the order."""
    numbers = np.random.default_rng((rank, count)).standard_normal(count) * 10.0 ** (rank % 3)
    return numbers.astype(np.float32)


def whole(rank, count):
    return (np.arange(count) * 7 + rank).astype(np.int64)


async def _streamed(comm, count):
    found = np.zeros(count, np.float32)
    async for offset, part in comm.allreduce_stream(own(comm.rank, count)):
        found[offset : offset + len(part)] = part
    return found


async def _messages(comm, count):
    """Round the ring with a tag, and to rank 0 from any source."""
    size = comm.world_size
    sent = [comm.send(own(comm.rank, count), (comm.rank + 1) % size, tag=3), comm.send([comm.rank] * 3, 0)]
    heard = [await comm.recv((comm.rank - 1) % size, tag=3)]
    if comm.rank == 0:
        heard += sorted([await comm.recv(tag=0) for _ in range(size)])
    for work in sent:
        await work
    return heard


async def _keyed(comm, count):
    """Two keys, in another order on each rank."""
    works = {}
    for key in ("a", "b") if comm.rank % 2 else ("b", "a"):
        works[key] = comm.allreduce(own(comm.rank + ord(key), count), key=key)
    return [await works["a"], await works["b"]]


async def _groups(comm, count):
    half = await comm.split(comm.rank % 2)
    found = await half.allreduce(own(comm.rank, count))
    await half.close()
    return found


async def _joined(comm, count):
    array = whole(comm.rank, count)
    out = np.zeros(count, np.float32)
    await asyncio.gather(
        comm.allreduce_(array, "max"), comm.allreduce(own(comm.rank, count), out=out), comm.barrier()
    )
    return [array, out]


def _root(comm):
    return comm.world_size - 1


CALLS = {
    "barrier": lambda comm, count: comm.barrier(),
    "allreduce ring": lambda comm, count: comm.allreduce(own(comm.rank, count), algorithm="ring"),
    "allreduce tree": lambda comm, count: comm.allreduce(own(comm.rank, count), algorithm="tree"),
    "allreduce doubling": lambda comm, count: comm.allreduce(own(comm.rank, count), algorithm="doubling"),
    "allreduce float16": lambda comm, count: comm.allreduce(own(comm.rank, count).astype(np.float16), "avg"),
    "allreduce prod": lambda comm, count: comm.allreduce(whole(comm.rank, count), "prod"),
    "several at once": _joined,
    "allreduce_tree": lambda comm, count: comm.allreduce_tree({"w": own(comm.rank, count), "n": [comm.rank]}),
    "allreduce_stream": _streamed,
    "objects": lambda comm, count: comm.allreduce([own(comm.rank, count).tolist()]),
    "fold": lambda comm, count: comm.allreduce([comm.rank, count], lambda a, b: [*a, "+", *b]),
    "reduce": lambda comm, count: comm.reduce(own(comm.rank, count), root=_root(comm)),
    "reduce_scatter": lambda comm, count: comm.reduce_scatter(own(comm.rank, count)),
    "scan": lambda comm, count: comm.scan(own(comm.rank, count)),
    "exscan": lambda comm, count: comm.exscan(own(comm.rank, count)),
    "broadcast": lambda comm, count: comm.broadcast(
        own(9, count) if comm.rank == _root(comm) else None, _root(comm)
    ),
    "broadcast objects": lambda comm, count: comm.broadcast({"w": own(9, count)} if comm.rank == 0 else None),
    "allgather": lambda comm, count: comm.allgather(own(comm.rank, count + comm.rank)),
    "gather": lambda comm, count: comm.gather(own(comm.rank, count), root=_root(comm)),
    "scatter": lambda comm, count: comm.scatter(
        [own(to, count) for to in range(comm.world_size)] if comm.rank == 0 else None
    ),
    "alltoall": lambda comm, count: comm.alltoall(
        [own(comm.rank + 10 * to, count) for to in range(comm.world_size)]
    ),
    "send, recv": _messages,
    "keys": _keyed,
    "groups": _groups,
}
"""Every verb, and what is built of them."""


def digest(value):
    """A text that two values share exactly if they have the same types, shapes and bits."""
    state = hashlib.sha256()

    def add(one):
        if isinstance(one, np.ndarray):
            state.update(f"{one.dtype}{one.shape}".encode())
            state.update(one.tobytes())
        elif isinstance(one, list | tuple):
            state.update(f"{type(one).__name__}{len(one)}".encode())
            for item in one:
                add(item)
        elif isinstance(one, dict):
            add([[key, one[key]] for key in sorted(one)])
        else:
            state.update(repr(one).encode())

    add(value)
    return state.hexdigest()


# -- runs ------------------------------------------------------------------------------------------------------


async def _sample(size, calls):
    """Open a mesh, make all calls, close it: the digests, by name and count, a list in rank order."""
    secret = secrets.token_bytes(16)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [Placement(rank=rank, size=size, host="127.0.0.1", port=port) for rank in range(size)]
    comms = await asyncio.gather(
        *(open_mesh(place, secret, timeout=LIMIT, init_timeout=LIMIT) for place in places)
    )
    found = {}

    async def one(comm, name, count):
        return digest(await CALLS[name](comm, count))

    try:
        for name, count in calls:
            found[name, count] = await asyncio.gather(*(one(comm, name, count) for comm in comms))
        assert not any(comm.pending() for comm in comms)
    finally:
        await asyncio.gather(*(comm.close() for comm in comms))
    return found


def run(loop, size, calls, mode=None):
    """The digests of one sample, and how many reads it took in ``mode`` (None: an ordinary run)."""
    reads = [0]
    with contextlib.ExitStack() as stack:
        factory = LOOPS[loop]
        if mode is not None:
            reads = stack.enter_context(narrow(mode))
            factory = _narrow(factory)
        runner = stack.enter_context(asyncio.Runner(loop_factory=factory))
        return runner.run(asyncio.wait_for(_sample(size, calls), LIMIT)), reads[0]


def differences(loop, size, mode, calls):
    """What one sample in ``mode`` got that the ordinary run did not, as the commands that replay it; and the number of reads."""
    right, _ = run(loop, size, calls)
    try:
        found, reads = run(loop, size, calls, mode)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (told as a failure)
        return [f"{type(error).__name__}: {error}; replay: {_replay(loop, size, mode, '')}"], 0
    return [
        f"{name} of {count} differs; replay: {_replay(loop, size, mode, name)}"
        for (name, count), digests in right.items()
        if found[name, count] != digests
    ], reads


def _replay(loop, size, mode, name):
    only = f" --only {name!r}" if name else ""
    return f"python -m tests.reliability.splits --loop {loop} --size {size} --mode {mode}{only}"


def sample(mode, only=None, seed=0):
    """The calls of one sample: every verb with every count, in an order of the seed's."""
    calls = [(name, count) for name in CALLS for count in COUNTS[mode] if only in (None, name)]
    random.Random(seed).shuffle(calls)
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loop", choices=list(LOOPS), help="one loop only")
    parser.add_argument("--size", type=int, help="one number of ranks only")
    parser.add_argument("--mode", choices=list(MODES), help="one way to split only")
    parser.add_argument("--only", choices=list(CALLS), metavar="CALL", help="one call only, see CALLS")
    options = parser.parse_args()
    began, failures, compared, total = time.monotonic(), [], 0, 0
    for loop in LOOPS if options.loop is None else (options.loop,):
        for mode in MODES if options.mode is None else (options.mode,):
            for size in SIZES if options.size is None else (options.size,):
                calls = sample(mode, options.only, seed=size)
                failed, reads = differences(loop, size, mode, calls)
                tell(f"{loop} {mode} W={size}: {len(calls)} calls, {reads} reads, {len(failed)} differences")
                failures += failed
                compared += len(calls) * size
                total += reads
    return conclude(
        failures,
        python=platform.python_version(),
        loops=list(LOOPS) if options.loop is None else [options.loop],
        results=compared,
        reads_of_one_byte=total,
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
