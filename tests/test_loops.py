"""Which loop is brought along, and which one is refused."""

import asyncio
import contextlib
import socket
import sys

import pytest
import uvloop

from asynccoll.loops import new_loop, require_watching


class Blind(asyncio.SelectorEventLoop):
    """As Windows' Proactor, it watches no descriptors."""

    def remove_reader(self, fd):
        raise NotImplementedError


def test_uvloops_where_it_is_installed():
    with contextlib.closing(new_loop()) as loop:
        assert isinstance(loop, uvloop.Loop)


def test_else_one_that_watches_sockets_whatever_the_usual_one_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with contextlib.closing(new_loop()) as loop:
        assert isinstance(loop, asyncio.SelectorEventLoop)


@pytest.mark.parametrize(
    "make", [asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_a_loop_that_watches_is_fine_and_what_it_watches_is_left_alone(make):
    with contextlib.closing(make()) as loop, contextlib.ExitStack() as stack:
        one, other = map(stack.enter_context, socket.socketpair())
        loop.add_reader(one.fileno(), loop.stop)
        require_watching(loop)
        other.send(b"x")
        loop.run_forever()  # ends: it is still watched
        loop.remove_reader(one.fileno())


def test_one_that_does_not_is_refused_by_name_with_the_remedy():
    with contextlib.closing(Blind()) as loop, pytest.raises(RuntimeError) as caught:
        require_watching(loop)
    assert "Blind does not have" in str(caught.value)
    assert "asynccoll.run(main())" in str(caught.value)
    assert "loop_factory=asyncio.SelectorEventLoop" in str(caught.value)
