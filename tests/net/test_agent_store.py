"""The store of torchrun's agent: who asks it, what is left there, and what it means when it does not answer."""

import asyncio
import itertools
import os
import socket
from datetime import timedelta

import pytest

from asynccoll.errors import RendezvousError
from asynccoll.net import agent_store
from asynccoll.net.agent_store import placed, under_agent
from asynccoll.net.launchers import detect

ENVIRON = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

CASES = [
    ("torchrun", {}, {}, True),
    ("the user's own address in the environment", {"ASYNCCOLL_MASTER_ADDR": "h", "ASYNCCOLL_MASTER_PORT": "5"}, {}, False),
    ("an address as argument", {}, {"address": "tcp://h:5"}, False),
    ("the arguments repeat torchrun's rank", {}, {"rank": 0, "world_size": 2}, True),
    ("ranks of the user's own making", {}, {"rank": 0, "world_size": 3}, False),
    ("ASYNCCOLL_RANK is another", {"ASYNCCOLL_RANK": "1", "ASYNCCOLL_WORLD_SIZE": "2"}, {}, False),
    ("the agent keeps no store", {"TORCHELASTIC_USE_AGENT_STORE": "False"}, {}, False),
    ("the launcher holds a listener", {"ASYNCCOLL_RENDEZVOUS_FD": "5"}, {}, False),
    ("a world of one", {"WORLD_SIZE": "1"}, {}, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "arguments", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_who_asks_the_store(more, arguments, expected):
    environ = {**ENVIRON, **more}
    assert under_agent(detect(**arguments, environ=environ), environ) is expected


async def test_everybody_else_keeps_the_placement():
    placement = detect("tcp://h:5", rank=0, world_size=2, environ=ENVIRON)
    async with placed(placement, 1.0, ENVIRON) as found:
        assert found is placement


@pytest.mark.torch
class TestStore:
    @pytest.fixture
    def store(self, monkeypatch):
        """A store as the agent has it, in this process, where every rank numbers its own meshes."""
        distributed = pytest.importorskip("torch.distributed")
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        monkeypatch.setattr(agent_store, "_numbers", itertools.repeat(0))
        server.set_timeout(timedelta(seconds=5))
        return server

    def rank(self, store, rank, limit=20.0, **more):
        """The placement of ``rank``, asked for."""
        environ = {**ENVIRON, "RANK": str(rank), "MASTER_PORT": str(store.port), **more}
        return placed(detect(environ=environ), limit, environ)

    async def test_rank_0_listens_and_the_others_get_its_address_and_a_secret(self, store):
        async with self.rank(store, 0) as zero, self.rank(store, 1) as one:
            assert (one.rank, one.host, one.port, one.secret) == (1, zero.host, zero.port, zero.secret)
            assert zero.host == "127.0.0.1"
            assert zero.port != store.port
            assert len(zero.secret) == 32
            with socket.create_connection((one.host, one.port)):  # it listens before it is told
                pass
            with socket.socket(fileno=os.dup(zero.rendezvous_fd)) as listener:
                assert listener.getsockname() == (zero.host, zero.port)

    async def test_each_mesh_has_a_secret_of_its_own_and_leaves_nothing(self, store):
        secrets = set()
        for _ in range(2):
            async with self.rank(store, 0) as zero:
                assert store.check(["asynccoll/job/3/0/rank0"])
                secrets.add(zero.secret)
            assert not store.check(["asynccoll/job/3/0/rank0"])
        assert len(secrets) == 2

    async def test_a_secret_that_was_given_is_used_and_not_put_there(self, store):
        async with (
            self.rank(store, 0, ASYNCCOLL_SECRET="mine") as zero,
            self.rank(store, 1, ASYNCCOLL_SECRET="mine") as one,
        ):
            assert (zero.secret, one.secret) == (b"mine", b"mine")
            told = store.get("asynccoll/job/3/0/rank0")
            assert b"mine".hex().encode() not in told
            assert b'""' in told

    async def test_a_key_of_another_attempt_is_not_used(self, store):
        store.set("asynccoll/job/2/0/rank0", '["127.0.0.1", 1, "00"]')
        with pytest.raises(RendezvousError) as caught:
            async with self.rank(store, 1, 0.2):
                pass
        assert caught.value.missing == {0}

    async def test_meshes_are_numbered(self, store, monkeypatch):
        monkeypatch.setattr(agent_store, "_numbers", itertools.count())
        async with self.rank(store, 0), self.rank(store, 0):
            assert store.check(["asynccoll/job/3/0/rank0", "asynccoll/job/3/1/rank0"])

    async def test_rank_0_does_not_come(self, store):
        with pytest.raises(RendezvousError) as caught:
            async with self.rank(store, 1, 0.3):
                pass
        error = caught.value
        assert (error.address, error.missing) == (f"127.0.0.1:{store.port}", {0})
        for fragment in ("rank 1 of 2", f"127.0.0.1:{store.port}", "limit 0.3 s", "rank 0's output"):
            assert fragment in str(error)

    @pytest.mark.parametrize("text", ["", "[1]", "{}", '["h", "1", ""]', '["h", 1, "x"]', "x" * 5000])
    async def test_what_rank_0_did_not_write_is_refused(self, store, text):
        store.set("asynccoll/job/3/0/rank0", text)
        with pytest.raises(RendezvousError, match="is not rank 0's address"):
            async with self.rank(store, 1):
                pass

    async def test_the_loop_turns_and_a_cancel_is_heard(self, store):
        async def wait():
            async with self.rank(store, 1, 60.0):
                pass

        waiting = asyncio.create_task(wait())
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def test_no_store_there(self):
        pytest.importorskip("torch")
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            environ = {**ENVIRON, "MASTER_PORT": str(closed.getsockname()[1])}
            with pytest.raises(RendezvousError, match="cannot be reached") as caught:
                async with placed(detect(environ=environ), 0.2, environ):
                    pass
        assert caught.value.address == f"127.0.0.1:{environ['MASTER_PORT']}"

    async def test_on_several_hosts_rank_0_takes_the_way_to_the_store(self, store):
        async with self.rank(store, 0, LOCAL_WORLD_SIZE="1") as zero:
            assert zero.host == "127.0.0.1"  # the one that leads to 127.0.0.1

    async def test_an_interface_that_is_not_there(self, store):
        with pytest.raises(RendezvousError, match="ASYNCCOLL_SOCKET_IFNAME='nope0' of rank 0 is not"):
            async with self.rank(store, 0, LOCAL_WORLD_SIZE="1", ASYNCCOLL_SOCKET_IFNAME="nope0"):
                pass
