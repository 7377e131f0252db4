"""Short forms of `stops`, with the bars on times left to the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["short", "forever", "compute"])
def test_a_short_stop_and_compute_are_no_death_and_a_long_stop_is_one_for_good(size, kind):
    command = [
        *(sys.executable, "-m", "tests.reliability.stops", "--untimed", "--liveness", "1"),
        *("--worlds", str(size), "--kinds", kind, "--loops", "uvloop"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["rounds"] == (1 if kind == "compute" else 2)
    assert figures["failures"] == 0
