"""Agree on a batch size at the start of each epoch: rank 0 decides, by its own measurements, and all use what it says.

asynccoll run -n 2 examples/adaptdl/batch_size.py
"""

import os
import time

from asynccoll import collective

RANK = int(os.environ["ASYNCCOLL_RANK"])
TARGET = 256
"""Samples of a step on one replica, in however many passes."""


def fastest(sizes):
    """The size whose pass took least per sample just now: another answer on every replica, and every time."""

    def cost(size):
        begun = time.perf_counter()
        sum(range(100 * size))
        return (time.perf_counter() - begun) / size

    return min(sizes, key=cost)


collective.initialize()
for epoch in range(3):
    mine = fastest([32, 64, 128])
    batch_size, accumulation = collective.broadcast((mine, TARGET // mine))
    assert batch_size * accumulation == TARGET
    assert collective.allreduce({(batch_size, accumulation)}, set.union) == {(batch_size, accumulation)}
    if RANK == 0:
        print(f"epoch {epoch}: batches of {batch_size}, {accumulation} for a step")
collective.teardown()
