"""Plans and rings as one self-contained SVG image. Knows pixels, not files.

Text is set in a monospace font, whose width is known without measuring: 0.6 of its size. Ranks are dark on light colours on any
background; everything else takes its colour from the reader's light or dark scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

from asynccoll.planner import drawing
from asynccoll.planner.ranks import RankPlan
from asynccoll.planner.rings import ring_cost
from asynccoll.planner.topology import Topology

__all__ = ["picture"]

_FONT: Final = 13
_SMALL: Final = 11
_TITLE: Final = 18
_LINE: Final = 20
_MARGIN: Final = 24
_CHIP: Final = 24
"""Height of a rank's box, and the diameter of its circle."""
_GAP: Final = 6
_NAME: Final = 40
"""Columns of a name that are shown."""
_LIST: Final = 90
"""Columns of a list of ranks that are shown."""
_MOST_LINES: Final = 14

_FILLS: Final = (
    "#9ecbf2",
    "#ffc78a",
    "#a3dd9a",
    "#f5b1bf",
    "#d7c0f5",
    "#f2e394",
    "#9fe3da",
    "#cfcfcf",
    "#e0b994",
)
_STYLE: Final = """
text{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#1b1f24}
.soft{fill:#57606a}.rank{fill:#14181d}
.page{fill:#ffffff}.rule{stroke:#d0d7de}.way{stroke:#57606a;fill:none}.slow{stroke:#c62828;fill:none}
.tip{fill:#57606a}.slowtip{fill:#c62828}.box{stroke:#57606a;stroke-width:1}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.soft{fill:#9da7b1}.rank{fill:#14181d}
.page{fill:#0d1117}.rule{stroke:#3d444d}.way{stroke:#9da7b1}.slow{stroke:#ff7b72}
.tip{fill:#9da7b1}.slowtip{fill:#ff7b72}.box{stroke:#9da7b1}
}
"""


def picture(
    title: str,
    plan: RankPlan | None = None,
    topology: Topology | None = None,
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    nbytes: int = 0,
) -> str:
    """An SVG document: roles by machines and the groups of ``plan``, then the ring ``before`` and ``after``.

    Args:
        before, after: orders of all ranks of ``topology``; needed with one.
        nbytes: bytes of a segment, for the costs where links were measured.
    """
    page = _Page(title)
    if plan is not None:
        _roles(page, plan)
        _groups(page, plan)
    if topology is not None:
        _rings(page, topology, before, after, nbytes)
    return page.document()


class _Page:
    """What has been drawn, from the top down. ``y`` is where the next part begins."""

    def __init__(self, title: str) -> None:
        self.parts: list[str] = []
        self.width = 0.0
        self.y = float(_MARGIN)
        self.title = title
        self.text(_MARGIN, self.y + _TITLE, _cut(title, _LIST), size=_TITLE, weight="bold")
        self.y += _TITLE + _LINE

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = _FONT,
        kind: str = "",
        weight: str = "",
        middle: bool = False,
    ) -> None:
        """One line with its baseline at ``y``, from ``x`` on or around it."""
        extra = f' class="{kind}"' if kind else ""
        extra += f' font-weight="{weight}"' if weight else ""
        extra += ' text-anchor="middle"' if middle else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{extra}>{html.escape(text)}</text>'
        )
        self.reach(x + _wide(text, size) / (2 if middle else 1))

    def reach(self, x: float) -> None:
        """Make the image at least as wide as what ends at ``x``."""
        self.width = max(self.width, x)

    def heading(self, text: str) -> None:
        self.y += 1.5 * _LINE
        self.text(_MARGIN, self.y, text, weight="bold")
        self.y += _LINE / 2

    def document(self) -> str:
        width, height = math.ceil(self.width + _MARGIN), math.ceil(self.y + _MARGIN)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="name">',
                f'<title id="name">{html.escape(self.title)}</title>',
                f"<style>{_STYLE}</style>",
                f'<rect class="page" width="{width}" height="{height}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _wide(text: str, size: int) -> float:
    return drawing.columns(text) * size * 0.61  # a letter is 0.602 wide in DejaVu Sans Mono


def _cut(text: str, most: int) -> str:
    if drawing.columns(text) <= most:
        return text
    while drawing.columns(text) > most - 3:
        text = text[:-1]
    return text + "..."


def _roles(page: _Page, plan: RankPlan) -> None:
    """A table: a column for each role, a row for each machine, a box for each rank."""
    rows: list[int | None] = list(range(plan.num_machines))
    if plan.machines is None or None in plan.machines:
        rows.append(None)
    labels = {row: "any machine" if row is None else f"machine {row}" for row in rows}
    cells = drawing.by_machine(plan)
    most = max(map(len, cells.values()))
    across = max(1, min(most, 4 if most <= 8 else 8 if most <= 128 else 16))
    chip = max(_CHIP + 8, _wide(str(plan.world_size), _FONT) + 12)
    page.heading("roles and machines")
    page.y += _LINE
    x = _MARGIN + max(_wide(label, _FONT) for label in labels.values()) + 3 * _GAP
    starts = {}
    for role, count in plan.counts:
        name = _cut(role, _NAME)
        starts[role] = x
        page.text(x, page.y, name)
        page.text(x, page.y + _LINE - 4, f"{count} of {plan.world_size}", size=_SMALL, kind="soft")
        x += max(_wide(name, _FONT), across * (chip + _GAP), 80) + 3 * _GAP
    page.y += _LINE + _GAP
    end = x - 2 * _GAP
    for row in rows:
        page.parts.append(
            f'<line class="rule" x1="{_MARGIN}" y1="{page.y:.1f}" x2="{end:.1f}" y2="{page.y:.1f}"/>'
        )
        page.reach(end)
        page.y += _GAP
        page.text(_MARGIN, page.y + 17, labels[row])
        for index, role in enumerate(plan.roles):
            for number, rank in enumerate(cells.get((row, role), ())):
                left = starts[role] + number % across * (chip + _GAP)
                top = page.y + number // across * (_CHIP + _GAP)
                page.parts.append(
                    f'<rect class="box" x="{left:.1f}" y="{top:.1f}" width="{chip:.1f}" height="{_CHIP}" rx="5" '
                    f'fill="{_FILLS[index % len(_FILLS)]}"/>'
                )
                page.text(left + chip / 2, top + 17, str(rank), kind="rank", middle=True)
        lines = max(1, max(-(-len(cells.get((row, role), ())) // across) for role in plan.roles))
        page.y += lines * (_CHIP + _GAP)


def _groups(page: _Page, plan: RankPlan) -> None:
    found = list(drawing.alike(plan))
    if not found:
        return
    page.heading(f"groups: {len(plan.named_groups)}, in the order in which they are made")
    labels = [
        names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
        for names, _ in found[:_MOST_LINES]
    ]
    labels = [_cut(label, _NAME) for label in labels]
    x = _MARGIN + max(_wide(label, _FONT) for label in labels) + 4 * _GAP
    for label, (_, members) in zip(labels, found, strict=False):
        page.y += _LINE
        page.text(_MARGIN, page.y, label)
        page.text(x, page.y, _cut(drawing.spans(members), _LIST), kind="soft")
    if len(found) > len(labels):
        page.y += _LINE
        page.text(_MARGIN, page.y, f"and {len(found) - len(labels)} more", kind="soft")
    page.y += _LINE / 2


def _rings(page: _Page, topology: Topology, before: Sequence[int], after: Sequence[int], nbytes: int) -> None:
    """Both orders on one circle, on which the ranks stand in the order ``after``: what changes is the ways between them."""
    hosts = list(dict.fromkeys(topology.hosts[rank] for rank in after))
    fills = {host: _FILLS[index % len(_FILLS)] for index, host in enumerate(hosts)}
    page.heading(f"a ring of {topology.world_size} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}")
    if topology.measured:
        page.y += _LINE
        page.text(
            _MARGIN, page.y, f"times for segments of {drawing.size(nbytes)}, slowest link in red", kind="soft"
        )
    radius = max(70.0, topology.world_size * (_CHIP + 8) / (2 * math.pi))
    page.y += _LINE
    drawn = [("the order of the ranks", before), ("the planned order", after)]
    if tuple(before) == tuple(after):
        drawn = [("the order of the ranks, which is the planned one", after)]
    captions = [_caption(topology, name, order, nbytes) for name, order in drawn]
    panel = max(2 * radius + _CHIP, *(_wide(line, _FONT) for caption in captions for line in caption))
    places = {
        rank: (radius * math.sin(angle), -radius * math.cos(angle))
        for index, rank in enumerate(after)
        for angle in [2 * math.pi * index / len(after)]
    }
    middle_y = page.y + radius + _CHIP / 2
    digits = _SMALL if topology.world_size <= 1000 else _SMALL - 3  # four of them fit into the circle
    x = float(_MARGIN)
    for (_, order), caption in zip(drawn, captions, strict=True):
        middle_x = x + panel / 2
        _ways(page, topology, order, places, (middle_x, middle_y), nbytes)
        for rank, (dx, dy) in places.items():
            page.parts.append(
                f'<circle class="box" cx="{middle_x + dx:.1f}" cy="{middle_y + dy:.1f}" r="{_CHIP / 2}" '
                f'fill="{fills[topology.hosts[rank]]}"/>'
            )
            page.text(middle_x + dx, middle_y + dy + 4, str(rank), size=digits, kind="rank", middle=True)
        for number, line in enumerate(caption):
            y = middle_y + radius + _CHIP / 2 + _LINE * (number + 1)
            page.text(middle_x, y, line, kind="soft" if number else "", middle=True)
        page.reach(x + panel)
        x += panel + 2 * _MARGIN
    page.y = middle_y + radius + _CHIP / 2 + _LINE * (len(captions[0]) + 1)
    _legend(page, hosts, fills)


def _caption(topology: Topology, name: str, order: Sequence[int], nbytes: int) -> list[str]:
    lines = [name, f"changes of host: {drawing.changes_of_host(topology, order)}"]
    if topology.measured:
        cost = ring_cost(topology, order, nbytes)
        lines += [
            f"slowest link: {drawing.seconds(cost.slowest)}",
            f"once around: {drawing.seconds(cost.total)}",
        ]
    return lines


def _ways(
    page: _Page,
    topology: Topology,
    order: Sequence[int],
    places: dict[int, tuple[float, float]],
    middle: tuple[float, float],
    nbytes: int,
) -> None:
    """The links of a ring as arrows from circle to circle, the slowest in red."""
    ways = list(zip(order, [*order[1:], order[0]], strict=True)) if len(order) > 1 else []
    times = [topology.link(a, b).seconds(nbytes) for a, b in ways]
    for (a, b), time in zip(ways, times, strict=True):
        slow = topology.measured and time == max(times)
        (ax, ay), (bx, by) = places[a], places[b]
        length = math.hypot(bx - ax, by - ay)
        ux, uy = (bx - ax) / length, (by - ay) / length
        start, tip = _CHIP / 2, length - _CHIP / 2
        x1, y1 = middle[0] + ax + ux * start, middle[1] + ay + uy * start
        x2, y2 = middle[0] + ax + ux * tip, middle[1] + ay + uy * tip
        page.parts.append(
            f'<line class="{"slow" if slow else "way"}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2 - ux * 4:.1f}" '
            f'y2="{y2 - uy * 4:.1f}" stroke-width="{2.4 if slow else 1.3}"/>'
        )
        corners = " ".join(
            f"{x2 - ux * back - uy * side:.1f},{y2 - uy * back + ux * side:.1f}"
            for back, side in ((0, 0), (6, 3), (6, -3))
        )
        page.parts.append(f'<polygon class="{"slowtip" if slow else "tip"}" points="{corners}"/>')


def _legend(page: _Page, hosts: Sequence[str], fills: dict[str, str]) -> None:
    """The colours of the hosts, in as many columns as fit."""
    names = [_cut(host, _NAME) for host in hosts]
    wide = max(_wide(name, _FONT) for name in names) + _CHIP + 4 * _GAP
    across = max(1, int((max(page.width, 480) - _MARGIN) // wide))
    for index, (host, name) in enumerate(zip(hosts, names, strict=True)):
        x, y = _MARGIN + index % across * wide, page.y + index // across * _LINE
        page.parts.append(
            f'<circle class="box" cx="{x + 7:.1f}" cy="{y + 8:.1f}" r="7" fill="{fills[host]}"/>'
        )
        page.text(x + 14 + _GAP, y + 13, name)
    page.y += -(-len(hosts) // across) * _LINE
