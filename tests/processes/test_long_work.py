"""A rank that computes for long, holds the GIL, or pickles for long is late, not dead; and what one rank alone can import."""

import pytest
from scripts import run_ranks

LIVENESS = 0.2
"""Seconds, as ``init(liveness_timeout=)``. The work takes more than three times as long."""

BUSY = """
import ctypes

def hold_the_gil():
    ctypes.PyDLL(None).usleep(ctypes.c_uint(WORK))  # PyDLL keeps the GIL during the call

class Slow:
    def __reduce__(self):
        time.sleep(WORK / 1e6)
        return str, ("slow",)

def fold(a, b):
    hold_the_gil()
    return a + b

async def main():
    async with asynccoll.init(liveness_timeout=float(os.environ["LIVENESS"])) as comm:
        kind = os.environ["KIND"]
        for _ in range(2):
            if kind == "before its call":
                if comm.rank == 1:
                    hold_the_gil()
                say(result=await comm.allreduce([comm.rank]))
            elif kind == "while it is under way":
                work = comm.allreduce(np.ones(1 << 20))
                if comm.rank == 1:
                    await asyncio.sleep(0)
                    hold_the_gil()
                say(result=float((await work).sum()))
            elif kind == "in a reduce function":
                say(result=await comm.allreduce([comm.rank], fold))
            else:
                say(result=await comm.allgather(Slow() if comm.rank == 1 else "fast"))

start(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("before its call", [0, 1, 2]),
        ("while it is under way", 3.0 * (1 << 20)),
        ("in a reduce function", [0, 1, 2]),
        ("pickling", ["fast", "slow", "fast"]),
    ],
)
def test_a_rank_that_is_busy_is_not_declared_dead(kind, result, loop):
    program = f"WORK = {int(LIVENESS * 3.2e6)}\n" + BUSY
    ended = run_ranks(program, 3, loop=loop, env={"KIND": kind, "LIVENESS": str(LIVENESS)})
    assert [process.code for process in ended] == [0] * 3, [process.errors for process in ended]
    assert [[fact["result"] for fact in process.said] for process in ended] == [[result] * 2] * 3


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
