"""Scans as programs: every prefix once and in rank order, planes that are lent stay as they are, and what travels.

Values of every op and dtype are the business of the conformance suite.
"""

import itertools
import random

import numpy as np
import pytest
from late import execute
from wires import KIB, Wires

from asynccoll.buffers import DTYPES
from asynccoll.engine import outbox, wire
from asynccoll.engine.programs import reductions, scans
from asynccoll.engine.programs.reductions import Part
from asynccoll.engine.transfers import SendBytes
from asynccoll.reduction import arithmetic

ALGORITHMS = ("chain", "doubling")
SIZES = range(1, 71)
BLOCK = np.dtype([("first", "u2"), ("last", "u2"), ("finished", "u2"), ("element", "u2")])


class Blocks:
    """Arithmetic over blocks of ranks: it refuses to join what is not adjacent, and to finish what is not complete."""

    partial = storage = BLOCK

    def __init__(self, separate):
        self.separate = separate

    def plane(self, storage):
        return np.empty(len(storage), BLOCK) if self.separate else storage

    def load(self, storage, partial):
        if self.separate:
            partial[:] = storage

    def combine_lower(self, mine, incoming):
        assert (incoming["element"] == mine["element"]).all()
        assert not incoming["finished"].any(), "a finished value travels"
        assert not mine["finished"].any()
        assert (incoming["last"] + 1 == mine["first"]).all(), (incoming, mine)
        mine["first"] = incoming["first"]

    def finish(self, partial, storage, ranks):
        assert not partial["finished"].any()
        assert (partial["last"] - partial["first"] + 1 == ranks).all()
        storage[:] = partial
        storage["finished"] += 1


def blocks(size, count, algorithm, separate):
    made = []
    for rank in range(size):
        storage = np.zeros(count, BLOCK)
        storage["first"] = storage["last"] = rank
        storage["element"] = np.arange(count)
        made.append(Part(storage, Blocks(separate), algorithm))
    return made


def programs(made, exclusive):
    size = len(made)
    return [
        scans.scan(part, rank, size, exclusive, lambda part=part: part.storage)
        for rank, part in enumerate(made)
    ]


def assert_prefixes(results, exclusive):
    for rank, result in enumerate(results):
        assert result["element"].tolist() == list(range(len(result)))
        if exclusive and rank == 0:
            assert not result["finished"].any()
            continue
        assert (result["finished"] == 1).all()
        assert (result["first"] == 0).all()
        assert (result["last"] == rank - exclusive).all()


@pytest.fixture
def small(monkeypatch):
    """Segments of 5 blocks, slabs of 12 (chain) or 8 (doubling)."""
    monkeypatch.setattr(outbox, "LEAST", 5 * BLOCK.itemsize)
    monkeypatch.setattr(reductions, "SLAB_BYTES", 24 * BLOCK.itemsize)
    monkeypatch.setattr(reductions, "_SNAPSHOT_BYTES", 8 * BLOCK.itemsize)


@pytest.mark.parametrize("exclusive", [False, True], ids=["scan", "exscan"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_its_prefix_in_rank_order_whoever_runs_ahead(small, size, algorithm, exclusive):
    counts = (0, 1, 7, 43) if size <= 8 else (31 + size % 7,)
    for count, separate in itertools.product(counts, (False, True)):
        for favourite in range(size) if size <= 8 else (0, size // 2) if separate else (size - 1,):
            made = blocks(size, count, algorithm, separate)
            assert_prefixes(execute(programs(made, exclusive), favourite), exclusive)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("exclusive", [False, True], ids=["scan", "exscan"])
def test_what_one_sends_does_not_run_further_ahead_than_two_slabs(small, algorithm, exclusive):
    slab = {"chain": 12, "doubling": 8}[algorithm] * BLOCK.itemsize
    (part,) = blocks(1, 120, algorithm, False)
    sent = 0
    for transfer in scans.scan(part, 0, 4, exclusive, lambda: None):
        if type(transfer) is not SendBytes:
            break
        sent += len(transfer.data)
    else:
        raise AssertionError("rank 0 waits for nobody")
    assert sent == 2 * slab * (2 if algorithm == "doubling" else 1)  # doubling sends to two ranks


@pytest.mark.parametrize("exclusive", [False, True], ids=["scan", "exscan"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_messages_are_as_documented(size, exclusive):
    count, itemsize = 100, BLOCK.itemsize

    def sends(algorithm, rank):
        found = []

        def kept(program):
            for transfer in program:
                if type(transfer) is SendBytes:
                    found.append((transfer.peer, len(transfer.data)))
                yield transfer

        made = programs(blocks(size, count, algorithm, False), exclusive)
        execute([kept(program) if r == rank else program for r, program in enumerate(made)])
        return found

    for rank in range(size):
        assert sends("chain", rank) == [(rank + 1, count * itemsize)] * (rank + 1 < size)
        distances = [1 << bit for bit in range((size - 1).bit_length())]
        assert sends("doubling", rank) == [
            (rank + distance, count * itemsize) for distance in distances if rank + distance < size
        ]


def numbers(dtype, algorithm, size, count, op="sum", seed=0):
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    values = rng.integers(-8, 8, (size, count)).astype(kind.storage)
    return values, [Part(row.copy(), arithmetic(op, kind), algorithm) for row in values]


def run(made, exclusive, shuffled=None):
    size = len(made)
    wires = Wires(size)
    for rank, program in enumerate(programs(made, exclusive)):
        wires.start(rank, program=program, expected=scans.source(made[rank], rank))
    if shuffled is None:
        wires.settle()
    else:
        wires.shuffle(*shuffled)
    wires.assert_idle()
    return wires, [wires.results(rank)[0] for rank in range(size)]


class TestOverEngines:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("exclusive", [False, True], ids=["scan", "exscan"])
    @pytest.mark.parametrize("dtype", ["int8", "float16", "float64", "complex128"])
    def test_bulk_in_random_reads_and_writes_is_right(self, monkeypatch, algorithm, exclusive, dtype):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 1 << 18)
        values, made = numbers(dtype, algorithm, 4, 100_001)
        _, results = run(made, exclusive, (random.Random(7), 200_000))
        for rank, result in enumerate(results):
            if rank or not exclusive:
                expected = values[: rank + 1 - exclusive].sum(0, dtype=values.dtype)
                np.testing.assert_array_equal(result, expected)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_half_types_travel_as_float32_and_are_rounded_once(self, algorithm):
        # In float16 2048 + 1 is 2048: rounded at each rank the ones would be lost.
        made = [
            Part(np.full(5, value, np.float16), arithmetic("sum", DTYPES["float16"]), algorithm)
            for value in (2048, 1, 1, 1, 1)
        ]
        wires, results = run(made, False)
        assert [result[0] for result in results] == [2048, 2048, 2050, 2052, 2052]  # 2049 and 2051 are ties
        sizes = {len(frame.payload) for frame in wires.sent(0) if frame.kind == wire.DATA}
        assert sizes == {5 * 4}

    def test_an_average_divides_by_the_ranks_combined(self):
        values = (3.0, 5.0, 10.0, 2.0)
        for exclusive, right in ((False, [3, 4, 6, 5]), (True, [3, 3, 4, 6])):
            made = [Part(np.full(3, v), arithmetic("avg", DTYPES["float64"]), "chain") for v in values]
            _, results = run(made, exclusive)
            assert [result.tolist() for result in results] == [[number] * 3 for number in right]

    def test_a_rank_passes_a_segment_on_before_it_has_the_next(self):
        _, made = numbers("int64", "chain", 3, 100_000)
        program = scans.scan(made[1], 1, 3, False, lambda: None)
        first = next(program)
        assert (first.peer, first.nbytes) == (0, 256 * KIB)
        first.fold(0, memoryview(bytes(256 * KIB)))
        assert type(next(program)) is SendBytes


class TestSource:
    @pytest.mark.parametrize("dtype", ["float16", "int64"])
    def test_what_is_announced_is_what_comes(self, dtype):
        for size, count in itertools.product((2, 3, 5), (1, 7, 5000)):
            _, made = numbers(dtype, "chain", size, count)
            announced = [scans.source(part, rank) for rank, part in enumerate(made)]
            wires, _ = run(made, False)
            assert announced[0] is None
            for rank in range(1, size):
                frames = [f for f in wires.sent(rank - 1, rank) if f.kind == wire.DATA]
                assert announced[rank] == {rank - 1: sum(len(f.payload) for f in frames)}

    def test_several_ranks_send_in_doubling_and_where_slabs_are_acknowledged(self, monkeypatch):
        _, (part,) = numbers("int64", "doubling", 1, 100)
        assert scans.source(part, 3) is None
        monkeypatch.setattr(reductions, "SLAB_BYTES", 2 * 8 * 40)
        part.algorithm = "chain"
        assert scans.source(part, 3) is None
