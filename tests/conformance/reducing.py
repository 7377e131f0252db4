"""Makes the call of a combination of `matrix` on every rank, and tells what is wrong with the results. Knows no axes."""

import asyncio
import itertools
import zlib

import carriers
import numpy as np
import reference

LARGE = 1_000_001
"""Elements of an array that is not held in memory more often than needed."""


def combined(verb, values, rank, root=0):
    """Those of the ranks' values, or the parts of them, that ``rank``'s result combines; None where that is None."""
    if verb == "reduce_scatter":
        return [np.array_split(value, len(values))[rank] for value in values]
    if verb in ("scan", "exscan"):
        return values[: rank + (verb == "scan")] or None
    return None if verb == "reduce" and rank != root else values


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
    mine = [combined(case.verb, values, rank, case.root) for rank in range(case.size)]
    for number, result in enumerate(results):
        rank, k = divmod(number, calls)
        found = _faults(case, held[k][rank], outs[k][rank], result, mine[rank])
        wrong += [f"rank {rank} ({names[rank]}): {fault}" for fault in found]
    return wrong or _numbers(case, calls, mine, results)


def _numbers(case, calls, mine, results):
    """What is wrong with the numbers: of an allreduce they are those of rank 0 everywhere, else each rank has its own."""
    wrong, first = [], None
    for number, result in enumerate(results):
        rank, k = divmod(number, calls)
        if mine[rank] is None:
            continue
        bits = carriers.bits(result)
        if first is None or (k == 0 and case.verb != "allreduce"):
            first = bits
            if (fault := reference.difference(case.op, case.dtype, mine[rank], bits)) is not None:
                wrong.append(f"rank {rank}: {fault}")
        elif bits.tobytes() != first.tobytes():
            wrong.append(f"rank {rank}, call {k}: other bits than before")
    return wrong


def _out(case, rank, shape):
    if case.mode != "out":
        return None
    container = ("numpy", "torch")[rank % 2]
    layout = ("contiguous", "strided", "fortran")[rank % 3]
    if case.verb == "reduce_scatter":
        rows, more = divmod(shape[0], case.size)
        shape = (rows + (rank < more), *shape[1:])
    return carriers.hold(f"{container}/{layout}", case.dtype, np.ones(shape, reference.storage(case.dtype)))


def _call(comm, case, held, out):
    if case.mode == "inplace":
        return comm.allreduce_(held.value, case.op, algorithm=case.algorithm)
    target = None if out is None else out.value
    options = {"root": case.root} if case.verb == "reduce" else {}
    return getattr(comm, case.verb)(held.value, case.op, out=target, algorithm=case.algorithm, **options)


def _faults(case, held, out, result, mine):
    """What is wrong with one rank's result apart from its numbers. ``mine``: what it combines; None if there is to be no result."""
    if isinstance(result, BaseException):
        yield f"{type(result).__name__}: {result}"
        return
    if mine is None:
        if result is not None:
            yield f"{result!r} instead of None"
        if fault := held.damage():
            yield f"input: {fault}"
        if out is not None and (fault := out.damage()):
            yield f"out of a rank without a result: {fault}"
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
    for group in batched(cases, together):
        faults = await asyncio.gather(*(check(comms, case) for case in group))
        wrong += [f"{case}: {fault}" for case, found in zip(group, faults, strict=True) for fault in found]
    return wrong


def batched(values, length):
    # itertools.batched is not in Python 3.11.
    values = iter(values)
    while group := list(itertools.islice(values, length)):
        yield group
