"""Heartbeats: who is silent is told once, who is merely busy is not, and nothing is left behind."""

import contextlib
import os
import socket
import threading
import time

import pytest

from asynccoll.net import pulse
from asynccoll.net.pulse import Watch

LONG = 1000.0
"""A liveness timeout that does not pass in a test."""
DEADLINE = 20.0
"""Seconds after which a test that waits for another thread fails."""


class Clock:
    """Stands in for `time` in the module: moves only when a test says so."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class Said:
    """What a watch told, and a way to wait for it."""

    def __init__(self):
        self.silent, self.evicted = [], []
        self.news = threading.Event()

    def on_silent(self, peer, seconds):
        self.silent.append((peer, seconds))
        self.news.set()

    def on_evicted(self, by):
        self.evicted.append(by)
        self.news.set()


def pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


@pytest.fixture
def watched():
    """``watched(timeout, peers)``: a watch, what it tells, and the peers' ends of its connections."""
    with contextlib.ExitStack() as stack:

        def make(timeout=LONG, peers=(1,)):
            said, ends = Said(), {peer: pair() for peer in peers}
            watch = Watch({peer: ends[peer][0] for peer in peers}, timeout, said.on_silent, said.on_evicted)
            stack.callback(watch.end)
            for _, far in ends.values():
                stack.callback(far.close)
            return watch, said, {peer: far for peer, (_, far) in ends.items()}

        yield make
    assert not pulse_threads()


def pulse_threads():
    return [thread for thread in threading.enumerate() if thread.name == "asynccoll-pulse"]


def received(sock):
    """At least one byte from ``sock``, and what is there besides."""
    sock.settimeout(DEADLINE)
    try:
        return sock.recv(4096)
    finally:
        sock.setblocking(False)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pulse, "time", clock)
    return clock


def run_once(watch, clock, later):
    """What the thread does when it wakes up ``later`` seconds after the last time."""
    clock.now += later
    for peer in list(watch.sockets):
        watch.read(peer)
    watch.look(clock.now)


@pytest.fixture
def unattended(monkeypatch, clock):
    """A watch that no thread serves: the test is the thread."""
    monkeypatch.setattr(pulse._thread, "add", lambda watch: None)
    monkeypatch.setattr(pulse._thread, "remove", lambda watch: None)
    made = []

    def make(timeout=6.0, peers=(1, 2)):
        said, ends = Said(), {peer: pair() for peer in peers}
        made.extend(end for both in ends.values() for end in both)
        return (
            Watch({peer: ends[peer][0] for peer in peers}, timeout, said.on_silent, said.on_evicted),
            said,
            {peer: far for peer, (_, far) in ends.items()},
        )

    yield make
    for end in made:
        end.close()


class TestClocks:
    def test_a_peer_that_is_heard_is_never_silent(self, unattended, clock):
        watch, said, far = unattended()
        for _ in range(10):
            for sock in far.values():
                sock.send(b".")
            run_once(watch, clock, 5.9)
        assert not said.silent

    def test_a_peer_that_is_not_heard_for_the_timeout_is_told_once(self, unattended, clock):
        watch, said, far = unattended()
        for _ in range(5):
            far[2].send(b".")
            run_once(watch, clock, 2.0)
        assert said.silent == [(1, 6.0)]

    def test_the_end_of_its_stream_is_no_verdict_but_silence(self, unattended, clock):
        watch, said, far = unattended(peers=(1,))
        far[1].close()
        assert watch.read(1)
        run_once(watch, clock, 5.9)
        assert not said.silent
        run_once(watch, clock, 0.2)
        assert [peer for peer, _ in said.silent] == [1]

    def test_a_peer_that_has_said_bye_is_not_waited_for(self, unattended, clock):
        watch, said, far = unattended(peers=(1,))
        far[1].send(b".b")
        run_once(watch, clock, 1.0)
        run_once(watch, clock, 100.0)
        assert not said.silent

    def test_after_a_restart_everybody_has_the_whole_time_again(self, unattended, clock):
        watch, said, _ = unattended()
        clock.now += 100.0
        watch.restart(clock.now)
        run_once(watch, clock, 5.9)
        assert not said.silent

    @pytest.mark.parametrize(("timeout", "interval"), [(0.6, 0.1), (6.0, 1.0), (30.0, 5.0), (3600.0, 5.0)])
    def test_heartbeats_come_six_times_in_a_timeout(self, unattended, clock, timeout, interval):
        watch, _, far = unattended(timeout)
        assert watch.interval == pytest.approx(interval)
        watch.beat(clock.now)
        assert watch.deadline == pytest.approx(clock.now + interval)
        assert received(far[1]) == b"."

    def test_a_full_connection_holds_nobody_up(self, unattended, clock):
        watch, _, far = unattended(peers=(1,))
        watch.sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                watch.sockets[1].send(bytes(4096))
        watch.beat(clock.now)
        far[1].close()
        watch.beat(clock.now)


class TestLeaving:
    def test_it_says_bye_and_ends_its_side_but_still_reads(self, watched):
        watch, said, far = watched()
        far = far[1]
        watch.leave()
        heard = received(far)
        while not heard.endswith(b"b"):
            heard += received(far)
        assert received(far) == b""
        far.send(b"b")  # no broken pipe: it is there until `end`
        watch.leave()
        assert said.silent == []

    def test_a_connection_that_both_have_left_does_not_end_by_a_reset(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = [socket.create_connection(listener.getsockname())]
            ends.append(listener.accept()[0])
        for end in ends:
            end.setblocking(False)
        copies = [end.dup() for end in ends]
        watches = [Watch({1 - rank: ends[rank]}, LONG, print, print) for rank in range(2)]
        for watch in watches:
            watch.leave()
        for watch in watches:
            watch.end()
        for copy in copies:
            with copy:
                assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                assert copy.recv(100) == b""


class TestEviction:
    def test_the_evicted_peer_hears_so(self, watched):
        watch, _, far = watched()
        watch.evict(1)
        data = b""
        while b"e" not in data:
            data += received(far[1])

    def test_a_rank_that_is_evicted_is_told_by_its_own_watch(self, watched):
        _, said, far = watched()
        far[1].send(b"e")
        assert said.news.wait(DEADLINE)
        assert (said.evicted, said.silent) == ([1], [])

    def test_it_can_be_asked_before_the_thread_has_come_to_it(self, unattended):
        watch, said, far = unattended(peers=(1, 2))
        assert not watch.has_evicted(1)
        far[1].send(b"..e")
        far[1].close()
        assert watch.has_evicted(1)
        assert not watch.has_evicted(2)
        assert said.evicted == [1]
        assert watch.has_evicted(1)


class TestThread:
    def test_one_thread_serves_all_and_ends_with_the_last(self, watched):
        first, _, far = watched()
        second, _, _ = watched()
        assert len(pulse_threads()) == 1
        first.end()
        assert len(pulse_threads()) == 1
        data = received(far[1])
        while data[-1:] != b"b":
            data += received(far[1])
        second.end()
        assert not pulse_threads()
        third, _, far = watched()
        assert received(far[1])[:1] == b"."
        third.end()
        third.end()

    def test_a_watch_may_end_in_the_thread_that_is_starting(self, watched, monkeypatch):
        # A mesh that is garbage is collected in whichever thread allocates, and one that starts does.
        forgotten, _, _ = watched()
        other = threading.Thread(target=forgotten.end)
        begin = threading.Thread.start

        def start(thread):
            if thread.name == "asynccoll-pulse":
                begin(other)
                other.join(DEADLINE)
                assert not other.is_alive()
            begin(thread)

        forgotten.end()  # its thread has ended: the next watch starts one, and a driver ends its watch twice
        monkeypatch.setattr(threading.Thread, "start", start)
        watch, _, far = watched()
        assert received(far[1])[:1] == b"."
        watch.end()
        assert not pulse_threads()

    def test_without_a_thread_there_is_no_watch(self, watched, monkeypatch):
        def start(thread):
            raise RuntimeError("can't start new thread")

        near, far = pair()
        with monkeypatch.context() as patched, near, far:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="thread"):
                Watch({1: near}, LONG, print, print)
        watch, _, far = watched()
        assert received(far[1])[:1] == b"."
        watch.end()
        assert not pulse_threads()

    def test_it_goes_on_while_the_main_thread_computes(self, watched):
        _, said, far = watched(timeout=0.3)
        other, told, _ = watched(timeout=0.3)
        other.end()
        assert said.news.wait(DEADLINE)  # nobody beats on the other end
        assert [peer for peer, _ in said.silent] == [1]
        assert not told.silent
        assert received(far[1]).startswith(b"..")

    def test_a_process_that_did_not_run_counts_anew(self, watched):
        watch, said, far = watched(timeout=0.5)
        with pulse._thread.lock:
            # The thread does not get its lock back for long: what a stop of the process looks like from inside.
            time.sleep(1.2)
            far[1].send(b".")
        assert received(far[1])
        for _ in range(10):
            far[1].send(b".")
            received(far[1])
        assert not said.silent
        watch.end()

    def test_a_fork_has_no_thread_and_closes_its_copies(self, watched):
        watch, said, far = watched()
        received(far[1])
        pid = os.fork()
        if pid == 0:
            ok = not watch.sockets and not pulse._thread._watches and not watch.has_evicted(1)
            watch.end()
            os._exit(0 if ok else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        far[1].send(b"e")
        assert said.news.wait(DEADLINE)
