"""docs/reference.md is what tools/reference.py writes, and leaves nothing out."""

import inspect

import asynccoll
import asynccoll.sync
from tools import reference


def test_the_page_is_not_stale():
    assert reference.PAGE.read_text() == reference.page(), "run `python -m tools.reference`"


def test_every_public_call_is_on_the_page():
    text = reference.PAGE.read_text()
    for module in (asynccoll, asynccoll.sync):
        for name in module.__all__:
            if inspect.isfunction(getattr(module, name)) and not name.endswith("_async"):
                assert f"\n{name}(" in text or f"`{name}`" in text, name
    for owner in (asynccoll.Communicator, asynccoll.LocalWorkers, asynccoll.Stream):
        for name in vars(owner):
            if not name.startswith("_"):
                assert f"\n.{name}(" in text or f"\nasync .{name}(" in text or f"`.{name}`" in text, name


def test_signatures_read_as_in_the_source():
    def short(value: int, *rest: str, key: str = "x", flag=True, **more: object) -> None: ...

    def wide(
        self, first: "dict[str, object]", /, *, second: float = 1.0, third: str = "word" * 12
    ) -> int: ...

    def plain(a, *, b=None): ...

    assert reference._signature("f", short) == (
        'f(value: int, *rest: str, key: str = "x", flag=True, **more: object) -> None'
    )
    assert reference._signature("g", wide).splitlines() == [
        "g(",
        "    first: dict[str, object],",
        "    *,",
        "    second: float = 1.0,",
        f'    third: str = "{"word" * 12}",',
        ") -> int",
    ]
    assert reference._signature("h", plain, returns=False) == "h(a, *, b=None)"


def test_addresses_of_objects_are_no_part_of_it():
    assert reference._value(object()) == "<object object>"


def test_the_command_rewrites_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(reference, "PAGE", tmp_path / "reference.md")
    assert reference.main() == 0
    assert reference.PAGE.read_text() == reference.page()
    assert "wrote" in capsys.readouterr().out
