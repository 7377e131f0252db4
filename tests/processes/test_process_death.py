"""Real processes that die, leave or end: the others name the culprit in time, and every process ends as it should."""

import signal

import pytest
from scripts import run_ranks

LOOPS = ("asyncio", "uvloop")
WITHIN = 5.0
"""Seconds from a death to the error on the slowest survivor. It is milliseconds; a hang would be the operation's limit."""

SURVIVE = '''
async def then(first, second):
    await first
    await second()

async def survive(comm, dead, failing):
    """Say how ``failing`` fails. Nobody leaves before all have: for who hears of it first a leaving survivor is a culprit too."""
    others = comm.new_group([rank for rank in range(comm.world_size) if rank != dead])
    try:
        await failing
    except asynccoll.CollectiveError as error:
        say(error=type(error).__name__, rank=getattr(error, "peer", getattr(error, "origin", None)), text=str(error))
    else:
        say(error=None)
    await others.barrier()

'''


def assert_survivors_name(ended, dead, error):
    """All but ``dead`` ended well, and said that it was ``dead``, soon after it had said its last word."""
    died = ended[dead].said[-1]["at"]
    for rank, process in enumerate(ended):
        if rank != dead:
            (fact,) = process.said
            assert (fact["error"], fact["rank"]) == (error, dead), fact
            assert process.code == 0, process.errors
            assert fact["at"] - died < WITHIN


DEATHS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "ended by _exit": ("os._exit(3)", 3),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("death", DEATHS)
def test_a_death_while_the_others_wait(death, loop):
    statement, code = DEATHS[death]
    ended = run_ranks(
        SURVIVE
        + f"""
async def main():
    async with asynccoll.init() as comm:
        met = comm.barrier()  # for the others it may still be under way when rank 1 dies
        if comm.rank == 1:
            await met
            say(last=True)
            {statement}
        await survive(comm, 1, then(met, lambda: comm.allreduce(np.ones(9))))

start(main())
""",
        3,
        loop=loop,
    )
    assert ended[1].code == code
    assert_survivors_name(ended, 1, "PeerLost")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("turns", [1, 4, 16])
def test_a_kill_in_the_middle_of_bulk_data(turns, loop):
    ended = run_ranks(
        SURVIVE
        + f"""
async def main():
    async with asynccoll.init() as comm:
        await comm.barrier()
        works = [comm.allreduce(np.ones(1 << 20, np.float32)) for _ in range(8)]
        if comm.rank == 2:
            for _ in range({turns}):
                await asyncio.sleep(0)
            say(last=True)
            os.kill(os.getpid(), signal.SIGKILL)
        await survive(comm, 2, asyncio.gather(*works))

start(main())
""",
        3,
        loop=loop,
    )
    assert ended[2].code == -signal.SIGKILL
    assert_survivors_name(ended, 2, "PeerLost")


@pytest.mark.parametrize("loop", LOOPS)
def test_an_end_without_close_is_a_loss(loop):
    ended = run_ranks(
        SURVIVE
        + """
async def main():
    comm = await asynccoll.init()
    met = comm.barrier()
    if comm.rank == 0:
        await met
        say(last=True)
        return
    await survive(comm, 0, then(met, comm.barrier))
    await comm.close()

start(main())
""",
        3,
        loop=loop,
    )
    assert ended[0].code == 0
    assert_survivors_name(ended, 0, "PeerLost")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("leave", "code", "cause"),
    [
        ("raise LookupError('no shard 7')", 1, "failed with LookupError: no shard 7"),
        ("sys.exit(3)", 3, "failed with SystemExit: 3"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "failed with KeyboardInterrupt"),
        ("return", 0, "closed"),
    ],
    ids=["an error", "sys.exit", "Ctrl-C", "return"],
)
def test_leaving_the_block_is_told_with_its_cause(leave, code, cause, loop):
    ended = run_ranks(
        SURVIVE
        + f"""
async def main():
    async with asynccoll.init() as comm:
        await comm.barrier()
        if comm.rank == 1:
            say(last=True)
            {leave}
        await survive(comm, 1, comm.barrier())

start(main())
""",
        3,
        loop=loop,
    )
    assert ended[1].code == code, ended[1].errors
    assert_survivors_name(ended, 1, "CommunicatorClosed")
    assert cause in ended[0].said[0]["text"]


IN_A_LOOP = """
async def main():
    async with asynccoll.init() as comm:
        try:
            say(result=await comm.allreduce(comm.rank, lambda a, b: sys.exit(3)))
        except asynccoll.RemoteError as error:
            say(origin=error.origin, type=error.type_name)

start(main())
"""
WITHOUT_A_LOOP = """
import asynccoll.sync as ac

with ac.init() as comm:
    try:
        say(result=comm.allreduce(comm.rank, lambda a, b: sys.exit(3)))
    except asynccoll.RemoteError as error:
        say(origin=error.origin, type=error.type_name)
"""


@pytest.mark.parametrize(
    ("program", "loop"),
    [(IN_A_LOOP, "asyncio"), (IN_A_LOOP, "uvloop"), (WITHOUT_A_LOOP, "sync")],
    ids=["asyncio", "uvloop", "sync"],
)
def test_an_exit_inside_a_reduce_function_ends_its_process_and_the_others_hear_of_it(program, loop):
    ended = run_ranks(program, 3, loop=loop, limit=30.0)
    assert [process.code for process in ended] == [3, 0, 0], [process.errors for process in ended]
    # As its loop ends its main task may still hear of the failure, or be cancelled.
    assert not any("result" in fact for fact in ended[0].said)
    assert "Traceback" not in ended[0].errors
    for process in ended[1:]:
        assert [(fact["origin"], fact["type"]) for fact in process.said] == [(0, "SystemExit")]
        assert process.errors == ""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_good_run_in_development_mode_says_nothing(loop):
    ended = run_ranks(
        """
async def main():
    asyncio.get_running_loop().slow_callback_duration = 10.0  # says how busy the machine is, nothing more
    async with asynccoll.init() as comm:
        for _ in range(3):
            await comm.allreduce(np.ones(100_000))
            await comm.allreduce([comm.rank])
        with contextlib.suppress(asyncio.CancelledError, asynccoll.CollectiveCancelled):
            work = comm.allreduce(np.ones(1_000_000))
            if comm.rank == 0:
                work.cancel()
            await work
        await comm.barrier()

start(main())
say(done=True)
""",
        3,
        loop=loop,
        python=("-X", "dev", "-W", "error"),
    )
    assert [process.code for process in ended] == [0, 0, 0], ended
    assert [process.errors for process in ended] == ["", "", ""]
    assert all(process.said[-1]["done"] for process in ended)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_process_with_an_operation_pending_ends(loop):
    ended = run_ranks(
        """
async def main():
    comm = await asynccoll.init()
    if comm.rank == 0:
        comm.barrier()  # pending, since rank 2 never calls it
        await asyncio.sleep(0)
    elif comm.rank == 1:
        await comm.barrier()

start(main())
""",
        3,
        loop=loop,
    )
    assert [process.code for process in ended] == [0, 1, 0]
    assert "PeerLost: rank 1: barrier #0 on 'world'" in ended[1].errors.splitlines()[-1]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_rank_whose_dispatch_of_frames_fails_is_the_one_that_all_name(loop):
    ended = run_ranks(
        """
from asynccoll.engine import arrivals

async def main():
    async with asynccoll.init() as comm:
        await comm.barrier()
        if comm.rank == 0:
            def fails(*_):
                raise MemoryError("no room for a frame")
            arrivals.Arrivals.start = fails
        await comm.allreduce(np.ones(9))

start(main())
""",
        3,
        loop=loop,
    )
    assert [process.code for process in ended] == [1, 1, 1]
    for rank, process in enumerate(ended):
        says = "" if rank == 0 else ", says rank 0"
        last = process.errors.rstrip().splitlines()[-1]
        assert "PeerLost: " in last
        assert f"lost rank 0 (internal error: MemoryError: no room for a frame{says}; at 127.0.0.1:" in last
    assert "MemoryError: no room for a frame\n" in ended[0].errors  # with its traceback, from the loop
