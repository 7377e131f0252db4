"""How the ranks of a process group find each other: what rank 0 publishes, and where it listens. Stores in memory."""

import concurrent.futures
import os
import signal
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 (after the skip)

from asynccoll.errors import RendezvousError  # noqa: E402
from asynccoll.torch import meshes  # noqa: E402

pytestmark = pytest.mark.torch

LIMIT = 30.0


def opened(store, size):
    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(meshes.open_by_store, store, rank, size, LIMIT) for rank in range(size)]
        return [rank.result(LIMIT) for rank in ranks]


def test_ranks_that_share_a_store_form_a_mesh_and_leave_no_address():
    store = dist.HashStore()
    communicators = opened(store, 3)
    works = [communicator.allreduce_async(1) for communicator in communicators]
    assert [work.result(LIMIT) for work in works] == [3, 3, 3]
    assert not store.check(["asynccoll/address"])
    for communicator in communicators:
        communicator.close()


def test_a_world_of_one_asks_no_store():
    with meshes.open_by_store(None, 0, 1, LIMIT) as alone:
        assert alone.allreduce(5) == 5


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    store.set("asynccoll/host/1", "elsewhere")
    with pytest.raises(RendezvousError, match="rank 2 did not come in time") as caught:
        meshes.open_by_store(store, 0, 3, LIMIT)
    assert caught.value.missing == {2}


def test_so_is_rank_0():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RendezvousError, match="rank 0 has not published") as caught:
        meshes.open_by_store(store, 1, 2, LIMIT)
    assert caught.value.missing == {0}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_is_heard_while_ranks_are_waited_for(rank):
    """And not when the store's limit is over, which is half an hour by default."""
    store = dist.HashStore()
    store.set_timeout(timedelta(hours=1))
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        meshes.open_by_store(store, rank, 2, LIMIT)
    interrupt.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_whose_host_died_is_no_rank_that_did_not_come(rank):
    class Gone:
        timeout = timedelta(seconds=LIMIT)

        def set(self, *_):
            pass

        def check(self, _):
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(
        RendezvousError, match=r"the store of this process group is gone .Connection reset"
    ) as caught:
        meshes.open_by_store(Gone(), rank, 2, LIMIT)
    assert caught.value.missing == frozenset()


class TestWhereRank0Listens:
    """With ranks on another host, as far as the store knows."""

    @pytest.fixture
    def elsewhere(self, monkeypatch):
        def listens(host, own, name=None):
            store = dist.HashStore()
            store.set("asynccoll/host/1", "another host")
            if name is not None:
                monkeypatch.setenv("ASYNCCOLL_SOCKET_IFNAME", name)
            monkeypatch.setattr(meshes, "address_towards", lambda family, address: own)
            monkeypatch.setattr(meshes.socket, "gethostname", lambda: host)
            monkeypatch.setattr(
                meshes.socket, "getaddrinfo", lambda *_, **__: [(meshes.socket.AF_INET, 2, 17, "", (own, 9))]
            )
            return meshes._own_address(store, 2)

        return listens

    def test_at_the_address_that_leads_to_the_store(self, elsewhere):
        assert elsewhere("node-a", "10.0.0.7") == "10.0.0.7"

    def test_by_its_name_where_that_means_loopback_on_this_host_alone(self, elsewhere):
        assert elsewhere("node-a", "127.0.1.1") == "node-a"

    def test_on_the_interface_that_was_named(self, elsewhere):
        assert elsewhere("node-a", "10.0.0.7", name=" lo ") == "127.0.0.1"

    def test_an_interface_that_is_not_there_is_named(self, elsewhere):
        with pytest.raises(RendezvousError, match="ASYNCCOLL_SOCKET_IFNAME='eth99' is not a network inter"):
            elsewhere("node-a", "10.0.0.7", name="eth99")

    def test_a_host_that_nothing_leads_to_is_named(self, monkeypatch):
        def unknown(*_, **__):
            raise meshes.socket.gaierror(-2, "Name or service not known")

        store = dist.HashStore()
        store.set("asynccoll/host/1", "another host")
        monkeypatch.setattr(meshes.socket, "gethostname", lambda: "node-a")
        monkeypatch.setattr(meshes.socket, "getaddrinfo", unknown)
        with pytest.raises(RendezvousError, match=r"none leads to 'node-a' .*not known.*SOCKET_IFNAME"):
            meshes._own_address(store, 2)

    def test_on_loopback_if_all_are_here(self):
        store = dist.HashStore()
        store.set("asynccoll/host/1", meshes.host_identity())
        assert meshes._own_address(store, 2) == "127.0.0.1"
