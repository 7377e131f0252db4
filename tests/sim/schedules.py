"""Random schedules: one seed is one world with its links, its operations, its timing and at most one trouble.

Each rank starts the same operations in the same order, at moments of its own; several run at once. In some worlds some have keys,
and each rank starts those in an order of its own. Every result and every error is checked, a program that would hang is `Stuck`,
and nothing may be left in the engines at the end.

    python -m tests.sim.schedules --seeds 3000      one JSON line: seeds, hangs, wrong, stray, seconds
    python -m tests.sim.schedules --seed 17         one world, with what it does
"""

import argparse
import asyncio
import json
import logging
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from asynccoll.communicator import Communicator, Options
from asynccoll.errors import (
    CollectiveCancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    PeerLost,
    RemoteError,
)
from asynccoll.sim.driver import Conditions, SimNetwork
from asynccoll.sim.loop import SimLoop, Stuck

TROUBLES = {"none": 6, "cancel": 4, "late": 3, "mismatch": 4, "refusal": 2, "crash": 2, "leave": 2}
"""What one rank may do to one step, and how often."""
FIELDS = {
    "allreduce": ["verb", "name", "op", "dtype", "shape", "algorithm"],
    "allreduce_": ["verb", "name", "op", "dtype", "shape", "algorithm"],
    "out": ["verb", "name", "op", "dtype", "shape", "algorithm"],
    "tree": ["verb", "name", "structure", "algorithm"],
    "broadcast": ["verb", "name", "root"],
    "object": ["verb", "name", "root"],
    "allgather": ["verb", "name", "dtype", "algorithm", "path"],
    "objects": ["verb", "name", "algorithm", "path"],
    "gather": ["verb", "name", "root", "dtype", "path"],
    "scatter": ["verb", "name", "root"],
    "alltoall": ["verb", "name", "dtype", "path"],
    "fold": ["verb", "name", "path"],
    "reduce": ["verb", "name", "op", "dtype", "shape", "root", "algorithm"],
    "reduce_scatter": ["verb", "name", "op", "dtype", "shape", "algorithm"],
    "scan": ["verb", "name", "op", "dtype", "shape", "algorithm"],
    "exscan": ["verb", "name", "op", "dtype", "shape", "algorithm"],
    "fold to root": ["verb", "name", "path", "root"],
    "prefixes": ["verb", "name", "path"],
    "barrier": ["verb", "name"],
}
"""Kind of step -> in what one rank may differ."""
SENTINEL = 77
"""What a rank fills its memory with when it has got it back."""
CREDIT = 256 * 1024
ON_A_LINK = 400_000
"""Bytes that a control frame may have to wait for, besides the link's buffer: a segment, and what came before it."""
WALL_LIMIT = 60
"""Seconds of real time after which a world counts as a hang, whatever its own clock says."""


class Wrong(AssertionError):
    """A result or an error that the plan does not allow."""


class Stray(AssertionError):
    """Something is left in an engine or on the loop."""


class Hang(AssertionError):
    """The world ran for more than `WALL_LIMIT`."""


# -- what a seed draws -----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One operation, the same on all ranks."""

    kind: str
    count: int
    dtype: str
    op: str
    root: int
    algorithm: str


class Trouble(NamedTuple):
    """What goes wrong, on which rank, in which step."""

    kind: str
    rank: int
    step: int
    delay: float
    """It happens so many virtual seconds after the call,"""
    pieces: int
    """or when so many pieces have arrived at the rank, if that is sooner; 0: the delay alone counts."""
    detail: str = ""
    """Of a mismatch: the field that differs."""


@dataclass
class Plan:
    seed: int
    size: int
    conditions: Conditions
    steps: list[Step]
    pauses: list[list[float]]
    """Rank -> virtual seconds before each step."""
    trouble: Trouble
    timeout: float = 0.0
    """Limit of the step in trouble, on the ranks in `limited`."""
    limited: set[int] = field(default_factory=set)
    keys: list[str | None] = field(default_factory=list)
    """Step -> its key."""
    orders: list[list[int]] = field(default_factory=list)
    """Rank -> the steps in the order of its calls; those without a key, and those of one key, are in the same order on all."""


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)
    size = rng.randint(2, 8)
    (kind,) = rng.choices([*TROUBLES], [*TROUBLES.values()])
    bulk = rng.random() < 0.4
    conditions = _conditions(rng, kind in ("late", "mismatch", "leave"), bulk)
    piece = min(conditions.buffer, conditions.piece // (2 if conditions.split else 1))
    steps = [_step(rng, size, 250 * max(1, piece)) for _ in range(rng.randint(1, 5))]
    at, rank = rng.randrange(len(steps)), rng.randrange(size)
    if bulk:  # the step in trouble moves large blocks straight into the ranks' memory
        steps[at] = Step(
            rng.choice(["allreduce_", "out", "broadcast", "gather", "scatter"]),
            60_000,
            "f4",
            "sum",
            0,
            "auto",
        )
    pace = rng.choice([0.0, 0.001, 0.05, 2.0])
    pauses = [[rng.choice([0.0, rng.random() * pace]) for _ in steps] for _ in range(size)]
    if rng.random() < 0.3:
        trouble = Trouble(kind, rank, at, rng.choice([0.0, rng.random() * 0.01, rng.random() * pace]), 0)
    else:  # in the middle of a transfer
        trouble = Trouble(kind, rank, at, 1000.0, int(2 ** (rng.random() * 9)))
    plan = Plan(seed, size, conditions, steps, pauses, trouble)
    if kind == "late":
        plan.timeout = rng.choice([0.5, 3.0])
        plan.limited = set(rng.sample(range(size), rng.randint(1, size)))
        pauses[rank][at] += rng.random() * 3 * plan.timeout
    elif kind == "mismatch":
        plan.trouble = plan.trouble._replace(detail=rng.choice(FIELDS[steps[at].kind]))
    _draw_keys(plan, random.Random(f"keys of {seed}"))
    return plan


def _draw_keys(plan: Plan, rng: random.Random) -> None:
    """Which steps have which key, and in which order each rank calls."""
    keyed = rng.random() < 0.6
    plan.keys = [
        rng.choice([None, "a", "a", f"step {at}"]) if keyed else None for at in range(len(plan.steps))
    ]
    for _ in range(plan.size):
        lanes: dict[str | None, list[int]] = {}
        for at, key in enumerate(plan.keys):
            lanes.setdefault(key, []).append(at)
        plan.orders.append([lanes[key].pop(0) for key in rng.sample(plan.keys, len(plan.keys))])


def _conditions(rng: random.Random, quick: bool, bulk: bool) -> Conditions:
    """``quick``: a control frame arrives within a tenth of a second. Else links are as slow as they like."""
    piece = rng.choice([3000, 1 << 16] if bulk else [1, 3, 25, 200, 3000, 1 << 16])
    buffer = rng.choice([1 << 14, 1 << 18] if bulk else [1, 50, 1000, 1 << 14, 1 << 18])
    delay = rng.choice([0.0, 0.0, 0.0001, 0.002, 0.1])
    if quick:
        buffer = max(buffer, 1000)
        delay = min(delay, 0.025 * piece / (buffer + ON_A_LINK))
    return Conditions(delay, piece, rng.random() < 0.5, buffer)


def _step(rng: random.Random, size: int, budget: int) -> Step:
    """``budget``: bytes per rank that the links move in reasonable time."""
    kind = rng.choice(["allreduce", *FIELDS])
    dtype = rng.choice(["f4", "f8", "i4", "i8", "f2", "u1"])
    ops = ["sum", "max", "min", "bor" if np.dtype(dtype).kind in "iu" else "avg"]
    count = rng.choice([0, 1, size - 1, size, 100, 1000, 17_000, 33_000, 100_000])
    count = min(count, budget // (size * np.dtype(dtype).itemsize))
    algorithms = ["auto", "ring", "doubling"]
    if kind in ("reduce", "reduce_scatter"):
        algorithms = ["auto", "ring", "tree"]
    elif kind in ("scan", "exscan"):
        algorithms = ["auto", "chain", "doubling"]
    elif kind in ("allreduce", "allreduce_", "out", "tree"):
        algorithms.append("tree")
    elif kind in ("broadcast", "object"):
        algorithms = ["auto", "tree"]
    op = "sum" if kind == "tree" else rng.choice(ops)
    return Step(kind, count, dtype, op, rng.randrange(size), rng.choice(algorithms))


# -- what a rank calls, and what it must get -------------------------------------------------------------------


@dataclass
class Call:
    """One rank's call of a step."""

    verb: str
    args: list[Any]
    options: dict[str, Any]
    lent: Any = None
    """The rank's memory that the call may write to."""


def numbers(plan: Plan, at: int, rank: int, fewer: int = 0) -> Any:
    """A rank's array: small integers, whose sums are exact in every dtype."""
    step = plan.steps[at]
    rng = np.random.default_rng((plan.seed, at, rank))
    return rng.integers(0, 9, max(0, step.count - fewer)).astype(step.dtype)


def thing(plan: Plan, at: int, rank: int) -> Any:
    """A rank's Python value."""
    return {"of": rank, "data": bytes(max(0, plan.steps[at].count - rank))}


def call_of(plan: Plan, at: int, rank: int) -> Call:
    """What ``rank`` calls in a step without trouble."""
    step = plan.steps[at]
    value = numbers(plan, at, rank)
    chosen = {"algorithm": step.algorithm}
    match step.kind:
        case "allreduce":
            return Call("allreduce", [value, step.op], chosen)
        case "allreduce_":
            return Call("allreduce_", [value, step.op], chosen, value)
        case "out":
            out = np.zeros_like(value)
            return Call("allreduce", [value, step.op], {**chosen, "out": out}, out)
        case "tree":
            tree = {"a": value, "b": [np.full(3, rank, "i8"), rank]}
            return Call("allreduce_tree", [tree, step.op], chosen)
        case "broadcast" if rank == step.root:
            return Call("broadcast", [value, step.root], chosen)
        case "broadcast" if rank % 2:
            return Call("broadcast", [None, step.root], chosen)
        case "broadcast":
            out = np.zeros_like(value)
            return Call("broadcast", [None, step.root], {**chosen, "out": out}, out)
        case "object":
            return Call("broadcast", [thing(plan, at, rank), step.root], chosen)
        case "allgather":  # another length on each rank
            return Call("allgather", [numbers(plan, at, rank, rank)], chosen)
        case "objects":
            return Call("allgather", [thing(plan, at, rank)], chosen)
        case "gather" if rank == step.root and rank % 2:
            memory, outs = _outs([numbers(plan, at, other, other) for other in range(plan.size)])
            return Call("gather", [numbers(plan, at, rank, rank), step.root], {"out": outs}, memory)
        case "gather":
            return Call("gather", [numbers(plan, at, rank, rank), step.root], {})
        case "scatter":
            values = [numbers(plan, at, other, other) for other in range(plan.size)]
            out = np.zeros_like(values[rank]) if rank % 2 else None
            return Call("scatter", [values if rank == step.root else None, step.root], {"out": out}, out)
        case "alltoall":
            values = [_passed(plan, at, rank, other) for other in range(plan.size)]
            if rank % 2:
                return Call("alltoall", [values], {})
            memory, outs = _outs([_passed(plan, at, other, rank) for other in range(plan.size)])
            return Call("alltoall", [values], {"out": outs}, memory)
        case "fold":
            return Call("allreduce", [f"{rank}.", lambda a, b: a + b], {})
        case "reduce":
            out = np.zeros_like(value) if rank == step.root else None
            return Call("reduce", [value, step.op, step.root], {**chosen, "out": out}, out)
        case "reduce_scatter":
            out = np.zeros_like(np.array_split(value, plan.size)[rank])
            return Call("reduce_scatter", [value, step.op], {**chosen, "out": out}, out)
        case "scan":
            out = np.zeros_like(value)
            return Call("scan", [value, step.op], {**chosen, "out": out}, out)
        case "exscan":
            return Call("exscan", [value, step.op], chosen)
        case "fold to root":
            return Call("reduce", [f"{rank}.", lambda a, b: a + b, step.root], {})
        case "prefixes":
            return Call("scan", [f"{rank}.", lambda a, b: a + b], {})
        case _:
            return Call("barrier", [], {})


def _passed(plan: Plan, at: int, origin: int, target: int) -> Any:
    """What one rank has for another: another length for each."""
    return numbers(plan, at, origin * plan.size + target, target)


def _outs(values: list[Any]) -> tuple[Any, list[Any]]:
    """Memory for arrays like ``values``, in one piece, and its parts."""
    memory = np.zeros(sum(map(len, values)), values[0].dtype)
    return memory, np.split(memory, np.cumsum([len(value) for value in values])[:-1])


def differ(plan: Plan, at: int, call: Call, detail: str) -> Call:
    """The same call, but for one field."""
    step = plan.steps[at]
    options = {key: value for key, value in call.options.items() if key != "out"}
    args = list(call.args)
    match detail:
        case "verb":
            return Call("broadcast", [1, 0], {}) if call.verb == "barrier" else Call("barrier", [], {})
        case "name":
            return Call(call.verb, args, {**call.options, "name": "another"})
        case "op":
            args[1] = "min" if step.op != "min" else "max"
        case "dtype" if step.kind == "alltoall":
            args[0] = [value.astype("i2") for value in args[0]]
        case "dtype" if step.op == "avg":
            args[0] = args[0].astype("f8" if step.dtype != "f8" else "f4")
        case "dtype":
            args[0] = args[0].astype("i2")
        case "shape":
            args[0] = args[0].reshape(1, -1)
        case "structure":
            args[0] = {**args[0], "c": 1}
        case "root" if step.kind in ("gather", "scatter"):
            args[0] = [1] * plan.size if step.kind == "scatter" else args[0]
            args[1] = (step.root + 1) % plan.size
        case "root" if call.verb == "reduce":
            args[2] = (step.root + 1) % plan.size
        case "root":
            args[0] = numbers(plan, at, 0) if step.kind == "broadcast" else 1
            args[1] = (step.root + 1) % plan.size
        case "algorithm":
            first, other = {"reduce": ("ring", "tree"), "reduce_scatter": ("ring", "tree")}.get(
                step.kind, ("chain" if step.kind in ("scan", "exscan") else "ring", "doubling")
            )
            options["algorithm"] = first if step.algorithm != first else other
        case "path" if step.kind in ("gather", "alltoall"):
            args[0] = ["text"] * plan.size
        case "path":
            args[0] = "text" if step.kind == "allgather" else np.ones(3, "f4")
            args[1:2] = ["sum"] if step.kind in ("fold", "fold to root", "prefixes") else []
    return Call(call.verb, args, options)


def reduced(plan: Plan, at: int, size: int | None = None) -> Any:
    """The result of an array's reduction over all ranks, or the first ``size`` of them."""
    step = plan.steps[at]
    size = plan.size if size is None else size
    rows = np.stack([numbers(plan, at, rank) for rank in range(size)])
    if step.op == "sum":
        return rows.sum(0, dtype=rows.dtype)
    if step.op == "avg":
        wide = np.promote_types(rows.dtype, "f4")
        return (rows.sum(0, dtype=wide) / wide.type(size)).astype(rows.dtype)
    return {"max": np.maximum, "min": np.minimum, "bor": np.bitwise_or}[step.op].reduce(rows)


def right(plan: Plan, at: int, rank: int, result: Any) -> bool:
    """``result`` is what the step gives on ``rank``."""
    step, ranks = plan.steps[at], range(plan.size)
    match step.kind:
        case "barrier":
            return result is None
        case "broadcast":
            return _same(result, numbers(plan, at, step.root))
        case "object":
            return bool(result == thing(plan, at, step.root))
        case "allgather":
            expected = [numbers(plan, at, other, other) for other in ranks]
            return len(result) == plan.size and all(map(_same, result, expected))
        case "gather" if rank != step.root:
            return result is None
        case "gather":
            return all(
                _same(found, numbers(plan, at, origin, origin))
                for origin, found in zip(ranks, result, strict=True)
            )
        case "scatter":
            return _same(result, numbers(plan, at, rank, rank))
        case "alltoall":
            return all(
                _same(found, _passed(plan, at, origin, rank))
                for origin, found in zip(ranks, result, strict=True)
            )
        case "objects":
            return bool(result == [thing(plan, at, other) for other in ranks])
        case "fold":
            return bool(result == "".join(f"{other}." for other in ranks))
        case "reduce" | "fold to root" if rank != step.root:
            return result is None
        case "exscan" if rank == 0:
            return result is None
        case "fold to root":
            return bool(result == "".join(f"{other}." for other in ranks))
        case "prefixes":
            return bool(result == "".join(f"{other}." for other in range(rank + 1)))
        case "reduce_scatter":
            return _same(result, np.array_split(reduced(plan, at), plan.size)[rank])
        case "scan" | "exscan":
            return _same(result, reduced(plan, at, rank + (step.kind == "scan")))
        case "tree":
            total = sum(ranks)
            array, number = result["b"]
            return (
                _same(result["a"], reduced(plan, at))
                and _same(array, np.full(3, total, "i8"))
                and number == total
            )
        case _:
            return _same(result, reduced(plan, at))


def _same(got: Any, expected: Any) -> bool:
    return isinstance(got, np.ndarray) and got.dtype == expected.dtype and np.array_equal(got, expected)


# -- running ---------------------------------------------------------------------------------------------------


class World:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = asyncio.get_running_loop()
        self.network = SimNetwork(self.loop, plan.size, seed=plan.seed, conditions=plan.conditions)
        self.comms = [Communicator(driver, options=Options(timeout=None)) for driver in self.network.drivers]
        self.called: dict[tuple[int, int], float] = {}
        """(rank, step) -> when it was called."""
        self.ends: dict[tuple[int, int], Any] = {}
        """(rank, step) -> result or error."""
        self.returned: list[Any] = []
        """Memory that ranks have got back after an error, filled with `SENTINEL`."""
        self.faults: list[str] = []
        """What reached the loop's exception handler."""

    async def run(self) -> None:
        """Run the plan and check everything."""
        plan = self.plan
        self.loop.set_exception_handler(lambda loop, context: self.faults.append(str(context)))
        await asyncio.gather(*map(self._rank, range(plan.size)))
        await asyncio.sleep(100_000)
        self._judge()
        staying = [comm for comm in self.comms if not comm.closed]
        if len(staying) == plan.size:
            await asyncio.gather(*map(self._epilogue, staying))
            await asyncio.sleep(100_000)
        self._look_for_leftovers()
        await asyncio.gather(*(comm.close() for comm in self.comms))
        await asyncio.sleep(100_000)
        for memory in self.returned:
            _require(bool((memory == SENTINEL).all()), "memory was written to after it had been given back")
        if self.faults:
            raise Wrong(f"unhandled: {self.faults}")
        timers = [handle for handle in self.loop._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
        if timers or len(asyncio.all_tasks()) > 1:
            raise Stray(f"after closing: timers {timers}, tasks {asyncio.all_tasks()}")

    async def _rank(self, rank: int) -> None:
        plan, comm, trouble = self.plan, self.comms[rank], self.plan.trouble
        mine = trouble.rank == rank
        waits = []
        for at in plan.orders[rank]:
            await asyncio.sleep(plan.pauses[rank][at])
            troubled = at == trouble.step
            call = call_of(plan, at, rank)
            if troubled and rank in plan.limited:
                call.options["timeout"] = plan.timeout
            if troubled and mine and trouble.kind == "mismatch":
                call = differ(plan, at, call, trouble.detail)
            if troubled and mine and trouble.kind == "refusal":
                call.options["timeout"] = "soon"
            if plan.keys[at] is not None:
                call.options["key"] = plan.keys[at]
            self.called[rank, at] = self.loop.time()
            work = getattr(comm, call.verb)(*call.args, **call.options)
            if call.args and isinstance(call.args[0], np.ndarray) and call.lent is not call.args[0]:
                call.args[0][...] = SENTINEL  # what counts is the content at the call
            waits.append(asyncio.ensure_future(self._wait(rank, at, work, call.lent)))
            if troubled and mine:
                if trouble.kind == "cancel":
                    waits.append(asyncio.ensure_future(self._cancel(work)))
                elif trouble.kind in ("crash", "leave"):
                    await self._moment()
                    await self._go(rank, waits)
                    return
        await asyncio.gather(*waits)

    async def _cancel(self, work: Any) -> None:
        await self._moment()
        work.cancel()

    async def _moment(self) -> None:
        """Wait until the trouble is to happen."""
        trouble = self.plan.trouble
        if not trouble.pieces:
            await asyncio.sleep(trouble.delay)
            return
        driver = self.network.drivers[trouble.rank]
        take, left, now = driver.take, trouble.pieces, asyncio.Event()

        def counted(peer: int, piece: memoryview) -> None:
            nonlocal left
            take(peer, piece)
            left -= 1
            if left == 0:
                now.set()

        driver.take = counted  # type: ignore[method-assign]
        try:
            async with asyncio.timeout(trouble.delay):
                await now.wait()
        except TimeoutError:
            pass

    async def _go(self, rank: int, waits: list[asyncio.Future[None]]) -> None:
        if self.plan.trouble.kind == "leave":
            await self.comms[rank].close()
        else:
            self.network.drivers[rank].crash()
            for wait in waits:
                wait.cancel()  # nobody will ever tell
        await asyncio.gather(*waits, return_exceptions=True)

    async def _wait(self, rank: int, at: int, work: Any, lent: Any) -> None:
        try:
            self.ends[rank, at] = await asyncio.shield(work)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (judged later)
            self.ends[rank, at] = error
            if lent is not None and work.done():
                lent[...] = SENTINEL
                self.returned.append(lent)

    async def _epilogue(self, comm: Communicator) -> None:
        """The mesh is in step: the next operations work."""
        await asyncio.gather(comm.barrier(key="a"), comm.barrier())
        total = await comm.allreduce(np.arange(100) + comm.rank)
        _require(
            np.array_equal(total, np.arange(100) * self.plan.size + sum(range(self.plan.size))),
            "the operation after the trouble has a wrong result",
        )

    # -- judging ------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        plan, trouble = self.plan, self.plan.trouble
        for (rank, at), end in self.ends.items():
            where = f"rank {rank}, step {at}: {end!r}"
            if not isinstance(end, BaseException):
                _require(right(plan, at, rank, end), f"wrong result, {where}")
                _require(
                    at != trouble.step or trouble.kind not in ("mismatch", "refusal"), f"a result, {where}"
                )
            elif trouble.kind in ("crash", "leave"):
                self._judge_gone(rank, end, where)
            else:
                _require(at == trouble.step, f"an operation without trouble failed, {where}")
                getattr(self, f"_judge_{trouble.kind}")(rank, end, where)
        for rank in range(plan.size):
            if rank != trouble.rank or trouble.kind not in ("crash", "leave"):
                _require(
                    all((rank, at) in self.ends for at in range(len(plan.steps))),
                    f"rank {rank} has not ended",
                )
        if trouble.kind == "cancel" and not isinstance(self.ends[trouble.rank, trouble.step], BaseException):
            errors = [
                end for (_, at), end in self.ends.items() if at == trouble.step and isinstance(end, Exception)
            ]
            _require(not errors, f"the cancel came too late, yet others failed: {errors}")
        if trouble.kind == "late":
            self._judge_times()

    def _judge_none(self, rank: int, end: Any, where: str) -> None:
        raise Wrong(f"an error without trouble, {where}")

    def _judge_cancel(self, rank: int, end: Any, where: str) -> None:
        if rank == self.plan.trouble.rank:
            _require(isinstance(end, asyncio.CancelledError), where)
        else:
            _require(isinstance(end, CollectiveCancelled) and end.origin == self.plan.trouble.rank, where)

    def _judge_refusal(self, rank: int, end: Any, where: str) -> None:
        if rank == self.plan.trouble.rank:
            _require(isinstance(end, ValueError), where)
        else:
            _require(isinstance(end, RemoteError) and end.origin == self.plan.trouble.rank, where)
            _require(end.type_name == "ValueError", where)

    def _judge_mismatch(self, rank: int, end: Any, where: str) -> None:
        trouble = self.plan.trouble
        _require(isinstance(end, CollectiveMismatch) and end.field == trouble.detail, where)
        odd = end.values.get(trouble.rank)
        _require(
            all(value != odd for other, value in end.values.items() if other != trouble.rank),
            f"values, {where}",
        )
        calls = [self.called[other, trouble.step] for other in range(self.plan.size)]
        if max(calls) - min(calls) < 0.2:
            _require(sorted(end.values) == list(range(self.plan.size)), f"answers are missing, {where}")
        else:
            _require({rank, trouble.rank} <= set(end.values), f"own answers are missing, {where}")

    def _judge_late(self, rank: int, end: Any, where: str) -> None:
        _require(isinstance(end, CollectiveTimeout), where)
        deadline = self._deadline()
        # Of a keyed step rank 0 says who is missing, who may have called while the call was on its way there.
        slack = 0.02 if self.plan.keys[self.plan.trouble.step] is None else 0.15
        for missing in end.missing:
            _require(self.called[missing, self.plan.trouble.step] > deadline - slack, f"not missing, {where}")

    def _judge_gone(self, rank: int, end: Any, where: str) -> None:
        trouble = self.plan.trouble
        if trouble.kind == "leave":
            _require(isinstance(end, CommunicatorClosed) and end.origin == trouble.rank, where)
        elif rank == trouble.rank:
            _require(isinstance(end, asyncio.CancelledError), where)
        else:
            _require(isinstance(end, PeerLost) and end.peers == {trouble.rank}, where)

    def _judge_times(self) -> None:
        """Everyone in time: everyone has a result. Someone too late: nobody has."""
        step, deadline = self.plan.trouble.step, self._deadline()
        last = max(self.called[rank, step] for rank in range(self.plan.size))
        results = [not isinstance(self.ends[rank, step], BaseException) for rank in range(self.plan.size)]
        if last > deadline + 0.02:
            _require(not any(results), f"a result although a rank called {last - deadline} s too late")
        if last < deadline - 0.02 and not self.plan.conditions.delay:
            _require(all(results), f"a timeout although all ranks called {deadline - last} s before it")

    def _deadline(self) -> float:
        plan = self.plan
        return min(self.called[rank, plan.trouble.step] for rank in plan.limited) + plan.timeout

    def _look_for_leftovers(self) -> None:
        left = []
        drivers = self.network.drivers
        alive = [driver for driver in drivers if not driver.closed]
        for driver in alive:
            engine, rank = driver.engine, driver.engine.rank
            group = engine.group()
            if engine.pending():
                left.append(f"rank {rank}: pending {engine.pending()}")
            if not all(map(group.awaits, group.early)):
                left.append(
                    f"rank {rank}: frames kept for operations that were called: {sorted(group.early)}"
                )
            for peer, box in engine._outboxes.items():
                if box.control or box.streams or box.current or box.lent:
                    left.append(f"rank {rank}: queued for {peer}")
                if drivers[peer] in alive and len(alive) == len(drivers):
                    owed = drivers[peer].engine._outboxes[rank].owed
                    if box.credit + owed != CREDIT:
                        left.append(f"rank {rank}: credit {box.credit} to {peer}, which owes {owed}")
            if len(alive) == len(drivers) and (group.early or any(group.early_bytes.values())):
                left.append(f"rank {rank}: early {group.early} {group.early_bytes}")
            uses = sum(keys.outstanding for keys in engine.keys._matching.values())
            if len(alive) == len(drivers) and (uses or group.withdrawn):
                left.append(f"rank {rank}: {uses} uses of keys, withdrawn {group.withdrawn}")
            for peer, inbound in engine._inbounds.items():
                if inbound._landing is not None or inbound.start != inbound.end:
                    left.append(f"rank {rank}: a part of a frame from {peer}")
        if left:
            raise Stray("; ".join(left))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Wrong(message)


def run_seed(seed: int) -> Plan:
    """Run one world. Raises `Wrong`, `Stray`, `Hang` or `Stuck`."""
    plan = draw(seed)

    async def main() -> None:
        await World(plan).run()

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        runner.run(main())
    return plan


def _overdue(number: int, frame: Any) -> None:
    raise Hang(f"still running after {WALL_LIMIT} s")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=150, help="how many worlds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one and say what it does")
    options = parser.parse_args()
    logging.getLogger("asynccoll").setLevel(logging.ERROR)  # losses are part of the plan
    if options.seed is not None:
        print(draw(options.seed))
        run_seed(options.seed)
        return 0
    counts = {"hangs": 0, "wrong": 0, "stray": 0}
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _overdue)
    for seed in range(options.first, options.first + options.seeds):
        signal.alarm(WALL_LIMIT)
        try:
            run_seed(seed)
        except (Stuck, Hang) as error:
            kind, text = "hangs", error
        except Stray as error:
            kind, text = "stray", error
        except Exception as error:  # noqa: BLE001 (counted, told, and the exit code says so)
            kind, text = "wrong", error
        else:
            continue
        counts[kind] += 1
        print(f"{kind}: {type(text).__name__}: {text}"[:500], file=sys.stderr)
        print(f"    replay: python -m tests.sim.schedules --seed {seed}", file=sys.stderr)
    signal.alarm(0)
    print(json.dumps({"seeds": options.seeds, **counts, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if any(counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
