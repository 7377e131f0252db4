"""Breaks the engine and the algorithms in one place at a time, and runs the tests that should notice.

    python -m tools.mutate --count 120            progress on stderr, one JSON line at the end; exit code 1 if too few are noticed
    python -m tools.mutate --list                 the breakages, without running anything
    python -m tools.mutate --only 17              one of them, with what the tests say

The breakages are drawn from the syntax trees by a seed, so a list repeats as long as the sources do. Each runs in a copy of the
repository: first the tests of its own module, then a few random programs in the simulation, then the tests of the engine and the
algorithms, more random programs, and with ``--thorough`` the conformance suite in the simulation.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("asynccoll/engine", "asynccoll/algorithms", "asynccoll/reduction.py")
LIMIT = 300.0
"""Seconds for one run of tests: a breakage that makes them hang is noticed."""
BAR = 0.95
"""Share of the breakages that must be noticed."""
SKIPPED = ("__init__.py",)

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


class Breakage(NamedTuple):
    """One change to one file."""

    path: str
    line: int
    what: str
    number: int
    """Which of the changes that `_changes` finds in the file."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"

    def source(self) -> str:
        """The whole file, changed."""
        tree = ast.parse((ROOT / self.path).read_text(encoding="utf-8"))
        changes = list(_changes(tree))
        changes[self.number].apply()
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class Change(NamedTuple):
    """What could be done to a syntax tree."""

    line: int
    what: str
    apply: Callable[[], object]


def breakages(path: Path) -> Iterator[Breakage]:
    """Every breakage of one file."""
    name = str(path.relative_to(ROOT))
    for number, (line, what, _) in enumerate(_changes(ast.parse(path.read_text(encoding="utf-8")))):
        yield Breakage(name, line, what, number)


def _changes(tree: ast.Module) -> Iterator[Change]:
    """What can be changed in a tree, in a fixed order. Nothing in constructors: without an attribute everything falls over."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name != "__init__":
            for statement in function.body:
                for node in ast.walk(statement):
                    if not isinstance(node, ast.FunctionDef):
                        yield from _of(node)
            yield from _dropped(function)


def _of(node: ast.AST) -> Iterator[Change]:
    line = getattr(node, "lineno", 0)
    short = " ".join(ast.unparse(node).split())[:70] if isinstance(node, ast.expr | ast.stmt) else ""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        ops, compared = node.ops, COMPARISONS[type(node.ops[0])]
        yield Change(line, f"{short}  ->  {compared.__name__}", lambda: ops.__setitem__(0, compared()))
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        calculated = OPERATORS[type(node.op)]
        yield Change(line, f"{short}  ->  {calculated.__name__}", lambda: setattr(node, "op", calculated()))
    elif isinstance(node, ast.BoolOp):
        joined = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield Change(line, f"{short}  ->  {joined.__name__}", lambda: setattr(node, "op", joined()))
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        what = f"if {ast.unparse(node.test)[:60]}  ->  negated"
        yield Change(line, what, lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test)))
    elif (
        isinstance(node, ast.Return)
        and isinstance(node.value, ast.Constant)
        and type(node.value.value) is bool
    ):
        value = node.value
        yield Change(line, f"{short}  ->  the opposite", lambda: setattr(value, "value", not value.value))
    if not isinstance(node, ast.expr):
        yield from _dropped(node)


def _dropped(node: ast.AST) -> Iterator[Change]:
    for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
        for at, statement in enumerate(body if isinstance(body, list) else ()):
            if _droppable(statement):
                what = " ".join(ast.unparse(statement).split())[:70]
                yield Change(statement.lineno, f"{what}  ->  dropped", functools.partial(_drop, body, at))


def _drop(body: list[ast.stmt], at: int) -> None:
    body[at] = ast.Pass()


def _droppable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Continue) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    )


def draw(count: int, seed: int) -> list[Breakage]:
    """``count`` breakages, spread evenly over the files by their number of places."""
    found: list[Breakage] = []
    for target in TARGETS:
        base = ROOT / target
        for path in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            if path.name not in SKIPPED:
                found += breakages(path)
    # One for each line at most: two of one place would be found by the same test.
    rng = random.Random(seed)
    rng.shuffle(found)
    lines: dict[tuple[str, int], Breakage] = {}
    for breakage in found:
        lines.setdefault((breakage.path, breakage.line), breakage)
    return list(lines.values())[:count]


def commands(breakage: Breakage, thorough: bool) -> list[list[str]]:
    """What to run, the most likely to notice first."""
    module = Path(breakage.path)
    own = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob(f"test_{module.stem}*.py"))
        if path.parent.name in ("engine", "algorithms", "programs", "tests")
    ]
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "60"]
    wider = ["tests/engine", "tests/algorithms", "tests/test_reduction.py"]
    runs = [[*pytest, *own]] if own else []
    soak = [sys.executable, "-m", "asynccoll", "soak", "--seeds"]
    runs += [[*soak, "40"], [*pytest, *wider], [*soak, "200"]]
    if thorough:
        runs.append([*pytest, "tests/conformance", "-k", "sim", "--worlds", "sim"])
    return runs


def noticed(breakage: Breakage, tree: Path, *, thorough: bool = False, show: bool = False) -> str | None:
    """Which run noticed the breakage, in the copy ``tree``; None if none did."""
    target = tree / breakage.path
    kept = target.read_text(encoding="utf-8")
    target.write_text(breakage.source(), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for command in commands(breakage, thorough):
            try:
                done = subprocess.run(
                    command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
                )
            except subprocess.TimeoutExpired:
                return f"hang: {' '.join(command[1:])}"
            if show:
                print(done.stdout[-3000:], done.stderr[-2000:])
            if done.returncode not in (0, 5):  # 5: no tests were found
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0][:160] if failed else " ".join(command[1:4])
        return None
    finally:
        target.write_text(kept, encoding="utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=120, help="how many breakages")
    parser.add_argument("--seed", type=int, default=1, help="which")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--only", type=int, metavar="N", help="run this one and show what the tests say")
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="run the conformance suite too, which takes minutes for each survivor",
    )
    parser.add_argument("--list", action="store_true", help="print the breakages and run nothing")
    options = parser.parse_args()
    found = draw(options.count, options.seed)
    if options.list:
        for number, breakage in enumerate(found):
            print(number, breakage)
        return 0
    chosen = (
        list(enumerate(found))[options.first :]
        if options.only is None
        else [(options.only, found[options.only])]
    )
    began = time.monotonic()
    survivors: list[str] = []
    by: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        ignore = shutil.ignore_patterns(".git", ".tox", "__pycache__", ".*_cache", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignore)
        for number, breakage in chosen:
            who = noticed(breakage, tree, thorough=options.thorough, show=options.only is not None)
            print(
                f"{number:3} {'noticed' if who else 'SURVIVED'} {breakage}  [{who}]",
                file=sys.stderr,
                flush=True,
            )
            if who is None:
                survivors.append(f"{number}: {breakage}")
            else:
                by[number] = who
    count = len(chosen)
    share = len(by) / count if count else 1.0
    result = {
        "breakages": count,
        "noticed": len(by),
        "share": round(share, 3),
        "survivors": survivors,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return 0 if share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
