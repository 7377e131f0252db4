"""A process dies, or fails, while the mesh is being formed: all others name it in time, leave nothing behind, and can try again."""

import pytest
from scripts import run_ranks

LIMIT = 4.0
"""``init_timeout``, which is sat out only where nobody can know better."""
LONG = 60.0
"""An ``init_timeout`` that nobody sits out."""

FORMING = '''
import socket

def internet_sockets():
    """The open connections and listeners of this process, but for the listener that the launcher holds for rank 0."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd == int(os.environ.get("ASYNCCOLL_RENDEZVOUS_FD", -1)):
            continue
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        found.append(str(copy))
    return found

def die(*_, **__):
    os._exit(7)

def die_at(owner, name, number=1):
    """End this process in the call of that number, counted from 1."""
    ordinary, left = getattr(owner, name), [number]
    def counted(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            die()
        return ordinary(*args, **kwargs)
    setattr(owner, name, counted)

async def all_have_tried():
    """Rank 0 goes on telling of a failure for a moment, also to a rank that comes for the next mesh already."""
    with open(os.path.join(os.environ["TRIED"], str(RANK)), "w"):
        pass
    while len(os.listdir(os.environ["TRIED"])) < 7:
        await asyncio.sleep(0.01)

async def attempt(limit):
    """Open the mesh and meet once; say how that ends."""
    try:
        async with asynccoll.init(init_timeout=limit) as comm:
            await comm.barrier()
    except asynccoll.RendezvousError as error:
        say(missing=sorted(error.missing), elapsed=error.elapsed, text=str(error), sockets=internet_sockets())
    except asynccoll.PeerLost as error:
        say(missing=sorted(error.peers), elapsed=0.0, text=str(error), sockets=internet_sockets())

'''
AGAIN = """
async def main():
    await attempt(float(os.environ["LIMIT"]))
    await all_have_tried()
    rank = RANK - (RANK > 3)
    async with asynccoll.init(rank=rank, world_size=7, init_timeout=60.0) as comm:
        say(again=await comm.allreduce(1), sockets=len(internet_sockets()))
    say(left=internet_sockets())

start(main())
"""
STAGES = {
    "before it listens": ("joiner.listen = die", LIMIT),
    "listening, before it accepts": ("die_at(accepting.Acceptor, 'start')", LONG),
    "with half of its connections": ("die_at(linktable.LinkTable, 'take', 7)", LONG),
    "right after ready": ("die_at(linktable.LinkTable, 'release')", LONG),
}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_dies_while_the_mesh_forms_is_named_by_all_and_the_rest_can_form_another(
    stage, loop, tmp_path
):
    statement, limit = STAGES[stage]
    program = f"""
from asynccoll.net import accepting, joiner, linktable

if RANK == 3:
    {statement}
"""
    ended = run_ranks(
        FORMING + program + AGAIN, 8, loop=loop, env={"LIMIT": str(limit), "TRIED": str(tmp_path)}
    )
    assert ended[3].code == 7
    for rank, process in enumerate(ended):
        if rank == 3:
            continue
        assert process.code == 0, process.errors
        failed, again, after = process.said
        assert failed["missing"] == [3], failed
        assert "rank 3" in failed["text"]
        assert failed["elapsed"] < 30.0  # told by somebody, or by the short limit
        assert failed["sockets"] == []
        assert (again["again"], again["sockets"] >= 6) == (7, True)
        assert after["left"] == []


@pytest.mark.parametrize(
    "where", ["coordinator.Coordinator._register", "coordinator.Coordinator._judge", "control.decode"]
)
def test_a_failure_inside_rank_0_while_the_mesh_forms_is_told_to_all(where):
    program = f"""
from asynccoll.net import control, coordinator

if RANK == 0:
    def fails(*_, **__):
        raise LookupError("a defect")
    {where} = fails

async def main():
    try:
        async with asynccoll.init(init_timeout=3.0):  # who had not called yet sits it out
            say(formed=True)
    except asynccoll.RendezvousError as error:
        say(text=str(error), elapsed=error.elapsed)
        sys.exit(5)

start(main())
"""
    ended = run_ranks(FORMING + program, 4)
    assert ended[0].code == 1
    assert "LookupError: a defect" in ended[0].errors
    for process in ended[1:]:
        assert process.code == 5, process.errors
        (fact,) = process.said
        assert "rank 0" in fact["text"]
        assert fact["elapsed"] < 30.0
