"""Prints the table of docs/torch.md from what `scenarios --json` wrote: `python -m tests.torchbackend.table FILE ...`."""

import json
import sys
from pathlib import Path

TITLES = {
    "training": "DDP, hooks, optimizers",
    "sharding": "FSDP, DTensor, parallelism, checkpoints",
    "functional": "Functional collectives, torch.compile",
    "verbs": "Collectives",
    "messages": "Messages and objects",
    "groups": "Groups, meshes, profiler",
    "faults": "Errors",
}


def main(paths: list[str]) -> None:
    cells, versions, areas, sizes = {}, [], {}, set()
    for path in paths:
        content = json.loads(Path(path).read_text())
        version = content["torch"].partition("+")[0]
        versions += [version] if version not in versions else []
        for cell in content["cells"]:
            cells[cell["scenario"], version, cell["backend"], cell["world"]] = cell
            names = areas.setdefault(cell["area"], [])
            names += [cell["scenario"]] if cell["scenario"] not in names else []
            sizes.add(cell["world"])
    columns = [
        (version, backend, size)
        for version in versions
        for backend in ("gloo", "asynccoll")
        for size in sorted(sizes)
    ]
    notes: dict[str, int] = {}
    print("| scenario |", " | ".join(f"{v} {b} W={s}" for v, b, s in columns), "|")
    print("|---|" + "---|" * len(columns))
    for area, title in TITLES.items():
        if area in areas:
            print(f"| **{title}** |" + " |" * len(columns))
        for name in areas.get(area, ()):
            states = [shown(cells.get((name, *column)), notes) for column in columns]
            print(f"| {name} |", " | ".join(states), "|")
    print()
    for note, number in notes.items():
        print(f"{number}. {note}")


def shown(cell: dict | None, notes: dict[str, int]) -> str:
    """A cell's state, with the number of its note."""
    if cell is None:
        return "-"
    if not cell["note"]:
        return cell["state"]
    note = cell["note"].replace("|", "/").partition(": ")
    text = note[2] if note[0].startswith("rank ") and note[2] else cell["note"]
    text = text.partition(". ")[0][:140]
    return f"{cell['state']} ({notes.setdefault(text, len(notes) + 1)})"


if __name__ == "__main__":
    main(sys.argv[1:])
