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
