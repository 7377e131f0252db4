"""One suite, three worlds: the simulated network in virtual time, and TCP on either loop.

Four more are opened only if ``--worlds`` names them: TLS on either loop, and ``progress="thread"`` with the caller on either
loop. Of ``thread-asyncio`` the modules in `THREAD_MODULES` run in any case.

With ``--world-size W`` every world has W ranks: a parameter ``size`` has that one value, and a test that asks for 3 ranks
gets W. What a test expects follows from the number of ranks that it got. A test that means something for its own number of
ranks only says so with ``@pytest.mark.fixed_size(reason)``; it is excluded then, and counted at the end.
"""

import asyncio
import collections
import contextlib
import socket
import weakref
import zlib
from pathlib import Path

import certificates
import pytest
import ranks
import uvloop

from asynccoll.net import accepting, dialing
from asynccoll.sim.driver import Conditions
from asynccoll.sim.loop import SimLoop
from asynccoll.testing import local_world


def marked(new_event_loop, loops):
    """Loops of that kind, which are kept in ``loops``: what worlds are like in them."""

    def new_loop():
        loop = new_event_loop()
        loops.add(loop)
        return loop

    return new_loop


TLS_LOOPS = weakref.WeakSet()
"""Where worlds use TLS."""
THREAD_LOOPS = weakref.WeakSet()
"""Where worlds have ``progress="thread"``."""


LOOPS = {"sim": SimLoop, "asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
MORE_LOOPS = {
    "tls-asyncio": marked(asyncio.new_event_loop, TLS_LOOPS),
    "tls-uvloop": marked(uvloop.new_event_loop, TLS_LOOPS),
    "thread-asyncio": marked(asyncio.new_event_loop, THREAD_LOOPS),
    "thread-uvloop": marked(uvloop.new_event_loop, THREAD_LOOPS),
}
THREADED = [loop for name, loop in MORE_LOOPS.items() if name.startswith("thread-")]
THREAD_MODULES = {
    f"test_{name}.py"
    for name in ("close", "errors_local", "groups", "messages", "objects_path", "safe", "shrink")
}
HERE = Path(__file__).parent
EXCLUDED = collections.defaultdict(list)
"""With ``--world-size``: the tests that do not run, by reason."""
OPENED = collections.Counter()
"""How many worlds were opened, by number of ranks."""


@pytest.hookimpl
def pytest_asyncio_loop_factories(config, item):
    named = (config.getoption("worlds") or "").split(",")
    if named == [""] and ranks.WORLD_SIZE is None and item.path.name in THREAD_MODULES:
        named = ["thread-asyncio"]
    return LOOPS | {name: loop for name, loop in MORE_LOOPS.items() if name in named}


def pytest_configure(config):
    ranks.WORLD_SIZE = config.getoption("world_size")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    if ranks.WORLD_SIZE is None:
        return
    for number, mark in enumerate(metafunc.definition.own_markers):
        if mark.name == "parametrize":
            metafunc.definition.own_markers[number] = _widened(mark)


def _widened(mark):
    """A ``parametrize`` whose ``size`` is always that of the option. What is the same then is there once."""
    names, rows, *rest = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if "size" not in names:
        return mark
    found = {}
    for row in rows:
        marks = row.marks if hasattr(row, "marks") else ()
        values = list(row.values if hasattr(row, "values") else row if len(names) > 1 else [row])
        values[names.index("size")] = ranks.WORLD_SIZE
        found.setdefault(repr(values), pytest.param(*values, marks=marks))
    return pytest.Mark("parametrize", (names, list(found.values()), *rest), mark.kwargs, _ispytest=True)


def pytest_collection_modifyitems(config, items):
    if worlds := config.getoption("worlds"):
        wanted = [(LOOPS | MORE_LOOPS)[name] for name in worlds.split(",")]
        others = {item for item in items if _is_here(item) and _loop(item) not in (None, *wanted)}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    for item in filter(_is_here, items):
        if (mark := item.get_closest_marker("inline_only")) and _loop(item) in THREADED:
            item.add_marker(pytest.mark.skip(reason=f'not with progress="thread": {mark.args[0]}'))
    if ranks.WORLD_SIZE is None:
        return
    for item in filter(_is_here, items):
        reason = None
        if mark := item.get_closest_marker("fixed_size"):
            (reason,) = mark.args
        elif "world" not in item.fixturenames:
            reason = "opens no world of the fixture's"
        if reason is not None:
            EXCLUDED[reason].append(item.originalname)
            item.add_marker(pytest.mark.skip(reason=f"not with {ranks.WORLD_SIZE} ranks: {reason}"))


def _is_here(item):
    return HERE in item.path.parents


def _loop(item):
    spec = getattr(item, "callspec", None)
    return None if spec is None else spec.params.get("_asyncio_loop_factory")


def pytest_terminal_summary(terminalreporter):
    if ranks.WORLD_SIZE is None:
        return
    terminalreporter.section("worlds")
    for size, count in sorted(OPENED.items()):
        terminalreporter.line(f"{count} worlds of {size} ranks were opened")
    terminalreporter.line(f"{sum(map(len, EXCLUDED.values()))} tests were excluded:")
    for reason, names in sorted(EXCLUDED.items(), key=lambda pair: -len(pair[1])):
        terminalreporter.line(f"{len(names):4} {reason}")
        for name, count in collections.Counter(names).items():
            terminalreporter.line(f"     {count:4} {name}")


class World:
    """Opens worlds of the kind that the running loop stands for."""

    def __init__(self, seed):
        self.seed = seed

    @contextlib.asynccontextmanager
    async def __call__(self, n, **options):
        n = ranks.WORLD_SIZE or n
        OPENED[n] += 1
        if isinstance(asyncio.get_running_loop(), SimLoop):
            options.setdefault("seed", self.seed)
            options.setdefault(
                "conditions", Conditions(delay=0.002, piece=1 << 15, split=True, buffer=1 << 16)
            )
            options["transport"] = "memory"
        elif asyncio.get_running_loop() in TLS_LOOPS:
            options["ssl"] = certificates.contexts()
        elif asyncio.get_running_loop() in THREAD_LOOPS:
            options["progress"] = "thread"
        async with local_world(n, **options) as comms:
            yield comms


@pytest.fixture
def world(request):
    # A seed of its own for each test, the same in every run.
    return World(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def narrow_world(world, monkeypatch):
    """A `world` whose links hold 4 KiB: nearly every write is a partial one, and what is sent stays queued for long."""
    sockets = []

    def narrowed(prepare):
        def prepare_narrow(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            sockets.append(sock)
            return prepare(sock)

        return prepare_narrow

    @contextlib.asynccontextmanager
    async def open_narrow(n):
        # Not split: a full link whose reads are split at random is refilled in ever smaller pieces.
        conditions = Conditions(delay=0.0001, piece=1001, buffer=4096)
        async with world(n, conditions=conditions) as comms:
            assert sockets or isinstance(asyncio.get_running_loop(), SimLoop)
            yield comms

    for module in (accepting, dialing):
        monkeypatch.setattr(module, "prepare", narrowed(module.prepare))
    return open_narrow
