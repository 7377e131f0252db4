"""Nothing that runs before a peer has proved itself can unpickle: read from the syntax trees."""

import ast
from pathlib import Path

import pytest

import asynccoll

ROOT = Path(asynccoll.__file__).parent
LOADERS = {
    "pickle",
    "_pickle",
    "cloudpickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "asynccoll.pickling",
    "asynccoll.objects",
}


def path_of(module):
    """The file of a module of the package, or None."""
    base = ROOT.parent.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def imports(module):
    """All that a module imports, wherever it stands; submodules under their own names."""
    found = set()
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if path_of(name) else node.module for name in names}
    return found


def reachable(module):
    """The modules of the package that ``module`` can run, itself included, and what they import."""
    seen, queue = {}, [module]
    while queue:
        name = queue.pop()
        if name not in seen and name.startswith("asynccoll.") and path_of(name):
            seen[name] = imports(name)
            queue += seen[name]
    return seen


def test_the_rendezvous_reaches_no_module_that_unpickles():
    seen = reachable("asynccoll.net.rendezvous")
    assert {"asynccoll.net.handshake", "asynccoll.net.coordinator", "asynccoll.net.control"} <= seen.keys()
    assert {name: sorted(found & LOADERS) for name, found in seen.items() if found & LOADERS} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "net").glob("*.py")), ids=lambda path: path.stem)
def test_no_module_of_net_imports_one_that_unpickles(path):
    assert not imports(f"asynccoll.net.{path.stem}") & LOADERS


def test_the_check_sees_what_does():
    assert reachable("asynccoll.engine.aborts")["asynccoll.objects"] & LOADERS
    assert "asynccoll.pickling" in reachable("asynccoll.objects")
