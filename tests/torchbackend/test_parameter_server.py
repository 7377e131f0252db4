"""The protocol between the processes of `examples/parameter_server.py`, without processes: who is told what, and when it ends."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "parameter_server.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("parameter_server_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def post(example, monkeypatch):
    """``(inbox, sent)``: what `receive` gives, one after the other, and what was sent, as (rank, value)."""
    inbox, sent = [], []
    monkeypatch.setattr(example, "receive", lambda rank=None: inbox.pop(0))
    monkeypatch.setattr(example, "send", lambda rank, value: sent.append((rank, value)))
    return inbox, sent


def handle(sender, verb, *arguments):
    if verb == "fail":
        raise LookupError("no such relation")
    return sender, verb, arguments


def test_p8_a_server_ends_when_all_its_clients_have_joined(example, post):
    inbox, sent = post
    inbox += [(7, ("get", 1)), (5, ("JOIN",)), (7, ("get", 2)), (7, ("JOIN",)), (6, ("get", 3))]
    example.serve(2, handle)
    assert inbox == [(6, ("get", 3))]  # nothing is read after the last one
    # Nobody is told before all have joined: a client that leaves ends its process, and with it what others may want of it.
    assert sent[:2] == [(7, ("value", (7, "get", (1,)))), (7, ("value", (7, "get", (2,))))]


def test_p8_p9_exactly_those_that_joined_are_told(example, post):
    inbox, sent = post
    inbox += [(9, ("JOIN",)), (4, ("JOIN",))]
    example.serve(2, handle)
    assert sent == [(9, ("value", None)), (4, ("value", None))]


def test_p8_an_error_of_the_server_is_raised_where_the_request_came_from(example, post, monkeypatch):
    inbox, sent = post
    inbox += [(7, ("fail",)), (7, ("get", 1)), (7, ("JOIN",))]
    example.serve(1, handle)
    rank, (kind, text) = sent[0]
    assert (rank, kind) == (7, "error")
    assert text.endswith("LookupError: no such relation\n")
    assert "in handle" in text
    assert sent[1] == (7, ("value", (7, "get", (1,))))  # the server goes on

    inbox.append((2, ("error", text)))
    with pytest.raises(RuntimeError) as caught:
        example.ask(2, "fail")
    assert sent[-1] == (2, ("fail",))
    for fragment in ("rank 2 failed", "LookupError: no such relation", "in handle"):
        assert fragment in str(caught.value)


class Process:
    """What `supervise` sees of a server's process; ``life`` is one tuple (ready, exitcode) for each look."""

    def __init__(self, *life):
        self.life = list(life)

    def look(self):
        if len(self.life) > 1:
            self.life.pop(0)

    sentinel = property(lambda self: self)
    ready = property(lambda self: self.life[0][0])
    exitcode = property(lambda self: self.life[0][1])
    failure = property(lambda self: RuntimeError(f"exit {self.exitcode}") if self.exitcode else None)

    def wait_ready(self, timeout):
        raise TimeoutError(f"not ready after {timeout} s")


@pytest.fixture
def waits(example, monkeypatch):
    """Limits of the waits so far; each moves all processes that were waited for one step on."""
    limits = []

    def wait(processes, timeout=None):
        limits.append(timeout)
        assert len(limits) < 1000, "it waits forever"
        for process in processes:
            process.look()
        return []

    monkeypatch.setattr(example.multiprocessing.connection, "wait", wait)
    return limits


def test_p9_a_server_that_dies_at_start_is_noticed_while_others_come_up(example, waits):
    # torch waits in all others for the one that died, so that none of them will ever be ready.
    waiting, dying = Process((False, None)), Process((False, None), (False, None), (False, -9))
    with pytest.raises(RuntimeError, match="exit -9"):
        example.supervise([waiting, dying])
    assert None not in waits


def test_p9_all_have_ended(example, waits):
    example.supervise(
        [Process((False, None), (True, None), (True, 0)), Process((False, None), (True, None), (True, 0))]
    )


def test_p9_one_that_never_gets_ready_is_an_error(example, waits, monkeypatch):
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr(example.time, "monotonic", lambda: next(clock))
    with pytest.raises(TimeoutError):
        example.supervise([Process((True, None)), Process((False, None))])
