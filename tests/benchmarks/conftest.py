"""Makes the repository's top-level `benchmarks` importable, however pytest was started, and runs its programs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
LIMIT = 120
"""Seconds after which a run is given up."""

if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture
def run():
    """Runs ``python -m benchmarks.<module>`` with arguments, to its end."""

    def run(module, *argv):
        return subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *argv],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    return run
