import pytest

from benchmarks.collectives import COLLECTIVES, bandwidth


@pytest.mark.parametrize(("n", "factor"), [(1, 0), (2, 1), (3, 4 / 3), (4, 1.5), (8, 1.75)])
def test_the_bus_factor_of_an_allreduce_is_twice_the_part_that_others_hold(n, factor):
    assert COLLECTIVES["allreduce"].bus_factor(n) == pytest.approx(factor)


def test_a_gigabyte_is_1e9_bytes():
    found = bandwidth(COLLECTIVES["allreduce"], 1 << 30, 1.0, 4)
    assert found.algorithm == pytest.approx(1.073741824)
    assert found.bus == pytest.approx(1.5 * 1.073741824)


def test_no_time_is_no_bandwidth():
    assert bandwidth(COLLECTIVES["allreduce"], 8, 0.0, 2) == (0.0, 0.0)
