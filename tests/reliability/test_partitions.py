"""A short form of `partitions`, with the bars on times left to the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("split", ["2|2", "1|3"])
def test_both_sides_of_a_partition_notice_and_at_most_one_goes_on(split):
    command = [
        *(sys.executable, "-m", "tests.reliability.partitions", "--untimed", "--liveness", "1"),
        *("--splits", split, "--moments", "idle,busy", "--loops", "uvloop"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    if "to make network namespaces" in done.stderr:
        pytest.skip("needs Linux, root, ip and nsenter")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["rounds"], figures["failures"]) == (2, 0)
    assert "only the larger part may go on" in done.stderr
