"""What rank 0 finds wrong with those who join."""

import pytest

from asynccoll.errors import ProtocolError
from asynccoll.net.roster import Entry, Roster


def entry(rank, size=3, *, host="10.0.0.5", port=4000, node="a/1", settings=None, peer=None):
    return Entry(
        rank=rank,
        size=size,
        peer=peer or f"10.0.0.5:{5000 + rank}",
        host=host,
        port=port,
        node=node,
        pid=100 + rank,
        settings=settings or {},
    )


def roster(size=3, **own):
    return Roster(entry(0, size, peer="head:29500", **own))


def test_ranks_join_until_none_is_missing():
    joined = roster()
    assert joined.missing == {1, 2}
    assert joined.join(entry(2)) is None
    assert joined.missing == {1}
    assert joined.join(entry(1)) is None
    assert joined.missing == frozenset()
    assert joined.disagreement() is None
    assert joined.unreachable() is None


def test_a_rank_claimed_twice_names_both_processes():
    joined = roster()
    joined.join(entry(1, peer="10.0.0.7:1"))
    problem = joined.join(entry(1, peer="10.0.0.8:2"))
    for part in ("rank 1 was claimed twice", "10.0.0.7:1", "10.0.0.8:2", "pid 101 on a"):
        assert part in problem
    assert joined.entries[1].peer == "10.0.0.7:1"


def test_a_second_rank_0_is_a_duplicate():
    problem = roster().join(entry(0, peer="10.0.0.8:2"))
    for part in ("rank 0 was claimed twice", "head:29500", "10.0.0.8:2"):
        assert part in problem


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (3, 4)])
def test_another_world_size_names_both_sizes_and_addresses(rank, size):
    joined = roster()
    problem = joined.join(entry(rank, size))
    for part in (
        "world sizes disagree",
        f"rank {rank} at 10.0.0.5:{5000 + rank}",
        f"says {size}",
        "head:29500",
        "says 3",
    ):
        assert part in problem
    assert joined.missing == {1, 2}


def test_a_rank_outside_of_the_world_is_named():
    problem = roster().join(entry(3))
    for part in ("rank 3 at 10.0.0.5:5003", "outside of the world of 3", "head:29500"):
        assert part in problem


def test_a_setting_that_differs_is_named_with_every_value():
    joined = roster(settings={"A": "x", "B": "auto"})
    joined.join(entry(1, settings={"A": "x", "B": "ring"}))
    joined.join(entry(2, settings={"A": "x", "B": "auto"}))
    problem = joined.disagreement()
    assert "ranks disagree on B" in problem
    assert "ranks 0, 2 have 'auto'" in problem
    assert "rank 1 has 'ring'" in problem


@pytest.mark.parametrize("value", [1.0, True, "1", None])
def test_values_that_only_look_alike_differ(value):
    joined = roster(2, settings={"A": 1})
    joined.join(entry(1, 2, settings={"A": value}))
    assert "ranks disagree on A" in joined.disagreement()


def test_a_setting_that_one_rank_lacks_differs():
    joined = roster(2, settings={"A": 1})
    joined.join(entry(1, 2))
    assert "rank 1 has no value" in joined.disagreement()


def test_loopback_is_fine_where_all_callers_share_the_host():
    joined = roster(host="127.0.0.1")
    joined.join(entry(1, host="127.0.0.1"))
    joined.join(entry(2, host="127.0.0.1", port=0))
    assert joined.unreachable() is None


def test_a_loopback_address_that_another_host_must_call_is_named():
    joined = roster(host="node0")
    joined.join(entry(1, host="127.0.1.1", node="a/1"))
    joined.join(entry(2, host="10.0.0.6", node="b/2", port=0))
    problem = joined.unreachable()
    for part in ("rank 1 advertised loopback address 127.0.1.1:4000", "rank 2", "MASTER_ADDR"):
        assert part in problem


def test_a_loopback_address_that_only_lower_ranks_could_call_is_fine():
    joined = roster(host="node0", node="b/2")
    joined.join(entry(1, host="10.0.0.6", node="b/2"))
    joined.join(entry(2, host="127.0.0.1", node="a/1", port=0))
    assert joined.unreachable() is None


def test_an_entry_survives_its_message():
    before = entry(2, settings={"A": [1]})
    message = {"kind": "join", **before.as_message()}
    assert Entry.from_message(2, 3, before.peer, message) == before


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "linked"},
        {"host": 5},
        {"host": "not an address"},
        {"port": -1},
        {"port": 65536},
        {"port": "1"},
        {"node": None},
        {"pid": "1"},
        {"settings": []},
    ],
)
def test_a_malformed_message_is_a_protocol_error(change):
    message = {"kind": "join", **entry(2).as_message(), **change}
    with pytest.raises(ProtocolError, match="rank 2 at"):
        Entry.from_message(2, 3, "10.0.0.5:1", message)
