"""Runs a short program as the ranks of a mesh, one real process each, and collects what each says. Knows nothing of meshes."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

PROLOGUE = """
import asyncio, contextlib, json, os, signal, sys, time
import numpy as np
import asynccoll

RANK = int(os.environ.get("ASYNCCOLL_RANK", "0"))

def say(**facts):
    print(json.dumps({**facts, "at": time.monotonic()}), flush=True)

def start(main):
    if sys.argv[1] == "uvloop":
        asynccoll.run(main)
    else:
        asyncio.run(main)

"""
DEADLINE = 60.0
"""Seconds after which every process of a test is killed: a hang is a failure."""


class Ended(NamedTuple):
    """What became of one process."""

    code: int
    """Exit code, or minus the number of the signal that ended it."""
    said: list
    """What it said, as dicts; ``at`` is monotonic time, which all processes of a host share."""
    errors: str
    """Its standard error."""
    at: float
    """When it ended, in the same time, to a twentieth of a second."""


def run_ranks(program, size, *, loop="asyncio", python=(), env=None, limit=DEADLINE):
    """Run ``program`` (after `PROLOGUE`) as ``size`` ranks for at most ``limit`` seconds; one `Ended` per rank."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2 * size))
        shared = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ASYNCCOLL_")},
            "ASYNCCOLL_WORLD_SIZE": str(size),
            "ASYNCCOLL_MASTER_ADDR": "127.0.0.1",
            "ASYNCCOLL_MASTER_PORT": str(listener.getsockname()[1]),
            "ASYNCCOLL_SECRET": secrets.token_hex(16),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        processes, outputs = [], []
        for rank in range(size):
            own = {"ASYNCCOLL_RANK": str(rank)}
            if rank == 0:
                own["ASYNCCOLL_RENDEZVOUS_FD"] = str(listener.fileno())
            streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            process = subprocess.Popen(
                [sys.executable, *python, "-c", PROLOGUE + textwrap.dedent(program), loop],
                env={**shared, **own},
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                pass_fds=(listener.fileno(),) if rank == 0 else (),
                start_new_session=True,
            )
            stack.callback(end, process)
            processes.append(process)
            outputs.append(streams)
        deadline = time.monotonic() + limit

        def ended_at(process):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                return time.monotonic()

        with ThreadPoolExecutor(size) as waiters:
            times = list(waiters.map(ended_at, processes))
        if None in times:
            text = [[read(stream) for stream in streams] for streams in outputs]
            raise AssertionError(f"rank {times.index(None)} hangs; said: {text}")
        return [
            Ended(process.returncode, [json.loads(line) for line in read(out).splitlines()], read(err), at)
            for process, (out, err), at in zip(processes, outputs, times, strict=True)
        ]


def end(process):
    """Kill one process and what it started, as far as they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
    process.wait()


def read(stream):
    stream.seek(0)
    return stream.read().decode(errors="replace")
