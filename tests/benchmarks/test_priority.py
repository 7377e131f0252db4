"""The benchmark of small operations behind bulk: its figures from its samples, and one small run."""

import json

from benchmarks.priority import POINTS, Sample, rows, table


def test_a_time_is_from_the_last_call_to_the_last_result():
    first = [Sample("barrier", 1.0, 1.5, 100), Sample("allreduce", 2.0, 2.25, 80)]
    second = [Sample("barrier", 1.25, 2.0, 90), Sample("allreduce", 2.0, 2.5, 70)]
    allreduce, barrier = rows([first, second])
    assert (barrier.kind, barrier.times, barrier.waited, barrier.behind) == ("barrier", [0.75], 0.75, 90)
    assert (allreduce.times, allreduce.waited, allreduce.behind) == ([0.5], 0.5, 70)


def test_the_table_has_median_worst_and_memory_per_peer():
    samples = [Sample("barrier", 0.0, time, 1 << 30) for time in (0.001, 0.002, 0.01)]
    *head, line = table(rows([samples]), 6 << 20, 2, 3)
    assert all(text.startswith("#") for text in head)
    assert line.split() == ["barrier", "3", "2.00", "10.00", "10.00", "1G", "3.0", "3"]
    assert table(rows([samples]), None, 2, 0)[-1].split()[-2:] == ["N/A", "0"]


def test_a_small_run_verifies_its_results(run, tmp_path):
    path = tmp_path / "samples.json"
    argv = ["--bulk", "64K", "--ops", "2", "--rounds", "2", "--every", "0.001", "--timeout", "60"]
    done = run("priority", *argv, "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    found = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [row[0] for row in found] == ["allreduce", "barrier"]
    assert sum(int(row[1]) for row in found) == 2 * POINTS
    assert all(row[-1] == "0" for row in found)
    assert [len(rank["samples"]) for rank in json.loads(path.read_text())] == [2 * POINTS] * 2
