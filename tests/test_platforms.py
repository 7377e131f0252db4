"""A platform with less: what is imported works, and what cannot work says so. See `faked_platform`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(TESTS), *(path for path in sys.path if path)]),
}

UNITS = (
    *("test_objects.py", "engine/test_wire.py", "engine/test_inbound.py", "engine/test_outbox.py"),
    *("net/test_control.py", "net/test_handshake.py", "net/test_roster.py", "sim/test_driver.py"),
)
"""Of the suite of units what takes little time; the long form takes all directories of units."""


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import faked_platform; faked_platform.fake()\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=ENVIRONMENT,
    )
    return done.returncode, done.stdout, done.stderr


def pytest_there(*paths, timeout):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "faked_platform",
        "-p",
        "no:asynccoll",
        "-p",
        "no:cacheprovider",
        *paths,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=ENVIRONMENT,
        cwd=TESTS.parent,
    )
    return done.returncode, done.stdout + done.stderr


PARTS = (
    *(
        "asynccoll",
        "asynccoll.sync",
        "asynccoll.collective",
        "asynccoll.testing",
        "asynccoll.launch",
        "asynccoll.worker",
    ),
    *("asynccoll.cli.run", "asynccoll.net.interfaces", "asynccoll.net.rendezvous", "asynccoll.net.driver"),
)


def test_every_part_can_be_imported():
    assert run("".join(f"import {module}\n" for module in PARTS)) == (0, "", "")


ADDRESS = """
import asyncio, socket, asynccoll
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

def connect(rank):
    return asynccoll.connect(address, rank=rank, world_size=2, secret="s", init_timeout=30)
"""


def test_a_loop_that_watches_no_descriptors_is_refused_at_init_with_the_remedy():
    code, out, err = run(
        ADDRESS
        + """
async def main():
    try:
        async with connect(0):
            pass
    except RuntimeError as error:
        print(error)

asyncio.run(main())
"""
    )
    assert (code, err) == (0, "")
    assert "Blind" in out
    assert "add_reader" in out
    assert "loop_factory=asyncio.SelectorEventLoop" in out


def test_a_world_of_one_needs_none():
    code = """
import asyncio, asynccoll
async def main():
    async with asynccoll.init() as comm:
        print(await comm.allreduce(5))
asyncio.run(main())
"""
    assert run(code) == (0, "5\n", "")


PAIR = """
async def one(rank):
    async with connect(rank) as comm:
        whole = await comm.allreduce(np.ones(300_000))
        return whole.sum(), await comm.allgather([rank]), await comm.barrier()

async def main():
    print(*await asyncio.gather(one(0), one(1)))

"""


@pytest.mark.parametrize(
    "start",
    [
        "with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:\n    runner.run(main())",
        "asynccoll.run(main())",
    ],
    ids=["a selector loop", "asynccoll.run"],
)
def test_on_a_loop_that_does_it_works(start):
    code, out, err = run(f"import numpy as np\n{ADDRESS}{PAIR}{start}")
    assert (code, err) == (0, "")
    assert out.count("[[0], [1]]") == 2
    assert out.count("600000.0") == 2


def test_the_synchronous_facade_brings_such_a_loop():
    code, out, err = run(
        """
import socket, threading
import asynccoll.sync as ac
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
found = {}
def one(rank):
    with ac.connect(address, rank=rank, world_size=2, secret="s", init_timeout=30) as comm:
        found[rank] = comm.allreduce(rank + 1)
threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found[0], found[1])
"""
    )
    assert (code, out, err) == (0, "3 3\n", "")


@pytest.mark.parametrize(
    "code",
    [
        "import asynccoll.sync as ac\nac.launch(print, 2)",
        "from asynccoll.cli import main\nimport sys\nopen('x.py', 'w').close()\nsys.exit(main(['run', '-n', '2', 'x.py']))",
    ],
    ids=["launch", "asynccoll run"],
)
def test_starting_local_ranks_says_that_it_cannot(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(code)
    assert status == 1
    assert out == ""
    assert "process groups" in err.splitlines()[-1]
    assert "ASYNCCOLL_RANK" in err.splitlines()[-1]


def test_an_interface_without_a_way_to_ask_for_its_address_says_to_give_one():
    code, out, err = run(
        """
import socket
from asynccoll.net.interfaces import interface_address
try:
    interface_address("lo", socket.AF_INET)
except LookupError as error:
    print(error)
"""
    )
    assert (code, err) == (0, "")
    assert "cannot be looked up on this platform" in out


def test_some_units_pass_there():
    code, told = pytest_there(*(f"tests/{name}" for name in UNITS), timeout=100)
    assert code == 0, told[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_units_pass_there():
    code, told = pytest_there("tests/algorithms", "tests/engine", "tests/sim", timeout=880)
    assert code == 0, told[-5000:]
