"""Combinations of everything a reduction can be asked for, and a run of them. Knows axes and worlds, not numerics.

`sample` is for the suite: every pair of axis values that can meet does, in some combination. The whole product, or a
share of it, runs from the command line and prints one line of counts::

    python -m tests.conformance.matrix --world tcp-uvloop --full --share 1/100
    python -m tests.conformance.matrix --world sim --verb scan
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # with -m; pytest does the same

import carriers
import reference
from reducing import LARGE, batched, failures, repeats

from asynccoll.sim.driver import Conditions
from asynccoll.sim.loop import SimLoop
from asynccoll.testing import local_world

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33)
FULL_SIZES = (*range(1, 18), 24, 33)
ALGORITHMS = ("auto", "ring", "tree", "doubling")
MODES = ("new", "inplace", "out")
FORMS = ("0-d", "1-d", "2-d", "3-d")
OTHERS = {
    "reduce": ("auto", "ring", "tree"),
    "reduce_scatter": ("auto", "ring", "tree"),
    "scan": ("auto", "chain", "doubling"),
    "exscan": ("auto", "chain", "doubling"),
}
"""The reductions beside allreduce, and their algorithms."""
VERBS = ("allreduce", *OTHERS)
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
    verb: str = "allreduce"

    @property
    def root(self):
        """Of a reduce: any rank, the same one for the same call."""
        return (3 * self.count + len(self.op)) % self.size


def counts(size):
    """Numbers of elements around which an algorithm for ``size`` ranks could go wrong."""
    return (*range(2 * size + 2), 1000)


def forms(count):
    """Dimensions that an array of ``count`` elements may have."""
    return FORMS if count == 1 else FORMS[1:]


def fits(case):
    """Whether there is such a call: the rules are about pairs of axes. Missing values (None) fit all."""
    if case.get("verb") == "reduce_scatter" and (
        case["form"] == "0-d" or case["carrier"] == "scalar/contiguous"
    ):
        return False
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
    "verb": ("allreduce",),
    "carrier": carriers.CARRIERS,
    "dtype": reference.DTYPES,
    "op": reference.OPS,
    "form": FORMS,
    "mode": MODES,
    "algorithm": ALGORITHMS,
    "size": SIZES,
    "count": (),  # depends on the size
}


def axes_of(verb):
    """The values of each axis for one verb."""
    if verb == "allreduce":
        return AXES
    return {**AXES, "verb": (verb,), "mode": ("new", "out"), "algorithm": OTHERS[verb]}


def _counts_in_sample(size):
    # A large world is slow: the ends of the range, and every seventh between.
    return (
        counts(size)
        if size <= 9
        else sorted({0, 1, 2, *range(3, 2 * size, 7), size - 1, size, size + 1, *counts(size)[-3:]})
    )


def _complete(case, rng):
    """Random values for the axes that are None, so that the whole fits; None if there are none."""
    for axis, values in axes_of(case["verb"]).items():
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


def sample(seed=0, verb="allreduce"):
    """Combinations in which every pair of axis values meets, and every size its counts; the same for a seed."""
    rng = random.Random(seed)
    missing = set()
    axes = axes_of(verb)
    for a, b in itertools.combinations([axis for axis in axes if axis != "count"], 2):
        missing |= {((a, x), (b, y)) for x in axes[a] for y in axes[b]}
    blank = dict.fromkeys(axes) | {"verb": verb}
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


def refusals(size, verb="allreduce"):
    """A combination for every op that a dtype does not have."""
    axes = axes_of(verb)
    for number, (op, dtype) in enumerate(REFUSALS):
        algorithm, mode = (axes[axis][number % len(axes[axis])] for axis in ("algorithm", "mode"))
        yield Combination(size, 1 + number, "1-d", op, dtype, "numpy/contiguous", algorithm, mode, verb)


def sample_of(size, number=40, seed=0, verb="allreduce"):
    """Combinations for one world size that need not be among `SIZES`: its counts in turn, the other axes at random."""
    rng = random.Random(seed)
    found = _counts_in_sample(size)
    for turn in range(number):
        yield Combination(
            **_complete(
                {**dict.fromkeys(AXES), "verb": verb, "size": size, "count": found[turn % len(found)]}, rng
            )
        )


# -- the whole product ------------------------------------------------------------------------------------------


def full(size, verb="allreduce"):
    """Every combination for one world size, apart from arrays of `LARGE`; the refused ones once."""
    yield from refusals(size, verb)
    axes = axes_of(verb)
    for count in counts(size):
        for form, carrier, mode in itertools.product(forms(count), axes["carrier"], axes["mode"]):
            pair = {**dict.fromkeys(AXES), "verb": verb, "form": form, "carrier": carrier, "mode": mode}
            if not fits({**pair, "count": count}):
                continue
            for op, dtype in REDUCTIONS:
                if carriers.carries_dtype(carrier, dtype):
                    for algorithm in axes["algorithm"]:
                        yield Combination(size, count, form, op, dtype, carrier, algorithm, mode, verb)


def large(size, reductions=REDUCTIONS, algorithms=None, count=LARGE, verb="allreduce"):
    """``count`` elements for each op, dtype and algorithm; carriers and modes take turns."""
    axes = axes_of(verb)
    algorithms = algorithms or axes["algorithm"]
    for number, ((op, dtype), algorithm) in enumerate(itertools.product(reductions, algorithms)):
        turns = itertools.product(axes["carrier"], axes["mode"], FORMS[1:])
        usable = [
            (carrier, mode, form)
            for carrier, mode, form in turns
            if carriers.carries_dtype(carrier, dtype)
            and carriers.carries_form(carrier, form)
            and carriers.carries_mode(carrier, mode)
        ]
        carrier, mode, form = usable[number * 11 % len(usable)]
        yield Combination(size, count, form, op, dtype, carrier, algorithm, mode, verb)


def share(cases, which, of):
    """The ``which``-th of so many shares. At random and not every n-th: the axes repeat with periods of their own."""
    rng = random.Random(0)
    return (case for case in cases if rng.randrange(of) == which % of)


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
    chosen = [] if args.full else sample(verb=args.verb)
    for size in sizes:
        if time.monotonic() > args.until:
            return
        if args.full:
            cases = share(full(size, args.verb), *args.share)
        elif size in SIZES:
            cases = [case for case in chosen if case.size == size]
        else:
            cases = sample_of(size, verb=args.verb)
        async with world_of(args.world, size) as comms:
            report.worlds += 1
            for group in batched(cases, 16):
                await _count(report, comms, group)
                if time.monotonic() > args.until:
                    return
            if args.full:
                for case in share(large(size, verb=args.verb), *args.share):
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
    parser.add_argument("--verb", choices=VERBS, default="allreduce")
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
        f"{args.world}, {args.verb}: {report.combinations} combinations, {report.calls} calls, {len(report.wrong)} wrong, "
        f"{report.worlds} worlds (W = {','.join(map(str, sizes))}), share {shown}, "
        f"{time.monotonic() - started:.0f} s{stopped}"
    )
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
