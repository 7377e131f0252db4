import subprocess
import sys

import pytest

from asynccoll.cli import COMMANDS, main


def test_help_lists_every_command_and_returns_0(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert f"{name}  {what}" in text.replace("   ", "  ")


@pytest.mark.parametrize("argv", [[], ["rnu"], ["--nonsense"]])
def test_a_mistake_returns_2_and_shows_the_usage_on_stderr(argv, capsys):
    assert main(argv) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("usage: asynccoll")


def test_an_unknown_command_is_named_with_the_known_ones(capsys):
    assert main(["rnu"]) == 2
    error = capsys.readouterr().err
    assert "'rnu'" in error
    assert "'run'" in error


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("asynccoll ")


def test_the_rest_of_the_line_is_the_commands_own(capsys):
    assert main(["run", "--help"]) == 0
    assert "asynccoll run -n 4 train.py" in capsys.readouterr().out


def test_argv_defaults_to_that_of_the_process(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["asynccoll", "run", "--help"])
    assert main() == 0
    assert "usage: asynccoll run" in capsys.readouterr().out


def test_python_dash_m_asynccoll_is_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "asynccoll", "nonsense"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: asynccoll")
