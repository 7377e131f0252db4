"""The benchmark of an operation behind a computation: its figures from its rounds, and one small run of each kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overlap import table

ROOT = Path(__file__).resolve().parents[2]


def test_a_ratio_is_of_the_slowest_ranks_of_a_round():
    first = [{"alone": 0.1, "both": 0.2, "wrong": 0}, {"alone": 0.2, "both": 0.2, "wrong": 1}]
    second = [{"alone": 0.2, "both": 0.1, "wrong": 0}, {"alone": 0.1, "both": 0.6, "wrong": 2}]
    _, alone, both, last = table([first, second])
    assert alone.split() == ["alone", "200.00"]
    assert both.split() == ["both", "400.00", "2.000", "1.000", "to", "3.000"]
    assert last == "# 2 rounds, 3 wrong elements"


@pytest.mark.parametrize("progress", ["thread", "inline"])
def test_a_small_run_verifies_its_results(tmp_path, progress):
    path = tmp_path / "rounds.json"
    argv = ["--size", "64K", "--compute", "2", "--rounds", "2", "--progress", progress, "--timeout", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overlap", *argv, "--json", str(path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("# 2 rounds, 0 wrong elements\n")
    of_ranks = json.loads(path.read_text())["rounds"]
    assert [len(rank) for rank in of_ranks] == [2, 2]


def test_wrong_arguments_are_a_mistake_on_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overlap", "--rounds", "0"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
