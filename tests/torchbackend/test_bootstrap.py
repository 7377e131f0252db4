"""`bootstrap`: torch's groups over a mesh, in real processes, and what becomes of them when a rank does not go along."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import asynccoll
import asynccoll.torch
from asynccoll.testing import local_world
from asynccoll.torch import bootstrapper
from asynccoll.torch.bootstrapper import _own_address

from . import forking, turning

pytestmark = pytest.mark.torch

LOOPS = ("asyncio", "uvloop")
HEAD = """
def listening():
    # Addresses at which this process listens, as /proc/net/tcp writes them.
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:] + open("/proc/net/tcp6").readlines()[1:]]
    return sorted(row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own)

async def attempt(comm, *args, **options):
    try:
        groups = await at.bootstrap(comm, *args, **options)
    except asyncio.CancelledError:
        say(error="CancelledError", up=dist.is_initialized())
    except Exception as error:
        say(error=type(error).__name__, text=str(error),
            origin=getattr(error, "origin", None), peers=sorted(getattr(error, "peers", ())),
            values=getattr(error, "values", None), up=dist.is_initialized())
    else:
        total = torch.tensor([float(comm.rank)])
        await asyncio.to_thread(dist.all_reduce, total)
        say(error=None, groups=len(groups), total=total.item(), backend=dist.get_backend())

"""


def run(program, size=2, **options):
    (ended,) = forking.run(HEAD + program, size, **options)
    return ended


def facts(ended):
    """What each rank said, once all have ended well."""
    assert [process.code for process in ended] == [0] * len(ended), [process.errors for process in ended]
    return [process.said for process in ended]


ROUNDS = """
async def main():
    async with asynccoll.init(init_timeout=20) as comm:
        await asyncio.to_thread(listening)  # the executor's thread and its descriptors are there before we count
        bare = listening()
        other = comm.recv(0) if comm.rank == 1 else None
        for turn in range(3):
            real = opening.Plan.open
            if comm.rank == 1 and turn == 0:
                # torch holds this rank up; its loop turns, and so do the others' while they wait for it in torch.
                def late(plan, **where):
                    time.sleep(0.2)
                    return real(plan, **where)
                opening.Plan.open = late
            with Turning() as turning:
                groups = await at.bootstrap(comm, [[0, 1], [1], [0, 1]], timeout=[30, 40, 50, 60])
            opening.Plan.open = real
            values = [torch.tensor([float(comm.rank + 1)]) for _ in range(3)]
            for value, group in zip(values, [None, groups[0], groups[2]]):
                await asyncio.to_thread(dist.all_reduce, value, group=group)
            later = dist.new_group([0, 1])  # the store is alive
            outside = groups[1] == dist.GroupMember.NON_GROUP_MEMBER
            say(turns=turning.count, values=[value.item() for value in values], outside=outside,
                wide=[a for a in listening() if a.startswith("00000000")])
            del later, groups, group
            dist.destroy_process_group()
            await comm.barrier()
        if comm.rank == 0:
            other = comm.send("late", 1)
        say(other=await other, left=len(listening()) - len(bare), names=comm.pending())

start(main())
"""


@pytest.fixture(scope="module")
def both():
    """Three bootstraps one after the other, in a world on each of the loops."""
    choice = f"sys.argv[1] = {LOOPS}[WORLD]\n"
    ended = forking.run(HEAD + turning.SOURCE + choice + ROUNDS, worlds=2)
    return dict(zip(LOOPS, map(facts, ended), strict=True))


@pytest.fixture(params=LOOPS)
def rounds(request, both):
    return both[request.param]


class TestGroups:
    def test_p4_they_come_up_with_the_ranks_of_the_mesh(self, rounds):
        for rank, said in enumerate(rounds):
            for turn in said[:3]:
                assert turn["values"] == [3.0, 3.0, 3.0]
                assert turn["outside"] == (rank == 0)

    def test_the_loop_turns_while_torch_blocks(self, rounds):
        for said in rounds:
            assert said[0]["turns"] >= 20

    def test_a_bootstrap_follows_a_destroyed_one_and_leaves_no_listener(self, rounds):
        for said in rounds:
            assert len(said) == 4
            assert said[3]["left"] == 0

    def test_nobody_listens_on_all_addresses(self, rounds):
        for said in rounds:
            assert [turn["wide"] for turn in said[:3]] == [[], [], []]

    def test_what_was_under_way_on_the_mesh_goes_on(self, rounds):
        assert [said[3]["other"] for said in rounds] == [None, "late"]
        assert [said[3]["names"] for said in rounds] == [[], []]


TROUBLES = """
def broken():
    raise OSError("no such device")

async def main():
    real = opening.Plan.open
    loop = asyncio.get_running_loop()
    async with asynccoll.init(init_timeout=20) as comm:
        async def heard(rank):
            await comm.recv(rank)

        def spoiled(by, act):
            # Rank `by` has `act` in place of torch, once the other has the store and is about to wait in torch.
            def opened(plan, **where):
                if comm.rank == by:
                    asyncio.run_coroutine_threadsafe(heard(1 - by), loop).result(20)
                    return act()
                loop.call_soon_threadsafe(comm.send, None, by)
                return real(plan, **where)
            opening.Plan.open = opened

        # 0: an argument is wrong on one rank alone
        await attempt(comm, [[0, 7]] if comm.rank == 1 else [[0, 1]])
        # 1: the ranks want different groups; 2: timeouts
        await attempt(comm, [[0], [0, 1]] if comm.rank else [[0]])
        await attempt(comm, timeout=60 + comm.rank)
        # 3: torch fails on one rank
        spoiled(1, broken)
        await attempt(comm)
        # 4: a rank is cancelled, while its torch blocks
        inside, let_go = asyncio.Event(), threading.Event()
        def stuck():
            loop.call_soon_threadsafe(inside.set)
            let_go.wait()
        spoiled(1, stuck)
        task = asyncio.create_task(attempt(comm))
        if comm.rank == 1:
            await inside.wait()
            task.cancel()
            loop.call_later(0.1, let_go.set)
        await task
        # 5: torch fails on rank 0, which has the store
        spoiled(0, broken)
        await attempt(comm)
        # 6: after all this it works; 7: but once only
        opening.Plan.open = real
        await attempt(comm, [[1, 0]])
        await attempt(comm)
        # 8: one rank alone has a group
        if comm.rank == 0:
            dist.destroy_process_group()
        await attempt(comm)
        if comm.rank == 1:
            dist.destroy_process_group()
        await attempt(comm)
        dist.destroy_process_group()
        await comm.barrier()

start(main())
"""


@pytest.fixture(scope="module")
def troubles():
    """What both ranks meet in a series of bootstraps that one or both spoil: for each the facts of rank 0 and rank 1."""
    return list(zip(*facts(run(TROUBLES)), strict=True))


class TestTroubles:
    def test_a_wrong_argument_of_one_rank(self, troubles):
        other, guilty = troubles[0]
        assert (guilty["error"], guilty["up"]) == ("ValueError", False)
        assert "groups[0]=[0, 7]" in guilty["text"]
        assert (other["error"], other["origin"], other["up"]) == ("RemoteError", 1, False)
        assert "ValueError: groups[0]=[0, 7]" in other["text"]

    @pytest.mark.parametrize(
        ("case", "field", "values"),
        [
            (1, "groups", {"0": [[0]], "1": [[0], [0, 1]]}),
            (2, "timeout", {"0": [60.0], "1": [61.0]}),
        ],
    )
    def test_ranks_that_do_not_want_the_same(self, troubles, case, field, values):
        for fact in troubles[case]:
            assert (fact["error"], fact["values"], fact["up"]) == ("CollectiveMismatch", values, False)
            assert f"disagree on {field}" in fact["text"]

    def test_torch_fails_on_one_rank(self, troubles):
        other, guilty = troubles[3]
        assert (guilty["error"], guilty["text"]) == ("OSError", "no such device")
        assert (other["error"], other["origin"], other["up"]) == ("RemoteError", 1, False)
        assert "OSError: no such device" in other["text"]
        assert "traceback of rank 1" in other["text"]

    def test_a_rank_is_cancelled(self, troubles):
        other, guilty = troubles[4]
        assert (guilty["error"], guilty["up"]) == ("CancelledError", False)
        assert (other["error"], other["origin"], other["up"]) == ("CollectiveCancelled", 1, False)

    def test_rank_0_fails_which_has_the_store(self, troubles):
        guilty, other = troubles[5]
        assert (guilty["error"], guilty["up"]) == ("OSError", False)
        assert (other["error"], other["origin"], other["up"]) == ("RemoteError", 0, False)

    def test_it_works_afterwards(self, troubles):
        for fact in troubles[6]:
            assert (fact["error"], fact["groups"], fact["total"], fact["backend"]) == (None, 1, 1.0, "gloo")

    def test_p4_a_second_one_without_destroy(self, troubles):
        for fact in troubles[7]:
            assert (fact["error"], fact["up"]) == ("AlreadyInitialized", True)
            assert "destroy_process_group()" in fact["text"]

    def test_one_rank_alone_has_a_group_already(self, troubles):
        other, guilty = troubles[8]
        assert (guilty["error"], guilty["up"]) == ("AlreadyInitialized", True)
        assert (other["error"], other["origin"], other["up"]) == ("RemoteError", 1, False)
        assert [fact["error"] for fact in troubles[9]] == [None, None]


DEATHS = """
async def main():
    comm = await asynccoll.init(init_timeout=20)
    if comm.rank == WORLD:
        opening.Plan.open = lambda plan, **where: os.kill(os.getpid(), signal.SIGKILL)
    await attempt(comm)
    await comm.close()

start(main())
"""


@pytest.fixture(scope="module")
def deaths():
    """What the ranks of two worlds say; in each the rank of its number is killed in torch."""
    return forking.run(HEAD + DEATHS, 3, worlds=2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_in_torch_and_the_others_name_it(deaths, victim):
    ended = deaths[victim]
    assert ended[victim].code == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        (fact,) = ended[rank].said
        assert (ended[rank].code, fact["error"], fact["peers"]) == (0, "PeerLost", [victim]), ended[rank]
        assert fact["up"] is False


CROWD = """
async def main():
    async with asynccoll.init(init_timeout=90) as comm:
        await at.bootstrap(comm, [[0, 1]], timeout=90)
        total = torch.tensor([float(100 * WORLD + RANK)])
        await asyncio.to_thread(dist.all_reduce, total)
        say(total=total.item())
        await comm.barrier()
        dist.destroy_process_group()

start(main())
"""


@pytest.mark.parametrize(
    "worlds", [6, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(300)])], ids=str
)
def test_many_at_once_on_one_host_without_one_clash(worlds):
    ended = forking.run(CROWD, worlds=worlds, limit=240)
    failures = [
        (world, rank, process.code)
        for world, processes in enumerate(ended)
        for rank, process in enumerate(processes)
        if (process.code, [fact["total"] for fact in process.said]) != (0, [200.0 * world + 1])
    ]
    assert failures == [], ended[0][0].errors


@pytest.mark.skipif(
    "asynccoll" not in torch.distributed.Backend.backend_list, reason="torch does not know the backend"
)
def test_with_the_backend_asynccoll():
    ended = run(
        """
async def main():
    async with asynccoll.init(init_timeout=20) as comm:
        await attempt(comm, [[0, 1]], backend="asynccoll")
        await asyncio.to_thread(dist.destroy_process_group)
        await comm.barrier()

start(main())
"""
    )
    for (fact,) in facts(ended):
        assert (fact["error"], fact["total"], fact["backend"]) == (None, 1.0, "asynccoll")


async def test_a_world_of_one():
    async with asynccoll.connect(rank=0, world_size=1) as comm:
        (group,) = await asynccoll.torch.bootstrap(comm, [[0]])
        try:
            assert torch.distributed.get_world_size(group) == 1
        finally:
            torch.distributed.destroy_process_group()


async def test_an_opening_waits_for_one_that_failed_to_come_back_from_torch(monkeypatch):
    monkeypatch.setattr(bootstrapper, "LOOK", 0.001)
    opening = bootstrapper._Opening
    async with asynccoll.connect(rank=0, world_size=1) as comm:
        assert opening.lock.acquire(blocking=False)
        try:
            with pytest.raises(asynccoll.AlreadyInitialized, match="one at a time"):
                await asynccoll.torch.bootstrap(comm)  # one that is wanted
            monkeypatch.setattr(opening, "abandoned", True)
            waiting = asyncio.create_task(asynccoll.torch.bootstrap(comm))
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not waiting.done()
            monkeypatch.setattr(bootstrapper, "COMEBACK", -1.0)
            with pytest.raises(asynccoll.AlreadyInitialized, match="has not come back from torch"):
                await asynccoll.torch.bootstrap(comm)
        finally:
            opening.lock.release()
        await waiting
        assert not opening.abandoned
        torch.distributed.destroy_process_group()


async def test_a_cancel_in_the_very_last_step_leaves_no_group(monkeypatch):
    closing, close = asyncio.Event(), asynccoll.Communicator.close

    async def slow(self):
        if "bootstrap" in self.name and not closing.is_set():
            closing.set()
            await asyncio.get_running_loop().create_future()
        await close(self)

    async with asynccoll.connect(rank=0, world_size=1) as comm:
        monkeypatch.setattr(asynccoll.Communicator, "close", slow)
        task = asyncio.create_task(asynccoll.torch.bootstrap(comm, [[0]]))
        await closing.wait()
        assert torch.distributed.is_initialized()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not torch.distributed.is_initialized()


@pytest.fixture
async def three():
    """A bootstrap on rank 0 of three, before its first step; the groups of the others; and what the alarm of one of them says."""
    async with local_world(3) as comms:
        groups = [comm.new_group(range(3)) for comm in comms]
        yield (
            bootstrapper._Bootstrap(comms[0], groups[0]),
            groups[1:],
            dict(kind="failed", type="OSError", text="no such device", traceback="here"),
        )


class TestWhoLeaves:
    """Who leaves without an alarm has heard of a failure before this rank has; here the news is late on purpose."""

    async def test_the_work_of_the_others_goes_on(self, three):
        bootstrap, (_, gone), _ = three
        work = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(bootstrap._unless_alarmed(work))
        await gone.close()
        await asyncio.wait([bootstrap._alarms[1]])
        await asyncio.sleep(0)
        work.set_result("the same on every rank")
        assert await waiting == "the same on every rank"

    async def test_the_cause_may_still_arrive(self, three):
        bootstrap, (cause, gone), alarm = three
        work = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(bootstrap._unless_alarmed(work, 60))
        await gone.close()
        await asyncio.wait([bootstrap._alarms[1]])
        await cause.send(alarm, 0, bootstrapper._TAG)
        with pytest.raises(asynccoll.RemoteError, match="no such device") as caught:
            await waiting
        assert caught.value.origin == 1
        assert work.cancelled()

    async def test_and_if_it_does_not_the_one_who_left_is_named(self, three):
        bootstrap, (_, gone), _ = three
        work = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(bootstrap._unless_alarmed(work, 0.01))
        await gone.close()
        with pytest.raises(asynccoll.CommunicatorClosed) as caught:
            await waiting
        assert caught.value.origin == 2


async def test_it_takes_a_communicator_of_this_loop():
    with pytest.raises(TypeError, match=r"comm is a str: bootstrap\(\) takes the Communicator"):
        await asynccoll.torch.bootstrap("world")


async def test_the_store_is_where_the_links_are():
    async with local_world(2) as comms:
        assert [_own_address(comm) for comm in comms] == ["127.0.0.1", "127.0.0.1"]
        comms[0]._pump.own_addresses = lambda: ["127.0.0.1", "192.0.2.7"]
        assert _own_address(comms[0]) == "192.0.2.7"


def test_without_torch_the_extra_is_named():
    code = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "import asynccoll\n"
        "try:\n    import asynccoll.torch\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(asynccoll.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "asynccoll[torch]" in done.stdout
