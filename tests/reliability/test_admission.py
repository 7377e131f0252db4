"""The short form of `admission`, and that it sees one who is let in, a secret that shows, and a pickle that is loaded."""

import asyncio
import pickle

import pytest

from asynccoll.net import handshake
from asynccoll.net.dialing import Call
from asynccoll.net.roster import Entry

from . import admission
from .admission import CASES, HELLO, SECRET


def survey(*names, step=24, count=0):
    return asyncio.run(admission.survey(names, step, count))


def test_nobody_is_admitted_nothing_unpickled_and_the_secret_not_shown():
    book = survey(*CASES, step=40, count=60)
    assert not book.failures
    assert not book.admitted
    assert sum(book.tries.values()) > 150
    assert book.outcomes["flipped bits"]["BadProof"] > 20
    assert any("Executing" in str(text) or "dropped a connection" in str(text) for text in book.texts)


def test_an_acceptor_that_believes_everybody_is_seen(monkeypatch):
    monkeypatch.setattr(handshake, "_mac", lambda *what: bytes(32))
    assert survey("wrong secret").admitted


def test_a_secret_that_shows_is_seen():
    book = admission.Book()
    book.texts += ["harmless", f"the secret is {SECRET!r}"]
    assert book.leaks() == book.texts[1:]
    book.texts[:] = [pickle.dumps(ValueError(SECRET.hex()))]
    assert book.leaks()


def test_a_join_that_is_unpickled_is_seen(monkeypatch):
    real = Entry.from_message

    def from_message(rank, size, peer, message):
        if isinstance(message.get("host"), bytes):
            message = {**message, "host": pickle.loads(message["host"])}
        return real(rank, size, peer, message)

    monkeypatch.setattr(Entry, "from_message", from_message)
    book = survey(count=30)
    assert book.unpickled
    assert any("unpickled" in failure for failure in book.failures)


def test_a_call_does_not_show_its_secret():
    assert "SECRET" not in repr(Call("h", 1, b"SECRET", HELLO))


@pytest.mark.slow
def test_every_bit():
    book = survey("flipped bits", step=1)
    assert not book.failures
