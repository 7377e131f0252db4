"""Whole runs, as small as they get."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cli, cpu_per_op, import_time, objects, peers, ranks, stream

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120  # seconds for a run to end after Ctrl-C

GLOO = pytest.param(
    "gloo",
    marks=[
        pytest.mark.torch,
        pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    ],
)


@pytest.mark.parametrize("peer", ["none", GLOO])
@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_run_prints_a_table_per_library_and_writes_a_report(run, peer, loop, tmp_path):
    path = tmp_path / "report.json"
    options = ["--nproc", "2", "--peer", peer, "--loop", loop, "--sizes", "8,1K", "--json", str(path)]
    done = run("allreduce", *options, "-n", "3", "--rounds", "2", "--timeout", "100")
    assert done.stderr == ""
    assert done.returncode == 0
    tables = 1 if peer == "none" else 2
    lines = done.stdout.splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:5] for row in rows] == tables * [
        ["8", "2", "float", "sum", "-1"],
        ["1024", "256", "float", "sum", "-1"],
    ]
    assert all(len(row) == 13 and row[8] == row[12] == "0" for row in rows)
    assert lines.count("# Out of bounds values : 0 OK") == tables
    assert sum(line.split()[1:2] in (["8"], ["1024"]) for line in lines) == 2 * (tables - 1)  # ratios
    assert lines[-1] == "# Collective test concluded: all_reduce_perf"

    report = json.loads(path.read_text())
    assert [entry["size"] for entry in report["results"]] == [8, 1024]
    assert [len(entry["in_place"]["rounds_us"]) for entry in report["results"]] == [2, 2]
    assert list(report["peers"]) == ([] if peer == "none" else ["gloo"])
    assert report["environment"]["loop"] == loop
    assert report["args"] == [*options, "-n", "3", "--rounds", "2", "--timeout", "100"]


@pytest.mark.torch
@pytest.mark.parametrize("op", ["prod", "max"])
def test_gloo_agrees_in_bfloat16(run, op):
    pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    done = run("allreduce", "-d", "bfloat16", "-o", op, "--sizes", "1K", "-n", "1", "--rounds", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("# Out of bounds values : 0 OK") == 2


def test_the_time_limit_ends_a_run(run):
    done = run("allreduce", "--peer", "none", "--rounds", "1000000", "--sizes", "8", "--timeout", "3")
    assert done.returncode == 1
    assert "still running after the limit of 3 s" in done.stderr
    assert "Traceback" not in done.stderr


def refused(capsys, *argv):
    """What the command line says about ``argv``, which it must not accept."""
    with pytest.raises(SystemExit) as caught:
        cli.main("allreduce", argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_without_torch_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    message = refused(capsys, "--peer", "gloo")
    assert "pip install torch" in message
    assert "--peer none" in message


def test_without_uvloop_it_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert "--loop asyncio" in refused(capsys, "--peer", "none")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc", "0"], "at least 1"),
        (["-b", "2x"], "not a size"),
        (["-b", "1M", "-e", "8"], "larger than"),
        (["-i", "0"], "never gets"),
        (["-f", "1"], "at least 2"),
        (["--sizes", "2"], "smallest size is 4"),
        (["-d", "complex"], "invalid choice"),
        (["-o", "median"], "invalid choice"),
        (["--algorithm", "magic"], "invalid choice"),
        (["--peer", "mpi"], "invalid choice"),
        (["--rounds", "0"], "at least 1"),
        (["--timeout", "-1"], "not a positive number"),
        (["-d", "half", "--nproc", "1000"], "not exact"),
        (["--json", "/no/such/place/report.json"], "no directory"),
    ],
)
def test_mistakes_are_explained_and_nothing_is_started(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(cli, "launch", lambda *args, **kwargs: pytest.fail("it was started"))
    assert message in refused(capsys, "--peer", "none", *argv)


def test_gloo_is_not_asked_for_what_it_does_not_have():
    pytest.importorskip("torch")
    assert "no sum of uint32" in peers.missing("gloo", "uint32", "sum")
    assert "no avg of int64" in peers.missing("gloo", "int64", "avg")
    assert peers.missing("gloo", "float", "avg") is None


def test_a_wrong_result_is_an_exit_code_of_1(monkeypatch):
    monkeypatch.setattr(cli, "launch", lambda *args, **kwargs: ["a report"])
    monkeypatch.setattr(cli, "wrong_elements", lambda report: 3)
    assert cli.main("allreduce", ["--peer", "none"]) == 1
    monkeypatch.setattr(cli, "wrong_elements", lambda report: 0)
    assert cli.main("allreduce", ["--peer", "none"]) == 0


def test_cpu_per_op_measures_each_mode(run):
    done = run("cpu_per_op", "--rounds", "2", "-n", "20", "--timeout", "100")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == list(cpu_per_op.MODES)
    assert all(float(row[1]) > 0 for row in rows)


def test_objects_tells_each_figure_and_finds_nothing_wrong(run):
    short = ["--rounds", "2", "-n", "3", "--late", "0", "--broadcast", "256K", "--array", "64K"]
    done = run("objects", "--nproc", "2", "--figures", "broadcast", "call", *short, "--timeout", "100")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [row[:2] for row in rows] == [["broadcast", "2"]] + [["call", "2"]] * 3
    assert {row[-1] for row in rows} <= {"ok", "over"}
    assert done.stdout.endswith("# Wrong results: 0\n")


def test_objects_counts_what_is_wrong(monkeypatch, capsys):
    rows = objects.Rows({"broadcast": [(2.0, 1.0), (1.0, 1.0), (1.2, 1.0)]}, [], (0.0, 0.0), 1)
    monkeypatch.setattr(objects.command, "launch", lambda *args, **kwargs: [rows, rows])
    assert objects.main(["--nproc", "2", "--figures", "broadcast"]) == 1
    out = capsys.readouterr().out
    assert "1.20" in out
    assert "Wrong results: 2" in out


def test_stream_tells_when_the_parts_come_and_finds_every_element_right(run):
    done = run("stream", "--nproc", "2", "--size", "4M", "--rounds", "2", "--timeout", "100")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if not line.startswith("#")}
    assert list(rows) == ["allreduce", "stream", "first", "half"]
    assert 0 < float(rows["first"][1]) <= float(rows["half"][1]) <= float(rows["stream"][1])
    assert done.stdout.splitlines()[-1].endswith(" 0 wrong elements")


def test_a_wrong_part_is_an_exit_code_of_1(monkeypatch):
    row = {"allreduce": 1.0, "stream": 1.0, "first": 0.1, "half": 0.5, "parts": 3, "wrong": 0}
    for wrong in (0, 2):
        monkeypatch.setattr(
            stream.command, "launch", lambda *args, wrong=wrong, **kwargs: [[{**row, "wrong": wrong}]]
        )
        assert stream.main([]) == (1 if wrong else 0)


def test_import_time_tells_what_asynccoll_loads():
    run_ = import_time.one_run()
    assert "asynccoll" in run_.modules
    assert "numpy" not in run_.modules
    assert all(milliseconds > 0 for milliseconds in (*run_.base_ms, *run_.added_ms))
    assert import_time.unwelcome(["asynccoll", "torch.nn", "richly"]) == ["torch.nn"]


def test_ctrl_c_ends_a_run_without_a_traceback():
    command = [
        sys.executable,
        "-m",
        "benchmarks.allreduce",
        "--peer",
        "none",
        "--sizes",
        "8",
        "--rounds",
        "1000000",
    ]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    try:
        assert process.stdout.readline().startswith("# asynccoll")  # the ranks are at work
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors == "\ninterrupted\n"


def test_the_status_line_is_for_terminals_alone(capsys, monkeypatch):
    with ranks._Screen(speaks=True) as screen:
        screen.status("8 (1 of 2): gloo round 1 of 5")
        screen.lines("a row")
    assert capsys.readouterr() == ("a row\n", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ranks._Screen(speaks=True) as screen:
        screen.status("8 (1 of 2): gloo round 1 of 5")
        screen.lines("a row")
    output, status = capsys.readouterr()
    assert output == "a row\n"
    assert status == "\r\x1b[K8 (1 of 2): gloo round 1 of 5\r\x1b[K\r\x1b[K"
    with ranks._Screen(speaks=False) as screen:
        screen.status("nothing")
        screen.lines("nothing")
    assert capsys.readouterr() == ("", "")
