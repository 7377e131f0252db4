"""The benchmark of an operation behind a computation: its figures from its rounds, and one small run of each kind."""

import json

import pytest

from benchmarks import overlap


def test_a_ratio_is_of_the_slowest_ranks_of_a_round():
    first = [{"alone": 0.1, "both": 0.2, "wrong": 0}, {"alone": 0.2, "both": 0.2, "wrong": 1}]
    second = [{"alone": 0.2, "both": 0.1, "wrong": 0}, {"alone": 0.1, "both": 0.6, "wrong": 2}]
    _, alone, both, last = overlap.table([first, second])
    assert alone.split() == ["alone", "200.00"]
    assert both.split() == ["both", "400.00", "2.000", "1.000", "to", "3.000"]
    assert last == "# 2 rounds, 3 wrong elements"


@pytest.mark.parametrize("progress", ["thread", "inline"])
def test_a_small_run_verifies_its_results(run, tmp_path, progress):
    path = tmp_path / "rounds.json"
    argv = ["--size", "64K", "--compute", "2", "--rounds", "2", "--progress", progress, "--timeout", "60"]
    done = run("overlap", *argv, "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("# 2 rounds, 0 wrong elements\n")
    of_ranks = json.loads(path.read_text())["rounds"]
    assert [len(rank) for rank in of_ranks] == [2, 2]


def test_a_wrong_element_is_an_exit_code_of_1(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # or the program would set it, for good
    for wrong in (0, 2):
        ranks = [[{"alone": 1.0, "both": 1.0, "wrong": wrong}]]
        monkeypatch.setattr(overlap.command, "launch", lambda *args, ranks=ranks, **kwargs: ranks)
        assert overlap.main([]) == (1 if wrong else 0)
