"""Point to point: what is matched with what, in which order, and that nothing is lost by a cancel, a death or a refusal."""

import array
import asyncio
import random

import numpy as np
import pytest
from faults import crash, in_virtual_time, read_slowly, settle

from asynccoll import (
    CollectiveCancelled,
    CollectiveTimeout,
    CommunicatorClosed,
    Message,
    PeerLost,
)
from asynccoll.sim.driver import Conditions

LARGE = 300_001
"""Elements of float64 that travel only when they are taken."""


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


def refuse():
    raise LookupError("not here")


class Refused:
    def __reduce__(self):
        return refuse, ()


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            0,
            "text",
            {"a": [1, (2,)]},
            b"x" * 100_000,
            np.float32(3),
            np.arange(12.0).reshape(3, 4).T,
            np.zeros((0, 3), "i2"),
            np.array(7, ">i4"),
            np.arange(LARGE, dtype="f8")[::-1],
            np.arange(33, dtype="c16"),
        ],
        ids=lambda value: type(value).__name__ + str(getattr(value, "shape", "")),
    )
    async def test_any_value_arrives_as_it_was_at_the_call(self, world, value):
        async with world(2) as comms:
            for first, second in (comms[:2], comms[1::-1]):
                sent = first.send(value, second.rank)
                received = await second.recv(first.rank)
                await sent
                if isinstance(value, np.ndarray | np.generic):
                    assert type(received) is type(value)
                    assert received.dtype == value.dtype.newbyteorder("=")
                    assert received.shape == value.shape
                    np.testing.assert_array_equal(received, value)
                    if isinstance(received, np.ndarray) and received.size:
                        received.flat[0] = 1
                else:
                    assert received == value

    async def test_containers_come_back_as_their_kind(self, world):
        async with world(2) as comms:
            comms[0].send(array.array("d", [1, 2]), 1)
            comms[0].send(memoryview(array.array("i", [3])), 1)
            first, second = await comms[1].recv(), await comms[1].recv()
            assert isinstance(first, array.array)
            assert first.tolist() == [1.0, 2.0]
            assert isinstance(second, memoryview)
            assert second.tolist() == [3]

    @pytest.mark.parametrize("count", [10, LARGE])
    async def test_the_content_at_the_call_counts(self, world, count):
        async with world(2) as comms:
            value = np.ones(count)
            sent = comms[0].send(value, 1)
            value[:] = 2
            assert (await comms[1].recv() == 1).all()
            await sent

    @pytest.mark.parametrize("count", [10, LARGE])
    async def test_to_oneself(self, world, count):
        async with world(2) as comms:
            value = np.arange(count)
            sent = comms[0].send(value, 0, tag=4)
            message = await comms[0].recv_message()
            await sent
            assert (message.source, message.tag) == (0, 4)
            np.testing.assert_array_equal(message.value, value)
            message.value[:] = 0
            assert value[-1] == count - 1
            waiting = comms[0].recv(0)
            comms[0].send("later", 0)
            assert await waiting == "later"


class TestMatching:
    @pytest.mark.parametrize("sizes", [(1, 1), (1, LARGE), (LARGE, 1), (LARGE, LARGE)])
    async def test_messages_of_one_source_and_tag_keep_their_order(self, world, sizes):
        async with world(2) as comms:
            sent = [comms[0].send(np.full(size, number), 1) for number, size in enumerate(sizes * 4)]
            for number in range(len(sent)):
                assert (await comms[1].recv(0, 0))[0] == number
            await asyncio.gather(*sent)

    async def test_tags_and_sources_choose(self, world):
        async with world(3) as comms:
            for source in (0, 2):
                for tag in (5, -1):
                    comms[source].send((source, tag), 1, tag)
            await settle()
            receive = comms[1].recv
            assert await receive(2, -1) == (2, -1)
            assert await receive(tag=5, src=2) == (2, 5)
            assert await receive(0, 5) == (0, 5)
            assert await comms[1].recv_message() == Message((0, -1), 0, -1)

    async def test_receives_are_served_in_the_order_in_which_they_were_posted(self, world):
        async with world(2) as comms:
            works = [comms[1].recv() for _ in range(4)]
            chosen = comms[1].recv(tag=9)
            for number in range(3):
                comms[0].send(number, 1)
            comms[0].send("nine", 1, 9)
            comms[0].send("nine again", 1, 9)
            assert await asyncio.gather(*works) == [0, 1, 2, "nine"]
            assert await chosen == "nine again"

    async def test_any_source_takes_what_arrived_first(self, world):
        async with world(3) as comms:
            comms[2].send("early", 1)
            await settle()
            comms[0].send("late", 1)
            await settle()
            assert (await comms[1].recv_message()).source == 2
            assert (await comms[1].recv_message()).source == 0

    async def test_groups_have_messages_of_their_own(self, world):
        async with world(3) as comms:
            pair = comms[0].new_group([1, 0]), comms[1].new_group([1, 0])
            waiting = comms[1].recv()
            pair[0].send("in the pair", 0)
            assert await pair[1].recv_message() == Message("in the pair", 1, 0)
            comms[0].send("in the world", 1)
            assert await waiting == "in the world"

    async def test_a_message_may_come_before_the_group_is_made(self, world):
        async with world(2) as comms:
            sent = [comms[0].new_group([0, 1]).send(np.full(count, 7), 1) for count in (3, 3)]
            await settle()
            late = [comms[1].new_group([0, 1]) for _ in range(2)]
            for one in late:
                assert (await one.recv()).tolist() == [7, 7, 7]
            await asyncio.gather(*sent)

    async def test_they_are_independent_of_the_order_of_collectives(self, world):
        async with world(2) as comms:
            waiting = comms[0].recv(1)
            totals = [comm.allreduce(1) for comm in comms]
            comms[1].send("x", 0)
            assert await waiting == "x"
            assert await asyncio.gather(*totals) == [len(comms)] * len(comms)

    @pytest.mark.parametrize("seed", range(5))
    async def test_random_traffic_arrives_once_and_in_order(self, world, seed):
        rng = random.Random(seed)
        async with world(4) as comms:
            count = 60
            plan = [
                (
                    rng.randrange(len(comms)),
                    rng.randrange(len(comms)),
                    rng.randrange(3),
                    rng.choice([1, 5_000, 40_000]),
                )
                for _ in range(count)
            ]
            sent = []
            for number, (source, target, tag, size) in enumerate(plan):
                sent.append(comms[source].send(np.full(size, number), target, tag))
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
            for target, comm in enumerate(comms):
                for source in range(len(comms)):
                    for tag in range(3):
                        expected = [n for n, row in enumerate(plan) if row[:3] == (source, target, tag)]
                        got = [(await comm.recv(source, tag))[0] for _ in expected]
                        assert got == expected
            await asyncio.gather(*sent)
            for comm in comms:
                assert comm.pending() == []


class TestCancel:
    async def test_a_cancelled_receive_takes_nothing(self, world):
        async with world(2) as comms:
            waiting = comms[1].recv()
            waiting.cancel()
            await comms[0].send("kept", 1)
            assert await comms[1].recv() == "kept"
            assert waiting.cancelled()

    @pytest.mark.parametrize("turns", range(8))
    async def test_a_payload_that_was_on_its_way_waits_for_the_next(self, world, turns):
        async with world(2) as comms:
            sent = comms[0].send(np.arange(LARGE), 1)
            waiting = comms[1].recv()
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            if not waiting.cancelled():
                return
            second = comms[0].send("second", 1)
            np.testing.assert_array_equal(await comms[1].recv(), np.arange(LARGE))
            assert await comms[1].recv() == "second"
            await asyncio.gather(sent, second)

    async def test_a_cancelled_send_is_taken_back(self, world):
        async with world(2) as comms:
            sent = comms[0].send(np.arange(LARGE), 1)
            await settle()
            sent.cancel()
            comms[0].send("next", 1)
            assert await comms[1].recv() == "next"
            assert sent.cancelled()

    @pytest.mark.parametrize("turns", range(8))
    async def test_also_while_its_payload_is_on_its_way(self, world, turns):
        async with world(2) as comms:
            sent = comms[0].send(np.arange(LARGE), 1)
            waiting = comms[1].recv()
            for _ in range(turns):
                await asyncio.sleep(0)
            sent.cancel()
            comms[0].send("next", 1)
            result = await waiting
            if sent.cancelled() and isinstance(result, str):
                assert result == "next"
            else:
                np.testing.assert_array_equal(result, np.arange(LARGE))
                assert await comms[1].recv() == "next"
            assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [len(comms)] * len(comms)


class TestTimeout:
    async def test_a_receive_names_whom_it_waited_for_and_which_tag(self, world):
        async with world(3) as comms:
            others = frozenset(range(len(comms))) - {1}
            for arguments, missing, says in (
                ((2,), {2}, "no message with any tag came from rank 2. "),
                ((2, -7), {2}, "no message with tag -7 came from rank 2. "),
                ((None, 7), others, "no message with tag 7 came from any rank. "),
                ((), others, "no message with any tag came from any rank. "),
                ((1, 0), {1}, "no message with tag 0 came from rank 1. "),
            ):
                for verb in ("recv", "recv_message"):
                    with pytest.raises(CollectiveTimeout) as caught:
                        await getattr(comms[1], verb)(*arguments, timeout=0.05)
                    assert (caught.value.missing, caught.value.limit) == (missing, 0.05)
                    assert caught.value.op == verb
                    text = str(caught.value)
                    assert f"timed out (limit 0.05 s): {says}Check source and tag of its send" in text
                    assert "call" not in text

    async def test_a_receive_tells_of_messages_that_it_did_not_want(self, world):
        async with world(3) as comms:
            for number in range(4):
                await comms[0].send(number, 1, number)
            await settle()
            with pytest.raises(CollectiveTimeout) as caught:
                await comms[1].recv(2, 0, timeout=0.05)
            assert caught.value.missing == {2}
            assert "came from rank 2 (4 others wait here: from rank 0 with tag 0, " in str(caught.value)
            assert "from rank 0 with tag 2, ...). " in str(caught.value)
            assert [await comms[1].recv() for _ in range(4)] == [0, 1, 2, 3]

    @pytest.mark.fixed_size("one link that crawls")
    async def test_where_only_the_payload_is_late_both_ends_say_so(self, world):
        if not in_virtual_time():
            pytest.skip("needs a link that crawls")
        async with world(2) as comms:
            sending = comms[0].send(np.arange(LARGE), 1, 5, timeout=5.0)
            await settle()
            read_slowly(comms[1], [0], Conditions(delay=1e6, buffer=1 << 16))
            with pytest.raises(CollectiveTimeout) as caught:
                await comms[1].recv(0, timeout=0.1)
            assert caught.value.missing == set()
            assert "the payload of the message from rank 0 with tag 5 did not arrive in time" in str(
                caught.value
            )
            with pytest.raises(CollectiveTimeout) as caught:
                await sending
            assert caught.value.missing == set()
            assert "the payload of the message with tag 5 did not leave for rank 1 in time" in str(
                caught.value
            )

    async def test_a_send_that_nobody_takes_is_taken_back(self, world):
        async with world(2) as comms:
            with pytest.raises(CollectiveTimeout) as caught:
                await comms[0].send(np.arange(LARGE), 1, 3, timeout=0.05)
            assert caught.value.missing == frozenset({1})
            assert "rank 1 did not receive the message with tag 3. Check that it calls recv" in str(
                caught.value
            )
            comms[0].send("next", 1)
            assert await comms[1].recv() == "next"


class TestErrors:
    @pytest.mark.parametrize(
        ("start", "error", "match"),
        [
            (lambda comm: comm.send(1, 99), ValueError, "dst=99"),
            (lambda comm: comm.send(1, -1), ValueError, "dst=-1"),
            (lambda comm: comm.send(1, "1"), TypeError, "dst='1'"),
            (lambda comm: comm.send(1, 1, 2**64), ValueError, "tag"),
            (lambda comm: comm.send(1, 1, "a"), TypeError, "tag='a'"),
            (lambda comm: comm.send(Unpicklable(), 1), TypeError, "not this one"),
            (lambda comm: comm.recv(99), ValueError, "src=99"),
            (lambda comm: comm.recv(tag=1.5), TypeError, "tag=1.5"),
            (lambda comm: comm.recv(timeout=-1), ValueError, "timeout"),
            (lambda comm: comm.send(1, 1, key="k"), ValueError, "key"),
        ],
    )
    async def test_a_wrong_argument_fails_here_and_nothing_is_sent(self, world, start, error, match):
        async with world(2) as comms:
            with pytest.raises(error, match=match):
                await start(comms[0])
            comms[0].send("right", 1)
            assert await comms[1].recv() == "right"
            assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [len(comms)] * len(comms)

    async def test_what_does_not_unpickle_is_raised_by_its_receive_alone(self, world):
        async with world(2) as comms:
            comms[0].send(Refused(), 1)
            comms[0].send("right", 1)
            with pytest.raises(LookupError, match="not here") as caught:
                await comms[1].recv()
            assert caught.value.__notes__ == ["raised by the message of rank 0 with tag 0"]
            assert await comms[1].recv() == "right"


class TestLoss:
    async def test_whoever_needs_the_dead_rank_is_told(self, world):
        async with world(4) as comms:
            from_it, from_any, from_other = comms[0].recv(2), comms[0].recv(), comms[0].recv(1, 7)
            to_it = comms[0].send(np.arange(LARGE), 2)
            await settle()
            crash(comms[2])
            for work in (from_it, from_any, to_it):
                with pytest.raises(PeerLost) as caught:
                    await work
                assert caught.value.peer == 2
            comms[1].send("alive", 0, 7)
            assert await from_other == "alive"
            with pytest.raises(PeerLost):
                await comms[0].recv(2)

    async def test_what_it_had_sent_is_still_received(self, world):
        async with world(3) as comms:
            await comms[2].send("last words", 0)
            comms[2].send(np.arange(LARGE), 0)
            await settle()
            crash(comms[2])
            waiting = comms[1].recv(2)
            with pytest.raises(PeerLost):
                await waiting
            await settle()
            assert await comms[0].recv() == "last words"
            with pytest.raises(PeerLost):
                await comms[0].recv()

    async def test_one_that_leaves_is_no_loss(self, world):
        async with world(2) as comms:
            await comms[1].send("bye", 0)
            waiting = comms[0].recv(1, 3)
            await comms[1].close()
            with pytest.raises(CommunicatorClosed) as caught:
                await waiting
            assert caught.value.origin == 1
            assert await comms[0].recv(1) == "bye"

    async def test_closing_ends_what_is_posted_here(self, world):
        async with world(2) as comms:
            waiting = comms[0].recv()
            await comms[0].close()
            with pytest.raises(CommunicatorClosed):
                await waiting


def test_errors_of_messages_have_no_number():
    error = CollectiveCancelled(0)
    assert error.seq == -1
