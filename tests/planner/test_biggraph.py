"""The ranks of a BigGraph training: one test for each rule of its planner that is kept, and for each of its defects that is not."""

import os
import pickle
import subprocess
import sys

import pytest

from asynccoll.planner import ProcessRanks, RankPlan

SEEDS = [
    # machines, partition servers, world size, lock server, partition servers
    (1, -1, 5, 3, [4]),
    (1, 0, 4, 3, []),
    (3, -1, 13, 9, [10, 11, 12]),
    (4, 0, 13, 12, []),
    (5, 3, 19, 15, [16, 17, 18]),
]


@pytest.mark.parametrize(("machines", "servers", "world", "lock", "parts"), SEEDS)
def test_p1_blocks_are_contiguous_in_the_order_of_the_fields(machines, servers, world, lock, parts):
    ranks = ProcessRanks.from_num_invocations(machines, servers)
    n = machines
    assert ranks == (
        world,
        list(range(n)),
        list(range(n, 2 * n)),
        list(range(2 * n, 3 * n)),
        lock,
        parts,
    )
    assert ranks.world_size == 3 * n + 1 + len(parts)
    flat = [
        *ranks.trainers,
        *ranks.parameter_servers,
        *ranks.parameter_clients,
        ranks.lock_server,
        *ranks.partition_servers,
    ]
    assert flat == list(range(world))


def test_p1_the_fields_are_those_of_the_named_tuple():
    ranks = ProcessRanks.from_num_invocations(3, -1)
    assert ranks._fields == (
        "world_size",
        "trainers",
        "parameter_servers",
        "parameter_clients",
        "lock_server",
        "partition_servers",
    )
    assert isinstance(ranks, tuple)
    assert ranks.parameter_clients == [6, 7, 8]
    assert [type(getattr(ranks, name)) for name in ranks._fields] == [int, list, list, list, int, list]


@pytest.mark.parametrize("servers", [-1, 0, 2])
def test_p2_minus_one_is_a_server_on_each_machine_zero_none_and_more_the_users_own(servers):
    ranks = ProcessRanks.from_num_invocations(3, servers)
    assert len(ranks.partition_servers) == {-1: 3, 0: 0, 2: 2}[servers]
    assert ranks.num_partition_servers == servers
    assert ranks.num_machines == 3


@pytest.mark.parametrize(
    ("machines", "servers", "named"),
    [
        (0, -1, "num_machines is 0"),
        (-1, 0, "num_machines is -1"),
        (2, -2, "num_partition_servers is -2"),  # planned as -1 and started by nobody
        (2, -5, "num_partition_servers is -5"),
        (2.0, 0, "num_machines is 2.0"),
        ("2", 0, "num_machines is '2'"),
        (None, 0, "num_machines is None"),
        (True, 0, "num_machines is True"),
        (2, True, "num_partition_servers is True"),
        (2, 1.5, "num_partition_servers is 1.5"),
        (10**12, 0, "num_machines is 1000000000000"),
    ],
)
def test_p2_numbers_that_make_no_world_are_refused(machines, servers, named):
    with pytest.raises(ValueError) as raised:
        ProcessRanks.from_num_invocations(machines, servers)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("machines", "servers", "distributed"),
    [(1, -1, False), (1, 0, False), (1, 1, True), (2, 0, True), (2, -1, True), (3, 2, True)],
)
def test_p3_distributed_is_several_machines_or_servers_of_ones_own(machines, servers, distributed):
    ranks = ProcessRanks.from_num_invocations(machines, servers)
    assert ranks.distributed is distributed
    assert pickle.loads(pickle.dumps(ranks)).distributed is distributed


def test_p3_the_rank_of_a_trainer_or_why_there_is_none():
    ranks = ProcessRanks.from_num_invocations(3, 2)
    assert [ranks.trainer(index) for index in range(3)] == [0, 1, 2]
    for index in (-1, 3, "0", True):
        with pytest.raises(RuntimeError, match=r"^Invalid rank for trainer: .*; use 0 to 2$"):
            ranks.trainer(index)


def test_p3_the_rank_of_a_partition_server_or_why_there_is_none():
    ranks = ProcessRanks.from_num_invocations(3, 2)
    assert [ranks.partition_server(index) for index in range(2)] == [10, 11]
    for index in (-1, 2):
        with pytest.raises(RuntimeError, match=rf"^Invalid rank for partition server: {index}; use 0 to 1$"):
            ranks.partition_server(index)


@pytest.mark.parametrize("servers", [-1, 0])
def test_p3_servers_that_the_user_does_not_start_are_not_asked_for(servers):
    ranks = ProcessRanks.from_num_invocations(3, servers)
    with pytest.raises(RuntimeError, match=r"^Config doesn't require explicit partition servers"):
        ranks.partition_server(0)


def test_p3_fields_alone_count_as_servers_of_ones_own():
    ranks = ProcessRanks.from_num_invocations(1, -1)
    assert ranks._replace(lock_server=3).num_partition_servers == 1


def test_p5_the_trainers_and_then_sixteen_groups_with_the_partition_servers():
    ranks = ProcessRanks.from_num_invocations(3, -1)
    assert ranks.groups() == [[0, 1, 2]] + [[0, 1, 2, 10, 11, 12]] * 16
    assert ranks.groups(4) == [[0, 1, 2]] + [[0, 1, 2, 10, 11, 12]] * 4
    assert ProcessRanks.from_num_invocations(2, 0).groups(1) == [[0, 1], [0, 1]]
    # A caller that changes one of them must not change the others, or the ranks.
    found = ranks.groups()
    found[1].append(99)
    found[0].append(99)
    assert found[2] == [0, 1, 2, 10, 11, 12]
    assert ranks.trainers == [0, 1, 2]


@pytest.mark.parametrize(
    ("machines", "servers", "per_shard", "groups"),
    [(2, 3, 1, 6), (2, 3, 4, 15), (2, 2, 4, 16), (2, -1, 4, 16), (1, 2, 1, 4)],
)
def test_p5_with_more_servers_than_machines_each_has_a_group_for_metadata_and_some_for_data(
    machines, servers, per_shard, groups
):
    found = ProcessRanks.from_num_invocations(machines, servers).groups(
        num_groups_per_sharded_partition_server=per_shard
    )
    assert len(found) == 1 + groups


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_p5_there_is_at_least_one_group(number):
    ranks = ProcessRanks.from_num_invocations(2, 3)
    with pytest.raises(ValueError, match="num_groups_for_partition_server"):
        ranks.groups(number)
    with pytest.raises(ValueError, match="num_groups_per_sharded_partition_server"):
        ranks.groups(16, number)


def test_p5_in_the_plan_the_same_members_are_groups_of_their_own():
    plan = ProcessRanks.from_num_invocations(3, -1).plan(3)
    both = (0, 1, 2, 10, 11, 12)
    assert list(plan.groups.items()) == [
        ("trainers", (0, 1, 2)),
        ("partitions.0", both),
        ("partitions.1", both),
        ("partitions.2", both),
    ]


@pytest.mark.parametrize(("machines", "servers", "world", "lock", "parts"), SEEDS)
def test_p1_the_plan_has_the_same_ranks(machines, servers, world, lock, parts):
    ranks = ProcessRanks.from_num_invocations(machines, servers)
    plan = ranks.plan()
    assert plan.world_size == world
    assert plan.ranks("trainer") == tuple(ranks.trainers)
    assert plan.ranks("parameter_server") == tuple(ranks.parameter_servers)
    assert plan.ranks("parameter_client") == tuple(ranks.parameter_clients)
    assert plan.ranks("lock_server") == (lock,)
    assert plan.ranks("partition_server") == tuple(parts)
    assert [list(group) for group in plan.groups.values()] == ranks.groups()
    assert RankPlan.from_json(plan.to_json()) == plan


def test_p7_machine_i_has_the_process_i_of_each_role_and_the_first_the_lock_server():
    plan = ProcessRanks.from_num_invocations(3, -1).plan()
    assert plan.num_machines == 3
    assert plan.ranks_on(0) == (0, 3, 6, 9, 10)
    assert plan.ranks_on(1) == (1, 4, 7, 11)
    assert plan.ranks_on(2) == (2, 5, 8, 12)


def test_p7_where_a_server_runs_that_the_user_starts_is_not_said():
    plan = ProcessRanks.from_num_invocations(2, 3).plan()
    assert plan.ranks_on(0) == (0, 2, 4, 6)
    assert plan.ranks_on(None) == (7, 8, 9)


def test_p7_processes_have_names():
    ranks = ProcessRanks.from_num_invocations(2, -1)
    assert [ranks.process_name(rank) for rank in range(ranks.world_size)] == [
        *("Trainer-0", "Trainer-1", "ParamS-0", "ParamS-1", "ParamC-0", "ParamC-1", "LockServer"),
        *("PartS-0", "PartS-1"),
    ]
    with pytest.raises(ValueError, match="there is no rank 9"):
        ranks.process_name(9)


def test_p9_key_placement_is_the_same_in_every_interpreter():
    program = (
        "from asynccoll.planner import ProcessRanks\n"
        "plan = ProcessRanks.from_num_invocations(4, -1).plan()\n"
        "keys = [f'entity_{i}' for i in range(40)] + [b'x', 7, -1, ('rel', 3, (b'y',))]\n"
        "print([plan.place(key, 'parameter_server') for key in keys], hash('entity_0'))\n"
    )
    said = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        said.append(done.stdout.rsplit(" ", 1))
    assert said[0][0] == said[1][0]
    assert said[0][1] != said[1][1], "both interpreters salt alike: this test could not fail"


def test_p10_the_planner_of_a_training_with_two_trainers():
    for servers, world in ((0, 7), (2, 9), (3, 10)):
        assert ProcessRanks.from_num_invocations(2, servers).world_size == world
