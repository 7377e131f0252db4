"""Who listens where, and for how long: read from the kernel's tables, while the mesh forms and after."""

import asyncio
import errno
import os
import socket
import struct
from ipaddress import ip_address
from pathlib import Path

import certificates
import pytest
from forming import SECRET, close, form, form_all, free_port, nothing_left

import asynccoll
from asynccoll import RendezvousError
from asynccoll.net import station
from asynccoll.net.contexts import layer
from asynccoll.testing import local_world

LOOPBACK = ["127.0.0.1", "localhost", "127.0.0.5", "::1"]


def listeners():
    """Every listener of this process as {port: address}, from the kernel's tables."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # that of the listing itself
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
                digits, _, port = columns[1].partition(":")
                words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                found[int(port, 16)] = ip_address(struct.pack(f"={len(words)}I", *words))
    return found


def test_the_reader_of_the_tables_sees_wide_and_narrow_listeners():
    before = listeners()
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.7"), (socket.AF_INET6, "::")):
        with socket.create_server((host, 0), family=family) as listener:
            assert listeners() == {**before, listener.getsockname()[1]: ip_address(host)}
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert listeners() == {**before, listener.getsockname()[1]: ip_address("::1")}
    assert listeners() == before


async def number_of(listening, before):
    """Wait until this process has so many listeners more."""
    while len(listeners().keys() - before.keys()) < listening:
        await asyncio.sleep(0.005)
    return {port: address for port, address in listeners().items() if port not in before}


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
async def test_a_rendezvous_on_loopback_listens_there_and_nowhere_else(host, secured):
    before = listeners()
    port = free_port("::1" if ":" in host else "127.0.0.1")
    tls = layer(certificates.contexts()) if secured else None
    async with nothing_left():
        forming = [asyncio.ensure_future(form(rank, 4, port, host, tls=tls)) for rank in range(3)]
        found = await number_of(3, before)  # ranks 0, 1 and 2: the highest takes no calls
        at_zero = ip_address("127.0.0.1" if host == "localhost" else host)
        assert found.pop(port) == at_zero
        home = ip_address("::1") if at_zero.version == 6 else ip_address("127.0.0.1")
        assert list(found.values()) == [home, home]  # where their road to rank 0 begins
        links = await asyncio.gather(*forming, form(3, 4, port, host, tls=tls))
        assert listeners() == before
        close(links)


async def test_a_mesh_that_fails_leaves_no_listener():
    before = listeners()
    port = free_port()
    forming = [form(0, 3, port, init_timeout=0.5), form(1, 3, port, init_timeout=0.5)]
    for outcome in await asyncio.gather(*forming, return_exceptions=True):
        assert type(outcome) is RendezvousError
    assert listeners() == before


async def test_other_ranks_listen_on_the_interface_that_leads_to_rank_0_and_on_no_other():
    # Rank 0 at every interface, as a user may ask for with a secret: the others are narrow all the same.
    before = listeners()
    port = free_port()
    forming = [
        asyncio.ensure_future(form(0, 3, port, "0.0.0.0")),
        asyncio.ensure_future(form(1, 3, port, "127.0.0.1")),
    ]
    found = await number_of(2, before)
    assert found.pop(port) == ip_address("0.0.0.0")
    assert list(found.values()) == [ip_address("127.0.0.1")]
    close(await asyncio.gather(*forming, form(2, 3, port, "127.0.0.1")))
    assert listeners() == before


def told(monkeypatch, *addresses):
    """Whatever rank 0's name is, it means these addresses."""

    async def resolve(host, port):
        return [
            (socket.AF_INET6, (address, port, 0, 0)) if ":" in address else (socket.AF_INET, (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(station, "resolve", resolve)


async def rank_0_alone_at(name):
    """Where rank 0 at ``name`` listens, and whether it takes a caller over IPv4."""
    before = listeners()
    port = free_port()
    async with nothing_left():
        zero = asyncio.ensure_future(form(0, 2, port, name))
        found = await number_of(1, before)
        with socket.socket() as probe:
            probe.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(probe, ("127.0.0.1", port))
                taken = True
            except ConnectionRefusedError:
                taken = False
        zero.cancel()
        await asyncio.wait([zero])
    assert list(found) == [port]
    return str(found[port]), taken


@pytest.mark.parametrize(
    ("addresses", "there"),
    [
        (["127.0.1.1"], ("0.0.0.0", True)),
        (["127.0.1.1", "127.0.0.1"], ("0.0.0.0", True)),
        (["::1"], ("::", False)),
        (["::1", "127.0.0.1"], ("::", True)),
        (["127.0.0.1", "::1"], ("::", True)),
    ],
    ids=str,
)
async def test_a_name_that_means_loopback_on_this_host_is_listened_for_everywhere(
    addresses, there, monkeypatch
):
    told(monkeypatch, *addresses)
    assert await rank_0_alone_at("head.example") == there


async def test_without_ipv6_such_a_name_is_listened_for_over_ipv4(monkeypatch):
    real = station.listen

    def listen(endpoint, *arguments, **options):
        if endpoint[0] == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(endpoint, *arguments, **options)

    monkeypatch.setattr(station, "listen", listen)
    told(monkeypatch, "::1", "127.0.0.1")
    assert await rank_0_alone_at("head.example") == ("0.0.0.0", True)


@pytest.mark.parametrize("name", ["ip6-loopback", "localhost.localdomain", "head.localhost", "127.1"])
async def test_a_name_or_number_that_says_loopback_is_listened_for_there(name, monkeypatch):
    told(monkeypatch, "127.0.0.1", "::1")
    assert await rank_0_alone_at(name) == ("127.0.0.1", True)


async def test_a_name_with_another_address_too_is_listened_for_at_the_first_of_this_machine(monkeypatch):
    told(monkeypatch, "127.0.0.1", "192.0.2.1")
    assert await rank_0_alone_at("head.example") == ("127.0.0.1", True)


WIDE = ["0.0.0.0", "[::]", "10.1.2.3", "head.example"]


@pytest.mark.parametrize("host", WIDE)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
async def test_a_wide_address_without_a_secret_is_refused_before_anything_is_opened(
    host, rank, secured, monkeypatch
):
    monkeypatch.delenv("ASYNCCOLL_SECRET", raising=False)
    before = listeners()
    async with nothing_left():
        with pytest.raises(RendezvousError, match=r"there is no secret.*insecure=True"):
            await asynccoll.connect(
                f"tcp://{host}:{free_port()}",
                rank=rank,
                world_size=2,
                ssl=certificates.contexts() if secured else None,
                init_timeout=30,
            )
        assert listeners() == before


@pytest.mark.parametrize("options", [{"insecure": True}, {"secret": SECRET}], ids=["insecure", "secret"])
async def test_it_is_taken_with_a_secret_or_where_the_user_means_it(options, monkeypatch):
    monkeypatch.delenv("ASYNCCOLL_SECRET", raising=False)
    before = listeners()
    port = free_port()
    zero = asyncio.ensure_future(
        asynccoll.connect(f"tcp://0.0.0.0:{port}", rank=0, world_size=2, **options)._open()
    )
    assert await number_of(1, before) == {port: ip_address("0.0.0.0")}
    async with asynccoll.connect(f"tcp://0.0.0.0:{port}", rank=1, world_size=2, **options) as one:
        both = one, await zero
        assert await asyncio.gather(*(comm.allreduce(1) for comm in both)) == [2, 2]
        assert listeners() == before
        await both[1].close()


async def test_worlds_for_tests_listen_on_loopback_until_they_are_up(monkeypatch):
    before = listeners()
    seen = []
    real = asyncio.gather

    def gather(*awaitables, **options):
        seen.append({port: address for port, address in listeners().items() if port not in before})
        return real(*awaitables, **options)

    monkeypatch.setattr(asyncio, "gather", gather)
    async with local_world(3):
        assert listeners() == before
    assert list(seen[0].values()) == [ip_address("127.0.0.1")]


async def test_with_nothing_to_detect_there_is_no_listener(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ASYNCCOLL_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    before = listeners()
    async with asynccoll.connect() as comm:
        assert comm.world_size == 1
        assert listeners() == before


async def test_several_ranks_without_an_address_are_refused_not_bound_to_a_guess(monkeypatch):
    for name in ("ASYNCCOLL_MASTER_ADDR", "ASYNCCOLL_MASTER_PORT", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = listeners()
    with pytest.raises(ValueError, match="where rank 0 is"):
        await asynccoll.connect(rank=0, world_size=2)
    assert listeners() == before


async def test_a_whole_mesh_in_one_process_closes_every_listener():
    before = listeners()
    links = await form_all(8, free_port(), pulse=True)
    assert listeners() == before
    close(links)
