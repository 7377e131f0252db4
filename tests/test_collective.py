"""adaptdl.collective's rules S1 to S17, each with a test of its name, by real processes; what they do is in collective_ranks.py.

Deaths are in processes/test_collective_processes.py.
"""

import collections
import os
import socket

import collective_ranks as ranks
import pytest

from asynccoll import collective
from asynccoll.errors import (
    AlreadyInitialized,
    AuthenticationError,
    CollectiveCancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    NotInitialized,
    RemoteError,
    RendezvousError,
)
from asynccoll.launch import launch

LIMIT = 90
"""Seconds after which every process of a test is killed: none of them takes ten."""

SIZES = (1, 2, 3, 5, 8)


@pytest.fixture(scope="module", params=SIZES, ids=lambda n: f"n={n}")
def world(request, tmp_path_factory):
    """What every replica of one world found out about all rules, in rank order."""
    folder = str(tmp_path_factory.mktemp("world"))
    return launch(ranks.rules, request.param, folder, timeout=LIMIT)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Whatever runs this suite is not what these tests are about."""
    for name in list(os.environ):
        if name.startswith(("ADAPTDL_", "ASYNCCOLL_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def port():
    """A port for rank 0 alone: held by a socket that does not listen, with SO_REUSEADDR as rank 0 has it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def all_of(world, rule):
    return [facts[rule] for facts in world]


class TestTheModule:
    def test_s1_before_initialize_and_after_teardown_every_function_says_so(self, world):
        for when in ("before", "after"):
            for errors in all_of(world, when):
                assert [error["text"] for error in errors] == [ranks.NOT_YET] * 4
                assert all(issubclass(error["type"], RuntimeError) for error in errors)
                assert {error["type"] for error in errors} == {NotInitialized}

    def test_s1_a_second_initialize_says_so_and_changes_nothing(self, world):
        for error in all_of(world, "again"):
            assert (error["type"], error["text"]) == (AlreadyInitialized, ranks.ALREADY)
            assert issubclass(error["type"], RuntimeError)

    def test_s2_initialize_returns_once_all_have_called_it(self, world):
        begun, ended = zip(*all_of(world, "initialize"), strict=True)
        assert min(ended) >= max(begun)

    def test_s3_teardown_returns_once_all_have_called_it_and_initialize_may_follow(self, world):
        begun, ended = zip(*all_of(world, "teardown"), strict=True)
        assert min(ended) >= max(begun)
        assert all_of(world, "once more") == [sum(range(len(world)))] * len(world)

    def test_s3_teardown_against_another_call_is_a_mismatch_and_the_mesh_stays(self):
        for error, total in launch(ranks.teardown_against_a_call, 2, timeout=LIMIT):
            assert (error["type"], error["field"]) == (CollectiveMismatch, "verb")
            assert error["values"] == {0: "barrier", 1: "allreduce"}
            assert total == 2

    def test_it_leaves_nothing_behind_20_times(self, port):
        for first, last in launch(ranks.reinitialise, 2, 20, port, timeout=LIMIT):
            assert first == last
            assert last[1:] == (1, 0)

    def test_a_fork_is_not_initialised_and_may_be(self):
        assert launch(ranks.in_a_fork, 1, timeout=LIMIT) == [(0, 8)]


class TestValues:
    def test_s4_it_is_a_left_fold_in_rank_order(self, world):
        expected = "0"
        for rank in range(1, len(world)):
            expected = f"({expected}{rank})"
        assert all_of(world, "left_fold") == [expected] * len(world)

    def test_s4_200_functions_without_laws_give_what_reduce_gives(self, world):
        expected = ranks.expected_folds(len(world))
        assert len(set(expected)) > ranks.FOLDS * 0.9
        assert all_of(world, "random_folds") == [expected] * len(world)

    def test_s5_only_rank_0s_function_runs_and_none_is_pickled(self, world):
        results, calls = zip(*all_of(world, "only_rank_0s_function"), strict=True)
        assert set(results) == {sum(range(len(world)))}
        assert calls == (len(world) - 1,) + (0,) * (len(world) - 1)

    def test_s5_what_the_others_pass_need_not_be_a_function(self, world):
        assert set(all_of(world, "what_the_others_give_is_no_function")) == {len(world) - 1}

    def test_s6_by_default_values_are_added_up_and_the_callers_stay_as_they_were(self, world):
        n = len(world)
        total = sum(range(1, n + 1))
        counted = collections.Counter(everywhere=n, **{f"only {rank}": 1 for rank in range(n)})
        joined = list(range(n))
        expected = [
            total,
            0.5 * n,
            joined,
            tuple(joined),
            "".join(map(str, joined)),
            counted,
            [float(total)] * 3,
        ]
        for facts in all_of(world, "defaults"):
            assert facts["results"] == expected
            assert facts["untouched"]

    def test_s6_what_has_no_plus_is_a_type_error_of_rank_0(self, world):
        for _, error in all_of(world, "failing_function"):
            if len(world) == 1:
                assert error is None
            else:
                assert (error["type"], error["origin"], error["type_name"]) == (RemoteError, 0, "TypeError")

    def test_s6_arrays_are_folded_like_any_object_and_in_place_on_a_copy(self, world):
        folded = 0.0
        for rank in range(1, len(world)):
            folded = folded * 10 + rank
        for rank, (result, mine, kind) in enumerate(all_of(world, "arrays_are_folded_too")):
            assert (result, mine, kind) == ([folded] * 2, [float(rank)] * 2, "ndarray")

    def test_s6_arrays_may_differ_in_shape_and_be_of_any_dtype(self, world):
        n = len(world)
        joined = [number for rank in range(n) for number in range(rank + 1)]
        assert all_of(world, "shapes_may_differ") == [(joined, [f"r{rank}" for rank in range(n)])] * n

    def test_s7_every_replica_has_a_copy_of_its_own(self, world):
        for rank, (value, first, sent, second, third) in enumerate(all_of(world, "own_copies")):
            assert value == {"list": [rank]}
            assert first == {"list": [0, f"spoilt by {rank}"]}
            assert sent == ({"list": ["rank 0's"]} if rank == 0 else None)
            assert second == {"list": ["rank 0's", f"spoilt by {rank}"]}
            assert third == {"list": ["rank 0's"]}

    def test_s7_alone_the_result_is_a_copy_and_no_function_is_called(self, world):
        for facts in all_of(world, "defaults"):
            assert all(facts["copies"])
        if len(world) == 1:
            assert all_of(world, "only_rank_0s_function") == [(0, 0)]

    def test_s8_broadcast_gives_rank_0s_value_and_ignores_the_others(self, world):
        assert all_of(world, "broadcasts") == [
            {
                "rank is 0": True,
                "tuple": (32, 4),
                "none": None,
                "array": ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], True),
                "texts": ["a", "bc"],
                "other shapes": [0.0],
            }
        ] * len(world)

    @pytest.mark.torch
    def test_tensors_are_folded_like_any_object(self):
        pytest.importorskip("torch")
        for rank, found in enumerate(launch(ranks.tensors, 2, timeout=LIMIT)):
            expected = [[float(rank)] * 3, [1.0] * 3, [1.0] * 3, [1.0] * 3, [0, 1]]
            assert found == [("Tensor", values) for values in expected]


class TestOrder:
    def test_s9_calls_are_matched_in_order_and_results_taken_in_any(self, world):
        n = len(world)
        for facts in all_of(world, "call_order"):
            assert facts["results"] == [n - 1, list(range(n)), set(range(n))]
            assert facts["same"] == [True] * 3
            assert (facts["sent"], facts["blocking"], facts["done"]) == (("from", 0), sum(range(n)), True)

    def test_s9_an_array_stays_outstanding_while_other_calls_come_and_go(self, world):
        n = len(world)
        sent = [(number, 0) for number in range(3)]
        counted = collections.Counter(a=n, b=sum(range(n)))
        expected = (sent, counted, [float(sum(range(1, n + 1)))] * 1000)
        assert all_of(world, "one_left_outstanding") == [expected] * n

    def test_s9_the_next_operation_may_start_when_the_last_is_taken(self, world):
        n = len(world)
        expected = [sum(((step, rank) for rank in range(n)), ()) for step in range(20)]
        assert all_of(world, "double_buffered") == [expected] * n

    def test_s10_a_replica_that_does_not_call_is_named_at_the_time_limit(self, tmp_path):
        for error, again in launch(ranks.with_limit, 2, str(tmp_path), timeout=LIMIT):
            assert (error["type"], error["missing"]) == (CollectiveTimeout, {1})
            assert again == 1

    def test_cancel_ends_the_operation_everywhere(self, world):
        if len(world) > 1:
            *others, last = all_of(world, "cancelled")
            assert last == (True, True, True)
            assert [(error["type"], error["origin"]) for error in others] == [
                (CollectiveCancelled, len(others))
            ] * len(others)


class TestFailures:
    def test_s12_a_function_that_fails_is_told_to_all_with_its_traceback(self, world):
        for rank, (error, _) in enumerate(all_of(world, "failing_function")):
            if len(world) == 1:
                assert error is None
                continue
            assert (error["type"], error["origin"], error["type_name"]) == (
                RemoteError,
                0,
                "ZeroDivisionError",
            )
            assert "return a / (b - b)" in error["remote_traceback"], f"rank {rank}"

    def test_a_call_inside_a_reduce_function_is_refused(self, world):
        for refused in all_of(world, "nested"):
            if len(world) == 1:
                assert refused is None  # nothing is reduced
                continue
            assert [error["type"] for error in refused] == [RuntimeError] * 3
            assert all("would wait for itself" in error["text"] for error in refused)

    def test_s12_a_value_that_does_not_unpickle_is_told_to_all_ranks(self, world):
        for error in (facts["on arrival"] for facts in all_of(world, "unpicklable")):
            assert "on arrival" in error["text"]
            assert (error["type"], error["origin"], error["type_name"]) == (RemoteError, 0, "ArithmeticError")

    def test_s14_a_value_that_does_not_pickle_is_a_type_error_there_and_told_to_the_others(self, world):
        n = len(world)
        for rank, facts in enumerate(all_of(world, "unpicklable")):
            for what, culprit in (("value", n - 1), ("sent", 0), ("result", 0)):
                error = facts[what]
                if what == "result" and n == 1:
                    assert error is None  # there was nothing to reduce
                elif rank == culprit:
                    assert error["type"] is TypeError
                    assert "lock" in error["text"]
                else:
                    assert (error["type"], error["origin"], error["type_name"]) == (
                        RemoteError,
                        culprit,
                        "TypeError",
                    )

    def test_s14_20_large_operations_may_be_outstanding(self, world):
        assert all_of(world, "many_large") == [[True] * 20] * len(world)

    def test_s14_nobody_waits_inside_allreduce_async_for_a_late_rank_0(self, world):
        for rank, (done, right) in enumerate(all_of(world, "others_do_not_wait_for_rank_0")):
            assert right == [True, True]
            if rank > 0:
                assert done == [False, False]

    def test_s15_calls_that_differ_are_a_mismatch_everywhere(self, world):
        n = len(world)
        verbs = {rank: "allreduce" for rank in range(n - 1)} | {n - 1: "broadcast"}
        for error, after in all_of(world, "mismatched"):
            assert after == n
            if n == 1:
                assert error is None
            else:
                assert (error["type"], error["field"]) == (CollectiveMismatch, "verb")
                assert error["values"] == verbs
                assert (
                    "collective_ranks.py" in error["text"]
                )  # where the calls are, not where this package is

    def test_s16_a_replica_without_the_secret_is_refused_and_the_others_wait_on(self):
        (none, total), (refused, other) = launch(ranks.with_another_secret, 2, timeout=LIMIT)
        assert none is None
        assert refused["type"] is AuthenticationError
        assert total == other == 1

    def test_s17_each_value_crosses_the_wire_once_and_the_result_once(self, world):
        n = len(world)
        sent = sum(all_of(world, "bytes_of_one_array"))
        one = 8 << 17
        assert 2 * (n - 1) * one <= sent <= 2 * (n - 1) * (one + 4096)


class TestEnvironment:
    def test_nothing_given_is_a_world_of_one(self):
        assert (collective._placement(None, None, None, None).size) == 1

    def test_s11_alone_it_opens_no_connection_and_needs_no_port(self, monkeypatch):
        monkeypatch.setenv("ADAPTDL_MASTER_PORT", "0")
        monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "1")
        before = ranks.open_sockets()
        collective.initialize()
        try:
            assert ranks.open_sockets() == before
            assert collective.allreduce([1]) == [1]
        finally:
            collective.teardown()

    def test_s11_rank_0_may_come_last(self, tmp_path, port):
        assert launch(ranks.rank_0_comes_last, 3, str(tmp_path), port, timeout=LIMIT) == [[0, 1, 2]] * 3

    def test_s11_port_0_for_several_replicas_is_refused_at_once(self, monkeypatch):
        monkeypatch.setenv("ADAPTDL_MASTER_PORT", "0")
        with pytest.raises(ValueError, match="ADAPTDL_MASTER_PORT='0'"):
            collective.initialize(num_replicas=2)
        with pytest.raises(ValueError, match="master_port=0"):
            collective.initialize("10.0.0.1", 0, 1, 2)
        with pytest.raises(ValueError, match="set ADAPTDL_MASTER_PORT"):
            monkeypatch.delenv("ADAPTDL_MASTER_PORT")
            collective.initialize("10.0.0.1", None, 1, 2)

    def test_the_variables_are_read_at_the_call_and_arguments_win(self, monkeypatch):
        monkeypatch.setenv("ADAPTDL_MASTER_ADDR", "node-0")
        monkeypatch.setenv("ADAPTDL_MASTER_PORT", " 29500 ")
        monkeypatch.setenv("ADAPTDL_REPLICA_RANK", "2")
        monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "4")
        monkeypatch.setenv("ADAPTDL_NUM_RESTARTS", "7")
        found = collective._placement(None, None, None, None)
        assert (found.host, found.port, found.rank, found.size) == ("node-0", 29500, 2, 4)
        assert found.generation == 7
        found = collective._placement("::1", 1234, 0, 3)
        assert (found.host, found.port, found.rank, found.size) == ("::1", 1234, 0, 3)

    @pytest.mark.parametrize(
        "name", ["MASTER_PORT", "REPLICA_RANK", "NUM_REPLICAS", "NUM_RESTARTS"], ids=str.lower
    )
    @pytest.mark.parametrize("text", ["three", "", "1.5"])
    def test_a_number_that_is_none_is_named_with_its_value(self, monkeypatch, name, text):
        monkeypatch.setenv(f"ADAPTDL_{name}", text)
        with pytest.raises(ValueError, match=f"^ADAPTDL_{name}='{text}' is "):
            collective.initialize()

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ({"replica_rank": "x"}, "replica_rank='x' is not an integer"),
            ({"replica_rank": -1, "num_replicas": 2}, "replica_rank=-1 is negative"),
            ({"replica_rank": 2, "num_replicas": 2}, "replica_rank=2 is outside of num_replicas=2"),
            ({"replica_rank": 1}, "replica_rank=1 is outside of a world of 1"),
            ({"num_replicas": 0}, "num_replicas=0: there is at least one replica"),
            ({"master_port": 65536}, "master_port=65536 is larger"),
            ({"master_addr": "a b", "master_port": 1, "num_replicas": 2}, "master_addr='a b' is not a host"),
        ],
    )
    def test_an_argument_that_cannot_be_is_named_with_its_value(self, arguments, named):
        with pytest.raises(ValueError) as raised:
            collective.initialize(**arguments)
        assert str(raised.value).startswith(named)
        with pytest.raises(RuntimeError, match=ranks.NOT_YET):
            collective.allreduce(1)

    @pytest.mark.parametrize(
        ("given", "meant"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), (None, "127.0.0.1")]
    )
    def test_s16_every_interface_means_this_host_alone(self, given, meant):
        assert collective._placement(given, 29500, 0, 2).host == meant

    def test_s16_beyond_this_host_there_must_be_a_secret(self):
        with pytest.raises(RendezvousError, match="ASYNCCOLL_SECRET"):
            collective.initialize("192.0.2.1", 29500, 1, 2)

    def test_another_launcher_says_what_adaptdl_does_not(self, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        found = collective._placement("node-0", 29500, None, None)
        assert (found.host, found.port, found.rank, found.size) == ("node-0", 29500, 1, 3)
        assert collective._placement("node-0", 29500, 0, None).size == 3
        assert collective._placement("node-0", 29500, None, 2).rank == 1
        monkeypatch.setenv("ASYNCCOLL_MASTER_ADDR", "ours")
        monkeypatch.setenv("ASYNCCOLL_MASTER_PORT", "1234")
        assert collective._placement(None, None, None, None).host == "ours"
        monkeypatch.setenv("ADAPTDL_REPLICA_RANK", "0")
        monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "2")
        found = collective._placement(None, None, None, None)
        assert (found.host, found.rank, found.size) == ("ours", 0, 2)

    def test_two_launchers_that_contradict_each_other_are_refused(self, monkeypatch):
        monkeypatch.setenv("ADAPTDL_REPLICA_RANK", "0")
        monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "1")
        monkeypatch.setenv("ASYNCCOLL_RANK", "0")
        monkeypatch.setenv("ASYNCCOLL_WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=r"ADAPTDL_NUM_REPLICAS='1' contradict .*ASYNCCOLL_WORLD_SIZE=2"):
            collective.initialize()
        assert collective._placement(None, 29500, 1, 2).rank == 1
        monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "2")
        assert collective._placement(None, 29500, None, None).rank == 0

    def test_an_address_alone_leaves_it_alone(self, monkeypatch):
        assert collective._placement("node-0", 29500, None, None).size == 1
        monkeypatch.setenv("ASYNCCOLL_RANK", "0")
        monkeypatch.setenv("ASYNCCOLL_WORLD_SIZE", "1")
        monkeypatch.setenv("ADAPTDL_MASTER_ADDR", "node-0")
        assert collective._placement(None, None, None, None).size == 1

    def test_several_processes_of_a_launcher_that_is_not_read_are_not_each_alone(self, monkeypatch):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="Open MPI"):
            collective.initialize("node-0", 29500)

    def test_replicas_of_an_earlier_restart_are_told_apart(self):
        (none, total), (early, other) = launch(ranks.of_restart, 2, 3, timeout=LIMIT)
        assert none is None
        assert issubclass(early["type"], RendezvousError)
        assert "generation" in early["text"]
        assert total == other == 1
