"""Operations with ``key=``: called in any order, matched by their keys, and ended for all by whoever ends them."""

import asyncio
import random

import numpy as np
import pytest
from faults import crash, in_step, settle
from ranks import on_all, ordinary, outcomes, sizes, sum_of_ranks

import asynccoll
import asynccoll.sync
from asynccoll import (
    CollectiveCancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    PeerLost,
    RemoteError,
)

MANY = ordinary(1000, 50)


def shuffled(comm, items, seed=0):
    """``items`` in an order of the rank's own."""
    items = list(items)
    random.Random(f"{seed} {comm.rank}").shuffle(items)
    return items


async def keyed_in_step(comms):
    """The ranks agree on where they are, with keys and without, and nothing is left of what was."""
    await in_step(comms)
    results = await on_all(comms, lambda comm: comm.allreduce(comm.rank, key="k"))
    assert results == [sum_of_ranks(comms)] * len(comms)
    await settle()
    for comm in comms:
        group = comm._pump.engine.group()
        assert not group.active
        assert not group.early
        assert not group.withdrawn
    assert not any(keys.outstanding for keys in comms[0]._pump.engine.keys._matching.values())


# -- results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", sizes(2, 3, 4))
async def test_a_thousand_operations_in_another_random_order_on_each_rank(world, size):
    async with world(size) as comms:
        total = sum_of_ranks(comms)

        async def run(comm):
            works = {}
            for n in shuffled(comm, range(MANY)):
                if n % 3 == 0:
                    works[n] = comm.allreduce(np.full(n % 40, n + comm.rank), key=f"step {n}")
                elif n % 3 == 1:
                    works[n] = comm.broadcast(
                        f"{n}" if comm.rank == n % size else None, n % size, key=f"step {n}"
                    )
                else:
                    works[n] = comm.allgather((n, comm.rank), key=f"step {n}")
                if n % 50 == 0:
                    await asyncio.sleep(0)
            for n, work in works.items():
                result = await work
                if n % 3 == 0:
                    np.testing.assert_array_equal(result, np.full(n % 40, n * size + total))
                elif n % 3 == 1:
                    assert result == f"{n}"
                else:
                    assert result == [(n, rank) for rank in range(size)]

        await on_all(comms, run)
        await keyed_in_step(comms)


@pytest.mark.parametrize("nbytes", [8, 50_000, ordinary(1 << 20, 1 << 15)])
async def test_arrays_of_any_size_in_place_and_in_reverse(world, nbytes):
    async with world(3) as comms:

        async def run(comm):
            arrays = [np.full(nbytes // 8, 10.0 * n + comm.rank) for n in range(6)]
            order = range(6) if comm.rank % 2 else reversed(range(6))
            works = [comm.allreduce_(arrays[n], key=f"{n}") for n in order]
            await asyncio.gather(*works)
            for n, array in enumerate(arrays):
                assert (array == 10.0 * n * len(comms) + sum_of_ranks(comms)).all()

        await on_all(comms, run)
        await keyed_in_step(comms)


async def test_the_same_key_again_and_again_is_matched_in_the_order_of_its_uses(world):
    async with world(3) as comms:

        async def run(comm):
            works = [comm.allreduce((10**6 if comm.rank == 0 else 1) * n, key="again") for n in range(60)]
            return await asyncio.gather(*works)

        for results in await on_all(comms, run):
            assert results == [(10**6 + len(comms) - 1) * n for n in range(60)]
        await keyed_in_step(comms)


async def test_every_verb_takes_a_key(world):
    async with world(3) as comms:
        size = len(comms)

        async def run(comm):
            rows = np.arange(size, dtype=np.int64)
            calls = {
                "allreduce": lambda: comm.allreduce(rows, key="allreduce"),
                "all_reduce": lambda: comm.all_reduce(rows, key="all_reduce"),
                "allreduce_": lambda: comm.allreduce_(rows.copy(), key="allreduce_"),
                "tree": lambda: comm.allreduce_tree({"a": rows}, key="tree"),
                "reduce": lambda: comm.reduce(rows, root=1, key="reduce"),
                "reduce_scatter": lambda: comm.reduce_scatter(rows, key="reduce_scatter"),
                "scan": lambda: comm.scan(1, key="scan"),
                "exscan": lambda: comm.exscan(1, key="exscan"),
                "broadcast": lambda: comm.broadcast(comm.rank, 1, key="broadcast"),
                "allgather": lambda: comm.allgather(comm.rank, key="allgather"),
                "gather": lambda: comm.gather(comm.rank, 1, key="gather"),
                "scatter": lambda: comm.scatter(
                    list(range(size)) if comm.rank == 1 else None, 1, key="scatter"
                ),
                "alltoall": lambda: comm.alltoall([comm.rank] * size, key="alltoall"),
                "barrier": lambda: comm.barrier(key="barrier"),
            }
            works = {name: calls[name]() for name in shuffled(comm, calls)}
            return {name: await work for name, work in works.items()}

        for rank, found in enumerate(await on_all(comms, run)):
            everyone = list(range(size))
            for name in ("allreduce", "all_reduce", "allreduce_"):
                assert found[name].tolist() == [row * size for row in everyone]
            assert found["tree"]["a"].tolist() == [row * size for row in everyone]
            assert (found["reduce"] is not None) == (rank == 1)
            assert found["reduce_scatter"].tolist() == [rank * size]
            assert (found["scan"], found["exscan"]) == (rank + 1, rank or None)
            assert (found["broadcast"], found["scatter"]) == (1, rank)
            assert found["allgather"] == found["alltoall"] == everyone
            assert found["gather"] == (everyone if rank == 1 else None)
            assert found["barrier"] is None


async def test_mixed_with_operations_without_a_key(world):
    async with world(3) as comms:

        async def run(comm):
            keyed = iter(shuffled(comm, range(100)))
            works = {}
            for n in range(100):  # the unkeyed ones in order, each rank's keyed ones anywhere between them
                for _ in range(random.Random(f"{n} {comm.rank}").randrange(4)):
                    if (k := next(keyed, None)) is not None:
                        works["key", k] = comm.allreduce(k, key=f"{k}")
                works["no key", n] = comm.allreduce(1000 * n)
            works.update({("key", k): comm.allreduce(k, key=f"{k}") for k in keyed})
            for (kind, n), work in works.items():
                assert await work == n * len(comms) * (1 if kind == "key" else 1000)

        await on_all(comms, run)
        await keyed_in_step(comms)


async def test_another_order_is_a_mismatch_by_name_and_works_by_key(world):
    async with world(2) as comms:

        async def run(comm, word):
            names = ["grad a", "grad b"] if comm.rank else ["grad b", "grad a"]
            works = {name: comm.allreduce(name, "max", **{word: name}) for name in names}
            await asyncio.wait(works.values())
            return works

        for works in await on_all(comms, lambda comm: run(comm, "name")):
            for work in works.values():
                assert isinstance(work.exception(), CollectiveMismatch)
                assert work.exception().field == "name"
        for works in await on_all(comms, lambda comm: run(comm, "key")):
            assert {name: work.result() for name, work in works.items()} == {
                "grad a": "grad a",
                "grad b": "grad b",
            }
        await keyed_in_step(comms)


async def test_the_value_is_what_it_was_at_the_call(world):
    async with world(2) as comms:
        values = [np.ones(10), [1]]
        works = [comms[0].allreduce(value, key=f"{n}") for n, value in enumerate(values)]
        values[0][:] = 77
        values[1].append(77)
        others = [comms[1].allreduce(value, key=f"{n}") for n, value in enumerate([np.ones(10), [1]])]
        for comm in comms[2:]:
            others += [comm.allreduce(value, key=f"{n}") for n, value in enumerate([np.ones(10), [1]])]
        size = len(comms)
        assert (await works[0] == size).all()
        assert await works[1] == [1] * size
        await asyncio.gather(*others)


async def test_groups_have_their_own_keys(world):
    async with world(3) as comms:
        members = [comms[2], comms[0]]
        groups = [comm.new_group([2, 0]) for comm in members]
        works = [group.allreduce(1, key="a") for group in groups]
        works += [comm.allreduce(100, key="a") for comm in comms]
        size = len(comms)
        assert await asyncio.gather(*works) == [2, 2] + [100 * size] * size


@pytest.mark.fixed_size("one rank alone")
async def test_a_world_of_one(world):
    async with world(1) as comms:
        assert await asyncio.gather(*(comms[0].allreduce(n, key="a") for n in range(3))) == [0, 1, 2]
        work = comms[0].allreduce(1, key="a", timeout="soon")
        with pytest.raises(ValueError, match="timeout"):
            await work
        await keyed_in_step(comms)


async def test_without_pickle(world):
    async with world(2, safe=True) as comms:
        assert await on_all(comms, lambda comm: comm.allreduce([comm.rank], key="a")) == [
            list(range(len(comms)))
        ] * len(comms)
        works = await outcomes(
            comms, lambda comm: comm.broadcast(object() if comm.rank == 0 else None, key="b")
        )
        assert isinstance(works[0], TypeError)
        assert all(isinstance(error, RemoteError) and error.original is None for error in works[1:])
        await keyed_in_step(comms)


async def test_pending_shows_the_key(world):
    async with world(2) as comms:
        works = [comms[0].allreduce(1, key="a"), comms[0].barrier(), comms[0].barrier(key="it's")]
        assert comms[0].pending() == ["allreduce key 'a'", "barrier #0", 'barrier key "it\'s"']
        assert comms[0].stats()["pending"] == 3
        for comm in comms[1:]:
            works += [comm.barrier(key="it's"), comm.allreduce(1, key="a"), comm.barrier()]
        await asyncio.gather(*works)
        assert comms[0].pending() == []


# -- wrong arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "error"), [(5, TypeError), (b"a", TypeError), (("a", 1), TypeError), ("x" * 257, ValueError)]
)
async def test_a_wrong_key_fails_here_and_takes_no_number_and_no_use(world, key, error):
    async with world(2) as comms:
        work = comms[0].allreduce(1, key=key)
        with pytest.raises(error, match="key= must"):
            await work
        await keyed_in_step(comms)


async def test_a_subclass_of_str_is_the_text_that_it_is(world):
    async with world(2) as comms:
        keys = [np.str_("a"), *["a"] * (len(comms) - 1)]
        works = [comm.allreduce(1, key=key) for comm, key in zip(comms, keys, strict=True)]
        assert await asyncio.gather(*works) == [len(comms)] * len(comms)


@pytest.mark.parametrize("verb", ["send", "recv", "recv_message"])
async def test_messages_take_no_key(world, verb):
    async with world(2) as comms:
        with pytest.raises(ValueError, match=f"{verb} takes no key="):
            await getattr(comms[0], verb)(*((1, 1) if verb == "send" else ()), key="a")
        await keyed_in_step(comms)


@pytest.mark.parametrize("origin", [0, 1])
@pytest.mark.parametrize("first", [True, False])
async def test_another_wrong_argument_takes_its_use_of_the_key(world, origin, first):
    async with world(3) as comms:
        others = [comm for comm in comms if comm.rank != origin]

        works = [] if first else [comm.allreduce(1, key="a") for comm in others]
        wrong = comms[origin].allreduce(1, "no such op", key="a")
        await settle()
        works += [comm.allreduce(1, key="a") for comm in others] if first else []
        with pytest.raises(ValueError, match="no such op"):
            await wrong
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(error, RemoteError)
            assert (error.origin, error.type_name, error.key) == (origin, "ValueError", "a")
        await keyed_in_step(comms)


# -- bad ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [0, 1, 2])
async def test_a_cancel_before_the_grant_ends_it_on_every_rank_whenever_it_comes(world, origin):
    async with world(3) as comms:
        late = comms[(origin + 1) % 3]
        works = {comm.rank: comm.allreduce(np.ones(1000), key="a") for comm in comms if comm is not late}
        await settle()
        works[origin].cancel()
        with pytest.raises(asyncio.CancelledError):
            await works.pop(origin)
        works[late.rank] = late.allreduce(np.ones(1000), key="a")
        for error in await asyncio.gather(*works.values(), return_exceptions=True):
            assert isinstance(error, CollectiveCancelled)
            assert (error.origin, error.key) == (origin, "a")
            assert "allreduce key 'a' on" in str(error)
        await keyed_in_step(comms)


@pytest.mark.parametrize("origin", [0, 1])
@pytest.mark.parametrize("rounds", range(6))
async def test_a_cancel_at_any_moment(world, origin, rounds):
    async with world(3) as comms:
        works = [comm.allreduce(np.full(40_000, 1.0), key="a") for comm in comms]
        for _ in range(rounds):
            await asyncio.sleep(0.001)
        cancelled = works[origin].cancel()
        ends = await asyncio.gather(*works, return_exceptions=True)
        for rank, end in enumerate(ends):
            if rank == origin:
                assert isinstance(end, asyncio.CancelledError) == cancelled
            elif isinstance(end, BaseException):
                assert isinstance(end, CollectiveCancelled)
                assert end.origin == origin
            else:
                assert (end == len(comms)).all()
        await keyed_in_step(comms)


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_a_timeout_before_the_grant_names_who_has_not_come(world, late):
    async with world(3) as comms:
        works = [comm.allreduce(1, key="step 7", timeout=0.1) for comm in comms if comm.rank != late]
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(error, CollectiveTimeout)
            assert (error.missing, error.key) == ({late}, "step 7")
            assert "key 'step 7'" in str(error)
        with pytest.raises(CollectiveTimeout) as caught:
            await comms[late].allreduce(1, key="step 7")
        assert caught.value.missing == {late}
        await keyed_in_step(comms)


async def test_a_mismatch_under_a_key(world):
    async with world(3) as comms:
        ends = await outcomes(comms, lambda comm: comm.allreduce(np.ones(3 + (comm.rank == 1)), key="a"))
        for error in ends:
            assert isinstance(error, CollectiveMismatch)
            assert (error.field, error.key) == ("shape", "a")
            assert len(error.values) == len(comms)
        await keyed_in_step(comms)


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_death_ends_what_waits_for_the_dead(world, dead):
    async with world(3) as comms:
        alive = [comm for comm in comms if comm.rank != dead]
        works = [comm.allreduce(1, key=f"{n} {comm.rank}") for comm in alive for n in range(3)]
        works += [comm.allreduce(1, key="together") for comm in alive]
        await settle()
        crash(comms[dead])
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(error, PeerLost)
            assert error.peers == {dead}
            assert error.key is not None
        for comm in alive:
            with pytest.raises(PeerLost):
                await comm.barrier(key="later")


@pytest.mark.parametrize("origin", [0, 1, 2])
async def test_who_closes_with_unmatched_keys_names_them_and_so_do_the_others(world, origin):
    async with world(3) as comms:
        works = {comm.rank: comm.allreduce(1, key=f"of {comm.rank}") for comm in comms}
        await settle()
        await comms[origin].close()
        ends = await asyncio.gather(*works.values(), return_exceptions=True)
        for rank, error in enumerate(ends):
            assert isinstance(error, CommunicatorClosed)
            assert (error.origin, error.key) == (origin, f"of {rank}")
            assert f"key 'of {rank}'" in str(error)


async def test_the_functions_of_the_module_take_a_key(world):
    async with world(2) as comms:

        async def run(comm):
            with asynccoll.use(comm):
                works = {name: asynccoll.allreduce(name, "max", key=name) for name in shuffled(comm, "abcd")}
                return [await works[name] for name in "abcd"]

        assert await on_all(comms, run) == [list("abcd")] * len(comms)


class TestSync:
    """Both forms of the facade, in threads."""

    def test_in_another_order_on_each_rank(self):
        assert asynccoll.sync.launch(_facade, 2) == [[(n, 2 * n) for n in range(20)]] * 2


def _facade():
    with asynccoll.sync.init() as comm:
        order = shuffled(comm, range(20))
        futures = {n: comm.allreduce_async(n, key=f"{n}") for n in order}
        results = sorted((n, future.result(timeout=30)) for n, future in futures.items())
        assert asynccoll.sync.allreduce(1, key="blocking") == 2
        late = asynccoll.sync.allreduce_async(1, key=f"of {comm.rank}")
        assert late.cancel()
        assert asynccoll.sync.allreduce(1) == 2
        return results
