import argparse

import pytest

from benchmarks.sizes import human, parse_list, parse_size, sweep


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("4K", 4096), ("4k", 4096), ("1M", 1 << 20), ("2g", 2 << 30), ("1.5K", 1536), ("0", 0)],
)
def test_suffixes_are_powers_of_1024(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "2x", "-8", "0.5", "1KB", "nan", "inf", "infG"])
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_a_list_is_sorted_and_without_repeats():
    assert parse_list("64K,8,1M,8") == [8, 65536, 1 << 20]


@pytest.mark.parametrize(
    ("size", "text"),
    [(8, "8"), (1024, "1K"), (1536, "1536"), (65536, "64K"), (3 << 20, "3M"), (1 << 30, "1G")],
)
def test_human_sizes_read_back(size, text):
    assert human(size) == text
    assert parse_size(text) == size


def test_a_sweep_multiplies_up_to_the_largest_size():
    assert list(sweep(8, 100, factor=2, step=None)) == [8, 16, 32, 64]


def test_a_sweep_by_steps_adds():
    assert list(sweep(8, 20, factor=2, step=4)) == [8, 12, 16, 20]


def test_a_sweep_from_zero_by_factor_ends():
    assert list(sweep(0, 100, factor=2, step=None)) == [0]
