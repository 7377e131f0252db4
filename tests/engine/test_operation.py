"""Streams and operations by themselves: bytes in order, exactly once, and no memory held after the end."""

import random
import sys
import weakref

import numpy as np
import pytest
from wires import CALL, KIB, operation

from asynccoll.engine.operation import EAGER_STREAM, WINDOW, InStream, OutStream
from asynccoll.engine.transfers import RecvBytes
from asynccoll.errors import ProtocolError


def test_limits_are_those_that_peers_rely_on():
    assert EAGER_STREAM == 64 * KIB
    assert WINDOW == 1024 * KIB


class TestInStream:
    def test_a_receive_is_filled_in_the_order_of_arrival(self):
        into = bytearray(6)
        stream = InStream()
        assert not stream.post(memoryview(into), None, len(into))
        stream.take(memoryview(b"abc"))
        assert not stream.complete()
        stream.take(memoryview(b"def"))
        assert stream.complete()
        assert into == b"abcdef"
        assert (stream.into, stream.total, stream.consumed) == (None, 0, 6)

    def test_a_fold_hears_the_offset_of_each_piece(self):
        heard = []
        stream = InStream()
        assert not stream.post(None, lambda offset, piece: heard.append((offset, bytes(piece))), 5)
        stream.take(memoryview(b"abc"))
        stream.take(memoryview(b"de"))
        assert stream.complete()
        assert heard == [(0, b"abc"), (3, b"de")]
        assert stream.fold is None

    def test_what_came_before_the_receive_is_served_from_the_backlog_and_the_rest_is_kept(self):
        stream = InStream()
        stream.backlog.extend(map(memoryview, (b"ab", b"cdef", b"gh")))
        into = bytearray(4)
        assert stream.post(memoryview(into), None, len(into))
        assert into == b"abcd"
        assert [bytes(piece) for piece in stream.backlog] == [b"ef", b"gh"]

    def test_a_receive_of_nothing_is_complete_at_once(self):
        stream = InStream()
        stream.backlog.append(memoryview(b"a"))
        assert stream.post(memoryview(bytearray(0)), None, 0)
        assert len(stream.backlog) == 1

    def test_a_short_backlog_leaves_the_receive_posted(self):
        stream = InStream()
        stream.backlog.append(memoryview(b"ab"))
        into = bytearray(3)
        assert not stream.post(memoryview(into), None, len(into))
        assert (stream.filled, stream.total) == (2, 3)
        assert not stream.backlog

    def test_64_kib_need_no_grant(self):
        assert InStream().granted == 64 * KIB


class TestDeliver:
    @pytest.mark.parametrize("seed", range(10))
    def test_any_cut_of_the_bytes_fills_the_receives_alike(self, seed):
        rng = random.Random(seed)
        data = rng.randbytes(300)
        op, stream, out = operation(), InStream(), b""
        sizes = [50, 1, 99, 150]
        left = memoryview(data)
        for size in sizes:
            into = bytearray(size)
            ready = stream.post(memoryview(into), None, len(into))
            while not ready:
                op.waiting = stream
                piece, left = left[: (count := rng.randint(1, 120))], left[count:]
                ready = op.deliver(stream, piece, owned=rng.random() < 0.5)
            op.waiting = None
            out += into
        assert out == data
        assert stream.consumed == 300

    def test_memory_that_is_not_owned_is_copied_into_the_backlog(self):
        op, stream, memory = operation(), InStream(), bytearray(b"abc")
        assert not op.deliver(stream, memoryview(memory), owned=False)
        memory[:] = b"xyz"
        assert bytes(stream.backlog[0]) == b"abc"

    def test_owned_memory_is_kept_as_it_is(self):
        op, stream, memory = operation(), InStream(), bytearray(b"abc")
        op.deliver(stream, memoryview(memory), owned=True)
        assert stream.backlog[0].obj is memory

    @pytest.mark.parametrize("owned", [True, False])
    def test_what_is_too_much_for_the_receive_goes_to_the_backlog(self, owned):
        op, stream, memory, into = operation(), InStream(), bytearray(b"abcde"), bytearray(3)
        stream.post(memoryview(into), None, len(into))
        op.waiting = stream
        assert op.deliver(stream, memoryview(memory), owned=owned)
        if not owned:
            memory[:] = b"....."
        assert (into, bytes(stream.backlog[0])) == (b"abc", b"de")


class TestFinished:
    def test_it_takes_the_program_the_sends_and_the_start_round(self):
        op = operation()
        op.turns = {1: 0}
        assert not op.finished
        op.program = None
        assert not op.finished
        op.round = 1
        assert op.finished
        op.unsent = 1
        assert not op.finished


class TestRelease:
    def test_no_memory_of_the_caller_is_referred_to_afterwards(self):
        memory = np.zeros(100, np.uint8)
        gone = weakref.ref(memory)
        op = operation(RecvBytes(1, memoryview(memory)))
        next(op.program)
        stream = op.inputs[1] = InStream()
        stream.post(memoryview(memory), None, len(memory))
        stream.backlog.append(memoryview(memory))
        op.waiting = stream
        out = op.outputs[1] = OutStream(op, 1)
        out.pending.append(memoryview(memory))
        op.unsent = 1
        op.release()
        del memory
        assert gone() is None
        assert (op.program, op.waiting, op.unsent) == (None, None, 0)

    def test_the_program_is_closed_so_that_its_finally_runs(self):
        ran = []

        def body():
            try:
                yield RecvBytes(1, memoryview(bytearray(1)))
            finally:
                ran.append(True)

        program = body()
        op = operation(program=program)
        next(program)
        op.release()
        assert ran == [True]

    def test_a_program_that_is_running_is_not_closed_under_its_feet(self):
        ops = []

        def body():
            ops[0].release()
            yield RecvBytes(1, memoryview(bytearray(1)))

        program = body()
        ops.append(operation(program=program))
        next(program)
        assert ops[0].program is None

    def test_twice_is_silent(self):
        op = operation()
        op.release()
        op.release()


class TestCheckDrained:
    def test_bytes_that_nobody_asked_for_are_an_error_that_names_the_sender(self):
        op = operation()
        op.inputs[3] = InStream()
        op.inputs[3].backlog.extend([memoryview(b"abc"), memoryview(b"d")])
        with pytest.raises(ProtocolError, match="rank 3 sent 4 bytes more than test takes"):
            op.check_drained()

    def test_a_drained_operation_is_fine(self):
        op = operation()
        op.inputs[3] = InStream()
        op.check_drained()


class TestContext:
    def test_it_says_where_the_operation_stands(self):
        op = operation()
        op.seq, op.group, op.rank, op.started = 7, "world", 2, 10.0
        assert op.context(12.5) == ("test", 7, "world", 2, 2.5, None)

    def test_a_keyed_operation_has_its_key_in_the_place_of_a_number(self):
        op = operation()
        op.seq, op.group, op.rank, op.started, op.key = 7, "world", 2, 10.0, "a"
        assert op.context(12.5) == ("test", -1, "world", 2, 2.5, "a")

    def test_its_label_is_what_lists_show(self):
        op = operation()
        op.seq = 7
        assert op.label == "test #7"
        op.key = "a"
        assert op.label == "test key 'a'"
        op.key, op.message = None, True
        assert op.label == "test"

    def test_elapsed_is_never_negative(self):
        op = operation()
        op.seq, op.group, op.rank, op.started = 7, "world", 2, 10.0
        assert op.context(9.0).elapsed == 0.0


class TestAnswer:
    def test_the_call_site_is_turned_into_text_when_it_is_asked_for(self):
        def caller():
            frame = sys._getframe()
            return operation(site=(frame.f_code, frame.f_lasti))

        answer = caller().answer()
        assert answer["fields"] == CALL.fields()
        assert answer["site"] == f"test_operation.py:{caller.__code__.co_firstlineno + 2}"

    def test_no_site_is_an_empty_text(self):
        assert operation().answer()["site"] == ""
