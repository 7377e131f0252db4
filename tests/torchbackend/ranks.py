"""Runs a script on several torch ranks, one process each. Knows processes, and nothing of what the script does."""

import os
import subprocess
import sys
import textwrap

LIMIT = 90.0
"""Seconds for a whole run: importing torch alone takes some of them."""

HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("asynccoll", init_method=os.environ["STORE"], rank=rank, world_size=size)
"""
"""What scripts begin with."""


class Rank:
    """One process of a run."""

    def __init__(self, process):
        self.process = process
        self.stdout = self.stderr = ""

    @property
    def code(self):
        return self.process.returncode


def start(store, size, code, *, head=HEAD, flags=()):
    """Start ``code`` on ``size`` ranks that meet in the file ``store``."""
    script = head + textwrap.dedent(code)
    ranks = []
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "STORE": f"file://{store}"}
        command = [sys.executable, *flags, "-c", script]
        ranks.append(
            Rank(
                subprocess.Popen(
                    command,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    stdin=subprocess.DEVNULL,
                    text=True,
                )
            )
        )
    return ranks


def finish(ranks, limit=LIMIT):
    """Wait for the ends of all; kill those that hang, which is a failure."""
    try:
        for rank in ranks:
            rank.stdout, rank.stderr = rank.process.communicate(timeout=limit)
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.communicate()
    return ranks


def run(store, size, code, **options):
    """`start` and `finish`."""
    return finish(start(store, size, code, **options))
