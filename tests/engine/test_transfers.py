"""What programs ask for, where it is more than a record: messages with their length in front, copies in slices."""

import pytest
from wires import Wires, operation, recv

from asynccoll.engine.transfers import DRAIN, PAUSE, SLICE, SendBytes, copied, recv_message, send_message
from asynccoll.errors import ProtocolError, RemoteError


def copy(lengths):
    """Copy pieces of those lengths; (right, bytes copied before each pause)."""
    sources = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    targets = [bytearray(length) for length in lengths]
    pairs = [(memoryview(a), memoryview(b)) for a, b in zip(sources, targets, strict=True)]
    done = []
    for pause in copied(pairs):
        assert pause is PAUSE
        done.append(sum(len(target) - target.count(0) for target in targets))
    return sources == targets, done


@pytest.mark.parametrize("lengths", [[], [0], [10], [SLICE], [SLICE // 2, SLICE // 2], [5] * 100])
def test_what_fits_a_slice_is_copied_without_a_pause(lengths):
    assert copy(lengths) == (True, [])


@pytest.mark.parametrize(
    ("lengths", "pauses"),
    [([SLICE + 1], 1), ([2 * SLICE], 1), ([2 * SLICE, 1], 2), ([SLICE // 2 + 1, SLICE, 0, SLICE], 2)],
)
def test_every_slice_is_full_and_there_is_a_pause_after_it_if_anything_is_left(lengths, pauses):
    right, done = copy(lengths)
    assert right
    assert done == [SLICE * (number + 1) for number in range(pauses)]


def paused(rank, memory, result):
    yield from copied([(memoryview(bytes(2 * SLICE)), memory)])
    return result


class TestPauses:
    def test_another_operation_completes_while_one_is_paused(self):
        wires = Wires(1)
        wires.start(0, program=paused(0, memoryview(bytearray(2 * SLICE)), "first"))
        wires.start(0, result="second")
        assert wires.results(0) == ["second"]
        wires.settle()
        assert wires.results(0) == ["second", "first"]
        assert not wires.engines[0].paused

    @pytest.mark.parametrize("how", ["cancel", "timeout", "loss"])
    def test_an_operation_that_ends_meanwhile_is_not_resumed_and_lets_go_of_its_memory(self, how):
        wires, memory = Wires(2), bytearray(2 * SLICE)
        op = wires.submit(0, operation(program=paused(0, memoryview(memory), None), timeout=1.0))
        if how == "cancel":
            wires.cancel(0, op)
        elif how == "loss":
            wires.lose(0, 1)
        else:
            wires.tick(1.0)
        assert op.program is None
        memory.append(0)
        wires.resume(0)
        assert not wires.engines[0].paused

    def test_an_error_behind_a_pause_tells_the_time_since_the_call(self):
        def fails():
            yield PAUSE
            raise RemoteError(1, "ValueError", "no")

        wires = Wires(1)
        op = wires.start(0, program=fails())
        wires.now = 2.5
        wires.resume(0)
        assert op.error.elapsed == 2.5

    def test_bytes_that_come_meanwhile_are_kept(self):
        wires = Wires(2)

        def receiver():
            yield PAUSE
            return (yield from recv_message(0))

        wires.start(0, program=(yield_from_message()))
        op = wires.submit(1, operation(program=receiver()))
        for _ in range(3):
            wires.flush(0)
            wires.read(0, 1)
        assert op.program is not None
        wires.settle()
        assert wires.results(1) == [b"x" * 60_000]


def yield_from_message():
    yield from send_message(1, b"x" * 60_000)


def test_a_message_longer_than_the_limit_is_a_protocol_error_before_there_is_memory_for_it():
    program = recv_message(0, 10)
    next(program).into[:] = (11).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="of 11 bytes, at most 10"):
        next(program)


class TestDrain:
    def start(self, wires, ended):
        def sender():
            yield SendBytes(1, memoryview(bytes(300_000)))
            yield DRAIN
            ended.append(True)

        return wires.submit(0, operation(program=sender()))

    def test_the_program_goes_on_in_a_turn_of_its_own_when_all_has_left(self):
        wires, ended = Wires(2), []
        self.start(wires, ended)
        wires.start(1, recv(0, bytearray(300_000)))
        while not wires.engines[0].paused:
            assert ended == []
            wires.flush(0)
            wires.read(0, 1)
            wires.flush(1)
            wires.read(1, 0)
        assert ended == []
        wires.resume(0)
        assert ended == [True]
        wires.settle()
        wires.assert_idle()

    def test_it_does_not_wait_where_nothing_is_left_to_send(self):
        wires, ended = Wires(1), []

        def program():
            yield DRAIN
            ended.append(True)

        wires.start(0, program=program())
        assert ended == [True]

    def test_an_operation_that_is_cancelled_meanwhile_does_not_go_on(self):
        wires, ended = Wires(2), []
        op = self.start(wires, ended)
        wires.cancel(0, op)
        wires.settle()
        assert ended == []
        assert not wires.engines[0].paused
