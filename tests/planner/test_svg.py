"""Plans and rings as an image: well-formed, complete, and no text over another or over an edge."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from asynccoll.planner import ProcessRanks, RankPlan, Topology, drawing, ring_order, svg

NS = "{http://www.w3.org/2000/svg}"


def measured(size, hosts):
    rows = [[2e-5 if (a - b) % hosts == 0 else 1e-4 + a * 1e-6 for b in range(size)] for a in range(size)]
    return Topology.from_hosts([f"node-{rank % hosts:02d}" for rank in range(size)], latency=rows)


def drawn(plan, topology, title="a plan"):
    before = after = ()
    if topology is not None:
        before, after = topology.ranks, ring_order(topology)
    return svg.picture(title, plan, topology, before=before, after=after, nbytes=1 << 20)


WORLDS = {
    "4": (RankPlan.from_roles({"trainer": 4}), measured(4, 2)),
    "9 on 4 machines": (
        RankPlan.from_roles({"trainer": 4, "parameter_server": 4, "lock_server": 1}, machines=4),
        Topology.from_hosts([f"machine {rank % 4}" for rank in range(9)]),
    ),
    "13, BigGraph": (ProcessRanks.from_num_invocations(3, -1).plan(), measured(13, 3)),
    "19, BigGraph, servers anywhere": (ProcessRanks.from_num_invocations(5, 3).plan(), None),
    "64 on 16 machines": (
        RankPlan.from_roles({"trainer": 32, "server": 16, "client": 16}, machines=16),
        measured(64, 16),
    ),
    "64, no machines": (RankPlan.from_roles({"worker": 64}), None),
    "64 on one machine": (RankPlan.from_roles({"worker": 60, "logger": 4}, machines=1), measured(64, 1)),
    "1": (RankPlan.from_roles({"worker": 1}, machines=1), Topology.from_hosts(["only"])),
    "2": (None, Topology.from_hosts(["a", "b"])),
    "1200": (RankPlan.from_roles({"worker": 1200}), Topology.from_hosts(["h"] * 1200)),
    "long names": (
        RankPlan.from_roles({"r" * 90: 3, "工" * 60: 2, "s": 1}, machines=3).with_group("g" * 99, [0]),
        Topology.from_hosts(["h" * 80, "h" * 81, "a", "b", "c", "工" * 70]),
    ),
    "many groups": (
        RankPlan.from_roles(
            {"w": 100}, groups={f"g{number}": range(number % 2, 100, 2 + number % 3) for number in range(30)}
        ),
        None,
    ),
}


def boxes(root):
    """``(left, top, right, bottom)`` of each text, by the width that a monospace font has."""
    for text in root.iter(f"{NS}text"):
        size = float(text.get("font-size"))
        width = drawing.columns(text.text) * size * 0.602
        x, y = float(text.get("x")), float(text.get("y"))
        left = x - width / 2 if text.get("text-anchor") == "middle" else x
        yield (left, y - 0.75 * size, left + width, y + 0.22 * size), text.text


@pytest.mark.parametrize("name", WORLDS)
def test_no_text_lies_over_another_or_leaves_the_image(name):
    root = ElementTree.fromstring(drawn(*WORLDS[name]))
    width, height = float(root.get("width")), float(root.get("height"))
    placed = list(boxes(root))
    assert len(placed) > 2
    for (left, top, right, bottom), text in placed:
        assert 0 <= left <= right <= width, text
        assert 0 <= top <= bottom <= height, text
    # Sorted from left to right, so that 1200 ranks are not compared with all others.
    placed.sort()
    for number, (one, text) in enumerate(placed):
        for other, second in itertools.islice(placed, number + 1, None):
            if other[0] >= one[2]:
                break
            assert one[3] <= other[1] or other[3] <= one[1], f"{text!r} lies over {second!r}"


@pytest.mark.parametrize("name", WORLDS)
def test_ranks_are_inside_their_boxes(name):
    root = ElementTree.fromstring(drawn(*WORLDS[name]))
    shapes = []
    for rect in root.iter(f"{NS}rect"):
        if rect.get("class") == "box":
            x, y = float(rect.get("x")), float(rect.get("y"))
            shapes.append((x, y, x + float(rect.get("width")), y + float(rect.get("height"))))
    for circle in root.iter(f"{NS}circle"):
        x, y, r = (float(circle.get(key)) for key in ("cx", "cy", "r"))
        shapes.append((x - r, y - r, x + r, y + r))
    ranks = [text for text in root.iter(f"{NS}text") if text.get("class") == "rank"]
    assert ranks
    where = {}
    for shape in shapes:
        where.setdefault(round((shape[0] + shape[2]) / 2), []).append(shape)
    for text in ranks:
        x, y, size = float(text.get("x")), float(text.get("y")), float(text.get("font-size"))
        half = len(text.text) * size * 0.301
        near = [shape for key in (round(x) - 1, round(x), round(x) + 1) for shape in where.get(key, ())]
        assert any(
            left < x - half and x + half < right and top < y - size * 0.7 and y < bottom
            for left, top, right, bottom in near
        ), text.text


@pytest.mark.parametrize("name", WORLDS)
def test_every_rank_is_there_as_often_as_it_should_be(name):
    plan, topology = WORLDS[name]
    root = ElementTree.fromstring(drawn(plan, topology))
    found = sorted(int(text.text) for text in root.iter(f"{NS}text") if text.get("class") == "rank")
    size = plan.world_size if plan else topology.world_size
    times = 1 if plan else 0
    if topology is not None:
        times += 1 if ring_order(topology) == topology.ranks else 2
    assert found == sorted(list(range(size)) * times)


def test_an_arrow_for_each_link_and_the_slowest_in_red():
    topology = measured(13, 3)
    root = ElementTree.fromstring(drawn(None, topology))
    lines = [line.get("class") for line in root.iter(f"{NS}line")]
    assert len(lines) == 26
    assert lines.count("slow") == 2
    plain = ElementTree.fromstring(drawn(None, Topology.from_hosts(topology.hosts)))
    assert "slow" not in [line.get("class") for line in plain.iter(f"{NS}line")]


def test_it_stands_alone_and_has_a_title_and_both_schemes():
    text = drawn(*WORLDS["13, BigGraph"], title="who & <where>")
    root = ElementTree.fromstring(text)
    assert root.find(f"{NS}title").text == "who & <where>"
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|url\(|@import|<script|<image", text)
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    texts = [element.text for element in root.iter(f"{NS}text")]
    for wanted in (
        "who & <where>",
        "roles and machines",
        "machine 2",
        "partition_server",
        "node-02",
        "the planned order",
    ):
        assert wanted in texts


def test_names_are_text_and_never_markup():
    plan = RankPlan.from_roles({"<script>&\"'": 2}, machines=2).with_group("</svg>", [0])
    root = ElementTree.fromstring(drawn(plan, Topology.from_hosts(["<a>", "&b;"])))
    texts = {element.text for element in root.iter(f"{NS}text")}
    assert {"<script>&\"'", "</svg>", "<a>", "&b;"} <= texts


def test_the_same_plan_is_the_same_image():
    assert drawn(*WORLDS["13, BigGraph"]) == drawn(*WORLDS["13, BigGraph"])
