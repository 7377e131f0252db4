"""DDP's join: its reducer waits, in C++, for an operation that Python has dropped."""

import pytest

pytest.importorskip("torch")

from .ranks import run

pytestmark = pytest.mark.torch

UNEVEN = """
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(nn.Linear(2, 1, bias=False))
with torch.no_grad():
    model.module.weight.fill_(1.0)
steps = 0
with model.join():
    for _ in range(1 + rank):
        loss = model(torch.ones(1, 2) * (rank + 1)).sum()
        if steps == 0:
            # The operation that forward has started ends before backward looks at it.
            dist.barrier()
        model.zero_grad()
        loss.backward()
        steps += 1
print(steps, model.module.weight.grad.tolist())
dist.destroy_process_group()
"""


def test_ranks_with_fewer_inputs_do_not_hang_the_others(tmp_path):
    ranks = run(tmp_path / "store", 2, UNEVEN)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    # In the second step rank 1 is alone with its gradient of 2, which is still divided by both ranks.
    assert ranks[1].stdout.split(maxsplit=1) == ["2", "[[1.0, 1.0]]\n"]
