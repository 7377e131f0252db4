"""Imports go one way, and the pure parts stay pure: read from the syntax trees, not from a running interpreter."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import asynccoll

ROOT = Path(asynccoll.__file__).parent

LAYERS = (
    # From the bottom to the top. A module imports from the rows above its own, and from its own package; never from its
    # own row or from below. "asynccoll" is the package itself, __init__.py.
    ("errors", "pickling"),
    ("overlap", "objects", "algorithms", "declared", "groups"),
    ("buffers",),
    ("reduction", "trees"),
    ("planner", "engine"),
    ("pump",),
    ("sim", "net"),
    ("calls", "work"),
    ("streams",),
    ("verbs",),
    ("communicator",),
    ("loops",),
    ("world",),
    ("background", "launch"),
    ("pending", "workers"),
    ("threaded",),
    ("sync",),
    ("asynccoll",),
    ("collective", "torch", "testing", "worker"),
    ("cli",),
    ("__main__",),
)

PURE = (
    "errors",
    "pickling",
    "overlap",
    "declared",
    "groups",
    "buffers",
    "objects",
    "reduction",
    "trees",
    "algorithms",
    "planner",
    "engine",
)
"""Nothing here may know of I/O, time, chance or threads, not even inside a function or for the type checker."""

IMPURE = {
    *(
        "asyncio",
        "concurrent",
        "multiprocessing",
        "queue",
        "sched",
        "select",
        "selectors",
        "signal",
        "socket",
    ),
    *("socketserver", "ssl", "subprocess", "threading", "_thread", "uvloop"),
    *("datetime", "time", "timeit", "random", "secrets", "uuid", "torch"),
}

HEAVY = ("torch", "rich", "ray", "ssl", "ml_dtypes", "multiprocessing", "cloudpickle")
"""What ``import asynccoll`` must not load."""


class Import(NamedTuple):
    """One imported module, as absolute name."""

    source: str
    target: str
    line: int
    typing_only: bool

    def __str__(self):
        return f"{self.source} (line {self.line}) imports {self.target}"


def modules():
    """Dotted name -> syntax tree of every module of the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = modules()


def is_typing_guard(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(name, tree):
    """Every import in the module, wherever it stands."""
    guarded = {id(inner) for node in ast.walk(tree) if is_typing_guard(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} (line {node.lineno}): write the import with its full name"
            # A name that is no submodule is an attribute of the module itself.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [full if full in MODULES else node.module for full in names]
        else:
            continue
        for target in dict.fromkeys(targets):
            yield Import(name, target, node.lineno, id(node) in guarded)


ALL = [found for name, tree in MODULES.items() for found in imports(name, tree)]


def unit(module):
    """The entry of the table that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}


def test_the_table_names_each_part_once():
    names = [name for row in LAYERS for name in row]
    assert len(names) == len(set(names))


def test_every_module_is_in_the_table():
    strangers = sorted({unit(module) for module in MODULES} - set(LEVEL))
    assert not strangers, f"add {strangers} to LAYERS in {__file__}, as low as their imports allow"


def test_imports_go_downwards_only():
    # Those for the type checker too: what they name is known to the module.
    wrong = []
    for found in ALL:
        if found.target not in MODULES or unit(found.source) == unit(found.target):
            continue
        above, below = LEVEL[unit(found.source)], LEVEL[unit(found.target)]
        if above <= below:
            way = "sideways" if above == below else "upwards"
            wrong.append(f"{found}: {way}, from {LAYERS[above]} to {LAYERS[below]}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle():
    # Within a package too. What only the type checker sees makes no circle at run time.
    edges = {name: set() for name in MODULES}
    for found in ALL:
        if found.target in MODULES and not found.typing_only and found.source != found.target:
            edges[found.source].add(found.target)
    done, path = set(), []

    def visit(name):
        if name in done:
            return
        assert name not in path, "circle: " + " -> ".join([*path[path.index(name) :], name])
        path.append(name)
        for target in sorted(edges[name]):
            visit(target)
        path.pop()
        done.add(name)

    for name in sorted(MODULES):
        visit(name)


def test_the_pure_parts_import_nothing_impure():
    wrong = [
        f"{found}{' for the type checker' if found.typing_only else ''}"
        for found in ALL
        if unit(found.source) in PURE and found.target.partition(".")[0] in IMPURE
    ]
    assert not wrong, "\n".join(wrong)


def test_the_pure_parts_draw_no_random_numbers_from_numpy():
    wrong = [
        f"{name} (line {node.lineno}) uses {ast.unparse(node)}"
        for name, tree in MODULES.items()
        if unit(name) in PURE
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random")
    ]
    assert not wrong, "\n".join(wrong)


def loaded(code):
    """Top-level modules that an interpreter has loaded after ``code``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})",
        ],
        env=env,
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.fixture(scope="module")
def baseline():
    """asyncio loads ssl by itself: what counts is what comes on top."""
    return loaded("import asyncio, numpy, uvloop")


def test_importing_the_package_loads_nothing_heavy(baseline):
    more = loaded("import asyncio, numpy, uvloop\nimport asynccoll") - baseline
    assert "asynccoll" in more
    assert not more & set(HEAVY)


def test_nothing_but_msgpack_is_needed_to_import_it(baseline):
    more = loaded("import asyncio, numpy, uvloop\nimport asynccoll") - baseline
    foreign = more - set(sys.stdlib_module_names) - {"asynccoll", "numpy"}
    assert foreign <= {"msgpack"}


@pytest.mark.parametrize(
    "part",
    ["sync", "collective", "testing", "cli", "cli.plan", "planner", "launch", "sim.driver", "net.driver"],
)
def test_nor_does_any_other_entry_load_torch_or_rich(baseline, part):
    more = loaded(f"import asyncio, numpy, uvloop\nimport asynccoll.{part}") - baseline
    assert not more & {"torch", "rich", "ray", "ml_dtypes"}


class TestTheReaderOfImports:
    """A reader that sees nothing forbids nothing."""

    def read(self, code):
        return {(found.target, found.typing_only) for found in imports("x", ast.parse(code))}

    def test_it_sees_every_form(self):
        code = (
            "import a.b, c as d\nfrom asynccoll import errors, nothing\nfrom asynccoll.engine import wire\n"
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from asynccoll.pump import Pump\n"
            "def f():\n    import random\n"
        )
        assert self.read(code) == {
            ("a.b", False),
            ("c", False),
            ("asynccoll.errors", False),
            ("asynccoll", False),
            ("asynccoll.engine.wire", False),
            ("typing", False),
            ("asynccoll.pump", True),
            ("random", False),
        }

    def test_it_refuses_relative_imports(self):
        with pytest.raises(AssertionError, match="full name"):
            self.read("from . import errors")

    def test_it_knows_the_package(self):
        assert {"asynccoll", "asynccoll.engine.engine", "asynccoll.net", "asynccoll.errors"} <= set(MODULES)
        assert len(ALL) > 300
