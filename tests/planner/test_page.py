"""docs/planner.md: what its programs assert holds, and its image is what the command draws."""

import re
from pathlib import Path

from asynccoll.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planner.md"


def test_what_the_page_asserts_holds(monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    # One after the other in one namespace, as a reader would type them.
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})


def test_the_image_of_the_page_is_what_the_command_beside_it_draws(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"^python -m asynccoll (plan .*--topology .*)$", PAGE.read_text(), re.MULTILINE)
    assert main([*command.split(), "--svg", str(tmp_path / "new.svg")]) == 0
    capsys.readouterr()
    drawn = (tmp_path / "new.svg").read_text()
    assert (ROOT / "docs" / "planner.svg").read_text() == drawn, "draw docs/planner.svg anew, with --svg"
