"""The checker must refuse what is broken: by hand, one kind at a time, and then every single breakage of every step."""

import pickle

import pytest

from asynccoll.algorithms import dissemination, doubling, ring, tree
from asynccoll.algorithms.check import ScheduleError, prove
from asynccoll.algorithms.steps import Finish, Recv, Send


def refusal(schedules, count, **goal):
    """The error that ``prove`` raises for these lists of steps."""
    with pytest.raises(ScheduleError) as caught:
        prove(lambda rank: schedules[rank], len(schedules), count, **goal)
    return caught.value


def doubled(size, count=2):
    return [list(doubling.allreduce(rank, size, count, count)) for rank in range(size)]


def treed(size, count=2):
    return [list(tree.allreduce(rank, size, count, count)) for rank in range(size)]


def test_a_sound_schedule_passes():
    schedules = treed(4)
    prove(lambda rank: schedules[rank], 4, 2)


def test_a_dropped_recv_leaves_a_message_unread():
    schedules = [
        [Recv(1, 0, 1, "higher"), Finish(0, 1), Send(1, 0, 1, final=True)],
        [Send(0, 0, 1)],
    ]
    error = refusal(schedules, 1)
    assert (error.rank, error.step) == (0, 2)
    assert "never read" in error.reason


def test_a_dropped_send_leaves_its_receiver_waiting():
    schedules = treed(4)
    del schedules[3][0]
    error = refusal(schedules, 2)
    assert "waits for ever" in error.reason


def test_a_dropped_finish_leaves_no_result_to_send():
    schedules = treed(2)
    schedules[0].remove(Finish(0, 2))
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (0, 1)
    assert "wants results" in error.reason


def test_a_missing_result_is_named_at_the_end():
    error = refusal([[]], 3)
    assert (error.rank, error.step) == (0, 0)
    assert "no result in element 0" in error.reason


def test_a_swapped_operand_is_out_of_order():
    schedules = treed(3)
    assert schedules[0][0] == Recv(1, 0, 2, "higher")
    schedules[0][0] = Recv(1, 0, 2, "lower")
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (0, 0)
    assert "joins (1,) and (0,)" in error.reason


def test_a_reduction_that_starts_at_the_wrong_rank_is_not_finished():
    schedules = treed(2)
    schedules[0][0] = Recv(1, 0, 2, "lower")
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (0, 1)
    assert "(1, 0)" in error.reason
    # It is what a ring does, though, where the chunk says so.
    prove(lambda rank: schedules[rank], 2, 2, first=lambda element: 1)


def test_a_contribution_that_comes_twice_is_refused():
    schedules = [
        [Recv(1, 0, 1, "higher"), Recv(1, 0, 1, "higher"), Finish(0, 1)],
        [Send(0, 0, 1), Send(0, 0, 1)],
    ]
    error = refusal(schedules, 1, wanted=lambda rank, element: rank == 0)
    assert (error.rank, error.step) == (0, 1)
    assert "joins (0, 1) and (1,)" in error.reason


def test_a_whole_round_too_many_is_refused():
    # Cyclically (0, 1) does follow (0, 1), so only `Finish` can tell.
    schedules = [
        [Send(1, 0, 1, snapshot=True), Recv(1, 0, 1, "higher"), Recv(1, 0, 1, "higher"), Finish(0, 1)],
        [Send(0, 0, 1, snapshot=True), Recv(0, 0, 1, "lower"), Send(0, 0, 1)],
    ]
    error = refusal(schedules, 1, wanted=lambda rank, element: rank == 0)
    assert (error.rank, error.step) == (0, 3)
    assert "of (0, 1, 0, 1)" in error.reason


def test_a_contribution_that_is_missing_is_refused():
    error = refusal([[Finish(0, 1)], []], 1, wanted=lambda rank, element: rank == 0)
    assert (error.rank, error.step) == (0, 0)
    assert "of (0,)" in error.reason


def test_a_wrong_peer_is_refused():
    schedules = treed(4)
    assert schedules[3][0] == Send(2, 0, 2)
    schedules[3][0] = Send(1, 0, 2)
    assert "waits for ever" in refusal(schedules, 2).reason


@pytest.mark.parametrize("peer", [-1, 2, 99])
def test_a_peer_that_does_not_exist_is_refused(peer):
    assert "never read" in refusal([[Send(peer, 0, 1)], []], 1, wanted=nobody).reason
    assert "waits for ever" in refusal([[Recv(peer, 0, 1, "higher")], []], 1, wanted=nobody).reason


def test_a_rank_does_not_send_to_itself():
    error = refusal([[Send(0, 0, 1), Recv(0, 0, 1, "higher")], []], 1, wanted=nobody)
    assert (error.rank, error.step) == (0, 0)
    assert "goes to itself" in error.reason


def nobody(rank, element):
    return False


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_a_single_missing_snapshot_is_a_hazard(size):
    for rank, steps in enumerate(doubled(size)):
        for number, step in enumerate(steps):
            if isinstance(step, Send) and step.snapshot:
                schedules = doubled(size)
                schedules[rank][number] = step._replace(snapshot=False)
                error = refusal(schedules, 2)
                assert (error.rank, error.step) == (rank, number + 1)
                assert "may not have been read" in error.reason


def test_a_second_finish_is_refused():
    schedules = treed(2)
    schedules[0].insert(2, Finish(1, 2))
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (0, 2)


def test_a_result_that_is_delivered_twice_is_refused():
    schedules = treed(2)
    schedules[0].append(Send(1, 0, 1, final=True))
    schedules[1].append(Recv(0, 0, 1))
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (1, 2)
    assert "overwrites results" in error.reason


@pytest.mark.parametrize("bounds", [(0, 1), (0, 3), (1, 2), (1, 3)])
def test_a_range_off_by_one_is_refused(bounds):
    schedules = treed(2, 3)
    schedules[0][0] = Recv(1, *bounds, "higher") if bounds != (0, 3) else Recv(1, 0, 2, "higher")
    error = refusal(schedules, 3)
    assert (error.rank, error.step) == (0, 0)
    assert "reads Send(peer=0, lo=0, hi=3" in error.reason


@pytest.mark.parametrize("step", [Finish(1, 1), Finish(2, 1), Finish(-1, 1), Finish(0, 3), Send(1, 0, 0)])
def test_a_range_that_is_none_is_refused(step):
    error = refusal([[step], []], 2)
    assert (error.rank, error.step) == (0, 0)
    assert "is no range" in error.reason


def test_two_ranks_that_both_receive_first_are_deadlocked():
    schedules = doubled(2)
    for steps in schedules:
        steps[0], steps[1] = steps[1], steps[0]
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (0, 0)
    assert "Recv(peer=1, lo=0, hi=2" in error.reason
    assert "waits for ever" in error.reason


def test_a_ring_that_receives_first_is_deadlocked():
    schedules = [list(ring.allgather(rank, 5)) for rank in range(5)]
    for steps in schedules:
        steps[0], steps[1] = steps[1], steps[0]
    error = refusal(schedules, 5, origin=lambda block: block)
    assert error.step == 0
    assert "waits for ever" in error.reason


def test_a_partial_does_not_pass_for_a_result():
    schedules = treed(2)
    schedules[1][0] = Send(0, 0, 2, final=True)
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (1, 0)
    assert "wants results" in error.reason


def test_a_result_does_not_pass_for_a_partial():
    schedules = treed(2)
    schedules[0][2] = Send(1, 0, 2)
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (0, 2)
    assert "wants partials" in error.reason


def test_the_receiver_must_expect_the_plane_that_is_sent():
    schedules = treed(2)
    schedules[1][1] = Recv(0, 0, 2, "lower")
    error = refusal(schedules, 2)
    assert (error.rank, error.step) == (1, 1)
    assert "reads" in error.reason


def test_other_brackets_on_one_rank_are_refused():
    # (0 1) 2 at ranks 0 and 1, 0 (1 2) at rank 2: the same operands in the same order, and other bits.
    def snap(peer):
        return Send(peer, 0, 1, snapshot=True)

    left = [Recv(1, 0, 1, "higher"), Recv(2, 0, 1, "higher"), Finish(0, 1), Send(1, 0, 1, final=True)]
    middle = [snap(0), snap(2), Recv(0, 0, 1)]
    right = [snap(0), Recv(1, 0, 1, "lower"), Recv(0, 0, 1, "lower"), Finish(0, 1)]
    error = refusal([[snap(2), *left], middle, right], 1)
    assert error.rank == 2
    assert "brackets element 0" in error.reason


def test_a_finish_that_overwrites_what_is_lent_is_a_hazard():
    schedules = [
        [Recv(1, 0, 1, "higher"), Send(1, 0, 1), Finish(0, 1)],
        [Send(0, 0, 1), Recv(0, 0, 1, "lower"), Finish(0, 1)],
    ]
    error = refusal(schedules, 1)
    assert (error.rank, error.step) == (0, 2)
    assert "Finish(lo=0, hi=1) overwrites Send(peer=1" in error.reason


def test_having_been_read_is_no_proof_where_nothing_says_so():
    # Rank 1 reads before rank 0 writes in the order in which the ranks are run, but rank 0's data comes from
    # rank 2, who knows nothing of that: on another day rank 1 is late.
    schedules = [
        [Send(1, 0, 1), Recv(2, 0, 1, "lower")],
        [Recv(0, 0, 1, "lower")],
        [Send(0, 0, 1)],
    ]
    error = refusal(schedules, 1, wanted=nobody)
    assert (error.rank, error.step) == (0, 1)
    assert "Send(peer=1" in error.reason


def test_having_been_read_is_proved_by_a_message_that_comes_after():
    # As above, but rank 2 waits for word from rank 1, element 1, who sent it after reading.
    schedules = [
        [Send(1, 0, 1), Recv(2, 0, 1, "lower")],
        [Recv(0, 0, 1, "lower"), Send(2, 1, 2)],
        [Recv(1, 1, 2, "lower"), Send(0, 0, 1)],
    ]
    prove(lambda rank: schedules[rank], 3, 2, wanted=nobody)
    schedules[1].reverse()
    error = refusal(schedules, 2, wanted=nobody)
    assert (error.rank, error.step) == (0, 1)


def test_a_neighbouring_element_is_not_lent():
    schedules = [[Send(1, 0, 1), Recv(1, 1, 2, "higher")], [Send(0, 1, 2), Recv(0, 0, 1, "lower")]]
    prove(lambda rank: schedules[rank], 2, 2, wanted=nobody)


def test_a_moved_element_must_come_from_its_origin():
    schedules = [[], [Send(0, 0, 1, final=True)]]
    error = refusal(schedules, 1, origin=lambda element: 0)
    assert (error.rank, error.step) == (1, 0)


def test_an_error_keeps_its_data_when_pickled():
    error = pickle.loads(pickle.dumps(ScheduleError(3, 7, "waits for ever")))
    assert (error.rank, error.step, error.reason) == (3, 7, "waits for ever")
    assert str(error) == "rank 3, step 7: waits for ever"


def cyclic(size):
    return {"first": lambda element: (element + 1) % size}


ALGORITHMS = {
    "ring": (lambda rank, size: ring.allreduce(rank, size, size, 1), cyclic),
    "ring allgather": (ring.allgather, lambda size: {"origin": lambda block: block}),
    "dissemination": (dissemination.allgather, lambda size: {"origin": lambda block: block}),
    "doubling": (lambda rank, size: doubling.allreduce(rank, size, size, 3), lambda size: {}),
    "tree": (lambda rank, size: tree.allreduce(rank, size, size, 2), lambda size: {}),
    "reduce": (
        lambda rank, size: tree.reduce(rank, size, 1, size, 2),
        lambda size: {"wanted": lambda rank, element: rank == 1},
    ),
    "broadcast": (
        lambda rank, size: tree.broadcast(rank, size, 1, size, 2),
        lambda size: {"origin": lambda element: 1},
    ),
}


def broken(step, size):
    """Every single breakage of one step, as the steps that stand in its place."""
    yield []
    yield [step, step]
    for lo, hi in ((1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0)):
        yield [step._replace(lo=step.lo + lo, hi=step.hi + hi)]
    if not isinstance(step, Finish):
        for peer in range(-1, size + 1):
            if peer != step.peer:
                yield [step._replace(peer=peer)]
    if isinstance(step, Send):
        yield [step._replace(final=not step.final)]
        if step.snapshot:
            yield [step._replace(snapshot=False)]
    if isinstance(step, Recv):
        for combine in {None, "lower", "higher"} - {step.combine}:
            yield [step._replace(combine=combine)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_single_breakage_is_refused(name, size):
    schedule, goal = ALGORITHMS[name]
    sound = [list(schedule(rank, size)) for rank in range(size)]
    prove(lambda rank: sound[rank], size, size, **goal(size))
    for rank, steps in enumerate(sound):
        for number, step in enumerate(steps):
            for instead in broken(step, size):
                mutant = [*sound[:rank], steps[:number] + instead + steps[number + 1 :], *sound[rank + 1 :]]
                try:
                    prove(mutant.__getitem__, size, size, **goal(size))
                except ScheduleError:
                    continue
                pytest.fail(f"not refused: rank {rank}, step {number}: {instead} instead of {step}")
