"""Prints the table of docs/torch.md from what `scenarios --json` wrote: `python -m tests.torchbackend.table FILE ...`."""

import json
import re
import signal
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
    text = re.sub(r"^ranks? \S+( \d+\]?)*: ", "", cell["note"].replace("|", "/"))
    ended = re.match(r"rank \d+ ended with -(\d+)", text)
    if ended:
        text = f"a process ended by {signal.Signals(int(ended[1])).name}"
    if cell["state"] == "hang":
        text = "in " + " < ".join(re.findall(r" in (\w+)", text))
    if "nothing was raised" in text:
        text = "no error, on at least one rank"  # what it returned differs from run to run
    # Without sentences of advice, paths and addresses, which differ from run to run too.
    text = re.split(r"\. |, keys: | \[/| Search for", text)[0].strip(" :")[:140]
    return f"{cell['state']} ({notes.setdefault(text, len(notes) + 1)})"


if __name__ == "__main__":
    main(sys.argv[1:])
