"""Exact reads, names and addresses."""

import asyncio
import socket

import pytest

from asynccoll.net import sockets


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


async def test_exactly_so_many_bytes_are_read(pair):
    here, there = pair
    reading = asyncio.ensure_future(sockets.receive_exactly(there, 5))
    here.send(b"ab")
    await asyncio.sleep(0)
    here.send(b"cdefg")
    assert await reading == b"abcde"
    assert there.recv(10) == b"fg"


async def test_an_early_end_says_how_far_it_came(pair):
    here, there = pair
    here.send(b"ab")
    here.close()
    with pytest.raises(sockets.PeerClosed, match="after 2 of 5 bytes"):
        await sockets.receive_exactly(there, 5)


def test_a_connection_counts_as_gone_only_at_its_end(pair):
    here, there = pair
    assert not sockets.reset_by_peer(here)
    there.send(b"x")
    there.close()
    assert not sockets.reset_by_peer(here)
    assert here.recv(1) == b"x"
    assert sockets.reset_by_peer(here)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", [(socket.AF_INET, ("127.0.0.1", 7))]),
        ("::1", [(socket.AF_INET6, ("::1", 7, 0, 0))]),
        ("::ffff:127.0.0.1", [(socket.AF_INET, ("127.0.0.1", 7))]),
        ("localhost", [(socket.AF_INET, ("127.0.0.1", 7)), (socket.AF_INET6, ("::1", 7, 0, 0))]),
    ],
)
async def test_addresses_need_no_resolver(host, expected, monkeypatch):
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", None)
    assert await sockets.resolve(host, 7) == expected


async def test_a_name_keeps_the_resolvers_order_without_repeats(monkeypatch):
    async def getaddrinfo(host, port, **_):
        assert (host, port) == ("head", 7)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("10.0.0.2", "10.0.0.1", "10.0.0.2")
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found = await sockets.resolve("head", 7)
    assert [address for _, (address, _) in found] == ["10.0.0.2", "10.0.0.1"]


@pytest.mark.parametrize(
    ("host", "port", "text"), [("a", 1, "a:1"), ("10.0.0.1", 2, "10.0.0.1:2"), ("::1", 3, "[::1]:3")]
)
def test_addresses_read_as_people_write_them(host, port, text):
    assert sockets.format_address(host, port) == text


def test_a_host_has_one_identity_that_begins_with_its_name():
    assert sockets.host_identity() == sockets.host_identity()
    assert sockets.host_identity().startswith(socket.gethostname() + "/")


def test_reasons_keep_the_systems_words_and_number():
    assert (
        sockets.reason(ConnectionRefusedError(111, "Connection refused")) == "Connection refused (errno 111)"
    )
    assert (
        sockets.reason(ConnectionRefusedError(111, "Connect call failed")) == "Connection refused (errno 111)"
    )
    assert sockets.reason(socket.gaierror(-2, "Name or service not known")).startswith(
        "Name or service not known"
    )
    assert sockets.reason(TimeoutError()) == "timed out"
    assert sockets.reason(ValueError("odd")) == "odd"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("fe80::1%lo", "fe80::1%lo"),
        ("64:ff9b::a00:1", "64:ff9b::a00:1"),
    ],
)
def test_an_address_is_told_as_people_write_it(host, expected):
    assert sockets.plain_host(host) == expected


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_caller_of_a_listener_for_both_families_is_named_as_it_calls_itself(host, shown):
    both = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with both as listener, socket.create_connection((host, listener.getsockname()[1])) as caller:
        accepted, _ = listener.accept()
        with accepted:
            assert sockets.peer_name(accepted) == f"{shown}:{caller.getsockname()[1]}"
