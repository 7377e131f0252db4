"""The table of scenarios: which of torch's features work on which backend, and whether asynccoll's answers are gloo's.

    python -m tests.torchbackend.scenarios [--worlds 2,4] [--backends gloo,asynccoll] [--only NAME] [--json FILE]

Exits with 1 if a cell of asynccoll is worse than gloo's, or its answers differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from tests.torchbackend.cells import FAILED, WORSE, Cell, run_all
from tests.torchbackend.suite import SCENARIOS, Scenario, difference

Table = dict[tuple[str, str, int], Cell]
"""(scenario, backend, world size) -> how it ended."""


def verdict(scenario: Scenario, gloo: Cell, other: Cell) -> Cell:
    """asynccoll's cell, failed if its answers are not as good as gloo's."""
    if gloo.answers is None or other.answers is None:
        return other
    for rank, (reference, answer) in enumerate(zip(gloo.answers, other.answers, strict=True)):
        found = difference(reference, answer, scenario.tolerance)
        if found:
            return other._replace(state=FAILED, note=f"rank {rank}, unlike gloo: {found}"[:200])
    return other


def complete(backends: list[str], size: int, chosen: list[Scenario], fallen: list[str]) -> Table:
    """The cells of one world size, each told on stderr as it comes."""
    table: Table = {}
    for backend in backends:
        for scenario, found in run_all(backend, size, chosen, fallen):
            gloo = table.get((scenario.name, "gloo", size))
            cell = found if gloo is None or backend == "gloo" else verdict(scenario, gloo, found)
            table[scenario.name, backend, size] = cell
            line = f"{cell.seconds:6.2f} s  {backend} {size}  {scenario.name}: {cell.state} {cell.note}"
            print(line, file=sys.stderr, flush=True)
    return table


def worse(table: Table) -> list[str]:
    """The cells of asynccoll that are worse than gloo's, but for those that it is known not to have."""
    found = []
    for (name, backend, size), cell in table.items():
        gloo = table.get((name, "gloo", size))
        if backend != "asynccoll" or SCENARIOS[name].known:
            continue
        # Without gloo beside it there is nothing that excuses a failure.
        limit = WORSE["part"] if gloo is None else max(WORSE[gloo.state], WORSE["part"])
        if WORSE[cell.state] > limit or (cell.state == FAILED and "unlike gloo" in cell.note):
            found.append(f"{name}, W = {size}: {cell.state} {cell.note}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torchbackend.scenarios")
    parser.add_argument("--worlds", default="2,4", help="world sizes, with commas")
    parser.add_argument("--backends", default="gloo,asynccoll", help="backends, with commas; gloo first")
    parser.add_argument("--only", metavar="NAME", help="scenarios whose area or name has this in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells there")
    parser.add_argument("--fast", action="store_true", help="without those that take long")
    args = parser.parse_args(argv)
    wanted = (args.only or "").lower()
    chosen = [
        one
        for one in SCENARIOS.values()
        if (wanted in one.name.lower() or wanted == one.area) and not (args.fast and one.slow)
    ]
    began, table, fallen = time.monotonic(), Table(), list[str]()
    for size in map(int, args.worlds.split(",")):
        table |= complete(args.backends.split(","), size, chosen, fallen)
    rows = [
        {"scenario": name, "area": SCENARIOS[name].area, "backend": backend, "world": size}
        | {"state": cell.state, "note": cell.note, "seconds": round(cell.seconds, 3)}
        for (name, backend, size), cell in table.items()
    ]
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "cells": rows}, indent=1) + "\n")
    print_table(rows)
    failures = worse(table) + [text for text in fallen if text.startswith("asynccoll")]
    for text in fallen:
        print(f"BETWEEN TWO SCENARIOS {text}")
    for failure in failures:
        print(f"WORSE THAN GLOO {failure}")
    print(f"{len(rows)} cells, {len(failures)} worse than gloo, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


def print_table(rows: list[dict]) -> None:
    """Scenario x backend and world size, with the notes of the cells that are not ok."""
    columns = list(dict.fromkeys((row["backend"], row["world"]) for row in rows))
    states = {(row["scenario"], row["backend"], row["world"]): row for row in rows}
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    width = max(map(len, names), default=0)
    print(" " * width, *(f"{backend} {size}".rjust(12) for backend, size in columns))
    for name in names:
        cells = [states.get((name, *column)) for column in columns]
        print(name.ljust(width), *((cell["state"] if cell else "-").rjust(12) for cell in cells))
        for note in dict.fromkeys(cell["note"] for cell in cells if cell and cell["note"]):
            print(f"    {note}")


if __name__ == "__main__":
    sys.exit(main())
