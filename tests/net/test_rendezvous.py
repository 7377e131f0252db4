"""Meshes that form: what every rank gets, on both loops, and that nothing else is left."""

import asyncio
import socket

import pytest
from forming import SECRET, close, exchange, failures, form, form_all, free_port, nothing_left, open_sockets

from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import MAX_OFFER, form_mesh


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("pulse", [False, True])
async def test_every_pair_is_connected_and_every_byte_is_theirs(size, pulse):
    async with nothing_left():
        links = await form_all(size, free_port(), pulse=pulse)
        for mesh in links:
            assert list(mesh.sockets) == [rank for rank in range(size) if rank != mesh.rank]
            assert list(mesh.pulses) == (list(mesh.sockets) if pulse else [])
            for peer, sock in mesh.sockets.items():
                other = links[peer].sockets[mesh.rank]
                assert (sock.getsockname(), sock.getpeername()) == (other.getpeername(), other.getsockname())
        await exchange(links)
        close(links)


async def test_every_rank_learns_the_same(monkeypatch):
    links = await form_all(4, free_port(), offer={"table": [1, (2, b"x")]}, must_agree={"a": 1})
    first = links[0]
    assert [mesh.rank for mesh in links] == [0, 1, 2, 3]
    assert len(first.run_id) == 16
    for mesh in links:
        assert (mesh.size, mesh.run_id) == (4, first.run_id)
        assert mesh.welcome == {"table": [1, [2, b"x"]]}
        assert mesh.addresses == first.addresses
        assert mesh.hosts == first.hosts
    assert list(first.addresses) == list(first.hosts) == [0, 1, 2, 3]
    assert len(set(first.hosts.values())) == 1
    close(links)


async def test_rank_0s_offer_is_the_one_that_counts():
    port = free_port()
    links = await asyncio.gather(*(form(rank, 2, port, offer={"from": rank}) for rank in range(2)))
    assert [mesh.welcome for mesh in links] == [{"from": 0}, {"from": 0}]
    close(links)


async def test_two_meshes_have_different_run_ids():
    first, second = await form_all(2, free_port()), await form_all(2, free_port())
    assert first[0].run_id != second[0].run_id
    close([*first, *second])


async def test_sockets_are_non_blocking_and_send_small_frames_at_once_on_both_ends():
    links = await form_all(3, free_port(), pulse=True)
    for mesh in links:
        for sock in (*mesh.sockets.values(), *mesh.pulses.values()):
            assert sock.gettimeout() == 0
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    close(links)


async def test_sockets_can_be_driven_by_readers_right_away():
    loop = asyncio.get_running_loop()
    links = await form_all(2, free_port())
    heard = loop.create_future()
    sock = links[0].sockets[1]
    loop.add_reader(sock, lambda: heard.done() or heard.set_result(sock.recv(10)))
    links[1].sockets[0].send(b"frame")
    assert await heard == b"frame"
    loop.remove_reader(sock)
    close(links)


async def test_the_order_in_which_ranks_start_does_not_matter():
    port = free_port()
    starting = []
    for rank in (3, 1, 2, 0):
        starting.append(asyncio.ensure_future(form(rank, 4, port)))
        await asyncio.sleep(0.02)  # not for luck: any order of events must do
    links = await asyncio.gather(*starting)
    assert [mesh.rank for mesh in links] == [3, 1, 2, 0]
    close(links)


async def test_ipv6_works():
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("no IPv6 loopback here")
    links = await form_all(3, port, host="::1")
    assert links[2].addresses[0] == f"[::1]:{port}"
    await exchange(links)
    close(links)


async def test_localhost_works():
    links = await form_all(3, free_port(), host="localhost")
    await exchange(links)
    close(links)


async def test_a_world_of_one_opens_nothing():
    async with nothing_left():
        before = open_sockets()
        mesh = await form_mesh(Placement(), b"", init_timeout=1, offer={"a": (1,)})
        assert open_sockets() == before
        assert (mesh.rank, mesh.size, mesh.sockets, mesh.welcome) == (0, 1, {}, {"a": [1]})
        assert (len(mesh.run_id), list(mesh.hosts)) == (16, [0])


@pytest.mark.parametrize("rounds", [50, pytest.param(400, marks=pytest.mark.slow)])
async def test_a_mesh_may_follow_a_closed_one_at_the_same_address(rounds):
    port = free_port()
    async with nothing_left():
        for _ in range(rounds):
            close(await form_all(2, port))


async def test_ranks_that_are_early_for_the_next_mesh_are_taken_by_it():
    """Rank 1 starts its second mesh while rank 0 is still in the first."""
    port = free_port()

    async def twice(rank):
        meshes = [await form(rank, 3, port)]
        if rank == 0:
            await asyncio.sleep(0.1)  # so that the others are early, as a rule; any order of events must do
        meshes.append(await form(rank, 3, port))
        return meshes

    for meshes in await asyncio.gather(*(twice(rank) for rank in range(3))):
        close(meshes)


async def test_a_held_listener_is_used_and_left_open():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        for _ in range(3):
            links = await asyncio.gather(form(0, 2, port, fd=held.fileno()), form(1, 2, port))
            close(links)
        assert held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


async def test_two_jobs_of_one_user_do_not_meet():
    one, two = free_port(), free_port()
    first, second = await asyncio.gather(form_all(3, one), form_all(3, two))
    assert len({mesh.run_id for mesh in first}) == len({mesh.run_id for mesh in second}) == 1
    assert first[0].run_id != second[0].run_id
    await asyncio.gather(exchange(first), exchange(second))
    close([*first, *second])


async def test_a_job_with_another_secret_is_refused_and_harms_nobody():
    """Two launchers picked one port; the second job's ranks find the first job's rank 0."""
    port = free_port()
    first = [asyncio.ensure_future(form(rank, 3, port)) for rank in (0, 1)]
    await asyncio.sleep(0.05)
    for error in await failures(*(form(rank, 3, port, secret=b"other") for rank in (1, 2))):
        assert "secret" in str(error)
    links = await asyncio.gather(*first, form(2, 3, port))
    close(links)


@pytest.mark.parametrize("what", ["offer", "must_agree"])
async def test_too_large_a_mapping_is_refused_before_anything_is_opened(what):
    async with nothing_left():
        with pytest.raises(ValueError, match=what):
            await form(0, 2, free_port(), **{what: {"x": bytes(MAX_OFFER)}})


async def test_a_large_offer_arrives():
    offer = {"x": bytes(MAX_OFFER - 100)}
    links = await form_all(3, free_port(), offer=offer)
    assert all(mesh.welcome == offer for mesh in links)
    close(links)


async def test_the_secret_is_in_no_message_and_no_address():
    links = await form_all(2, free_port())
    assert SECRET.decode() not in repr(links)
    close(links)
