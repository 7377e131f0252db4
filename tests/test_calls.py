"""From arguments to an operation: what is compared, which algorithm runs, what is announced, what stays untouched.

Wrong arguments and values are the business of the conformance suite.
"""

from dataclasses import replace

import numpy as np
import pytest

from asynccoll import calls, pickling
from asynccoll.algorithms import registry
from asynccoll.calls import Place, reducing, scanning
from asynccoll.calls import one_way as one_way_calls
from asynccoll.calls.received import Objects
from asynccoll.engine.aborts import Disagrees
from asynccoll.engine.fingerprint import digests
from asynccoll.engine.programs import items, reductions
from asynccoll.engine.programs.items import Item, spread
from asynccoll.engine.transfers import SendBytes, copied
from asynccoll.errors import ProtocolError
from asynccoll.objects import PICKLES, pack_control
from asynccoll.pickling import MOST_BUFFERS, OUT_OF_BAND

KIB = 1 << 10
AUTO = Place(1, 4, "auto", None)


def fields(call):
    """What is set in the fingerprint."""
    return {name: value for name, value in call.fingerprint._asdict().items() if value not in (None, False)}


def allreduce(place, value, op="sum", *, out=None, algorithm="auto", name=None):
    return calls.allreduce(place, value, op, out, algorithm, name)


def broadcast(place, value, root=0, *, out=None, algorithm="auto", name=None):
    return calls.broadcast(place, value, root, out, algorithm, name)


def gather(place, value, root=0, *, out=None, name=None):
    return calls.gather(place, value, root, out, name)


def scatter(place, values, root=0, *, out=None, name=None):
    return calls.scatter(place, values, root, out, name)


def alltoall(place, values, *, out=None, name=None):
    return calls.alltoall(place, values, out, name)


@pytest.fixture
def chosen(monkeypatch):
    """Algorithms of the parts that programs are made of."""
    seen = []

    class Watched(reductions.Part):
        __slots__ = ()

        def __init__(self, storage, arithmetic, algorithm):
            seen.append(algorithm)
            super().__init__(storage, arithmetic, algorithm)

    monkeypatch.setattr(reductions, "Part", Watched)
    return seen


class TestWhatIsCompared:
    def test_allreduce_of_an_array(self):
        assert fields(allreduce(AUTO, np.zeros((2, 3), "f4"), "max", algorithm="ring", name="g")) == {
            "verb": "allreduce",
            "path": "array",
            "op": "max",
            "dtype": "float32",
            "shape": (2, 3),
            "name": "g",
            "algorithm": "ring",
        }

    def test_in_place_and_out_are_the_same_call(self):
        value = np.zeros(3)
        expected = allreduce(AUTO, value).fingerprint
        assert allreduce(AUTO, value, out=np.zeros(3)).fingerprint == expected
        assert calls.allreduce_in_place(AUTO, value, "sum", "auto", None).fingerprint == expected

    def test_allreduce_of_an_object(self):
        assert fields(allreduce(AUTO, [1], "sum")) == {
            "verb": "allreduce",
            "path": "object",
            "op": "sum",
            "algorithm": "auto",
        }

    def test_all_functions_are_one_op(self):
        one, two = allreduce(AUTO, 1, lambda a, b: a), allreduce(AUTO, np.zeros(1), lambda a, b: b)
        assert one.fingerprint == two.fingerprint
        assert one.fingerprint.op == "callable"

    def test_a_tree_by_its_structure(self):
        call = calls.allreduce_tree(AUTO, {"a": np.zeros(3, "f4"), "n": 1}, "sum", "auto", None)
        found = fields(call)
        assert found.pop("structure") == "{'a':float32[3],'n':int64[],}"
        assert found == {"verb": "allreduce_tree", "path": "array", "op": "sum", "algorithm": "auto"}

    @pytest.mark.parametrize("rank", range(4))
    def test_broadcast_by_the_root_and_by_what_is_known_of_the_value(self, rank):
        place = replace(AUTO, rank=rank)
        common = {"verb": "broadcast", "root": 2, "algorithm": "auto", "loose_path": True}
        array = {"path": "array", "dtype": "int8", "shape": (5,)}
        given = np.zeros(5, "i1")
        assert fields(broadcast(place, given, 2)) == common | array
        assert fields(broadcast(place, "object", 2)) == common | ({"path": "object"} if rank == 2 else {})
        if rank == 2:
            assert fields(broadcast(place, None, 2)) == common | {"path": "object"}
        else:
            assert fields(broadcast(place, None, 2)) == common
            assert fields(broadcast(place, None, 2, out=given)) == common | array

    def test_the_root_may_be_anything_that_counts_as_an_index(self):
        call = broadcast(AUTO, None, np.int64(2))
        assert call.fingerprint.root == 2
        assert type(call.fingerprint.root) is int

    def test_allgather_leaves_shapes_free(self):
        call = calls.allgather(AUTO, np.zeros((2, 3), "f4"), None, "ring", "g")
        assert fields(call) == {
            "verb": "allgather",
            "path": "array",
            "dtype": "float32",
            "name": "g",
            "algorithm": "ring",
        }
        assert calls.allgather(AUTO, "object", None, "auto", None).fingerprint.path == "object"

    @pytest.mark.parametrize("rank", range(4))
    def test_gather_by_the_root_and_leaves_shapes_free(self, rank):
        place = replace(AUTO, rank=rank)
        expected = {"verb": "gather", "path": "array", "dtype": "float32", "root": 2, "name": "g"}
        assert fields(gather(place, np.zeros((2, 3), "f4"), 2, name="g")) == expected
        assert fields(gather(place, "object", 2)) == {"verb": "gather", "path": "object", "root": 2}

    @pytest.mark.parametrize(
        ("values", "known"),
        [
            ([np.zeros(count, "f4") for count in range(4)], {"path": "array", "dtype": "float32"}),
            ([np.zeros(1), 1, np.zeros(1, "f4"), 1], {"path": "array|object", "dtype": "float32|float64"}),
            ([1, "a", None, [np.zeros(1)]], {"path": "object"}),
        ],
        ids=["arrays", "mixed", "objects"],
    )
    def test_scatter_by_the_root_and_what_its_values_have_in_common(self, values, known):
        common = {"verb": "scatter", "root": 1, "loose_path": True}
        assert fields(scatter(AUTO, values, 1)) == common | known
        assert fields(scatter(replace(AUTO, rank=2), values, 1)) == common
        given = scatter(replace(AUTO, rank=2), None, 1, out=np.zeros((2, 2), "i1"))
        assert fields(given) == common | {"path": "array", "dtype": "int8"}

    def test_alltoall_leaves_shapes_free(self):
        values = [np.zeros(count, "f4") for count in range(4)]
        assert fields(alltoall(AUTO, values, name="g")) == {
            "verb": "alltoall",
            "path": "array",
            "dtype": "float32",
            "name": "g",
        }
        assert fields(alltoall(AUTO, [1, "a", None, [2]])) == {"verb": "alltoall", "path": "object"}

    @pytest.mark.parametrize("verb", ["reduce", "reduce_scatter", "scan", "exscan"])
    def test_other_reductions_of_an_array_by_dtype_and_shape_and_the_root(self, verb):
        make = getattr(calls, verb)
        root = {"root": 2} if verb == "reduce" else {}
        for rank in range(4):
            place = replace(AUTO, rank=rank)
            value = np.zeros((2, 3), ">f4")
            call = make(place, value, "max", *root.values(), None, "auto", "g")
            assert fields(call) == {
                "verb": verb,
                "path": "array",
                "op": "max",
                "dtype": "float32",
                "shape": (2, 3),
                "name": "g",
                "algorithm": "auto",
                **root,
            }

    @pytest.mark.parametrize("verb", ["reduce", "scan", "exscan"])
    def test_and_of_an_object(self, verb):
        root = {"root": 2} if verb == "reduce" else {}
        for op, name in (("sum", "sum"), (max, "callable")):
            call = getattr(calls, verb)(AUTO, [1], op, *root.values(), None, "auto", None)
            assert fields(call) == {"verb": verb, "path": "object", "op": name, "algorithm": "auto", **root}

    def test_out_makes_no_difference(self):
        value = np.zeros(8)
        for make, out in (
            (lambda out: calls.reduce(AUTO, value, "sum", 1, out, "auto", None), np.zeros(8)),
            (lambda out: calls.reduce_scatter(AUTO, value, "sum", out, "auto", None), np.zeros(2)),
            (lambda out: calls.scan(AUTO, value, "sum", out, "auto", None), np.zeros(8)),
        ):
            assert make(out).fingerprint == make(None).fingerprint

    def test_barrier_by_its_name(self):
        assert fields(calls.barrier(AUTO, "b")) == {"verb": "barrier", "name": "b"}

    def test_the_default_of_the_environment_is_not_what_was_requested(self):
        place = replace(AUTO, algorithm="ring")
        assert allreduce(place, np.zeros(3)).fingerprint.algorithm == "auto"


class TestPlans:
    def test_a_repeated_call_is_described_and_digested_once(self):
        place = replace(AUTO)
        one, two = allreduce(place, np.zeros(3, "f4")), allreduce(place, np.ones(3, "f4"))
        assert one.fingerprint is two.fingerprint
        assert one.agreed is two.agreed
        assert one.agreed == digests(one.fingerprint)

    def test_any_difference_makes_another(self):
        place, value = replace(AUTO), np.zeros((2, 3), "f4")
        made = [
            allreduce(place, value),
            allreduce(place, value, "max"),
            allreduce(place, value.astype("f8")),
            allreduce(place, value.T),
            allreduce(place, value, algorithm="ring"),
            calls.allreduce(place, value, "sum", None, "auto", "loss"),
        ]
        assert len({call.agreed for call in made}) == len(place.plans) == len(made)

    def test_a_program_that_never_repeats_a_shape_does_not_fill_memory(self, monkeypatch):
        monkeypatch.setattr(reducing, "MAX_PLANS", 10)
        place = replace(AUTO)
        for count in range(35):
            assert allreduce(place, np.zeros(count)).fingerprint.shape == (count,)
        assert len(place.plans) <= 10

    @pytest.mark.parametrize("odd", [[], {}, 7])
    def test_what_cannot_be_kept_is_refused_as_ever(self, odd):
        with pytest.raises(ValueError, match="algorithm="):
            allreduce(AUTO, np.zeros(3), algorithm=odd)


class TestAlgorithm:
    def test_auto_is_the_tables_choice(self, chosen):
        table = {"allreduce": [[None, 100, "tree"], [None, None, "ring"]]}
        for count in (10, 1000):
            allreduce(replace(AUTO, table=table), np.zeros(count, "u1"))
        assert chosen == ["tree", "ring"]

    @pytest.mark.parametrize("name", ["ring", "tree", "doubling"])
    def test_the_calls_own_wish_comes_first_then_the_environments(self, chosen, name):
        allreduce(replace(AUTO, algorithm="tree"), np.zeros(10), algorithm=name)
        allreduce(replace(AUTO, algorithm=name), np.zeros(10))
        assert chosen == [name, name]

    def test_the_environments_counts_only_where_the_verb_has_it(self):
        place = replace(AUTO, algorithm="doubling")
        assert "doubling" not in registry.names("broadcast")
        broadcast(place, np.zeros(3))

    def test_complex_products_are_computed_at_one_rank(self, chosen):
        for algorithm in ("auto", "doubling"):
            allreduce(AUTO, np.ones(4, "c8"), "prod", algorithm=algorithm)
        assert chosen == ["linear", "linear"]

    def test_each_dtype_of_a_tree_chooses_for_itself(self, chosen):
        table = {"allreduce": [[None, 1000, "tree"], [None, None, "ring"]]}
        tree = {"a": np.zeros(10, "f4"), "b": np.zeros(1000, "f8"), "c": np.zeros(10, "f4")}
        calls.allreduce_tree(replace(AUTO, table=table), tree, "sum", "auto", None)
        assert chosen == ["tree", "ring"]

    def test_a_name_that_does_not_exist_is_answered_with_those_that_do(self):
        with pytest.raises(ValueError, match="use one of auto, ring, tree, doubling, linear"):
            allreduce(AUTO, np.zeros(3), algorithm="rign")
        with pytest.raises(ValueError, match="use one of auto, tree"):
            broadcast(AUTO, np.zeros(3), algorithm="ring")
        with pytest.raises(ValueError, match="use one of auto, ring, doubling"):
            calls.allgather(AUTO, np.zeros(3), None, "tree", None)

    @pytest.mark.parametrize(
        ("verb", "names"),
        [
            ("reduce", ("ring", "tree")),
            ("reduce_scatter", ("ring", "tree")),
            ("scan", ("chain", "doubling")),
            ("exscan", ("chain", "doubling")),
        ],
    )
    def test_other_reductions_follow_the_table_the_call_and_the_environment(self, monkeypatch, verb, names):
        seen = []

        class Watched(reductions.Part):
            __slots__ = ()

            def __init__(self, storage, arithmetic, algorithm):
                seen.append(algorithm)
                super().__init__(storage, arithmetic, algorithm)

        for module in (one_way_calls, scanning):
            monkeypatch.setattr(module, "Part", Watched)
        table = {verb: [[None, 100, names[0]], [None, None, names[1]]]}

        def call(place, count, algorithm="auto"):
            root = (0,) if verb == "reduce" else ()
            getattr(calls, verb)(place, np.zeros(count, "u1"), "sum", *root, None, algorithm, None)

        for count in (100, 101):
            call(replace(AUTO, table=table), count)
        for name in names:
            call(replace(AUTO, algorithm=name), 10)
            call(AUTO, 10, name)
        call(replace(AUTO, algorithm="no such", table=table), 10)
        assert seen == [*names, names[0], names[0], names[1], names[1], names[0]]
        with pytest.raises(ValueError, match=f"use one of auto, {names[0]}, {names[1]}"):
            call(AUTO, 10, "halving")

    @pytest.mark.parametrize(("wish", "expected"), [("auto", "doubling"), ("ring", "ring")])
    def test_allgather_chooses_when_it_knows_the_largest(self, wish, expected):
        place = replace(AUTO, table={"allgather": [[None, 100, "doubling"], [None, None, "ring"]]})
        choose = calls.allgather(place, np.zeros(3), None, wish, None).program.gi_frame.f_locals["choose"]
        assert choose(100) == expected
        assert choose(101) == "ring"


class TestExpected:
    def test_bytes_of_a_ring_are_announced_where_there_are_many(self):
        small, large = np.zeros(64 * KIB, "u1"), np.zeros(64 * KIB + 4, "u1")
        assert allreduce(AUTO, small, algorithm="ring").expected is None
        expected = allreduce(AUTO, large, algorithm="ring").expected
        assert expected == {0: 2 * 3 * (large.nbytes // 4)}

    def test_in_a_tree_several_ranks_send(self):
        place = replace(AUTO, rank=0)
        assert allreduce(place, np.zeros(1 << 20), algorithm="tree").expected is None

    def test_other_rings_and_the_chain_are_announced_too(self):
        small, large = np.zeros(64 * KIB, "u1"), np.zeros(64 * KIB + 4, "u1")
        part = large.nbytes // 4
        for make, expected in (
            (lambda value: calls.reduce(AUTO, value, "sum", 0, None, "ring", None), {0: 3 * part}),
            (lambda value: calls.reduce_scatter(AUTO, value, "sum", None, "ring", None), {0: 3 * part}),
            (lambda value: calls.scan(AUTO, value, "sum", None, "chain", None), {0: large.nbytes}),
        ):
            assert make(small).expected is None
            assert make(large).expected == expected

    def test_the_parts_of_a_tree_of_values_count_together(self):
        tree = [np.zeros(40 * KIB, "u1"), np.zeros(40 * KIB, "i1")]
        expected = calls.allreduce_tree(AUTO, tree, "sum", "ring", None).expected
        assert expected == {0: 2 * 2 * 3 * 10 * KIB}


class TestMemory:
    def test_the_content_at_the_call_counts(self):
        value = np.full(4, 5.0)
        program = allreduce(AUTO, value, algorithm="ring").program
        value[:] = -1
        first = next(program)
        assert type(first) is SendBytes
        assert np.frombuffer(first.data).tolist() == [5.0]

    def test_in_place_lends_the_callers_memory(self):
        value = np.zeros(4)
        first = next(calls.allreduce_in_place(AUTO, value, "sum", "ring", None).program)
        assert np.shares_memory(np.frombuffer(first.data, "u1"), value)

    def test_out_takes_the_value_at_the_call(self):
        value, out = np.arange(4.0), np.zeros(4)
        program = allreduce(AUTO, value, out=out, algorithm="ring").program
        assert out.tolist() == [0, 1, 2, 3]
        assert np.shares_memory(np.frombuffer(next(program).data, "u1"), out)

    def test_the_content_at_the_call_counts_in_other_reductions_too(self):
        place = replace(AUTO, rank=0)
        for make in (
            lambda value: calls.reduce(place, value, "sum", 1, None, "ring", None),
            lambda value: calls.reduce_scatter(place, value, "sum", None, "ring", None),
            lambda value: calls.scan(place, value, "sum", None, "chain", None),
            lambda value: calls.exscan(place, value, "sum", None, "doubling", None),
        ):
            value = np.full(4, 5.0)
            program = make(value).program
            value[:] = -1
            assert set(np.frombuffer(next(program).data).tolist()) == {5.0}
            program.close()
            assert value.tolist() == [-1] * 4

    def test_out_of_a_reduce_is_looked_at_by_the_root_only(self):
        value, out = np.arange(4.0), np.full(4, 9.0)
        calls.reduce(AUTO, value, "sum", 0, "anything", "auto", None)
        calls.reduce(AUTO, value, "sum", 0, out, "auto", None)
        assert out.tolist() == [9] * 4
        calls.reduce(AUTO, value, "sum", 1, out, "auto", None)
        assert out.tolist() == [0, 1, 2, 3]
        with pytest.raises(TypeError, match="out= must be"):
            calls.reduce(AUTO, value, "sum", 1, "anything", "auto", None)

    def test_rank_0_of_an_exscan_checks_out_and_leaves_it(self):
        place, out = replace(AUTO, rank=0), np.full(4, 9.0)
        calls.exscan(place, np.arange(4.0), "sum", out, "auto", None)
        assert out.tolist() == [9] * 4
        for wrong in (np.zeros(3), np.broadcast_to(0.0, (4,)), np.zeros(4, "f4")):
            with pytest.raises((TypeError, ValueError)):
                calls.exscan(place, np.arange(4.0), "sum", wrong, "auto", None)

    @pytest.mark.parametrize(
        "call",
        [
            lambda value, out: allreduce(AUTO, value, "no such op", out=out),
            lambda value, out: allreduce(AUTO, value, out=out, algorithm="no such algorithm"),
            lambda value, out: allreduce(AUTO, value.astype("i4"), out=out),
            lambda value, out: allreduce(AUTO, value, out=out[:3]),
            lambda value, out: allreduce(AUTO, value.astype("?"), "avg", out=out),
            lambda value, out: broadcast(AUTO, value[:2], out=out),
            lambda value, out: calls.allgather(AUTO, value, [out] * 3, "auto", None),
            lambda value, out: gather(AUTO, value, 1, out=[out] * 4),
            lambda value, out: gather(AUTO, value, 0, out=[out, value, value.copy(), value.copy()]),
            lambda value, out: scatter(AUTO, [value[:2]] * 4, 1, out=out),
            lambda value, out: scatter(AUTO, [value] * 3, 1, out=out),
            lambda value, out: alltoall(AUTO, [value] * 4, out=[out] * 4),
            lambda value, out: calls.reduce(AUTO, value, "sum", 1, out, "doubling", None),
            lambda value, out: calls.reduce(AUTO, value[:2], "sum", 1, out, "auto", None),
            lambda value, out: calls.reduce(AUTO, value, "sum", 4, out, "auto", None),
            lambda value, out: calls.reduce_scatter(AUTO, value, "sum", out, "auto", None),
            lambda value, out: calls.scan(AUTO, value[:2], "sum", out, "auto", None),
            lambda value, out: calls.scan(AUTO, value.astype("?"), "avg", out, "auto", None),
        ],
        ids=[
            *("op", "algorithm", "dtype", "shape", "avg", "broadcast", "allgather"),
            *("gather", "gather elsewhere", "scatter", "scatter of three", "alltoall"),
            *("reduce algorithm", "reduce shape", "reduce root", "reduce_scatter", "scan shape", "scan avg"),
        ],
    )
    def test_a_refused_call_has_touched_nothing(self, call):
        value, out = np.arange(4.0), np.full(4, 9.0)
        with pytest.raises((TypeError, ValueError)):
            call(value, out)
        assert out.tolist() == [9.0] * 4
        assert value.tolist() == [0, 1, 2, 3]

    def test_a_program_does_nothing_before_it_runs(self):
        folded = []
        call = allreduce(replace(AUTO, rank=0, size=1), 5, lambda a, b: folded.append(a))
        assert folded == []
        call.program.close()


class TestReceived:
    """What a rank makes of an item that arrives."""

    def receive(self, call, item):
        codec = call.program.gi_frame.f_locals["codec"]
        spread(memoryview(b"".join(item.parts)), codec.place(0, item.meta, item.nbytes))
        return codec.value(0)

    def item(self, value):
        return broadcast(replace(AUTO, rank=0), value).program.gi_frame.f_locals["item"]

    def test_without_a_template_an_array_is_what_the_root_passed(self):
        value = self.receive(broadcast(AUTO, None), self.item(np.arange(6, dtype="i2").reshape(2, 3)))
        assert value.dtype == np.int16
        assert value.tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_out_is_filled_in_place(self):
        out = np.zeros(3)
        assert self.receive(broadcast(AUTO, None, out=out), self.item(np.arange(3.0))) is out
        assert out.tolist() == [0, 1, 2]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_ones_own_value_goes_into_its_own_place_of_out(self, rank):
        outs = [np.zeros(3) for _ in range(4)]
        call = calls.allgather(replace(AUTO, rank=rank), np.arange(3.0), outs, "auto", None)
        codec, item = (call.program.gi_frame.f_locals[name] for name in ("codec", "item"))
        list(copied(codec.keep(item)))
        assert codec.value(rank) is outs[rank]
        assert [out.tolist() for out in outs] == [[0, 1, 2] if r == rank else [0, 0, 0] for r in range(4)]

    def test_what_arrives_in_an_alltoall_is_of_the_kind_of_what_was_passed_for_its_sender(self):
        values = [np.zeros(1, ">f8"), np.float64(0), np.zeros(2), memoryview(np.zeros(1))]
        call = alltoall(AUTO, values)
        codec = call.program.gi_frame.f_locals["codec"]
        sent = self.item(np.arange(3.0))
        for rank, kind in ((0, ">f8"), (2, "<f8"), (3, "d")):
            spread(sent.parts[0], codec.place(rank, sent.meta, sent.nbytes))
            found = codec.value(rank)
            assert (found.format if rank == 3 else found.dtype.str) == kind
            assert np.asarray(found).tolist() == [0, 1, 2]

    def test_ones_own_value_is_a_copy(self):
        mine, thing = np.arange(3.0), [1]
        for value, path in [(mine, "array"), (thing, "object")]:
            call = calls.allgather(AUTO, value, None, "auto", None)
            assert call.fingerprint.path == path
            codec, item = (call.program.gi_frame.f_locals[name] for name in ("codec", "item"))
            list(copied(codec.keep(item)))
            result = codec.value(1)
            assert list(result) == list(value)
            assert result is not value

    def test_an_object_is_unpickled(self):
        assert self.receive(broadcast(AUTO, None), self.item({"a": [1]})) == {"a": [1]}

    @pytest.mark.parametrize("template", [np.zeros(3, "f4"), np.zeros(4)], ids=["dtype", "shape"])
    def test_an_array_that_does_not_fit_the_template_is_a_disagreement(self, template):
        with pytest.raises(Disagrees):
            self.receive(broadcast(AUTO, template), self.item(np.zeros(3)))

    def test_so_is_an_object_where_an_array_was_passed(self):
        with pytest.raises(Disagrees):
            self.receive(broadcast(AUTO, np.zeros(3)), self.item("object"))

    @pytest.mark.parametrize(
        "meta",
        [
            ["float32", [3]],
            ["no such", [3], "numpy"],
            ["int8", ["3"], "numpy"],
            ["int8", [3]],
            5,
            ["float64", [2], "numpy"],
            ["int8", [-3], "numpy"],
            ["int8", [-1, -3], "numpy"],  # their product fits the payload
            ["int8", [-3, 1, -1], "numpy"],
            ["int8", [3] + [1] * 64, "numpy"],
            ["int8", [0, 1 << 63], "numpy"],
            ["int8", [3], "no such"],
            ["int8", [3], "array:u"],
            ["int8", [3], ["numpy"]],
        ],
        ids=repr,
    )
    def test_a_garbled_description_is_a_protocol_error(self, meta):
        with pytest.raises(ProtocolError):
            self.receive(broadcast(AUTO, None), Item(pack_control(meta), (memoryview(bytes(3)),)))


class TestObjects:
    """An object as a pickle and its buffers, and the memory for one that a peer describes."""

    VALUES = Objects(PICKLES)

    def test_the_description_holds_the_lengths_of_the_buffers(self):
        item = self.VALUES.lent({"a": np.zeros(5000), "b": [np.zeros(1), np.zeros(3000)]})
        assert [len(part) for part in item.parts[1:]] == [40_000, 24_000]
        parts = self.VALUES.place(item.meta, item.nbytes)
        assert [len(part) for part in parts] == [len(part) for part in item.parts]
        spread(memoryview(b"".join(item.parts)), parts)
        assert self.VALUES.value(parts)["b"][1].shape == (3000,)

    def test_without_large_buffers_it_says_no_more_than_that_it_is_an_object(self):
        assert self.VALUES.lent([1, 2]).meta == pack_control(None)

    def test_a_ranks_own_copy_shares_the_pickle_and_no_buffer(self):
        array = np.arange(5000.0)
        item = self.VALUES.lent([array])
        parts, copies = self.VALUES.own(item)
        assert parts[0] is item.parts[0]
        list(copied(copies))
        (result,) = self.VALUES.value(parts)
        assert result.tolist() == array.tolist()
        assert not np.shares_memory(result, array)

    def test_the_longest_description_fits_its_message(self):
        arrays = [np.zeros(OUT_OF_BAND, np.uint8) for _ in range(MOST_BUFFERS + 1)]
        item = self.VALUES.lent(arrays)
        assert len(items._encode(item.meta, item.nbytes, None)) <= items._LONGEST
        assert len(self.VALUES.place(item.meta, item.nbytes)) == MOST_BUFFERS + 1

    @pytest.mark.parametrize(
        "lengths",
        [b"\0", b"\0" * 9, (101).to_bytes(8, "little"), bytes(8) + (101).to_bytes(8, "little"), b"\xff" * 8,
         (51).to_bytes(8, "little") * 2, bytes(8 * (MOST_BUFFERS + 1))],
        ids=["a byte", "nine bytes", "more than all", "two", "2**64 - 1", "together more", "too many"],
    )  # fmt: skip
    def test_lengths_that_do_not_fit_are_a_protocol_error_before_there_is_memory(self, lengths, monkeypatch):
        monkeypatch.setattr(pickling, "fresh", None)
        with pytest.raises(ProtocolError):
            self.VALUES.place(pack_control(lengths), 100)

    def test_an_array_where_an_object_is_due_is_a_protocol_error(self):
        with pytest.raises(ProtocolError, match="array"):
            self.VALUES.place(pack_control(["int8", [3], "numpy"]), 3)
