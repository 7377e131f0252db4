"""`init()` under a real torchrun: its agent holds MASTER_PORT, and rank 0 is found through the agent's store."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import asynccoll

from . import turning

pytestmark = pytest.mark.torch

LIMIT = 100
"""Seconds, on a machine that does other things as well: the tests take a few."""

HEAD = """
import asyncio, json, os, sys, time
import asynccoll
import asynccoll.sync as ac

RANK = int(os.environ["RANK"])

def say(**facts):
    with open(os.environ["TEST_OUT"], "a") as out:  # one write for each line: the ranks' lines do not mix
        out.write(json.dumps({"rank": RANK, "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), **facts}) + "\\n")

"""


def torchrun(folder, program, *options):
    """Run ``program`` on two ranks; its exit code, what the ranks said, and all output."""
    script, out = folder / "script.py", folder / "out"
    script.write_text(HEAD + turning.SOURCE + program)
    env = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCCOLL_")}
    env.update(PYTHONPATH=str(Path(asynccoll.__file__).parents[1]), OMP_NUM_THREADS="1", TEST_OUT=str(out))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *options, str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    said = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return done.returncode, sorted(said, key=lambda fact: fact["rank"]), done.stdout + done.stderr


PROGRAM = """
async def main():
    with Turning() as turning:
        async with asynccoll.init(init_timeout=60) as comm:
            met = turning.count
            async with asynccoll.connect(init_timeout=60) as second:
                total, other = await asyncio.gather(comm.allreduce(1 + RANK), second.allgather(RANK))
                say(what="async", total=total, other=other, local=comm.local_rank, met=met,
                    address=comm._pump.own_addresses())

asynccoll.run(main())
with ac.init(init_timeout=60):
    say(what="sync", total=ac.allreduce(1 + RANK))
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")  # through the same store
    value = torch.ones(1)
    dist.all_reduce(value)
    say(what="gloo", total=value.item())
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two ranks: init and connect at once, then asynccoll.sync, then gloo."""
    code, said, output = torchrun(tmp_path_factory.mktemp("torchrun"), PROGRAM)
    assert code == 0, output
    return said


def facts(job, what):
    found = [fact for fact in job if fact["what"] == what]
    assert [fact["rank"] for fact in found] == [0, 1]
    return found


def test_init_and_connect_find_the_others(job):
    for rank, fact in enumerate(facts(job, "async")):
        assert (fact["total"], fact["other"], fact["local"]) == (3, [0, 1], rank)


def test_the_loop_turns_meanwhile(job):
    for fact in facts(job, "async"):
        assert fact["met"] >= 3


def test_ranks_of_one_host_stay_on_loopback(job):
    for fact in facts(job, "async"):
        assert fact["address"] == ["127.0.0.1"]


def test_so_does_the_synchronous_facade(job):
    assert [fact["total"] for fact in facts(job, "sync")] == [3, 3]


def test_gloo_afterwards_uses_the_same_store(job):
    assert [fact["total"] for fact in facts(job, "gloo")] == [2.0, 2.0]


RESTARTED = """
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

if restart == 0:
    # The first attempt ends with its address in the store: where nobody listens any more.
    from asynccoll.net import agent_store
    agent_store._Asked._forget = lambda self, store: None
with ac.init(init_timeout=40):
    say(total=ac.allreduce(10 * restart + RANK))
    if restart == 0 and RANK == 1:
        os._exit(7)
    if restart == 0:
        try:
            ac.barrier()
        except asynccoll.PeerLost:
            os._exit(8)
"""


def test_after_a_restart_the_keys_of_the_dead_attempt_are_not_used(tmp_path):
    code, said, output = torchrun(tmp_path, RESTARTED, "--max-restarts", "1")
    assert code == 0, output
    totals = {(fact["restart"], fact["rank"]): fact["total"] for fact in said}
    assert totals == {(0, 0): 1, (0, 1): 1, (1, 0): 21, (1, 1): 21}
