"""Cancels at seeded moments over real sockets: they surface where they were made, everybody hears of them, nothing is left.

::

    python -m tests.reliability.cancels                       # 1,000 points on each loop
    python -m tests.reliability.cancels --loop uvloop --point 17

A point is one operation on all ranks that is given up on one of them, in one of the `WAYS` of asyncio or by its own ``timeout=``,
at one of the `MOMENTS`. To meet these, the rank's reads are cut into pieces, and what gives up is called in the turn of the loop
after the byte that counts, before another one is read.
"""

import argparse
import asyncio
import collections
import contextlib
import platform
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "conformance"))  # where these helpers are

import verbs
from faults import early_bytes, held_bytes, settle, tiny_world

from asynccoll import CollectiveCancelled, CollectiveTimeout
from asynccoll.engine.wire import HEADER_SIZE
from asynccoll.net import driver
from asynccoll.testing import local_world

from .common import LOOPS, conclude, tell

MOMENTS = ("before", "header", "payload", "last")
"""Before another rank has called; within the header of a frame; within a payload; when the operation is complete, and whoever waits
for it has not been told."""
SIZES = (2, 3, 4)
COUNTS = (1, 1_000, 40_000, 300_000)
"""Elements of float64: within one frame, within the eager credit, beyond it, in several segments."""
LIMIT = 30.0
"""Seconds for one point: a hang is a failure."""
WORLD = 50
"""Points for which a world is used: what one leaves behind, the next ones meet. Every second one has sockets of 4 KiB, so that what
is cancelled is half-way out, too."""


class Point(NamedTuple):
    """One operation that is given up."""

    verb: str
    algorithm: str | None
    count: int
    way: str
    moment: str
    origin: int
    piece: int
    """Bytes that the origin reads at a time."""
    skip: int
    """How many bytes or headers are let pass before the one that counts."""
    fraction: float
    """Of the time that the operation takes, for a limit in seconds."""


def draw(number, size):
    """The point of that number in a world of ``size`` ranks."""
    rng = random.Random(number)
    way = tuple(WAYS)[number % len(WAYS)]
    moment = MOMENTS[number // len(WAYS) % len(MOMENTS)]
    verb, algorithm = rng.choice(verbs.CALLS)
    count = rng.choice(COUNTS[1:] if moment == "payload" else COUNTS)
    piece = rng.choice((5, 7, 11) if moment == "header" else (100, 1_000, 10_000, 1 << 20))
    return Point(
        verb=verb,
        algorithm=algorithm,
        count=min(count, 40_000) if piece < 1_000 else count,
        way=way,
        moment=moment,
        origin=rng.randrange(size),
        piece=piece,
        skip=rng.randrange(4),
        fraction=rng.random(),
    )


# -- the moment ------------------------------------------------------------------------------------------------


def whereabouts(engine):
    """Where the streams that come to a rank stand: the moments that it is at."""
    found = set()
    for inbound in engine._inbounds.values():
        staged = inbound.end - inbound.start
        if inbound._landing is not None or staged >= HEADER_SIZE:
            found.add("payload")
        elif staged:
            found.add("header")
    return found


@contextlib.contextmanager
def watched(comm, point, fire):
    """Inside, ``comm`` reads in pieces, and ``fire`` is called at the moment, once."""
    engine, loop = comm._pump.engine, comm._pump.loop
    receive_into, received = engine.receive_into, engine.received
    left = [point.skip]
    fired = []

    def pieces(peer):
        return receive_into(peer)[: point.piece]

    def watch(peer, nbytes, now):
        more = received(peer, nbytes, now)
        if not fired and point.moment in whereabouts(engine):
            if not left[0]:
                fired.append(loop.call_soon(fire))
                return False  # no other byte before that
            left[0] -= 1
        return more

    with (
        mock.patch.multiple(engine, create=True, receive_into=pieces, received=watch),
        mock.patch.object(driver, "SLICE", min(driver.SLICE, 16 * point.piece)),
    ):
        yield


# -- the ways --------------------------------------------------------------------------------------------------


class GivenUp:
    """One operation of the origin, and how it is given up."""

    def __init__(self, start, limit):
        self.start = start
        """Calls the verb."""
        self.limit = limit
        """Seconds, for the ways that are a limit."""
        self.work = None
        self.fire = None
        """Gives up. False says that there was nothing to cancel."""
        self.refused = False
        self.complete = False
        """It was complete when it was given up."""

    def at_once(self):
        """What the watch calls."""
        self.complete = self.work.done()
        if self.fire is not None:
            self.refused = self.fire() is False


async def _awaiting(given):
    given.work = given.start()

    async def wait():
        return await given.work

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)  # a task that has not begun does not wait for anything yet
    given.fire = task.cancel
    return await task


async def _task(given):
    given.work = given.start()
    task = asyncio.create_task(given.work.wait())
    given.fire = task.cancel
    return await task


async def _work(given):
    given.work = given.start()
    given.fire = given.work.cancel
    return await given.work


async def _gathered(given):
    given.work = given.start()
    together = asyncio.gather(given.work)
    given.fire = together.cancel
    (result,) = await together
    return result


async def _timeout(given):
    given.work = given.start()
    async with asyncio.timeout(None) as limit:
        loop = asyncio.get_running_loop()
        given.fire = lambda: limit.reschedule(loop.time()) if not given.work.done() else None
        return await given.work


async def _timeout_in_time(given):
    given.work = given.start()
    async with asyncio.timeout(given.limit):
        return await given.work


async def _wait_for(given):
    given.work = given.start()
    task = asyncio.create_task(asyncio.wait_for(given.work, LIMIT))
    await asyncio.sleep(0)  # see `_awaiting`
    given.fire = task.cancel
    return await task


async def _wait_for_in_time(given):
    given.work = given.start()
    return await asyncio.wait_for(given.work, given.limit)


async def _group(given):
    given.work = given.start()
    failing = asyncio.get_running_loop().create_future()

    async def sibling():
        await failing

    given.fire = lambda: failing.done() or failing.set_exception(LookupError("sibling"))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(given.work.wait())
        beside = group.create_task(sibling())
        task.add_done_callback(lambda _: beside.cancel())
    return task.result()


async def _own_limit(given):
    given.work = given.start(timeout=given.limit)
    return await given.work


WAYS = {
    "cancel of the awaiting task": (_awaiting, asyncio.CancelledError),
    "cancel of the task of wait()": (_task, asyncio.CancelledError),
    "cancel of the work": (_work, asyncio.CancelledError),
    "cancel of a gather": (_gathered, asyncio.CancelledError),
    "asyncio.timeout": (_timeout, TimeoutError),
    "asyncio.timeout in seconds": (_timeout_in_time, TimeoutError),
    "cancel of wait_for": (_wait_for, asyncio.CancelledError),
    "wait_for in seconds": (_wait_for_in_time, TimeoutError),
    "TaskGroup with a failing sibling": (_group, LookupError),
    "timeout= of the operation": (_own_limit, CollectiveTimeout),
}
"""What gives up, and what its caller must see."""


# -- one point -------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """What must not be."""


def must(true, *facts):
    if not true:
        raise Wrong(" ".join(map(str, facts)))


def counts(comms):
    """What must be the same before and after."""
    groups = [group for comm in comms for group in comm._pump.engine._groups.values()]
    return {
        "pending": sum(len(comm.pending()) for comm in comms),
        "tasks": len(asyncio.all_tasks()),
        "queued bytes": sum(held_bytes(comm) for comm in comms),
        "early bytes": sum(early_bytes(comm) for comm in comms),
        "early": sum(len(group.early) for group in groups),
        "withdrawn": sum(len(group.withdrawn) for group in groups),
        "paused": sum(len(comm._pump.engine.paused) for comm in comms),
        "streams": sum(len(box.streams) for comm in comms for box in comm._pump.engine._outboxes.values()),
    }


async def once(comms, point, seconds):
    """Run one point: the moment it was given up at. Raises `Wrong`."""
    before = counts(comms)
    origin = comms[point.origin]
    others = [comm for comm in comms if comm is not origin]
    root = point.skip % len(comms)

    def start(comm, **options):
        return verbs.start(comm, point.verb, point.count, root, algorithm=point.algorithm, **options)

    def start_watched(**options):
        work = start(origin, **options)
        if point.moment == "last":
            work.add_done_callback(lambda _: fire())  # the first of its callbacks: nobody else has heard yet
        return work

    given = GivenUp(start_watched, max(1e-5, point.fraction * seconds))
    met = []

    def fire():
        met.append("last" if given.work.done() else point.moment)
        given.at_once()

    with watched(origin, point, fire):
        way, expected = WAYS[point.way]
        task = asyncio.create_task(way(given))
        while given.work is None:
            await asyncio.sleep(0)
        if point.moment == "before":
            await asyncio.sleep(0)
            fire()
            if point.skip % 2:
                await settle()  # the others hear of it before they call
        works = [start(comm) for comm in others]
        (mine,) = await asyncio.gather(task, return_exceptions=True)
    results = await asyncio.gather(*works, return_exceptions=True)
    moment = met[0] if met else "last"
    told = point.moment == "before" and point.skip % 2 and given.fire is not None
    _judge(point, given, mine, expected, bool(met))
    complete = given.work.done() and not given.work.cancelled() and given.work.exception() is None
    for comm, result in zip(others, results, strict=True):
        if isinstance(result, BaseException):
            if (
                expected is CollectiveTimeout
            ):  # the limit is everybody's, and the origin may have made it just in time
                must(type(result) is CollectiveTimeout, f"rank {comm.rank} raised {result!r}")
            else:
                must(not complete, f"rank {comm.rank} failed with {result!r}, though the origin was complete")
                must(type(result) is CollectiveCancelled, f"rank {comm.rank} raised {result!r}")
                must(result.origin == point.origin, f"rank {comm.rank} names {result.origin}")
        else:
            must(not told, f"rank {comm.rank} got a result though it called after the cancel")
            must(
                verbs.right(comm, point.verb, point.count, result, root),
                f"rank {comm.rank} got a wrong result",
            )
    if not isinstance(mine, BaseException):
        must(verbs.right(origin, point.verb, point.count, mine, root), "the origin got a wrong result")
    await _next(comms)
    after = counts(comms)
    for _ in range(200):
        if after == before:
            break
        await settle()
        after = counts(comms)
    must(after == before, f"counts were {before} and are {after}")
    return moment


def _judge(point, given, mine, expected, met):
    """What the origin's caller got is what its way promises."""
    if isinstance(mine, ExceptionGroup):
        must(
            [type(error) for error in mine.exceptions] == [expected], f"the group raised {mine.exceptions!r}"
        )
    elif isinstance(mine, BaseException):
        must(type(mine) is expected, f"the origin raised {mine!r}")
    elif given.fire is None or not met:
        pass  # a limit that was not reached, or a moment that did not come
    elif given.work.cancelled():
        must(False, "the cancel was lost")
    elif given.refused:
        must(given.complete, "there was nothing to cancel, and yet it was under way")
    elif point.way == "cancel of wait_for" and sys.version_info < (3, 12):
        pass  # it keeps a result that comes between the cancel and its own next turn: python/cpython#86296
    else:
        must(not point.way.startswith("cancel"), "the cancel was lost")
        must(given.complete, "the operation ended well though it was given up before it was complete")


async def _next(comms):
    """The next operations are right."""
    size = len(comms)
    totals = await asyncio.gather(*(comm.allreduce(comm.rank + 1) for comm in comms))
    must(totals == [size * (size + 1) // 2] * size, f"the next operation gave {totals}")
    found = await asyncio.gather(*(verbs.start(comm, "allgather", 3) for comm in comms))
    for comm, result in zip(comms, found, strict=True):
        must(verbs.right(comm, "allgather", 3, result), f"the operation after gave {result}")


# -- many ------------------------------------------------------------------------------------------------------


async def _world(size, numbers):
    """Run the points of these numbers in one world: yields number, moment or what was wrong."""
    tiny = numbers[0] // WORLD % 2
    async with tiny_world(size, LIMIT) if tiny else local_world(size, timeout=LIMIT) as comms:
        await _next(comms)
        for number in numbers:
            point = draw(number, size)
            if tiny:
                point = point._replace(count=min(point.count, 40_000))
            began = time.perf_counter()
            try:
                async with asyncio.timeout(LIMIT):
                    works = [
                        verbs.start(comm, point.verb, point.count, algorithm=point.algorithm)
                        for comm in comms
                    ]
                    await asyncio.gather(*works)
                    seconds = time.perf_counter() - began
                    yield number, await once(comms, point, seconds), None
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (told as a failure)
                yield number, None, f"{type(error).__name__}: {error}; {point}"
                return  # what comes after it in this world means nothing


def run(loop, numbers, report=lambda number: None):
    """The failures of these points on that loop, and how often each moment was met."""
    failures, moments = [], collections.Counter()

    async def all_worlds():
        left = list(numbers)
        while left:
            size = SIZES[left[0] // WORLD % len(SIZES)]
            batch = [number for number in left[:WORLD] if number // WORLD == left[0] // WORLD]
            done = []
            async with contextlib.aclosing(_world(size, batch)) as points:
                async for number, moment, wrong in points:
                    done.append(number)
                    report(number)
                    if wrong is None:
                        moments[moment] += 1
                    else:
                        failures.append(
                            f"{wrong}; replay: python -m tests.reliability.cancels --loop {loop} --point {number}"
                        )
            left = left[len(done) :]

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(all_worlds())
    return failures, moments


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=1_000, help="on each loop")
    parser.add_argument("--loop", choices=list(LOOPS), help="one loop only")
    parser.add_argument("--point", type=int, help="this one only")
    options = parser.parse_args()
    numbers = range(options.points) if options.point is None else (options.point,)
    began, failures, moments = time.monotonic(), [], collections.Counter()
    loops = list(LOOPS) if options.loop is None else [options.loop]
    for loop in loops:
        wrong, met = run(loop, numbers, lambda number, loop=loop: number % 100 or tell(f"{loop}: {number}"))
        failures += wrong
        moments += met
    return conclude(
        failures,
        python=platform.python_version(),
        points=len(numbers) * len(loops),
        moments=dict(moments),
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
