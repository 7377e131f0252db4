"""How processes end that train on the backend: deaths, exits, Ctrl-C. With real processes."""

import json
import signal

import pytest

pytest.importorskip("torch")

from .ranks import finish, run, start

pytestmark = pytest.mark.torch

TRAIN = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(300, 300))
def step():
    model(torch.ones(4, 300)).sum().backward()
"""


def said(rank):
    return [json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")]


def test_kill_9_of_one_rank_raises_on_the_others_within_two_seconds_and_names_it(tmp_path):
    code = (
        TRAIN
        + """
import json, asynccoll
for number in range(1000):
    if number == 5 and rank == 1:
        print(json.dumps({"died": time.time()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step()
    except RuntimeError as error:
        print(json.dumps({"raised": time.time(), "text": str(error)}))
        break
try:
    dist.all_reduce(torch.ones(2))
except asynccoll.PeerLost as lost:
    print(json.dumps({"peers": sorted(lost.peers), "torchs": isinstance(lost, dist.DistBackendError)}))
"""
    )
    zero, one, two = run(tmp_path / "store", 3, code)
    assert (zero.code, one.code, two.code) == (0, -signal.SIGKILL, 0), zero.stderr + two.stderr
    died = said(one)[0]["died"]
    for survivor in (zero, two):
        raised, after = said(survivor)
        assert "PeerLost" in raised["text"]
        assert "lost rank 1" in raised["text"]
        assert raised["raised"] - died < 2
        assert after == {"peers": [1], "torchs": True}


def test_a_group_without_the_dead_rank_goes_on(tmp_path):
    code = """
import asynccoll
left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
dist.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except asynccoll.PeerLost as lost:
    print(sorted(lost.peers))
total = torch.full((3,), rank + 1.0)
dist.all_reduce(total, group=left)
print(total.tolist())
if rank == 1:
    try:
        dist.all_reduce(total, group=right)
    except asynccoll.PeerLost as lost:
        print("right", sorted(lost.peers))
"""
    zero, one, two = run(tmp_path / "store", 3, code)
    assert (zero.code, one.code, two.code) == (0, 0, -signal.SIGKILL), zero.stderr + one.stderr
    assert zero.stdout == "[2]\n[3.0, 3.0, 3.0]\n"
    assert one.stdout == "[2]\n[3.0, 3.0, 3.0]\nright [1]\n"


@pytest.mark.parametrize("last", ["dist.destroy_process_group()", "pass", "sys.exit(0)"])
def test_an_end_is_silent_with_and_without_destroy(tmp_path, last):
    code = f"""
work = dist.all_reduce(torch.ones(1000), async_op=True)
future = work.get_future().then(lambda done: done.value()[0].sum())
assert float(future.wait()) == 2000
dist.barrier()
{last}
"""
    for rank in run(tmp_path / "store", 2, code):
        assert (rank.code, rank.stdout, rank.stderr) == (0, "", "")


def test_ctrl_c_in_a_collective_is_heard_and_the_others_are_told(tmp_path):
    ranks = start(
        tmp_path / "store",
        2,
        """
import asynccoll
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    import threading, traceback
    main = threading.get_ident()
    def waits():
        frames = traceback.walk_stack(sys._current_frames()[main])
        return [frame.f_code.co_name for frame, _ in frames][:3] == ["wait", "exception", "settle"]
    def interrupt():
        while not waits():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    try:
        dist.all_reduce(torch.ones(4))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    store.set("interrupted", "1")
else:
    store.get("interrupted")  # this rank has not called yet, and fails when it does
    try:
        dist.all_reduce(torch.ones(4))
    except asynccoll.CollectiveCancelled as error:
        print("cancelled by", error.origin)
dist.barrier()
""",
    )
    zero, one = finish(ranks)
    assert (zero.code, zero.stdout) == (0, "interrupted\n"), zero.stderr
    assert (one.code, one.stdout) == (0, "cancelled by 0\n"), one.stderr


def test_a_rank_that_does_not_call_is_named_at_the_time_limit(tmp_path):
    code = """
import asynccoll, datetime
group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except asynccoll.CollectiveTimeout as error:
        print(sorted(error.missing), error.limit, isinstance(error, dist.DistBackendError))
    store.set("over", "1")
else:
    store.get("over")
dist.barrier()
"""
    zero, one = run(tmp_path / "store", 2, code)
    assert (zero.code, zero.stdout) == (0, "[1] 0.5 True\n"), zero.stderr
    assert one.code == 0, one.stderr


def test_a_rank_that_does_not_come_is_named_by_those_that_do(tmp_path):
    head = """
import os, torch, torch.distributed as dist, datetime, asynccoll
rank = int(os.environ["RANK"])
if rank != 2:
    try:
        dist.init_process_group("asynccoll", init_method=os.environ["STORE"], rank=rank, world_size=3,
                                timeout=datetime.timedelta(seconds=3))
    except asynccoll.RendezvousError as error:
        print(sorted(error.missing))
"""
    zero, one, _ = run(tmp_path / "store", 3, "", head=head)
    assert (zero.code, zero.stdout) == (0, "[2]\n"), zero.stderr
    assert (one.code, one.stdout) == (0, "[0]\n"), one.stderr
