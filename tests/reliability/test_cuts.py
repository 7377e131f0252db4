"""The short form of `cuts`: some bytes of every stream; that a cut is where it should be, and that a fault is seen."""

import asyncio
import logging

import pytest

from asynccoll.net.driver import NetDriver

from . import cuts
from .cuts import OPERATIONS, Cut


@pytest.fixture(autouse=True)
def _quiet(caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL, "asynccoll")
    monkeypatch.setattr(cuts, "BOUND", 60.0)  # how fast it is, is for the command to say


async def surveyed(names, sizes=(2,), **options):
    found = await cuts.survey(names, sizes, loop_name="any", **options)
    assert not found.failures, "\n".join(found.failures)
    return found


@pytest.mark.parametrize("size", [2, 3])
async def test_a_cut_operation_is_right_or_names_the_other_end(size):
    found = await surveyed(OPERATIONS, [size], step=20 * size * size, hows=("fin", "rst"))
    for how in ("fin", "rst"):
        assert {"lost", "lost+right", "right"} <= found.kinds[how].keys()


async def test_a_stalled_operation_ends_at_its_time_limit():
    found = await surveyed(["allreduce", "messages"], step=37, hows=("stall",))
    assert "timeout" in found.kinds["stall"]


def test_a_cut_rendezvous_forms_all_the_same_or_fails_everywhere():
    """On one loop: most of it is waiting."""
    found = asyncio.run(surveyed(["rendezvous", "link"], step=120))
    for how in cuts.HOWS:
        assert {"right", "RendezvousError"} <= {kind.partition(",")[0] for kind in found.kinds[how]}


@pytest.mark.parametrize("way", [0, 1])
async def test_a_handshake_that_is_cut_is_called_again(way):
    """The last byte of HELLO, CHALLENGE and PROOF, and all but the last of ANSWER."""
    with cuts.short_limits():
        for at in ([82, 113], [44, 108])[way]:
            outcomes, _, passed = await cuts.run_rendezvous("rendezvous", Cut("fin", way, at))
            assert passed[way] == at
            assert not any(isinstance(outcome, Exception) for outcome in outcomes)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_both_ends_hear_of_the_cut_after_just_so_many_bytes(how):
    loop = asyncio.get_running_loop()
    (near, left), (right, far) = cuts.tcp_pair(), cuts.tcp_pair()
    relay = cuts.Relay(left, right, Cut(how, 0, 3))
    near.send(b"12345")
    heard = b""
    for sock in (far, near):
        try:
            while data := await loop.sock_recv(sock, 10):
                heard += data
            assert how == "fin"
        except ConnectionResetError:
            assert how == "rst"
    assert heard in (b"123", b"")  # a reset takes what is still on its way
    assert relay.passed == [3, 0]
    await relay.close()
    near.close()
    far.close()


async def test_the_survey_sees_a_hang(monkeypatch):
    monkeypatch.setattr(cuts, "HANG", 0.5)
    monkeypatch.setattr(NetDriver, "_ended", lambda self, peer, *_: self.drop(peer))
    found = await cuts.survey(["barrier"], [2], loop_name="any", at=20, ways=(0,), hows=("fin",))
    assert found.kinds["fin"] == {"hang": 1}
    assert '--only "barrier" --size 2 --how fin --way 0 --at 20' in found.failures[0]
