"""Every public exception says what it is about: the operation, its number and group, who, how long, what limit, and what to do.

Each row of `FAULTS` provokes one failure of the third operation of a group whose ranks are not those of the world. The whole text
is compared with a pattern, so that a message that loses a fact fails here; the attributes carry the same facts.
"""

import asyncio
import re
import socket

import numpy as np
import pytest
from faults import crash, settle
from ranks import on_all, outcomes

import asynccoll
from asynccoll import errors
from asynccoll.testing import local_world

LIMIT = 0.2
ORDER = (2, 0, 1)
"""World rank of each rank of the group."""


async def grouped(comms):
    """The group, after two operations."""
    trainers = [comm.new_group(ORDER, name="trainers") for comm in comms]
    trainers = [trainers[world_rank] for world_rank in ORDER]  # by group rank
    for _ in range(2):
        await on_all(trainers, lambda comm: comm.barrier())
    return trainers


# -- faults: each gives (group rank, error) of those that must have one ------------------------------------------


async def lost(group, **options):
    works = [comm.allreduce(np.ones(3), **options) for comm in group[:2]]
    await settle()
    crash(group[2])
    return await asyncio.gather(*works, return_exceptions=True)


async def late(group, **options):
    return await outcomes(group[:2], lambda comm: comm.allreduce(np.ones(3), timeout=LIMIT, **options))


async def mismatched(group, **options):
    return await outcomes(
        group,
        lambda comm: comm.allreduce(np.ones(3, np.float32 if comm.rank == 1 else np.float64), **options),
    )


async def cancelled(group, **options):
    works = [group[0].allreduce(np.ones(3), **options)]
    third = group[2].allreduce(np.ones(3), **options)
    third.cancel()  # before rank 1 has called: nobody can be complete
    await asyncio.gather(third, return_exceptions=True)
    await settle()
    works.append(group[1].allreduce(np.ones(3), **options))
    return await asyncio.gather(*works, return_exceptions=True)


async def failed(group, **options):
    value = [np.ones(3), np.ones(3), "text"]
    ends = await outcomes(group, lambda comm: comm.reduce_scatter(value[comm.rank], **options))
    return ends[:2]


async def left(group, **options):
    works = [comm.allreduce(np.ones(3), **options) for comm in group[:2]]
    await group[2].close()
    return await asyncio.gather(*works, return_exceptions=True)


async def unheard(group):
    """A message that nobody sends."""
    return [await one for one in [_error(group[0].recv(2, tag=7, timeout=LIMIT))]]


async def _error(work):
    with pytest.raises(asynccoll.CollectiveError) as caught:
        await work
    return caught.value


HEAD = r"rank {rank}: allreduce #2 on 'trainers' after \d+\.\d{{3}} s: "
KEYED = HEAD.replace("#2", "key 'a'")
FAULTS = {
    "lost": (
        lost,
        asynccoll.PeerLost,
        HEAD + r"lost rank 2 \(.+\)\. Look at .+ (close|shrink).+\.",
        {"peer": 2, "peers": {2}, "seq": 2},
    ),
    "late": (
        late,
        asynccoll.CollectiveTimeout,
        HEAD
        + r"timed out \(limit 0\.2 s\): rank 2 did not call it\. Check that all ranks make the same calls .+raise timeout=\.",
        {"missing": {2}, "limit": LIMIT, "seq": 2},
    ),
    "mismatched": (
        mismatched,
        asynccoll.CollectiveMismatch,
        HEAD
        + r"ranks disagree on dtype: rank 1 has float32; ranks 0, 2 have float64\. Called at: .*test_error_texts\.py:\d+.*\. "
        + r"Make the same call on every rank\.",
        {"field": "dtype", "values": {0: "float64", 1: "float32", 2: "float64"}, "seq": 2},
    ),
    "cancelled": (
        cancelled,
        asynccoll.CollectiveCancelled,
        HEAD + r"cancelled by rank 2\. The communicator is in step: the next operation works\.",
        {"origin": 2, "seq": 2},
    ),
    "failed": (
        failed,
        asynccoll.RemoteError,
        HEAD.replace("allreduce", "reduce_scatter")
        + r"failed on rank 2 with TypeError: [^\n]+(\n--- traceback of rank 2 ---\n.+)?",
        {"origin": 2, "type_name": "TypeError", "seq": 2},
    ),
    "left": (
        left,
        asynccoll.CommunicatorClosed,
        HEAD
        + r"rank 2 left the communicator \(closed\)\. Every rank must finish its operations before it closes\.",
        {"origin": 2, "cause": "closed", "seq": 2},
    ),
    "unheard": (
        unheard,
        asynccoll.CollectiveTimeout,
        r"rank {rank}: recv on 'trainers' after \d+\.\d{{3}} s: timed out \(limit 0\.2 s\): .*tag 7.*rank 2.*timeout=\.",
        {"missing": {2}, "limit": LIMIT, "seq": -1},
    ),
}
for _name in ("lost", "late", "mismatched", "cancelled", "left"):
    _fault, _kind, _text, _facts = FAULTS[_name]
    FAULTS[f"{_name}, with a key"] = (
        _fault,
        _kind,
        _text.replace(HEAD, KEYED),
        {**_facts, "seq": -1, "key": "a"},
    )


@pytest.mark.fixed_size("the texts name ranks of three")
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_message_names_everything(world, fault):
    provoke, kind, text, facts = FAULTS[fault]
    async with world(3) as comms:
        group = await grouped(comms)
        options = {"key": "a"} if "key" in facts else {}
        errors = await provoke(group, **options)
        for rank, error in enumerate(errors):
            assert type(error) is kind, error
            assert re.fullmatch(text.format(rank=rank), str(error), re.DOTALL), str(error)
            for name, value in facts.items():
                found = getattr(error, name)
                assert (dict(found) if isinstance(value, dict) else found) == value, (name, found)
            assert (error.group, error.rank) == ("trainers", rank)
            assert error.elapsed >= 0.0
        # The limit of who called first ends it for those that called a little later, too.
        assert max(error.elapsed for error in errors) >= (LIMIT if "late" in fault else 0.0) - 0.01


@pytest.mark.fixed_size("the texts name ranks of three")
async def test_a_rank_that_closes_is_told_of_its_own_operations(world):
    async with world(3) as comms:
        group = await grouped(comms)
        work = group[1].allreduce(np.ones(3))
        await group[1].close()
        error = await _error(work)
        assert type(error) is asynccoll.CommunicatorClosed
        assert (error.origin, error.rank) == (1, 1)
        assert re.match(HEAD.format(rank=1) + "rank 1 left the communicator", str(error))
        with pytest.raises(asynccoll.NotInitialized) as caught:
            group[1].barrier()
        assert str(caught.value) == "communicator 'trainers' is closed; open a new one with new_group()"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class TestWithoutAMesh:
    """Those of `init`; on sockets, which the simulation has none of."""

    @pytest.fixture(params=["asyncio", "uvloop"])
    def run(self, request):
        def run(main):
            with asyncio.Runner(
                loop_factory=None
                if request.param == "asyncio"
                else pytest.importorskip("uvloop").new_event_loop
            ) as runner:
                return runner.run(main)

        return run

    @staticmethod
    async def opened(port, ranks, size, secrets=None, init_timeout=0.5):
        async def one(rank):
            async with asynccoll.connect(
                f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=size,
                secret=(secrets or {}).get(rank, "s"),
                init_timeout=init_timeout,
            ):
                pass

        return await asyncio.gather(*map(one, ranks), return_exceptions=True)

    def test_a_missing_rank(self, run):
        port = free_port()
        for error in run(self.opened(port, (0, 2), 4)):
            assert type(error) is asynccoll.RendezvousError
            assert (error.address, error.missing) == (f"127.0.0.1:{port}", {1, 3})
            assert error.elapsed >= 0.4
            text = str(error)
            assert "ranks 1, 3 did not join within 0.5 s" in text
            assert f"127.0.0.1:{port}" in text
            assert re.search(r"rank [02] of 4", text)

    def test_rank_0_missing(self, run):
        port = free_port()
        for error in run(self.opened(port, (1,), 2)):
            assert type(error) is asynccoll.RendezvousError
            assert (error.address, error.missing) == (f"127.0.0.1:{port}", {0})
            assert "within 0.5 s" in str(error)
            assert f"127.0.0.1:{port}" in str(error)

    def test_another_secret(self, run):
        port = free_port()
        theirs, mine = run(self.opened(port, (0, 1), 2, {1: "another"}))
        assert type(mine) is asynccoll.AuthenticationError
        assert mine.address == f"127.0.0.1:{port}"
        assert "secret" in str(mine)
        assert "rank 0" in str(mine)
        assert type(theirs) is asynccoll.RendezvousError
        assert theirs.missing == {1}

    def test_a_second_init(self, run):
        async def twice():
            async with asynccoll.init():
                with pytest.raises(asynccoll.AlreadyInitialized) as caught:
                    await asynccoll.init()
            return str(caught.value)

        assert "call shutdown() first, or connect() for a second mesh" in run(twice())

    def test_no_init(self):
        with pytest.raises(asynccoll.NotInitialized) as caught:
            asynccoll.allreduce(1)
        assert str(caught.value).startswith(
            "allreduce() was called before init() or after shutdown(); open one with"
        )

    def test_a_peer_that_breaks_the_protocol(self, run):
        async def broken():
            async with local_world(2) as comms:
                work = comms[0].barrier()
                comms[1]._pump._sockets[0].send(b"\xff" * 64)
                return await _error(work)

        error = run(broken())
        assert type(error) is asynccoll.PeerLost
        assert error.peer == 1
        assert re.search(r"protocol error: rank 1 sent a frame of unknown kind 255", str(error))


def test_the_rows_have_every_exception_of_the_package():
    classes = {
        name
        for name in errors.__all__
        if isinstance(getattr(errors, name), type) and issubclass(getattr(errors, name), Exception)
    }
    abstract = {"AsynccollError", "CollectiveError"}
    elsewhere = {
        "RendezvousError",
        "AuthenticationError",
        "ProtocolError",
        "NotInitialized",
        "AlreadyInitialized",
    }
    assert classes - abstract - elsewhere == {kind.__name__ for _, kind, _, _ in FAULTS.values()}
