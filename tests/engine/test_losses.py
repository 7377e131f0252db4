"""Who is dead, agreed by all: the verdict as a function, and the frames by which ranks come to the same one."""

import itertools
import random

import pytest
from wires import Wires, frame, kinds, operation, recv

from asynccoll.engine import wire
from asynccoll.engine.losses import PATIENCE, Accusation, Kind, verdict
from asynccoll.errors import PeerLost

ENDED, SILENT, BROKEN = (Accusation(kind, kind.name) for kind in Kind)


def accused(**edges):
    """``accused(r0_1=ENDED)``: rank 0 accuses rank 1."""
    return {tuple(map(int, name[1:].split("_"))): accusation for name, accusation in edges.items()}


class TestVerdict:
    @pytest.mark.parametrize("size", [2, 3, 8, 33])
    def test_one_death_is_that_rank_whoever_has_noticed(self, size):
        for dead in range(size):
            witnesses = [rank for rank in range(size) if rank != dead]
            for count in {1, len(witnesses)}:
                evidence = {(rank, dead): ENDED for rank in witnesses[:count]}
                assert verdict(evidence) == {dead}

    def test_several_deaths_are_all_of_them(self):
        dead = {1, 4, 5}
        evidence = {(rank, one): ENDED for rank in {0, 2, 3} for one in dead}
        assert verdict(evidence) == dead
        assert verdict({**evidence, (1, 4): ENDED}) == dead  # one saw the other go

    def test_of_two_that_accuse_one_another_the_higher_goes(self):
        assert verdict(accused(r1_2=ENDED, r2_1=ENDED)) == {2}
        assert verdict(accused(r1_2=SILENT, r2_1=SILENT)) == {2}

    def test_of_two_that_accuse_one_another_that_with_more_accusers_goes(self):
        assert verdict(accused(r1_2=ENDED, r2_1=ENDED, r0_1=ENDED)) == {1}

    def test_an_end_is_no_evidence_against_a_rank_that_had_a_reason_to_end_it(self):
        for reason in (SILENT, BROKEN):
            assert verdict(accused(r3_0=reason, r0_3=ENDED)) == {0}
            assert verdict(accused(r0_3=reason, r3_0=ENDED)) == {3}

    def test_a_rank_that_wakes_up_and_accuses_all_goes_itself(self):
        evidence = accused(r0_1=SILENT, r2_1=SILENT, r3_1=SILENT, r1_0=SILENT, r1_2=SILENT, r1_3=SILENT)
        assert verdict(evidence) == {1}

    def test_a_partition_costs_the_other_side(self):
        evidence = {(a, b): SILENT for a in (0, 1) for b in (2, 3)}
        assert verdict(evidence) == {2, 3}

    def test_who_is_out_counts_no_more_neither_as_accused_nor_as_accuser(self):
        evidence = accused(r0_2=ENDED, r2_1=ENDED)
        assert verdict(evidence, [2]) == frozenset()
        assert verdict({}, [1]) == frozenset()

    def test_nobody_is_named_without_an_accusation_and_everybody_accused_is_settled(self):
        rng = random.Random(3)
        for _ in range(300):
            pairs = rng.sample([*itertools.permutations(range(5), 2)], rng.randint(0, 12))
            evidence = {pair: rng.choice([ENDED, SILENT, BROKEN]) for pair in pairs}
            found = verdict(evidence)
            assert found <= {accused for _, accused in evidence}
            for (one, other), accusation in evidence.items():
                answered = evidence.get((other, one))
                excused = accusation is ENDED and answered is not None and answered is not ENDED
                assert excused or found & {one, other}


def pending(wires):
    return {rank: wires.start(rank, recv((rank + 1) % wires.size, bytearray(1))) for rank in wires.engines}


class TestAgreement:
    @pytest.mark.parametrize("size", [2, 3, 5, 8])
    def test_when_all_have_noticed_nobody_waits(self, size):
        for dead in range(size):
            wires = Wires(size, [rank for rank in range(size) if rank != dead])
            ops = pending(wires)
            for rank in wires.engines:
                wires.lose(rank, dead, "reset")
            wires.settle()
            for op in ops.values():
                assert isinstance(op.error, PeerLost)
                assert (op.error.peers, op.error.reason) == ({dead}, "reset")

    @pytest.mark.parametrize("size", [3, 5, 8])
    def test_when_one_alone_has_noticed_all_wait_for_a_moment_and_agree(self, size):
        for dead in range(size):
            survivors = [rank for rank in range(size) if rank != dead]
            wires = Wires(size, survivors)
            ops = pending(wires)
            wires.lose(survivors[0], dead, "reset")
            wires.settle()
            assert not any(op.error for op in ops.values())
            wires.tick(PATIENCE - 0.01)
            assert not any(op.error for op in ops.values())
            wires.agree()
            for rank, op in ops.items():
                assert op.error.peers == {dead}
                said = "reset" if rank == survivors[0] else f"reset, says rank {survivors[0]}"
                assert op.error.reason == said

    def test_a_broken_link_between_two_is_judged_alike_whatever_comes_first(self):
        for seed in range(100):
            rng = random.Random(seed)
            size = rng.randint(3, 6)
            wires = Wires(size)
            ops = pending(wires)
            one, other = rng.sample(range(size), 2)
            wires.lose(one, other)
            wires.shuffle(rng, 60)
            wires.lose(other, one)
            wires.shuffle(rng, 60)
            wires.agree()
            for rank, op in ops.items():
                assert op.error.peers == {max(one, other)}, seed
                assert ("evicted" in op.error.reason) == (rank == max(one, other))

    def test_two_deaths_at_once(self):
        for seed in range(100):
            rng = random.Random(seed)
            size = rng.randint(4, 8)
            dead = set(rng.sample(range(size), 2))
            wires = Wires(size, [rank for rank in range(size) if rank not in dead])
            ops = pending(wires)
            losses = [(rank, one) for rank in wires.engines for one in dead]
            rng.shuffle(losses)
            for rank, one in losses:
                wires.lose(rank, one)
                wires.shuffle(rng, 60)
            wires.agree()
            for op in ops.values():
                assert op.error.peers
                assert op.error.peers <= dead
            for rank in wires.engines:
                assert wires.start(rank).error.peers == dead

    def test_a_rank_that_breaks_the_protocol_goes_and_not_the_one_that_hung_up_on_it(self):
        wires = Wires(4)
        ops = pending(wires)
        wires.settle()
        wires.feed(0, 1, frame(99))
        wires.lose(1, 0, "end of stream")  # what rank 1 sees of that
        wires.settle()
        wires.agree()
        for op in ops.values():
            assert op.error.peers == {1}

    def test_groups_without_the_dead_go_on(self):
        wires = Wires(3, [0, 1])
        for rank in (0, 1):
            wires.engines[rank].add_group(7, (1, 0), "pair")
        early = [wires.submit(rank, operation(), comm=7) for rank in (0, 1)]
        wires.lose(0, 2)
        wires.agree()
        late = [wires.submit(rank, operation(), comm=7) for rank in (0, 1)]
        wires.settle()
        assert [op.error for op in (*early, *late)] == [None] * 4
        assert not wires.engines[0].pending()

    def test_a_verdict_is_adopted_by_who_has_another(self):
        # Rank 0 was told nothing in time; the others have decided.
        wires = Wires(4, [0])
        op = wires.start(0)
        wires.feed(0, 2, wire.lost_frame({"entries": [[2, 3, 1, "gone", True]]}))
        assert op.error.peers == {3}
        assert op.error.reason == "gone, says rank 2"
        assert wires.evicted[0] == [3]

    def test_a_rank_that_is_closing_accuses_nobody(self):
        wires = Wires(3)
        wires.close(0)
        wires.take(0, 1)
        wires.lose(0, 1)
        assert wires.take(0, 2)[-1].kind == wire.GOODBYE
        wires.agree()
        assert not wires.engines[0].losses.out


class TestSilence:
    def test_the_link_stays_open_until_it_is_decided_and_the_silent_rank_hears_of_it(self):
        wires = Wires(3)
        ops = pending(wires)
        wires.settle()
        for rank in (0, 2):
            wires.engines[rank].silent(1, "unresponsive", wires.now)
            wires.collect(rank)
        assert not wires.evicted[0]
        for source, destination in ((0, 2), (2, 0)):
            wires.flush(source)
            wires.read(source, destination)
        for rank in (0, 2):
            assert ops[rank].error.peers == {1}
            assert ops[rank].error.reason == "unresponsive"
            assert wires.evicted[rank] == [1]
        wires.settle()  # now it wakes up and reads
        assert ops[1].error.peers == {1}
        assert "evicted: rank" in ops[1].error.reason
        assert sorted(wires.evicted[1]) == [0, 2]
        assert wires.start(1).error.peers == {1}

    def test_it_may_hear_so_by_another_way(self):
        wires = Wires(3, [1])
        op = wires.start(1)
        wires.engines[1].evicted(0, 5.0)
        wires.engines[1].evicted(2, 5.0)
        wires.collect(1)
        assert op.error.peers == {1}
        assert "rank 0 took this rank for dead" in op.error.reason
        assert sorted(wires.evicted[1]) == [0, 2]
        wires.lose(1, 0)
        assert wires.start(1).error.peers == {1}

    def test_but_not_from_a_rank_that_is_out_itself(self):
        """Each side of a partition has evicted the other, and hears so when the network is mended."""
        wires = Wires(3, [1])
        engine = wires.engines[1]
        engine.silent(2, "unresponsive", 0.0)
        wires.feed(1, 0, wire.lost_frame({"entries": [[0, 2, 1, "unresponsive", False]]}))
        wires.agree()
        assert engine.losses.out.keys() == {2}
        engine.evicted(2, 5.0)
        assert engine.losses.out.keys() == {2}

    def test_nothing_is_read_from_a_rank_that_is_out(self):
        wires = Wires(3, [0])
        wires.engines[0].receive_into(1)
        wires.feed(0, 2, wire.lost_frame({"entries": [[2, 1, 1, "gone", True]]}))
        assert wires.evicted[0] == [1]
        assert wires.engines[0].peers.reachable() == [2]

    def test_bytes_behind_the_word_that_evicts_this_rank_are_not_read(self):
        wires = Wires(3, [1])
        word = wire.lost_frame({"entries": [[0, 1, 1, "gone", True]]})
        memory = wires.engines[1].receive_into(0)
        memory[: len(word) + 24] = word + b"\xff" * 24
        assert not wires.engines[1].received(0, len(word) + 24, 0.0)
        wires.collect(1)
        assert not wires.broken[1]

    def test_it_is_no_accusation_of_a_rank_that_has_left(self):
        wires = Wires(3, [0])
        wires.feed(0, 1, wire.goodbye_frame(0, {"cause": "bye", "next": {0: 0}}))
        wires.engines[0].silent(1, "unresponsive", 0.0)
        assert not wires.engines[0].losses.accusations

    def test_only_what_nobody_knows_more_of_counts_as_silent(self):
        wires = Wires(4, [0])
        losses = wires.engines[0].losses
        wires.engines[0].silent(1, "unresponsive", 0.0)
        wires.engines[0].silent(2, "unresponsive", 0.0)
        wires.feed(0, 3, wire.lost_frame({"entries": [[3, 2, 0, "reset", False]]}))
        wires.agree()
        assert losses.out.keys() == {1, 2}
        assert losses.silent(1)
        assert not losses.silent(2)

    def test_more_may_be_known_of_it_when_it_is_out_already(self):
        wires = Wires(4, [0])
        losses = wires.engines[0].losses
        wires.engines[0].silent(1, "unresponsive", 0.0)
        wires.agree()
        assert losses.silent(1)
        wires.feed(0, 3, wire.lost_frame({"entries": [[3, 1, 0, "reset", False]]}))
        assert not losses.silent(1)  # as rank 3 has it, so that both may shrink, or neither
        assert losses.out.keys() == {1}

    def test_a_verdict_on_one_whose_goodbye_this_rank_has_heard_counts_all_the_same(self):
        wires = Wires(4, [0])
        wires.start(0, recv(1, bytearray(1)))
        wires.feed(0, 2, wire.goodbye_frame(0, {"cause": "bye", "next": {0: 1}}))  # it has taken part
        wires.feed(0, 3, wire.lost_frame({"entries": [[3, 2, 1, "unresponsive", True]]}))
        (error,) = wires.results(0)  # rank 3 has given the operation up, and sends no more for it
        assert isinstance(error, PeerLost)
        assert error.peers == {2}


class TestGoingOn:
    def may(self, size, silent=(), ended=(), rank=0):
        wires = Wires(size, [rank])
        engine = wires.engines[rank]
        for peer in ended:
            engine.peer_lost(peer, "reset", 0.0)
        for peer in silent:
            engine.silent(peer, "unresponsive", 0.0)
        wires.collect(rank)
        wires.agree()
        assert engine.losses.out.keys() == {*silent, *ended}
        return engine.departures.may_go_on(tuple(range(size)), 0) is None

    def test_after_deaths_however_few_are_left(self):
        assert self.may(8, ended=range(1, 8))

    def test_after_silence_the_majority(self):
        assert self.may(5, silent=[3, 4])
        assert not self.may(5, silent=[2, 3, 4])

    def test_of_equal_halves_the_one_with_the_lowest_rank(self):
        assert self.may(4, silent=[2, 3])
        assert not self.may(4, silent=[0, 1], rank=3)
        assert self.may(2, silent=[1])
        assert not self.may(2, silent=[0], rank=1)

    def test_who_is_known_to_be_dead_is_on_no_side(self):
        assert self.may(5, silent=[3], ended=[1, 2])
        assert not self.may(5, silent=[0, 1], ended=[2, 3], rank=4)

    def test_a_rank_that_was_evicted_may_not(self):
        wires = Wires(3, [1])
        wires.engines[1].evicted(0, 0.0)
        error = wires.engines[1].departures.may_go_on((0, 1, 2), 0)
        assert error.peers == {1}


class TestFrames:
    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"entries": 5},
            {"entries": [5]},
            {"entries": [[0, 1, 0, "x"]]},
            {"entries": [[0, 1, 0, 7, False]]},
            {"entries": [[0, 1, 3, "x", False]]},
            {"entries": [[0, 3, 0, "x", False]]},
            {"entries": [[-1, 2, 0, "x", False]]},
            {"entries": [[2, 2, 0, "x", False]]},
            {"entries": [[True, 2, 0, "x", False]]},
        ],
        ids=repr,
    )
    def test_a_malformed_one_breaks_the_peer(self, body):
        wires = Wires(3, [0])
        wires.feed(0, 1, wire.lost_frame(body))
        assert list(wires.broken[0]) == [1]

    def test_a_thousand_losses_fit(self):
        size = 1000
        wires = Wires(size, [0])
        for peer in range(2, size):
            wires.engines[0].silent(peer, "unresponsive " * 100, 0.0)
        wires.collect(0)
        found = [f for f in wires.take(0, 1) if f.kind == wire.LOST]
        assert max(len(f.payload) for f in found) <= wire.MAX_CONTROL
        told = {entry[1] for f in found for entry in wire.control_payload(memoryview(f.payload))["entries"]}
        assert told == set(range(2, size))

    def test_news_that_changes_nothing_is_not_passed_on(self):
        wires = Wires(4, [0])
        entry = [1, 3, 0, "reset", False]
        wires.feed(0, 1, wire.lost_frame({"entries": [entry]}))
        assert kinds(wires.take(0, 2)) == [wire.LOST]
        wires.feed(0, 2, wire.lost_frame({"entries": [entry, [2, 3, 0, "reset", False]]}))
        assert kinds(wires.take(0, 2)) == []


def test_the_smaller_part_is_told_to_end_and_not_to_shrink():
    wires = Wires(3, [2])
    for peer in (0, 1):
        wires.engines[2].silent(peer, "unresponsive", 0.0)
    wires.collect(2)
    wires.agree()
    error = wires.engines[2].departures.may_go_on((0, 1, 2), 0)
    assert error.peers == {0, 1}
    assert "shrink" not in str(error)
    assert "end here" in str(error)


class TestExits:
    def test_one_that_a_signal_handler_raises_may_have_come_at_any_moment_so_the_rank_resigns(self):
        wires = Wires(3)
        ops = pending(wires)
        wires.settle()
        wires.engines[1].failed(SystemExit(143), 0.0)
        wires.collect(1)
        wires.settle()
        for op in ops.values():
            assert op.error.peers == {1}
            assert "ended by SystemExit: 143" in op.error.reason

    def test_that_of_a_reduce_function_has_lost_nothing(self):
        wires = Wires(2)
        error = SystemExit(3)
        wires.engines[1].losses.exiting = error
        wires.engines[1].failed(error, 0.0)
        assert not wires.engines[1].losses.out
