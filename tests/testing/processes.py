"""Runs a program in processes that differ in their hash seed. Knows nothing of simulations."""

import os
import subprocess
import sys


def outputs(code, seeds, limit=100):
    """What ``code`` prints, as a set: one process for each of ``seeds``, as PYTHONHASHSEED, of at most ``limit`` seconds."""
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=limit,
        ).stdout
        for seed in seeds
    }
