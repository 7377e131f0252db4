"""Reductions to one rank or to parts, as programs: which bytes travel, and that planes are not used again too early.

Values of every op and dtype are the business of the conformance suite.
"""

import itertools
import random

import numpy as np
import pytest
from late import execute
from wires import Wires

from asynccoll.algorithms.ring import chunk
from asynccoll.buffers import DTYPES
from asynccoll.engine import wire
from asynccoll.engine.programs import one_way, reductions
from asynccoll.engine.programs.reductions import Part
from asynccoll.reduction import arithmetic

ALGORITHMS = ("ring", "tree")


def values_of(dtype, size, count, seed=0):
    """Small integers, so that sums are exact."""
    rng = np.random.default_rng(seed)
    return rng.integers(-8, 8, (size, count)).astype(DTYPES[dtype].storage)


class Case:
    """One call on all ranks: its programs, and what they announce."""

    def __init__(self, verb, algorithm, values, dtype, root=0, op="sum", inner=1):
        size, count = values.shape
        kind = arithmetic(op, DTYPES[dtype])
        self.verb, self.root, self.values = verb, root, values
        lengths = [len(part) * inner for part in np.array_split(np.arange(count // inner), size)]
        extent = count if verb == "reduce" else tuple(lengths)
        self.programs, self.sources = [], []
        for rank, row in enumerate(values):
            part = Part(row.copy(), kind, algorithm)
            slabs = one_way.slabs_of(verb, algorithm, kind, rank, size, root, extent)
            self.sources.append(one_way.source(slabs, kind))
            if verb == "reduce":
                program = one_way.reduce(part, slabs, size, lambda part=part: part.storage)
            else:
                own = np.empty(lengths[rank], row.dtype)
                program = one_way.reduce_scatter(part, slabs, extent, rank, size, own, lambda own=own: own)
            self.programs.append(program)
        self.expected = np.split(values.sum(0, dtype=values.dtype), np.cumsum(lengths)[:-1])

    def check(self, results):
        if self.verb == "reduce":
            np.testing.assert_array_equal(results[self.root], np.concatenate(self.expected))
        else:
            for result, expected in zip(results, self.expected, strict=True):
                np.testing.assert_array_equal(result, expected)


def cases(algorithm, values, dtype, inner=1):
    yield Case("reduce_scatter", algorithm, values, dtype, inner=inner)
    for root in range(len(values)):
        yield Case("reduce", algorithm, values, dtype, root)


def run(case, *, expected=True, shuffled=None):
    size = len(case.programs)
    wires = Wires(size)
    for rank, program in enumerate(case.programs):
        wires.start(rank, program=program, expected=case.sources[rank] if expected else None)
    if shuffled is None:
        wires.settle()
    else:
        wires.shuffle(*shuffled)
    wires.assert_idle()
    case.check([wires.results(rank)[0] for rank in range(size)])
    return wires


def payload(wires, rank, source=None):
    """Bytes of payload that ``rank`` was sent, by ``source`` or by all."""
    return sum(
        len(frame.payload)
        for peer in range(wires.size)
        if peer != rank and source in (None, peer)
        for frame in wires.sent(peer, rank)
        if frame.kind == wire.DATA
    )


class TestValues:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
    @pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
    def test_every_rank_ends_with_what_is_its_own(self, algorithm, dtype, size):
        for count in (0, 1, size - 1, size + 1, 1000):
            for case in cases(algorithm, values_of(dtype, size, count), dtype):
                run(case)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("dtype", ["int8", "float16", "complex128"])
    def test_bulk_in_random_reads_and_writes_gives_the_same(self, algorithm, dtype, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 1 << 18)
        values = values_of(dtype, 3, 150_001)
        for seed, case in enumerate(cases(algorithm, values, dtype)):
            run(case, shuffled=(random.Random(seed), 200_000))

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_a_world_of_one_talks_to_nobody(self, algorithm):
        for dtype in ("float16", "int32"):
            for case in cases(algorithm, values_of(dtype, 1, 10), dtype):
                assert list(case.programs[0]) == []

    def test_half_types_are_rounded_once(self):
        values = np.array([[2048], [1], [1], [1], [1]], np.float16).repeat(10, 1)
        for algorithm in ALGORITHMS:
            for case in cases(algorithm, values, "float16"):
                case.expected = [np.full(2, 2052, np.float16)] * 5
                run(case)


class TestSlabs:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
    def test_planes_are_not_used_again_while_they_are_lent_whoever_runs_ahead(
        self, monkeypatch, algorithm, size
    ):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 2 * 4 * 16)
        values = values_of("float16", size, 123)
        for favourite in range(size):
            for case in cases(algorithm, values, "float16", inner=3):
                case.check(execute(case.programs, favourite))

    def test_the_extra_memory_is_two_halves_of_a_slab(self, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 400)
        made, empty = [], np.empty

        def counted(count, dtype):
            if dtype == np.float32:
                made.append(4 * count)
            return empty(count, dtype)

        monkeypatch.setattr(one_way.np, "empty", counted)
        case = Case("reduce", "ring", np.zeros((1, 1000), np.float16), "float16")
        list(case.programs[0])
        assert made == [200, 200]

    def test_they_cover_the_array_and_each_holds_a_piece_of_each_part(self, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 2 * 4 * 10)
        kind = arithmetic("sum", DTYPES["bfloat16"])
        slabs = one_way.slabs_of("reduce_scatter", "ring", kind, 0, 3, None, (10, 9, 9))
        assert [(slab.lo, slab.hi) for slab in slabs] == [(0, 10), (10, 19), (19, 28)]
        finished = [[step for step in slab.steps if len(step) == 2] for slab in slabs]
        assert finished == [[(0, hi)] for hi in (4, 3, 3)]

    def test_there_is_one_where_the_planes_are_the_same_memory(self):
        kind = arithmetic("sum", DTYPES["float64"])
        (slab,) = one_way.slabs_of("reduce", "tree", kind, 0, 2, 0, 1 << 22)
        assert (slab.lo, slab.hi) == (0, 1 << 22)

    def test_spans_are_even_and_no_longer_than_half_a_slab(self, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 80)
        assert one_way.slab_spans(0, 4) == [(0, 0)]
        assert one_way.slab_spans(10, 4) == [(0, 10)]
        assert one_way.slab_spans(21, 4) == [(0, 7), (7, 14), (14, 21)]
        assert one_way.slab_spans(2, 100) == [(0, 1), (1, 2)]


class TestBytes:
    def test_the_ring_moves_what_is_not_ones_own(self):
        for size in (2, 3, 4, 6):
            values = values_of("float32", size, 60 * size)
            wires = run(Case("reduce_scatter", "ring", values, "float32"))
            assert [payload(wires, rank) for rank in range(size)] == [(size - 1) * 60 * 4] * size
            wires = run(Case("reduce", "ring", values, "float32", root=1))
            for rank in range(size):
                assert payload(wires, rank) == (size - 1) * 60 * 4 * (2 if rank == 1 else 1)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("dtype", ["float16", "int64"])
    def test_what_is_announced_is_what_comes(self, algorithm, dtype):
        for size, count in itertools.product((2, 3, 4, 5), (0, 1, 7, 5000)):
            for case in cases(algorithm, values_of(dtype, size, count), dtype):
                wires = run(case, expected=False)
                for rank, announced in enumerate(case.sources):
                    if announced is None:
                        assert (
                            sum(payload(wires, rank, peer) > 0 for peer in range(size) if peer != rank) != 1
                        )
                    else:
                        ((peer, nbytes),) = announced.items()
                        assert payload(wires, rank) == payload(wires, rank, peer) == nbytes

    def test_several_slabs_are_not_announced_since_readers_answer(self, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 80)
        case = Case("reduce", "ring", values_of("float16", 3, 95), "float16")
        assert case.sources == [None] * 3
        run(case)

    def test_results_of_a_ring_are_those_of_an_allreduce_where_the_parts_are_its_chunks(self):
        values = np.random.default_rng(2).standard_normal((4, 41)).astype(np.float32)
        whole = [Part(row.copy(), arithmetic("sum", DTYPES["float32"]), "ring") for row in values]
        execute([reductions.allreduce(part, rank, 4, lambda: None) for rank, part in enumerate(whole)])
        parts = execute(Case("reduce_scatter", "ring", values, "float32").programs)
        for rank, part in enumerate(parts):
            lo, hi = chunk(rank, 4, 41)
            assert part.tobytes() == whole[0].storage[lo:hi].tobytes()
