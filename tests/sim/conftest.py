"""Async tests here run in virtual time."""

import pytest

from asynccoll.sim.loop import SimLoop


@pytest.hookimpl
def pytest_asyncio_loop_factories(config, item):
    return {"sim": SimLoop}
