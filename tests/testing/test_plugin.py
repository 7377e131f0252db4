"""The fixture for users' own tests, in a pytest run of its own."""

import importlib.metadata
import subprocess
import sys

TESTS = """
import asyncio

import pytest


def test_sums(asynccoll_world):
    async def main():
        async with asynccoll_world(3) as comms:
            return await asyncio.gather(*(comm.allreduce(comm.rank) for comm in comms))

    assert asyncio.run(main()) == [3, 3, 3]


def test_in_memory(asynccoll_world):
    async def main():
        async with asynccoll_world(2, transport="memory") as comms:
            return await asyncio.gather(*(comm.allgather(comm.rank) for comm in comms))

    assert asyncio.run(main()) == [[0, 1]] * 2


def test_leaves_one_behind(asynccoll_world):
    async def main():
        async with asynccoll_world(2) as comms:
            comms[1].allreduce(1)

    asyncio.run(main())


def test_its_own_exception_comes_first(asynccoll_world):
    async def main():
        async with asynccoll_world(2) as comms:
            comms[1].allreduce(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
"""


def run(folder, *options):
    (folder / "test_it.py").write_text(TESTS)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            "/dev/null",
            *options,
            "test_it.py",
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_fixture_opens_worlds_and_tells_of_operations_left_behind(tmp_path):
    # pytest finds it by its entry point where the package is installed, and refuses to load it twice.
    found = [point.value for point in importlib.metadata.entry_points(group="pytest11")]
    by_hand = [] if "asynccoll.testing.plugin" in found else ["-p", "asynccoll.testing.plugin"]
    done = run(tmp_path, *by_hand)
    assert "3 passed" in done.stdout, done.stdout
    assert "1 failed" in done.stdout
    assert "rank 1: allreduce #0. Await them, or cancel them." in done.stdout
