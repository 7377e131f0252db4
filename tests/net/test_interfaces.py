"""The addresses of this host's network interfaces, and what the ranks do with one that is named."""

import asyncio
import socket

import pytest
from forming import SECRET, close, exchange, failures, form_all, free_port, nothing_left, place

from asynccoll.errors import RendezvousError
from asynccoll.net import coordinator, interfaces, joiner
from asynccoll.net.interfaces import interface_address
from asynccoll.net.rendezvous import form_mesh


def has_ipv6():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


def test_loopback_has_the_address_that_everybody_knows():
    assert interface_address("lo", socket.AF_INET) == ("127.0.0.1", 0)


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_it_has_one_of_either_family():
    assert interface_address("lo", socket.AF_INET6) == ("::1", 0, 0, 0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_every_address_can_be_listened_on(family):
    found = 0
    for _, name in socket.if_nameindex():
        try:
            address = interface_address(name, family)
        except LookupError:  # it may have none
            continue
        with socket.socket(family) as sock:
            sock.bind(address)
        found += 1
    assert found or family == socket.AF_INET6


@pytest.mark.parametrize("name", ["nonesuch0", "lo0000000000000000000000", "l", "", "lo:1"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_name_that_is_none_is_answered_with_those_that_are(name, family):
    with pytest.raises(LookupError) as caught:
        interface_address(name, family)
    names = ", ".join(known for _, known in socket.if_nameindex())
    assert caught.value.args == (f"is not a network interface of this host; there are {names}",)


def test_of_ipv6_addresses_those_that_mean_nothing_elsewhere_do_not_count(monkeypatch, tmp_path):
    table = tmp_path / "if_inet6"
    local = "fe80000000000000000000000000000a 04 40 20 80       lo"
    other = "fd000000000000000000000000000007 04 40 00 82     eth9"
    monkeypatch.setattr(interfaces, "_INET6", table)
    table.write_text(f"{local}\n{other}\n")
    with pytest.raises(LookupError, match="has no IPv6 address that other hosts could call"):
        interface_address("lo", socket.AF_INET6)
    table.write_text(f"{local}\n{other}\nfd000000000000000000000000000001 04 40 00 82       lo\n")
    assert interface_address("lo", socket.AF_INET6) == ("fd00::1", 0, 0, 0)


@pytest.fixture
def _no_farewell(monkeypatch):
    """Rank 0 does not wait for those that have failed before they joined."""
    monkeypatch.setattr(coordinator, "FAREWELL", 0.2)


# -- a mesh ----------------------------------------------------------------------------------------------------


def form_on(interface, size, port):
    """All ranks' `form_mesh`, not started; all but rank 0 are to listen on ``interface``."""
    return [
        form_mesh(place(rank, size, port, interface=interface if rank else None), SECRET, init_timeout=20.0)
        for rank in range(size)
    ]


async def test_the_ranks_call_one_another_at_the_interface_that_is_named(monkeypatch):
    """Any address of 127/8 is this host's, so that a second one needs no second interface."""
    asked = []

    def address(name, family):
        asked.append((name, family))
        return "127.0.0.9", 0

    monkeypatch.setattr(joiner, "interface_address", address)
    async with nothing_left():
        links = await asyncio.gather(*form_on("ib0", 4, free_port()))
        assert asked == [("ib0", socket.AF_INET)] * 3
        hosts = {rank: where.rpartition(":")[0] for rank, where in links[0].addresses.items()}
        # The last rank calls all others, and is called by none.
        assert hosts == {0: "127.0.0.1", 1: "127.0.0.9", 2: "127.0.0.9", 3: "127.0.0.1"}
        assert links[3].sockets[1].getpeername()[0] == "127.0.0.9"
        assert links[3].sockets[0].getpeername()[0] == "127.0.0.1"
        await exchange(links)
        close(links)


@pytest.mark.usefixtures("_no_farewell")
async def test_one_that_does_not_exist_fails_everybody_with_its_name_and_those_that_exist():
    async with nothing_left():
        for error in await failures(*form_on("nonesuch0", 3, free_port())):
            assert type(error) is RendezvousError
            assert "ASYNCCOLL_SOCKET_IFNAME='nonesuch0' is not a network interface of this host" in str(error)
            assert ", ".join(name for _, name in socket.if_nameindex()) in str(error)
            assert error.missing
            assert error.missing <= {1, 2}
            assert error.elapsed < 10


@pytest.mark.usefixtures("_no_farewell")
async def test_the_last_rank_listens_nowhere_and_is_told_of_a_wrong_name_all_the_same():
    async with nothing_left():
        for error in await failures(*form_on("nonesuch0", 2, free_port())):
            assert "rank 1 cannot listen: ASYNCCOLL_SOCKET_IFNAME='nonesuch0'" in str(error)
            assert error.missing == {1}


async def test_without_a_name_it_is_the_way_to_rank_0(monkeypatch):
    monkeypatch.setattr(joiner, "interface_address", None)
    async with nothing_left():
        links = await form_all(3, free_port())
        assert {address.rpartition(":")[0] for address in links[0].addresses.values()} == {"127.0.0.1"}
        close(links)
