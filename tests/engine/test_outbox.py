"""What one peer gets to read, and in which order; whose memory is lent meanwhile, and when it is given back."""

import pytest
from wires import KIB, TAG, frame, frames, operation

from asynccoll.engine import wire
from asynccoll.engine.operation import OutStream
from asynccoll.engine.outbox import Outbox

SEGMENT = 1024 * KIB


@pytest.fixture
def box():
    return Outbox()


def lend(box, nbytes, *, seq=0, granted=1 << 40, fill=None):
    """A stream with one lent piece, in the round; the piece and its stream."""
    op = operation()
    op.comm, op.seq = 0, seq
    memory = bytearray(nbytes) if fill is None else bytearray(fill * nbytes)
    out = OutStream(op, 1)
    op.outputs[1] = out
    out.granted = granted
    add(out, memory)
    box.queue(out)
    return memory, out


def add(out, memory):
    out.pending.append(memoryview(memory))
    out.op.unsent += 1


def write(box, limit=None):
    """One write; the bytes that it took, and what `sent` said."""
    data = b"".join(box.gather())[:limit]
    return data, box.sent(len(data)) if data else None


def drain(box):
    """All writes: one list of frames for each."""
    writes = []
    while True:
        data, _ = write(box)
        if not data:
            return writes
        writes.append(frames(data))


class TestOrder:
    def test_all_control_frames_go_in_one_write_in_the_order_in_which_they_came(self, box):
        box.control += [frame(wire.START, 1), frame(wire.READY, 0, bytes(8)), frame(wire.DATA, 2, b"small")]
        assert [f.kind for f in frames(b"".join(box.gather()))] == [wire.START, wire.READY, wire.DATA]

    def test_control_goes_before_bulk_and_between_its_segments(self, box):
        lend(box, 2 * SEGMENT)
        box.control.append(frame(wire.START))
        write(box)
        write(box)
        box.control.append(frame(wire.ABORT))
        assert [[f.kind for f in one] for one in drain(box)] == [[wire.ABORT], [wire.DATA]]

    def test_what_was_offered_stays_the_same_until_it_is_written(self, box):
        box.control.append(frame(wire.WANT, 1))
        first = b"".join(box.gather())
        box.control.append(frame(wire.WANT, 2))
        assert b"".join(box.gather()) == first
        write(box, 5)
        assert b"".join(box.gather()) == first[5:]

    def test_a_write_may_take_any_number_of_bytes(self, box):
        memory, out = lend(box, 1000, fill=b"x")
        box.control.append(frame(wire.WANT, 1))
        taken = b""
        while data := write(box, 7)[0]:
            taken += data
        assert [(f.kind, f.payload) for f in frames(taken)] == [(wire.WANT, b""), (wire.DATA, bytes(memory))]
        assert out.op.unsent == 0


class TestSegments:
    def test_a_bulk_frame_has_256_kib_and_the_last_one_the_rest(self, box):
        lend(box, 2 * SEGMENT + 7)
        assert [[len(f.payload) for f in one] for one in drain(box)] == [[SEGMENT], [SEGMENT], [7]]

    def test_it_stays_in_the_callers_memory(self, box):
        memory, _ = lend(box, SEGMENT)
        header, payload = box.gather()
        assert len(header) == wire.HEADER_SIZE
        assert payload.obj is memory

    def test_two_streams_take_turns_segment_by_segment(self, box):
        lend(box, 3 * SEGMENT, seq=1)
        lend(box, 2 * SEGMENT, seq=2)
        assert [f.seq for one in drain(box) for f in one] == [1, 2, 1, 2, 1]

    def test_a_stream_that_is_queued_already_gets_no_second_turn(self, box):
        _, out = lend(box, 2 * SEGMENT, seq=1)
        box.queue(out)
        lend(box, SEGMENT, seq=2)
        assert [f.seq for one in drain(box) for f in one] == [1, 2, 1]

    def test_pieces_of_one_stream_keep_their_order_and_are_not_joined(self, box):
        _, out = lend(box, 10, fill=b"a")
        add(out, bytearray(b"b" * 20))
        assert [f.payload for one in drain(box) for f in one] == [b"a" * 10, b"b" * 20]

    def test_a_frame_that_is_cut_holds_a_multiple_of_16_bytes(self, box):
        _, out = lend(box, 100, granted=50)
        assert [len(f.payload) for one in drain(box) for f in one if f.kind == wire.DATA] == [48]
        out.granted = 1000
        box.queue(out)
        assert [len(f.payload) for one in drain(box) for f in one] == [52]

    def test_sent_names_the_operation_when_a_whole_piece_has_left(self, box):
        _, out = lend(box, SEGMENT + 1)
        assert write(box)[1] is None
        assert out.op.unsent == 1
        assert write(box, 20)[1] is None
        assert write(box)[1] is out.op
        assert out.op.unsent == 0


class TestManyFrames:
    def test_what_is_offered_is_neither_copied_nor_joined_again_however_often_little_of_it_is_written(
        self, box
    ):
        sent = [frame(wire.WANT, seq) for seq in range(10_000)]
        box.control.extend(sent)
        (joined,) = box.gather()
        written = b""
        while len(written) < 50_000:
            box.control.append(frame(wire.WANT))  # more and more behind it
            (part,) = box.gather()
            assert (part.obj if written else part) is joined
            written += bytes(part[:97])
            box.sent(97)
        assert written == joined[: len(written)]
        assert joined == b"".join(sent)

    def test_all_that_wait_leave_in_one_write(self, box):
        box.control.extend(frame(wire.WANT, seq) for seq in range(10_000))
        sizes = [len(one) for one in drain(box)]
        assert sizes == [10_000]


class TestCredit:
    def test_without_a_grant_64_kib_of_a_stream_are_sent_eagerly_and_then_a_grant_is_wanted(self, box):
        lend(box, 100_000, seq=4, granted=0)
        data, want = [f for one in drain(box) for f in one]
        assert (data.kind, data.flags, len(data.payload)) == (wire.DATA, wire.EAGER, 64 * KIB)
        assert (want.kind, want.seq) == (wire.WANT, 4)
        assert box.credit == 192 * KIB

    def test_all_streams_together_send_256_kib_eagerly(self, box):
        for seq in range(6):
            lend(box, 64 * KIB, seq=seq, granted=0)
        sent = [f for one in drain(box) for f in one]
        assert sum(len(f.payload) for f in sent if f.kind == wire.DATA) == 256 * KIB
        assert {f.seq for f in sent if f.kind == wire.WANT} == {4, 5}
        assert box.credit == 0

    def test_granted_bytes_cost_no_credit(self, box):
        lend(box, 100_000, granted=100_000)
        assert [(f.flags, len(f.payload)) for one in drain(box) for f in one] == [(0, 100_000)]
        assert box.credit == 256 * KIB

    def test_a_stream_that_must_wait_lets_others_pass_and_asks_once(self, box):
        box.credit = 0
        _, parked = lend(box, 100, seq=1, granted=0)
        lend(box, 100, seq=2)
        assert [(f.kind, f.seq) for one in drain(box) for f in one] == [(wire.WANT, 1), (wire.DATA, 2)]
        box.queue(parked)
        assert drain(box) == []
        parked.granted = 100
        box.queue(parked)
        assert [(f.kind, f.seq) for one in drain(box) for f in one] == [(wire.DATA, 1)]

    @pytest.mark.parametrize(
        ("owed", "busy", "expected"),
        [
            (32 * KIB - 1, True, []),
            (32 * KIB, False, []),
            (32 * KIB, True, [32 * KIB]),
            (128 * KIB - 1, False, []),
            (128 * KIB, False, [128 * KIB]),
        ],
        ids=["little", "idle", "with the next write", "almost urgent", "urgent"],
    )
    def test_owed_credit_goes_with_the_next_write_or_when_it_is_half(self, box, owed, busy, expected):
        assert box.owe(owed) == (owed >= 128 * KIB)
        if busy:
            box.control.append(frame(wire.WANT))
        sent = [f for one in drain(box) for f in one]
        assert [wire.parse_u64(memoryview(f.payload)) for f in sent if f.kind == wire.CREDIT] == expected
        assert box.owed == owed - sum(expected)

    def test_owed_credit_goes_with_bulk_too(self, box):
        lend(box, 100)
        box.owe(32 * KIB)
        assert [f.kind for one in drain(box) for f in one] == [wire.CREDIT, wire.DATA]


class TestRecall:
    def test_what_is_queued_is_dropped(self, box):
        _, out = lend(box, SEGMENT)
        box.recall(out.op)
        assert drain(box) == []
        assert not out.queued

    def test_a_segment_that_is_half_written_is_finished_from_a_copy(self, box):
        memory, out = lend(box, 2 * SEGMENT, fill=b"a")
        head = write(box, wire.HEADER_SIZE + 1000)[0]
        box.recall(out.op)
        memory[:] = b"b" * len(memory)
        (data,) = frames(head + write(box)[0])
        assert (data.tag, data.payload) == (TAG, b"a" * SEGMENT)
        assert drain(box) == []

    def test_a_segment_that_was_only_offered_is_finished_from_a_copy_too(self, box):
        memory, out = lend(box, 100, fill=b"a")
        box.gather()
        box.recall(out.op)
        memory[:] = b"b" * 100
        assert frames(write(box)[0])[0].payload == b"a" * 100
        assert not any(isinstance(part, memoryview) and part.obj is memory for part in box.current)

    def test_the_memory_can_be_resized_after_it(self, box):
        # A bytearray that a memoryview still refers to cannot be.
        memory, out = lend(box, 2 * SEGMENT)
        write(box, 1000)
        box.recall(out.op)
        out.op.release()
        memory.clear()
        assert box.lent is None

    def test_other_operations_are_not_touched(self, box):
        lend(box, 100, seq=1, fill=b"a")
        _, out = lend(box, 100, seq=2)
        lend(box, 100, seq=3, fill=b"c")
        box.recall(out.op)
        assert [(f.seq, f.payload[:1]) for one in drain(box) for f in one] == [(1, b"a"), (3, b"c")]

    def test_another_operations_half_written_segment_stays_lent(self, box):
        memory, out = lend(box, 100, seq=1)
        write(box, 30)
        _, other = lend(box, 100, seq=2)
        box.recall(other.op)
        assert box.lent is out
        assert box.current[-1].obj is memory

    def test_a_parked_stream_is_no_error(self, box):
        _, out = lend(box, 100_000, granted=0)
        drain(box)
        box.recall(out.op)
        assert drain(box) == []


def test_clear_forgets_everything(box):
    memory, out = lend(box, 2 * SEGMENT)
    write(box, 100)
    box.control.append(frame(wire.WANT))
    box.clear()
    out.op.release()
    assert drain(box) == []
    memory.clear()  # a BufferError while a view on it exists
