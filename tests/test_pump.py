"""What every driver shares: write before telling, one timer, no re-entry."""

import asyncio

import pytest

from asynccoll.engine import wire
from asynccoll.engine.engine import Engine
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.operation import Operation
from asynccoll.engine.transfers import PAUSE, RecvBytes, SendBytes
from asynccoll.errors import CollectiveCancelled, CommunicatorClosed, PeerLost
from asynccoll.pump import Pump

CALL = Fingerprint("test")


class FakeLoop:
    """A clock that the test sets, and the timers set on it."""

    def __init__(self):
        self.now = 0.0
        self.timers = []
        self.soon = []

    def time(self):
        return self.now

    def call_at(self, when, callback):
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def call_soon(self, callback):
        self.soon.append(Timer(self.now, callback))
        return self.soon[-1]

    def turn(self):
        """One turn of the loop: what was to be called soon; how many calls that were."""
        calls, self.soon = [call for call in self.soon if not call.cancelled], []
        for call in calls:
            call.callback()
        return len(calls)

    def live(self):
        return [timer.when for timer in self.timers if not timer.cancelled]

    def fire(self):
        """Let the earliest timer fire at its time."""
        timer = min((timer for timer in self.timers if not timer.cancelled), key=lambda timer: timer.when)
        self.timers.remove(timer)
        self.now = timer.when
        timer.callback()


class Timer:
    def __init__(self, when, callback):
        self.when, self.callback, self.cancelled = when, callback, False

    def cancel(self):
        self.cancelled = True


class FakeDriver(Pump):
    """Writes into a list; says in `story` what happened in which order."""

    def __init__(self, size=2):
        super().__init__(Engine(0, size), FakeLoop())
        self.story = []

    def write(self, peer):
        while parts := self.engine.data_to_send(peer):
            data = b"".join(parts)
            self.story.append(("write", peer, wire.HEADER.unpack_from(data)[0]))
            self.engine.sent(peer, len(data))

    def drop(self, peer):
        self.story.append(("drop", peer))

    async def close(self, cause):
        raise NotImplementedError

    def receive(self, peer, data):
        memory = self.engine.receive_into(peer)
        memory[: len(data)] = data
        self.engine.received(peer, len(data), self.loop.time())
        self.flush()


@pytest.fixture
def driver():
    return FakeDriver()


def operation(driver, *transfers, timeout=None, program=None):
    def body():
        yield from transfers

    return Operation(
        CALL,
        digests(CALL),
        body() if program is None else program,
        timeout=timeout,
        on_end=lambda op: driver.story.append(("end", op)),
    )


def record():
    strict, value, tag = digests(CALL)
    return wire.start_frame(0, 0, 0, tag, (strict, value, wire.NO_DEADLINE, 2), 2)


class TestFlush:
    def test_what_is_due_is_written_at_the_call(self, driver):
        driver.submit(operation(driver))
        assert driver.story == [("write", 1, wire.START)]

    def test_ends_are_told_after_everything_has_been_written(self, driver):
        op = operation(driver, SendBytes(1, b"x"))
        driver.receive(1, record())
        driver.submit(op)
        assert driver.story == [("write", 1, wire.START), ("end", op)]

    def test_peers_are_written_to_in_the_order_in_which_they_became_due(self):
        driver = FakeDriver(5)
        driver.cancel(operation_of(driver))
        peers = [peer for what, peer, *_ in driver.story if what == "write"]
        assert peers == [1, 1, 2, 3, 4]

    def test_a_peer_that_breaks_the_protocol_is_dropped_and_its_operations_end(self, driver):
        op = operation(driver)
        driver.submit(op)
        driver.story.clear()
        driver.receive(1, b"\xff" * 24)
        assert sorted(driver.story, key=str) == sorted([("drop", 1), ("end", op)], key=str)
        assert isinstance(op.error, PeerLost)

    def test_a_refusal_is_told_here_and_there(self, driver):
        op = operation(driver)
        error = TypeError("no")
        driver.refuse(op, error)
        assert driver.story == [("write", 1, wire.ABORT), ("end", op)]
        assert op.error is error


def operation_of(driver):
    op = operation(driver)
    driver.submit(op)
    return op


class TestTimer:
    def test_there_is_none_without_a_limit(self, driver):
        driver.submit(operation(driver))
        assert driver.loop.live() == []

    def test_one_serves_all_limits_and_only_an_earlier_one_sets_it_anew(self, driver):
        for limit, expected in [(5.0, [5.0]), (9.0, [5.0]), (2.0, [2.0]), (7.0, [2.0])]:
            driver.submit(operation(driver, timeout=limit))
            assert driver.loop.live() == expected

    def test_it_fires_for_one_limit_after_another(self, driver):
        ops = [operation(driver, timeout=limit) for limit in (3.0, 5.0)]
        for op in ops:
            driver.submit(op)
        driver.story.clear()
        driver.loop.fire()
        assert driver.loop.now == 3.0
        assert driver.story == [("write", 1, wire.ABORT)]  # the others are asked
        driver.loop.fire()
        assert driver.loop.now == 3.5
        assert driver.story[-1] == ("end", ops[0])
        driver.loop.fire()
        driver.loop.fire()
        assert driver.story[-1] == ("end", ops[1])
        assert driver.loop.live() == []

    def test_one_that_fires_too_early_is_set_again(self, driver):
        driver.submit(operation(driver, timeout=3.0))
        (timer,) = driver.loop.timers
        driver.loop.timers.clear()
        driver.loop.now = 2.9999
        timer.callback()
        assert driver.loop.live() == [3.0]

    def test_it_can_be_stopped_twice(self, driver):
        driver.submit(operation(driver, timeout=3.0))
        driver.stop_timer()
        driver.stop_timer()
        assert driver.loop.live() == []


class TestReentry:
    @pytest.mark.parametrize("what", ["submit", "refuse"])
    def test_a_call_from_inside_the_engine_is_refused_and_does_no_harm(self, driver, what):
        caught = []

        def body():
            other = operation(driver)
            arguments = (other, TypeError("x")) if what == "refuse" else (other,)
            try:
                getattr(driver, what)(*arguments)
            except RuntimeError as error:
                caught.append(str(error))
            yield SendBytes(1, b"x")

        op = operation(driver, program=body())
        driver.submit(op)
        assert "inside a reduce function" in caught[0]
        assert driver.engine.group().next_seq == 1
        assert not driver.busy
        driver.submit(operation(driver))
        assert driver.engine.group().next_seq == 2

    def test_it_is_free_again_after_an_error(self, driver):
        driver.engine.submit = None
        with pytest.raises(TypeError):
            driver.submit(operation(driver))
        assert not driver.busy


class TestLog:
    def test_a_loss_is_told_once_however_many_operations_it_fails(self, driver, caplog):
        for _ in range(3):
            driver.submit(operation(driver))
        driver.engine.peer_lost(1, "reset", 0.0)
        driver.flush()
        driver.submit(operation(driver))
        (message,) = [entry.message for entry in caplog.records]
        assert "lost rank 1 (reset)" in message

    def test_so_is_a_rank_that_leaves(self, driver, caplog):
        for _ in range(3):
            driver.submit(operation(driver))
        driver.receive(1, wire.goodbye_frame(0, {"cause": "went home", "next": {0: 0}}))
        (message,) = [entry.message for entry in caplog.records]
        assert "went home" in message

    def test_what_one_operation_did_is_not(self, driver, caplog):
        driver.cancel(operation_of(driver))
        driver.refuse(operation(driver), TypeError("x"))
        error = operation_of(driver)
        driver.engine.close("bye", 0.0)
        driver.flush()
        assert isinstance(error.error, CommunicatorClosed)
        assert not caplog.records


def test_it_cannot_be_made_without_its_abstract_parts():
    with pytest.raises(TypeError):
        Pump(Engine(0, 2), asyncio.AbstractEventLoop())


class TestTurns:
    def test_what_is_paused_goes_on_in_turns_of_the_loop_one_slice_each(self, driver):
        first, second = operation(driver, PAUSE, PAUSE), operation(driver, PAUSE)
        driver.submit(first)
        driver.submit(second)
        left = []
        while driver.loop.turn():
            left.append((first.program is not None, second.program is not None))
        assert left == [(True, True), (True, False), (False, False)]
        assert not driver.busy

    def test_without_anything_paused_there_are_none(self, driver):
        driver.submit(operation(driver, SendBytes(1, b"x")))
        assert driver.loop.soon == []

    def test_what_the_program_does_then_is_written_and_nothing_may_be_started_from_within(self, driver):
        def program():
            yield PAUSE
            with pytest.raises(RuntimeError, match="from inside a reduce function"):
                driver.submit(operation(driver))
            yield SendBytes(1, b"x")

        driver.submit(operation(driver, program=program()))
        driver.story.clear()
        driver.loop.turn()
        assert driver.story == [("write", 1, wire.DATA)]

    def test_one_that_raises_does_not_stop_the_others(self, driver):
        def program():
            yield PAUSE
            raise SystemExit(3)

        driver.submit(operation(driver, program=program()))
        other = operation(driver, PAUSE)
        driver.submit(other)
        with pytest.raises(SystemExit):
            driver.loop.turn()
        assert not driver.busy
        driver.loop.turn()
        assert other.program is None

    def test_after_the_end_there_are_none(self, driver):
        driver.submit(operation(driver, PAUSE))
        driver.stop_timer()
        assert driver.loop.turn() == 0


class TestFailures:
    """What the engine raises in a callback has no caller: it must end what it was about, and reach the loop."""

    @pytest.mark.parametrize("where", ["data_to_send", "handle_timer", "resume"])
    def test_an_engine_that_raises_in_a_callback_ends_every_operation_and_the_loop_hears_of_it(
        self, driver, monkeypatch, where
    ):
        ops = [operation(driver, PAUSE, timeout=5.0), operation(driver, PAUSE)]
        for op in ops:
            driver.submit(op)
        monkeypatch.setattr(driver.engine, where, lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            if where == "data_to_send":
                driver.submit(operation(driver))
            elif where == "handle_timer":
                driver._on_timer()
            else:
                driver.loop.turn()
        monkeypatch.undo()
        driver.loop.turn()
        for op in ops:
            assert op.error.peers == {0}
            assert op.error.reason.startswith("internal error: ZeroDivisionError")
        assert ("drop", 1) in driver.story


class TestCancelFromASignalHandler:
    """asyncio cancels the main task inside the handler of SIGINT, which may run in the middle of anything."""

    def test_in_the_middle_of_a_call_it_waits_for_its_end(self, driver):
        waiting = operation(driver, RecvBytes(1, memoryview(bytearray(1))))
        driver.submit(waiting)

        def program():
            driver.cancel(waiting)
            assert waiting.error is None
            yield SendBytes(1, b"x")

        driver.submit(operation(driver, program=program()))
        assert isinstance(waiting.error, CollectiveCancelled)
        assert not driver.busy

    def test_in_the_middle_of_a_write_it_waits_for_its_end(self, driver, monkeypatch):
        waiting = operation(driver, RecvBytes(1, memoryview(bytearray(1))))
        driver.submit(waiting)
        write, seen = driver.write, []

        def interrupted(peer):
            if not seen:
                driver.cancel(waiting)
                seen.append(waiting.error)
            write(peer)

        monkeypatch.setattr(driver, "write", interrupted)
        driver.submit(operation(driver, SendBytes(1, b"x")))
        assert seen == [None]
        assert isinstance(waiting.error, CollectiveCancelled)

    @pytest.mark.parametrize("error", [SystemExit(143), KeyboardInterrupt()])
    def test_an_exit_out_of_it_in_the_middle_of_a_call_gives_the_rank_up(self, driver, monkeypatch, error):
        waiting = operation(driver, RecvBytes(1, memoryview(bytearray(1))))
        driver.submit(waiting)

        def interrupted(*_):
            raise error

        monkeypatch.setattr(driver.engine, "begin", interrupted)
        with pytest.raises(type(error)):
            driver.submit(operation(driver))
        driver.loop.turn()
        assert isinstance(waiting.error, PeerLost)
        assert waiting.error.peers == {0}
        assert not driver.busy
