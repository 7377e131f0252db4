"""Groups: who is in, what is matched, and that one group never waits for another."""

import asyncio

import numpy as np
import pytest
from faults import crash

from asynccoll import CollectiveMismatch, CollectiveTimeout, CommunicatorClosed, NotInitialized, PeerLost


async def made(comms, ranks, **options):
    """Group rank -> communicator, made by all ranks of ``comms``; the others get None."""
    found = [comm.new_group(ranks, **options) for comm in comms]
    assert [rank for rank, group in enumerate(found) if group is not None] == sorted(ranks)
    return [found[rank] for rank in ranks]


class TestMembership:
    @pytest.mark.fixed_size("lists of ranks written out")
    @pytest.mark.parametrize("ranks", [[0, 3], [3, 0], [1], [2, 1, 0], [0, 1, 2, 3], [3, 2, 1, 0]])
    async def test_the_order_of_the_list_is_the_order_of_ranks(self, world, ranks):
        async with world(4) as comms:
            group = await made(comms, ranks)
            assert [one.rank for one in group] == list(range(len(ranks)))
            assert [one.ranks for one in group] == [tuple(ranks)] * len(ranks)
            gathered = await asyncio.gather(
                *(one.allgather(rank) for one, rank in zip(group, ranks, strict=True))
            )
            assert gathered == [ranks] * len(ranks)
            sums = await asyncio.gather(
                *(one.allreduce(np.full(100_000, rank)) for one, rank in zip(group, ranks, strict=True))
            )
            assert all((result == sum(ranks)).all() for result in sums)

    @pytest.mark.fixed_size("lists of ranks written out")
    async def test_non_members_need_not_call(self, world):
        async with world(4) as comms:
            pair = [comms[rank].new_group([1, 2]) for rank in (1, 2)]
            assert await asyncio.gather(*(one.allreduce(1) for one in pair)) == [2, 2]
            assert comms[0].new_group([1, 2]) is None

    @pytest.mark.fixed_size("lists of ranks written out")
    async def test_the_same_list_twice_is_two_channels(self, world):
        async with world(3) as comms:
            first, second = await made(comms, [0, 2]), await made(comms, [0, 2])
            # In another order on each rank: of one channel it would be a mismatch.
            works = [
                first[0].allreduce(1),
                second[0].allreduce([1]),
                second[1].allreduce([2]),
                first[1].allreduce(2),
            ]
            assert await asyncio.gather(*works) == [3, [1, 2], [1, 2], 3]
            assert first[0].name != second[0].name

    @pytest.mark.fixed_size("lists of ranks written out")
    async def test_a_group_of_a_group_counts_ranks_in_its_parent(self, world):
        async with world(5) as comms:
            odd = await made(comms, [4, 2, 0])
            inner = [one.new_group([2, 0]) for one in odd]
            assert inner[1] is None
            assert inner[0].ranks == inner[2].ranks == (0, 4)
            results = await asyncio.gather(inner[0].allgather("four"), inner[2].allgather("zero"))
            assert results == [["zero", "four"]] * 2

    async def test_a_group_of_one_needs_nobody(self, world):
        async with world(3) as comms:
            alone = comms[1].new_group([1])
            assert await alone.allreduce(5) == 5
            assert (await alone.allreduce(np.ones(3))).tolist() == [1, 1, 1]
            await alone.barrier()

    @pytest.mark.parametrize(
        ("ranks", "error", "match"),
        [
            ([], ValueError, "empty"),
            ([0, 1, 0], ValueError, "twice"),
            ([0, 10_000], ValueError, "10000, which is not a rank"),
            ([-1], ValueError, "-1, which is not a rank"),
            (["0"], TypeError, "'0', which is not an integer"),
            ([0.0], TypeError, "not an integer"),
        ],
    )
    async def test_a_wrong_list_is_refused_and_nothing_is_numbered(self, world, ranks, error, match):
        async with world(3) as comms:
            with pytest.raises(error, match=match):
                comms[0].new_group(ranks)
            group = await made(comms, [0, 1])
            assert await asyncio.gather(*(one.allreduce(1) for one in group)) == [2, 2]


class TestIndependence:
    @pytest.mark.fixed_size("lists of ranks written out")
    async def test_groups_in_opposite_order_do_not_wait_for_each_other(self, world):
        async with world(4) as comms:
            left, right = await made(comms, [0, 1, 2]), await made(comms, [2, 1, 3])
            left_of = dict(zip((0, 1, 2), left, strict=True))
            right_of = dict(zip((2, 1, 3), right, strict=True))

            async def one(first, second):
                return [(await group.allreduce(np.ones(200_000)))[0] for group in (first, second)]

            results = await asyncio.gather(
                one(left_of[1], right_of[1]),
                asyncio.gather(
                    right_of[2].allreduce(np.ones(200_000)), left_of[2].allreduce(np.ones(200_000))
                ),
                left_of[0].allreduce(np.ones(200_000)),
                right_of[3].allreduce(np.ones(200_000)),
            )
            assert results[0] == [3.0, 3.0]

    @pytest.mark.fixed_size("lists of ranks written out")
    async def test_groups_made_and_used_in_another_order_on_each_rank(self, world):
        lists = ([0, 3], [1, 2], [2, 1, 0, 3], [3, 1])
        async with world(4) as comms:

            async def rank(comm):
                """Makes and uses its own groups only, beginning with another one than its neighbour."""
                mine = [ranks for ranks in lists if comm.rank in ranks]
                turned = mine[comm.rank % len(mine) :] + mine[: comm.rank % len(mine)]
                works = {}
                for ranks in turned:
                    group = comm.new_group(ranks)
                    works[tuple(ranks)] = group.allgather(comm.rank), group.allreduce(np.ones(70_000))
                return {key: [await one for one in pair] for key, pair in works.items()}

            for found in await asyncio.gather(*map(rank, comms)):
                for ranks, (gathered, total) in found.items():
                    assert gathered == list(ranks)
                    assert (total == len(ranks)).all()

    async def test_awaiting_two_groups_in_opposite_order_ends_at_the_limit_and_both_go_on(self, world):
        """Each rank waits for the other's other call: no library can help that, but nobody hangs, and the ranks are named."""
        async with world(2) as comms:
            one, two = await made(comms, [0, 1]), await made(comms, [0, 1])
            order = [(one[0], two[0]), (two[1], one[1])]
            works = [first.barrier(timeout=0.05) for first, _ in order]
            for own, error in enumerate(await asyncio.gather(*works, return_exceptions=True)):
                assert type(error) is CollectiveTimeout
                assert error.missing == {1 - own}
                assert order[own][0].name in str(error)
            for _, second in order:
                with pytest.raises(CollectiveTimeout):
                    await second.barrier()
            for group in (one, two):
                assert await asyncio.gather(*(comm.allreduce(1) for comm in group)) == [2, 2]

    async def test_a_member_may_use_it_long_before_another_makes_it(self, world):
        async with world(2) as comms:
            early = comms[0].new_group([0, 1])
            works = [early.allreduce(np.full(50_000, number)) for number in range(20)]
            await asyncio.gather(*(comm.allreduce(1) for comm in comms))
            late = comms[1].new_group([0, 1])
            others = [late.allreduce(np.full(50_000, number)) for number in range(20)]
            for number, result in enumerate(await asyncio.gather(*works, *others)):
                assert (result == 2 * (number % 20)).all()

    async def test_a_mismatch_in_one_leaves_the_others_alone(self, world):
        async with world(3) as comms:
            group = await made(comms, [0, 1])
            works = [group[0].allreduce(np.ones(3)), group[1].allreduce(np.ones(4))]
            fine = [comm.allreduce(1) for comm in comms]
            for outcome in await asyncio.gather(*works, return_exceptions=True):
                assert isinstance(outcome, CollectiveMismatch)
                assert outcome.group == group[0].name
            assert await asyncio.gather(*fine) == [len(comms)] * len(comms)
            assert await asyncio.gather(*(one.allreduce(1) for one in group)) == [2, 2]


class TestLoss:
    @pytest.mark.fixed_size("lists of ranks written out")
    async def test_only_groups_with_the_dead_rank_fail(self, world):
        async with world(4) as comms:
            with_it, without = await made(comms, [3, 1]), await made(comms, [0, 1, 2])
            waiting = with_it[1].allreduce(1)
            crash(comms[3])
            with pytest.raises(PeerLost) as caught:
                await waiting
            assert (caught.value.peer, caught.value.rank, caught.value.group) == (0, 1, with_it[0].name)
            assert await asyncio.gather(*(one.allreduce(1) for one in without)) == [3, 3, 3]


class TestClose:
    async def test_the_members_are_told_and_the_parent_goes_on(self, world):
        async with world(3) as comms:
            group = await made(comms, [0, 1])
            waiting = group[1].allreduce(1)
            await group[0].close()
            await group[0].close()
            with pytest.raises(CommunicatorClosed) as caught:
                await waiting
            assert caught.value.origin == 0
            assert group[0].closed
            assert not comms[0].closed
            with pytest.raises(NotInitialized, match="new_group"):
                group[0].barrier()
            with pytest.raises(CommunicatorClosed):
                await group[1].barrier()
            assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [len(comms)] * len(comms)

    async def test_closing_the_parent_closes_it(self, world):
        async with world(2) as comms:
            group = await made(comms, [0, 1])
            await comms[0].close()
            assert group[0].closed
            with pytest.raises(NotInitialized):
                group[0].barrier()

    async def test_as_a_block(self, world):
        async with world(2) as comms:
            group = await made(comms, [1, 0])

            async def use(one):
                async with one as inside:
                    result = await inside.allreduce(1)
                    await inside.barrier()
                    return result

            assert await asyncio.gather(*map(use, group)) == [2, 2]
            assert group[0].closed

    async def test_two_thousand_groups_leave_nothing_behind(self, world):
        async with world(2) as comms:
            for _ in range(500):
                group = await made(comms, [0, 1])
                await asyncio.gather(*(one.barrier() for one in group))
                for one in group:
                    await one.close()
            await asyncio.gather(*(comm.barrier() for comm in comms))
            for comm in comms:
                assert list(comm._pump.engine._groups) == [0]


class TestSplit:
    async def test_ranks_of_one_color_are_together(self, world):
        async with world(5) as comms:
            groups = await asyncio.gather(*(comm.split(comm.rank % 2) for comm in comms))
            for color in (0, 1):
                expected = tuple(rank for rank in range(len(comms)) if rank % 2 == color)
                mine = [groups[rank] for rank in expected]
                assert [one.ranks for one in mine] == [expected] * len(expected)
                assert await asyncio.gather(*(one.allreduce(1) for one in mine)) == [len(expected)] * len(
                    expected
                )

    async def test_order_turns_them_round_and_none_is_left_out(self, world):
        async with world(4) as comms:
            size = len(comms)
            groups = await asyncio.gather(
                *(comm.split(None if comm.rank == 1 else 0, order=-comm.rank, name="back") for comm in comms)
            )
            assert groups[1] is None
            expected = tuple(rank for rank in reversed(range(size)) if rank != 1)
            assert groups[0].ranks == expected
            assert groups[0].name == "back"
            assert groups[0].rank == len(expected) - 1
