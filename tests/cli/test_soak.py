"""`asynccoll soak`: its output, its exit code, replays, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys

import pytest

from asynccoll.cli import main
from asynccoll.testing.soak import run
from asynccoll.testing.soak.errors import Wrong
from asynccoll.testing.soak.rare import NAMES


def test_json_is_one_line_with_all_counts(capsys):
    assert main(["soak", "--seeds", "6", "--first", "3", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [found[name] for name in ("seeds", "first", "hangs", "wrong", "leaks", "stray")] == [
        6,
        3,
        0,
        0,
        0,
        0,
    ]
    assert list(found["rare"]) == list(NAMES)
    assert found["faults"]
    assert found["seeds_per_s"] > 0
    assert len(found["trace_hash"]) == 32


def test_the_same_seeds_give_the_same_hash_and_others_another(capsys):
    hashes = []
    for first in ("0", "0", "1"):
        assert main(["soak", "--seeds", "4", "--first", first, "--json"]) == 0
        hashes.append(json.loads(capsys.readouterr().out)["trace_hash"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_without_json_there_are_tables(capsys):
    assert main(["soak", "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert "\nrare\n" in out
    assert "trace_hash" in out
    assert f"  {NAMES[0]} " in out


def test_a_failing_seed_tells_how_to_replay_it_and_the_exit_code_is_1(capsys, monkeypatch):
    def wrong(plan, *, collect):
        raise Wrong("a sum is wrong")

    monkeypatch.setattr(run, "run_plan", wrong)
    assert main(["soak", "--seeds", "30", "--ranks", "3-4", "--faults", "crash", "--json"]) == 1
    seen = capsys.readouterr()
    assert json.loads(seen.out)["wrong"] == 30
    assert (
        "wrong, seed 0: Wrong: a sum is wrong\n    replay: asynccoll soak --seed 0 --ranks 3-4 --faults crash\n"
        in seen.err
    )
    assert seen.err.count("replay") == run.TOLD


def test_a_rare_branch_that_was_not_reached_fails_the_run_where_that_is_asked_for(capsys):
    assert main(["soak", "--seeds", "1", "--rare", "--json"]) == 1
    assert "never reached: " in capsys.readouterr().err


def test_one_seed_is_told_event_by_event(capsys):
    assert main(["soak", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 5: ")
    assert "rank 0 calls " in out
    assert "nothing is wrong; trace " in out


@pytest.mark.parametrize(
    "argv",
    [
        ["--seeds", "0"],
        ["--ranks", "1-3"],
        ["--ranks", "8-4"],
        ["--ranks", "x"],
        ["--faults", "fire"],
        ["--nonsense"],
    ],
)
def test_mistakes_return_2(argv, capsys):
    assert main(["soak", *argv]) == 2
    assert capsys.readouterr().err.startswith("usage: asynccoll soak")


def test_ctrl_c_ends_it_with_what_it_has():
    process = subprocess.Popen(
        [sys.executable, "-m", "asynccoll", "soak", "--seeds", "1000000", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert "Ctrl-C ends it early" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert 0 <= json.loads(out)["seeds"] < 1_000_000
    assert "stopping after this seed" in err
    assert "Traceback" not in err
