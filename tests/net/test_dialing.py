"""How a rank calls: patience, self-connections, and what it says when it does not get through."""

import asyncio
import socket

import pytest
from forming import SECRET, close, form, free_port, nothing_left

from asynccoll.net import dialing, handshake
from asynccoll.net.dialing import Backoff, Call, Stage, dial
from asynccoll.net.handshake import Hello, Purpose


def call(port, host="127.0.0.1"):
    return Call(host, port, SECRET, Hello(Purpose.RENDEZVOUS, 1, 0, 2, 0))


def test_waiting_times_grow_to_a_limit_and_are_jittered():
    backoffs = [Backoff() for _ in range(50)]
    firsts = [backoff.next() for backoff in backoffs]
    assert len(set(firsts)) > 40
    assert all(Backoff.FIRST / 2 <= wait <= Backoff.FIRST for wait in firsts)
    for _ in range(20):
        lasts = [backoff.next() for backoff in backoffs]
    assert all(Backoff.LONGEST / 2 <= wait <= Backoff.LONGEST for wait in lasts)


async def test_a_refused_call_is_tried_again_until_somebody_listens():
    port = free_port()
    async with nothing_left():
        one = asyncio.ensure_future(form(1, 2, port))
        await asyncio.sleep(0.05)
        assert not one.done()
        close(await asyncio.gather(form(0, 2, port), one))


async def test_a_connection_to_oneself_is_not_an_answer(monkeypatch):
    """Where nobody listens, the kernel may connect a socket with itself if its own port happens to be the one called."""
    port = free_port()
    real = dialing.prepare
    met = []

    def prepare(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        return real(sock)

    def refuse(*args):
        met.append(args)
        raise AssertionError("shook hands with itself")

    monkeypatch.setattr(dialing, "prepare", prepare)
    monkeypatch.setattr(handshake, "dial", refuse)
    calling = call(port)
    async with nothing_left():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await dial(calling)
    assert not met
    assert calling.trouble == "Connection refused (errno 111)"


def test_the_address_that_got_furthest_is_the_one_that_is_told():
    calling = call(1)
    calling.failed(Stage.CONNECT, "refused")
    calling.failed(Stage.HANDSHAKE, "a web server")
    calling.failed(Stage.CONNECT, "no route")
    assert calling.trouble == "a web server"


def test_an_attempt_cut_off_early_does_not_hide_what_the_last_one_found():
    calling = call(1)
    calling.failed(Stage.CONNECT, "refused")
    calling.cut_off(Stage.CONNECT, seconds=0.001)
    assert calling.trouble == "refused"
    calling.cut_off(Stage.CONNECT, seconds=5.0)
    assert calling.trouble == "no answer to the connect yet"


async def test_a_connect_that_is_never_answered_is_given_up_and_named(monkeypatch):
    monkeypatch.setattr(dialing, "CONNECT_TIMEOUT", 0.1)

    async def never(sock, address):
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", never)
    calling = call(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await dial(calling)
    assert calling.trouble == "no answer to the connect within 0.1 s"


async def test_a_name_that_idna_cannot_encode_is_a_lookup_that_failed():
    calling = call(1, host="a" * 64 + ".example")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await dial(calling)
    assert "did not resolve" in calling.trouble
