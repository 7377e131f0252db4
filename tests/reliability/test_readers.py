"""One process reads slowly: the memory of the others does not grow with what they send. See `readers`."""

import pytest

from . import readers


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_fast_ranks_stay_small(loop):
    for rank, grown in enumerate(readers.run(100, 1 << 20, 50_000_000, loop)):
        assert grown < 32 << 20, rank


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_fast_ranks_stay_small_for_500_broadcasts_of_4_mebibytes():
    for rank, grown in enumerate(readers.run(500, 4 << 20, 20_000_000, "uvloop", limit=1100.0)):
        assert grown < 64 << 20, rank
