import inspect
import itertools

import msgpack
import pytest

from asynccoll.algorithms import dissemination, doubling, registry, ring, tree, waves

KIB = 1024


def test_names_are_those_of_the_product():
    assert registry.names("allreduce") == ("ring", "tree", "doubling", "linear")
    assert registry.names("allreduce_stream") == registry.names("allreduce")
    assert registry.names("allgather") == ("ring", "doubling")
    assert registry.names("broadcast") == ("tree",)
    assert registry.names("reduce") == ("ring", "tree")
    assert registry.names("reduce_scatter") == ("ring", "tree")
    assert registry.names("scan") == registry.names("exscan") == ("chain", "doubling")


def test_a_verb_without_schedules_has_no_names():
    assert registry.names("barrier") == ()


def test_schedule_gives_the_algorithms_own_function():
    assert registry.schedule("allreduce", "ring") is ring.allreduce
    assert registry.schedule("allreduce", "tree") is tree.allreduce
    assert registry.schedule("allreduce", "doubling") is doubling.allreduce
    assert registry.schedule("allreduce_stream", "ring") is waves.allreduce
    assert registry.schedule("allreduce_stream", "tree") is tree.allreduce
    assert registry.schedule("allgather", "ring") is ring.allgather
    assert registry.schedule("allgather", "doubling") is dissemination.allgather
    assert registry.schedule("broadcast", "tree") is tree.broadcast
    assert registry.schedule("reduce", "ring") is ring.reduce
    assert registry.schedule("reduce", "tree") is tree.reduce
    assert registry.schedule("reduce_scatter", "ring") is ring.reduce_scatter
    assert registry.schedule("reduce_scatter", "tree") is tree.reduce_scatter


def test_every_schedule_begins_with_rank_and_size():
    for verb in set(registry.DEFAULT) - {"scan", "exscan"}:
        for name in registry.names(verb):
            assert list(inspect.signature(registry.schedule(verb, name)).parameters)[:2] == ["rank", "size"]


@pytest.mark.parametrize("verb", ["scan", "exscan"])
def test_scans_are_chosen_but_have_no_schedules(verb):
    for name in registry.names(verb):
        assert registry.choose(verb, 4, 100, 5, table={verb: [[None, None, name]]}) == name
        with pytest.raises(ValueError, match=f"does not exist for {verb}"):
            registry.schedule(verb, name)


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as caught:
        registry.schedule("allreduce", "auto")
    assert "'auto' does not exist for allreduce" in str(caught.value)
    assert "ring, tree, doubling, linear" in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "nbytes", "size", "expected"),
    [
        ("allreduce", 0, 2, "doubling"),
        ("allreduce", 64 * KIB, 2, "doubling"),
        ("allreduce", 64 * KIB + 1, 2, "tree"),
        ("allreduce", 512 * KIB, 2, "tree"),
        ("allreduce", 512 * KIB + 1, 2, "ring"),
        ("allreduce", 0, 3, "linear"),
        ("allreduce", 64 * KIB, 3, "linear"),
        ("allreduce", 64 * KIB, 4, "linear"),
        ("allreduce", 64 * KIB + 1, 4, "tree"),
        ("allreduce", 512 * KIB, 4, "tree"),
        ("allreduce", 512 * KIB + 1, 4, "ring"),
        ("allreduce", 4 * KIB, 5, "doubling"),
        ("allreduce", 128 * KIB, 5, "tree"),
        ("allreduce", 128 * KIB + 1, 5, "ring"),
        ("allreduce", 1 << 30, 64, "ring"),
        ("allgather", 64 * KIB, 4, "doubling"),
        ("allgather", 64 * KIB + 1, 4, "ring"),
        ("broadcast", 8, 4, "tree"),
        ("broadcast", 1 << 30, 4, "tree"),
        ("reduce", 4096 * KIB, 4, "tree"),
        ("reduce", 4096 * KIB + 1, 4, "ring"),
        ("reduce", 1024 * KIB, 5, "tree"),
        ("reduce", 1024 * KIB + 1, 5, "ring"),
        ("reduce_scatter", 256 * KIB, 4, "tree"),
        ("reduce_scatter", 256 * KIB + 1, 4, "ring"),
        ("scan", 16 * KIB, 2, "chain"),
        ("scan", 16 * KIB, 3, "doubling"),
        ("scan", 16 * KIB + 1, 3, "chain"),
        ("exscan", 16 * KIB, 3, "doubling"),
        ("exscan", 16 * KIB + 1, 3, "chain"),
    ],
)
def test_auto_follows_the_thresholds(verb, nbytes, size, expected):
    assert registry.choose(verb, 4, nbytes, size) == expected


def test_order_sensitive_reductions_never_take_doubling():
    chosen = {
        registry.choose("allreduce", 16, nbytes, size, order_sensitive=True)
        for nbytes, size in itertools.product((0, 16, 16 * KIB, 64 * KIB, 1 << 24), range(1, 71))
    }
    assert chosen == {"linear", "tree", "ring"}
    assert registry.choose("allreduce", 16, 64 * KIB, 2, order_sensitive=True) == "tree"


def test_order_does_not_matter_where_nothing_is_reduced():
    assert registry.choose("allgather", 16, 16, 4, order_sensitive=True) == "doubling"


def test_fewer_elements_than_ranks_never_take_the_ring():
    always_ring = {"allreduce": [[None, None, "ring"]]}
    assert registry.choose("allreduce", 8, 8 * 5, 5, table=always_ring) == "ring"
    assert registry.choose("allreduce", 8, 8 * 4, 5, table=always_ring) == "doubling"
    assert registry.choose("allreduce", 8, 8 * 4, 5, order_sensitive=True, table=always_ring) == "tree"


def test_what_auto_chooses_exists():
    for verb in registry.DEFAULT:
        for nbytes, size, order in itertools.product((0, 1, 1 << 15, 1 << 20), (1, 2, 3, 64), (False, True)):
            assert registry.choose(verb, 1, nbytes, size, order_sensitive=order) in registry.names(verb)


def test_a_table_survives_the_wire_and_chooses_alike():
    table = msgpack.unpackb(msgpack.packb(registry.default_table()))
    for nbytes, size in itertools.product((0, 16 * KIB, 16 * KIB + 1, 64 * KIB, 64 * KIB + 1), (1, 2, 3, 8)):
        for verb in registry.DEFAULT:
            assert registry.choose(verb, 4, nbytes, size, table=table) == registry.choose(
                verb, 4, nbytes, size
            )


def test_a_table_can_be_replaced():
    table = {"allreduce": [[4, 100, "tree"], [None, 10, "doubling"], [None, None, "ring"]]}
    chosen = [
        registry.choose("allreduce", 1, nbytes, size, table=table)
        for nbytes, size in ((100, 4), (100, 5), (10, 5))
    ]
    assert chosen == ["tree", "ring", "doubling"]


def test_no_table_is_the_default_one():
    assert registry.choose("allreduce", 4, 64 * KIB, 2, table=None) == "doubling"


def test_a_changed_copy_does_not_change_the_default():
    registry.default_table()["allreduce"][0][2] = "ring"
    assert registry.choose("allreduce", 4, 8, 2) == "doubling"


def test_a_table_that_names_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError) as caught:
        registry.choose("allreduce", 4, 8, 2, table={"allreduce": [[None, None, "halving"]]})
    assert "'halving' does not exist for allreduce" in str(caught.value)


@pytest.mark.parametrize("table", [{}, {"allreduce": [[None, 7, "ring"]]}])
def test_a_table_without_a_row_that_fits_is_refused(table):
    with pytest.raises(ValueError) as caught:
        registry.choose("allreduce", 4, 8, 2, table=table)
    assert "no row for allreduce of 8 bytes on 2 ranks" in str(caught.value)
