"""`Parts` and `Stream` by themselves; what travels is the business of the conformance suite."""

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from asynccoll.calls import Parts
from asynccoll.testing import local_world


class TestParts:
    def parts(self):
        found = Parts(lambda: None)
        found.show(lambda lo, hi: (lo, hi))
        return found

    def taken(self, parts):
        return list(iter(parts.take, None))

    def test_the_oldest_comes_first(self):
        parts = self.parts()
        for lo, hi in ((5, 6), (0, 2), (8, 9)):
            parts.tell(lo, hi)
        assert self.taken(parts) == [(5, (5, 6)), (0, (0, 2)), (8, (8, 9))]
        assert parts.take() is None

    def test_those_that_follow_each_other_grow_together(self):
        parts = self.parts()
        for lo in range(100):
            parts.tell(lo, lo + 1)
            parts.tell(1000 + lo, 1001 + lo)
        assert self.taken(parts) == [(0, (0, 100)), (1000, (1000, 1100))]

    def test_what_was_taken_does_not_come_again(self):
        parts = self.parts()
        parts.tell(0, 3)
        assert parts.take() == (0, (0, 3))
        parts.tell(3, 5)
        assert parts.take() == (3, (3, 5))

    def test_each_is_announced(self):
        calls = []
        parts = Parts(lambda: calls.append(1))
        parts.tell(0, 1)
        parts.tell(1, 2)
        assert len(calls) == 2

    def test_one_thread_tells_and_another_takes(self):
        parts, count = self.parts(), 20_000
        teller = threading.Thread(target=lambda: [parts.tell(lo, lo + 1) for lo in range(count)])
        teller.start()
        found = []
        while sum(hi - lo for _, (lo, hi) in found) < count:
            found += self.taken(parts)
        teller.join()
        assert [element for _, span in found for element in range(*span)] == list(range(count))


class TestStream:
    async def test_its_memory_does_not_wait_for_the_cycle_collector(self):
        async with local_world(1) as (comm,):
            gc.collect()
            gc.disable()
            try:
                stream = comm.allreduce_stream(np.ones(9))
                async for _, view in stream:
                    memory = weakref.ref(view.base)
                del stream, view
                await asyncio.sleep(0)
                assert memory() is None
            finally:
                gc.enable()

    async def test_a_failure_drops_what_was_not_taken(self):
        async with local_world(2) as comms:
            stream = comms[0].allreduce_stream(np.ones(9))
            stream._parts.tell(0, 4)
            comms[1].allreduce_stream(np.ones(8)).work.add_done_callback(lambda work: work.exception())
            await asyncio.wait([stream.work])
            with pytest.raises(Exception, match="allreduce_stream") as caught:
                await anext(stream)
            assert caught.value is stream.work.exception()
