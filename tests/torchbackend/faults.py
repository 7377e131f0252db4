"""What goes wrong: ranks that disagree, that leave, that come too late. Every rank must hear of it, by an error."""

import datetime

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torchbackend.suite import raised, scenario
from tests.torchbackend.training import batch, layers

SHORT = 2.0
"""Seconds that a collective may take here."""


def disagreement(call):
    """``call`` raises on every rank; asynccoll says which rank did what."""

    def run(w):
        w.open(SHORT)
        error = raised(lambda: call(w))
        kind = type(error).__name__
        if w.backend != "gloo":
            assert kind == "CollectiveMismatch", f"{kind}: {error}"
            assert isinstance(error, dist.DistBackendError)
        return {"raised": True}

    return run


def one_else(w, one, other):
    """What the last rank passes, and what the others pass."""
    return other if w.rank == w.size - 1 else one


@scenario("mismatch: dtype of all_reduce", fresh=True)
@disagreement
def dtype(w):
    value = torch.ones(4, dtype=one_else(w, torch.float32, torch.int32))
    dist.all_reduce(value)
    return value


@scenario("mismatch: shape of all_reduce", fresh=True)
@disagreement
def shape(w):
    value = torch.ones(one_else(w, 4, 6))
    dist.all_reduce(value)
    return value


@scenario("mismatch: op of all_reduce", fresh=True)
@disagreement
def operation(w):
    value = torch.full((4,), 3.0)
    dist.all_reduce(value, one_else(w, dist.ReduceOp.SUM, dist.ReduceOp.MAX))
    return value


@scenario("mismatch: root of broadcast", fresh=True)
@disagreement
def root(w):
    value = torch.full((4,), float(w.rank))
    dist.broadcast(value, one_else(w, 0, 1))
    return value


@scenario("mismatch: one collective and another", fresh=True)
@disagreement
def verbs(w):
    value = torch.full((4,), float(w.rank))
    if one_else(w, True, False):
        dist.all_reduce(value)
    else:
        dist.broadcast(value, 0)
    return value


@scenario("a call that is wrong on one rank", fresh=True)
def wrong_call(w):
    w.open(SHORT)
    outs = [torch.zeros(3) for _ in range(one_else(w, w.size, w.size + 1))]
    error = raised(lambda: dist.all_gather(outs, torch.ones(3)))
    return {"raised": bool(str(error))}


def gone(w):
    """Whether this rank was the last. It has left then, and the others are without it."""
    w.open(60)
    dist.barrier()
    if w.rank < w.size - 1:
        return False
    w.close()
    return True


@scenario("a rank that leaves", fresh=True)
def leaves(w):
    if not gone(w):
        work = dist.all_reduce(torch.ones(4), async_op=True)
        error = raised(work.wait)
        assert w.backend == "gloo" or isinstance(error, dist.DistBackendError), repr(error)
    return {"raised": True}


@scenario("a rank that leaves, heard by a future", fresh=True)
def leaves_future(w):
    if not gone(w):
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        raised(future.then(lambda done: done.wait()[0] * 2).wait)
    return {"raised": True}


@scenario("a rank that leaves, in the backward of DDP", fresh=True)
def leaves_backward(w):
    w.open(60)
    model = DDP(layers())
    inputs, targets = batch(w.rank, 0)
    loss = nn.functional.mse_loss(model(inputs), targets)
    if w.rank == w.size - 1:
        w.close()
        return {"raised": True}
    raised(loss.backward)
    return {"raised": True}


@scenario("a disagreement in the backward of DDP", fresh=True)
def disagreeing_backward(w):
    w.open(SHORT)
    model = DDP(layers())
    inputs, targets = batch(w.rank, 0)
    loss = nn.functional.mse_loss(model(inputs), targets)
    error = raised(
        loss.backward
        if one_else(w, True, False)
        else lambda: dist.all_reduce(torch.ones(7, dtype=torch.float64))
    )
    assert w.backend == "gloo" or "CollectiveMismatch" in f"{type(error).__name__} {error}", repr(error)
    return {"raised": True}


@scenario("a disagreement in a functional collective", fresh=True)
def disagreeing_functional(w):
    w.open(SHORT)
    value = torch.ones(one_else(w, 4, 6))
    error = raised(lambda: funcol.all_reduce(value, "sum", dist.group.WORLD) + 0)
    assert w.backend == "gloo" or "disagree" in str(error) or "Mismatch" in str(error), repr(error)
    return {"raised": True}


@scenario("a rank that does not come in time", fresh=True)
def late(w):
    w.open(2)
    dist.barrier()
    if w.rank == w.size - 1:
        w.store.get("heard")  # set by rank 0, once it has raised
        return {"raised": True}
    error = raised(lambda: dist.all_reduce(torch.ones(4)))
    if w.rank == 0:
        w.store.set("heard", "")
    assert w.backend == "gloo" or isinstance(error, dist.DistBackendError), repr(error)
    return {"raised": True}


@scenario("wait with a timeout", fresh=True)
def wait_timeout(w):
    w.open(60)
    dist.barrier()
    out = torch.zeros(4)
    if w.rank == 0:
        work = dist.irecv(out, 1)
        raised(lambda: work.wait(datetime.timedelta(milliseconds=200)))
        w.store.set("heard", "")
    elif w.rank == 1:
        w.store.get("heard")
    return {"raised": True}


@scenario("a message of another size", fresh=True)
def message_size(w):
    w.open(SHORT)
    if w.rank == 0:
        dist.send(torch.ones(6), 1)
        w.store.get("heard")
    elif w.rank == 1:
        out = torch.zeros(4)
        try:
            raised(lambda: dist.recv(out, 0))
        finally:
            w.store.set("heard", "")
    return {"raised": True}


@scenario("after an error, the next collective works", fresh=True)
def afterwards(w):
    w.open(SHORT)
    raised(lambda: dist.all_reduce(torch.ones(one_else(w, 4, 6))))
    value = torch.ones(3)
    dist.all_reduce(value)
    return {"value": value}
