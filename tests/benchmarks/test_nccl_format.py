"""The expected lines are spelled out: they are what parsers of nccl-tests' output match."""

import pytest

from benchmarks import nccl_format
from benchmarks.collectives import Bandwidth
from benchmarks.nccl_format import Cell, Row, fitted


def row(wrong=0, seconds=431.2e-6):
    out_of_place = Cell(seconds, Bandwidth(2.43, 3.65), wrong)
    in_place = Cell(0.0123456, Bandwidth(0.085, 0.1275), wrong)
    return Row(1048576, 262144, "float", "sum", -1, out_of_place, in_place)


def test_a_table_begins_with_the_lines_of_nccl_tests():
    assert nccl_format.table_header() == [
        "#",
        "#" + 62 * " " + "out-of-place                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ",
    ]


def test_cpu_time_is_called_so():
    assert nccl_format.table_header(cpu=True)[2].split().count("cputime") == 2


def test_the_run_is_described_as_by_nccl_tests():
    assert nccl_format.start_lines("all_reduce_perf", 8, 67108864, "2(factor)", 1, 20, 1)[:2] == [
        "# Collective test starting: all_reduce_perf",
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 67108864 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0 unalign: 0",
    ]


def test_a_rank_is_a_device():
    line = nccl_format.device_line(1, 12345, "node7", "Some CPU")
    assert line == "#  Rank  1 Group  0 Pid  12345 on      node7 device  1 [cpu] Some CPU"


def test_a_row_has_thirteen_columns_under_their_titles():
    line = nccl_format.result_row(row())
    assert line == (
        "     1048576        262144     float     sum      -1"
        "   431.20    2.43    3.65       0  12345.6    0.09    0.13       0"
    )
    assert (
        line.split()[11] == "0.13"
    )  # the in-place bus bandwidth, where AWS ParallelCluster's check looks for it
    for title in nccl_format.table_header()[2].split()[1:]:
        end = nccl_format.table_header()[2].index(title) + len(title)
        assert line[end - 1] != " "
        assert len(line) == end or line[end] == " "


def test_wrong_elements_stand_in_both_halves_and_in_the_footer():
    line = nccl_format.result_row(row(wrong=7))
    assert line.split()[8] == line.split()[12] == "7"
    assert nccl_format.footer([row(wrong=7)])[0] == "# Out of bounds values : 14 FAILED"


def test_unchecked_results_are_not_called_right():
    assert nccl_format.result_row(row(wrong=None)).split()[8] == "N/A"


def test_the_footer_tells_the_mean_bus_bandwidth_of_all_columns():
    assert nccl_format.footer([row()]) == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 1.88875 ",
    ]


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (1.234, 7, "   1.23"),
        (9999.999, 7, "10000.0"),
        (123456.78, 7, " 123457"),
        (1234567.0, 7, "1234567"),
        (123456789.0, 7, "1.2e+08"),
        (1234.5, 6, "1234.5"),
    ],
)
def test_numbers_lose_decimals_before_they_lose_their_column(value, width, text):
    assert fitted(value, width) == text


def test_every_line_but_a_row_is_a_comment():
    lines = [
        *nccl_format.header("gloo", "torch 2"),
        *nccl_format.footer([row()]),
        *nccl_format.ratio_header("asynccoll", "gloo", "in place"),
        nccl_format.ratio_row(8, 50e-6, 300e-6, [0.1, 0.2], 0.35, "ok"),
    ]
    assert all(line.startswith("#") for line in lines)


def test_a_ratio_line_gives_times_ratio_spread_and_verdict():
    assert nccl_format.ratio_row(8, 50e-6, 200e-6, [0.2, 0.3], 0.35, "ok").split() == [
        *("#", "8", "50.00", "200.00", "0.25", "0.20-0.30", "0.35", "ok")
    ]
    assert nccl_format.ratio_row(8, 50e-6, 200e-6, [0.2, 0.3], None, "").split()[-1] == "-"
