"""`init_process_group`: what it refuses before anything blocks, and what it opens in real processes."""

import math
from datetime import timedelta

import pytest

pytest.importorskip("torch")

from scripts import run_ranks

import asynccoll.torch
from asynccoll.torch.opening import NO_TIMEOUT, planned

pytestmark = pytest.mark.torch

NOWHERE = "tcp://192.0.2.1:1"
"""RFC 5737: leads nowhere. Whoever tries blocks, and the test with it."""

REFUSED = [
    ("no world", dict(world_size=0), ["world_size=0", "at least 1"]),
    ("half a rank", dict(rank=0.5), ["rank=0.5 is not an integer"]),
    ("rank as a word", dict(rank="1"), ["rank='1' is not an integer"]),
    ("rank as a truth", dict(rank=True), ["rank=True is not an integer"]),
    ("rank too large", dict(rank=4), ["rank=4", "world_size=4", "0 to 3"]),
    ("rank below zero", dict(rank=-1), ["rank=-1"]),
    ("one list, not lists", dict(groups=[0, 1]), ["groups=[0, 1] is not a list of lists"]),
    ("groups as a word", dict(groups="01"), ["groups='01'"]),
    ("no groups", dict(groups=None), ["groups=None"]),
    ("an empty group", dict(groups=[[0], []]), ["groups[1] is empty"]),
    ("a rank twice", dict(groups=[[0, 1, 0]]), ["groups[0]=[0, 1, 0]", "twice"]),
    ("a rank outside", dict(groups=[[0], [4]]), ["groups[1]=[4]", "rank 4", "0 to 3"]),
    ("a negative rank", dict(groups=[[-1]]), ["groups[0]=[-1]", "rank -1"]),
    ("a float in a group", dict(groups=[[0, 1.0]]), ["groups[0][1]=1.0 is not an integer"]),
    ("a truth in a group", dict(groups=[[True]]), ["groups[0][0]=True is not an integer"]),
    ("no time", dict(timeout=0), ["timeout=0 "]),
    ("less than no time", dict(timeout=timedelta(seconds=-1)), ["timeout=", "positive"]),
    ("not a time", dict(timeout=math.nan), ["timeout=nan"]),
    ("time as a word", dict(timeout="60"), ["timeout='60'"]),
    ("too few times", dict(groups=[[0], [1]], timeout=[1, 2]), ["timeout=[1, 2]", "2 entries", "1 + 2"]),
    ("no backend", dict(backend=""), ["backend=''"]),
    ("backend of another kind", dict(backend=None), ["backend=None"]),
    ("unknown backend", dict(backend="gluu"), ["backend='gluu'", "there is: gloo"]),
]


@pytest.mark.parametrize(
    ("changed", "fragments"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_p4_a_wrong_argument_is_refused_before_anything_blocks(changed, fragments):
    with pytest.raises(ValueError) as caught:
        asynccoll.torch.init_process_group(
            **{"init_method": NOWHERE, "world_size": 4, "rank": 1, "groups": [], **changed}
        )
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_p3_without_an_init_method():
    with pytest.raises(RuntimeError) as caught:
        asynccoll.torch.init_process_group(None, 2, 0, [])
    assert str(caught.value) == "distributed_init_method must be set when num_machines > 1"


def test_p4_no_timeout_is_a_year():
    plan = planned(2, 0, [[0], [0, 1]], "gloo", None)
    assert timedelta(days=365) == NO_TIMEOUT
    assert (plan.world_timeout, plan.timeouts) == (NO_TIMEOUT, [NO_TIMEOUT, NO_TIMEOUT])
    assert planned(2, 0, [], "gloo", math.inf).world_timeout == NO_TIMEOUT


def test_p4_timeouts_are_seconds_or_timedeltas_and_may_differ():
    plan = planned(2, 0, [[0], [0, 1]], "gloo", 2.5)
    assert {plan.world_timeout, *plan.timeouts} == {timedelta(seconds=2.5)}
    plan = planned(2, 0, [[0], [0, 1]], "gloo", [60, None, timedelta(minutes=2)])
    assert plan.world_timeout == timedelta(seconds=60)
    assert plan.timeouts == [NO_TIMEOUT, timedelta(minutes=2)]


def test_groups_may_be_any_iterables_of_integers():
    numpy = pytest.importorskip("numpy")
    plan = planned(3, numpy.int64(0), (range(2), numpy.arange(3), {2}), "gloo", None)
    assert plan.groups == [[0, 1], [0, 1, 2], [2]]
    assert all(type(rank) is int for ranks in plan.groups for rank in ranks)


SIZE = 3
PROGRAM = """
import torch, torch.distributed as dist
import asynccoll.torch as at

ranks = [0, 2]
groups = at.init_process_group(
    os.environ["TEST_METHOD"], 3, RANK, [ranks, [1]] + [[0, 1, 2]] * 16, timeout=[60, 5, 7] + [30] * 15 + [None]
)
outside = [group == dist.GroupMember.NON_GROUP_MEMBER for group in groups]
limits = [
    None if out else group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    for group, out in zip(groups, outside)
]
try:
    at.init_process_group(os.environ["TEST_METHOD"], 3, RANK, [])
    second = None
except asynccoll.AlreadyInitialized as error:
    second = str(error)

# Sixteen reductions under way at once, begun in another order by each rank: their values never mix if they are sixteen channels.
values = [torch.tensor([float(100 * RANK + channel)]) for channel in range(16)]
order = list(range(16))
order = {0: order, 1: order[::-1], 2: order[5:] + order[:5]}[RANK]
works = [dist.all_reduce(values[channel], group=groups[2 + channel], async_op=True) for channel in order]
for work in works:
    work.wait()

# Messages by global rank, taken from whoever comes first: no group has these ranks together.
sources = []
if RANK == 0:
    box = torch.zeros(1)
    for _ in range(2):
        source = dist.recv(box, src=None, tag=3)
        sources.append([source, box.item()])
        dist.send(box + 1, source, tag=4)
else:
    dist.send(torch.tensor([10.0 * RANK]), 0, tag=3)
    box = torch.zeros(1)
    dist.recv(box, 0, tag=4)
    sources.append([0, box.item()])
say(outside=outside, limits=limits, second=second, distinct=len({id(g) for g in groups[2:]}),
    sums=[value.item() for value in values], sources=sorted(sources),
    world=dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """What each of three processes says of the groups that it opened."""
    method = f"file://{tmp_path_factory.mktemp('store')}/store"
    ended = run_ranks(PROGRAM, SIZE, env={"TEST_METHOD": method})
    assert [process.code for process in ended] == [0] * SIZE, [process.errors for process in ended]
    return [process.said[0] for process in ended]


def test_p4_groups_come_in_order_with_non_members_marked(opened):
    for rank, facts in enumerate(opened):
        assert facts["outside"] == [rank == 1, rank != 1] + [False] * 16


def test_p4_each_group_has_its_timeout(opened):
    year = NO_TIMEOUT.total_seconds()
    for rank, facts in enumerate(opened):
        assert facts["world"] == 60
        assert facts["limits"] == [None if rank == 1 else 5, 7 if rank == 1 else None, *[30] * 15, year]


def test_p4_a_second_default_group_is_refused(opened):
    for rank, facts in enumerate(opened):
        assert f"rank {rank} of 3" in facts["second"]
        assert "destroy_process_group()" in facts["second"]


def test_p5_sixteen_identical_groups_are_sixteen_channels(opened):
    for facts in opened:
        assert facts["distinct"] == 16
        assert facts["sums"] == [300.0 + 3 * channel for channel in range(16)]


def test_p6_messages_by_global_rank_from_any_source(opened):
    assert opened[0]["sources"] == [[1, 10.0], [2, 20.0]]
    assert [facts["sources"] for facts in opened[1:]] == [[[0, 11.0]], [[0, 21.0]]]
