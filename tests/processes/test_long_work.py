"""A rank that computes or pickles for long is late, not dead, unless it holds the GIL; and what one rank alone can import."""

import pytest
from scripts import run_ranks

LIVENESS = 1.0
"""Seconds, as ``init(liveness_timeout=)``."""

BUSY = """
import ctypes

SECONDS, GIL = float(os.environ["SECONDS"]), os.environ["GIL"] == "held"

def hold():
    if GIL:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(SECONDS * 1e6)))  # PyDLL keeps the GIL during the call
    else:
        time.sleep(SECONDS)

class Slow:
    def __reduce__(self):
        hold()
        return str, ("slow",)

def fold(a, b):
    hold()
    return a + b

async def work(comm, kind):
    if kind == "before its call":
        if comm.rank == 1:
            hold()
        return await comm.allreduce([comm.rank])
    if kind == "while it is under way":
        work = comm.allreduce(np.ones(1 << 20))
        if comm.rank == 1:
            await asyncio.sleep(0)
            hold()
        return float((await work).sum())
    if kind == "in a reduce function":
        return await comm.allreduce([comm.rank], fold)
    return await comm.allgather(Slow() if comm.rank == 1 else "fast")

async def main():
    async with asynccoll.init(liveness_timeout=float(os.environ["LIVENESS"])) as comm:
        await comm.barrier()
        try:
            say(result=await work(comm, os.environ["KIND"]))
            await comm.barrier()
        except asynccoll.PeerLost as error:
            say(peers=sorted(error.peers), reason=error.reason)

start(main())
"""
KINDS = {
    "before its call": [0, 1, 2],
    "while it is under way": 3.0 * (1 << 20),
    "in a reduce function": [0, 1, 2],
    "pickling": ["fast", "slow", "fast"],
}
"""What keeps a rank from its loop -> the result of the operation."""


def run(kind, seconds, *, gil, loop):
    """What each of three ranks said last, of which one is kept from its loop for ``seconds`` (twice, in a reduce function)."""
    env = {"KIND": kind, "SECONDS": str(seconds), "GIL": "held" if gil else "free", "LIVENESS": str(LIVENESS)}
    ended = run_ranks(BUSY, 3, loop=loop, env=env)
    assert [process.code for process in ended] == [0] * 3, [process.errors for process in ended]
    return [process.said[-1] for process in ended]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_kept_from_its_loop_is_not_dead_however_long(kind, loop):
    assert [fact.get("result") for fact in run(kind, 2.5 * LIVENESS, gil=False, loop=loop)] == [
        KINDS[kind]
    ] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_nor_is_one_that_holds_the_gil_for_less_than_the_liveness_timeout(kind):
    assert [fact.get("result") for fact in run(kind, LIVENESS / 2, gil=True, loop="uvloop")] == [
        KINDS[kind]
    ] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_holds_the_gil_for_longer_is_reported_as_unresponsive_and_hears_that_it_is_out(kind):
    busy = 0 if kind == "in a reduce function" else 1
    for rank, fact in enumerate(run(kind, 2.5 * LIVENESS, gil=True, loop="uvloop")):
        assert fact.get("peers") == [busy], fact
        assert fact["reason"].startswith("evicted" if rank == busy else "unresponsive"), fact


def test_a_class_that_one_rank_alone_can_import_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "only_here.py").write_text("class Thing:\n    pass\n")
    ended = run_ranks(
        """
async def main():
    async with asynccoll.init() as comm:
        value = [1]
        if comm.rank == 1:
            sys.path.insert(0, os.environ["THERE"])
            import only_here
            value = only_here.Thing()
        calls = (
            lambda: comm.allreduce(value, lambda a, b: a),
            lambda: comm.allgather(value),
            lambda: comm.broadcast(value, 1),
            lambda: comm.scan(value, lambda a, b: a),
            lambda: comm.alltoall([value] * comm.world_size),
            lambda: comm.gather(value, 2),
            lambda: comm.scatter([value] * comm.world_size, 1),
            lambda: comm.reduce(value, lambda a, b: b, 1),
        )
        for call in calls:
            try:
                await call()
                say(kind="complete")
            except ModuleNotFoundError as error:
                say(kind="here", name=error.name)
            except asynccoll.RemoteError as error:
                say(kind="elsewhere", name=error.type_name, text="only_here" in str(error))
            say(next=await comm.allreduce(1))

start(main())
""",
        3,
        env={"THERE": str(tmp_path)},
    )
    assert [process.code for process in ended] == [0] * 3, [process.errors for process in ended]
    for rank, process in enumerate(ended):
        assert [fact["next"] for fact in process.said if "next" in fact] == [3] * 8
        ends = [fact for fact in process.said if "kind" in fact]
        assert len(ends) == 8
        assert "complete" not in {fact["kind"] for fact in ends}, rank
        for fact in ends:
            if fact["kind"] == "here":
                assert fact["name"] == "only_here"
            else:
                assert (fact["name"], fact["text"]) == ("ModuleNotFoundError", True)
