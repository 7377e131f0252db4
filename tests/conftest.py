"""Every async test runs on the stdlib loop and on uvloop; those in conformance/ on the simulation too."""

import asyncio

import pytest
import uvloop


@pytest.hookimpl
def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
