"""Short forms of `kills`. The bars on times are the command's own; here it is who notices, and whom they name."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments):
    """Run the command in a process of its own, which may fork; its figures."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability.kills", "--untimed", "--watch", "0.1", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_survivor_of_a_kill_names_the_killed_rank():
    figures = run("--worlds", "4", "--moments", "8B,idle,late call", "--loops", "uvloop")
    assert (figures["rounds"], figures["failures"]) == (6, 0)


def test_every_rank_of_a_ring_of_16_names_the_killed_one_and_no_neighbour():
    figures = run(
        "--worlds", "16", "--victim", "5", "--moments", "8B", "--algorithms", "ring", "--loops", "uvloop"
    )
    assert (figures["rounds"], figures["same_name_everywhere"], figures["failures"]) == (1, 1, 0)


def test_of_two_deaths_at_once_no_living_rank_is_named():
    figures = run("--worlds", "5", "--deaths", "2", "--moments", "8B,idle", "--loops", "uvloop")
    assert (figures["rounds"], figures["failures"]) == (4, 0)


def test_a_terminated_rank_is_named_like_a_killed_one():
    figures = run(
        "--worlds", "4", "--signal", "TERM", "--moments", "64MB", "--loops", "asyncio", "--algorithms", "ring"
    )
    assert (figures["rounds"], figures["failures"]) == (1, 0)


def test_a_survivor_that_names_another_rank_is_a_failure_of_the_command():
    program = (
        "import asynccoll, sys\n"
        "from tests.reliability import kills\n"
        "class Liar(asynccoll.PeerLost):\n"
        "    def __init__(self, peers, *rest): super().__init__([0], *rest)\n"
        "from asynccoll.engine import departures\n"
        "departures.PeerLost = Liar\n"
        "Liar.__name__ = 'PeerLost'\n"
        "sys.exit(kills.main('--worlds 3 --victim 1 --moments idle --algorithms ring --loops asyncio'.split()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["failures"] == 1
    assert "replay: python -m tests.reliability.kills --worlds 3" in done.stderr
