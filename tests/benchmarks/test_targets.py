import pytest

from benchmarks.targets import TARGETS, target, verdict


@pytest.mark.parametrize(
    ("world_size", "size", "share"),
    [(2, 8, 0.35), (2, 4096, 0.35), (2, 1 << 20, 0.7), (4, 65536, 0.15), (4, 64 << 20, 0.75)],
)
def test_sizes_in_a_band_have_its_share(world_size, size, share):
    assert target("gloo", world_size, size) == share


def test_between_the_bands_and_for_other_counts_nothing_is_promised():
    assert target("gloo", 2, 8192) is None
    assert target("gloo", 3, 8) is None
    assert target("another", 2, 8) is None


def test_bands_do_not_overlap():
    for bands in TARGETS.values():
        edges = [edge for smallest, largest, _ in bands for edge in (smallest, largest)]
        assert edges == sorted(edges)


def test_reaching_the_share_is_enough():
    assert verdict(0.35, 0.35) == "ok"
    assert verdict(0.3501, 0.35) == "over"
