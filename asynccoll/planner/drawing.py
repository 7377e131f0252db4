"""Plans and rings as lines of text for a terminal. Knows widths in characters, not whether there is a terminal.

Every function returns lines joined by newlines, none of them wider than ``width`` as far as names allow, all of them ASCII but for
the names. ``bold`` puts headings between the ANSI codes for bold.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from asynccoll.planner.ranks import RankPlan
from asynccoll.planner.rings import RingCost, ring_cost
from asynccoll.planner.topology import Topology

__all__ = [
    "alike",
    "by_machine",
    "changes_of_host",
    "columns",
    "groups",
    "ring",
    "runs",
    "seconds",
    "size",
    "spans",
    "table",
]

_GAP: Final = 2
_UNKNOWN: Final = "any machine"
_LABELS: Final = 10
"""Columns of the labels before and after."""


def columns(text: str) -> int:
    """Columns that ``text`` takes on a terminal: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def spans(ranks: Sequence[int]) -> str:
    """``0-3 8``: the ranks in their order, each run of three or more neighbours as its ends; ``-`` for none."""
    parts: list[str] = []
    at = 0
    while at < len(ranks):
        end = at
        while end + 1 < len(ranks) and ranks[end + 1] == ranks[end] + 1:
            end += 1
        if end - at < 2:
            end = at
        parts.append(f"{ranks[at]}-{ranks[end]}" if end > at else str(ranks[at]))
        at = end + 1
    return " ".join(parts) or "-"


def seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def size(nbytes: int) -> str:
    """A number of bytes with its unit: 1 MiB, 1500 bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} bytes"


def table(plan: RankPlan, width: int = 80, *, bold: bool = False) -> str:
    """Roles by machines, with the ranks in the cells; roles alone where the plan says nothing about machines."""
    lines = _headings(_sizes(plan), width, bold)
    if plan.machines is None:
        rows = [[role, str(count), spans(plan.ranks(role))] for role, count in plan.counts]
        return "\n".join([*lines, *_grid([["role", "number", "ranks"], *rows], width, bold)])
    roles = list(plan.roles)
    machines: list[int | None] = list(range(plan.num_machines))
    if None in plan.machines:
        machines.append(None)
    cells = by_machine(plan)
    rows = [
        [
            _UNKNOWN if machine is None else str(machine),
            *(spans(cells.get((machine, role), ())) for role in roles),
        ]
        for machine in machines
    ]
    grid = [["machine", *roles], *rows]
    broken = [_broken(cell) for cell in grid[0]]
    high = max(map(len, broken))
    for heads in ([grid[0]], list(zip(*([""] * (high - len(head)) + head for head in broken), strict=True))):
        if sum(_widths([*heads, *rows])) + _GAP * len(roles) <= width:
            return "\n".join([*lines, *_grid([*heads, *rows], width, bold, heads=len(heads))])
    # Too many roles for one line: a paragraph for each machine.
    for label, *filled in rows:
        named = zip(roles, filled, strict=True)
        words = [word for role, cell in named if cell != "-" for word in _listed(f"{role} ", cell, ",")]
        words[-1] = words[-1].removesuffix(",")
        name = label if label == _UNKNOWN else f"machine {label}"
        lines += [_heading(name, bold), *_wrapped(words, "  ", width), ""]
    return "\n".join(lines[:-1])


def by_machine(plan: RankPlan) -> dict[tuple[int | None, str], list[int]]:
    """``(machine, role)`` -> its ranks, for those that have some."""
    cells: dict[tuple[int | None, str], list[int]] = {}
    for role in plan.roles:
        for rank in plan.ranks(role):
            cells.setdefault((plan.machine_of(rank), role), []).append(rank)
    return cells


def groups(plan: RankPlan, width: int = 80, *, bold: bool = False) -> str:
    """The groups in the order in which they are made; groups of the same members that follow one another as one line."""
    if not plan.named_groups:
        return _heading("no groups", bold)
    rows = []
    for names, members in alike(plan):
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        rows.append([label, str(len(names)), spans(members)])
    head = f"{_many(len(plan.named_groups), 'group')}, in the order in which they are made"
    return "\n".join(
        [*_headings(head, width, bold), *_grid([["group", "number", "ranks"], *rows], width, bold)]
    )


def alike(plan: RankPlan) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """``(names, members)`` of groups that follow one another and have the same members."""
    for members, found in groupby(plan.named_groups, key=lambda group: group[1]):
        yield [name for name, _ in found], members


def ring(
    topology: Topology,
    before: Sequence[int],
    after: Sequence[int],
    nbytes: int,
    width: int = 80,
    *,
    bold: bool = False,
) -> str:
    """Two orders of a ring, host by host, and what a segment of ``nbytes`` costs on them where links were measured."""
    hosts = len(set(topology.hosts))
    lines = _headings(
        f"a ring of {_many(topology.world_size, 'rank')} on {_many(hosts, 'host')}", width, bold
    )
    rows = [["", "changes of host"]]
    if topology.measured:
        rows[0] += ["slowest link", "once around"]
    for name, order in (("before", before), ("after", after)):
        row = [name, str(changes_of_host(topology, order))]
        if topology.measured:
            row += _costs(ring_cost(topology, order, nbytes))
        rows.append(row)
    if sum(_widths(rows)) + _GAP * (len(rows[0]) - 1) <= width:
        lines += _grid(rows, width, bold)
    else:
        for name, *cells in rows[1:]:
            words = ", ".join(f"{head} {cell}" for head, cell in zip(rows[0][1:], cells, strict=True)).split(
                " "
            )
            lines += _wrapped(words, f"{name:<{_LABELS}}", width)
    if topology.measured:
        lines += _wrapped(f"times for segments of {size(nbytes)}".split(" "), "", width)
    for name, order in (("before", before), ("after", after)):
        visits = [(f"{host} [", spans(members)) for host, members in runs(topology, order)]
        words = [word for head, ranks in visits for word in _listed(head, ranks, "] ->")]
        lines += ["", *_wrapped([*words, str(order[0])], f"{name:<{_LABELS}}", width)]
    return "\n".join(lines)


def runs(topology: Topology, order: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """``(host, ranks)``: neighbours of ``order`` on one host together."""
    for host, members in groupby(order, key=lambda rank: topology.hosts[rank]):
        yield host, list(members)


def changes_of_host(topology: Topology, order: Sequence[int]) -> int:
    """Links of the ring whose ends are on two hosts."""
    hosts = [topology.hosts[rank] for rank in order]
    return sum(a != b for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True))


def _sizes(plan: RankPlan) -> str:
    text = f"{_many(plan.world_size, 'rank')} in {_many(len(plan.counts), 'role')}"
    return f"{text} on {_many(plan.num_machines, 'machine')}" if plan.num_machines else text


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _costs(cost: RingCost) -> list[str]:
    return [seconds(cost.slowest), seconds(cost.total)]


def _heading(text: str, bold: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if bold else text


def _broken(name: str) -> list[str]:
    """A heading in lines that end after ``_``."""
    return [part for part in name.replace("_", "_\n").split("\n") if part] or [name]


def _listed(head: str, ranks: str, tail: str) -> list[str]:
    """Ranks between ``head`` and ``tail`` in words, between which a line may end."""
    words = ranks.split(" ")
    words[0] = head + words[0]
    words[-1] += tail
    return words


def _headings(text: str, width: int, bold: bool) -> list[str]:
    """A heading in as many lines as it takes, and an empty one."""
    return [*(_heading(line, bold) for line in _wrapped(text.split(" "), "", width)), ""]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(columns, cells)) for cells in zip(*rows, strict=True)]


def _grid(rows: Sequence[Sequence[str]], width: int, bold: bool, heads: int = 1) -> list[str]:
    """Rows below ``heads`` rows of headings; the last column is wrapped where the line is too long."""
    widths = _widths(rows)
    indent = sum(widths[:-1]) + _GAP * (len(widths) - 1)
    lines = []
    for number, row in enumerate(rows):
        head = "".join(
            cell + " " * (wide - columns(cell) + _GAP) for cell, wide in zip(row[:-1], widths, strict=False)
        )
        # A label that leaves no room for the last column gets a line of its own.
        if indent + 12 > width:
            found = [head.rstrip(), *_wrapped(row[-1].split(" "), "    ", width)]
        else:
            found = _wrapped(row[-1].split(" "), head, width)
        lines += [_heading(line.rstrip(), bold) if number < heads else line.rstrip() for line in found]
    return lines


def _wrapped(words: Iterable[str], head: str, width: int) -> list[str]:
    """``words`` in lines behind ``head``; the lines after the first are indented as far. A word is never cut."""
    indent = " " * columns(head)
    lines, line, empty = [], head, True
    for word in words:
        if not empty and columns(line) + 1 + columns(word) > width:
            lines.append(line)
            line, empty = indent, True
        line += word if empty else f" {word}"
        empty = False
    return [*lines, line]
