"""Strangers at the door: what they do, how long they stay, and that the ranks get in all the same."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct

import certificates
import pytest
from forming import (
    SECRET,
    attentive,
    close,
    form,
    form_all,
    free_port,
    hear,
    joined,
    nothing_left,
    other_tasks,
    proved,
)

from asynccoll.net import accepting, coordinator, handshake
from asynccoll.net.accepting import Acceptor, Strangers, backlog, listen
from asynccoll.net.contexts import layer
from asynccoll.net.handshake import Answer, Hello, Purpose, Status
from asynccoll.net.sockets import close_all, format_address
from asynccoll.net.tls import TlsSocket

STRANGERS = {
    "connects and closes": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(192),
    "1 MiB of noise": b"\xa5" * (1 << 20),
    "a huge length": b"asynccol" + struct.pack("!HH", 1, 65535) + b"\xff" * 1000,
    "a pickle": b"\x80\x05cposix\nsystem\n\x8c\x04true\x85R.",
    "a hello without proof": Hello(Purpose.RENDEZVOUS, 1, 0, 2, 0).encode(bytes(32)) + bytes(32),
    "another version": b"asynccol" + struct.pack("!HH", 7, 0),
}


async def knock(port, said):
    """Say something and listen until the other side closes; what it answered."""
    loop = asyncio.get_running_loop()
    heard = b""
    with socket.socket() as sock:
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, ("127.0.0.1", port))
            if said:
                await loop.sock_sendall(sock, said)
                while data := await loop.sock_recv(sock, 1 << 16):
                    heard += data
        except OSError:
            pass  # closed while we were still talking
    return heard


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_is_shown_out_at_once_and_the_mesh_forms(said):
    async with nothing_left():
        port = free_port()
        zero = asyncio.ensure_future(form(0, 3, port))
        await attentive(port)
        heard = await knock(port, said)
        assert len(heard) <= handshake.LIMIT
        assert not zero.done()
        close(await asyncio.gather(zero, form(1, 3, port), form(2, 3, port)))


async def test_a_hundred_of_each_are_one_line_in_the_log(caplog):
    port = free_port()
    zero = asyncio.ensure_future(form(0, 2, port))
    await attentive(port)
    with caplog.at_level(logging.DEBUG, logger="asynccoll"):
        caplog.clear()
        for _ in range(20):
            await asyncio.gather(*(knock(port, said[:2000]) for said in STRANGERS.values()))
        close(await asyncio.gather(zero, form(1, 2, port)))
    lines = [record for record in caplog.records if record.name == "asynccoll"]
    assert len(lines) <= 1  # `attentive` was the first stranger, and had the line


async def test_the_log_line_says_who_and_why(caplog):
    with caplog.at_level(logging.WARNING, logger="asynccoll"):
        strangers = Strangers("rank 0 of 2")
        strangers.dropped("10.0.0.9:5", "not one of us")
        strangers.dropped("10.0.0.9:6", "neither")
    assert [record.message for record in caplog.records] == [
        "rank 0 of 2 dropped a connection from 10.0.0.9:5: not one of us"
    ]
    assert "2 connections were dropped" in strangers.note()
    assert "10.0.0.9:6" in strangers.note()


async def test_one_that_claims_a_rank_is_remembered_over_later_noise():
    strangers = Strangers("rank 0 of 2")
    strangers.dropped("10.0.0.9:5", "claims to be rank 1", claims_rank=True)
    strangers.dropped("10.0.0.9:6", "noise")
    assert "claims to be rank 1" in strangers.note()


async def test_a_silent_stranger_is_dropped_when_his_time_is_up(monkeypatch):
    monkeypatch.setattr(accepting, "HANDSHAKE_TIMEOUT", 0.2)
    port = free_port()
    async with nothing_left():
        zero = asyncio.ensure_future(form(0, 2, port))
        await attentive(port)
        loop = asyncio.get_running_loop()
        for said in (b"", b"async", Hello(Purpose.RENDEZVOUS, 1, 0, 2, 0).encode(bytes(32))):
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.setblocking(False)
                sock.send(said)
                heard = b""
                while data := await loop.sock_recv(sock, 100):  # ends when he is dropped
                    heard += data
                assert len(heard) in (0, 44)
        close(await asyncio.gather(zero, form(1, 2, port)))


async def test_one_drop_of_bytes_a_second_does_not_buy_more_time(monkeypatch):
    monkeypatch.setattr(accepting, "HANDSHAKE_TIMEOUT", 0.3)
    port = free_port()
    zero = asyncio.ensure_future(form(0, 2, port))
    await attentive(port)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setblocking(False)
        sent = 0
        hello = Hello(Purpose.RENDEZVOUS, 1, 0, 2, 0).encode(bytes(32))
        with pytest.raises(OSError, match=r"reset|pipe"):
            for sent in range(len(hello)):
                sock.send(hello[sent : sent + 1])
                await asyncio.sleep(0.02)  # a slow stranger: the pace is what is tested
    assert sent < len(hello) - 1
    close(await asyncio.gather(zero, form(1, 2, port)))


@pytest.mark.parametrize("silent", [1000])
async def test_silent_strangers_do_not_keep_the_ranks_out(silent):
    """More half-open connections than are allowed: the oldest go, and the ranks come through."""
    port = free_port()
    async with nothing_left():
        zero = asyncio.ensure_future(form(0, 4, port))
        await attentive(port)
        crowd = []
        for _ in range(silent):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setblocking(False)
            crowd.append(sock)
            await asyncio.sleep(0)
        # Before the first of them is dropped for his silence.
        limit = accepting.HANDSHAKE_TIMEOUT * 0.8
        links = await asyncio.gather(zero, *(form(rank, 4, port, init_timeout=limit) for rank in (1, 2, 3)))
        close(links)
        for sock in crowd:
            sock.close()


async def test_no_more_than_the_limit_are_held_half_open():
    with listen((socket.AF_INET, ("127.0.0.1", 0)), 2, reuse=False) as listener:
        port = listener.getsockname()[1]
        acceptor = Acceptor(
            listener, SECRET, 2, pytest.fail, pytest.fail, Strangers("test"), on_error=pytest.fail
        )
        acceptor.start()
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        most = 0
        while acceptor._strangers.count < 100:
            crowd.append(socket.create_connection(("127.0.0.1", port)))
            await asyncio.sleep(0)
            most = max(most, len(acceptor._half_open))
        # Those told to go leave one turn of the loop later.
        assert accepting.HALF_OPEN <= most <= accepting.HALF_OPEN + 2 + accepting._ACCEPTS_PER_WAKE
        await acceptor.stop()
        close_all(*crowd)


class Watched(Acceptor):
    """Remembers who has called, by address."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = {}

    def _greet(self, sock, address):
        super()._greet(sock, address)
        self.seen[format_address(*address)] = list(self._half_open)[-1]


@contextlib.asynccontextmanager
async def accepting_at(strangers, tls=None):
    """An acceptor of a world of two that lets nobody in, and its address. Must leave neither socket nor task."""
    async with nothing_left():
        with listen((socket.AF_INET, ("127.0.0.1", 0)), 2, reuse=False) as listener:
            acceptor = Watched(
                listener, SECRET, 2, pytest.fail, pytest.fail, strangers, on_error=pytest.fail, tls=tls
            )
            acceptor.start()
            try:
                yield acceptor, listener.getsockname()
            finally:
                await acceptor.stop()


async def call(acceptor, address):
    """Call, and wait until the call is taken. The caller's end, and what the acceptor knows of him."""
    sock = socket.create_connection(address)
    sock.setblocking(False)
    name = format_address(*sock.getsockname())
    while name not in acceptor.seen:
        await asyncio.sleep(0)
    return sock, acceptor.seen[name]


async def ended(*callers):
    """Until each has heard the end of his connection, and before that nothing."""
    async with asyncio.timeout(30):
        for sock in callers:
            with contextlib.suppress(ConnectionResetError):  # the byte he sent was not read
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            sock.close()


class Told(Strangers):
    """Writes down who was dropped, in order."""

    def __init__(self):
        super().__init__("test")
        self.whom = []

    def dropped(self, peer, why, *, claims_rank=False):
        super().dropped(peer, why, claims_rank=claims_rank)
        self.whom.append(peer)


ONE_OF_TLS = STRANGERS["TLS"][:1]


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
async def test_who_says_nothing_costs_no_task_and_is_let_go_at_the_end(secured):
    tls = layer(certificates.contexts()) if secured else None
    async with accepting_at(Told(), tls) as (acceptor, address):
        tasks = other_tasks()
        callers = [await call(acceptor, address) for _ in range(20)]
        assert other_tasks() == tasks
        # Nor has he a TLS layer, which takes much more memory than he does.
        assert {type(caller.sock) for _, caller in callers} == {socket.socket}
        sock, caller = callers[7]
        sock.send(ONE_OF_TLS if secured else b"a")
        while other_tasks() == tasks:
            await asyncio.sleep(0)
        assert len(other_tasks() - tasks) == 1
        assert isinstance(caller.sock, TlsSocket) == secured
        assert len(acceptor._half_open) == 20
        await acceptor.stop()
        assert not acceptor._half_open
        await ended(*(sock for sock, _ in callers))
    assert acceptor._strangers.whom == []  # the end is nobody's fault


async def test_the_time_of_a_handshake_counts_from_the_accept_whenever_the_first_word_comes(monkeypatch):
    limits, real = [], accepting.shake

    async def shake(sock, machine, due=None):
        limits.append(due)
        return await real(sock, machine, due)

    monkeypatch.setattr(accepting, "shake", shake)
    async with accepting_at(Told()) as (acceptor, address):
        loop = asyncio.get_running_loop()
        before = loop.time()
        sock, caller = await call(acceptor, address)
        assert before <= caller.due - accepting.HANDSHAKE_TIMEOUT <= loop.time()
        due = caller.due
        await asyncio.sleep(0.01)  # so that another way to count gives another time
        sock.send(b"a")
        while not limits:
            await asyncio.sleep(0)
        assert limits == [due]
        sock.close()


async def test_each_silent_stranger_is_dropped_in_turn(monkeypatch, caplog):
    """One timer serves them all: also those who come while it runs, and those who come when it has run out."""
    monkeypatch.setattr(accepting, "HANDSHAKE_TIMEOUT", 0.1)
    async with accepting_at(strangers := Told()) as (acceptor, address):
        first, one = await call(acceptor, address)
        await asyncio.sleep(0.05)  # so that the timer runs for the first alone; any order of events must do
        second, two = await call(acceptor, address)
        await ended(first, second)
        third, three = await call(acceptor, address)
        await ended(third)
        assert strangers.whom == [one.peer, two.peer, three.peer]
        assert "no handshake within 0.1 s" in strangers.last
    assert "no handshake within 0.1 s" in caplog.text


@pytest.mark.parametrize("speaker", [0, 1, None])
async def test_the_oldest_goes_first_whether_he_has_spoken_or_not(speaker, monkeypatch):
    monkeypatch.setattr(accepting, "HALF_OPEN", 0)
    async with accepting_at(strangers := Told()) as (acceptor, address):
        callers = []
        for number in range(4):
            sock, caller = await call(acceptor, address)
            callers.append((sock, caller.peer))
            if number == speaker:
                sock.send(b"a")
                while acceptor._half_open[caller] is None:
                    await asyncio.sleep(0)
            if number >= 2:  # one more than there may be
                await ended(callers[number - 2][0])
        assert strangers.whom == [callers[0][1], callers[1][1]]
        assert "too many unfinished handshakes" in strangers.last
        assert len(acceptor._half_open) == 2
        await acceptor.stop()
        await ended(callers[2][0], callers[3][0])


async def test_a_caller_whose_connection_is_reset_is_told_of_by_his_address():
    async with accepting_at(strangers := Told()) as (acceptor, address):
        sock, caller = await call(acceptor, address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        while not strangers.whom:
            await asyncio.sleep(0)
        assert strangers.whom == [caller.peer]
        assert "reset" in strangers.last


class Starving(socket.socket):
    """A listener in a process that has no descriptors left until ``until`` (loop time)."""

    asked = 0
    until = 0.0

    def accept(self):
        self.asked += 1
        if asyncio.get_running_loop().time() < self.until:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_without_descriptors_accepting_pauses_and_then_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(accepting, "_RESOURCE_PAUSE", 0.05)
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    answer = Answer(Status.ACCEPTED, 0, 2, 0, bytes(16))
    async with nothing_left():
        with Starving() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            listener.until = loop.time() + 0.22
            acceptor = Acceptor(
                listener,
                SECRET,
                2,
                lambda hello: answer,
                lambda hello, sock: arrived.set_result(sock),
                Strangers("rank 0 of 2"),
                on_error=pytest.fail,
            )
            acceptor.start()
            dialed = await proved(1, 2, listener.getsockname()[1])
            close_all(dialed, await arrived)
            await acceptor.stop()
    # A try every 0.05 s, the caller, and a look whether there are more: it did not spin on the queue.
    assert 2 < listener.asked <= 8
    assert "cannot accept connections for now" in caplog.text


async def test_accepting_can_be_stopped_while_it_pauses():
    async with nothing_left():
        with Starving() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            listener.until = float("inf")
            acceptor = Acceptor(
                listener, SECRET, 2, pytest.fail, pytest.fail, Strangers("x"), on_error=pytest.fail
            )
            acceptor.start()
            with socket.create_connection(listener.getsockname()):
                while not listener.asked:
                    await asyncio.sleep(0.01)  # a poll: ends as soon as it is asked
                await acceptor.stop()
                asked = listener.asked
                await asyncio.sleep(2 * accepting._RESOURCE_PAUSE)  # the time in which it would ask again
            assert listener.asked == asked


async def test_a_flood_during_forming_costs_little_memory():
    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    port = free_port()
    zero = asyncio.ensure_future(form(0, 2, port))
    await attentive(port)
    noise = STRANGERS["1 MiB of noise"]
    await knock(port, noise)
    before = resident()
    for _ in range(10):
        await asyncio.gather(*(knock(port, noise) for _ in range(10)))
    assert resident() - before < 16 << 20
    close(await asyncio.gather(zero, form(1, 2, port)))


async def test_a_recorded_handshake_gets_nobody_in():
    """A relay writes down all that rank 1 says while it joins a mesh; the same words are no use at the next one."""
    loop = asyncio.get_running_loop()
    port, said = free_port(), b""
    relay = listen((socket.AF_INET, ("127.0.0.1", 0)), 2, reuse=False)

    async def carry(source, sink, keep):
        nonlocal said
        while data := await loop.sock_recv(source, 4096):
            if keep:
                said += data
            await loop.sock_sendall(sink, data)
        sink.shutdown(socket.SHUT_WR)

    zero = asyncio.ensure_future(form(0, 2, port))
    await attentive(port)
    one = asyncio.ensure_future(form(1, 2, relay.getsockname()[1]))
    here, _ = await loop.sock_accept(relay)
    there = socket.create_connection(("127.0.0.1", port))
    there.setblocking(False)
    ways = asyncio.gather(carry(here, there, True), carry(there, here, False))
    close(await asyncio.gather(zero, one))
    await ways
    close_all(here, there, relay)
    assert len(said) > 114

    zero = asyncio.ensure_future(form(0, 2, port))
    await attentive(port)
    heard = await knock(port, said)
    assert heard[44:45] == bytes([Status.BAD_PROOF])
    assert not zero.done()
    close(await asyncio.gather(zero, form(1, 2, port)))


async def test_a_pickle_is_never_loaded_at_any_stage(tmp_path, monkeypatch):
    """Also not from one who knows the secret: before, in place of, and inside of the JOIN."""
    import pickle

    victim = tmp_path / "touched"
    poison = b"cpathlib\nPath\n(S'" + str(victim).encode() + b"'\ntR(dR."
    monkeypatch.setattr(pickle, "loads", pytest.fail)
    monkeypatch.setattr(pickle, "load", pytest.fail)
    port = free_port()
    zero = asyncio.ensure_future(form(0, 2, port))
    await attentive(port)
    hello = Hello(Purpose.RENDEZVOUS, 1, 0, 2, 0).encode(bytes(32))
    for said in (poison, hello[:12] + poison, hello + poison, hello[:50] + poison * 3):
        await knock(port, said)
    sock = await proved(1, 2, port)
    sock.send(struct.pack("!I", len(poison)) + poison)
    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    sock.close()
    close(await asyncio.gather(zero, form(1, 2, port)))
    assert not victim.exists()


async def test_late_callers_for_a_refused_mesh_are_told_until_rank_0_is_gone(monkeypatch):
    monkeypatch.setattr(coordinator, "FAREWELL", 0.5)
    port = free_port()
    zero = asyncio.ensure_future(form(0, 3, port))
    await attentive(port)
    first = await joined(7, 3, port)
    await hear(first, "failed")
    second = await joined(1, 3, port)
    assert "rank 7" in (await hear(second, "failed"))["text"]
    close_all(first, second)
    with pytest.raises(Exception, match="rank 7"):
        await zero


def test_every_rank_may_call_twice_at_once():
    assert backlog(2) == 128
    assert backlog(1000) == 2000
    assert backlog(10**6) == 4096


def test_a_listener_that_cannot_be_leaves_nothing():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen((socket.AF_INET, taken.getsockname()), 2, reuse=True)


async def test_two_meshes_in_one_process_do_not_disturb_each_other():
    meshes = await asyncio.gather(*(form_all(3, free_port()) for _ in range(3)))
    for links in meshes:
        close(links)
