"""Runs a short program as the ranks of a mesh, forked by one process that has loaded torch: which takes longer than most tests."""

from scripts import Ended, run_ranks

PROLOGUE = """
import atexit
import socket as sockets
import threading
import traceback
import torch, torch.distributed as dist
import asynccoll.torch as at
from asynccoll.torch import opening

def say(**facts):  # in one write: the lines of a hundred processes do not mix
    os.write(1, (json.dumps({**facts, "at": time.monotonic()}) + "\\n").encode())

def leave(code):
    sys.stdout.flush()
    os._exit(code)

def failed(*error):
    traceback.print_exception(*error, file=sys.__stderr__)
    sys.__stderr__.flush()
    leave(1)

def start_all():
    worlds, size = int(os.environ["TEST_WORLDS"]), int(os.environ["TEST_SIZE"])
    os.environ["ASYNCCOLL_WORLD_SIZE"] = str(size)
    go, come = os.pipe()
    children = {}
    for world in range(worlds):
        listener = sockets.create_server(("127.0.0.1", 0), backlog=2 * size)
        os.environ["ASYNCCOLL_MASTER_PORT"] = str(listener.getsockname()[1])
        for rank in range(size):
            os.environ["ASYNCCOLL_RANK"] = str(rank)
            os.environ["ASYNCCOLL_RENDEZVOUS_FD"] = str(listener.fileno())
            if rank:
                del os.environ["ASYNCCOLL_RENDEZVOUS_FD"]
            pid = os.fork()
            if pid == 0:
                os.close(come)
                os.read(go, 1)  # ends when all have been forked
                # Not by way of the destructors of native libraries: they spin in a child of a process that loaded them.
                sys.excepthook = failed
                atexit.register(leave, 0)
                return world, rank, listener
            children[pid] = world, rank
        listener.close()
    os.close(come)
    for _ in range(len(children)):
        pid, status = os.wait()
        say(of=children[pid], code=os.waitstatus_to_exitcode(status))
    sys.exit()

WORLD, RANK, _listener = start_all()  # which stays open
_say = say

def say(**facts):
    _say(**facts, of=[WORLD, RANK])

"""


def run(program, size=2, *, worlds=1, loop="asyncio", limit=40.0):
    """Run ``program`` (after `PROLOGUE`) as ``worlds`` worlds of ``size`` ranks at once; for each world one `Ended` a rank.

    What the ranks write to standard error is together in each ``errors``.
    """
    (mother,) = run_ranks(
        PROLOGUE + program,
        1,
        loop=loop,
        limit=limit,
        env={"TEST_WORLDS": str(worlds), "TEST_SIZE": str(size)},
    )
    assert mother.code == 0, mother.errors
    said = {(world, rank): [] for world in range(worlds) for rank in range(size)}
    codes = {}
    for fact in mother.said:
        place = tuple(fact.pop("of"))
        if "code" in fact:
            codes[place] = fact["code"]
        else:
            said[place].append(fact)
    return [
        [Ended(codes[world, rank], said[world, rank], mother.errors, mother.at) for rank in range(size)]
        for world in range(worlds)
    ]
