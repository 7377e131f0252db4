"""TLS: the socket by itself, meshes over it, certificates that do not fit, and whoever knocks at it."""

import asyncio
import contextlib
import datetime
import os
import re
import shutil
import socket
import ssl
import struct
import subprocess
from pathlib import Path

import certificates
import pytest
from forming import close, exchange, form, form_all, free_port, nothing_left
from test_accepting import STRANGERS, knock

import asynccoll
from asynccoll.errors import AuthenticationError, ProtocolError, RendezvousError
from asynccoll.net import accepting
from asynccoll.net.contexts import layer
from asynccoll.net.handshake import MAGIC
from asynccoll.net.pulse import Watch
from asynccoll.net.sockets import PeerClosed, receive_exactly, reset_by_peer, send_all
from asynccoll.net.tls import HANDSHAKE_BYTES, RECORD, SEAL, TlsSocket

PAYLOAD = bytes(range(251)) * 20_000
"""About 5 MB, without a power of two in its period."""


@pytest.fixture(scope="module")
def tls():
    return layer(certificates.contexts())


@pytest.fixture
def authority(tmp_path):
    return certificates.Authority(tmp_path)


@contextlib.contextmanager
def connected(buffer=None, *, tcp=False):
    """The two ends of a connection, non-blocking: what one has sent is there for the other at once, unless it is TCP."""
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = socket.create_connection(listener.getsockname())
            there, _ = listener.accept()
    else:
        here, there = socket.socketpair()
    for sock in (here, there):
        sock.setblocking(False)
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    try:
        yield here, there
    finally:
        here.close()
        there.close()


@contextlib.asynccontextmanager
async def pair(tls, buffer=None, *, proved=True, tcp=False):
    """Two ends of a connection that have done their TLS handshake: who called, who was called."""
    with (
        connected(buffer, tcp=tcp) as (here, there),
        tls.dialed(here, "127.0.0.1") as dialed,
        tls.accepted(there) as called,
    ):
        await asyncio.gather(dialed.handshake(), called.handshake())
        if proved:
            dialed.proved()
            called.proved()
        yield dialed, called


def raw_recv(sock, count=1 << 20):
    """What is in the descriptor of a `TlsSocket`, sealed."""
    return socket.socket.recv(sock, count)


def read_now(sock, room=1 << 16):
    """What can be read without waiting."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while part := sock.recv(room):
            found += part
    return found


def records(data):
    """The lengths of the TLS records in ``data``, plain: without header, tag and the byte for the type."""
    found = []
    while data:
        kind, _, length = struct.unpack_from("!BHH", data)
        assert kind == 23
        found.append(length - 17)
        data = data[5 + length :]
    return found


class TestTheSocket:
    async def test_every_byte_comes_through_both_ways_at_once(self, tls):
        async with pair(tls, buffer=8192) as (dialed, called):
            *_, heard, answered = await asyncio.gather(
                send_all(dialed, PAYLOAD),
                send_all(called, PAYLOAD[::-1]),
                receive_exactly(called, len(PAYLOAD)),
                receive_exactly(dialed, len(PAYLOAD)),
            )
            assert heard == PAYLOAD
            assert answered == PAYLOAD[::-1]

    async def test_both_ends_say_that_it_is_tls_1_3_and_nothing_is_clear_on_the_wire(self, tls):
        async with pair(tls) as (dialed, called):
            assert dialed._tls.version() == called._tls.version() == "TLSv1.3"
            dialed.send(b"the secret of the ranks")
            wire = raw_recv(called)
            assert wire.startswith(b"\x17\x03\x03")
            assert b"secret" not in wire

    @pytest.mark.parametrize(
        "name", ["sendall", "sendto", "sendfile", "makefile", "dup", "recvfrom", "recvmsg"]
    )
    async def test_nothing_goes_past_tls_by_accident(self, tls, name):
        async with pair(tls) as (dialed, called):
            with pytest.raises(OSError, match="TLS connection"):
                getattr(dialed, name)(b"in clear")
            with pytest.raises(BlockingIOError):
                raw_recv(called)

    async def test_memory_is_free_once_it_was_sent_whether_or_not_the_descriptor_took_it(self, tls):
        async with pair(tls, buffer=4096) as (dialed, called):
            memory, pos = bytearray(PAYLOAD), 0
            with contextlib.suppress(BlockingIOError):
                while pos < len(memory):
                    sent = dialed.send(memoryview(memory)[pos:])
                    assert 0 < sent <= SEAL
                    pos += sent
            assert not dialed.flush()
            memory[:] = bytes(len(memory))
            _, heard = await asyncio.gather(dialed.flushed(), receive_exactly(called, pos))
            assert heard == PAYLOAD[:pos]
            assert read_now(called) == b""

    async def test_what_follows_a_write_that_would_block_may_be_anything(self, tls):
        # An abort may put other bytes in the place of those that were offered when the descriptor was full.
        async with pair(tls, buffer=4096) as (dialed, called):
            pos = 0
            while dialed.flush():
                pos += dialed.send(PAYLOAD[pos:])
            for _ in range(3):
                with pytest.raises(BlockingIOError):
                    dialed.send(PAYLOAD[pos:])
            _, heard = await asyncio.gather(dialed.flushed(), receive_exactly(called, pos - 1))
            assert heard == PAYLOAD[: pos - 1]
            assert dialed.send(b"x") == 1  # shorter, and not what was offered
            assert await receive_exactly(called, 2) == PAYLOAD[pos - 1 : pos] + b"x"

    async def test_small_parts_share_a_record_with_the_beginning_of_a_large_one(self, tls):
        async with pair(tls) as (dialed, called):
            assert dialed.sendmsg([b"h" * 28, b"p" * 100]) == 128
            assert records(raw_recv(called)) == [128]
            assert dialed.sendmsg([b"", b"w" * 20, b"h" * 28, bytearray(1 << 20)]) == SEAL
            assert records(raw_recv(called)) == [RECORD] * (SEAL // RECORD)
            assert dialed.sendmsg([bytes(RECORD), b"x"]) == RECORD + 1
            assert records(raw_recv(called)) == [RECORD, 1]
            assert dialed.sendmsg([b"", b""]) == 0
            with pytest.raises(BlockingIOError):
                raw_recv(called)

    async def test_parts_of_any_item_size_are_bytes(self, tls):
        async with pair(tls) as (dialed, called):
            assert dialed.sendmsg([memoryview(bytes(range(64))).cast("d"), memoryview(b"ab")]) == 66
            assert await receive_exactly(called, 66) == bytes(range(64)) + b"ab"

    async def test_a_read_takes_whole_records_and_what_is_left_is_told(self, tls):
        async with pair(tls) as (dialed, called):
            for _ in range(3):
                dialed.send(b"0123456789")
            memory = bytearray(7)
            assert called.recv_into(memory) == 7
            assert called.holds_input  # although the descriptor is empty
            with pytest.raises(BlockingIOError):
                raw_recv(called)
            assert called.recv_into(bytearray(100)) == 23
            assert not called.holds_input
            with pytest.raises(BlockingIOError):
                called.recv_into(memory)
            assert not called.holds_input

    async def test_half_a_record_is_not_held_input(self, tls):
        # Or whoever drives the socket would go round and round until the rest has come.
        async with pair(tls) as (dialed, called), pair(tls) as (other, _):
            dialed.send(b"0123456789")
            record = raw_recv(called)
            for byte in record[:-1]:
                socket.socket.send(dialed, bytes([byte]))
                with pytest.raises(BlockingIOError):
                    called.recv(100)
                assert not called.holds_input
            socket.socket.send(dialed, record[-1:])
            assert called.recv(100) == b"0123456789"
            assert not other.holds_input

    @pytest.mark.parametrize("polite", [True, False], ids=["with its last record", "without"])
    async def test_the_end_of_the_stream_comes_after_all_that_was_sent(self, tls, polite):
        async with pair(tls) as (dialed, called):
            dialed.send(b"last words")
            if polite:
                dialed.shutdown(socket.SHUT_WR)
            dialed.close()
            assert called.recv(4) == b"last"
            assert called.recv(100) == b" words"
            assert called.recv(100) == b""
            assert called.recv(100) == b""

    async def test_after_the_end_of_writing_there_is_still_reading(self, tls):
        async with pair(tls) as (dialed, called):
            dialed.send(b"bye")
            dialed.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match=r"."):
                dialed.send(b"more")
            called.send(b"answer")
            assert called.recv(100) == b"bye"
            assert called.recv(100) == b""
            assert dialed.recv(100) == b"answer"
            called.close()
            assert dialed.recv(100) == b""

    async def test_the_end_of_writing_does_not_spoil_what_has_been_read_in(self, tls):
        async with pair(tls) as (dialed, called):
            called.send(b"0123456789")
            called.send(b"abc")
            assert dialed.recv(4) == b"0123"
            dialed.shutdown(socket.SHUT_WR)
            called.send(b"def")
            assert read_now(dialed) == b"456789abcdef"
            assert called.recv(10) == b""

    async def test_a_reset_comes_after_what_was_read_in_before_it(self, tls):
        async with pair(tls, tcp=True) as (dialed, called):
            dialed.send(b"last words")
            assert await receive_exactly(called, 4) == b"last"
            dialed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dialed.close()
            assert called.recv(100) == b" words"
            with pytest.raises(ConnectionResetError):
                await receive_exactly(called, 1)
            assert called.recv(100) == b""

    async def test_a_record_that_was_tampered_with_breaks_the_connection_and_nothing_of_it_is_read(self, tls):
        async with pair(tls) as (dialed, called):
            dialed.send(b"first")
            first = raw_recv(called)
            dialed.send(b"second")
            second = bytearray(raw_recv(called))
            second[-1] ^= 1
            socket.socket.send(dialed, first + second)
            assert called.recv(100) == b"first"
            assert called.holds_input
            with pytest.raises(ConnectionAbortedError, match="TLS: "):
                called.recv(100)
            assert called.recv(100) == b""

    async def test_a_peer_that_is_gone_is_seen_without_losing_what_it_sent(self, tls):
        async with pair(tls) as (dialed, called):
            assert not reset_by_peer(called)
            dialed.send(b"abc")
            assert not reset_by_peer(called)
            assert called.recv(2) == b"ab"
            assert not reset_by_peer(called)
            dialed.shutdown(socket.SHUT_WR)
            dialed.close()
            while not reset_by_peer(called):  # its last record is not the end of the descriptor yet
                await asyncio.sleep(0)
            assert called.recv(10) == b"c"

    async def test_a_connection_has_one_name_at_both_ends_and_no_other_has_it(self, tls):
        async with pair(tls) as (dialed, called), pair(tls) as (other, _):
            assert len(dialed.channel()) >= 32
            assert dialed.channel() == called.channel() != other.channel()

    async def test_there_is_no_name_before_the_handshake(self, tls):
        with connected() as (here, _), tls.dialed(here, "127.0.0.1") as dialed, pytest.raises(ProtocolError):
            dialed.channel()

    async def test_before_the_proof_a_peer_costs_little_memory(self, tls):
        async with pair(tls, proved=False) as (dialed, called):
            dialed.send(bytes(SEAL))
            assert len(await receive_exactly(called, 12)) == 12
            assert called._incoming.pending <= RECORD

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
    async def test_the_peer_may_change_its_keys_at_any_time(self, authority):
        server = layer(authority.contexts())
        path = authority.certificate()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            client = await asyncio.create_subprocess_exec(
                *("openssl", "s_client", "-connect", f"127.0.0.1:{listener.getsockname()[1]}", "-quiet"),
                *("-no_ign_eof", "-cert", path, "-key", path),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            loop = asyncio.get_running_loop()
            sock, _ = await loop.sock_accept(listener)
        with server.accepted(sock) as called:
            await called.handshake()
            called.proved()
            for said in (b"one\n", b"two\n"):
                client.stdin.write(said)
                assert await receive_exactly(called, 4) == said
                await send_all(called, b"and " + said)
                assert await client.stdout.readexactly(8) == b"and " + said
                client.stdin.write(b"K\n")  # new keys, and the same is asked of us
                await called._ready(reading=True)
                with pytest.raises(BlockingIOError):
                    called.recv(1)
                assert not called._outgoing.pending  # the answer has left
            client.stdin.close()
            assert await receive_to_end(called) == b""
        await client.wait()

    async def test_a_handshake_of_endless_bytes_is_given_up(self, tls):
        hello = b"\x01\x01\xff\xff" + bytes(
            0x1FFFF
        )  # a ClientHello of 128 KiB, of which most is still to come
        wire = b"".join(
            b"\x16\x03\x01" + struct.pack("!H", len(part)) + part
            for part in (hello[at : at + RECORD] for at in range(0, len(hello), RECORD))
        )
        with connected() as (here, there), tls.accepted(there) as called:
            loop = asyncio.get_running_loop()
            writing = asyncio.ensure_future(loop.sock_sendall(here, wire))
            with pytest.raises(ProtocolError, match=str(HANDSHAKE_BYTES)):
                await called.handshake()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def test_a_peer_that_leaves_in_the_handshake_is_no_verdict(self, tls):
        with connected() as (here, there), tls.accepted(there) as called:
            here.close()
            with pytest.raises(PeerClosed):
                await called.handshake()

    async def test_a_handshake_that_is_cancelled_leaves_no_watcher(self, tls):
        with connected() as (_, there), tls.accepted(there) as called:
            waiting = asyncio.ensure_future(called.handshake())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not asyncio.get_running_loop().remove_reader(called.fileno())


async def receive_to_end(sock):
    found = b""
    with contextlib.suppress(PeerClosed):
        while True:
            found += await receive_exactly(sock, 1)
    return found


class TestTheArgument:
    def test_none_is_no_tls(self):
        assert layer(None) is None

    def test_a_pair_is_server_and_client(self):
        server, client = certificates.contexts()
        assert layer((server, client)) == layer([server, client]) == (server, client)

    def test_one_context_for_both_sides_will_do(self):
        with pytest.warns(DeprecationWarning, match="PROTOCOL_TLS"):
            both = ssl.SSLContext(ssl.PROTOCOL_TLS)
        both.verify_mode = ssl.CERT_REQUIRED
        assert layer(both) == (both, both)

    @pytest.mark.parametrize("wrong", [True, "cert.pem", ("a", "b"), (), 7, {"server": 1}])
    def test_anything_else_is_an_error_that_says_what_to_pass(self, wrong):
        with pytest.raises(ValueError, match=r"asynccoll\.tls\(.*pair \(server_context, client_context\)"):
            layer(wrong)

    @pytest.mark.parametrize("which", [0, 1])
    def test_a_context_of_one_side_is_not_enough(self, which):
        with pytest.raises(ValueError, match="side alone"):
            layer(certificates.contexts()[which])

    def test_the_order_counts(self):
        with pytest.raises(ValueError, match="wrong order"):
            layer(certificates.contexts()[::-1])

    def test_a_client_side_that_verifies_nothing_has_to_be_meant(self):
        server, client = certificates.contexts()
        careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(ValueError, match="verifies no certificate"):
            layer((server, careless))
        assert layer((server, careless), insecure=True) == (server, careless)
        assert client.verify_mode is ssl.CERT_REQUIRED

    def test_the_convenience_makes_both_ends_show_a_certificate(self, authority):
        for context in authority.contexts():
            assert context.verify_mode is ssl.CERT_REQUIRED
            assert context.minimum_version is ssl.TLSVersion.TLSv1_3
            assert len(context.get_ca_certs()) == 1

    def test_a_file_that_is_not_there_is_named(self, authority, tmp_path):
        with pytest.raises(FileNotFoundError):
            asynccoll.tls(tmp_path / "none.pem", cafile=authority.cafile)


DOCUMENTED = re.search(
    r"^```sh\n(openssl .*?)^```$", (Path(__file__).parents[2] / "docs/security.md").read_text(), re.M | re.S
)[1]


@pytest.fixture
def documented(tmp_path):
    """The files that the commands of the documentation make: what `asynccoll.tls` takes."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    subprocess.run(["sh", "-euc", DOCUMENTED], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    return [tmp_path / file for file in ("rank.pem", "rank.key", "ca.pem")]


@pytest.mark.parametrize("name", ["node7", "10.0.0.7"])
async def test_the_commands_of_the_documentation_make_files_that_fit(name, documented):
    tls = layer(asynccoll.tls(*documented, check_hostname=True))
    with connected() as (here, there), tls.dialed(here, name) as dialed, tls.accepted(there) as called:
        await asyncio.gather(dialed.handshake(), called.handshake())
        called.send(b"x")
        assert await receive_exactly(dialed, 1) == b"x"


async def test_one_self_signed_certificate_for_all_will_do(tmp_path):
    authority = certificates.Authority(tmp_path)
    both = tmp_path / "both.pem"
    both.write_bytes(
        authority._ca.private_key_pem.bytes() + authority._ca.cert_pem.bytes()
    )  # the CA's own, which has signed itself
    tls = layer(asynccoll.tls(both))
    with connected() as (here, there), tls.dialed(here, "127.0.0.1") as dialed, tls.accepted(there) as called:
        await asyncio.gather(dialed.handshake(), called.handshake())
        called.send(b"x")
        assert await receive_exactly(dialed, 1) == b"x"


class TestTheMesh:
    @pytest.mark.parametrize("size", [2, 3, 4, 8])
    async def test_every_pair_is_connected_over_tls_and_small_frames_leave_at_once(self, tls, size):
        async with nothing_left():
            links = await form_all(size, free_port(), pulse=True, tls=tls)
            for mesh in links:
                for sock in (*mesh.sockets.values(), *mesh.pulses.values()):
                    assert isinstance(sock, TlsSocket)
                    assert sock.gettimeout() == 0
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
            await exchange(links)
            close(links)

    async def test_bytes_behind_the_handshake_are_not_lost_when_they_come_in_one_segment_with_it(self, tls):
        # The last message of the TLS handshake and everything that the dialer says after it.
        with contextlib.ExitStack() as stack:
            here, relay = stack.enter_context(connected())
            relayed, there = stack.enter_context(connected())
            dialed = stack.enter_context(tls.dialed(here, "127.0.0.1"))
            called = stack.enter_context(tls.accepted(there))
            loop = asyncio.get_running_loop()
            accepting = asyncio.ensure_future(called.handshake())
            dialing = asyncio.ensure_future(dialed.handshake())
            await loop.sock_sendall(relayed, await loop.sock_recv(relay, 1 << 16))  # the hello
            await loop.sock_sendall(relay, await loop.sock_recv(relayed, 1 << 16))  # its answer
            await dialing
            await send_all(dialed, b"hello and more")
            segment = relay.recv(1 << 16)
            assert not accepting.done()
            relayed.send(segment)
            await accepting
            assert called.holds_input
            assert await receive_exactly(called, 5) == b"hello"
            assert await receive_exactly(called, 9) == b" and more"

    async def test_what_ranks_say_right_behind_the_handshake_reaches_them(self, tls):
        links = await form_all(2, free_port(), tls=tls)
        links[0].sockets[1].send(b"one")
        assert await receive_exactly(links[1].sockets[0], 1) == b"o"
        links[0].sockets[1].send(b"two")
        assert await receive_exactly(links[1].sockets[0], 5) == b"netwo"
        close(links)

    async def test_heartbeats_go_over_tls_from_their_own_thread(self, tls):
        silent = []
        async with pair(tls) as (dialed, called), asyncio.timeout(20):
            watches = [
                Watch({1: end}, 0.6, lambda *told: silent.append(told), silent.append)
                for end in (dialed, called)
            ]
            for watch in watches:
                heard = {watch.heard[1]}
                while len(heard) < 10:  # more than a liveness timeout's
                    await asyncio.sleep(0.01)
                    heard.add(watch.heard[1])
            watches[0].end()
            while watches[1].heard:  # until the goodbye has come
                await asyncio.sleep(0.01)
            watches[1].end()
        assert not silent

    async def test_a_wrong_secret_is_still_refused_inside(self, tls):
        port = free_port()
        async with nothing_left():
            zero = asyncio.ensure_future(form(0, 2, port, init_timeout=30, tls=tls))
            async with asyncio.timeout(10):
                with pytest.raises(AuthenticationError, match="ASYNCCOLL_SECRET"):
                    await form(1, 2, port, secret=b"another", init_timeout=30, tls=tls)
            await ended(zero)

    async def test_who_sits_in_between_with_a_good_certificate_cannot_pass_the_proof_through(
        self, tls, caplog
    ):
        port, relay_port = free_port(), free_port()
        loop = asyncio.get_running_loop()
        async with nothing_left():
            zero = asyncio.ensure_future(form(0, 2, port, init_timeout=30, tls=tls))
            await listening(port)
            with socket.create_server(("127.0.0.1", relay_port)) as listener:
                listener.setblocking(False)
                one = asyncio.ensure_future(form(1, 2, relay_port, init_timeout=30, tls=tls))
                caller, _ = await loop.sock_accept(listener)
                onward = socket.socket()
                onward.setblocking(False)
                await loop.sock_connect(onward, ("127.0.0.1", port))
                with tls.accepted(caller) as near, tls.dialed(onward, "127.0.0.1") as far:
                    await asyncio.gather(near.handshake(), far.handshake())
                    for source, target, count in (
                        (near, far, 82),
                        (far, near, 44),
                        (near, far, 32),
                        (far, near, 65),
                    ):
                        await send_all(target, await receive_exactly(source, count))
                    async with asyncio.timeout(10):
                        with pytest.raises(AuthenticationError):
                            await one
            assert not zero.done()
            await ended(zero)
        (line,) = [record.message for record in caplog.records if record.name == "asynccoll"]
        assert "does not know the secret" in line


async def ended(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def without_certificate(authority):
    """Contexts of a rank that would know others, but has nothing to show when it calls."""
    server, client = authority.contexts(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(authority.cafile)
    return server[0], client


def with_nothing_to_serve(authority):
    """Contexts of a rank that cannot take calls."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), authority.contexts()[1]


def last_year():
    now = datetime.datetime.now(datetime.UTC)
    return {"not_before": now - datetime.timedelta(days=400), "not_after": now - datetime.timedelta(days=30)}


def misfits(authority, other):
    """What does not fit: contexts of rank 0, contexts of rank 1, the error at rank 1, and what the log of rank 0 says."""
    good = authority.contexts
    return {
        "another CA at rank 1": (
            good(),
            other.contexts(trusts=authority),
            (AuthenticationError, "refused the TLS handshake.*unknown ca.*same cafile"),
            "unable to get local issuer certificate.*same cafile",
        ),
        "rank 1 trusts another CA": (
            good(),
            authority.contexts(trusts=other),
            (AuthenticationError, "certificate of '127.0.0.1' is not accepted.*same cafile"),
            "alert unknown ca",
        ),
        "another name": (
            good("10.1.2.3", "head"),
            good(check_hostname=True),
            (AuthenticationError, "'127.0.0.1'.*put it into the certificate"),
            "bad certificate|certificate unknown",
        ),
        "rank 0's has expired": (
            good(**last_year()),
            good(),
            (AuthenticationError, "certificate has expired.*renew it"),
            "expired",
        ),
        "rank 1's has expired": (
            good(),
            good(**last_year()),
            (AuthenticationError, "this rank's certificate has expired: renew it"),
            "certificate has expired.*renew it",
        ),
        "rank 1 shows none": (
            good(),
            without_certificate(authority),
            (AuthenticationError, "this rank shows no certificate: load one into the client context"),
            "it shows no certificate",
        ),
        "rank 0 without TLS": (
            None,
            good(),
            (RendezvousError, "it does not use TLS, and this rank was given ssl="),
            "it uses TLS, and this rank was given no ssl=",
        ),
        "rank 1 without TLS": (
            good(),
            None,
            (RendezvousError, "it uses TLS, and this rank was given no ssl="),
            "it does not use TLS, and this rank does",
        ),
        "rank 0 has none to serve with": (
            with_nothing_to_serve(authority),
            good(),
            (AuthenticationError, "its server context has no certificate"),
            "the server context of this rank has no certificate",
        ),
    }


MISFITS = (
    *("another CA at rank 1", "rank 1 trusts another CA", "another name", "rank 0's has expired"),
    *("rank 1's has expired", "rank 1 shows none", "rank 0 without TLS", "rank 1 without TLS"),
    "rank 0 has none to serve with",
)


@pytest.mark.parametrize("misfit", MISFITS)
async def test_what_does_not_fit_is_an_error_at_once_that_says_what_to_do(
    misfit, authority, tmp_path, caplog
):
    other = tmp_path / "other"
    other.mkdir()
    at_zero, at_one, (kind, text), logged = misfits(authority, certificates.Authority(other))[misfit]
    port = free_port()
    async with nothing_left():
        zero = asyncio.ensure_future(form(0, 2, port, init_timeout=60, tls=layer(at_zero)))
        async with asyncio.timeout(20):  # long before the time for forming the mesh is up
            with pytest.raises(kind, match=text) as caught:
                await form(1, 2, port, init_timeout=60, tls=layer(at_one))
        assert type(caught.value) is kind
        assert "rank 1 of 2: no mesh at 127.0.0.1" in str(caught.value)
        assert "/" not in str(caught.value).replace("://", "")  # no file of OpenSSL's
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert not zero.done()
        await ended(zero)
    (line,) = [record.message for record in caplog.records if record.name == "asynccoll"]
    assert re.search(logged, line), line


async def test_rank_0_tells_at_its_deadline_what_it_had_to_refuse(authority, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    stranger = certificates.Authority(other).contexts(trusts=authority)
    port = free_port()
    zero, one = await asyncio.gather(
        form(0, 2, port, init_timeout=1.0, tls=layer(authority.contexts())),
        form(1, 2, port, init_timeout=1.0, tls=layer(stranger)),
        return_exceptions=True,
    )
    assert type(one) is AuthenticationError
    assert type(zero) is RendezvousError
    assert zero.missing == {1}
    assert "its certificate is not accepted" in str(zero)


HELLO_WITHOUT_CERTIFICATE = "a TLS client without certificate"


@pytest.mark.parametrize("said", [*STRANGERS, HELLO_WITHOUT_CERTIFICATE])
async def test_a_stranger_at_a_tls_listener_is_shown_out_and_the_mesh_forms(said, tls):
    async with nothing_left():
        port = free_port()
        zero = asyncio.ensure_future(form(0, 3, port, tls=tls))
        await listening(port)
        if said == HELLO_WITHOUT_CERTIFICATE:
            await refused_handshake(port)
        else:
            assert len(await knock(port, STRANGERS[said])) <= 64
        assert not zero.done()
        close(await asyncio.gather(zero, form(1, 3, port, tls=tls), form(2, 3, port, tls=tls)))


async def listening(port):
    """Until something listens on ``port``: seen in the kernel's table, for a probe would be a stranger."""
    while f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text():  # noqa: ASYNC240 (no disk)
        await asyncio.sleep(0.005)


async def refused_handshake(port):
    """A client that finishes its side of the handshake, and is then told that a certificate was due."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    loop = asyncio.get_running_loop()
    with socket.socket() as plain:
        plain.setblocking(False)
        await loop.sock_connect(plain, ("127.0.0.1", port))
        with TlsSocket(plain, context, "127.0.0.1") as sock:
            await sock.handshake()
            with pytest.raises((AuthenticationError, OSError)):
                await receive_exactly(sock, 1)


@pytest.mark.parametrize(
    "count", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
async def test_refused_handshakes_leave_nothing(count, tls):
    port = free_port()
    async with nothing_left():
        zero = asyncio.ensure_future(form(0, 2, port, init_timeout=250, tls=tls))
        await listening(port)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(count // 20):
            await asyncio.gather(*(refused_handshake(port) for _ in range(20)))
        async with asyncio.timeout(10):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)
        close(await asyncio.gather(zero, form(1, 2, port, tls=tls)))


async def test_a_silent_stranger_is_dropped_in_the_tls_handshake_too(tls, monkeypatch):
    monkeypatch.setattr(accepting, "HANDSHAKE_TIMEOUT", 0.3)
    port = free_port()
    async with nothing_left():
        zero = asyncio.ensure_future(form(0, 2, port, tls=tls))
        await listening(port)
        for said in (b"", b"\x16\x03\x01", MAGIC[:3]):
            assert len(await silence(port, said)) <= 64
        close(await asyncio.gather(zero, form(1, 2, port, tls=tls)))


async def silence(port, said):
    """Say so much and wait; what was heard when the other side closed."""
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setblocking(False)
        sock.send(said)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await loop.sock_recv(sock, 100):
                heard += data
    return heard


CUTS = (0, 1, 5, 100, 300, 600, 1000, 1400, 2000)
"""Bytes of the TLS handshake and the proof that come through; 2,000 is beyond the caller's, and near the end of the answers."""


@contextlib.asynccontextmanager
async def cutting_relay(port, after, upwards, reset):
    """Listens, and passes everything on to ``port``; the first connection is cut when so many bytes have gone one way."""
    tasks, calls = set(), []

    async def copy(source, target, ends, limit):
        with contextlib.suppress(OSError):
            while data := await source.read(limit if limit else 1 << 16):
                if limit is not None:
                    limit -= len(data)
                target.write(data)
                await target.drain()
                if limit == 0:
                    break
        for end in ends:
            sock = end.get_extra_info("socket")
            if reset and limit == 0 and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()

    async def serve(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        first = not calls
        calls.append(True)
        ends = (writer, far_writer)
        if first and after == 0:
            for end in ends:
                end.close()
            return
        for source, target, up in ((reader, far_writer, True), (far_reader, writer, False)):
            limit = after if first and up is upwards else None
            tasks.add(asyncio.ensure_future(copy(source, target, ends, limit)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], calls
    finally:
        server.close()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)


@pytest.mark.parametrize("upwards", [True, False], ids=["what the caller says", "the answers"])
@pytest.mark.parametrize("reset", [False, True], ids=["end of stream", "reset"])
@pytest.mark.parametrize("after", CUTS)
async def test_a_connection_that_is_cut_in_the_handshake_is_made_again(after, reset, upwards, tls):
    port = free_port()
    zero = asyncio.ensure_future(form(0, 2, port, tls=tls))
    await listening(port)
    async with cutting_relay(port, after, upwards, reset) as (through, calls):
        links = await asyncio.gather(zero, form(1, 2, through, tls=tls))
        await send_all(links[0].sockets[1], b"there")
        assert await receive_exactly(links[1].sockets[0], 5) == b"there"
        assert len(calls) > 1 or after > 1000
        close(links)
