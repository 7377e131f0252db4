import asyncio
import os
import select
import signal
import threading

import pytest

from asynccoll.launch import SignalPipe

LIMIT = 30


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], LIMIT)[0])


def test_a_signal_waits_to_be_read():
    with SignalPipe([signal.SIGINT, signal.SIGTERM]) as pipe:
        assert pipe.read() == []
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert readable(pipe.fd)
        assert pipe.read() == [signal.SIGTERM, signal.SIGINT]
        assert pipe.read() == []


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with SignalPipe([signal.SIGINT, signal.SIGTERM]):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_nobody_read_is_raised_again_at_the_end():
    pipe = SignalPipe([signal.SIGINT])
    pipe.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pipe.__exit__(None, None, None)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with SignalPipe([signal.SIGTERM]) as pipe:
            signal.raise_signal(signal.SIGTERM)
            assert pipe.read() == []
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_is_replaced_and_injection_works():
    seen = []

    def body() -> None:
        with SignalPipe([signal.SIGINT]) as pipe:
            pipe.inject(signal.SIGPIPE)
            seen.extend(pipe.read())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(LIMIT)
    assert seen == [signal.SIGPIPE]
    assert signal.getsignal(signal.SIGINT) == before


async def test_signals_of_an_event_loop_in_this_thread_reach_it():
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, came.set)
    try:
        with SignalPipe([signal.SIGINT]) as pipe:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert readable(pipe.fd)
            assert pipe.read() == []
        await asyncio.wait_for(came.wait(), LIMIT)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
