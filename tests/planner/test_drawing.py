"""Plans and rings as text: every rank is there, and no line is too wide."""

import re

import pytest

from asynccoll.planner import ProcessRanks, RankPlan, Topology, drawing, ring_order

PLAN = RankPlan.from_roles({"trainer": 4, "parameter_server": 4, "lock_server": 1}, machines=4)
BIGGRAPH = ProcessRanks.from_num_invocations(3, -1).plan()


def test_roles_by_machines():
    assert drawing.table(PLAN, 80).splitlines() == [
        "9 ranks in 3 roles on 4 machines",
        "",
        "machine  trainer  parameter_server  lock_server",
        "0        0        4                 8",
        "1        1        5                 -",
        "2        2        6                 -",
        "3        3        7                 -",
    ]


def test_headings_are_broken_before_the_table_is_given_up():
    lines = drawing.table(BIGGRAPH, 80).splitlines()
    assert lines[2:5] == [
        "                  parameter_  parameter_  lock_   partition_",
        "machine  trainer  server      client      server  server",
        "0        0        3           6           9       10",
    ]


def test_where_no_table_fits_each_machine_is_a_paragraph():
    assert drawing.table(BIGGRAPH, 40).splitlines()[:6] == [
        "13 ranks in 5 roles on 3 machines",
        "",
        "machine 0",
        "  trainer 0, parameter_server 3,",
        "  parameter_client 6, lock_server 9,",
        "  partition_server 10",
    ]


def test_ranks_without_a_machine_have_a_row():
    last = drawing.table(ProcessRanks.from_num_invocations(2, 3).plan(), 80).splitlines()[-1]
    assert last.split() == ["any", "machine", "-", "-", "-", "-", "7-9"]


def test_without_machines_each_role_is_a_row():
    plan = RankPlan.from_roles({"trainer": 40, "lock_server": 1, "none": 0})
    assert drawing.table(plan, 80).splitlines() == [
        "41 ranks in 3 roles",
        "",
        "role         number  ranks",
        "trainer      40      0-39",
        "lock_server  1       40",
        "none         0       -",
    ]


def test_groups_of_the_same_members_are_one_line():
    assert drawing.groups(BIGGRAPH, 80).splitlines() == [
        "17 groups, in the order in which they are made",
        "",
        "group                          number  ranks",
        "trainers                       1       0-2",
        "partitions.0 to partitions.15  16      0-2 10-12",
    ]
    assert drawing.groups(RankPlan.from_roles({"a": 1}, groups={})) == "no groups"


def test_a_ring_before_and_after():
    topology = Topology.from_hosts(["a", "b", "a", "b"])
    assert drawing.ring(topology, topology.ranks, ring_order(topology), 1 << 20).splitlines() == [
        "a ring of 4 ranks on 2 hosts",
        "",
        "        changes of host",
        "before  4",
        "after   2",
        "",
        "before    a [0] -> b [1] -> a [2] -> b [3] -> 0",
        "",
        "after     a [0 2] -> b [1 3] -> 0",
    ]


def test_times_are_told_where_they_were_measured():
    rows = [[1e-3 if (a + b) % 2 else 2e-5 for b in range(4)] for a in range(4)]
    topology = Topology.from_hosts(["a", "b", "a", "b"], latency=rows, bandwidth=[[1e9] * 4] * 4)
    lines = drawing.ring(topology, topology.ranks, ring_order(topology, 0), 0).splitlines()
    assert lines[2:6] == [
        "        changes of host  slowest link  once around",
        "before  4                1 ms          4 ms",
        "after   2                1 ms          2.04 ms",
        "times for segments of 0 bytes",
    ]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
@pytest.mark.parametrize("machines", [None, 1, 16])
def test_no_line_is_wider_than_asked_for_and_each_rank_is_there(width, machines):
    plan = RankPlan.from_roles({"trainer": 48, "server": 16}, machines=machines)
    plan = plan.with_group("odd", range(1, 64, 2)).with_group("two", [0, 63], repeat=3)
    topology = Topology.from_hosts([f"h{rank % 5}" for rank in range(64)], latency=[[1e-4] * 64] * 64)
    parts = [
        drawing.table(plan, width),
        drawing.groups(plan, width),
        drawing.ring(topology, topology.ranks, ring_order(topology), 1000, width),
    ]
    for part in parts:
        for line in part.splitlines():
            assert len(line) <= max(width, 32), line
            assert line == line.rstrip()
    named = {int(number) for number in re.findall(r"\b\d+\b", parts[2])}
    assert set(range(64)) <= named


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "-"),
        ((3,), "3"),
        ((3, 4), "3 4"),
        ((3, 4, 5), "3-5"),
        ((0, 1, 2, 7, 9, 10, 11, 12), "0-2 7 9-12"),
        ((5, 4, 3), "5 4 3"),
        ((2, 3, 4, 0, 1), "2-4 0 1"),
    ],
)
def test_spans(ranks, text):
    assert drawing.spans(ranks) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.5 s"), (1e-3, "1 ms"), (12.345e-3, "12.3 ms"), (25e-6, "25 us"), (3e-9, "3 ns"), (0.0, "0 ns")],
)
def test_seconds(value, text):
    assert drawing.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 bytes"), (1500, "1500 bytes"), (65536, "64 KiB"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB")],
)
def test_size(value, text):
    assert drawing.size(value) == text


def test_wide_characters_take_two_columns():
    assert [drawing.columns(text) for text in ("abc", "工人", "e\u0301")] == [3, 4, 1]
    plan = RankPlan.from_roles({"工人": 1, "b": 1})
    assert drawing.table(plan, 80).splitlines()[2:] == [
        "role  number  ranks",
        "工人  1       0",
        "b     1       1",
    ]


def test_only_headings_are_bold():
    text = drawing.table(PLAN, 80, bold=True) + "\n" + drawing.groups(PLAN, 80, bold=True)
    plain = drawing.table(PLAN, 80) + "\n" + drawing.groups(PLAN, 80)
    assert re.sub(r"\x1b\[\d+m", "", text) == plain
    assert "\x1b" not in plain
    assert text.splitlines()[2].startswith("\x1b[1mmachine")
    assert not text.splitlines()[3].startswith("\x1b")
