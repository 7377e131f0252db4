"""`init()` where the mesh cannot form: who, where and what to do, soon, and a second try works."""

import asyncio
import os
import socket
from datetime import timedelta

import numpy as np
import pytest

import asynccoll
from asynccoll import AuthenticationError, NotInitialized, RendezvousError
from asynccoll.testing import local_world

SECRET = "known to these tests"


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ASYNCCOLL_", "MASTER_", "SLURM_", "OMPI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def opening(rank, size, port, *, default=False, secret=SECRET, init_timeout=20.0):
    """`init` for one rank (``default``), `connect` for the others: they share this process."""
    verb = asynccoll.init if default else asynccoll.connect
    return verb(
        f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, secret=secret, init_timeout=init_timeout
    )


async def opened(*openings):
    """Open all at once; communicators and exceptions in order."""

    async def one(opening):
        return await opening

    return await asyncio.gather(*map(one, openings), return_exceptions=True)


async def test_a_port_in_use_is_named_with_its_holder(port):
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RendezvousError) as caught:
        await opening(0, 2, port, default=True)
    text = str(caught.value)
    assert f"127.0.0.1:{port}" in text
    assert "Address already in use" in text
    assert "this very process" in text
    assert "choose another port" in text
    assert caught.value.address == f"127.0.0.1:{port}"
    with pytest.raises(NotInitialized):
        asynccoll.rank()


async def test_thirty_meshes_one_after_another_at_one_address(port):
    for number in range(30):
        comms = await opened(opening(0, 2, port, default=True), opening(1, 2, port))
        assert all(isinstance(comm, asynccoll.Communicator) for comm in comms), comms
        totals = await asyncio.gather(asynccoll.allreduce(number), comms[1].allreduce(1))
        assert totals == [number + 1] * 2
        # In turn the one or the other closes first, and so keeps the connection in TIME_WAIT.
        await comms[number % 2].close()
        await comms[1 - number % 2].close()


async def test_two_meshes_live_side_by_side(port):
    async with local_world(2) as others:
        comms = await opened(opening(0, 2, port), opening(1, 2, port))
        values = [np.full(100_000, 1.0), np.full(100_000, 2.0)]
        results = await asyncio.gather(
            *(comm.allreduce(values[0]) for comm in comms), *(comm.allreduce(values[1]) for comm in others)
        )
        assert [result[0] for result in results] == [2.0, 2.0, 4.0, 4.0]
        await asyncio.gather(*(comm.close() for comm in comms))


async def test_the_missing_rank_is_named_to_everybody_who_came(port):
    loop = asyncio.get_running_loop()
    started = loop.time()
    errors = await opened(
        opening(0, 3, port, default=True, init_timeout=0.5), opening(2, 3, port, init_timeout=0.5)
    )
    assert loop.time() - started < 10.0
    for error in errors:
        assert type(error) is RendezvousError
        assert error.missing == {1}
        assert "rank 1 did not join within 0.5 s" in str(error)
        assert f"127.0.0.1:{port}" in str(error)
        assert error.elapsed >= 0.4
    with pytest.raises(NotInitialized):
        asynccoll.rank()
    comms = await opened(opening(0, 2, port, default=True), opening(1, 2, port))  # the same address
    assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [2, 2]
    await asyncio.gather(*(comm.close() for comm in comms))


async def test_without_rank_0_the_others_say_where_they_looked(port):
    (error,) = await opened(opening(1, 2, port, default=True, init_timeout=0.3))
    assert type(error) is RendezvousError
    assert f"127.0.0.1:{port}" in str(error)
    assert "rank 0" in str(error)


async def test_a_rank_that_is_claimed_twice_is_named_to_all(port):
    errors = await opened(
        opening(0, 3, port, default=True), opening(1, 3, port), opening(1, 3, port), opening(2, 3, port)
    )
    for error in errors:
        assert isinstance(error, RendezvousError), error
    told = [str(error) for error in errors if "claimed twice" in str(error)]
    assert len(told) >= 3
    assert all(
        "rank 1 was claimed twice: by 127.0.0.1:" in text and f"pid {os.getpid()}" in text for text in told
    )


async def test_world_sizes_that_disagree_are_named(port):
    errors = await opened(opening(0, 2, port, default=True), opening(1, 3, port))
    for error in errors:
        assert isinstance(error, RendezvousError), error
        assert "world sizes disagree: rank 1 at 127.0.0.1:" in str(error)
        assert "says 3" in str(error)
        assert "says 2" in str(error)


async def test_a_rank_outside_of_the_world_is_refused_at_once(port):
    (error,) = await opened(opening(2, 2, port, default=True))
    assert type(error) is ValueError
    assert "rank=2 is outside of world_size=2: ranks run from 0" in str(error)


async def test_another_secret_is_an_authentication_error(port):
    errors = await opened(
        opening(0, 2, port, default=True, init_timeout=1.0),
        opening(1, 2, port, secret="other", init_timeout=1.0),
    )
    assert type(errors[1]) is AuthenticationError
    assert isinstance(errors[0], RendezvousError)
    assert errors[0].missing == {1}
    for error in errors:
        assert "other" not in str(error).split()
        assert SECRET not in str(error)


async def test_ranks_that_would_choose_other_algorithms_do_not_meet(port, monkeypatch):
    monkeypatch.setenv("ASYNCCOLL_ALGORITHM", "ring")
    first = asyncio.ensure_future(opened(opening(0, 2, port, default=True, init_timeout=5.0)))
    await asyncio.sleep(0)  # it reads its environment
    await asyncio.sleep(0)
    monkeypatch.setenv("ASYNCCOLL_ALGORITHM", "tree")
    second = await opened(opening(1, 2, port, init_timeout=5.0))
    for error in (*await first, *second):
        assert isinstance(error, RendezvousError), error
        assert "ASYNCCOLL_ALGORITHM" in str(error)
        assert "'ring'" in str(error)
        assert "'tree'" in str(error)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ASYNCCOLL_RANK": "three", "ASYNCCOLL_WORLD_SIZE": "4"}, "ASYNCCOLL_RANK='three'"),
        ({"ASYNCCOLL_RANK": "", "ASYNCCOLL_WORLD_SIZE": "4"}, "ASYNCCOLL_RANK=''"),
        ({"ASYNCCOLL_RANK": "0"}, "ASYNCCOLL_WORLD_SIZE is not"),
        ({"ASYNCCOLL_WORLD_SIZE": "2"}, "ASYNCCOLL_RANK is not"),
        ({"ASYNCCOLL_RANK": "4", "ASYNCCOLL_WORLD_SIZE": "4"}, "ASYNCCOLL_RANK='4'"),
        ({"ASYNCCOLL_RANK": "-1", "ASYNCCOLL_WORLD_SIZE": "4"}, "ASYNCCOLL_RANK='-1'"),
        ({"ASYNCCOLL_RANK": "1.0", "ASYNCCOLL_WORLD_SIZE": "4"}, "ASYNCCOLL_RANK='1.0'"),
        ({"ASYNCCOLL_RANK": "0", "ASYNCCOLL_WORLD_SIZE": "0"}, "ASYNCCOLL_WORLD_SIZE"),
        ({"ASYNCCOLL_RANK": "0", "ASYNCCOLL_WORLD_SIZE": "2"}, "ASYNCCOLL_MASTER_ADDR"),
        ({"RANK": "1"}, "RANK='1'"),
        ({"RANK": "1", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "tcp://10.0.0.1:29500"},
            "MASTER_PORT='tcp://10.0.0.1:29500'",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "1"}, "MASTER_ADDR=''"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
        ({"ASYNCCOLL_TIMEOUT": "soon"}, "ASYNCCOLL_TIMEOUT='soon'"),
        ({"ASYNCCOLL_TIMEOUT": "-1"}, "ASYNCCOLL_TIMEOUT='-1'"),
        ({"ASYNCCOLL_TIMEOUT": "nan"}, "ASYNCCOLL_TIMEOUT='nan'"),
        ({"ASYNCCOLL_ALGORITHM": "star"}, "ASYNCCOLL_ALGORITHM='star'"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_"),
    ],
)
async def test_a_garbled_variable_is_named_with_its_value(environment, named, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        await asynccoll.init()
    assert named in str(caught.value)
    with pytest.raises(NotInitialized):
        asynccoll.rank()


async def test_blanks_around_a_number_are_forgiven(monkeypatch):
    monkeypatch.setenv("ASYNCCOLL_RANK", " 0 ")
    monkeypatch.setenv("ASYNCCOLL_WORLD_SIZE", " 1 ")
    async with asynccoll.init() as comm:
        assert (comm.rank, comm.world_size) == (0, 1)


async def test_the_environments_time_limit_is_the_default(monkeypatch):
    monkeypatch.setenv("ASYNCCOLL_TIMEOUT", "7.5")
    async with asynccoll.init() as comm:
        assert comm._options.timeout == 7.5
    async with asynccoll.init(timeout=3) as comm:
        assert comm._options.timeout == 3.0


@pytest.mark.parametrize("verb", ["init", "connect"])
async def test_an_explicit_limit_wins_over_the_environments_even_if_it_is_the_default(verb, monkeypatch):
    monkeypatch.setenv("ASYNCCOLL_TIMEOUT", "7.5")
    for explicit in (1800, 1800.0, timedelta(minutes=30)):
        async with getattr(asynccoll, verb)(timeout=explicit) as comm:
            assert comm._options.timeout == 1800.0
    async with getattr(asynccoll, verb)(timeout=None) as comm:
        assert comm._options.timeout is None


async def test_a_cancelled_init_leaves_the_address_free(port):
    task = asyncio.ensure_future(opened(opening(0, 2, port, default=True)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(NotInitialized):
        asynccoll.rank()
    comms = await opened(opening(0, 2, port, default=True), opening(1, 2, port))
    assert await asyncio.gather(*(comm.allreduce(1) for comm in comms)) == [2, 2]
    await asyncio.gather(*(comm.close() for comm in comms))
