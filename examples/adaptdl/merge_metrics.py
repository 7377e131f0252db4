"""Sum what replicas have counted, where not everybody has every key.

asynccoll run -n 2 examples/adaptdl/merge_metrics.py
"""

import os

import numpy as np

from asynccoll import collective

RANK, REPLICAS = int(os.environ["ASYNCCOLL_RANK"]), int(os.environ["ASYNCCOLL_WORLD_SIZE"])


def merge(total, more):
    """Add ``more`` to ``total``, which is rank 0's copy and may be changed."""
    for key, value in more.items():
        total[key] = total[key] + value if key in total else value
    return total


mine = {"samples": 100 + RANK, "loss": np.array([0.5, 0.25]), f"errors of replica {RANK}": 1}

collective.initialize()
total = collective.allreduce(mine, merge)
collective.teardown()

assert total["samples"] == sum(100 + rank for rank in range(REPLICAS))
assert total["loss"].tolist() == [0.5 * REPLICAS, 0.25 * REPLICAS]
assert len(total) == 2 + REPLICAS
assert mine["samples"] == 100 + RANK  # nobody's own dict has changed
if RANK == 0:
    print(f"{total['samples']} samples, mean loss {(total['loss'] / REPLICAS).tolist()}, {len(total)} keys")
