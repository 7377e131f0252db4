"""A forked child: every call says that it is a fork, its end does not disturb the parent, and it may open a mesh of its own."""

import pytest
from scripts import run_ranks

PROGRAM = """
from asynccoll.testing import local_world

async def parent():
    async with local_world(2) as comms, asynccoll.init() as default:
        comm = comms[0]
        work = comms[0].allreduce(np.ones(300_000))  # half-way through its bytes
        await asyncio.sleep(0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                in_child(comms, default)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        say(child=os.waitstatus_to_exitcode(status))
        result = await comms[1].allreduce(np.ones(300_000))
        say(intact=bool((result == 2).all() and (await work == 2).all()))
        results = await asyncio.gather(*(comm.allreduce(comm.rank) for comm in comms))
        say(next=results, default=await asynccoll.allreduce(5))

def in_child(comms, default):
    for call in CALLS:
        try:
            call(comms, default)
        except RuntimeError as error:
            say(refused=str(error))
    say(fresh=asyncio.run(fresh(comms)))

async def fresh(comms):
    await comms[0].close()  # silent, and writes nothing
    await asynccoll.shutdown()
    async with asynccoll.init() as own:
        return [own.world_size, await asynccoll.allreduce(7)]

CALLS = [
    lambda comms, default: comms[0].allreduce(np.ones(3)),
    lambda comms, default: comms[0].barrier(),
    lambda comms, default: comms[1].broadcast(1),
    lambda comms, default: default.allgather(1),
    lambda comms, default: asynccoll.allreduce(1),
]
del os.environ["ASYNCCOLL_RANK"], os.environ["ASYNCCOLL_WORLD_SIZE"]
start(parent())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_forked_child_is_told_so_and_the_parent_goes_on(loop):
    (ended,) = run_ranks(PROGRAM, 1, loop=loop)
    assert ended.code == 0, ended.errors
    facts = ended.said
    refused = [fact["refused"] for fact in facts if "refused" in fact]
    assert len(refused) == 5
    for text in refused:
        assert "this is a fork of it (process " in text
        assert "call asynccoll.init() in the child" in text
    rest = {name: value for fact in facts for name, value in fact.items() if name not in ("refused", "at")}
    assert rest == {"fresh": [1, 7], "child": 0, "intact": True, "next": [1, 1], "default": 5}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_childs_normal_exit_leaves_the_parents_connections_alone(loop, tmp_path):
    ended = run_ranks(
        """
import select

async def main():
    async with asynccoll.init() as comm:
        await comm.barrier()
        if comm.rank == 1:
            while not os.path.exists(os.environ["GO"]):
                await asyncio.sleep(0.001)
        else:
            open(os.environ["GO"], "x").close()
            # Rank 1's bytes lie in the socket, which the child shares: its loop, as it ends, must not read them.
            assert select.select(list(comm._pump._sockets.values()), [], [], 30)[0]
            child = os.fork()
            if child == 0:
                sys.exit(0)  # runs finalizers, exit handlers and the end of this block
            os.waitpid(child, 0)
        say(total=await comm.allreduce(1))

start(main())
""",
        2,
        loop=loop,
        env={"GO": str(tmp_path / "go")},
        limit=20.0,
    )
    assert [process.code for process in ended] == [0, 0], [process.errors for process in ended]
    assert [process.said[-1]["total"] for process in ended] == [2, 2]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_child_that_lives_on_does_not_hide_its_parents_death(loop):
    # As the workers of a data loader do when their trainer is killed.
    ended = run_ranks(
        """
async def main():
    async with asynccoll.init() as comm:
        met = comm.barrier()
        if comm.rank == 1:
            await met
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            say(last=True)
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(asynccoll.PeerLost):
            await met
            await comm.barrier()
            return
        say(lost=True)

start(main())
""",
        3,
        loop=loop,
    )
    died = ended[1].said[-1]["at"]
    for rank in (0, 2):
        assert [fact["lost"] for fact in ended[rank].said] == [True]
        assert ended[rank].said[0]["at"] - died < 5.0


CHILDREN = """
import multiprocessing

import asynccoll.sync as ac

def in_child():
    told = []
    for call in (ac.barrier, ac.barrier_async, ac.get_communicator().barrier):
        try:
            call()
        except RuntimeError as error:
            told.append(str(error))
    return told

def main():
    ac.init()
    ac.barrier()
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            if method == "fork":
                say(method=method, told=pool.apply(in_child))
            else:  # a new interpreter, which has none of this program
                try:
                    pool.apply(ac.world_size)
                except RuntimeError as error:
                    say(method=method, told=[f"{type(error).__name__}: {error}"] * 3)
            pool.close()
            pool.join()
        say(total=ac.allreduce(np.ones(200_000))[-1])
    ac.shutdown()

main()
"""


def test_pools_of_every_start_method_leave_the_mesh_alone():
    ended = run_ranks(CHILDREN, 2)
    assert [process.code for process in ended] == [0, 0], [process.errors for process in ended]
    for process in ended:
        told = [(fact["method"], fact["told"]) for fact in process.said if "told" in fact]
        assert [method for method, _ in told] == ["fork", "spawn", "forkserver"]
        for method, texts in told:
            says = "is a fork of process" if method == "fork" else "NotInitialized: "
            assert [says in text for text in texts] == [True] * 3
        assert [fact["total"] for fact in process.said if "total" in fact] == [2.0] * 3


@pytest.mark.torch
@pytest.mark.parametrize(("facade", "loop"), [("async", "uvloop"), ("async", "asyncio"), ("sync", "asyncio")])
def test_a_data_loader_with_forked_workers_works_beside_it(facade, loop):
    """Its workers are forked in the middle of an operation, live through others, and end as they like."""
    pytest.importorskip("torch")
    ended = run_ranks(
        """
import torch
from torch.utils.data import DataLoader

def batches():
    data = torch.arange(24.0) + 100 * RANK
    return DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")

async def with_async():
    async with asynccoll.init() as comm:
        for epoch in range(2):
            work = comm.allreduce(torch.ones(300_000))  # half-way through its bytes
            await asyncio.sleep(0)
            total = torch.zeros(())
            for batch in batches():
                total += (await comm.allreduce(batch)).sum()
            say(total=float(total), beside=float((await work).sum()))

def with_sync():
    import asynccoll.sync as ac
    ac.init()
    for epoch in range(2):
        future = ac.allreduce_async(torch.ones(300_000))
        total = sum(ac.allreduce(batch).sum() for batch in batches())
        say(total=float(total), beside=float(future.result().sum()))
    ac.shutdown()

start(with_async()) if os.environ["FACADE"] == "async" else with_sync()
""",
        2,
        loop=loop,
        env={"FACADE": facade},
    )
    assert [process.code for process in ended] == [0, 0], [process.errors for process in ended]
    total = sum(2 * number + 100 for number in range(24))
    for process in ended:
        assert [(fact["total"], fact["beside"]) for fact in process.said] == [(total, 600_000)] * 2
