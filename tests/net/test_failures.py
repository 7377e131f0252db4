"""Meshes that cannot form: every rank that is involved says so, soon, with the same reason, and nothing is left."""

import asyncio
import socket
import time

import pytest
from forming import (
    attentive,
    close,
    failures,
    form,
    form_all,
    free_port,
    hear,
    joined,
    nothing_left,
    proved,
)

from asynccoll.errors import AuthenticationError, RendezvousError
from asynccoll.net import control, coordinator, joiner, station
from asynccoll.net.handshake import Purpose

LONG = 60.0
"""An init_timeout that no test here sits out: who raises earlier was told, not timed out."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch, request):
    """Waits that are there for the sake of others, who here either come at once or never."""
    if "late" not in request.node.name:
        monkeypatch.setattr(coordinator, "FAREWELL", 0.1)
        monkeypatch.setattr(station, "PATIENCE", 0.1)


@pytest.fixture(autouse=True)
async def _nothing_left():
    async with nothing_left():
        yield


class Stopwatch:
    """Fails a rank that waited for its own timeout instead of being told. Bounds are far from what is measured."""

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, kind, *_):
        if kind is None:
            assert time.monotonic() - self.start < LONG / 2


async def test_every_rank_that_joined_names_those_that_did_not():
    port = free_port()
    errors = await failures(*(form(rank, 5, port, init_timeout=0.6) for rank in (0, 1, 3)))
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert error.missing == {2, 4}
        assert "ranks 2, 4 did not join" in str(error)
        assert error.address == f"127.0.0.1:{port}"
        assert 0.5 < error.elapsed < 10


async def test_a_rank_whose_own_time_ends_first_names_them_too():
    port = free_port()
    errors = await failures(
        form(0, 4, port, init_timeout=LONG),
        form(1, 4, port, init_timeout=0.6),
        form(3, 4, port, init_timeout=LONG),
    )
    for error in errors:
        assert error.missing == {2}
        assert "rank 2 did not join" in str(error)
    for error in (errors[0], errors[2]):
        assert "rank 1 at 127.0.0.1:" in str(error)


async def test_strangers_are_mentioned_when_a_rank_is_missing():
    port = free_port()
    waiting = asyncio.ensure_future(failures(form(0, 2, port, init_timeout=0.8)))
    await attentive(port)
    with pytest.raises(AuthenticationError):
        await proved(1, 2, port, secret=b"wrong")
    (error,) = await waiting
    assert "claims to be rank 1 but does not know the secret" in str(error)


async def test_nobody_at_the_address():
    (error,) = await failures(form(1, 2, free_port(), init_timeout=0.3))
    assert error.missing == {0}
    assert "rank 0 was not reached within 0.3 s" in str(error)
    assert "refused" in str(error)


@pytest.mark.parametrize(
    ("answer", "fragment"),
    [
        (None, "connected, but no answer to the handshake yet"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the peer does not speak asynccoll's protocol"),
        (b"", "connected, then: "),
    ],
    ids=["silent", "web server", "closes"],
)
async def test_somebody_else_at_the_address(answer, fragment):
    async def serve(reader, writer):
        if answer is None:
            await reader.read()
        writer.write(answer or b"")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    (error,) = await failures(form(1, 2, server.sockets[0].getsockname()[1], init_timeout=0.8))
    assert fragment in str(error)
    server.close()
    await server.wait_closed()
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0.01)  # a poll: the server's tasks end on their own


async def test_another_protocol_version_at_the_address_is_told_at_once():
    async def serve(reader, writer):
        await reader.readexactly(12)
        writer.write(b"asynccol" + bytes([0, 9, 0, 0]))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with Stopwatch():
        (error,) = await failures(form(1, 2, server.sockets[0].getsockname()[1], init_timeout=LONG))
    assert isinstance(error, RendezvousError)
    assert "version 9" in str(error)
    assert "version 1" in str(error)
    server.close()
    await server.wait_closed()
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0.01)  # a poll: the server's tasks end on their own


async def test_a_wrong_secret_is_told_to_the_dialer_and_harms_nobody():
    port = free_port()
    right = [asyncio.ensure_future(form(rank, 2, port)) for rank in (0,)]
    await attentive(port)
    with Stopwatch():
        (error,) = await failures(form(1, 2, port, secret=b"wrong", init_timeout=LONG))
    assert isinstance(error, AuthenticationError)
    assert error.address == f"127.0.0.1:{port}"
    assert f"127.0.0.1:{port}" in str(error)
    assert "ASYNCCOLL_SECRET" in str(error)
    close(await asyncio.gather(*right, form(1, 2, port)))


async def test_a_rank_claimed_twice_fails_everybody_with_both_addresses():
    port = free_port()
    with Stopwatch():
        errors = await failures(*(form(rank, 3, port, init_timeout=LONG) for rank in (0, 1, 1)))
    for error in errors:
        assert "rank 1 was claimed twice" in str(error)
        assert str(error).count("127.0.0.1:") >= 3  # the mesh and both processes


async def test_a_rank_that_comes_late_is_told_what_went_wrong_before():
    port = free_port()
    early = [asyncio.ensure_future(form(rank, 4, port, init_timeout=LONG)) for rank in (0, 1, 1)]
    await asyncio.wait(early[1:])
    with Stopwatch():
        errors = await failures(*early, *(form(rank, 4, port, init_timeout=LONG) for rank in (2, 3)))
    for error in errors:
        assert "rank 1 was claimed twice" in str(error)


async def test_two_ranks_0_cannot_share_an_address():
    port = free_port()
    with Stopwatch():
        first = asyncio.ensure_future(form(0, 2, port))
        await attentive(port)
        (error,) = await failures(form(0, 2, port, init_timeout=LONG))
    assert f"rank 0 cannot listen on 127.0.0.1:{port}" in str(error)
    close(await asyncio.gather(first, form(1, 2, port)))


@pytest.mark.parametrize("ranks", [[(0, 2), (1, 3), (2, 3)], [(0, 3), (1, 3), (2, 4)], [(0, 2), (5, 6)]])
async def test_world_sizes_that_disagree_fail_everybody(ranks):
    port = free_port()
    with Stopwatch():
        errors = await failures(*(form(rank, size, port, init_timeout=LONG) for rank, size in ranks))
    for error in errors:
        assert "world sizes disagree" in str(error)
        assert f"rank 0 at 127.0.0.1:{port}" in str(error)
        assert f"says {ranks[0][1]}" in str(error)
        assert f"says {ranks[-1][1]}" in str(error)


async def test_a_rank_outside_of_the_world_fails_everybody():
    port = free_port()
    honest = [asyncio.ensure_future(form(rank, 3, port, init_timeout=LONG)) for rank in (0, 1)]
    await attentive(port)
    with Stopwatch():
        sock = await joined(7, 3, port)
        told = await hear(sock, "failed")
        sock.close()
        errors = await failures(*honest)
    assert "rank 7 at 127.0.0.1:" in told["text"]
    for error in errors:
        assert "rank 7 at 127.0.0.1:" in str(error)
        assert "outside of the world of 3 ranks" in str(error)


async def test_settings_that_disagree_fail_everybody_with_every_value():
    port = free_port()
    with Stopwatch():
        errors = await failures(
            *(
                form(rank, 3, port, init_timeout=LONG, must_agree={"ASYNCCOLL_ALGORITHM": name})
                for rank, name in enumerate(("auto", "ring", "auto"))
            )
        )
    for error in errors:
        assert "ranks disagree on ASYNCCOLL_ALGORITHM" in str(error)
        assert "ranks 0, 2 have 'auto'" in str(error)
        assert "rank 1 has 'ring'" in str(error)


async def test_pulse_on_some_ranks_only_is_a_disagreement():
    port = free_port()
    errors = await failures(*(form(rank, 2, port, pulse=rank == 1, init_timeout=LONG) for rank in range(2)))
    assert all("ranks disagree on pulse" in str(error) for error in errors)


async def test_a_port_in_use_is_named_with_who_holds_it():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        (error,) = await failures(form(0, 2, port, init_timeout=LONG))
    assert f"rank 0 cannot listen on 127.0.0.1:{port}" in str(error)
    assert "this very process" in str(error)
    assert error.address == f"127.0.0.1:{port}"


async def test_under_torchrun_the_agent_is_mentioned(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with socket.create_server(("127.0.0.1", 0)) as agent:
        (error,) = await failures(form(0, 2, agent.getsockname()[1], init_timeout=LONG))
    assert "torchrun" in str(error)
    assert "ASYNCCOLL_MASTER_PORT" in str(error)


async def test_an_address_of_another_machine_cannot_be_listened_on():
    (error,) = await failures(form(0, 2, free_port(), host="192.0.2.1", init_timeout=LONG))
    assert "not an address of this machine" in str(error)


@pytest.mark.parametrize("fd", ["closed", "not listening", "a file"])
async def test_a_held_listener_that_is_none_is_named(fd, tmp_path):
    with socket.socket() as idle, open(tmp_path / "file", "w") as file:
        number = {"closed": 987, "not listening": idle.fileno(), "a file": file.fileno()}[fd]
        (error,) = await failures(form(0, 2, free_port(), fd=number, init_timeout=LONG))
    assert f"ASYNCCOLL_RENDEZVOUS_FD={number}" in str(error)


async def test_a_rank_that_dies_after_joining_is_named_by_all():
    port = free_port()
    others = [asyncio.ensure_future(form(rank, 4, port, init_timeout=LONG)) for rank in (0, 1)]
    await attentive(port)
    sock = await joined(2, 4, port)
    await hear(sock, "progress")
    with Stopwatch():
        sock.close()
        errors = await failures(*others)
    for error in errors:
        assert error.missing == {2}
        assert "rank 2 at 127.0.0.1:" in str(error)
        assert "left while the mesh was forming" in str(error)


async def test_a_rank_that_dies_while_linking_is_named_by_all():
    port = free_port()
    others = [asyncio.ensure_future(form(rank, 3, port, init_timeout=LONG)) for rank in (0, 2)]
    await attentive(port)
    sock = await joined(1, 3, port, listens_at=free_port())  # rank 2 calls there in vain
    await hear(sock, "welcome")
    with Stopwatch():
        sock.close()
        errors = await failures(*others)
    for error in errors:
        assert error.missing == {1}
        assert "rank 1 at 127.0.0.1:" in str(error)


async def test_a_rank_that_dies_after_linking_is_named_by_all():
    port = free_port()
    others = [asyncio.ensure_future(form(0, 3, port, init_timeout=LONG))]
    await attentive(port)
    stuck, dying = await joined(1, 3, port), await joined(2, 3, port)
    await control.send(dying, control.encode("linked"))
    with Stopwatch():
        await hear(stuck, "welcome")
        dying.close()
        (error,) = await failures(*others)
    assert "rank 2 at 127.0.0.1:" in str(error)
    assert "rank 2 at 127.0.0.1:" in (await hear(stuck, "failed"))["text"]
    stuck.close()


async def test_nobody_gets_a_mesh_that_one_rank_has_not_linked():
    """Rank 2 never says LINKED, though all its links are up; rank 1 has linked and waits for the word."""
    port = free_port()
    others = [asyncio.ensure_future(form(rank, 3, port, init_timeout=0.7)) for rank in (0, 1)]
    await attentive(port)
    idle = await joined(2, 3, port)
    welcome = await hear(idle, "welcome")
    there, run_id = welcome["members"][1][1], welcome["run"]
    link = await proved(2, 3, there, target=1, purpose=Purpose.LINK, run_id=run_id)
    for error in await failures(*others):
        assert "all joined, but rank 2 did not get through to the others" in str(error)
        assert error.missing == {2}
    idle.close()
    link.close()


async def linked_late(port, one, delay):
    """Rank 2 by hand: joins, links with rank 1, and says LINKED only after ``delay`` seconds. Its two sockets."""
    last = await joined(2, 3, port)
    welcome = await hear(last, "welcome")
    there, run_id = welcome["members"][1][1], welcome["run"]
    link = await proved(2, 3, there, target=1, purpose=Purpose.LINK, run_id=run_id)
    await asyncio.sleep(delay)
    assert not one.done()
    await control.send(last, control.encode("linked"))
    return last, link


async def test_a_rank_that_has_its_links_leaves_the_verdict_to_rank_0():
    """Rank 1's own time ends while the others link up: giving up then would leave them with a broken mesh."""
    port = free_port()
    zero = asyncio.ensure_future(form(0, 3, port, init_timeout=LONG))
    one = asyncio.ensure_future(form(1, 3, port, init_timeout=0.3))
    await attentive(port)
    last, link = await linked_late(port, one, 0.6)
    await hear(last, "ready")
    close(await asyncio.gather(zero, one))
    last.close()
    link.close()


async def test_a_verdict_that_does_not_come_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(joiner, "READY_GRACE", 0.2)
    port = free_port()
    zero = asyncio.ensure_future(form(0, 3, port, init_timeout=LONG))
    one = asyncio.ensure_future(form(1, 3, port, init_timeout=0.3))
    await attentive(port)
    last = await joined(2, 3, port)
    welcome = await hear(last, "welcome")
    link = await proved(2, 3, welcome["members"][1][1], target=1, purpose=Purpose.LINK, run_id=welcome["run"])
    with Stopwatch():
        zero, one = await failures(zero, one)
    assert "rank 0 did not confirm within 0.3 s" in str(one)
    assert "rank 1 at 127.0.0.1:" in str(zero)
    last.close()
    link.close()


async def test_a_link_that_cannot_be_made_is_named_with_its_address():
    """Rank 1 advertises a port that nobody answers, and stays."""
    port, dead = free_port(), free_port()
    zero = asyncio.ensure_future(form(0, 3, port, init_timeout=LONG))
    two = asyncio.ensure_future(form(2, 3, port, init_timeout=1.0))
    await attentive(port)
    idle = await joined(1, 3, port, listens_at=dead)
    with Stopwatch():
        errors = await failures(zero, two)
    for error in errors:
        assert "rank 2 has no link with rank 1" in str(error)
        assert f"Calling rank 1 at 127.0.0.1:{dead}: Connection refused" in str(error)
        assert error.missing == {1}
    idle.close()


async def test_a_rank_that_answers_for_another_is_refused():
    """Rank 1 advertises rank 0's port: the higher rank notices who answers."""
    port = free_port()
    others = [asyncio.ensure_future(form(rank, 3, port, init_timeout=LONG)) for rank in (0, 2)]
    await attentive(port)
    idle = await joined(1, 3, port, listens_at=port)
    with Stopwatch():
        errors = await failures(*others)
    for error in errors:
        assert "rank 2 cannot link with rank 1" in str(error)
        assert "it is rank 0" in str(error)
    idle.close()


@pytest.mark.parametrize(
    "message",
    [
        control.encode("ready"),
        control.encode("failed", text=5, missing=[]),
        control.encode("failed", text="x", missing="abc"),
        b"\0\0\0\x01\xc1",
        b"\xff\xff\xff\xff",
    ],
)
async def test_a_member_that_breaks_the_protocol_is_named(message):
    port = free_port()
    others = [asyncio.ensure_future(form(rank, 4, port, init_timeout=LONG)) for rank in (0, 1)]
    await attentive(port)
    sock = await joined(2, 4, port)
    with Stopwatch():
        await control.send(sock, message)
        errors = await failures(*others)
    for error in errors:
        assert "rank 2 at 127.0.0.1:" in str(error)
    sock.close()


async def test_a_rank_that_fails_before_it_joins_is_named_by_all():
    """It may find that it cannot listen: nobody need wait for it any longer."""
    port = free_port()
    ranks = [asyncio.ensure_future(form(rank, 3, port)) for rank in (0, 2)]
    await attentive(port)
    sock = await proved(1, 3, port)
    try:
        await control.send(sock, control.encode("failed", text="it has no ears", missing=[]))
        for error in await failures(*ranks):
            assert type(error) is RendezvousError
            assert "rank 1 at 127.0.0.1:" in str(error)
            assert "it has no ears" in str(error)
            assert error.missing == {1}
            assert error.elapsed < 10
    finally:
        sock.close()


async def test_a_caller_with_the_secret_and_no_join_is_dropped_and_harms_nobody():
    port = free_port()
    waiting = asyncio.ensure_future(form(0, 2, port))
    await attentive(port)
    for said in (b"", b"\0\0\0\x01\xc1", control.encode("linked"), b"\xff" * 8):
        sock = await proved(1, 2, port)
        await control.send(sock, said)
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            await control.receive(sock)
        sock.close()
    close(await asyncio.gather(waiting, form(1, 2, port)))


async def test_a_call_that_came_to_nothing_is_closed_when_the_mesh_is_up():
    """Rank 1 has not heard the answer, and calls again; the first connection stays as silent as a dead host."""
    async with nothing_left():
        port = free_port()
        waiting = asyncio.ensure_future(form(0, 2, port))
        await attentive(port)
        first = await proved(1, 2, port)
        close(await asyncio.gather(waiting, form(1, 2, port)))
        assert await asyncio.get_running_loop().sock_recv(first, 1) == b""
        first.close()


async def joined_but(missing, sock):
    """Until rank 0 has reported that only those are missing."""
    while (await hear(sock, "progress"))["missing"] != missing:
        pass


async def test_when_rank_0_is_cancelled_the_others_hear_of_it():
    port = free_port()
    zero, *others = [asyncio.ensure_future(form(rank, 5, port, init_timeout=LONG)) for rank in (0, 1, 2)]
    await attentive(port)
    observer = await joined(3, 5, port)
    await joined_but([4], observer)
    zero.cancel()
    with Stopwatch():
        errors = await failures(*others)
    for error in errors:
        assert error.missing == {0}
        assert "CancelledError" in str(error)
    with pytest.raises(asyncio.CancelledError):
        await zero
    observer.close()


async def test_when_another_rank_is_cancelled_all_hear_which():
    port = free_port()
    *others, leaver = [asyncio.ensure_future(form(rank, 5, port, init_timeout=LONG)) for rank in (0, 1, 3)]
    await attentive(port)
    observer = await joined(2, 5, port)
    await joined_but([4], observer)
    leaver.cancel()
    with Stopwatch():
        assert "rank 3 at 127.0.0.1:" in (await hear(observer, "failed"))["text"]
        observer.close()
        errors = await failures(*others)
    for error in errors:
        assert error.missing == {3}
        assert "rank 3 at 127.0.0.1:" in str(error)
    with pytest.raises(asyncio.CancelledError):
        await leaver


async def test_a_cancellation_at_any_moment_leaves_nothing():
    """Each rank in turn is cancelled after n turns of the loop, for every n until the mesh is up before that."""
    for victim in range(3):
        turns = 0
        while True:
            port = free_port()
            async with nothing_left():
                ranks = [asyncio.ensure_future(form(rank, 3, port, init_timeout=LONG)) for rank in range(3)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                finished = ranks[victim].done()
                ranks[victim].cancel()
                await asyncio.wait([ranks[victim]])
                for rank in ranks:
                    rank.cancel()  # those that had not met the victim know nothing of it
                outcomes = await asyncio.gather(*ranks, return_exceptions=True)
                for outcome in outcomes:
                    if not isinstance(outcome, BaseException):
                        outcome.close()
                if finished:
                    break
                assert isinstance(outcomes[victim], asyncio.CancelledError)
            turns += 1 + turns // 8


async def test_a_left_over_rank_is_refused_and_the_new_run_goes_on():
    port = free_port()
    new = asyncio.ensure_future(form(0, 2, port, generation=3))
    await attentive(port)
    with Stopwatch():
        (error,) = await failures(form(1, 2, port, generation=2, init_timeout=LONG))
    assert "it is of generation 3, not 2" in str(error)
    close(await asyncio.gather(new, form(1, 2, port, generation=3)))


async def test_a_new_rank_waits_until_a_left_over_rank_0_is_gone():
    port = free_port()
    old = asyncio.ensure_future(form(0, 2, port, generation=2, init_timeout=LONG))
    await attentive(port)
    one = asyncio.ensure_future(form(1, 2, port, generation=3))
    await asyncio.sleep(
        0.2
    )  # nothing is to happen: too short a time can only hide a fault, never make the test fail
    assert not one.done()
    old.cancel()
    close(await asyncio.gather(form(0, 2, port, generation=3), one))


@pytest.mark.parametrize("change", ["run", "rank", "target", "purpose"])
async def test_a_link_that_does_not_belong_is_refused_and_harms_nobody(change, monkeypatch):
    """A process with the secret calls rank 1's listener for the wrong run, from a wrong rank, or for a wrong one."""
    opened = []

    def listen(*args, **kwargs):
        opened.append(real(*args, **kwargs))
        return opened[-1]

    real = joiner.listen
    monkeypatch.setattr(joiner, "listen", listen)
    port = free_port()
    others = [asyncio.ensure_future(form(rank, 3, port)) for rank in (0, 1)]
    await attentive(port)
    last = await joined(2, 3, port)
    run_id = (await hear(last, "welcome"))["run"]
    call = {"target": 1, "purpose": Purpose.LINK, "run_id": run_id}
    rank = 2
    if change == "run":
        call["run_id"] = bytes(16)
    elif change == "rank":
        rank = 1
    elif change == "target":
        call["target"] = 0
    else:
        call["purpose"] = Purpose.PULSE
    (listener,) = opened
    there = listener.getsockname()[1]
    with pytest.raises(RendezvousError, match="refused rank"):
        await proved(rank, 3, there, **call)
    link = await proved(2, 3, there, target=1, purpose=Purpose.LINK, run_id=run_id)
    with pytest.raises(RendezvousError, match="it has a connection from rank 2 already"):
        await proved(2, 3, there, target=1, purpose=Purpose.LINK, run_id=run_id)
    await control.send(last, control.encode("linked"))
    assert (await hear(last, "ready")) == {"kind": "ready"}
    close(await asyncio.gather(*others))
    link.close()
    last.close()


NAME = "head.example"


@pytest.fixture
def resolver(monkeypatch):
    """``resolver(answer)``: `NAME` resolves to what ``await answer()`` gives; all else as ever (uvloop asks for
    numeric addresses, too). Gives the list of look-ups.
    """

    def install(answer):
        loop = asyncio.get_running_loop()
        real, lookups = loop.getaddrinfo, []

        async def getaddrinfo(host, port, **options):
            if host != NAME:
                return await real(host, port, **options)
            lookups.append(host)
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in await answer()
            ]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        return lookups

    return install


def unknown_name():
    return socket.gaierror(socket.EAI_NONAME, "Name or service not known")


async def test_a_name_that_resolves_later_is_found(resolver):
    async def answer():
        if len(lookups) < 8:
            raise unknown_name()
        return ["127.0.0.1"]

    lookups = resolver(answer)
    port = free_port()
    links = await form_all(3, port, host=NAME)
    assert len(lookups) > 8
    assert links[1].addresses[0] == f"{NAME}:{port}"
    close(links)


async def test_a_name_that_never_resolves_is_the_reason_given(resolver):
    async def answer():
        raise unknown_name()

    resolver(answer)
    port = free_port()
    errors = await failures(*(form(rank, 2, port, host=NAME, init_timeout=0.4) for rank in range(2)))
    for error in errors:
        assert f"the name '{NAME}'" in str(error)
        assert "did not resolve (Name or service not known" in str(error)
        assert error.elapsed < 5


async def test_a_resolver_that_never_answers_is_the_reason_given(resolver):
    async def answer():
        await asyncio.get_running_loop().create_future()

    resolver(answer)
    port = free_port()
    errors = await failures(*(form(rank, 2, port, host=NAME, init_timeout=0.4) for rank in range(2)))
    assert "did not resolve (timed out)" in str(errors[0])
    assert "the resolver has not answered yet" in str(errors[1])


async def test_an_address_that_leads_nowhere_does_not_hide_the_next_one(resolver):
    async def answer():
        return ["127.0.0.9", "127.0.0.1"]

    resolver(answer)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as held:
        links = await asyncio.gather(
            form(0, 2, port, host=NAME, fd=held.fileno()), form(1, 2, port, host=NAME)
        )
    close(links)


async def test_rank_0_listens_on_the_address_that_is_this_machines(resolver):
    async def answer():
        return ["192.0.2.1", "127.0.0.1"]

    resolver(answer)
    zero = asyncio.ensure_future(form(0, 2, port := free_port(), host=NAME))
    await attentive(port)
    close(await asyncio.gather(zero, form(1, 2, port)))


async def test_an_error_nobody_foresaw_comes_out_unchanged_and_is_told(monkeypatch):
    def broken(self, entry):
        raise KeyError("a defect")

    monkeypatch.setattr(coordinator.Roster, "join", broken)
    port = free_port()
    with Stopwatch():
        zero, one = await failures(*(form(rank, 2, port, init_timeout=LONG) for rank in range(2)))
    assert isinstance(zero, KeyError)
    assert isinstance(one, RendezvousError)
    assert "KeyError" in str(one)
