"""`Work` is a native future: it tells one end of one operation, and cancelling it is told to the pump."""

import asyncio
import gc
import weakref

import numpy as np
import pytest

from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.operation import Operation
from asynccoll.engine.transfers import RecvBytes
from asynccoll.errors import CollectiveCancelled, CommunicatorClosed, PeerLost, RemoteError
from asynccoll.work import Work

CALL = Fingerprint("test")


class FakePump:
    """Records what it is asked to do; ends nothing by itself."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.calls = []

    def submit(self, op):
        self.calls.append(("submit", op))

    def refuse(self, op, error):
        self.calls.append(("refuse", op, error))

    def cancel(self, op):
        self.calls.append(("cancel", op))
        op.error = CollectiveCancelled(0)
        op.on_end(op)


@pytest.fixture
async def pump():
    return FakePump()


def operation(work, *transfers):
    def body():
        yield from transfers

    return Operation(CALL, digests(CALL), body())


@pytest.fixture
def started(pump):
    work = Work(loop=pump.loop)
    op = operation(work)
    work.start(pump, op)
    return work, op


def end(op, result=None, error=None):
    op.result, op.error = result, error
    op.on_end(op)


class TestEnds:
    async def test_it_is_a_future_of_the_running_loop(self, started):
        work, _ = started
        assert isinstance(work, asyncio.Future)
        assert asyncio.isfuture(work)
        assert work.get_loop() is asyncio.get_running_loop()

    async def test_it_submits_once(self, pump, started):
        _, op = started
        assert pump.calls == [("submit", op)]

    async def test_it_gives_the_result(self, started):
        work, op = started
        assert not work.done()
        end(op, "result")
        assert await work == "result"

    async def test_it_raises_the_error(self, started):
        work, op = started
        error = RemoteError(1, "ValueError", "x")
        end(op, error=error)
        with pytest.raises(RemoteError) as caught:
            await work
        assert caught.value is error

    async def test_a_refused_call_is_handed_on_with_its_error(self, pump):
        work = Work(loop=pump.loop)
        op, error = operation(work), TypeError("out= must be an array")
        op.refused = error
        work.start(pump, op)
        assert pump.calls == [("refuse", op, error)]
        end(op, error=error)
        with pytest.raises(TypeError):
            await work

    async def test_callbacks_run(self, started):
        work, op = started
        seen = []
        work.add_done_callback(seen.append)
        end(op)
        await asyncio.sleep(0)
        assert seen == [work]

    async def test_gather_wait_shield_and_timeout_take_it(self, started):
        work, op = started
        asyncio.get_running_loop().call_soon(end, op, 7)
        async with asyncio.timeout(60):
            assert (
                await asyncio.gather(work, asyncio.shield(work), asyncio.wait_for(asyncio.shield(work), 60))
                == [7] * 3
            )

    async def test_wait_is_a_coroutine_for_tasks_and_task_groups(self, started):
        work, op = started
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work.wait())
            asyncio.get_running_loop().call_soon(end, op, 7)
        assert task.result() == 7

    async def test_the_operation_and_its_memory_are_dropped_at_the_end(self, pump):
        memory = np.zeros(10, np.uint8)
        gone = weakref.ref(memory)
        work = Work(loop=pump.loop)
        op = operation(work, RecvBytes(1, memoryview(memory)))
        work.start(pump, op)
        end(op)
        pump.calls.clear()
        del op, memory
        assert gone() is None
        assert work.done()


class TestCancel:
    async def test_it_is_told_to_the_pump_at_once_and_the_outcome_is_cancelled(self, pump, started):
        work, op = started
        assert work.cancel() is True
        assert pump.calls == [("submit", op), ("cancel", op)]
        with pytest.raises(asyncio.CancelledError):
            await work

    async def test_the_message_reaches_the_awaiter(self, started):
        work, _ = started
        work.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await work

    async def test_after_the_end_it_is_false_and_says_nothing(self, pump, started):
        work, op = started
        end(op, "result")
        assert work.cancel() is False
        assert ("cancel", op) not in pump.calls
        assert await work == "result"

    async def test_a_second_one_is_false(self, pump, started):
        work, op = started
        work.cancel()
        assert work.cancel() is False
        assert pump.calls.count(("cancel", op)) == 1

    async def test_cancelling_the_awaiting_task_cancels_the_operation(self, pump, started):
        work, op = started
        task = asyncio.create_task(work.wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ("cancel", op) in pump.calls
        assert work.cancelled()

    async def test_a_task_that_is_cancelled_before_its_first_step_cancels_the_operation_too(
        self, pump, started
    ):
        work, op = started
        task = asyncio.create_task(work.wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ("cancel", op) in pump.calls
        assert work.cancelled()

    async def test_a_coroutine_that_is_closed_unused_cancels_nothing(self, pump, started):
        work, op = started
        work.wait().close()
        begun = work.wait()
        begun.send(None)
        begun.close()
        end(op, 7)
        assert await work.wait() == 7
        assert pump.calls == [("submit", op)]

    async def test_another_error_thrown_into_it_is_raised_and_cancels_nothing(self, pump, started):
        work, op = started
        with pytest.raises(LookupError):
            work.wait().throw(LookupError("x"))
        begun = work.wait()
        begun.send(None)
        with pytest.raises(LookupError):
            begun.throw(LookupError("x"))
        assert pump.calls == [("submit", op)]
        end(op)

    async def test_a_shield_keeps_it_running(self, pump, started):
        work, op = started
        shielded = asyncio.shield(work)
        shielded.cancel()
        await asyncio.sleep(0)
        assert not work.done()
        end(op, 7)
        assert await work == 7
        assert pump.calls == [("submit", op)]

    async def test_an_end_that_comes_after_it_changes_nothing(self, started):
        work, op = started
        work.cancel()
        end(op, "late")
        assert work.cancelled()


class TestNobodyAwaits:
    async def complaints(self, pump, error):
        told = []
        pump.loop.set_exception_handler(lambda loop, context: told.append(context["message"]))
        work = Work(loop=pump.loop)
        op = operation(work)
        work.start(pump, op)
        end(op, error=error)
        pump.calls.clear()
        del work, op
        gc.collect()
        await asyncio.sleep(0)
        return told

    @pytest.mark.parametrize(
        "error",
        [PeerLost([1], "reset"), CommunicatorClosed(1), CollectiveCancelled(1)],
        ids=lambda e: type(e).__name__,
    )
    async def test_one_cause_that_fails_many_is_not_told_by_each(self, pump, error):
        assert await self.complaints(pump, error) == []

    @pytest.mark.parametrize(
        "error", [ValueError("x"), RemoteError(1, "ValueError", "x")], ids=lambda e: type(e).__name__
    )
    async def test_any_other_failure_is(self, pump, error):
        (message,) = await self.complaints(pump, error)
        assert "never retrieved" in message
