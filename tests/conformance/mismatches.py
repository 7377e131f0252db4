"""Ways in which the ranks' calls may differ, as data, and a run of all of them. Knows calls and fields, not how they are compared.

A `Variant` is what most ranks call and what the odd ones call. The suite runs a sample; every variant with every odd rank, and
every pair, runs from the command line and prints one line of counts::

    python -m tests.conformance.mismatches --world tcp-uvloop
"""

import argparse
import asyncio
import functools
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))  # with -m; pytest does the same

import matrix
from faults import in_step
from ranks import outcomes

from asynccoll import CollectiveMismatch, RemoteError, associative
from asynccoll.trees import flatten

SIZES = (2, 3, 4, 8)
SMALL, LARGE = 9, 90_000
"""Elements of one frame, and of many."""

REDUCING = ("allreduce", "allreduce_", "reduce", "reduce_scatter", "scan", "exscan")
FOLDING = ("allreduce", "reduce", "scan", "exscan")
"""Those of the reducing verbs that take objects and functions."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ALGORITHMS = {
    "allreduce": ("ring", "tree", "doubling", "linear"),
    "allreduce_tree": ("ring", "tree", "doubling"),
    "reduce": ("ring", "tree"),
    "reduce_scatter": ("ring", "tree"),
    "scan": ("chain", "doubling"),
    "exscan": ("chain", "doubling"),
    "allgather": ("ring", "doubling"),
    "broadcast": ("tree",),
}
VERBS = (*REDUCING, "allreduce_tree", "broadcast", "allgather", "gather", "scatter", "alltoall", "barrier")


class Variant(NamedTuple):
    """One way of disagreeing: what most ranks call, what the odd ones call, and how it must be reported."""

    label: str
    field: str
    usual: Callable[[Any], Any]
    usual_value: Any
    odd: Callable[[Any], Any]
    odd_value: Any


class Refusal(NamedTuple):
    """A call that is wrong by itself on the odd ranks: this error there, `RemoteError` of it elsewhere."""

    label: str
    kind: type[Exception]
    usual: Callable[[Any], Any]
    odd: Callable[[Any], Any]


def ones(shape, dtype="float32"):
    return np.ones(shape, dtype)


def reported_verb(verb):
    """What a mismatch calls it: in place or not is the caller's own affair."""
    return "allreduce" if verb == "allreduce_" else verb


def call(verb, value=None, *args, **options):
    """A function that makes the call on one rank, with ``value`` in the form that the verb takes."""

    def make(comm):
        if verb == "barrier":
            return comm.barrier(*args, **options)
        if verb == "allreduce_tree":
            given = {"w": value}
        elif verb in ("scatter", "alltoall"):
            given = [value] * comm.world_size
        else:
            given = value.copy() if verb == "allreduce_" else value
        return getattr(comm, verb)(given, *args, **options)

    return make


# -- values -----------------------------------------------------------------------------------------------------


def _shapes():
    odd_lengths = {n: sorted({n + 1, n - 1, 2 * n, 0} - {n}) for n in (1, 7, 1000, 1_000_000)}
    pairs = [((n,), (m,)) for n, odd in odd_lengths.items() for m in odd]
    pairs += [((2, 3), (3, 2)), ((6,), (2, 3)), ((1,), ()), ((0, 3), (3, 0))]
    few = [((7,), (8,)), ((2, 3), (3, 2)), ((6,), (2, 3)), ((1000,), (0,)), ((LARGE,), (LARGE + 1,))]
    # Of a reduce_scatter the parts of these are alike: nobody would miss or have left over a byte.
    few += [((9, 2), (9, 2, 1))]
    for verb in REDUCING:
        for usual, odd in pairs if verb == "allreduce" else few:
            yield Variant(
                f"shape {usual} against {odd} in {verb}",
                "shape",
                call(verb, ones(usual)),
                usual,
                call(verb, ones(odd)),
                odd,
            )
    for usual, odd, options in (
        ((7,), (7, 1), {}),
        ((LARGE,), (LARGE + 1,), {}),
        ((LARGE,), (LARGE + 1,), {"out": True}),
    ):

        def broadcast(comm, shape, options=options):
            return comm.broadcast(ones(shape), out=ones(shape) if options else None)

        yield Variant(
            f"shape {usual} against {odd} of a broadcast's {'out' if options else 'template'}",
            "shape",
            functools.partial(broadcast, shape=usual),
            usual,
            functools.partial(broadcast, shape=odd),
            odd,
        )


def _dtypes():
    pairs = [
        ("int32", "float32"),
        ("int64", "float64"),
        ("uint8", "int8"),
        ("bool", "uint8"),
        ("complex64", "float64"),
        ("float16", "int16"),
        ("float32", "float64"),
        ("float16", "float32"),
        ("int64", "int32"),
    ]
    for verb in (*REDUCING, "broadcast", "allgather", "gather", "alltoall"):
        known = pairs if verb in ("allreduce", "allgather", "broadcast") else pairs[:6]
        for (usual, odd), count in [*((pair, SMALL) for pair in known), (pairs[0], LARGE)]:
            yield Variant(
                f"dtype {usual} against {odd} of {count} elements in {verb}",
                "dtype",
                call(verb, ones(count, usual)),
                usual,
                call(verb, ones(count, odd)),
                odd,
            )
    for verb in ("reduce", "gather", "alltoall"):
        yield Variant(
            f"dtype of an array against that of a tensor in {verb}",
            "dtype",
            call(verb, ones(SMALL, "float64")),
            "float64",
            call(verb, torch.ones(SMALL)),
            "float32",
        )
    for usual, odd in pairs[:3]:
        yield Variant(
            f"dtype {usual} against {odd} of what a scatter is to fill",
            "dtype",
            lambda comm, t=usual: comm.scatter([ones(SMALL, t)] * comm.world_size, out=ones(SMALL, t)),
            usual,
            lambda comm, t=odd: comm.scatter([ones(SMALL, t)] * comm.world_size, out=ones(SMALL, t)),
            odd,
        )


def _paths():
    for label, usual, odd in (
        ("array against list", ones(3), [1.0, 1.0, 1.0]),
        ("large array against float", ones(LARGE), 1.0),
        ("array against long text", ones(3), "x" * 300_000),
        ("numpy scalar against Python's", np.float64(1.0), 1.0),
    ):
        for verb in (*FOLDING, "allgather", "gather", "alltoall"):
            yield Variant(f"{label} in {verb}", "path", call(verb, usual), "array", call(verb, odd), "object")
    for verb in FOLDING:
        yield Variant(
            f"array with a named op against array with a callable in {verb}",
            "path",
            call(verb, ones(3)),
            "array",
            call(verb, ones(3), np.add),
            "object",
        )


# -- arguments --------------------------------------------------------------------------------------------------


@associative
def joined(left, right):
    return left + right


@associative
def merged(left, right):
    return left + right


def _ops():
    for usual, odd in (("sum", "max"), ("sum", "prod"), ("min", "max"), ("sum", "avg")):
        for verb in (*REDUCING, "allreduce_tree"):
            for label, value in (("an array", ones(SMALL)), ("a large array", ones(LARGE)), ("an object", 3)):
                if label == "an object" and verb not in FOLDING:
                    continue
                yield Variant(
                    f"op {usual} against {odd} of {label} in {verb}",
                    "op",
                    call(verb, value, usual),
                    usual,
                    call(verb, value, odd),
                    odd,
                )
    for verb in FOLDING:
        yield Variant(
            f"op sum against a callable in {verb}",
            "op",
            call(verb, [1], "sum"),
            "sum",
            call(verb, [1], lambda a, b: a + b),
            "callable",
        )
    for verb in ("allreduce", "reduce"):  # those that fold up a tree
        name = f"associative {joined.name}"
        for label, odd, odd_value in (
            ("another associative function", merged, f"associative {merged.name}"),
            ("an undeclared one", lambda a, b: a + b, "callable"),
            ("sum", "sum", "sum"),
        ):
            yield Variant(
                f"an associative function against {label} in {verb}",
                "op",
                call(verb, [1], joined),
                name,
                call(verb, [1], odd),
                odd_value,
            )


def _roots():
    for verb in ROOTED:
        values = [("an array", ones(SMALL)), ("a large array", ones(LARGE)), ("objects", ["a"])]
        for label, value in values:
            yield Variant(
                f"root of {label} in {verb}",
                "root",
                call(verb, value, root=0),
                0,
                call(verb, value, root=1),
                1,
            )
    for verb in ("broadcast", "scatter"):

        def at_the_root_alone(comm, root, verb=verb):
            return call(verb, ones(SMALL), root=root)(comm) if comm.rank == root else _none(comm, verb, root)

        yield Variant(
            f"root of None where it is not the root in {verb}",
            "root",
            functools.partial(at_the_root_alone, root=0),
            0,
            functools.partial(at_the_root_alone, root=1),
            1,
        )


def _none(comm, verb, root):
    return getattr(comm, verb)(None, root)


def _names():
    for verb in VERBS:
        values = {"an array": ones(SMALL), "a large array": ones(LARGE)}
        if verb in FOLDING or verb in ("broadcast", "gather", "alltoall"):
            values["an object"] = "text"
        for label, value in {"nothing": None}.items() if verb == "barrier" else values.items():
            for usual, odd in (("a", "b"), (None, "b"), ("a", None)):
                yield Variant(
                    f"name {usual} against {odd} of {label} in {verb}",
                    "name",
                    call(verb, value, name=usual),
                    usual,
                    call(verb, value, name=odd),
                    odd,
                )


def _algorithms():
    for verb, names in ALGORITHMS.items():
        for count in (SMALL, LARGE):
            for usual, odd in (*itertools.pairwise(("auto", *names)), (names[-1], "auto")):
                yield Variant(
                    f"algorithm {usual} against {odd} for {count} elements in {verb}",
                    "algorithm",
                    call(verb, ones(count), algorithm=usual),
                    usual,
                    call(verb, ones(count), algorithm=odd),
                    odd,
                )
        if verb in FOLDING:
            yield Variant(
                f"algorithm {names[0]} against auto for objects in {verb}",
                "algorithm",
                call(verb, [1], algorithm=names[0]),
                names[0],
                call(verb, [1]),
                "auto",
            )


# -- trees ------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    w: Any
    b: Any


class Point(NamedTuple):
    x: Any
    y: Any


def _structures():
    base = {"w": ones((2, 3)), "b": ones(3), "n": 4}
    trees = [
        (f"structure: {label}", base, tree)
        for label, tree in (
            ("another key", {"w": ones((2, 3)), "c": ones(3), "n": 4}),
            ("a leaf less", {"w": ones((2, 3)), "b": ones(3)}),
            ("a leaf more", {**base, "m": 1.0}),
            ("a leaf's dtype", {"w": ones((2, 3), "int32"), "b": ones(3), "n": 4}),
            ("a leaf's shape", {"w": ones((3, 2)), "b": ones(3), "n": 4}),
            ("int against float", {"w": ones((2, 3)), "b": ones(3), "n": 4.0}),
            ("None for a leaf", {"w": ones((2, 3)), "b": None, "n": 4}),
            ("a list for a dict", [ones((2, 3)), ones(3), 4]),
            ("a deeper level", {"w": [ones((2, 3))], "b": ones(3), "n": 4}),
            ("much larger leaves", {"w": ones((2, 300_000)), "b": ones(3), "n": 4}),
        )
    ]
    kinds = {  # of containers around the same two leaves
        "list": [ones(2), 1],
        "tuple": (ones(2), 1),
        "dict": {"x": ones(2), "y": 1},
        "dataclass": Layer(ones(2), 1),
        "named tuple": Point(ones(2), 1),
    }
    for one, other in itertools.permutations(kinds, 2):
        trees.append((f"structure: {one} against {other}", kinds[one], kinds[other]))
    leaves = {"an array": ones(()), "an int": 1, "a float": 1.0, "None": None, "an empty list": []}
    for one, other in itertools.permutations(leaves, 2):
        trees.append((f"structure: {one} against {other}", leaves[one], leaves[other]))
    keys = {"a text": {"1": 1}, "a number": {1: 1}}
    trees.append(("structure: keys", keys["a text"], keys["a number"]))
    for label, usual, odd in trees:
        yield Variant(
            label,
            "structure",
            lambda comm, tree=usual: comm.allreduce_tree(tree),
            flatten(usual)[1],
            lambda comm, tree=odd: comm.allreduce_tree(tree),
            flatten(odd)[1],
        )


# -- verbs ------------------------------------------------------------------------------------------------------


def _verbs():
    for count in (SMALL, LARGE):
        for usual, odd in itertools.permutations(VERBS, 2):
            if reported_verb(usual) == reported_verb(odd) or (count == LARGE and usual > odd):
                continue
            yield Variant(
                f"{usual} against {odd} of {count} elements",
                "verb",
                call(usual, ones(count)),
                reported_verb(usual),
                call(odd, ones(count)),
                reported_verb(odd),
            )
    objects = ("allreduce", "reduce", "scan", "exscan", "broadcast", "allgather", "gather", "alltoall")
    for usual, odd in itertools.combinations(objects, 2):
        yield Variant(
            f"{usual} against {odd} of objects", "verb", call(usual, [1]), usual, call(odd, [1]), odd
        )


VARIANTS = [
    *_shapes(),
    *_dtypes(),
    *_paths(),
    *_ops(),
    *_roots(),
    *_names(),
    *_algorithms(),
    *_structures(),
    *_verbs(),
]


# -- calls that are wrong by themselves ---------------------------------------------------------------------------


def _refusals():
    for verb in REDUCING:
        yield Refusal(
            f"{verb}: an op that the dtype lacks",
            TypeError,
            call(verb, ones(SMALL), "max"),
            call(verb, ones(SMALL), "band"),
        )
        yield Refusal(
            f"{verb}: an op that does not exist",
            ValueError,
            call(verb, ones(SMALL)),
            call(verb, ones(SMALL), "mean"),
        )
    for verb in ALGORITHMS:
        yield Refusal(
            f"{verb}: an algorithm that does not exist",
            ValueError,
            call(verb, ones(SMALL)),
            call(verb, ones(SMALL), algorithm="best"),
        )
    for verb in ROOTED:
        yield Refusal(
            f"{verb}: a root that does not exist",
            ValueError,
            call(verb, ones(SMALL)),
            call(verb, ones(SMALL), root=99),
        )
    for verb in ("allreduce_", "reduce_scatter"):
        yield Refusal(
            f"{verb}: an object",
            TypeError,
            call(verb, ones(SMALL)),
            lambda comm, verb=verb: getattr(comm, verb)([1]),
        )
    yield Refusal(
        "reduce_scatter: no rows",
        ValueError,
        call("reduce_scatter", ones(1)),
        call("reduce_scatter", ones(())),
    )
    yield Refusal("alltoall: too few values", ValueError, call("alltoall", 1), lambda comm: comm.alltoall([]))
    for verb in ("allreduce", "reduce", "scan", "allgather", "gather", "alltoall"):
        yield Refusal(
            f"{verb}: a value that does not pickle",
            TypeError,
            call(verb, [1]),
            call(verb, (number for number in range(3))),
        )


REFUSALS = [*_refusals()]


# -- who is odd ---------------------------------------------------------------------------------------------------


def odd_ranks(size):
    """Each rank alone, and each pair where two are not half or more; of many ranks one alone, and one pair."""
    if size > 9:
        return [{size * 2 // 3}, {0, size - 1}]
    pairs = itertools.combinations(range(size), 2) if size > 2 else ()
    return [{rank} for rank in range(size)] + [set(pair) for pair in pairs]


def sample_of(size, turn):
    """One rank alone and one pair of those, another one for each ``turn``."""
    odds = odd_ranks(size)
    alone = [odd for odd in odds if len(odd) == 1]
    pairs = [odd for odd in odds if len(odd) == 2]
    return [kind[turn % len(kind)] for kind in (alone, pairs) if kind]


# -- running one --------------------------------------------------------------------------------------------------


def fault(variant, odd, results):
    """What is wrong with the ranks' results, as a text; None if nothing is."""
    for rank, error in enumerate(results):
        if isinstance(variant, Refusal):
            if rank in odd:
                if type(error) is not variant.kind:
                    return f"rank {rank}: {error!r} instead of {variant.kind.__name__}"
            elif type(error) is not RemoteError:
                return f"rank {rank}: {error!r} instead of RemoteError"
            elif error.origin not in odd or error.type_name != variant.kind.__name__:
                return f"rank {rank}: {error.type_name} of rank {error.origin}"
            continue
        if type(error) is not CollectiveMismatch:
            return f"rank {rank}: {error!r} instead of CollectiveMismatch"
        values = {r: variant.odd_value if r in odd else variant.usual_value for r in range(len(results))}
        if (error.field, error.values) != (variant.field, values):
            return f"rank {rank}: {error.field} {error.values} instead of {variant.field} {values}"
        if (error.rank, error.group) != (rank, "world"):
            return f"rank {rank}: says that it is rank {error.rank} of {error.group}"
        if set(error.sites) != set(values) or not all(
            site.startswith("mismatches.py:") for site in error.sites.values()
        ):
            return f"rank {rank}: call sites {error.sites}"
    return None


async def attempt(comms, variant, odd):
    """Make the calls, ``variant.odd`` on the ranks ``odd``; what is wrong. The next operations are right, or that is raised."""
    results = await outcomes(comms, lambda comm: (variant.odd if comm.rank in odd else variant.usual)(comm))
    found = fault(variant, odd, results)
    await in_step(comms)
    return found


# -- the command line ---------------------------------------------------------------------------------------------


class _Report:
    def __init__(self):
        self.combinations = self.calls = self.worlds = 0
        self.wrong, self.slowest = [], 0.0


async def _run(args, sizes, report, limit):
    loop = asyncio.get_running_loop()
    everything = [*VARIANTS, *REFUSALS]
    for size in sizes:
        async with matrix.world_of(args.world, size, timeout=limit) as comms:
            report.worlds += 1
            for number, variant in enumerate(everything):
                if args.progress and number % 200 == 0:
                    print(f"W = {size}: {number} of {len(everything)}", file=sys.stderr, flush=True)
                for odd in sample_of(size, number) if args.sample else odd_ranks(size):
                    started = loop.time()
                    try:
                        found = await attempt(comms, variant, odd)
                    except Exception as error:  # noqa: BLE001 (told, and the world is given up)
                        report.wrong.append(f"W = {size}, {variant.label}, odd {odd}: then {error!r}")
                        print(report.wrong[-1], file=sys.stderr, flush=True)
                        return
                    report.combinations += 1
                    report.calls += size
                    report.slowest = max(report.slowest, loop.time() - started)
                    if found is not None:
                        report.wrong.append(f"W = {size}, {variant.label}, odd {odd}: {found}")
                        print(report.wrong[-1], file=sys.stderr, flush=True)
                    if time.monotonic() > args.until:
                        return


def main():
    parser = argparse.ArgumentParser(description="Run every mismatch and print one line of counts.")
    parser.add_argument("--world", choices=matrix.WORLDS, default="tcp-uvloop")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="world sizes, such as 2,3,16")
    parser.add_argument(
        "--sample", action="store_true", help="one odd rank and one pair for each, as the suite"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--quiet", dest="progress", action="store_false", help="print the last line only")
    args = parser.parse_args()
    started = time.monotonic()
    args.until = started + args.seconds
    report = _Report()
    with asyncio.Runner(loop_factory=matrix.WORLDS[args.world]) as runner:
        runner.run(_run(args, tuple(map(int, args.sizes.split(","))), report, limit=30.0))
    stopped = " (stopped by --seconds)" if time.monotonic() > args.until else ""
    clock = "virtual s" if args.world == "sim" else "s"
    print(
        f"{args.world}: {len(VARIANTS)} mismatches and {len(REFUSALS)} refusals, {report.combinations} combinations, "
        f"{report.calls} calls, {len(report.wrong)} wrong, {report.worlds} worlds (W = {args.sizes}), slowest "
        f"{report.slowest:.2f} {clock}, {time.monotonic() - started:.0f} s{stopped}"
    )
    return bool(report.wrong)


if __name__ == "__main__":
    sys.exit(main())
