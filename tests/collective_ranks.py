"""What each replica does in test_collective.py. In a module of its own, without pytest, which every process would load."""

import asyncio
import collections
import contextlib
import functools
import gc
import os
import random
import threading
import time
from pathlib import Path

import numpy as np

from asynccoll import collective

ALREADY = "adaptdl.collective is already initialized"
NOT_YET = "adaptdl.collective has not been initialized"
FOLDS = 200
BIG = 16 << 20


def as_adaptdl_starts_it():
    """Turn the launcher's identity into AdaptDL's variables. Secret and listening socket stay. Returns (rank, replicas)."""
    for ours, theirs in (
        ("MASTER_ADDR", "MASTER_ADDR"),
        ("MASTER_PORT", "MASTER_PORT"),
        ("RANK", "REPLICA_RANK"),
        ("WORLD_SIZE", "NUM_REPLICAS"),
    ):
        os.environ[f"ADAPTDL_{theirs}"] = os.environ.pop(f"ASYNCCOLL_{ours}")
    os.environ.pop("ASYNCCOLL_LOCAL_RANK", None)
    return int(os.environ["ADAPTDL_REPLICA_RANK"]), int(os.environ["ADAPTDL_NUM_REPLICAS"])


def caught(call, *args):
    """What a call raises, as facts; None where it returns."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 (the test looks at it)
        facts = {"type": type(error), "text": str(error)}
        for name in ("origin", "type_name", "remote_traceback", "field", "values", "missing", "peer"):
            if hasattr(error, name):
                facts[name] = getattr(error, name)
        return facts
    return None


def wait_for(*paths):
    """Until other replicas have made these files: in step without the mesh."""
    while not all(path.exists() for path in paths):
        time.sleep(0.001)


# -- one world for the rules that need nothing of their own -----------------------------------------------


class World:
    """What the rules share."""

    folder = Path()
    """Where replicas leave files for one another."""


def rules(folder):
    """Every function of `RULES`, one after the other: name -> what it returned."""
    rank, size = as_adaptdl_starts_it()
    folder = World.folder = Path(folder)
    before = [caught(call) for call in USES]
    facts = {
        "before": before,
        "initialize": together(folder, "initialize", rank, size, collective.initialize),
    }
    facts["again"] = caught(collective.initialize)
    for rule in RULES if size == 1 else (*RULES, cancelled):
        facts[rule.__name__] = rule(rank, size)
        in_step(size)
    facts["teardown"] = together(folder, "teardown", rank, size, collective.teardown)
    facts["after"] = [caught(call) for call in USES]
    collective.initialize()
    facts["once more"] = collective.allreduce(rank)
    collective.teardown()
    return facts


USES = (
    lambda: collective.allreduce(1),
    lambda: collective.allreduce_async(1),
    lambda: collective.broadcast(1),
    collective.teardown,
)


def in_step(size):
    """The next call is right, whatever the last one came to."""
    assert collective.allreduce(1) == size


def together(folder, what, rank, size, function):
    """(when the call began, when it ended) on the clock that all processes share; the last replica calls last."""
    files = [folder / f"{what} {n}" for n in range(size)]
    if rank == size - 1:
        wait_for(*files[:rank])
    files[rank].touch()
    begun = time.monotonic()
    function()
    return begun, time.monotonic()


def left_fold(rank, size):
    return collective.allreduce(str(rank), lambda a, b: f"({a}{b})")


def only_rank_0s_function(rank, size):
    lock = threading.Lock()  # does not pickle, and neither does a function that holds it
    calls = []

    def reduce_fn(a, b):
        with lock:
            calls.append((a, b))
        return a + b if rank == 0 else a * 100

    return collective.allreduce(rank, reduce_fn), len(calls)


def what_the_others_give_is_no_function(rank, size):
    return collective.allreduce(rank, max if rank == 0 else None)


def defaults(rank, size):
    mine = [
        rank + 1,
        0.5,
        [rank],
        (rank,),
        str(rank),
        collections.Counter(everywhere=1, **{f"only {rank}": 1}),
        np.full(3, rank + 1.0),
    ]
    untouched = [collections.Counter(v) if isinstance(v, collections.Counter) else v for v in mine[:-1]]
    results = [collective.allreduce(value) for value in mine]
    return {
        "results": [*results[:-1], results[-1].tolist()],
        "untouched": mine[:-1] == untouched and (mine[-1] == rank + 1).all() and mine[2] == [rank],
        "copies": [result is not value for result, value in zip(results, mine, strict=True)][2:],
    }


def arrays_are_folded_too(rank, size):
    """A function of arrays that says in which order it was called, and changes what it was given."""
    mine = np.full(2, float(rank))

    def reduce_fn(a, b):
        a *= 10
        a += b
        return a

    result = collective.allreduce(mine, reduce_fn)
    return result.tolist(), mine.tolist(), type(result).__name__


def shapes_may_differ(rank, size):
    joined = collective.allreduce(np.arange(rank + 1), lambda a, b: np.concatenate([a, b]))
    texts = collective.allreduce(np.array([f"r{rank}"]), lambda a, b: np.concatenate([a, b]))
    return joined.tolist(), texts.tolist()


def own_copies(rank, size):
    """Each replica spoils its result, and gets the next one whole."""
    value = {"list": [rank]}
    first = collective.allreduce(value, lambda a, b: a)
    first["list"].append(f"spoilt by {rank}")
    sent = {"list": ["rank 0's"]} if rank == 0 else None
    second = collective.broadcast(sent)
    second["list"].append(f"spoilt by {rank}")
    third = collective.broadcast(sent)
    return value, first, sent, second, third


def broadcasts(rank, size):
    ignored = threading.Lock()  # does not pickle

    def mine(value):
        return value if rank == 0 else ignored

    array = collective.broadcast(mine(np.asfortranarray(np.arange(6.0).reshape(2, 3))))
    texts = collective.broadcast(mine(np.array(["a", "bc"])))
    return {
        "rank is 0": collective.broadcast(rank == 0),
        "tuple": collective.broadcast(mine((32, 4))),
        "none": collective.broadcast(None if rank == 0 else rank),
        "array": (array.tolist(), array.flags.f_contiguous),
        "texts": texts.tolist(),
        "other shapes": collective.broadcast(np.zeros(rank + 1)).tolist(),
    }


def call_order(rank, size):
    """One counter for all three functions; results in any order, the same object each time."""
    first = collective.allreduce_async([rank], lambda a, b: a + b)
    second = collective.allreduce_async(rank, max)
    sent = collective.broadcast(("from", rank))
    third = collective.allreduce_async({rank}, lambda a, b: a | b)
    blocking = collective.allreduce(rank)
    results = [second.result(), first.result(), third.result()]
    again = [second.result(timeout=0), first.result(), third.result(timeout=1)]
    return {
        "results": results,
        "sent": sent,
        "blocking": blocking,
        "same": [one is two for one, two in zip(results, again, strict=True)],
        "done": first.done(),
    }


def one_left_outstanding(rank, size):
    pending = collective.allreduce_async(np.full(1000, rank + 1.0))
    sent = [collective.broadcast((n, rank)) for n in range(3)]
    counted = collective.allreduce(collections.Counter(a=1, b=rank))
    return sent, counted, pending.result().tolist()


def double_buffered(rank, size):
    """The next operation starts when the last one's result is taken."""
    results = []
    pending = collective.allreduce_async((0, rank))
    for step in range(1, 20):
        results.append(pending.result())
        pending = collective.allreduce_async((step, rank))
    return [*results, pending.result()]


def random_folds(rank, size):
    """200 functions that are neither associative nor commutative, all outstanding at once."""
    draw = random.Random(20)
    cases = [random_fold(draw, size) for _ in range(FOLDS)]
    futures = [collective.allreduce_async(values[rank], function) for function, values in cases]
    return [future.result() for future in futures]


def random_fold(draw, size):
    """A function of two numbers, and a number for each replica."""
    p, q, r, s, modulus = (draw.randrange(2, 1 << 30) for _ in range(5))
    values = [draw.randrange(1 << 30) for _ in range(8)]
    return lambda a, b: (p * a + q * b + r * a * b + s) % modulus, values[:size]


def expected_folds(size):
    draw = random.Random(20)
    return [functools.reduce(*random_fold(draw, size)) for _ in range(FOLDS)]


def many_large(rank, size):
    """20 operations of 16 MB at once (fewer bytes in wide worlds: rank 0 holds what has come from everybody)."""
    nbytes = BIG if size <= 3 else BIG // 8
    futures = [
        collective.allreduce_async(bytes([n]) * nbytes, lambda a, b: a if a == b else b"differs")
        for n in range(20)
    ]
    return [future.result() == bytes([n]) * nbytes for n, future in enumerate(futures)]


def failing_function(rank, size):
    def divide(a, b):
        return a / (b - b)

    return caught(collective.allreduce, 1, divide), caught(
        collective.allreduce, {}, collective.default_reduce_fn
    )


def nested(rank, size):
    """What a collective call inside a reduce function raises there, for each."""

    def fold(a, b):
        a["refused"] = [caught(call) for call in (USES[0], USES[2], USES[3])]
        return a

    return collective.allreduce({}, fold).get("refused")


class Breaks:
    """Pickles, and does not unpickle."""

    def __reduce__(self):
        return breaks, ("on arrival",)


def breaks(text):
    raise ArithmeticError(text)


def unpicklable(rank, size):
    last = rank == size - 1
    return {
        "value": caught(collective.allreduce, threading.Lock() if last else 1, lambda a, b: a),
        "sent": caught(collective.broadcast, threading.Lock() if rank == 0 else 1),
        "result": caught(collective.allreduce, 1, lambda a, b: threading.Lock()),
        "on arrival": caught(collective.allreduce, Breaks() if last else 1, lambda a, b: a),
    }


def mismatched(rank, size):
    if rank == size - 1:
        return caught(collective.broadcast, "other"), collective.allreduce(1)
    return caught(collective.allreduce, [rank]), collective.allreduce(1)


def cancelled(rank, size):
    """The last replica takes its call back before the others have made theirs: what each gets for it."""
    taken_back = World.folder / "taken back"
    if rank == size - 1:
        pending = collective.allreduce_async(rank, max)
        taken = pending.cancel()
        taken_back.touch()
        return taken, pending.done(), pending.cancelled()
    wait_for(taken_back)
    return caught(collective.allreduce, rank, max)


def others_do_not_wait_for_rank_0(rank, size):
    """Rank 0 makes its calls only after all others are back from theirs, of more bytes than the network holds."""
    files = [World.folder / f"back {n}" for n in range(size)]
    if rank == 0:
        wait_for(*files[1:])
    nbytes = BIG if size <= 3 else BIG // 4
    futures = [collective.allreduce_async(bytes([n]) * nbytes, lambda a, b: a) for n in range(2)]
    done = [future.done() for future in futures]
    files[rank].touch()
    return done, [future.result() == bytes([n]) * nbytes for n, future in enumerate(futures)]


def bytes_of_one_array(rank, size):
    """Bytes that this replica sends for an allreduce of 1 MB."""
    stats = collective._Module.communicator._threaded.stats
    before = stats()["bytes_sent"]
    collective.allreduce(np.ones(1 << 17))
    return stats()["bytes_sent"] - before


RULES = (
    left_fold,
    only_rank_0s_function,
    what_the_others_give_is_no_function,
    defaults,
    arrays_are_folded_too,
    shapes_may_differ,
    own_copies,
    broadcasts,
    call_order,
    one_left_outstanding,
    double_buffered,
    random_folds,
    many_large,
    others_do_not_wait_for_rank_0,
    failing_function,
    nested,
    unpicklable,
    mismatched,
    bytes_of_one_array,
)


# -- worlds of their own ------------------------------------------------------------------------------------


def without_the_launchers_listener(port):
    """Have rank 0 listen by itself, as under AdaptDL; at ``port``, on an address that is not one."""
    rank, size = as_adaptdl_starts_it()
    os.environ.pop("ASYNCCOLL_RENDEZVOUS_FD", None)
    os.environ["ADAPTDL_MASTER_ADDR"] = "0.0.0.0"
    os.environ["ADAPTDL_MASTER_PORT"] = str(port)
    return rank, size


def rank_0_comes_last(folder, port):
    """The others are refused, and call again."""
    rank, size = without_the_launchers_listener(port)
    files = [Path(folder, str(n)) for n in range(size)]
    if rank == 0:
        wait_for(*files[1:])
    files[rank].touch()
    collective.initialize()
    total = collective.allreduce([rank])
    collective.teardown()
    return total


def reinitialise(times, port):
    """Open files, threads and unfinished tasks after the second and after the last of many worlds."""
    without_the_launchers_listener(port)

    def cycle():
        collective.initialize()
        pending = collective.allreduce_async([1])
        collective.broadcast(1)
        collective.teardown()
        return pending.result()

    def held():
        gc.collect()
        tasks = [found for found in gc.get_objects() if isinstance(found, asyncio.Task) and not found.done()]
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(tasks)

    for _ in range(2):
        cycle()
    first = held()
    for _ in range(times):
        cycle()
    return first, held()


def of_restart(restarts):
    """Rank 1 calls twice: left over from an earlier restart, and then as what it is."""
    rank, _ = as_adaptdl_starts_it()
    os.environ["ADAPTDL_NUM_RESTARTS"] = str(restarts - (rank == 1))
    early = None
    if rank == 1:
        early = caught(collective.initialize)
        os.environ["ADAPTDL_NUM_RESTARTS"] = str(restarts)
    collective.initialize()
    total = collective.allreduce(rank)
    collective.teardown()
    return early, total


def with_another_secret():
    """Rank 1 calls twice: with a secret of its own, and then with the job's."""
    rank, _ = as_adaptdl_starts_it()
    refused = None
    if rank == 1:
        right = os.environ["ASYNCCOLL_SECRET"]
        os.environ["ASYNCCOLL_SECRET"] = "another"
        refused = caught(collective.initialize)
        os.environ["ASYNCCOLL_SECRET"] = right
    collective.initialize()
    total = collective.allreduce(rank)
    collective.teardown()
    return refused, total


def with_limit(folder):
    """Replica 1 makes its call only after the others' has timed out."""
    rank, _ = as_adaptdl_starts_it()
    os.environ["ASYNCCOLL_TIMEOUT"] = "1.5"
    late = Path(folder, "timed out")
    collective.initialize()
    if rank == 1:
        wait_for(late)
    error = caught(collective.allreduce, rank)
    late.touch()
    again = collective.allreduce(rank)
    collective.teardown()
    return error, again


def teardown_against_a_call():
    """Rank 0 leaves where the others go on: a mismatch, and the mesh stays."""
    rank, _ = as_adaptdl_starts_it()
    collective.initialize()
    error = caught(collective.teardown) if rank == 0 else caught(collective.allreduce, 1)
    total = collective.allreduce(1)
    collective.teardown()
    return error, total


def open_sockets():
    """TCP sockets of this process, as lines of /proc/net/tcp: (local address, state)."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            if f"socket:[{columns[9]}]" in own:
                found.append((columns[1].rpartition(":")[0], columns[3]))
    return found


def in_a_fork():
    """A child of an initialised process is not initialised, and may be: with a world of its own."""
    collective.initialize()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            facts = [caught(use)["text"] for use in USES]
            collective.initialize(num_replicas=1)
            code = 0 if facts == [NOT_YET] * len(USES) and collective.allreduce(7) == 7 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    total = collective.allreduce(8)
    collective.teardown()
    return os.waitstatus_to_exitcode(status), total


def tensors():
    import torch

    rank, _ = as_adaptdl_starts_it()
    collective.initialize()
    mine = torch.full((3,), float(rank))
    total = collective.allreduce(mine)
    folded = collective.allreduce(mine, lambda a, b: a * 10 + b)
    op = collective.allreduce(mine, collective.default_reduce_fn if rank else torch.add)
    sent = collective.broadcast(torch.arange(2) if rank == 0 else torch.zeros(5))
    collective.teardown()
    return [(type(t).__name__, t.tolist()) for t in (mine, total, folded, op, sent)]
