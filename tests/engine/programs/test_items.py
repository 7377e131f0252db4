"""Whole values as programs: what travels beside the description, where payload lands, who folds."""

import random

import pytest
from wires import KIB, Wires, frame, operation

from asynccoll.algorithms.binomial import family
from asynccoll.engine import wire
from asynccoll.engine.programs import items
from asynccoll.engine.programs.items import Item
from asynccoll.errors import ProtocolError

INLINE = 4096
SIZES = (0, 1, INLINE, INLINE + 1, 300_000)


class Keep:
    """A codec that hands out bytearrays, in two parts, and remembers what it was told."""

    def __init__(self):
        self.told = []
        self.memory = {}

    def keep(self, item):
        self.own = bytearray(item.nbytes)
        return list(zip(item.parts, in_parts(self.own), strict=True))

    def place(self, rank, meta, nbytes):
        self.told.append((rank, meta, nbytes))
        memory = self.memory[rank] = bytearray(nbytes)
        return in_parts(memory)

    def value(self, rank):
        return self.memory.get(rank, getattr(self, "own", None))


def item(seed, nbytes):
    """In two parts, the second with two thirds of the bytes."""
    return Item(f"meta {seed}".encode(), in_parts(random.Random(seed).randbytes(nbytes)))


def in_parts(memory):
    third = len(memory) // 3
    return memoryview(memory)[:third], memoryview(memory)[third:]


def payload(sent):
    return b"".join(sent.parts)


class TestBroadcast:
    def run(self, size, root, nbytes, shuffled=None):
        wires, sent = Wires(size), item(root, nbytes)
        codecs = [Keep() for _ in range(size)]
        for rank, codec in enumerate(codecs):
            given = sent if rank == root else None
            wires.start(rank, program=items.broadcast(given, codec, rank, size, root))
        if shuffled is None:
            wires.settle()
        else:
            wires.shuffle(*shuffled)
        wires.assert_idle()
        for rank, codec in enumerate(codecs):
            (result,) = wires.results(rank)
            if rank == root:
                assert result == payload(sent)
            else:
                assert result == payload(sent)
                assert codec.told == [(root, sent.meta, nbytes)]
        return wires

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_every_root_reaches_every_rank(self, nbytes):
        for size in (2, 3, 5, 8):
            for root in range(size):
                self.run(size, root, nbytes)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_reads_and_writes_make_no_difference(self, seed):
        self.run(5, 1, 700_000, (random.Random(seed), 300_000))

    @pytest.mark.parametrize(("nbytes", "beside"), [(INLINE, True), (INLINE + 1, False)])
    def test_up_to_4_kib_travel_beside_the_description(self, nbytes, beside):
        wires = self.run(2, 0, nbytes)
        data = [len(f.payload) for f in wires.sent(0) if f.kind == wire.DATA]
        description = 8 + 12 + len(b"meta 0")
        assert sum(data) == description + nbytes
        assert (description in data) == (not beside)

    def test_a_rank_passes_a_segment_on_before_it_has_the_next(self):
        middle = next(rank for rank in range(1, 4) if family(rank, 4, 0)[1])
        parent, (child,) = family(middle, 4, 0)
        wires = Wires(4, [middle])
        wires.start(middle, program=items.broadcast(None, Keep(), middle, 4, 0))
        message = items._encode(b"m", 900_000, None)
        head = len(message).to_bytes(8, "little") + message
        wires.feed(middle, parent, frame(wire.DATA, 0, head, flags=1))
        wires.feed(middle, parent, frame(wire.DATA, 0, b"a" * 256 * KIB))
        wires.feed(middle, child, wire.ready_frame(0, 0, 1 << 30))
        sent = [len(f.payload) for f in wires.take(middle, child) if f.kind == wire.DATA]
        assert sum(sent) == len(head) + 256 * KIB
        assert wires.engines[middle].pending()[0].program is not None

    def test_a_codec_that_refuses_ends_it_everywhere(self):
        wires = Wires(3)

        class Refuses(Keep):
            def place(self, rank, meta, nbytes):
                raise MemoryError("too much")

        for rank in range(3):
            codec = Refuses() if rank == 1 else Keep()
            given = item(0, 300_000) if rank == 0 else None
            wires.start(rank, program=items.broadcast(given, codec, rank, 3, 0))
        wires.settle()
        assert isinstance(wires.results(1)[0], MemoryError)
        assert wires.results(0)[0].type_name == "MemoryError"
        wires.assert_idle()


class TestAllgather:
    def run(self, payloads, algorithm="ring", shuffled=None):
        size = len(payloads)
        wires, asked = Wires(size), []
        sent = [item(rank, nbytes) for rank, nbytes in enumerate(payloads)]

        def choose(largest):
            asked.append(largest)
            return algorithm

        for rank in range(size):
            wires.start(rank, program=items.allgather(sent[rank], Keep(), rank, size, choose))
        if shuffled is None:
            wires.settle()
        else:
            wires.shuffle(*shuffled)
        wires.assert_idle()
        for rank in range(size):
            (result,) = wires.results(rank)
            assert result[rank] == payload(sent[rank])
            for other in range(size):
                if other != rank:
                    assert result[other] == payload(sent[other])
        return wires, asked

    @pytest.mark.parametrize("algorithm", ["ring", "doubling"])
    def test_values_of_all_sizes_come_in_rank_order(self, algorithm):
        for size in (2, 3, 4, 5, 7, 8):
            rng = random.Random(size)
            for _ in range(3):
                self.run([rng.choice(SIZES) for _ in range(size)], algorithm)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_reads_and_writes_make_no_difference(self, seed):
        rng = random.Random(seed)
        self.run([rng.choice(SIZES) for _ in range(5)], shuffled=(rng, 200_000))

    def test_every_rank_chooses_by_the_largest(self):
        _, asked = self.run([10, 5000, 4097, 0])
        assert asked == [5000] * 4

    def test_small_values_need_no_second_phase(self):
        wires, asked = self.run([INLINE] * 4)
        assert asked == []
        for rank in range(4):
            assert sum(f.kind == wire.DATA for f in wires.sent(rank)) <= 2 * 2

    def test_each_large_value_is_received_once(self):
        wires, _ = self.run([100_000] * 4)
        for rank in range(4):
            got = sum(
                len(f.payload)
                for other in range(4)
                if other != rank
                for f in wires.sent(other, rank)
                if f.kind == wire.DATA
            )
            assert 300_000 <= got < 300_000 + 1000

    def test_the_codec_is_told_what_each_rank_has(self):
        codec = Keep()
        wires = Wires(3)
        for rank in range(3):
            program = items.allgather(
                item(rank, rank), codec if rank == 1 else Keep(), rank, 3, lambda _: "ring"
            )
            wires.start(rank, program=program)
        wires.settle()
        assert codec.told == [(0, b"meta 0", 0), (2, b"meta 2", 2)]


class TestGather:
    def run(self, payloads, root, shuffled=None, **options):
        size = len(payloads)
        wires, codec = Wires(size), Keep()
        sent = [item(rank, nbytes) for rank, nbytes in enumerate(payloads)]
        for rank in range(size):
            given = codec if rank == root else None
            wires.start(rank, program=items.gather(sent[rank], given, rank, size, root, **options))
        if shuffled is None:
            wires.settle()
        else:
            wires.shuffle(*shuffled)
        wires.assert_idle()
        for rank in range(size):
            (result,) = wires.results(rank)
            if rank != root:
                assert result is None
                continue
            assert result[rank] == payload(sent[rank])
            for other in range(size):
                if other != rank:
                    assert result[other] == payload(sent[other])
        told = [(rank, one.meta, one.nbytes) for rank, one in enumerate(sent) if rank != root]
        assert codec.told == told
        return wires

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
    def test_values_of_all_sizes_come_to_every_root_in_rank_order(self, size):
        rng = random.Random(size)
        for root in range(size):
            self.run([rng.choice(SIZES) for _ in range(size)], root)

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
    def test_of_objects_no_rank_has_an_end_before_the_root_has_its_values(self, size):
        """Whether they can be rebuilt shows only there, and is raised everywhere."""
        for root in range(size):
            self.run([100] * size, root, objects=True)
            wires = Wires(size)
            for rank in range(size):
                if rank != root:
                    wires.start(
                        rank, program=items.gather(item(rank, 9), None, rank, size, root, objects=True)
                    )
            wires.settle()
            assert not any(wires.ended.values())

    @pytest.mark.parametrize("seed", range(3))
    def test_random_reads_and_writes_make_no_difference(self, seed):
        rng = random.Random(seed)
        self.run([rng.choice(SIZES) for _ in range(6)], seed, shuffled=(rng, 200_000))

    def test_small_values_go_up_the_tree_one_message_for_each_branch(self):
        wires = self.run([100] * 8, 0)
        for rank in range(1, 8):
            parent, _ = family(rank, 8, 0)
            found = {f.payload for f in wires.sent(rank) if f.kind == wire.DATA}
            assert len(found) == 1
            assert found == {f.payload for f in wires.sent(rank, parent) if f.kind == wire.DATA}

    def test_a_large_value_goes_straight_to_the_root_and_once(self):
        wires = self.run([100_000] * 8, 0)
        for rank in range(1, 8):
            straight = sum(len(f.payload) for f in wires.sent(rank, 0) if f.kind == wire.DATA)
            assert 100_000 <= straight < 100_500
            others = [f for peer in range(1, 8) for f in wires.sent(rank, peer) if f.kind == wire.DATA]
            assert sum(len(f.payload) for f in others) < 200

    def test_the_roots_memory_receives_it_without_a_copy(self):
        """What the root's program waits for is granted whole, and placed where the codec says."""
        wires = Wires(2, [0])
        codec = Keep()
        wires.start(0, program=items.gather(item(0, 0), codec, 0, 2, 0))
        message = items._encode(b"m", 900_000, None)
        head = len(message).to_bytes(8, "little") + message
        wires.feed(0, 1, frame(wire.DATA, 0, head, flags=1))
        wires.feed(0, 1, frame(wire.DATA, 0, b"a" * 256 * KIB)[: 24 + 200_000])
        assert codec.memory[1][:200_000] == b"a" * 200_000


class TestScatter:
    def run(self, payloads, root, shuffled=None):
        size = len(payloads)
        wires, codecs = Wires(size), [Keep() for _ in payloads]
        sent = [item(rank, nbytes) for rank, nbytes in enumerate(payloads)]
        for rank, codec in enumerate(codecs):
            given = sent if rank == root else None
            wires.start(rank, program=items.scatter(given, codec, rank, size, root))
        if shuffled is None:
            wires.settle()
        else:
            wires.shuffle(*shuffled)
        wires.assert_idle()
        for rank, codec in enumerate(codecs):
            (result,) = wires.results(rank)
            if rank == root:
                assert result == payload(sent[rank])
            else:
                assert result == payload(sent[rank])
                assert codec.told == [(root, sent[rank].meta, payloads[rank])]
        return wires

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13])
    def test_every_root_reaches_every_rank_with_values_of_all_sizes(self, size):
        rng = random.Random(size)
        for root in range(size):
            self.run([rng.choice(SIZES) for _ in range(size)], root)

    @pytest.mark.parametrize("seed", range(3))
    def test_random_reads_and_writes_make_no_difference(self, seed):
        rng = random.Random(seed)
        self.run([rng.choice(SIZES) for _ in range(6)], seed, shuffled=(rng, 200_000))

    def test_small_values_go_down_the_tree_one_message_for_each_branch(self):
        wires = self.run([100] * 8, 0)
        for rank in range(8):
            _, children = family(rank, 8, 0)
            for peer in range(8):
                frames = [f for f in wires.sent(rank, peer) if f.kind == wire.DATA]
                assert len(frames) == (peer in children)

    def test_a_large_value_goes_straight_from_the_root_and_once(self):
        wires = self.run([100_000] * 8, 0)
        for rank in range(1, 8):
            straight = sum(len(f.payload) for f in wires.sent(0, rank) if f.kind == wire.DATA)
            assert 100_000 <= straight < 100_500
            assert sum(len(f.payload) for f in wires.sent(rank) if f.kind == wire.DATA) < 200


class TestAlltoall:
    def run(self, payloads, shuffled=None):
        """``payloads[a][b]``: bytes from a to b."""
        size = len(payloads)
        wires, codecs = Wires(size), [Keep() for _ in payloads]
        sent = [[item(100 * a + b, nbytes) for b, nbytes in enumerate(row)] for a, row in enumerate(payloads)]
        for rank, codec in enumerate(codecs):
            wires.start(rank, program=items.alltoall(sent[rank], codec, rank, size))
        if shuffled is None:
            wires.settle()
        else:
            wires.shuffle(*shuffled)
        wires.assert_idle()
        for rank, codec in enumerate(codecs):
            (result,) = wires.results(rank)
            assert result[rank] == payload(sent[rank][rank])
            for other in range(size):
                if other != rank:
                    assert result[other] == payload(sent[other][rank])
            told = [(a, sent[a][rank].meta, payloads[a][rank]) for a in range(size) if a != rank]
            assert sorted(codec.told) == told
        return wires

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
    def test_values_of_all_sizes_come_in_rank_order(self, size):
        rng = random.Random(size)
        for _ in range(2):
            self.run([[rng.choice(SIZES) for _ in range(size)] for _ in range(size)])

    @pytest.mark.parametrize("seed", range(3))
    def test_random_reads_and_writes_make_no_difference(self, seed):
        rng = random.Random(seed)
        self.run([[rng.choice(SIZES) for _ in range(5)] for _ in range(5)], shuffled=(rng, 200_000))

    def test_small_values_all_leave_before_any_has_come(self):
        wires = Wires(5, [2])
        wires.start(2, program=items.alltoall([item(b, 1000) for b in range(5)], Keep(), 2, 5))
        for peer in (0, 1, 3, 4):
            assert [f.kind for f in wires.take(2, peer) if f.kind == wire.DATA] == [wire.DATA]

    def test_a_large_value_waits_for_its_round(self):
        wires = Wires(3, [0])
        wires.start(0, program=items.alltoall([item(b, 60_000) for b in range(3)], Keep(), 0, 3))
        first, second = (
            sum(len(f.payload) for f in wires.take(0, peer) if f.kind == wire.DATA) for peer in (1, 2)
        )
        assert first >= 60_000
        assert second < 100

    def test_each_value_goes_once_and_straight(self):
        wires = self.run([[100_000] * 4] * 4)
        for a in range(4):
            for b in range(4):
                if a != b:
                    sent = sum(len(f.payload) for f in wires.sent(a, b) if f.kind == wire.DATA)
                    assert 100_000 <= sent < 100_100


PROGRAMS = {
    "gather": lambda codec: items.gather(item(0, 0), codec, 0, 2, 0),
    "scatter": lambda codec: items.scatter(None, codec, 0, 2, 1),
    "alltoall": lambda codec: items.alltoall([item(0, 0)] * 2, codec, 0, 2),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
class TestWhatAPeerMakesUp:
    """One message from rank 1, and nothing else."""

    def feed(self, program, message, length=None):
        wires = Wires(2, [0])
        op = wires.submit(0, operation(program=program(Keep())))
        head = (len(message) if length is None else length).to_bytes(8, "little")
        wires.feed(0, 1, frame(wire.DATA, 0, head + message, flags=1))
        return wires, op

    def refused(self, wires, op):
        assert isinstance(op.error, ProtocolError)
        assert wire.ABORT in [f.kind for f in wires.take(0, 1)]
        assert not wires.engines[0].pending()

    def test_a_description_that_is_cut_short_ends_the_operation(self, program):
        whole = items._encode(b"meta", 3, memoryview(b"abc"))
        for cut in (0, 3, 12, 14, len(whole) - 1):
            self.refused(*self.feed(program, whole[:cut]))

    def test_so_does_one_that_something_follows(self, program):
        self.refused(*self.feed(program, items._encode(b"meta", 3, memoryview(b"abc")) + b"x"))

    @pytest.mark.parametrize("length", [1 << 14, 1 << 40, (1 << 64) - 1])
    def test_so_does_a_message_longer_than_any_can_be_without_memory_for_it(self, program, length):
        self.refused(*self.feed(program, b"", length))

    def test_the_longest_that_there_can_be_is_taken(self, program):
        meta = bytes((1 << 13) + 1024)
        _, op = self.feed(program, items._encode(meta, INLINE, memoryview(bytes(INLINE))))
        assert op.error is None
        assert op.program is None


class TestDescriptions:
    def test_they_come_back_one_after_the_other(self):
        payload = memoryview(b"abc")
        message = (
            items._encode(b"m", 3, payload)
            + items._encode(b"", 5000, payload, True)
            + items._encode(b"xy", 0, None)
        )
        reader = items._Reader(message)
        found = [reader.item() for _ in range(3)]
        assert [(m, n, p if p is None else bytes(p), doubt) for m, n, p, doubt in found] == [
            (b"m", 3, b"abc", False),
            (b"", 5000, None, True),
            (b"xy", 0, b"", False),
        ]

    def test_one_that_is_cut_short_is_a_protocol_error(self):
        message = items._encode(b"meta", 3, memoryview(b"abc"))
        for cut in range(len(message)):
            with pytest.raises(ProtocolError, match="cut short"):
                items._Reader(message[:cut]).item()

    def test_a_length_beyond_the_message_is_a_protocol_error(self):
        for head in (items._HEAD.pack(0xFFFFFFFF, 0), items._HEAD.pack(0, 4000)):
            with pytest.raises(ProtocolError, match="cut short"):
                items._Reader(head).item()

    def test_on_the_wire_it_ends_the_operation_everywhere(self):
        wires = Wires(2, [0])
        op = wires.submit(0, operation(program=items.broadcast(None, Keep(), 0, 2, 1)))
        wires.feed(0, 1, frame(wire.DATA, 0, (3).to_bytes(8, "little") + b"abc", flags=1))
        assert isinstance(op.error, ProtocolError)
        assert wire.ABORT in [f.kind for f in wires.take(0, 1)]

    @pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1])
    def test_a_length_that_nobody_can_hold_ends_the_operation(self, length):
        wires = Wires(2, [0])
        op = wires.submit(0, operation(program=items.broadcast(None, Keep(), 0, 2, 1)))
        wires.feed(0, 1, frame(wire.DATA, 0, length.to_bytes(8, "little"), flags=1))
        assert isinstance(op.error, Exception)
        assert not wires.engines[0].pending()


def test_a_barrier_moves_no_payload():
    wires = Wires(3)
    for rank in range(3):
        wires.start(rank, program=items.nothing())
    wires.settle()
    assert [wires.results(rank) for rank in range(3)] == [[None]] * 3
    assert {f.kind for rank in range(3) for f in wires.sent(rank)} == {wire.START}
