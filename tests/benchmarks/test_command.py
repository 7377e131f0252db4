"""What the command lines of the small benchmarks share, and their mistakes."""

import importlib
import json

import pytest

from benchmarks import command


@pytest.mark.parametrize(
    ("module", "argv", "message"),
    [
        ("cpu_per_op", ["--nproc", "1"], "--nproc must be at least 2"),
        ("ddp", ["--steps", "0"], "every number must be at least 1"),
        ("objects", ["--late", "-1"], "--late 0"),
        ("overlap", ["--rounds", "0"], "--rounds must be at least 1"),
        ("priority", ["--nproc", "1"], "--nproc must be at least 2"),
        ("stream", ["--size", "3"], "--size 4"),
    ],
)
def test_mistakes_are_explained_and_nothing_is_started(module, argv, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "launch", lambda *args, **kwargs: pytest.fail("it was started"))
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{module}").main(argv)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"usage: python -m benchmarks.{module} ")
    assert message in told


def test_the_help_ends_with_what_the_module_says():
    text = command.new_parser("stream", "What it is.", "First line.\n\nThe rest,\n\nall of it.").format_help()
    assert "What it is.\n" in text
    assert text.endswith("\n\nThe rest,\n\nall of it.\n")
    assert "First line." not in text


def test_ctrl_c_ends_the_program_without_a_traceback(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "launch", interrupted)
    with pytest.raises(SystemExit) as ended:
        command.on_ranks(print, 2)
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "\ninterrupted\n")


def test_rounds_are_written_where_that_was_asked_for(tmp_path):
    command.save(None, {"rounds": [1]})
    command.save(tmp_path / "rounds.json", {"rounds": [1]})
    assert json.loads((tmp_path / "rounds.json").read_text()) == {"rounds": [1]}
