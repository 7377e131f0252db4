"""A connection is cut after byte k, for every k: of the rendezvous, and of one small operation of each kind.

A relay between two ranks passes on the first k bytes of one direction (and all of the other), then ends the connection: ``fin``
(both ends see an orderly end), ``rst`` (both see a reset) or ``stall`` (nothing moves any more, and nothing is closed).

The rules. *Operations*: every rank gets the right result, or, within a second, `PeerLost` that names an end of the connection
that was cut; of a stall, which no link can tell from a slow peer, each gets the right result or `CollectiveTimeout` at its limit.
*Rendezvous*: a cut before the last byte of the handshake's ANSWER is called again, and the mesh forms. After it every rank raises
`RendezvousError`: those that have joined at once, rank 0, while a JOIN is incomplete, at its ``init_timeout``, since the rank may
call again. A cut within READY leaves rank 0 with a mesh whose first operation raises `PeerLost`. ::

    python -m tests.reliability.cuts                       # every k, on asyncio: some minutes
    python -m tests.reliability.cuts --loop uvloop --how fin rst --size 3 --step 7
    python -m tests.reliability.cuts --only "allgather" --at 17 --way 1 --how rst       # one of them
"""

import argparse
import asyncio
import collections
import contextlib
import contextvars
import itertools
import logging
import socket
import struct
import sys
import time
from typing import NamedTuple
from unittest import mock

import numpy as np

from asynccoll.communicator import Communicator, Options
from asynccoll.engine.engine import Engine
from asynccoll.errors import CollectiveTimeout, PeerLost, RendezvousError
from asynccoll.net import accepting, coordinator, dialing, joiner
from asynccoll.net.driver import NetDriver
from asynccoll.net.handshake import Purpose
from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import form_mesh

from .common import LOOPS, conclude, tell

HOWS = ("fin", "rst", "stall")
BOUND = 1.0
"""Seconds from a FIN or RST to the last rank's error."""
LIMIT = 0.3
"""Time limit of operations where the connection may stall; a rank then asks the others for half a second."""
FORMING = 5.0
"""``init_timeout`` of the rendezvous."""
HANG = 20.0
"""Seconds after which a case counts as a hang."""
WIDE = 2_000
"""Streams of more bytes than that are cut at every byte of their ends only, and at some in between."""
AT_ONCE, SOME = 48, 12
"""Cases that wait for a time limit run side by side: those that all do, and those of which some do."""
SECRET = b"known to both ends"


class Cut(NamedTuple):
    """What the relay does."""

    how: str
    way: int
    """0: counts the bytes of the lower rank (of a rendezvous: of the caller), 1: those of the other."""
    at: int


class Relay:
    """Passes on what two sockets say, until the cut. Counts both ways."""

    def __init__(self, left, right, cut=None):
        self.sockets = (left, right)
        self.cut = cut
        self.passed = [0, 0]
        self.cut_at = None
        """Loop time of the cut."""
        self.loop = asyncio.get_running_loop()
        self.tasks = []
        if cut is not None and cut.at == 0:
            self._cut()
        else:
            self.tasks = [self.loop.create_task(self._carry(way)) for way in (0, 1)]

    async def _carry(self, way):
        source, sink = self.sockets[way], self.sockets[1 - way]
        mine = self.cut is not None and self.cut.way == way
        with contextlib.suppress(OSError):
            while True:
                room = min(1 << 16, self.cut.at - self.passed[way]) if mine else 1 << 16
                data = await self.loop.sock_recv(source, room)
                if self.cut_at is not None:
                    if self.cut.how == "stall" or not data:
                        return
                    continue  # read to the end, so that our end is no reset
                if not data:
                    break
                await self.loop.sock_sendall(sink, data)
                self.passed[way] += len(data)
                if mine and self.passed[way] == self.cut.at:
                    self._cut()
                    if self.cut.how == "rst":
                        return
        if self.cut_at is None:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def _cut(self):
        self.cut_at = self.loop.time()
        for sock in self.sockets:
            if self.cut.how == "fin":
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
            elif self.cut.how == "rst":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self.cut.how == "rst":
            me = asyncio.current_task()
            for task in self.tasks:
                if task is not me:
                    task.cancel()  # it must not wait for a descriptor that is closed
            self.loop.call_soon(self._reset)

    def _reset(self):
        for sock in self.sockets:
            sock.close()

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._reset()


def tcp_pair():
    """Two connected sockets over loopback: only TCP can be reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


# -- operations ------------------------------------------------------------------------------------------------


def floats(comm, count):
    return np.arange(float(count)) + comm.rank


def joined(left, right):
    return f"{left}{right}"


def _rooted(comm, values, root):
    return values if comm.rank == root else None


async def _messages(comm, count):
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    sends = [comm.send(floats(comm, count), other, tag=5) for other in others]
    return await asyncio.gather(*(comm.recv(other, 5) for other in others), *sends)


async def _group(comm):
    group = comm.new_group(range(comm.world_size - 1, -1, -1))
    return await group.allreduce(floats(comm, 4))


async def _two_at_once(comm):
    return await asyncio.gather(comm.allreduce(floats(comm, 4)), comm.allgather(floats(comm, 3)))


async def _stream(comm):
    total, parts = np.zeros(8), []
    async for lo, hi in comm.allreduce_stream(floats(comm, 8), out=total):
        parts.append((lo, hi))
    return total


class Shrunk(NamedTuple):
    """What `_shrink` gives on one rank."""

    rank: int
    members: tuple
    """World ranks."""
    total: list


async def _shrink(comm):
    smaller = await comm.shrink()
    return Shrunk(comm.rank, tuple(smaller.ranks), (await smaller.allreduce(floats(comm, 3))).tolist())


def wrong_shrink(one, others):
    """What is wrong with that outcome beside those of the others: totals of its members, and no two that are apart.

    Of two ranks alone each takes the other for dead when their only link ends: there is nobody who could tell them better.
    """
    right = [float(at * len(one.members) + sum(one.members)) for at in range(3)]
    if one.rank not in one.members or one.total != right:
        return f"rank {one.rank} has the total {one.total} of {one.members}"
    for other in others:
        if (
            len(others) > 2
            and isinstance(other, Shrunk)
            and not (set(one.members) <= set(other.members) or set(other.members) <= set(one.members))
        ):
            return f"ranks {one.rank} and {other.rank} went on with {one.members} and {other.members}"
    return None


OPERATIONS = {
    "barrier": lambda c: c.barrier(),
    "allreduce": lambda c: c.allreduce(floats(c, 4)),
    "allreduce in place": lambda c: c.allreduce_(floats(c, 4)),
    "allreduce by ring": lambda c: c.allreduce(floats(c, 6), algorithm="ring"),
    "allreduce of 100 numbers": lambda c: c.allreduce(floats(c, 100)),
    "allreduce_tree": lambda c: c.allreduce_tree({"a": floats(c, 2), "b": 1}),
    "reduce": lambda c: c.reduce(floats(c, 4), root=1),
    "reduce_scatter": lambda c: c.reduce_scatter(floats(c, 6)),
    "scan": lambda c: c.scan(floats(c, 4)),
    "exscan": lambda c: c.exscan(floats(c, 4)),
    "broadcast": lambda c: c.broadcast(_rooted(c, floats(c, 4), 1), 1),
    "allgather": lambda c: c.allgather(floats(c, c.rank + 2)),
    "gather": lambda c: c.gather(floats(c, 4), 1),
    "scatter": lambda c: c.scatter(_rooted(c, [floats(c, 3)] * c.world_size, 0), 0),
    "alltoall": lambda c: c.alltoall([floats(c, to + 1) for to in range(c.world_size)]),
    "objects: allreduce": lambda c: c.allreduce(f"{c.rank}.", joined),
    "objects: reduce": lambda c: c.reduce(f"{c.rank}.", joined, 1),
    "objects: scan": lambda c: c.scan(f"{c.rank}.", joined),
    "objects: broadcast": lambda c: c.broadcast(_rooted(c, {"from": c.rank}, 0), 0),
    "objects: allgather": lambda c: c.allgather(["rank", c.rank]),
    "objects: gather": lambda c: c.gather({c.rank}, 0),
    "objects: scatter": lambda c: c.scatter(_rooted(c, ["a"] * c.world_size, 1), 1),
    "objects: alltoall": lambda c: c.alltoall([[c.rank, to] for to in range(c.world_size)]),
    "keyed allreduce": lambda c: c.allreduce(floats(c, 4), key="k"),
    "keyed objects": lambda c: c.allgather(c.rank, key="k"),
    "messages": lambda c: _messages(c, 4),
    "large messages": lambda c: _messages(c, 9_000),
    "large allreduce": lambda c: c.allreduce(floats(c, 20_000)),
    "large broadcast": lambda c: c.broadcast(_rooted(c, floats(c, 12_000), 0), 0),
    "group": _group,
    "split": lambda c: c.split(0),
    "two at once": _two_at_once,
    "shrink": _shrink,
    "close": lambda c: c.close(),
}


def plain(value):
    """Something that compares by value, dtype and shape."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Shrunk):
        return value
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return (value.ranks, value.rank) if isinstance(value, Communicator) else value


class World:
    """Communicators over TCP, with the relay in the connection of ranks 0 and 1."""

    def __init__(self, size, cut, timeout):
        loop = asyncio.get_running_loop()
        links = [{} for _ in range(size)]
        for low, high in itertools.combinations(range(size), 2):
            links[low][high], links[high][low] = tcp_pair()
        near, links[1][0] = links[1][0], None
        far, links[1][0] = tcp_pair()
        self.comms = [
            Communicator(NetDriver(Engine(rank, size), loop, links[rank]), options=Options(timeout))
            for rank in range(size)
        ]
        self.relay = Relay(near, far, cut)

    async def close(self):
        """All that is left; where nobody answers any more, without waiting for it."""
        await self.relay.close()
        await asyncio.gather(*(comm.close() for comm in self.comms))


async def run_operation(name, size, cut):
    """(outcome of each rank, seconds from the cut to the last one or None, bytes passed). An outcome is a value or an error."""
    loop = asyncio.get_running_loop()
    world = World(size, cut, LIMIT if cut is not None and cut.how == "stall" else None)

    async def one(comm):
        try:
            return plain(await OPERATIONS[name](comm))
        except (PeerLost, CollectiveTimeout) as error:
            return error

    try:
        async with asyncio.timeout(HANG):
            outcomes = await asyncio.gather(*map(one, world.comms))
        cut_at = world.relay.cut_at
        passed = list(world.relay.passed)
        return outcomes, None if cut_at is None else loop.time() - cut_at, passed
    finally:
        await world.close()


def judge_operation(name, cut, expected, outcomes, seconds):
    """What is wrong, or None; and in one word what became of it."""
    kinds, size = set(), len(expected)
    for rank, (outcome, right) in enumerate(zip(outcomes, expected, strict=True)):
        if isinstance(outcome, PeerLost) and cut.how != "stall":
            ends = (
                {size - 1, size - 2} if name == "group" else {0, 1}
            )  # ranks of the group, which is turned around
            if not outcome.peers or not outcome.peers <= ends:
                return f"rank {rank} names {set(outcome.peers)}", "wrong name"
            kinds.add("lost")
        elif isinstance(outcome, CollectiveTimeout) and cut.how == "stall":
            kinds.add("timeout")
        elif isinstance(outcome, Exception):
            return f"rank {rank} got {type(outcome).__name__}: {outcome}", "wrong error"
        elif isinstance(outcome, Shrunk):
            if wrong := wrong_shrink(outcome, outcomes):
                return wrong, "wrong result"
            kinds.add("right" if outcome == right else "smaller")
        elif outcome != right:
            return f"rank {rank} got {outcome!r:.200}", "wrong result"
        else:
            kinds.add("right")
    bound = {"stall": LIMIT + 0.5 + BOUND}.get(cut.how, BOUND + accepting_time(name))
    if seconds is not None and seconds > bound:
        return f"took {seconds:.2f} s", "late"
    return None, "+".join(sorted(kinds))


def accepting_time(name):
    """Seconds that a close waits for its peers by itself."""
    return 1.0 if name == "close" else 0.0


# -- rendezvous --------------------------------------------------------------------------------------------------

STREAMS = {"rendezvous": (2, False), "pulse": (2, True), "link": (3, False), "link's pulse": (3, True)}
"""Which connection is cut: world size and whether there are pulses."""
_interpose = contextvars.ContextVar("interpose")


class RelayedCall(dialing.Call):
    """A call that a case sends through its relay."""

    __slots__ = ()

    def __init__(self, host, port, secret, hello, tls=None):
        super().__init__(host, _interpose.get()(hello, port), secret, hello, tls)


class Detour:
    """Listens where the calls of one case are sent to. The first of the purpose that is cut meets the cut."""

    def __init__(self, stream, cut):
        self.stream, self.cut = stream, cut
        self.relays, self.tasks, self.listeners, self.opened = [], [], [], []

    def __call__(self, hello, port):
        """The port to call instead of ``port``."""
        wanted = {
            "rendezvous": (Purpose.RENDEZVOUS, 0),
            "pulse": (Purpose.PULSE, 0),
            "link": (Purpose.LINK, 1),
            "link's pulse": (Purpose.PULSE, 1),
        }[self.stream]
        if (hello.purpose, hello.target) != wanted or hello.rank != STREAMS[self.stream][0] - 1:
            return port
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.listeners.append(listener)
        # A reader, since a `sock_accept` that is cancelled may lose a socket.
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, port)
        return listener.getsockname()[1]

    def _accept(self, listener, port):
        with contextlib.suppress(BlockingIOError):
            caller, _ = listener.accept()
            self.tasks.append(asyncio.get_running_loop().create_task(self._connect(caller, port)))
            self.opened.append(caller)

    async def _connect(self, caller, port):
        called = socket.socket()
        self.opened.append(called)
        for sock in (caller, called):
            sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(called, ("127.0.0.1", port))
        except OSError:  # not there yet, or no longer
            caller.close()
            called.close()
            return
        self.relays.append(Relay(caller, called, None if self.relays else self.cut))

    @property
    def cut_at(self):
        return self.relays[0].cut_at if self.relays else None

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for listener in self.listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        for relay in self.relays:
            await relay.close()
        for sock in self.opened:
            sock.close()


async def run_rendezvous(stream, cut):
    """(each rank's outcome, seconds from the cut to the last one, bytes passed). An outcome is a total or an error."""
    size, pulse = STREAMS[stream]
    loop = asyncio.get_running_loop()
    detour = Detour(stream, cut)
    _interpose.set(detour)
    made = []

    async def one(rank, listener):
        place = Placement(
            rank=rank,
            size=size,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            rendezvous_fd=None if rank else listener.fileno(),
        )
        try:
            links = await form_mesh(place, SECRET, init_timeout=FORMING, pulse=pulse)
        except RendezvousError as error:
            return error
        made.append(links)
        comm = Communicator(NetDriver(Engine(rank, size), loop, links.sockets), options=Options(LIMIT))
        made.append(comm)
        try:
            return plain(await comm.allreduce(floats(comm, 3)))
        except (PeerLost, CollectiveTimeout) as error:
            return error

    try:
        async with asyncio.timeout(HANG):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                outcomes = await asyncio.gather(*(one(rank, listener) for rank in range(size)))
        seconds = None if detour.cut_at is None else loop.time() - detour.cut_at
        return outcomes, seconds, list(detour.relays[0].passed) if detour.relays else [0, 0]
    finally:
        await detour.close()
        await asyncio.gather(*(one.close() for one in made if isinstance(one, Communicator)))
        for links in made:
            if not isinstance(links, Communicator):
                links.close()


def judge_rendezvous(stream, cut, expected, outcomes, seconds):
    """As `judge_operation`."""
    kinds = [type(one).__name__ if isinstance(one, Exception) else "right" for one in outcomes]
    for outcome, right, kind in zip(outcomes, expected, kinds, strict=True):
        if kind == "right" and outcome != right:
            return f"wrong total {outcome!r:.200}", "wrong result"
        if kind == "PeerLost" and cut.how == "stall" and "RendezvousError" not in kinds:
            return f"{outcome}", "wrong error"
    if "right" in kinds and "RendezvousError" in kinds:
        return f"a mesh that some ranks do not have has a result: {kinds}", "split"
    kind = "+".join(sorted(set(kinds)))
    waiting = isinstance(outcomes[0], RendezvousError) and "did not join" in str(outcomes[0])
    if waiting:
        kind += ", rank 0 waited for a JOIN"
    limit = FORMING + joiner.READY_GRACE + BOUND if waiting or cut.how == "stall" else BOUND
    if seconds is not None and seconds > limit:
        return f"took {seconds:.2f} s", f"late: {kind}"
    return None, kind


@contextlib.contextmanager
def short_limits():
    """So that a stalled handshake is given up, and called again, well within `FORMING`."""
    with (
        mock.patch.object(accepting, "HANDSHAKE_TIMEOUT", 0.3),
        mock.patch.object(dialing, "HANDSHAKE_TIMEOUT", 0.3),
        mock.patch.object(coordinator, "HANDSHAKE_TIMEOUT", 0.3),
        mock.patch.object(coordinator, "FAREWELL", 0.3),
        mock.patch.object(joiner, "READY_GRACE", 0.3),
        mock.patch.object(joiner, "Call", RelayedCall),
    ):
        yield


# -- all of them ---------------------------------------------------------------------------------------------------


def positions(total, step):
    """Every ``step``th byte, the last one too; of a wide stream those near the ends and some in between."""
    if total > WIDE:
        inner = range(400, total - 400, step * max(1, (total - 800) // 100))
        found = [*range(0, 400, step), *inner, *range(total - 400, total, step)]
    else:
        found = [*range(0, total, step)]
    return [*found, total]


class Survey:
    """Runs cases and counts what becomes of them."""

    def __init__(self, loop_name, step=1, at=None, ways=(0, 1), hows=HOWS):
        self.loop_name, self.step, self.at, self.ways, self.hows = loop_name, step, at, ways, hows
        self.failures = []
        self.cases = collections.Counter()
        self.kinds = collections.defaultdict(collections.Counter)
        self.longest = collections.Counter()
        """How, and of what -> seconds from the cut to the end on the last rank."""

    async def cover(self, name, run, judge, replay, side_by_side):
        """All cuts of one stream, so many at once; of those that stall, `AT_ONCE`."""
        expected, _, total = await run(None)
        if any(isinstance(outcome, Exception) for outcome in expected):
            self.failures.append(f"{name} fails without a cut: {expected}")
            return
        cuts = [
            Cut(how, way, at)
            for how in self.hows
            for way in self.ways
            for at in (positions(total[way], self.step) if self.at is None else [self.at])
        ]
        for how, group in itertools.groupby(cuts, lambda cut: cut.how):
            lot = AT_ONCE if how == "stall" else side_by_side
            rest = iter(group)
            while batch := list(itertools.islice(rest, lot)):
                await asyncio.gather(*(self._case(name, run, judge, cut, expected, replay) for cut in batch))

    async def _case(self, name, run, judge, cut, expected, replay):
        self.cases[cut.how] += 1
        try:
            outcomes, seconds, _ = await run(cut)
        except TimeoutError:
            wrong, kind = "hangs", "hang"
        except Exception as error:  # noqa: BLE001 (counted, told, and the exit code says so)
            wrong, kind = f"{type(error).__name__}: {error}", "stray"
        else:
            wrong, kind = judge(name, cut, expected, outcomes, seconds)
            if seconds is not None:
                what = f"{cut.how}, {'rendezvous: ' + kind if name in STREAMS else 'operations'}"
                self.longest[what] = max(self.longest[what], round(seconds, 3))
        self.kinds[cut.how][kind] += 1
        if wrong is not None:
            self.failures.append(
                f"{name}, {cut.how} after byte {cut.at} of way {cut.way}: {wrong}; replay: python -m "
                f"tests.reliability.cuts --loop {self.loop_name} {replay} --how {cut.how} --way {cut.way} --at {cut.at}"
            )


async def survey(names, sizes, **options):
    """Run the cases of ``names`` (operations and streams of the rendezvous). The `Survey`."""
    found = Survey(**options)
    began = time.monotonic()
    for name in names:
        before = sum(found.cases.values())
        if name in STREAMS:
            with short_limits():
                await found.cover(
                    name, lambda cut, name=name: run_rendezvous(name, cut), judge_rendezvous, f'--only "{name}"', SOME
                )  # fmt: skip
        else:
            for size in sizes:
                await found.cover(
                    name,
                    lambda cut, name=name, size=size: run_operation(name, size, cut),
                    judge_operation,
                    f'--only "{name}" --size {size}',
                    1 if size == 2 else AT_ONCE,  # a third rank's evidence is waited for
                )
        made, seconds = sum(found.cases.values()) - before, time.monotonic() - began
        tell(f"{name}: {made} cuts, {len(found.failures)} failures so far, {seconds:.0f} s")
    return found


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loop", choices=LOOPS, default="asyncio")
    parser.add_argument("--size", type=int, nargs="+", default=[2], help="world sizes of the operations")
    parser.add_argument("--step", type=int, default=1, help="cut at every so manieth byte")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=HOWS)
    parser.add_argument("--only", nargs="+", choices=[*STREAMS, *OPERATIONS], help="these alone")
    parser.add_argument("--way", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--at", type=int, help="cut after this byte alone")
    options = parser.parse_args(arguments)
    logging.getLogger("asynccoll").setLevel(logging.CRITICAL)
    names = options.only or [*STREAMS, *OPERATIONS]
    with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
        began = time.monotonic()
        found = runner.run(
            survey(
                names,
                options.size,
                loop_name=options.loop,
                step=options.step,
                at=options.at,
                ways=options.way,
                hows=options.how,
            )
        )
    return conclude(
        found.failures,
        loop=options.loop,
        streams=len(names),
        cuts=dict(found.cases),
        outcomes={how: dict(kinds.most_common()) for how, kinds in found.kinds.items()},
        longest_seconds=dict(found.longest),
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
