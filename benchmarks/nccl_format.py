"""Tables as nccl-tests 2.19 prints them, so that its parsers read ours. Knows columns and units, not how times were taken.

Only result rows are uncommented; whatever else this benchmark has to say stands behind ``#``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.collectives import Bandwidth

__all__ = [
    "Cell",
    "Row",
    "device_line",
    "footer",
    "header",
    "ratio_header",
    "ratio_row",
    "result_row",
    "start_lines",
    "table_header",
]


class Cell(NamedTuple):
    """Four columns: one variant at one size."""

    seconds: float
    bandwidth: Bandwidth
    wrong: int | None
    """None: not checked."""


@dataclass(frozen=True)
class Row:
    """One line of results."""

    size: int
    """Bytes."""
    count: int
    type: str
    redop: str
    root: int
    """-1 where the collective has none."""
    out_of_place: Cell
    in_place: Cell


def start_lines(
    title: str, smallest: int, largest: int, step: str, warmup: int, iterations: int, checks: int
) -> list[str]:
    """What is run. ``step``: as ``"2(factor)"``."""
    return [
        f"# Collective test starting: {title}",
        f"# nThread 1 nGpus 1 minBytes {smallest} maxBytes {largest} step: {step} warmup iters: {warmup} "
        f"iters: {iterations} agg iters: 1 validation: {checks} graph: 0 unalign: 0",
        "#",
    ]


def device_line(rank: int, pid: int, host: str, device: str) -> str:
    """Where a rank runs. There is one "device" per rank, the processor."""
    return f"#  Rank {rank:2d} Group {0:2d} Pid {pid:6d} on {host:>10s} device {rank:2d} [cpu] {device}"


_LEFT = ("size", "count", "type", "redop", "root")
_RIGHT = ("algbw", "busbw", "#wrong")


def _columns(left: Sequence[str], right: Sequence[str]) -> str:
    texts = (*left, *right, *right)
    widths = (10, 12, 8, 6, 6, 7, 6, 6, 6, 7, 6, 6, 6)
    return "# " + "  ".join(f"{text:>{width}s}" for text, width in zip(texts, widths, strict=True)) + " "


def table_header(*, cpu: bool = False) -> list[str]:
    """The lines above the rows. ``cpu``: the times are CPU times."""
    over = "  ".join(" " * width for width in (10, 12, 8, 6, 6))
    return [
        "#",
        f"# {over}           out-of-place                       in-place          ",
        _columns(_LEFT, ("cputime" if cpu else "time", *_RIGHT)),
        _columns(("(B)", "(elements)", "", "", ""), ("(us)", "(GB/s)", "(GB/s)", "")),
    ]


def header(title: str, versions: str, *, cpu: bool = False) -> list[str]:
    """The line that names whose table follows."""
    return ["#", f"# {title}: {versions}", *table_header(cpu=cpu)]


def fitted(value: float, width: int) -> str:
    """``value`` with two decimals, or as many as ``width`` characters have room for."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"[:width]


def _cell(cell: Cell) -> str:
    wrong = "   N/A" if cell.wrong is None else f"{float(cell.wrong):6g}"
    return (
        f"  {fitted(cell.seconds * 1e6, 7)}  {fitted(cell.bandwidth.algorithm, 6)}"
        f"  {fitted(cell.bandwidth.bus, 6)}  {wrong}"
    )


def result_row(row: Row) -> str:
    """One line of results: 13 columns."""
    left = f"{row.size:12d}  {row.count:12d}  {row.type:>8s}  {row.redop:>6s}  {row.root:6d}"
    return left + _cell(row.out_of_place) + _cell(row.in_place)


def footer(rows: Sequence[Row]) -> list[str]:
    """Sum of ``#wrong``, and the mean bus bandwidth over both variants of all sizes."""
    cells = [cell for row in rows for cell in (row.out_of_place, row.in_place)]
    wrong = sum(cell.wrong or 0 for cell in cells)
    mean = sum(cell.bandwidth.bus for cell in cells) / len(cells) if cells else 0.0
    return [
        f"# {'Out of bounds values':<20s} : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20s} : {mean:g} ",
    ]


def ratio_header(own: str, peer: str, note: str) -> list[str]:
    """The lines above the ratios."""
    return [
        "#",
        f"# {own} as a share of {peer}, {note}",
        f"# {'size':>10s}  {own:>10s}  {peer:>10s}  {'ratio':>6s}  {'of the rounds':>13s}  {'target':>6s}",
        f"# {'(B)':>10s}  {'(us)':>10s}  {'(us)':>10s}  {'':>6s}  {'(min-max)':>13s}  {'':>6s}",
    ]


def ratio_row(
    size: int, own: float, peer: float, rounds: Sequence[float], target: float | None, verdict: str
) -> str:
    """Times in seconds; ``rounds``: the ratio in each round."""
    spread = f"{min(rounds):.2f}-{max(rounds):.2f}"
    goal = "     -" if target is None else f"{target:6.2f} {verdict}"
    return (
        f"# {size:>10d}  {fitted(own * 1e6, 10)}  {fitted(peer * 1e6, 10)}  {own / peer:6.2f}  "
        f"{spread:>13s}  {goal}"
    )
