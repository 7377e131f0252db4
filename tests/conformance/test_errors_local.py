"""Wrong arguments and failing user code: a typed error that says what to do, on every rank, and the next operation is right."""

import array
import asyncio
import math
import os
import pickle
import re
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
from faults import crash, done_at_once, in_step, in_virtual_time, settle
from ranks import on_all, ordinary, outcomes, sizes

import asynccoll
from asynccoll import (
    AlreadyInitialized,
    CollectiveCancelled,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    NotInitialized,
    PeerLost,
    RemoteError,
    RendezvousError,
)


def overlapping():
    return np.lib.stride_tricks.as_strided(np.zeros(4), (3, 2), (8, 8))


def read_only():
    memory = np.ones(3)
    memory.flags.writeable = False
    return memory


class Bad(NamedTuple):
    """A call that is wrong on the rank that makes it; the others make ``good``."""

    label: str
    call: Callable[[Any], Any]
    error: type[Exception]
    says: str
    good: Callable[[Any], Any] = lambda comm: comm.allreduce(np.ones(3))


BAD = [
    # values
    Bad("dtype str", lambda c: c.allreduce(np.array(["a"])), TypeError, "convert with .astype"),
    Bad("dtype object", lambda c: c.allreduce(np.array([{}])), TypeError, "convert with .astype"),
    Bad(
        "dtype datetime",
        lambda c: c.allgather(np.array(["2020"], "M8[s]")),
        TypeError,
        "convert with .astype",
    ),
    Bad("dtype record", lambda c: c.broadcast(np.zeros(2, "i4,f4")), TypeError, "convert with .astype"),
    Bad("masked array", lambda c: c.allreduce(np.ma.ones(3)), TypeError, "pass numpy.asarray"),
    Bad("wide characters", lambda c: c.allreduce(array.array("u", "ab")), TypeError, "bytes(...)"),
    Bad("leaf of a tree", lambda c: c.allreduce_tree({"a": ["text"]}), TypeError, "['a'][0] is a str"),
    Bad("large int in a tree", lambda c: c.allreduce_tree([1 << 64]), TypeError, "beyond 64 bits"),
    # op
    Bad("unknown op", lambda c: c.allreduce(np.ones(3), "mean"), ValueError, "use one of sum, avg"),
    Bad("op of no kind", lambda c: c.allreduce(np.ones(3), 5), TypeError, "op must be one of sum"),
    Bad(
        "avg of integers",
        lambda c: c.allreduce(np.ones(3, int), "avg"),
        TypeError,
        "reduce with sum and divide",
    ),
    Bad("max of complex", lambda c: c.allreduce(np.ones(3, complex), "max"), TypeError, "have no order"),
    Bad("bitwise or of floats", lambda c: c.allreduce(np.ones(3), "bor"), TypeError, "need integers or bool"),
    Bad("callable in place", lambda c: c.allreduce_(np.ones(3), max), TypeError, "use allreduce()"),
    Bad("callable on a tree", lambda c: c.allreduce_tree([1], max), TypeError, "use allreduce()"),
    # algorithm, root, limits, names
    Bad(
        "unknown algorithm",
        lambda c: c.allreduce(np.ones(3), algorithm="star"),
        ValueError,
        "use one of auto, ring",
    ),
    Bad(
        "algorithm of another verb", lambda c: c.allgather(1, algorithm="tree"), ValueError, "use one of auto"
    ),
    Bad("algorithm of no kind", lambda c: c.allreduce(1, algorithm=3), ValueError, "use one of auto"),
    Bad("root beyond the world", lambda c: c.broadcast(1, root=c.world_size + 4), ValueError, "use 0 to"),
    Bad("negative root", lambda c: c.broadcast(1, root=-1), ValueError, "use 0 to"),
    Bad("root of no kind", lambda c: c.broadcast(1, root="0"), TypeError, "not an integer"),
    Bad("fractional root", lambda c: c.broadcast(1, root=0.0), TypeError, "not an integer"),
    Bad("timeout zero", lambda c: c.barrier(timeout=0), ValueError, "timeout=0 is not a positive number"),
    Bad("timeout negative", lambda c: c.barrier(timeout=-1.0), ValueError, "not a positive number"),
    Bad("timeout NaN", lambda c: c.barrier(timeout=math.nan), ValueError, "not a positive number"),
    Bad("timeout text", lambda c: c.barrier(timeout="5"), ValueError, "not a positive number"),
    Bad("timeout bool", lambda c: c.barrier(timeout=True), ValueError, "not a positive number"),
    Bad("timeout negative delta", lambda c: c.barrier(timeout=timedelta(-1)), ValueError, "not a positive"),
    Bad("name of no kind", lambda c: c.allreduce(np.ones(3), name=5), ValueError, "name= must be a string"),
    Bad(
        "name that does not hash", lambda c: c.allreduce(np.ones(3), name=["a"]), ValueError, "name= must be"
    ),
    Bad("long name", lambda c: c.barrier(name="x" * 100_000), ValueError, "name= must be a string"),
    # out
    Bad("out of another shape", lambda c: c.allreduce(np.ones(3), out=np.ones(4)), ValueError, "shape"),
    Bad(
        "out of another dtype", lambda c: c.allreduce(np.ones(3), out=np.ones(3, "f4")), TypeError, "float32"
    ),
    Bad(
        "out read-only",
        lambda c: c.allreduce(np.ones(3), out=read_only()),
        ValueError,
        "read-only",
    ),
    Bad(
        "out overlapping",
        lambda c: c.allreduce(np.ones((3, 2)), out=overlapping()),
        ValueError,
        "Pass a copy",
    ),
    Bad(
        "out a list",
        lambda c: c.allreduce(np.ones(3), out=[0.0] * 3),
        TypeError,
        "must be an array or a tensor",
    ),
    Bad("out for an object", lambda c: c.allreduce(1, out=np.ones(1)), TypeError, "returns a new value"),
    Bad("out for a callable", lambda c: c.allreduce(np.ones(1), max, out=np.ones(1)), TypeError, "new value"),
    Bad("too few outs", lambda c: c.allgather(np.ones(3), out=[np.ones(3)]), ValueError, "one per rank"),
    Bad("out no list", lambda c: c.allgather(np.ones(3), out=5), TypeError, "out="),
    Bad(
        "outs of another dtype",
        lambda c: c.allgather(np.ones(3), out=[np.ones(3, "i4")] * c.world_size),
        TypeError,
        "must hold float64",
    ),
    Bad(
        "outs read-only",
        lambda c: c.allgather(np.ones(3), out=[read_only()] * c.world_size),
        ValueError,
        "read-only",
    ),
    Bad(
        "the same out for several ranks",
        lambda c: c.allgather(np.ones(3), out=[np.ones(3)] * c.world_size),
        ValueError,
        "out=",
    ),
    Bad(
        "broadcast's out a list", lambda c: c.broadcast(np.ones(3), out=[1.0]), TypeError, "must be an array"
    ),
    Bad(
        "broadcast's out read-only",
        lambda c: c.broadcast(np.ones(3), out=read_only()),
        ValueError,
        "read-only",
    ),
    Bad(
        "broadcast's out of another shape",
        lambda c: c.broadcast(np.ones(3), out=np.ones(4)),
        ValueError,
        "shape",
    ),
    # in place
    Bad("in place a list", lambda c: c.allreduce_([1.0]), TypeError, "use allreduce()"),
    Bad("in place a float", lambda c: c.allreduce_(1.0), TypeError, "use allreduce()"),
    Bad("in place a numpy scalar", lambda c: c.allreduce_(np.float64(1)), ValueError, "Pass a 0-d array"),
    Bad("in place read-only", lambda c: c.allreduce_(read_only()), ValueError, "Pass a writable copy"),
    Bad("in place overlapping", lambda c: c.allreduce_(overlapping()), ValueError, "Pass a copy"),
    Bad("in place broadcast", lambda c: c.allreduce_(np.broadcast_to(np.ones(1), 3)), ValueError, "Pass a"),
    Bad("in place bytes", lambda c: c.allreduce_(memoryview(b"abc")), ValueError, "read-only"),
    # objects
    Bad("a lock", lambda c: c.allreduce(threading.Lock()), TypeError, "Send something that pickles"),
    Bad("a generator", lambda c: c.allgather(x for x in ()), TypeError, "Send something that pickles"),
    Bad(
        "a running loop",
        lambda c: c.broadcast([asyncio.get_running_loop()], c.rank),
        TypeError,
        "that pickles",
    ),
]


def tensors():
    torch = pytest.importorskip("torch")
    return [
        Bad("meta device", lambda c: c.allreduce(torch.ones(3, device="meta")), TypeError, "tensor.cpu()"),
        Bad("sparse", lambda c: c.allreduce(torch.ones(3, 3).to_sparse()), TypeError, "tensor.to_dense()"),
        Bad(
            "fp8", lambda c: c.allreduce(torch.ones(3).to(torch.float8_e4m3fn)), TypeError, "convert with .to"
        ),
        Bad("expanded", lambda c: c.allreduce_(torch.ones(1).expand(3)), ValueError, "Pass a copy"),
        Bad(
            "out a numpy array",
            lambda c: c.allreduce(torch.ones(3), out=np.ones(4, "f4")),
            ValueError,
            "shape",
        ),
        Bad(
            "leaf of a tree",
            lambda c: c.allreduce_tree([torch.ones(3, device="meta")]),
            TypeError,
            "tensor.cpu()",
        ),
    ]


async def refused(comms, bad):
    """Each rank in turn makes the bad call: the local type there, `RemoteError` with the whole story elsewhere."""
    size = len(comms)
    for odd in ordinary(range(size), (size * 2 // 3,)):
        results = await outcomes(
            comms, lambda comm, odd=odd: (bad.call if comm.rank == odd else bad.good)(comm)
        )
        local = results[odd]
        assert type(local) is bad.error, local
        assert bad.says in str(local)
        for rank, error in enumerate(results):
            if rank != odd:
                assert type(error) is RemoteError, error
                assert (error.origin, error.rank) == (odd, rank)
                assert error.type_name == bad.error.__name__
                assert type(error.original) is bad.error
                assert str(error.original) == str(local)
                assert bad.error.__name__ in error.remote_traceback
        await in_step(comms)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.label)
async def test_a_wrong_argument_fails_everywhere_and_loses_nothing(world, bad):
    async with world(3, timeout=5.0) as comms:
        await refused(comms, bad)


@pytest.mark.torch
async def test_a_wrong_tensor_fails_everywhere_and_loses_nothing(world):
    for bad in tensors():
        async with world(2, timeout=5.0) as comms:
            await refused(comms, bad)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.label)
async def test_a_wrong_argument_on_every_rank_fails_as_it_is(world, bad):
    async with world(2, timeout=5.0) as comms:
        results = await outcomes(comms, bad.call)
        assert [type(error) for error in results] == [bad.error] * len(comms)
        await in_step(comms)


async def test_a_wrong_argument_does_not_touch_the_value(world):
    async with world(2) as comms:
        arrays = [np.arange(4.0) for _ in comms]
        for call in (
            lambda comm: comm.allreduce_(arrays[comm.rank], "nonsense"),
            lambda comm: comm.allreduce_(arrays[comm.rank], timeout=-1),
            lambda comm: comm.allreduce(np.ones(3), out=arrays[comm.rank]),
            lambda comm: comm.allreduce(np.ones(4), out=arrays[comm.rank], algorithm="star"),
        ):
            await outcomes(comms, call)
            np.testing.assert_array_equal(arrays, [np.arange(4.0)] * len(comms))


async def test_a_refused_call_takes_its_number_between_others(world):
    async with world(2) as comms:

        async def three(comm):
            works = [
                comm.allreduce(np.full(70_000, 1.0)),
                comm.allreduce(1, timeout=-1) if comm.rank == 1 else comm.allreduce(1),
                comm.allreduce(np.full(70_000, 2.0)),
            ]
            return await asyncio.gather(*works, return_exceptions=True)

        for rank, (first, second, third) in enumerate(await on_all(comms, three)):
            assert (first[0], third[0]) == (len(comms), 2 * len(comms))
            assert type(second) is (ValueError if rank == 1 else RemoteError)


async def test_a_call_that_comes_after_the_others_failure_fails_at_once(world):
    async with world(3) as comms:
        with pytest.raises(ValueError, match="name="):
            await comms[1].barrier(name=5)
        await settle()
        for comm in (comms[0], *comms[2:]):
            work = comm.barrier()
            assert await done_at_once(work)
            assert isinstance(work.exception(), RemoteError)
            assert work.exception().origin == 1
        await in_step(comms)


# -- failing user code ----------------------------------------------------------------------------------------


class TwoArguments(Exception):
    """Does not survive pickling: its arguments are not its ``args``."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Heavy(Exception):
    """Carries more than a control frame may hold."""


class Explosive:
    """Pickles well, and raises where it is unpickled."""

    def __reduce__(self):
        return _explode, ()


def _explode():
    raise LookupError("not in this process")


def fail(error):
    def reduce(a, b):
        raise error

    return reduce


async def test_a_reduce_function_that_raises_fails_on_every_rank(world):
    for size in sizes(2, 3, 4):
        async with world(size) as comms:
            results = await outcomes(comms, lambda comm: comm.allreduce(comm.rank, fail(ValueError("x"))))
            for rank, error in enumerate(results):
                assert type(error) is RemoteError
                assert (error.origin, error.rank, error.type_name) == (0, rank, "ValueError")
                assert type(error.original) is ValueError
                assert error.original.args == ("x",)
                assert "raise error" in error.remote_traceback
                assert "test_errors_local.py" in error.remote_traceback
                assert "failed on rank 0 with ValueError: x" in str(error)
            await in_step(comms)


async def test_a_named_op_that_the_values_do_not_know_fails_on_every_rank(world):
    async with world(2) as comms:
        results = await outcomes(comms, lambda comm: comm.allreduce({"no": "sum"}))
        assert {(type(error), error.type_name) for error in results} == {(RemoteError, "TypeError")}
        await in_step(comms)


async def test_an_exception_that_does_not_pickle_is_described(world):
    async with world(2) as comms:
        results = await outcomes(comms, lambda comm: comm.allreduce(1, fail(TwoArguments("this", "that"))))
        for error in results:
            assert type(error) is RemoteError
            assert error.type_name.endswith("TwoArguments")
            assert error.original is None
            assert "this and that" in str(error)
        await in_step(comms)


@pytest.mark.parametrize("nbytes", [20_000, 50_000, 500_000])
async def test_an_exception_that_carries_much_is_described(world, nbytes):
    async with world(2, timeout=2.0) as comms:
        results = await outcomes(comms, lambda comm: comm.allreduce(1, fail(Heavy(b"x" * nbytes))))
        assert {(type(error), error.origin) for error in results} == {(RemoteError, 0)}
        assert results[1].type_name.endswith("Heavy")
        await in_step(comms)


@pytest.mark.parametrize("nbytes", [20_000, 50_000, 500_000])
async def test_a_refusal_that_carries_much_is_described(world, nbytes):
    class Refuses:
        def __reduce__(self):
            raise Heavy("y" * nbytes)

    async with world(2, timeout=2.0) as comms:
        results = await outcomes(comms, lambda comm: comm.allreduce(Refuses() if comm.rank == 1 else 1))
        for rank, error in enumerate(results):
            assert type(error) is (TypeError if rank == 1 else RemoteError)
        await in_step(comms)


async def test_a_reduce_function_may_return_what_does_not_pickle(world):
    async with world(3) as comms:
        results = await outcomes(comms, lambda comm: comm.allreduce(1, lambda a, b: threading.Lock()))
        for rank, error in enumerate(results):
            assert isinstance(error, RemoteError | TypeError)
            assert isinstance(error, TypeError) or error.origin == 0, rank
        await in_step(comms)


OBJECT_VERBS = (
    "allreduce",
    "reduce",
    "scan",
    "exscan",
    "broadcast",
    "allgather",
    "gather",
    "scatter",
    "alltoall",
)


def pass_on(comm, verb, value, root=0):
    """``verb`` with the object ``value``, in the form that the verb takes."""
    rooted = {"root": root} if verb in ("reduce", "broadcast", "gather", "scatter") else {}
    return getattr(comm, verb)(
        [value] * comm.world_size if verb in ("scatter", "alltoall") else value, **rooted
    )


@pytest.mark.parametrize("verb", OBJECT_VERBS)
async def test_a_value_that_raises_where_it_is_unpickled(world, verb):
    async with world(3, timeout=5.0) as comms:
        results = await outcomes(comms, lambda comm: pass_on(comm, verb, Explosive()))
        for rank, error in enumerate(results):
            if verb == "gather" and rank and error is None:
                continue  # it was done when its value had left
            if isinstance(error, RemoteError):
                assert error.type_name == "LookupError"
                assert isinstance(error.original, LookupError)
            else:
                assert type(error) is LookupError
        await in_step(comms)


class Stateful:
    """Its state is refused where it is unpickled."""

    def __init__(self):
        self.state = 1

    def __setstate__(self, state):
        raise LookupError("not with that state")


@pytest.mark.parametrize("verb", OBJECT_VERBS)
async def test_a_value_of_one_rank_whose_state_is_refused_by_its_receivers(world, verb):
    """The others' values are sound: whoever has to rebuild this one raises, and all hear of it who need the result."""
    async with world(3, timeout=5.0) as comms:
        results = await outcomes(
            comms, lambda comm: pass_on(comm, verb, Stateful() if comm.rank == 1 else [1], root=1)
        )
        assert any(isinstance(error, LookupError | RemoteError) for error in results)
        for error in results:
            if isinstance(error, RemoteError):
                assert error.type_name == "LookupError"
            elif isinstance(error, BaseException):
                assert type(error) is LookupError
            else:  # a rank that needed nothing of it
                assert verb == "gather"
                assert error is None
        await in_step(comms)


@pytest.mark.parametrize("verb", OBJECT_VERBS)
async def test_a_function_that_holds_a_socket_fails_where_it_is_passed(world, verb):
    with socket.socket() as held:
        async with world(3, timeout=5.0) as comms:
            results = await outcomes(
                comms, lambda comm: pass_on(comm, verb, (lambda: held) if comm.rank == 1 else [1], root=1)
            )
            for rank, error in enumerate(results):
                if rank == 1:
                    assert type(error) is TypeError
                    assert "Send something that pickles" in str(error)
                else:
                    assert type(error) is RemoteError, error
                    assert (error.origin, error.type_name) == (1, "TypeError")
            await in_step(comms)


async def test_a_large_value_that_raises_where_it_is_unpickled(world):
    large = ordinary(1_000_000, 100_000)
    async with world(3, timeout=5.0) as comms:
        results = await outcomes(comms, lambda comm: comm.allreduce([bytes(large), Explosive()]))
        assert all(isinstance(error, RemoteError | LookupError) for error in results)
        await in_step(comms)


async def test_an_operation_started_inside_a_reduce_function_is_refused(world):
    async with world(2) as comms:
        results = await outcomes(
            comms, lambda comm: comm.allreduce(1, lambda a, b: comm.allreduce(np.ones(3)) and a + b)
        )
        for error in results:
            assert type(error) is RemoteError
            assert error.type_name == "RuntimeError"
            assert "from inside a reduce function" in str(error)
        await in_step(comms)


async def test_a_cancel_inside_a_reduce_function_takes_effect_after_it(world):
    async with world(2) as comms:
        memory = np.ones(300_000)
        other = [comm.allreduce_(memory.copy()) for comm in comms[1:]]
        work = comms[0].allreduce_(memory)
        results = await on_all(comms, lambda comm: comm.allreduce(1, lambda a, b: (work.cancel(), a + b)[1]))
        assert results == [len(comms)] * len(comms)
        if work.cancelled():
            kept = memory.copy()
            for result in await asyncio.gather(*other, return_exceptions=True):
                if isinstance(result, np.ndarray):  # all that it needed had come
                    assert (result == len(comms)).all()
                else:
                    assert type(result) is CollectiveCancelled
                    assert result.origin == 0
            np.testing.assert_array_equal(memory, kept)
        else:  # it was complete before
            await asyncio.gather(*other)
        await in_step(comms)


class Leave(BaseException):
    """Wants more to end than the operation, but not the process."""


async def test_a_reduce_function_that_raises_no_exception_fails_and_its_neighbours_are_right(world):
    def call(comm, number):
        if number == 2:
            return comm.allreduce(number, fail(Leave("no more")))
        return comm.allreduce((number, comm.rank))

    async with world(3, timeout=5.0) as comms:
        # All at once: the frames behind the one that makes the function run come in the same reads.
        works = [[call(comm, number) for number in range(5)] for comm in comms]
        for rank, mine in enumerate(works):
            results = await asyncio.gather(*mine, return_exceptions=True)
            error = results.pop(2)
            assert type(error) is RemoteError, error
            assert (error.origin, error.rank) == (0, rank)
            assert error.type_name.endswith("Leave")
            right = [sum(((number, comm.rank) for comm in comms), ()) for number in (0, 1, 3, 4)]
            assert results == right
        await in_step(comms)


@pytest.mark.inline_only(
    "a reduce function runs in the mesh's thread, so its exit is raised by the work and not by the call"
)
@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
async def test_a_reduce_function_that_exits_during_the_call_is_told_to_the_others_at_once(world, leave):
    """Its rank may catch that, or take a while to end: the others do not wait for what it does next."""
    async with world(3, timeout=5.0) as comms:
        works = [comm.allreduce(comm.rank, fail(leave())) for comm in comms[1:]]
        await settle()
        with pytest.raises(leave):
            comms[0].allreduce(0, fail(leave()))
        await settle()
        assert all(work.done() for work in works)
        for error in await asyncio.gather(*works, return_exceptions=True):
            assert type(error) is RemoteError, error
            assert (error.origin, error.type_name) == (0, leave.__name__)
        assert comms[0].pending() == []
        await in_step(comms)


class Interrupted:
    """Ctrl-C arrives while it is being pickled."""

    def __reduce__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("verb", OBJECT_VERBS)
async def test_ctrl_c_while_a_value_is_taken_takes_the_operations_number(world, verb):
    async with world(3, timeout=5.0) as comms:
        for odd in range(len(comms)):
            with pytest.raises(KeyboardInterrupt):
                pass_on(comms[odd], verb, Interrupted(), odd)
            others = [comm for comm in comms if comm.rank != odd]
            for error in await outcomes(others, lambda comm, odd=odd: pass_on(comm, verb, [1], odd)):
                assert type(error) is RemoteError, error
                assert error.origin == odd
                assert "interrupted by KeyboardInterrupt" in str(error)
            await in_step(comms)


# -- where a call may be made ---------------------------------------------------------------------------------


@pytest.mark.inline_only("has a test of its own in tests/test_bridged.py: the message is another")
async def test_from_another_thread_without_a_loop(world):
    async with world(2) as comms:
        with pytest.raises(
            RuntimeError, match=r"was opened in event loop .* comes from None\. .*asynccoll\.sync"
        ):
            await asyncio.get_running_loop().run_in_executor(None, comms[0].barrier)
        await in_step(comms)


@pytest.mark.inline_only("calls may come from any loop: tests/test_bridged.py")
async def test_from_another_loop(world):
    async with world(2) as comms:

        async def call():
            comms[0].barrier()

        def elsewhere():
            asyncio.run(call())

        thread_error = []

        def guarded():
            try:
                elsewhere()
            except RuntimeError as error:
                thread_error.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        assert re.search(
            r"was opened in event loop .* comes from <.*\. Call from the loop", str(thread_error[0])
        )
        await in_step(comms)


async def test_before_init_and_after_shutdown():
    for call in (
        lambda: asynccoll.allreduce(1),
        lambda: asynccoll.allreduce_(np.ones(1)),
        lambda: asynccoll.allreduce_tree([1]),
        lambda: asynccoll.broadcast(1),
        lambda: asynccoll.allgather(1),
        lambda: asynccoll.barrier(),
        lambda: asynccoll.rank(),
        lambda: asynccoll.world_size(),
        lambda: asynccoll.get_communicator(),
    ):
        with pytest.raises(NotInitialized, match="open one with"):
            call()
    await asynccoll.shutdown()  # silent, there is nothing to close
    async with asynccoll.init():
        assert await asynccoll.allreduce(3) == 3
        await asynccoll.shutdown()
        with pytest.raises(
            NotInitialized, match=r"allreduce\(\) was called before init\(\) or after shutdown\(\)"
        ):
            asynccoll.allreduce(1)
        await asynccoll.shutdown()


async def test_two_inits_at_once_and_one_after_another():
    async with asynccoll.init() as comm:
        with pytest.raises(AlreadyInitialized, match=r"call shutdown\(\) first, or connect\(\)") as caught:
            await asynccoll.init()
        assert isinstance(caught.value, RuntimeError)
        async with asynccoll.connect() as second:
            assert second is not comm
        assert asynccoll.get_communicator() is comm
    async with asynccoll.init():
        assert asynccoll.world_size() == 1


async def test_a_failed_init_leaves_nothing_behind():
    with pytest.raises(ValueError, match="rank=5"):
        await asynccoll.init("tcp://127.0.0.1:1", rank=5, world_size=2)
    with pytest.raises(NotInitialized):
        asynccoll.rank()
    async with asynccoll.init() as comm:
        assert comm.world_size == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ssl", object()),
        ("safe", 1),
        ("transport", "carrier pigeon"),
        ("transport", None),
        ("streams", 2),
        ("streams", 0),
        ("compression", "zip"),
        ("progress", "fibre"),
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", "5"),
        ("init_timeout", 0),
        ("init_timeout", math.nan),
        ("liveness_timeout", -1),
        ("address", "udp://127.0.0.1:1"),
        ("address", 5),
        ("rank", 0),
        ("rank", -1),
        ("rank", 1.5),
        ("world_size", 0),
        ("world_size", 2),
        ("world_size", True),
    ],
)
async def test_an_init_option_that_is_not_there_is_named_with_its_value(option, value):
    with pytest.raises(ValueError, match=option) as caught:
        await asynccoll.init(**{option: value})
    assert f"{option}={value!r}" in str(caught.value)
    with pytest.raises(NotInitialized):
        asynccoll.rank()


# -- what every error says (a message that does not name the rank to look at is a defect) ----------------------


async def one_of_each(world):
    """An example of each error that an operation can end with, as rank 0 of 3 sees it, by class name."""
    errors = []
    async with world(3, timeout=5.0) as comms:
        others = [comm for comm in comms if comm.rank != 2]
        await in_step(comms)
        errors += await outcomes(
            comms, lambda comm: comm.allreduce(np.ones(9, "f4" if comm.rank == 2 else "f8"))
        )
        errors += await outcomes(others, lambda comm: comm.broadcast(1, timeout=0.01))
        await outcomes(comms[2:3], lambda comm: comm.broadcast(1))
        errors += await outcomes(comms, lambda comm: comm.allreduce(1, "mean" if comm.rank == 2 else "sum"))
        work = comms[0].allgather(1)
        comms[2].allgather(1).cancel()
        errors += await asyncio.gather(work, return_exceptions=True)
        await outcomes(comms[1:2], lambda comm: comm.allgather(1))
        work = comms[0].barrier()
        await comms[2].close()
        errors += await asyncio.gather(work, return_exceptions=True)
    async with world(3) as comms:
        work = comms[0].allreduce_tree([1])
        crash(comms[2])
        errors += await asyncio.gather(work, return_exceptions=True)
    return {
        type(error).__name__: error
        for error in errors
        if isinstance(error, CollectiveError) and error.rank == 0
    }


EXPECTED = {
    CollectiveMismatch: (
        "rank 0: allreduce #2 on 'world' after T s: ranks disagree on dtype: rank 2 has float32; ranks 0, 1 have float64. "
        "Called at: ranks 0, 1, 2 test_errors_local.py:N. "
        "Make the same call on every rank."
    ),
    CollectiveTimeout: (
        "rank 0: broadcast #3 on 'world' after T s: timed out (limit T s): rank 2 did not call it. "
        "Check that all ranks make the same calls in the same order, or raise timeout=."
    ),
    RemoteError: (
        "rank 0: allreduce #4 on 'world' after T s: failed on rank 2 with ValueError: op='mean' is not a reduction: use one of "
        "sum, avg, prod, min, max, band, bor, bxor, or a callable\n--- traceback of rank 2 ---\n..."
    ),
    CollectiveCancelled: (
        "rank 0: allgather #5 on 'world' after T s: cancelled by rank 2. The communicator is in step: the next operation works."
    ),
    CommunicatorClosed: (
        "rank 0: barrier #6 on 'world' after T s: rank 2 left the communicator (closed). "
        "Every rank must finish its operations before it closes."
    ),
    PeerLost: (
        "rank 0: allreduce_tree #0 on 'world' after T s: lost rank 2 (connection closed without goodbye). "
        "Look at that process's own output for the cause; go on without it by shrink(), or close this communicator and start again."
    ),
}


def without_chance(text):
    text = re.sub(r"(--- traceback of rank \d ---\n).*", r"\1...", text, flags=re.DOTALL)
    text = re.sub(r"\.py:\d+", ".py:N", text)
    text = re.sub(r"; at 127\.0\.0\.1:\d+\)", ")", text)  # over TCP
    return re.sub(r"\d+\.?\d* s\b", "T s", text)


@pytest.mark.fixed_size("the messages are spelled out for three ranks")
async def test_every_message_names_operation_number_group_ranks_and_time(world):
    errors = await one_of_each(world)
    assert {name: without_chance(str(error)) for name, error in errors.items()} == {
        cls.__name__: text for cls, text in EXPECTED.items()
    }
    assert in_virtual_time() or re.search(r"; at 127\.0\.0\.1:\d+\)", str(errors["PeerLost"]))
    for error in errors.values():
        assert f"after {error.elapsed:.3f} s" in str(error)
        assert error.elapsed >= 0


async def test_every_error_survives_pickling_with_its_data(world):
    errors = list((await one_of_each(world)).values())
    with pytest.raises(RendezvousError) as caught:
        await asynccoll.connect("tcp://127.0.0.1:9", rank=1, world_size=2, secret="s", init_timeout=0.05)
    errors.append(caught.value)
    with pytest.raises(NotInitialized) as unready:
        asynccoll.rank()
    errors.append(unready.value)
    assert len(errors) == 8
    for error in errors:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            copy = pickle.loads(pickle.dumps(error, protocol))
            assert type(copy) is type(error)
            assert str(copy) == str(error)
            assert copy.args == error.args
            data, copied = dict(vars(error)), dict(vars(copy))
            original, twin = data.pop("original", None), copied.pop("original", None)
            assert copied == data
            assert (type(twin), str(twin)) == (type(original), str(original))


def test_there_is_no_default_communicator_in_this_process():
    # Guards the tests above: a leftover one would make them pass for the wrong reason.
    with pytest.raises(NotInitialized):
        asynccoll.rank()
    assert not {name for name in os.environ if name.startswith("ASYNCCOLL_")}
