"""Objects that hold large arrays: their memory is lent, not copied, and given back; what arrives is everyone's own and writable."""

import asyncio
import gc
import operator
import random

import ml_dtypes
import numpy as np
import pytest
import torch
from faults import in_step, settle, turns
from ranks import each, filled, on_all, ordinary, outcomes

from asynccoll import CollectiveCancelled, RemoteError, associative, pickling
from asynccoll.calls.received import Objects
from asynccoll.sim.driver import Conditions

COUNT = ordinary(160_000, 20_000)
"""Elements of 8 bytes: two slices of copying and several frames."""
BULK = Conditions(delay=0.002, piece=1 << 17, split=True, buffer=1 << 19)


def join(a, b):
    """Adds in place: what it gets must be its own."""
    a["x"] += b["x"]
    return a


class Case:
    """One call on all ranks with a dict around an array in memory that the test can take back."""

    def __init__(self, verb, size, count=COUNT, root=0):
        self.verb, self.size, self.root = verb, size, root
        self.memory = [bytearray(8 * count) for _ in range(size)]
        for rank in range(size):
            self.array(rank)[:] = rank + 1

    def array(self, rank):
        return np.frombuffer(self.memory[rank], np.int64)

    def start(self, comm):
        """Nothing but the operation refers to the memory afterwards."""
        rank, root = comm.rank, self.root
        own = {"x": self.array(rank), "rank": rank}
        match self.verb:
            case "broadcast":
                return comm.broadcast(own if rank == root else None, root)
            case "allgather":
                return comm.allgather(own)
            case "gather":
                return comm.gather(own, root)
            case "scatter":
                return comm.scatter([own] * self.size if rank == root else None, root)
            case "alltoall":
                return comm.alltoall([own] * self.size)
            case "allreduce":
                return comm.allreduce(own, join)
            case "associative":
                return comm.allreduce(own, associative(join))
            case "reduce":
                return comm.reduce(own, join, root)
            case "scan":
                return comm.scan(own, join)
            case "exscan":
                return comm.exscan(own, join)
        raise ValueError(self.verb)

    def right(self, rank):
        """What each array in the result of ``rank`` is full of."""
        size = self.size
        total = size * (size + 1) // 2
        match self.verb:
            case "broadcast" | "scatter":
                return [self.root + 1]
            case "allgather" | "alltoall":
                return list(range(1, size + 1))
            case "gather":
                return list(range(1, size + 1)) if rank == self.root else []
            case "reduce":
                return [total] if rank == self.root else []
            case "scan":
                return [(rank + 1) * (rank + 2) // 2]
            case "exscan":
                return [rank * (rank + 1) // 2] if rank else []
        return [total]

    def check(self, result, rank):
        """The arrays of a result, which is right."""
        found = arrays(result)
        assert [int(array[0]) for array in found] == self.right(rank)
        for array in found:
            assert (array == array[0]).all()
            assert array.flags.writeable
        return found

    def unchanged(self):
        return all((self.array(rank) == rank + 1).all() for rank in range(self.size))

    def free(self, rank):
        """Nothing refers to the memory of ``rank`` any more."""
        try:
            self.memory[rank].append(0)  # refused while there is a view of it
        except BufferError:
            return False
        del self.memory[rank][-1]
        return True


def arrays(result):
    if result is None:
        return []
    return [one["x"] for one in (result if isinstance(result, list) else [result])]


VERBS = (
    *("broadcast", "allgather", "gather", "scatter", "alltoall"),
    *("allreduce", "associative", "reduce", "scan", "exscan"),
)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("verb", VERBS)
async def test_what_arrives_is_everyones_own_and_writable_and_no_input_is_changed(world, verb, size):
    async with world(size, conditions=BULK) as comms:
        size = len(comms)
        for root in {0, size - 1}:
            case = Case(verb, size, root=root)
            results = await on_all(comms, case.start)
            found = [array for rank, result in enumerate(results) for array in case.check(result, rank)]
            mine = [case.array(rank) for rank in range(size)]
            for number, array in enumerate(found):
                assert not any(np.shares_memory(array, other) for other in mine + found[:number])
                array[:] = -1
            assert case.unchanged()
            await in_step(comms)


@pytest.mark.parametrize("verb", VERBS)
async def test_nothing_refers_to_the_memory_once_an_operation_is_complete(world, verb):
    gc.disable()  # what only the cycle collector finds is not given back
    try:
        async with world(3, conditions=BULK) as comms:
            size = len(comms)
            case = Case(verb, size)
            for rank, result in enumerate(await on_all(comms, case.start)):
                case.check(result, rank)
            del result
            await turns(2)  # the loop itself holds the future whose callback it is running
            assert [case.free(rank) for rank in range(size)] == [True] * size
            assert case.unchanged()
    finally:
        gc.enable()


@pytest.mark.parametrize("verb", VERBS)
async def test_nothing_refers_to_the_memory_once_a_cancel_has_returned(world, verb):
    gc.disable()
    try:
        async with world(3, conditions=BULK) as comms:
            size = len(comms)
            for number, wait in enumerate((0, 1, 2, 4, 7, 11, 16)):
                case, origin = Case(verb, size, root=number % size), number % size
                works = [case.start(comm) for comm in comms]
                await turns(wait)
                if works[origin].cancel():
                    assert case.free(origin)
                ends = await asyncio.gather(*works, return_exceptions=True)
                for rank, end in enumerate(ends):
                    if not isinstance(end, BaseException):
                        case.check(end, rank)
                    elif rank != origin:
                        assert type(end) is CollectiveCancelled
                        assert end.origin == origin
                del works, ends, end
                await turns(2)
                assert [case.free(rank) for rank in range(size)] == [True] * size
                assert case.unchanged()
                await in_step(comms)
    finally:
        gc.enable()


class Refuses:
    """Pickles, with its array beside it; does not unpickle where rank ``only`` receives (None: anywhere)."""

    def __init__(self, array):
        self.array = array

    def __setstate__(self, state):
        raise LookupError("not here")


def choke(a, b):
    raise LookupError("not here")


FAILURES = {
    "the function raises": lambda comm, array: comm.allreduce(array, choke),
    "an operand does not unpickle": lambda comm, array: comm.allreduce(Refuses(array), operator.add),
    "a scan's does not": lambda comm, array: comm.scan(Refuses(array), operator.add),
    "a reduction's does not": lambda comm, array: comm.reduce(
        Refuses(array), operator.add, comm.world_size - 1
    ),
    "a result does not pickle": lambda comm, array: comm.allreduce(array, lambda a, b: (n for n in ())),
    "an element does not unpickle": lambda comm, array: comm.allgather(Refuses(array)),
    "a broadcast does not": lambda comm, array: comm.broadcast(Refuses(array)),
}


@pytest.mark.parametrize("start", FAILURES.values(), ids=FAILURES)
async def test_after_an_error_nothing_refers_to_the_memory_and_the_mesh_is_in_step(world, start):
    """Also while the errors are kept: a traceback's frames would refer to what was lent."""
    gc.disable()
    try:
        async with world(3, conditions=BULK) as comms:
            case = Case("", len(comms))
            errors = await outcomes(comms, lambda comm: start(comm, case.array(comm.rank)))
            for error in errors:
                assert type(error) in (RemoteError, LookupError, TypeError), error
                if type(error) is RemoteError:
                    assert error.type_name in ("LookupError", "TypeError")
                    assert type(error.original) in (LookupError, TypeError)
                    assert "not here" in str(error) or "pickle" in str(error)
                    assert "Traceback" in error.remote_traceback
            await turns(2)
            assert [case.free(rank) for rank in range(case.size)] == [True] * case.size
            assert case.unchanged()
            await in_step(comms)
    finally:
        gc.enable()


@pytest.mark.parametrize("verb", ["broadcast", "allgather", "allreduce", "scan", "gather"])
async def test_a_value_for_which_there_is_no_memory_is_an_error_everywhere(world, verb, monkeypatch):
    fresh = pickling.fresh

    def scarce(nbytes):
        if nbytes >= 8 * COUNT:
            raise MemoryError(f"no {nbytes} bytes")
        return fresh(nbytes)

    async with world(2, conditions=BULK) as comms:
        monkeypatch.setattr(pickling, "fresh", scarce)
        case = Case(verb, len(comms))
        errors = await outcomes(comms, case.start)
        assert any(type(error) is MemoryError for error in errors)
        for error in errors:
            if verb == "gather" and error is None:
                continue  # its part was done
            assert type(error) is MemoryError or (
                type(error) is RemoteError and error.type_name == "MemoryError"
            ), error
        await in_step(comms)
        monkeypatch.undo()
        for rank, result in enumerate(await on_all(comms, case.start)):
            case.check(result, rank)


@pytest.mark.parametrize("verb", VERBS)
async def test_the_call_copies_no_large_array_however_late_rank_0_is(world, verb, monkeypatch):
    """The copies are made while the operation runs, in slices; those of a fold when an operand of another rank is there."""
    made, copies = [], []
    own = Objects.own

    def counted(self, item):
        copies.append(item)
        return own(self, item)

    def snapshot(packed):
        made.append(packed)
        return pickling.Packed(packed.pickle, tuple(memoryview(bytearray(one)) for one in packed.buffers))

    async with world(3, conditions=BULK) as comms:
        case = Case(verb, len(comms))
        monkeypatch.setattr(Objects, "own", counted)
        monkeypatch.setattr(pickling.Packed, "owned", snapshot)
        works = []
        for comm in reversed(comms):
            if comm.rank == 0:
                await settle()
            before = len(copies)
            made.clear()  # inner ranks of a tree may have folded meanwhile
            works.insert(0, case.start(comm))
            assert made == []
            if verb in ("allreduce", "associative", "reduce", "scan", "exscan") and comm.rank == 0:
                assert len(copies) == before
            else:
                assert comm.pending()  # at least a slice of its own copy is left
        for rank, result in enumerate(await asyncio.gather(*works)):
            case.check(result, rank)


async def test_many_at_once_keep_apart(world):
    count = ordinary(20_000, 3_000)
    async with world(2, conditions=BULK) as comms:
        size = len(comms)

        async def rank(comm):
            works = [comm.allreduce(np.full(count, comm.rank + number), np.add) for number in range(20)]
            return await asyncio.gather(*works)

        for results in await on_all(comms, rank):
            for number, result in enumerate(results):
                assert (result == size * number + size * (size - 1) // 2).all()


VALUES = {
    "numpy": lambda: {"a": np.arange(COUNT).reshape(4, -1), "n": [1, (2.5, "x")]},
    "Fortran order": lambda: [np.asfortranarray(np.arange(COUNT).reshape(4, -1))],
    "read-only": lambda: [np.broadcast_to(np.arange(4.0), (5000, 4)), np.frombuffer(bytes(40_000), np.uint8)],
    "bfloat16": lambda: [(np.arange(COUNT) % 256).astype(ml_dtypes.bfloat16)],
    "tensor": lambda: {"w": torch.arange(COUNT).reshape(4, -1).t(), "b": torch.ones(5, dtype=torch.bfloat16)},
    "parameter": lambda: [torch.nn.Parameter(torch.arange(float(COUNT)))],
    "by cloudpickle": lambda: [np.arange(COUNT), lambda: 3],
    "many": lambda: [np.full(3000, number) for number in range(ordinary(1100, 40))],
    "a large pickle": lambda: [b"x" * 300_000, np.arange(COUNT)],
    "just in the pickle": lambda: [np.zeros(pickling.OUT_OF_BAND - 1, np.uint8)],
    "just beside it": lambda: [np.zeros(pickling.OUT_OF_BAND, np.uint8)],
}


def leaves(value):
    """What a value holds, comparable: kinds, dtypes, shapes, layouts and bytes."""
    if isinstance(value, dict):
        return {key: leaves(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [leaves(part) for part in value]
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
        return type(value), value.dtype, value.shape, value.requires_grad, bits
    if isinstance(value, np.ndarray):
        order = value.flags.f_contiguous and not value.flags.c_contiguous
        return type(value), value.dtype, value.shape, order, value.tobytes()
    return value() if callable(value) else value


@pytest.mark.torch
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
async def test_every_kind_of_value_travels_by_every_road(world, make):
    async with world(2, conditions=BULK) as comms:
        right = leaves(make())
        for result in await each(comms, "broadcast", filled(comms, [make(), None])):
            assert leaves(result) == right
        for results in await each(comms, "allgather", [make() for _ in comms]):
            assert [leaves(result) for result in results] == [right] * len(comms)
        for result in await each(comms, "allreduce", [make() for _ in comms], lambda a, b: b):
            assert leaves(result) == right
        for dst in (0, 1):
            sent = comms[0].send(make(), dst)
            assert leaves(await comms[dst].recv(0)) == right
            await sent


@pytest.mark.parametrize("count", [3000, COUNT])
async def test_a_message_lends_its_array_until_it_is_sent(world, count):
    gc.disable()
    try:
        async with world(2, conditions=BULK) as comms:
            case = Case("", 2, count)
            sent = comms[0].send([case.array(0)], 1)
            (received,) = await comms[1].recv()
            await sent
            assert (received == 1).all()
            received[:] = 5
            assert case.unchanged()
            del sent
            await turns(2)
            assert case.free(0)
    finally:
        gc.enable()


@pytest.mark.parametrize("wait", [0, 1, 3, 6, 10])
async def test_a_cancelled_message_gives_its_array_back_at_once(world, wait):
    gc.disable()
    try:
        async with world(2, conditions=BULK) as comms:
            case = Case("", 2)
            sent = comms[0].send([case.array(0)], 1)
            receiving = comms[1].recv()
            await turns(wait)
            if sent.cancel():
                assert case.free(0)
            comms[0].send("next", 1)
            result = await receiving
            if result != "next":
                assert (result[0] == 1).all()
                assert await comms[1].recv() == "next"
            await in_step(comms)
    finally:
        gc.enable()


async def test_a_message_to_oneself_is_a_snapshot(world):
    async with world(2) as comms:
        array = np.arange(COUNT)
        await comms[0].send([array], 0)
        array[:] = -1
        (received,) = await comms[0].recv()
        assert received.tolist() == list(range(COUNT))


async def test_every_rank_gets_the_same_bits(world):
    rng = np.random.default_rng(3)
    async with world(4, conditions=BULK) as comms:
        values = [{"x": rng.standard_normal(COUNT)} for _ in comms]
        for function in (join, associative(join)):
            first, *others = await each(comms, "allreduce", values, function)
            for result in others:
                assert result["x"].tobytes() == first["x"].tobytes()


class Doubles:
    """Its array is twice as large after each journey, in the memory that it came in."""

    def __init__(self, array):
        self.array = array

    def __setstate__(self, state):
        self.array = state["array"]
        self.array *= 2


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
async def test_unpickling_that_writes_to_its_array_does_not_reach_other_ranks(world, size, algorithm):
    """A rank that passes bytes on sends them from the memory of its own value."""
    async with world(size, conditions=BULK) as comms:
        size = len(comms)
        values = [Doubles(np.full(COUNT // 4, comm.rank + 1)) for comm in comms]
        for result in await each(comms, "broadcast", filled(comms, [values[0], None])):
            assert (result.array == 2).all()
        for results in await each(comms, "allgather", values, algorithm=algorithm):
            assert [int(result.array[0]) for result in results] == [2 * (rank + 1) for rank in range(size)]
            assert all((result.array == result.array[0]).all() for result in results)
        for result in await each(comms, "allreduce", values, lambda a, b: a):
            assert (result.array == 4).all()


@pytest.mark.parametrize("seed", range(3))
async def test_calls_at_random_times_with_cancels_between_give_right_results(world, seed):
    rng = random.Random(seed)
    async with world(3, conditions=BULK) as comms:
        for number in range(ordinary(12, 4)):
            case = Case(rng.choice(VERBS), len(comms), COUNT // 8, root=rng.randrange(len(comms)))
            order, works = list(comms), {}
            rng.shuffle(order)
            for comm in order:
                works[comm.rank] = case.start(comm)
                await turns(rng.randrange(3))
            if number % 3 == 2:
                works[order[0].rank].cancel()
            ends = await asyncio.gather(*works.values(), return_exceptions=True)
            for rank, end in zip(works, ends, strict=True):
                if not isinstance(end, BaseException):
                    case.check(end, rank)
                else:
                    assert number % 3 == 2
            assert case.unchanged()
        await in_step(comms)
