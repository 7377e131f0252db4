"""A rank of an earlier run that was stopped wakes up in the middle of the next run at the same address: real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from forming import free_port

RANK = """
import asyncio, json, sys
import numpy as np
import asynccoll

def say(**facts):
    print(json.dumps(facts), flush=True)

async def main():
    say(ready=True)
    sys.stdin.readline()
    try:
        async with asynccoll.init(init_timeout=60) as comm:
            say(up=True)
            while sys.stdin.readline():
                total = await comm.allreduce(np.arange(3.0) + comm.rank)
                say(total=total.tolist())
    except asynccoll.AsynccollError as error:
        say(error=type(error).__name__, text=str(error))

asyncio.run(main())
"""


class Process:
    """One rank, which does a step for each line that it is told."""

    def __init__(self, rank, port, generation):
        env = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCCOLL_")}
        env |= {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "ASYNCCOLL_RANK": str(rank),
            "ASYNCCOLL_WORLD_SIZE": "2",
            "ASYNCCOLL_MASTER_ADDR": "127.0.0.1",
            "ASYNCCOLL_MASTER_PORT": str(port),
            "ASYNCCOLL_SECRET": "the same in every run",
            "ASYNCCOLL_GENERATION": str(generation),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def hear(self):
        return json.loads(self.process.stdout.readline() or '"it has ended"')

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        """SIGSTOP, and wait until it has stopped."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def end(self):
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start():
    processes = []

    def one(rank, port, generation=0):
        processes.append(Process(rank, port, generation))
        assert processes[-1].hear() == {"ready": True}
        return processes[-1]

    yield one
    for process in processes:
        process.end()


def both(ranks):
    """One allreduce on a mesh of two."""
    for rank in ranks:
        rank.step()
    for rank in ranks:
        assert rank.hear() == {"total": [1.0, 3.0, 5.0]}


def up(ranks):
    for rank in ranks:
        rank.step()
    for rank in ranks:
        assert rank.hear() == {"up": True}


def test_a_stopped_rank_of_a_mesh_that_is_gone_raises_and_the_next_run_does_not_notice(start):
    port = free_port()
    old = [start(0, port), start(1, port)]
    up(old)
    both(old)
    old[1].stop()
    old[0].end()
    new = [start(0, port), start(1, port)]
    up(new)
    both(new)
    old[1].step()
    old[1].signal(signal.SIGCONT)
    told = old[1].hear()
    assert told["error"] == "PeerLost"
    assert "lost rank 0" in told["text"]
    both(new)


def test_a_stopped_rank_that_calls_the_next_run_is_refused(start):
    """It wakes up while the next run is forming, and calls its rank 0."""
    port = free_port()
    old = start(1, port, 3)
    old.stop()
    zero = start(0, port, 4)
    zero.step()
    old.step()
    old.signal(signal.SIGCONT)
    told = old.hear()
    assert told["error"] == "RendezvousError"
    assert "generation 4, not 3" in told["text"]
    new = [zero, start(1, port, 4)]
    new[1].step()
    for rank in new:
        assert rank.hear() == {"up": True}
    both(new)
