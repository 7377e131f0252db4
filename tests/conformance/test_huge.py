"""Arrays beyond 2 and 4 GiB, in place: every offset and length has to be wider than 32 bits."""

import numpy as np
import pytest
from ranks import on_all


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 1])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
async def test_every_byte_is_right(world, count, algorithm):
    async with world(2, timeout=500) as comms:
        period = np.arange(251, dtype=np.uint8)  # a prime, so that a shift by a power of two shows
        arrays = [np.resize(period * (rank + 1), count) for rank in range(2)]
        await on_all(comms, lambda comm: comm.allreduce_(arrays[comm.rank], algorithm=algorithm))
        block = 251 << 16
        for array in arrays:
            for lo in range(0, count, block):
                part = array[lo : lo + block]
                assert np.array_equal(part, np.resize(period * 3, len(part))), lo
