"""Some starts and restarts. See `starts`; hundreds by its command. It forks, so it is a process of its own here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import starts

TESTS = Path(__file__).parent.parent


def command(*arguments):
    path = os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])
    done = subprocess.run(
        [sys.executable, "-m", "reliability.starts", "--inside", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("part", "count", "loop"),
    [
        ("restarts", 9, "asyncio"),
        ("restarts", 9, "uvloop"),
        ("missing", 4, "uvloop"),
        ("rounds", 10, "asyncio"),
        ("rounds", 10, "uvloop"),
    ],
)
def test_all_goes_well(part, count, loop):
    code, figures, errors = command("--part", part, "--count", str(count), "--loop", loop)
    assert figures["failures"] == 0, errors
    assert code == 0


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("raise LookupError", "rank 1 ended with 1"),
        ("logging.getLogger('asynccoll').warning('lost')", "rank 1 ended with 2"),
        ("os.kill(os.getpid(), 9)", "rank 1 ended with -9"),
        ("await asyncio.sleep(60)", "rank 1 hangs"),
    ],
)
def test_what_goes_wrong_is_told(statement, told):
    program = f"""
import asyncio, logging, os
from reliability import starts
async def main(rank):
    if rank:
        {statement}
print(starts.forked(2, main, "asyncio", limit=3.0))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *(path for path in sys.path if path)])},
    )
    assert done.stdout == f"[{told!r}]\n", done.stderr


def test_a_rank_that_is_not_named_is_told(monkeypatch):
    class Silent(starts.asynccoll.RendezvousError):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "missing": ()})

    class Opening:
        async def __aenter__(self):
            raise Silent("no mesh")

        async def __aexit__(self, *error):
            pass

    monkeypatch.setattr(starts, "opening", lambda *args, **options: Opening())
    _, wrong = starts.missing(1, "asyncio")
    assert wrong == ["rank 0 of 2 says no mesh, missing set() instead of {1}"]
