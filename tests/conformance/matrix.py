"""Combinations of everything an allreduce can be asked for, and a run of them. Knows axes and worlds, not numerics.

`sample` is for the suite: every pair of axis values that can meet does, in some combination. The whole product, or a
share of it, runs from the command line and prints one line of counts::

    python -m tests.conformance.matrix --world tcp-uvloop --full --share 1/100
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # with -m; pytest does the same

import carriers
import reference

from asynccoll.sim.driver import Conditions
from asynccoll.sim.loop import SimLoop
from asynccoll.testing import local_world

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33)
FULL_SIZES = (*range(1, 18), 24, 33)
LARGE = 1_000_001
ALGORITHMS = ("auto", "ring", "tree", "doubling")
MODES = ("new", "inplace", "out")
FORMS = ("0-d", "1-d", "2-d", "3-d")
REDUCTIONS = tuple(
    (op, dtype) for op in reference.OPS for dtype in reference.DTYPES if not reference.refused(op, dtype)
)
REFUSALS = tuple(
    (op, dtype) for op in reference.OPS for dtype in reference.DTYPES if reference.refused(op, dtype)
)


class Combination(NamedTuple):
    """One call, made on every rank of a world."""

    size: int
    count: int
    """Elements."""
    form: str
    op: str
    dtype: str
    carrier: str
    algorithm: str
    mode: str


def counts(size):
    """Numbers of elements around which an algorithm for ``size`` ranks could go wrong."""
    return (*range(2 * size + 2), 1000)


def forms(count):
    """Dimensions that an array of ``count`` elements may have."""
    return FORMS if count == 1 else FORMS[1:]


def fits(case):
    """Whether there is such a call: the rules are about pairs of axes. Missing values (None) fit all."""
    carrier, dtype, form, mode = case["carrier"], case["dtype"], case["form"], case["mode"]
    if form == "0-d" and case["count"] not in (None, 1):
        return False
    if case["op"] and dtype and reference.refused(case["op"], dtype):
        return False
    return carrier is None or not (
        (dtype and not carriers.carries_dtype(carrier, dtype))
        or (form and not carriers.carries_form(carrier, form))
        or (mode and not carriers.carries_mode(carrier, mode))
    )


# -- the sample -------------------------------------------------------------------------------------------------

AXES = {
    "carrier": carriers.CARRIERS,
    "dtype": reference.DTYPES,
    "op": reference.OPS,
    "form": FORMS,
    "mode": MODES,
    "algorithm": ALGORITHMS,
    "size": SIZES,
    "count": (),  # depends on the size
}


def _counts_in_sample(size):
    # A large world is slow: the ends of the range, and every seventh between.
    return (
        counts(size)
        if size <= 9
        else sorted({0, 1, 2, *range(3, 2 * size, 7), size - 1, size, size + 1, *counts(size)[-3:]})
    )


def _complete(case, rng):
    """Random values for the axes that are None, so that the whole fits; None if there are none."""
    for axis, values in AXES.items():
        if case[axis] is not None:
            continue
        if axis == "count":
            values = (1,) if case["form"] == "0-d" else _counts_in_sample(case["size"])
        for value in rng.sample(values, len(values)):
            found = {**case, axis: value}
            if fits(found) and (found := _complete(found, rng)):
                return found
        return None
    return case


def _pairs(case):
    # Element counts pair with world sizes only: 5 elements mean nothing without the number of ranks.
    axes = [axis for axis in AXES if axis != "count"]
    yield from (((a, case[a]), (b, case[b])) for a, b in itertools.combinations(axes, 2))


def sample(seed=0):
    """Combinations in which every pair of axis values meets, and every size its counts; the same for a seed."""
    rng = random.Random(seed)
    missing = set()
    for a, b in itertools.combinations([axis for axis in AXES if axis != "count"], 2):
        missing |= {((a, x), (b, y)) for x in AXES[a] for y in AXES[b]}
    blank = dict.fromkeys(AXES)
    for pair in sorted(missing, key=repr):
        if _complete({**blank, **dict(pair)}, rng) is None:
            missing.discard(pair)
    chosen = []

    def add(start, tries):
        found = [case for _ in range(tries) if (case := _complete({**blank, **start}, rng))]
        best = max(found, key=lambda case: sum(pair in missing for pair in _pairs(case)))
        missing.difference_update(_pairs(best))
        chosen.append(Combination(**best))

    for size in SIZES:
        for count in _counts_in_sample(size):
            add({"size": size, "count": count}, 10)
    for pair in sorted(missing, key=repr):
        if pair in missing:
            add(dict(pair), 10)
    return chosen


def refusals(size):
    """A combination for every op that a dtype does not have."""
    for number, (op, dtype) in enumerate(REFUSALS):
        algorithm, mode = ALGORITHMS[number % 4], MODES[number % 3]
        yield Combination(size, 1 + number, "1-d", op, dtype, "numpy/contiguous", algorithm, mode)


def sample_of(size, number=40, seed=0):
    """Combinations for one world size that need not be among `SIZES`: its counts in turn, the other axes at random."""
    rng = random.Random(seed)
    found = _counts_in_sample(size)
    for turn in range(number):
        yield Combination(
            **_complete({**dict.fromkeys(AXES), "size": size, "count": found[turn % len(found)]}, rng)
        )


# -- the whole product ------------------------------------------------------------------------------------------


def full(size):
    """Every combination for one world size, apart from arrays of `LARGE`; the refused ones once."""
    yield from refusals(size)
    for count in counts(size):
        for form, carrier, mode in itertools.product(forms(count), carriers.CARRIERS, MODES):
            if not (carriers.carries_form(carrier, form) and carriers.carries_mode(carrier, mode)):
                continue
            for op, dtype in REDUCTIONS:
                if carriers.carries_dtype(carrier, dtype):
                    for algorithm in ALGORITHMS:
                        yield Combination(size, count, form, op, dtype, carrier, algorithm, mode)


def large(size, reductions=REDUCTIONS, algorithms=ALGORITHMS, count=LARGE):
    """``count`` elements for each op, dtype and algorithm; carriers and modes take turns."""
    for number, ((op, dtype), algorithm) in enumerate(itertools.product(reductions, algorithms)):
        turns = itertools.product(carriers.CARRIERS, MODES, FORMS[1:])
        usable = [
            (carrier, mode, form)
            for carrier, mode, form in turns
            if carriers.carries_dtype(carrier, dtype)
            and carriers.carries_form(carrier, form)
            and carriers.carries_mode(carrier, mode)
        ]
        carrier, mode, form = usable[number * 11 % len(usable)]
        yield Combination(size, count, form, op, dtype, carrier, algorithm, mode)


def share(cases, which, of):
    """The ``which``-th of so many shares. At random and not every n-th: the axes repeat with periods of their own."""
    rng = random.Random(0)
    return (case for case in cases if rng.randrange(of) == which % of)


# -- running one ------------------------------------------------------------------------------------------------


def repeats(case):
    """How often each rank makes the call."""
    return 1 if case.count == LARGE and case.size > 4 else 2


async def check(comms, case):
    """Make the call on all ranks, where memory allows it twice at once; what is wrong, as a list of texts."""
    if reference.refused(case.op, case.dtype):
        return await _check_refusal(comms, case)
    seed = zlib.crc32(repr(case).encode())
    rng = np.random.default_rng(seed)
    shape = carriers.shape_of(case.form, case.count)
    values = reference.inputs(case.dtype, case.op, case.size, shape, rng)
    names = []
    for rank in range(case.size):
        name = carriers.of_rank(case.carrier, rank, case.dtype, case.form, case.mode, seed)
        names.append(name)
        if name.endswith("/expanded") and shape:
            values[rank] = np.broadcast_to(values[rank][:1], shape).copy()
    calls = repeats(case)
    held = [[carriers.hold(names[r], case.dtype, values[r]) for r in range(case.size)] for _ in range(calls)]
    outs = [[_out(case, r, shape) for r in range(case.size)] for _ in range(calls)]
    # Rank by rank, both calls of one rank together: on every rank the same order.
    works = [_call(comms[r], case, held[k][r], outs[k][r]) for r in range(case.size) for k in range(calls)]
    results = await asyncio.gather(*works, return_exceptions=True)
    wrong = []
    for number, result in enumerate(results):
        rank, k = divmod(number, calls)
        found = _faults(case, held[k][rank], outs[k][rank], result)
        wrong += [f"rank {rank} ({names[rank]}): {fault}" for fault in found]
    if wrong:
        return wrong
    first = carriers.bits(results[0])
    if (fault := reference.difference(case.op, case.dtype, values, first)) is not None:
        wrong.append(fault)
    for number, result in enumerate(results[1:], 1):
        if carriers.bits(result).tobytes() != first.tobytes():
            wrong.append(f"rank {number // calls}, call {number % calls}: other bits than rank 0")
    return wrong


def _out(case, rank, shape):
    if case.mode != "out":
        return None
    container = ("numpy", "torch")[rank % 2]
    layout = ("contiguous", "strided", "fortran")[rank % 3]
    return carriers.hold(f"{container}/{layout}", case.dtype, np.ones(shape, reference.storage(case.dtype)))


def _call(comm, case, held, out):
    if case.mode == "inplace":
        return comm.allreduce_(held.value, case.op, algorithm=case.algorithm)
    target = None if out is None else out.value
    return comm.allreduce(held.value, case.op, out=target, algorithm=case.algorithm)


def _faults(case, held, out, result):
    """What is wrong with one rank's result apart from its numbers."""
    if isinstance(result, BaseException):
        yield f"{type(result).__name__}: {result}"
        return
    if case.mode == "inplace":
        if result is not held.value:
            yield "the result is not the array itself"
        if fault := held.damage(carriers.bits(result)):
            yield fault
        return
    if fault := held.damage():
        yield f"input: {fault}"
    if out is not None:
        if result is not out.value:
            yield "the result is not out"
        if fault := out.damage(carriers.bits(result)):
            yield f"out: {fault}"
        return
    if carriers.kind(result) != carriers.kind(held.value):
        yield f"{carriers.kind(result)} came back for {carriers.kind(held.value)}"
    if carriers.share_memory(result, held.value):
        yield "the result shares memory with the input"
    if not carriers.memory(result).flags.writeable and not isinstance(result, np.generic):
        yield "the result is read-only"


async def _check_refusal(comms, case):
    values = [np.ones(case.count, reference.storage(case.dtype)) for _ in comms]
    held = [carriers.hold(case.carrier, case.dtype, value) for value in values]
    outs = [_out(case, comm.rank, (case.count,)) for comm in comms]
    works = [_call(comm, case, held[comm.rank], outs[comm.rank]) for comm in comms]
    results = await asyncio.gather(*works, return_exceptions=True)
    return [
        f"rank {rank}: {result!r} instead of TypeError"
        for rank, result in enumerate(results)
        if not isinstance(result, TypeError)
    ]


async def failures(comms, cases, together=8):
    """Run the combinations, some at a time; the wrong ones as texts."""
    wrong = []
    for group in _batched(cases, together):
        faults = await asyncio.gather(*(check(comms, case) for case in group))
        wrong += [f"{case}: {fault}" for case, found in zip(group, faults, strict=True) for fault in found]
    return wrong


def _batched(values, length):
    # itertools.batched is not in Python 3.11.
    values = iter(values)
    while group := list(itertools.islice(values, length)):
        yield group


# -- the command line -------------------------------------------------------------------------------------------

WORLDS = {"sim": SimLoop, "tcp-asyncio": asyncio.new_event_loop, "tcp-uvloop": uvloop.new_event_loop}


@contextlib.asynccontextmanager
async def world_of(name, size, **options):
    """A world of that kind, inside the loop of `WORLDS`."""
    if name == "sim":
        options |= {
            "transport": "memory",
            "seed": size,
            "conditions": Conditions(0.002, 1 << 15, True, 1 << 16),
        }
    async with local_world(size, **options) as comms:
        yield comms


async def _run(args, sizes, report):
    for size in sizes:
        if time.monotonic() > args.until:
            return
        cases = (
            share(full(size), *args.share) if args.full else [case for case in sample() if case.size == size]
        )
        async with world_of(args.world, size) as comms:
            report.worlds += 1
            for group in _batched(cases, 16):
                await _count(report, comms, group)
                if time.monotonic() > args.until:
                    return
            if args.full:
                for case in share(large(size), *args.share):
                    await _count(report, comms, [case])
                    if time.monotonic() > args.until:
                        return


async def _count(report, comms, group):
    report.combinations += len(group)
    report.calls += sum(repeats(case) * case.size for case in group)
    for text in await failures(comms, group, len(group)):
        report.wrong.add(text.partition(": ")[0])
        print(text, file=sys.stderr, flush=True)


class _Report:
    def __init__(self):
        self.combinations, self.calls, self.worlds, self.wrong = 0, 0, 0, set()


def main():
    parser = argparse.ArgumentParser(description="Run the conformance matrix and print one line of counts.")
    parser.add_argument("--world", choices=WORLDS, default="tcp-uvloop")
    parser.add_argument("--full", action="store_true", help="the whole product instead of the suite's sample")
    parser.add_argument(
        "--share", default="1/1", metavar="K/N", help="of --full: the K-th of N random shares"
    )
    parser.add_argument("--sizes", help="world sizes, such as 2,3,16")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that long")
    args = parser.parse_args()
    shown = args.share if args.full else "1/1"
    args.share = tuple(map(int, shown.split("/")))
    started = time.monotonic()
    args.until = started + args.seconds
    sizes = tuple(map(int, args.sizes.split(","))) if args.sizes else FULL_SIZES if args.full else SIZES
    report = _Report()
    with asyncio.Runner(loop_factory=WORLDS[args.world]) as runner:
        runner.run(_run(args, sizes, report))
    stopped = " (stopped by --seconds)" if time.monotonic() > args.until else ""
    print(
        f"{args.world}: {report.combinations} combinations, {report.calls} calls, {len(report.wrong)} wrong, "
        f"{report.worlds} worlds (W = {','.join(map(str, sizes))}), share {shown}, "
        f"{time.monotonic() - started:.0f} s{stopped}"
    )
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
