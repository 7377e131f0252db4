"""What a process group refuses at once, and what it takes as other backends do. One process for each rank."""

import pytest

pytest.importorskip("torch")

from .ranks import run

pytestmark = pytest.mark.torch


def test_a_limit_of_zero_is_refused_on_every_rank_and_nobody_waits(tmp_path):
    head = """
import os, torch.distributed as dist, datetime
try:
    dist.init_process_group("asynccoll", init_method=os.environ["STORE"], rank=int(os.environ["RANK"]), world_size=2,
                            timeout=datetime.timedelta(0))
except ValueError as error:
    print("not positive" in str(error))
"""
    for rank in run(tmp_path / "store", 2, "", head=head):
        assert (rank.code, rank.stdout) == (0, "True\n"), rank.stderr


def test_reduce_scatter_into_a_shard_of_its_own_input(tmp_path):
    code = """
import warnings
warnings.simplefilter("ignore")
for shard in (slice(2 * rank, 2 * rank + 2), slice(0, 2), slice(1, 3)):
    buffer = torch.arange(4.0) + rank
    want = buffer.clone()
    want[shard] = torch.tensor([[1.0, 3.0], [5.0, 7.0]][rank])
    dist.reduce_scatter_tensor(buffer[shard], buffer)
    assert torch.equal(buffer, want), (buffer, want)
"""
    for rank in run(tmp_path / "store", 2, code):
        assert rank.code == 0, rank.stderr


def test_a_call_of_several_operations_that_is_wrong_on_one_rank_leaves_the_ranks_in_step(tmp_path):
    code = """
import asynccoll, datetime
group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))

def parts():  # of which rank 1 can give the first
    return [torch.ones(1), torch.ones(2).to_sparse() if rank else torch.ones(2)]

def wide():  # too short for two ranks
    return [torch.ones(2), torch.ones(3 if rank else 4)]

for call in (
    lambda: dist.reduce_scatter(torch.zeros(rank + 1), parts(), group=group),
    lambda: group.allreduce_coalesced(parts()).wait(),
    lambda: group.allgather_coalesced([[torch.zeros(1), torch.zeros(2)] for _ in range(2)], parts()).wait(),
    lambda: group.all_gather_single_coalesced(wide(), [torch.ones(1), torch.ones(2)]).wait(),
    lambda: group.reduce_scatter_single_coalesced([torch.zeros(1), torch.zeros(2)], wide()).wait(),
):
    try:
        call()
    except (NotImplementedError, ValueError):
        assert rank == 1
    except asynccoll.RemoteError as error:
        assert (rank, error.origin) == (0, 1)
    else:
        raise AssertionError("no error")
    total = torch.full((2,), rank + 1.0)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [3.0, 3.0]
"""
    for rank in run(tmp_path / "store", 2, code):
        assert rank.code == 0, rank.stderr


def test_types_that_travel_as_bytes_are_told_apart(tmp_path):
    code = """
import asynccoll
for other in (torch.float8_e5m2, torch.uint8):
    mine = torch.ones(4).to(other if rank else torch.float8_e4m3fn)
    outs = [torch.empty_like(mine) for _ in range(2)]
    for call in (
        lambda: dist.broadcast(mine, 0),
        lambda: dist.all_gather(outs, mine),
        lambda: dist.gather(mine, None if rank else outs, 0),
        lambda: dist.scatter(mine, None if rank else outs, 0),
        lambda: dist.all_to_all(outs, [mine, mine]),
        lambda: dist.all_to_all_single(torch.empty_like(mine), mine),
    ):
        try:
            call()
        except asynccoll.CollectiveMismatch:
            continue
        raise AssertionError("no error")
same = torch.full((4,), rank + 1.0).to(torch.float8_e5m2)
dist.broadcast(same, 1)
assert same.float().tolist() == [2.0] * 4
into = torch.empty(4, dtype=torch.float8_e5m2)
for kind in (torch.float8_e4m3fn, torch.uint8, torch.float8_e5m2):
    if rank == 0:
        dist.send(torch.ones(4).to(kind), 1)
    else:
        try:
            dist.recv(into, 0)
            assert (kind, into.float().tolist()) == (torch.float8_e5m2, [1.0] * 4)
        except ValueError as error:
            assert kind != torch.float8_e5m2
            assert str(kind) in str(error)
"""
    for rank in run(tmp_path / "store", 2, code):
        assert rank.code == 0, rank.stderr
