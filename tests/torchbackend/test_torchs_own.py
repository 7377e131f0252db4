"""Some of torch's own tests of a backend pass on this one; all of them in the long form, and in the committed result."""

import json
from pathlib import Path

import pytest

from . import torchs_own

pytest.importorskip("torch")
pytest.importorskip("expecttest")  # which torch.testing._internal needs

pytestmark = pytest.mark.torch

TELLING = (
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_sum_complex",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_get_future",
    "test_isend_torch_profiler",
    "test_scatter_object_list",
    "test_send_recv_any_source_autograd_profiler",
)


def passed_or_skipped(outcomes):
    wrong = {
        outcome.name: outcome.reason
        for outcome in outcomes
        if outcome.status == "fail" and outcome.name.split(".")[1] not in torchs_own.ACCEPTED
    }
    assert not wrong


@pytest.mark.timeout(110)
def test_the_most_telling_of_torchs_tests_pass():
    outcomes = torchs_own.run_world("asynccoll", 3, TELLING, deadline=30)
    assert {outcome.name.split(".")[1]: outcome.status for outcome in outcomes} == dict.fromkeys(
        TELLING, "pass"
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 3, 4, torchs_own.RPC])
def test_all_of_torchs_tests_pass_or_have_a_reason(world):
    passed_or_skipped(torchs_own.run_world("asynccoll", world))


def test_a_test_that_hangs_is_ended_and_fails():
    (outcome,) = torchs_own.run_world("asynccoll", 2, ["test_barrier_full_group"], deadline=0)
    assert outcome.status == "fail"
    assert "timed out" in outcome.reason


def test_the_committed_result_has_a_reason_for_each_test_that_does_not_pass():
    result = json.loads((Path(__file__).parent / "results" / "torchs_own.json").read_text())
    for run in result["runs"]:
        if run["backend"] == "asynccoll":
            assert {name.split(".")[1] for name in run["fail"]} <= torchs_own.ACCEPTED.keys()
            assert run["summary"]["pass"] == len(run["pass"])


def test_a_reason_is_the_first_error_of_a_rank():
    text = """Traceback (most recent call last):
  File "common_distributed.py", line 1213, in _check_return_codes
    raise RuntimeError(error)
RuntimeError: Process 1 exited with error code 10 and exception:
Traceback (most recent call last):
  File "distributed_test.py", line 1, in test
    raise asynccoll.PeerLost([0])
asynccoll.errors.PeerLost: rank 1: lost rank 0

To execute this test, run the following from the base repo dir:
"""
    assert torchs_own._in_few_words(text) == "asynccoll.errors.PeerLost: rank 1: lost rank 0"
