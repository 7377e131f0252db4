"""What a process group refuses at once, and what it takes as other backends do. One process for each rank."""

import pytest

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
