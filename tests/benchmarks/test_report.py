import json

import pytest

from benchmarks.harness import Measurement, Plan, Result
from benchmarks.report import Config, Report, environment, ratio_of, row_of, to_json


def result(*samples, wrong=0):
    return Result(
        20, Measurement(wrong, [2 * sample for sample in samples]), Measurement(wrong, list(samples))
    )


CONFIG = Config(
    "allreduce",
    2,
    ("asynccoll", "gloo"),
    (8, 1 << 20),
    "0(list)",
    "float",
    "sum",
    "auto",
    "uvloop",
    Plan(rounds=3),
)


def found(wrong=0):
    results = {
        "asynccoll": {8: result(1e-4, 3e-4, 2e-4), 1 << 20: result(1e-3, 1e-3, 1e-3, wrong=wrong)},
        "gloo": {8: result(1e-3, 1e-3, 1e-3), 1 << 20: result(1e-3, 1e-3, 1e-3)},
    }
    return Report(CONFIG, environment("uvloop"), [{"rank": 0}], results, {8: 2, 1 << 20: 262144})


def test_a_row_holds_medians_and_their_bandwidth():
    row = row_of(CONFIG, 8, 2, result(1e-4, 3e-4, 2e-4))
    assert row.in_place.seconds == 2e-4
    assert row.in_place.bandwidth.algorithm == pytest.approx(8 / 1e9 / 2e-4)
    assert row.out_of_place.seconds == 4e-4


def test_a_ratio_is_that_of_the_medians_with_the_rounds_beside_it():
    ratio = ratio_of(CONFIG, "gloo", 8, result(1e-4, 3e-4, 2e-4), result(1e-3, 1e-3, 1e-3))
    assert ratio.ratio == pytest.approx(0.2)
    assert ratio.rounds == pytest.approx((0.1, 0.3, 0.2))
    assert (ratio.target, ratio.verdict) == (0.35, "ok")


def test_a_ratio_above_the_target_is_over():
    assert ratio_of(CONFIG, "gloo", 1 << 20, result(1e-3), result(1e-3)).verdict == "over"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "int32"},
        {"op": "max"},
        {"algorithm": "ring"},
        {"loop": "asyncio"},
        {"nproc": 3},
        {"plan": Plan(cpu=True)},
    ],
)
def test_targets_are_for_the_runs_that_they_were_set_for(other):
    ratio = ratio_of(CONFIG._replace(**other), "gloo", 8, result(1e-3), result(1e-3))
    assert (ratio.target, ratio.verdict) == (None, "")


def test_json_has_the_keys_of_nccl_tests():
    report = json.loads(json.dumps(to_json(found(), "start", "end")))
    assert {"version", "start_time", "args", "env", "config", "results", "out_of_bounds"} <= report.keys()
    assert {"minimum_bytes", "maximum_bytes", "warmup_iters", "iterations", "devices"} <= report[
        "config"
    ].keys()
    entry = report["results"][0]
    assert {"size", "count", "type", "redop", "root", "out_of_place", "in_place"} <= entry.keys()
    assert entry["in_place"]["time"] == pytest.approx(200)
    assert entry["in_place"]["rounds_us"] == pytest.approx([100, 300, 200])
    assert {"alg_bw", "bus_bw", "nwrong"} <= entry["in_place"].keys()
    assert report["out_of_bounds"] == {"count": 0, "okay": True}
    assert report["average_bus_bandwidth"]["bandwidth"] > 0


def test_json_has_both_peers_and_their_ratios():
    report = to_json(found(), "start", "end")
    assert [entry["size"] for entry in report["peers"]["gloo"]["results"]] == [8, 1 << 20]
    assert [(entry["size"], entry["verdict"]) for entry in report["ratios"]] == [(8, "ok"), (1 << 20, "over")]
    assert report["ratios"][0]["ratio"] == pytest.approx(0.2)


def test_wrong_elements_are_counted_where_they_were_found():
    report = to_json(found(wrong=5), "start", "end")
    assert report["out_of_bounds"] == {"count": 10, "okay": False}
    assert report["peers"]["gloo"]["out_of_bounds"]["okay"] is True


def test_the_environment_is_told_without_secrets(monkeypatch):
    monkeypatch.setenv("ASYNCCOLL_SECRET", "hush-hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    machine = environment("asyncio")
    assert machine["loop"] == "asyncio"
    assert machine["variables"]["OMP_NUM_THREADS"] == "1"
    assert {"python", "packages", "cpu_count", "kernel"} <= machine.keys()
    assert {"numpy", "torch", "asynccoll"} <= machine["packages"].keys()
    assert "hush-hush" not in json.dumps(machine)
