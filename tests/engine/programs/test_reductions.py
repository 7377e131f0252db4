"""Reductions as programs: which bytes travel, on which plane, and that what is announced is what comes.

Values of every op and dtype are the business of the conformance suite.
"""

import itertools
import random

import numpy as np
import pytest
from wires import KIB, Wires

from asynccoll.algorithms.start import graph
from asynccoll.algorithms.steps import Send
from asynccoll.buffers import DTYPES
from asynccoll.engine import wire
from asynccoll.engine.programs import reductions
from asynccoll.engine.programs.reductions import Part, Turns
from asynccoll.errors import ProtocolError
from asynccoll.reduction import arithmetic

ALGORITHMS = ("ring", "tree", "doubling")


def parts(dtype, algorithm, size, count, op="sum", seed=0):
    """One part per rank, of small integers, so that sums are exact."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    values = rng.integers(-8, 8, (size, count)).astype(kind.storage)
    return values, [Part(row.copy(), arithmetic(op, kind), algorithm) for row in values]


def run(wires, made, *, expected=True, shuffled=None):
    """All ranks reduce their part; the results by rank."""
    size = wires.size
    for rank, part in enumerate(made):
        wires.start(
            rank,
            program=reductions.allreduce(part, rank, size, lambda part=part: part.storage),
            expected=reductions.sources([part.share], rank, size) if expected else None,
        )
    if shuffled is None:
        wires.settle()
    else:
        wires.shuffle(*shuffled)
    wires.assert_idle()
    return [wires.results(rank)[0] for rank in range(size)]


def payload_to(wires, rank, peer=None):
    """Bytes of payload that ``rank`` was sent, by ``peer`` or by all."""
    return sum(
        len(frame.payload)
        for source in range(wires.size)
        if source != rank and peer in (None, source)
        for frame in wires.sent(source, rank)
        if frame.kind == wire.DATA
    )


class TestAllreduce:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
    def test_every_rank_ends_with_the_sum(self, algorithm, size):
        for count in (0, 1, size - 1, size + 1, 1000):
            values, made = parts("float32", algorithm, size, count)
            for result in run(Wires(size), made):
                np.testing.assert_array_equal(result, values.sum(0))

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("dtype", ["int8", "float16", "float64", "complex128"])
    def test_bulk_in_random_reads_and_writes_gives_the_same(self, algorithm, dtype):
        rng = random.Random(7)
        values, made = parts(dtype, algorithm, 3, 150_001)
        expected = values.sum(0, dtype=values.dtype)
        for result in run(Wires(3), made, shuffled=(rng, 200_000)):
            np.testing.assert_array_equal(result, expected)

    def test_the_result_is_made_at_the_end_only(self):
        wires = Wires(2)
        asked = []
        _, made = parts("int32", "ring", 2, 10)
        wires.start(0, program=reductions.allreduce(made[0], 0, 2, lambda: asked.append(0)))
        wires.flush(0)
        assert asked == []
        wires.start(1, program=reductions.allreduce(made[1], 1, 2, lambda: asked.append(1)))
        wires.settle()
        assert sorted(asked) == [0, 1]

    def test_the_ring_moves_2_n_less_2_of_n_parts_per_rank(self):
        for size in (2, 3, 4, 6):
            wires = Wires(size)
            _, made = parts("float32", "ring", size, 60 * size)
            run(wires, made)
            for rank in range(size):
                assert payload_to(wires, rank) == 2 * (size - 1) * 60 * 4


class TestPlanes:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_partial_sums_of_half_types_travel_as_float32_and_results_as_half(self, dtype):
        wires = Wires(4)
        _, made = parts(dtype, "ring", 4, 400)
        run(wires, made)
        for rank in range(4):
            assert payload_to(wires, rank) == 3 * 100 * 4 + 3 * 100 * 2

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_they_are_rounded_once(self, algorithm):
        # In float16 2048 + 1 is 2048: rounded at each hop the ones would be lost.
        made = [
            Part(np.full(5, value, np.float16), arithmetic("sum", DTYPES["float16"]), algorithm)
            for value in (2048, 1, 1, 1, 1)
        ]
        for result in run(Wires(5), made):
            assert result.tolist() == [2052] * 5

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_slabs_give_the_same_bits_as_one_run(self, algorithm, monkeypatch):
        values = np.random.default_rng(1).standard_normal((3, 1000)).astype(np.float16)

        def reduced():
            made = [Part(row.copy(), arithmetic("avg", DTYPES["float16"]), algorithm) for row in values]
            return [result.tobytes() for result in run(Wires(3), made)]

        whole = reduced()
        monkeypatch.setattr(
            reductions, "SLAB_BYTES", 3 * 64 * 4
        )  # divides among the ranks, so chunks are alike
        slabs = reduced()
        assert len({*whole}) == len({*slabs}) == 1
        if algorithm != "ring":  # a ring starts each element's fold at the rank that its chunk names
            assert whole == slabs

    def test_the_extra_memory_is_one_slab(self, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 400)
        made = []
        empty = np.empty

        def counted(count, dtype):
            made.append(count * np.dtype(dtype).itemsize)
            return empty(count, dtype)

        monkeypatch.setattr(reductions.np, "empty", counted)
        part = Part(np.zeros(1000, np.float16), arithmetic("sum", DTYPES["float16"]), "ring")
        assert list(reductions.allreduce(part, 0, 1, lambda: None)) == []
        assert max(made) == 400

    def test_min_and_max_work_in_the_callers_memory(self):
        wires = Wires(2)
        part = Part(
            np.array([1.0, -2.0, np.nan, -0.0], "f4"), arithmetic("min", DTYPES["float32"]), "doubling"
        )
        other = Part(np.array([0.5, 3.0, 1.0, 0.0], "f4"), arithmetic("min", DTYPES["float32"]), "doubling")
        mine, theirs = run(wires, [part, other])
        assert mine is part.storage
        assert mine.tobytes() == theirs.tobytes() == np.array([0.5, -2.0, np.nan, -0.0], "f4").tobytes()


class TestStream:
    """What is told of a reduction, and when."""

    def told(self, size, dtype, algorithm, count, op="sum"):
        wires = Wires(size)
        values, made = parts(dtype, algorithm, size, count, op)
        told = [[] for _ in made]
        for rank, part in enumerate(made):

            def tell(lo, hi, part=part, own=told[rank]):
                own.append((lo, hi, part.storage[lo:hi].copy()))

            program = reductions.allreduce_stream(part, rank, size, lambda part=part: part.storage, tell)
            wires.start(rank, program=program, expected=reductions.sources([part.share], rank, size))
        wires.settle()
        wires.assert_idle()
        return values, told, [wires.results(rank)[0] for rank in range(size)]

    @pytest.mark.parametrize("algorithm", [*ALGORITHMS, "linear"])
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("size", [1, 2, 3, 5])
    def test_each_element_is_told_once_and_is_final_then(self, size, dtype, algorithm, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 4000)
        for count in (0, 1, size + 1, 5003):
            _, told, results = self.told(size, dtype, algorithm, count)
            for own, result in zip(told, results, strict=True):
                spans = sorted((lo, hi) for lo, hi, _ in own)
                assert [lo for span in spans for lo in range(*span)] == list(range(count))
                for lo, hi, seen in own:
                    assert seen.tobytes() == result[lo:hi].tobytes()

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("op", ["sum", "avg", "max"])
    def test_the_waves_of_a_ring_have_its_bits(self, dtype, op):
        rng = np.random.default_rng(3)
        storage = DTYPES[dtype].storage
        values = rng.normal(size=(4, 300_001)).astype("f4" if dtype == "bfloat16" else storage)
        if dtype == "bfloat16":
            values = (values.view("u4") >> 16).astype("u2")

        def reduced(start):
            wires, made = (
                Wires(4),
                [Part(row.copy(), arithmetic(op, DTYPES[dtype]), "ring") for row in values],
            )
            for rank, part in enumerate(made):
                wires.start(
                    rank,
                    program=start(part, rank, 4, lambda part=part: part.storage),
                    expected=reductions.sources([part.share], rank, 4),
                )
            wires.settle()
            return [wires.results(rank)[0].tobytes() for rank in range(4)]

        def stream(*call):
            return reductions.allreduce_stream(*call, lambda lo, hi: None)

        assert reduced(stream) == reduced(reductions.allreduce)


class TestSources:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("dtype", ["float16", "int64"])
    def test_what_is_announced_is_what_comes(self, algorithm, dtype):
        for size, count in itertools.product((2, 3, 4, 5), (0, 1, 7, 5000)):
            wires = Wires(size)
            _, made = parts(dtype, algorithm, size, count)
            announced = [reductions.sources([part.share], rank, size) for rank, part in enumerate(made)]
            run(wires, made, expected=False)
            for rank, sources in enumerate(announced):
                if sources is None:
                    assert sum(payload_to(wires, rank, peer) > 0 for peer in range(size)) != 1
                else:
                    ((peer, nbytes),) = sources.items()
                    assert payload_to(wires, rank) == payload_to(wires, rank, peer) == nbytes

    def test_slabs_are_counted_each(self, monkeypatch):
        monkeypatch.setattr(reductions, "SLAB_BYTES", 40)
        wires = Wires(3)
        _, made = parts("float16", "ring", 3, 95)
        sources = [reductions.sources([part.share], rank, 3) for rank, part in enumerate(made)]
        run(wires, made)
        assert sources == [{(rank - 1) % 3: payload_to(wires, rank)} for rank in range(3)]

    def test_several_parts_are_added_up(self):
        _, floats = parts("float32", "ring", 3, 30)
        _, halves = parts("float16", "ring", 3, 30)
        one, two = (reductions.sources([part.share], 0, 3)[2] for part in (floats[0], halves[0]))
        assert reductions.sources([floats[0].share, halves[0].share], 0, 3) == {2: one + two}

    def test_bytes_from_two_ranks_have_no_place_beforehand(self):
        _, made = parts("float32", "tree", 3, 1000)
        assert reductions.sources([made[0].share], 0, 3) is None


class TestSteps:
    def test_they_are_made_once(self):
        assert reductions.steps_of("ring", 1, 4, 100, 4) is reductions.steps_of("ring", 1, 4, 100, 4)

    def test_slabs_of_doubling_have_64_kib_at_most(self):
        sends = [step for step in reductions.steps_of("doubling", 0, 4, 100_000, 8) if type(step) is Send]
        assert max(step.hi - step.lo for step in sends if step.snapshot) * 8 == 64 * KIB

    @pytest.mark.parametrize("algorithm", ["tree", "linear"])
    @pytest.mark.parametrize(("total", "segment"), [(100, 100), (1024, 256), (4096, 512), (32768, 1024)])
    def test_a_tree_moves_an_eighth_at_a_time_but_256_kib_to_1_mib(self, algorithm, total, segment):
        steps = reductions.steps_of(algorithm, 1, 4, total * KIB // 8, 8)
        assert max(step.hi - step.lo for step in steps) * 8 == segment * KIB

    @pytest.mark.parametrize(("total", "segment"), [(100, 25), (4096, 1024), (1 << 20, 4096)])
    def test_segments_of_a_ring_have_1_mib_until_they_would_be_many(self, total, segment):
        steps = reductions.steps_of("ring", 1, 4, total * KIB // 8, 8)
        assert max(step.hi - step.lo for step in steps) * 8 == segment * KIB


class TestParts:
    def test_several_dtypes_are_one_operation(self):
        size = 3
        wires = Wires(size)
        values = [
            parts(dtype, algorithm, size, 50) for dtype, algorithm in [("float32", "ring"), ("int64", "tree")]
        ]
        for rank in range(size):
            mine = [made[rank] for _, made in values]
            program = reductions.allreduce_parts(
                mine, rank, size, lambda mine=mine: [part.storage for part in mine]
            )
            wires.start(
                rank, program=program, expected=reductions.sources([part.share for part in mine], rank, size)
            )
        wires.settle()
        for rank in range(size):
            (result,) = wires.results(rank)
            for (expected, _), got in zip(values, result, strict=True):
                np.testing.assert_array_equal(got, expected.sum(0))
            starts = [frame for frame in wires.sent(rank) if frame.kind == wire.START]
            assert len(starts) == sum(map(len, graph(rank, size).tells))

    def test_none_at_all_is_an_operation_too(self):
        wires = Wires(2)
        for rank in range(2):
            wires.start(rank, program=reductions.allreduce_parts([], rank, 2, lambda: "done"))
        wires.settle()
        assert wires.results(0) == ["done"]


class TestSwap:
    @pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
    @pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "bfloat16"])
    @pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
    def test_it_gives_the_bits_of_its_schedule(self, dtype, op, size):
        kind = DTYPES[dtype]
        algorithm = "linear" if size in (3, 4) else "doubling"
        if kind.kind == "c" and (op in ("min", "max") or (op == "prod" and algorithm == "doubling")):
            return  # not defined, or never by doubling
        values = np.random.default_rng(3).standard_normal((size, 7)).astype("f4")
        rows = [row.view("u4") >> 16 if dtype == "bfloat16" else row for row in values]
        made = [
            [Part(row.astype(kind.storage), arithmetic(op, kind), algorithm) for row in rows]
            for _ in range(2)
        ]
        by_steps = run(Wires(size), made[0])
        wires = Wires(size)
        for rank, part in enumerate(made[1]):
            turns = reductions.swap_turns(algorithm, rank, size, 7, part.arithmetic.partial.itemsize)
            assert turns is not None
            wires.start(
                rank,
                program=reductions.swap(part, turns, size, lambda part=part: part.storage),
                swaps=True,
            )
        wires.settle()
        wires.assert_idle()
        for rank in range(size):
            assert wires.results(rank)[0].tobytes() == by_steps[0].tobytes()

    def test_it_is_for_small_arrays_that_move_along_the_start_graph(self):
        assert reductions.swap_turns("doubling", 1, 8, 64, 4) == Turns(("lower", "higher", "higher"), False)
        assert reductions.swap_turns("linear", 0, 4, 64, 4) == Turns(("higher", "higher", "higher"), True)
        assert reductions.swap_turns("linear", 1, 4, 64, 4) == Turns((None,), False)
        assert reductions.swap_turns("doubling", 1, 8, 65, 4) is None
        assert reductions.swap_turns("doubling", 1, 8, 0, 4) is None
        assert reductions.swap_turns("doubling", 0, 1, 4, 4) is None

    @pytest.mark.parametrize("size", range(2, 18))
    @pytest.mark.parametrize("algorithm", ["doubling", "linear", "tree", "ring"])
    def test_all_ranks_swap_or_none(self, algorithm, size):
        swaps = {"linear"} if size in (3, 4) else {"doubling"} if size & (size - 1) == 0 else set()
        for rank in range(size):  # the tree's steps on some ranks are those of a swap
            assert (reductions.swap_turns(algorithm, rank, size, 4, 4) is not None) == (algorithm in swaps)


class TestWholeElements:
    def test_pieces_are_cut_between_elements(self):
        found = reductions.whole_elements(memoryview(np.arange(3, dtype="f4").tobytes()), np.dtype("f4"))
        assert found.tolist() == [0.0, 1.0, 2.0]

    def test_one_that_ends_within_an_element_breaks_the_protocol(self):
        with pytest.raises(ProtocolError, match="10 bytes came, which are no whole elements of float32"):
            reductions.whole_elements(memoryview(bytes(10)), np.dtype("f4"))
