"""Every async test runs on the stdlib loop and on uvloop; those in conformance/ on the simulation too."""

import asyncio
import signal

import pytest
import uvloop

# A shell starts background jobs with SIGINT ignored, `nohup` those with SIGHUP, and so would be every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    group = parser.getgroup("conformance")
    group.addoption(
        "--world-size", type=int, metavar="W", help="open every world of the conformance suite with W ranks"
    )
    group.addoption(
        "--worlds",
        metavar="NAMES",
        help="those named, with commas: of sim, asyncio, uvloop, tls-asyncio, tls-uvloop, thread-asyncio, thread-uvloop",
    )


@pytest.hookimpl
def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
