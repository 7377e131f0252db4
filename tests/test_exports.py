"""The public names: all there, all described, and the same verbs with the same arguments everywhere."""

import ast
import importlib
import inspect
import pickle
import types
from pathlib import Path

import pytest

import asynccoll
import asynccoll.sync
from asynccoll import errors
from asynccoll.communicator import Communicator
from asynccoll.sync import SyncCommunicator, SyncStream

ROOT = Path(asynccoll.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NO_SCHEDULES = {"__init__.py", "binomial.py", "check.py", "registry.py", "steps.py"}
"""Files of ``algorithms/`` that hold no algorithm."""

VERBS = sorted(
    name
    for name, member in inspect.getmembers(Communicator, inspect.isfunction)
    if not name.startswith("_")
    and str(getattr(member, "__annotations__", {}).get("return")).startswith("Work[")
)


def parameters(function):
    """Names, kinds and defaults, without self."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return [(p.name, p.kind, p.default) for p in found]


def public(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("module", [asynccoll, asynccoll.sync], ids=["asynccoll", "sync"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_functions_of_a_module_pickle_by_name(module, verb):
    # As a function for `launch` or for a local worker.
    function = getattr(module, verb)
    assert pickle.loads(pickle.dumps(function)) is function


class TestPackage:
    def test_all_is_what_is_there(self):
        assert set(asynccoll.__all__) == public(asynccoll) | {"__version__"}
        assert len(asynccoll.__all__) == len(set(asynccoll.__all__))

    def test_every_name_has_a_docstring_of_its_own(self):
        for name in set(asynccoll.__all__) - {"__version__"}:
            value = getattr(asynccoll, name)
            assert inspect.getdoc(value), name
            if isinstance(value, type):
                assert value.__dict__.get("__doc__"), f"{name} shows its parent's docstring"

    def test_every_public_member_of_its_classes_has_a_docstring(self):
        for owner in (asynccoll.Communicator, asynccoll.Work, asynccoll.Stream, SyncCommunicator, SyncStream):
            for name, member in inspect.getmembers(owner):
                if not name.startswith("_"):
                    assert inspect.getdoc(member), f"{owner.__name__}.{name}"

    def test_every_error_is_exported(self):
        classes = {
            name
            for name, value in vars(errors).items()
            if isinstance(value, type) and issubclass(value, Exception)
        }
        assert classes <= set(asynccoll.__all__)
        assert classes <= set(errors.__all__)
        for name in classes:
            assert getattr(asynccoll, name) is getattr(errors, name)

    def test_the_package_is_typed(self):
        assert (ROOT / "py.typed").exists()


class TestVerbs:
    def test_there_are_some(self):
        reducing = {"allreduce", "allreduce_", "allreduce_tree"}
        moving = {"broadcast", "allgather", "gather", "scatter", "alltoall", "barrier"}
        assert reducing | moving | {"all_reduce", "all_gather", "all_to_all"} <= set(VERBS)

    @pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all"])
    def test_the_names_of_torch_are_other_names_of_the_same(self, name):
        verb = name.replace("_", "")
        for owner in (Communicator, asynccoll, SyncCommunicator, asynccoll.sync):
            assert getattr(owner, name) is getattr(owner, verb)
        for owner in (SyncCommunicator, asynccoll.sync):
            assert getattr(owner, f"{name}_async") is getattr(owner, f"{verb}_async")

    @pytest.mark.parametrize("verb", VERBS)
    def test_the_same_parameters_everywhere(self, verb):
        expected = parameters(getattr(Communicator, verb))
        assert parameters(getattr(asynccoll, verb)) == expected
        assert parameters(getattr(SyncCommunicator, verb)) == expected
        assert parameters(getattr(asynccoll.sync, verb)) == expected
        assert {"timeout", "key", "name"} <= {name for name, *_ in expected}

    @pytest.mark.parametrize("verb", [verb for verb in VERBS if not verb.endswith("_async")])
    def test_the_facade_has_an_async_form_with_the_same_parameters(self, verb):
        expected = parameters(getattr(Communicator, verb))
        assert parameters(getattr(SyncCommunicator, f"{verb}_async")) == expected
        assert parameters(getattr(asynccoll.sync, f"{verb}_async")) == expected

    @pytest.mark.parametrize("verb", VERBS)
    def test_all_keywords_that_are_common_are_keyword_only(self, verb):
        for name, kind, default in parameters(getattr(Communicator, verb)):
            if name in ("timeout", "key", "name", "algorithm", "out"):
                assert kind is inspect.Parameter.KEYWORD_ONLY
                assert default == ("auto" if name == "algorithm" else None)

    def test_the_verb_whose_result_comes_in_parts_too(self):
        expected = parameters(Communicator.allreduce_stream)
        assert {"out", "timeout", "name", "algorithm"} <= {name for name, *_ in expected}
        for owner in (asynccoll, SyncCommunicator, asynccoll.sync):
            assert parameters(owner.allreduce_stream) == expected

    def test_opening_takes_the_same_parameters_everywhere(self):
        expected = parameters(asynccoll.init)
        assert parameters(asynccoll.connect) == expected
        for opener in (
            asynccoll.sync.init,
            asynccoll.sync.connect,
        ):  # which have no loop of the caller's to run in
            assert [(name, kind) for name, kind, _ in parameters(opener)] == [row[:2] for row in expected]
            differ = [
                (mine, theirs) for (*_, mine), (*_, theirs) in zip(parameters(opener), expected, strict=True)
            ]
            assert [pair for pair in differ if pair[0] != pair[1]] == [("thread", "inline")]

    @pytest.mark.parametrize("name", ["rank", "world_size", "get_communicator", "shutdown"])
    def test_so_do_the_other_functions_of_both(self, name):
        assert parameters(getattr(asynccoll, name)) == parameters(getattr(asynccoll.sync, name))


class TestModules:
    @pytest.mark.parametrize("path", FILES, ids=name_of)
    def test_the_first_line_says_what_it_knows(self, path):
        doc = ast.get_docstring(ast.parse(path.read_text()), clean=False)
        assert doc, f"{path} has no docstring"
        first, _, rest = doc.partition("\n")
        assert first.strip() == first != ""
        assert first.endswith((".", ":")) or not rest.strip()

    @pytest.mark.parametrize("path", FILES, ids=name_of)
    def test_it_is_no_longer_than_450_lines(self, path):
        lines = len(path.read_text().splitlines())
        assert lines <= 450

    @pytest.mark.parametrize(
        "path",
        [p for p in FILES if p.parent.name == "algorithms" and p.name not in NO_SCHEDULES],
        ids=name_of,
    )
    def test_an_algorithm_is_no_longer_than_120_lines(self, path):
        lines = len(path.read_text().splitlines())
        assert lines <= 120

    @pytest.mark.parametrize(
        "path", [p for p in FILES if p.name != "__main__.py" and "torch" not in p.parts], ids=name_of
    )
    def test_all_names_what_it_has(self, path):
        module = importlib.import_module(name_of(path))
        names = getattr(module, "__all__", [])
        assert len(names) == len(set(names))
        assert [name for name in names if not hasattr(module, name)] == []

    def test_there_is_no_utils(self):
        assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]

    def test_there_is_no_star_import(self):
        for path in FILES:
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.ImportFrom) and node.names[0].name == "*"), path
