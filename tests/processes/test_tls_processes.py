"""Processes that meet over TLS: they form a mesh from the same files, and the others name the one that dies."""

import signal

import certificates
import pytest
from scripts import run_ranks

LOOPS = ("asyncio", "uvloop")
OPEN = """
def opened():
    return asynccoll.init(ssl=asynccoll.tls(os.environ["TEST_CERTIFICATE"], cafile=os.environ["TEST_CA"]), init_timeout=30)

"""


@pytest.fixture
def files(tmp_path):
    authority = certificates.Authority(tmp_path)
    return {"TEST_CERTIFICATE": str(authority.certificate()), "TEST_CA": str(authority.cafile)}


@pytest.mark.parametrize("loop", LOOPS)
def test_they_meet_and_close_and_nothing_is_printed(files, loop):
    ended = run_ranks(
        OPEN
        + """
async def main():
    asyncio.get_running_loop().slow_callback_duration = 10.0  # the debug mode tells of slow steps, too
    async with opened() as comm:
        total = await comm.allreduce(np.full(1 << 18, comm.rank))
        say(total=int(total[-1]), words=await comm.allgather(f"rank {comm.rank}"))

start(main())
""",
        3,
        loop=loop,
        python=("-X", "dev", "-W", "error"),
        env=files,
    )
    for process in ended:
        assert (process.code, process.errors) == (0, "")
        (fact,) = process.said
        assert (fact["total"], fact["words"]) == (3, ["rank 0", "rank 1", "rank 2"])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("turns", [0, 4, 16])
def test_a_kill_in_the_middle_of_bulk_data_is_a_lost_rank(files, turns, loop):
    ended = run_ranks(
        OPEN
        + f"""
async def main():
    comm = await opened()
    others = comm.new_group([0, 2])
    work = comm.allreduce(np.ones(8 << 20))
    if comm.rank == 1:
        for _ in range({turns}):
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await work
    except asynccoll.PeerLost as error:
        say(peers=sorted(error.peers))
    await others.barrier()
    await comm.close()

start(main())
""",
        3,
        loop=loop,
        env=files,
    )
    assert ended[1].code == -signal.SIGKILL
    for process in (ended[0], ended[2]):
        assert process.code == 0, process.errors
        assert [fact["peers"] for fact in process.said] == [[1]]


@pytest.mark.parametrize("loop", LOOPS)
def test_one_that_ends_without_close_says_so(files, loop):
    ended = run_ranks(
        OPEN
        + """
async def main():
    comm = await opened()
    await comm.barrier()
    if comm.rank == 1:
        return
    try:
        await comm.allreduce(np.ones(9))
    except asynccoll.PeerLost as error:
        say(peers=sorted(error.peers), reason=error.reason)
    await comm.close()

start(main())
""",
        2,
        loop=loop,
        env=files,
    )
    assert [process.code for process in ended] == [0, 0], ended
    (fact,) = ended[0].said
    assert fact["peers"] == [1]
    assert "without close()" in fact["reason"]
