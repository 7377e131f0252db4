"""Digests: equal exactly where ranks may go on together, and equal in every interpreter."""

import enum
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from asynccoll.engine.fingerprint import FIELDS, Fingerprint, digests, first_difference

CALL = Fingerprint("allreduce", "array", "sum", "float32", (2, 3), 0, "grads", "ring", "[a]")
OTHER = {
    "verb": "broadcast",
    "path": "object",
    "op": "max",
    "dtype": "int32",
    "shape": (3, 2),
    "root": 1,
    "name": "weights",
    "algorithm": "tree",
    "structure": "[b]",
}
VALUE_FIELDS = ("dtype", "shape", "structure")


def test_every_field_is_told_apart():
    assert set(OTHER) == set(FIELDS) == set(Fingerprint._fields) - {"loose_path"}
    changed = [digests(CALL._replace(**{field: value})) for field, value in OTHER.items()]
    for one, two in itertools.combinations([digests(CALL), *changed], 2):
        assert (one.strict, one.value) != (two.strict, two.value)
        assert one.tag != two.tag


@pytest.mark.parametrize("field", FIELDS)
def test_dtype_shape_and_structure_change_the_value_digest_and_all_else_the_strict_one(field):
    before, after = digests(CALL), digests(CALL._replace(**{field: OTHER[field]}))
    assert (before.value != after.value) == (field in VALUE_FIELDS)
    assert (before.strict != after.strict) == (field not in VALUE_FIELDS)


def test_a_call_without_dtype_shape_and_structure_is_a_wildcard():
    assert digests(Fingerprint("barrier")).value == 0
    assert digests(Fingerprint("allgather", "array", dtype="int8")).value != 0
    assert digests(Fingerprint("allreduce", "array", "sum", "int8", ())).value != 0


def test_none_and_its_text_are_different_names():
    assert digests(Fingerprint("barrier", name="None")) != digests(Fingerprint("barrier"))


class Op(str, enum.Enum):  # noqa: UP042 (its str() is another text)
    SUM = "sum"


@pytest.mark.parametrize("odd_first", [True, False])
@pytest.mark.parametrize(
    ("field", "odd"),
    [("op", np.str_("sum")), ("op", Op.SUM), ("name", np.str_("sum")), ("algorithm", np.str_("sum"))],
)
def test_a_subclass_of_str_is_the_str_that_it_is_whichever_was_there_first(field, odd, odd_first):
    digests.cache_clear()
    calls = [Fingerprint("allreduce", **{field: odd}), Fingerprint("allreduce", **{field: "sum"})]
    one, two = map(digests, calls if odd_first else reversed(calls))
    assert one == two
    digests.cache_clear()
    assert digests(calls[1]) == one
    assert all(type(call.fields()[field]) is str for call in calls)


class TestLoosePath:
    ROOT = Fingerprint("broadcast", "array", dtype="int8", shape=(4,), root=2, loose_path=True)
    GUEST = Fingerprint("broadcast", root=2, loose_path=True)

    def test_a_rank_without_a_value_goes_on_with_any_root(self):
        root, guest = digests(self.ROOT), digests(self.GUEST)
        assert guest.value == 0 != root.value
        assert guest.strict == root.strict

    def test_the_path_is_part_of_the_value(self):
        other = self.ROOT._replace(path="object")
        assert digests(other).strict == digests(self.ROOT).strict
        assert digests(other).value != digests(self.ROOT).value

    def test_frames_carry_no_value_since_it_may_differ(self):
        assert digests(self.ROOT).tag == digests(self.GUEST).tag
        assert digests(self.ROOT._replace(root=1)).tag != digests(self.ROOT).tag


def test_digests_are_never_zero_where_something_is_described():
    # 0 is the wildcard, so a hash that happens to be 0 would let anything pass.
    assert all(digests(CALL._replace(shape=(n,))).value for n in range(1000))


def test_another_interpreter_makes_the_same_digests():
    code = (
        "from asynccoll.engine.fingerprint import Fingerprint, digests\n"
        f"print(*digests({CALL!r}), *digests({TestLoosePath.ROOT!r}))"
    )
    texts = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30
        )
        assert run.returncode == 0, run.stderr
        texts.append(run.stdout)
    expected = [*digests(CALL), *digests(TestLoosePath.ROOT)]
    assert [list(map(int, text.split())) for text in texts] == [expected, expected]


def test_fields_travel_as_plain_data():
    fields = CALL.fields()
    assert list(fields) == list(FIELDS)
    assert fields["shape"] == [2, 3]
    assert "loose_path" not in fields


def test_a_long_structure_is_cut_for_the_way():
    assert len(CALL._replace(structure="x" * 5000).fields()["structure"]) == 2048


class TestFirstDifference:
    def test_fields_are_looked_at_in_their_order(self):
        for at, field in enumerate(FIELDS):
            other = CALL._replace(**{later: OTHER[later] for later in FIELDS[at:]})
            found, values = first_difference({0: CALL.fields(), 3: other.fields()})
            assert found == field
            assert values == {0: getattr(CALL, field), 3: getattr(other, field)}

    def test_a_wildcard_is_no_difference_but_is_shown_beside_one(self):
        values = {0: CALL.fields(), 1: CALL._replace(shape=None).fields()}
        assert first_difference(values)[0] == "structure"
        values[2] = CALL._replace(shape=(6,)).fields()
        assert first_difference(values) == ("shape", {0: (2, 3), 1: None, 2: (6,)})

    @pytest.mark.parametrize("field", ["op", "root", "name", "algorithm"])
    def test_none_is_a_value_of_its_own_elsewhere(self, field):
        values = {0: CALL.fields(), 1: CALL._replace(**{field: None}).fields()}
        assert first_difference(values) == (field, {0: getattr(CALL, field), 1: None})

    def test_texts_that_were_cut_alike_are_reported_as_structure(self):
        long = "x" * 2048
        values = {n: CALL._replace(structure=long + tail).fields() for n, tail in enumerate("ab")}
        assert first_difference(values) == ("structure", {0: long, 1: long})
