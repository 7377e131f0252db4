"""Functional collectives, collectives with gradients, and torch.compile: what reaches a group through torch's C++ only."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as with_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torchbackend.suite import attempt, expect, scenario
from tests.torchbackend.training import batch, layers, train


def mine(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(4, 2) + 10 * rank


def everyone(w) -> list[torch.Tensor]:
    return [mine(rank) for rank in w.ranks]


@scenario("functional all_reduce", same=("value",))
def all_reduce(w):
    total = funcol.wait_tensor(funcol.all_reduce(mine(w.rank), "sum", dist.group.WORLD))
    expect(total, sum(everyone(w)))
    ops = {
        name: attempt(lambda name=name: reduced(w, name)) for name in ("sum", "avg", "max", "min", "product")
    }
    return {"value": total, "ops": ops}


def reduced(w, op: str) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_reduce(mine(w.rank), op, dist.group.WORLD))


@scenario("functional all_gather_tensor", same=("value",))
def all_gather(w):
    first = funcol.all_gather_tensor(mine(w.rank), 0, dist.group.WORLD)
    second = funcol.all_gather_tensor(mine(w.rank), 1, dist.group.WORLD)
    expect(first + 0, torch.cat(everyone(w)))
    expect(second + 0, torch.cat(everyone(w), 1))
    return {"value": [first + 0, second + 0]}


@scenario("functional reduce_scatter_tensor")
def reduce_scatter(w):
    value = torch.cat(everyone(w)) * (w.rank + 1)
    part = funcol.reduce_scatter_tensor(value, "sum", 0, dist.group.WORLD) + 0
    expect(part, mine(w.rank) * sum(rank + 1 for rank in w.ranks))
    return {"value": part}


@scenario("functional broadcast", same=("value",))
def broadcast(w):
    value = funcol.broadcast(mine(w.rank), 1, dist.group.WORLD) + 0
    expect(value, mine(1))
    return {"value": value}


@scenario("functional all_to_all_single, permute_tensor")
def all_to_all(w):
    rows = torch.arange(w.size * 2.0).reshape(-1, 1) + 100 * w.rank
    even = funcol.all_to_all_single(rows, None, None, dist.group.WORLD) + 0
    expect(
        even.flatten(), torch.cat([torch.tensor([0.0, 1.0]) + 2 * w.rank + 100 * rank for rank in w.ranks])
    )
    turned = funcol.permute_tensor(rows, [(rank + 1) % w.size for rank in w.ranks], dist.group.WORLD) + 0
    expect(turned, torch.arange(w.size * 2.0).reshape(-1, 1) + 100 * w.left)
    sizes = [peer + 1 for peer in w.ranks]
    uneven = torch.full((sum(sizes), 2), float(w.rank))
    got = funcol.all_to_all_single(uneven, [w.rank + 1] * w.size, sizes, dist.group.WORLD) + 0
    expect(got[:, 0], torch.arange(float(w.size)).repeat_interleave(w.rank + 1))
    return {"even": even, "turned": turned, "uneven": got}


@scenario("functional, several tensors at once", same=("value",))
def coalesced(w):
    pair = [mine(w.rank), mine(w.rank) * 2]
    totals = [one + 0 for one in funcol.all_reduce_coalesced(pair, "sum", dist.group.WORLD)]
    gathered = [one + 0 for one in funcol.all_gather_into_tensor_coalesced(pair, dist.group.WORLD)]
    expect(totals[1], sum(everyone(w)) * 2)
    expect(gathered[1], torch.cat(everyone(w)) * 2)
    wide = [torch.cat(everyone(w)), torch.cat(everyone(w)) * 3]
    parts = [one + 0 for one in funcol.reduce_scatter_tensor_coalesced(wide, "sum", [0, 0], dist.group.WORLD)]
    expect(parts[1], mine(w.rank) * 3 * w.size)
    return {"value": totals + gathered, "parts": parts}


@scenario("functional, in place", same=("value",))
def in_place(w):
    name = dist.group.WORLD.group_name
    value = mine(w.rank)
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(value, "sum", name))
    expect(value, sum(everyone(w)))
    return {"value": value}


@scenario(
    "functional all_gather_into_tensor_out",
    same=("value",),
    known="torch 2.13 does not ask a Python group for it",
)
def gather_out(w):
    target = torch.empty(4 * w.size, 2)
    op = torch.ops._c10d_functional.all_gather_into_tensor_out
    done = op(mine(w.rank), w.size, dist.group.WORLD.group_name, out=target)
    done = torch.ops._c10d_functional.wait_tensor(done)
    expect(done, torch.cat(everyone(w)))
    return {"value": done}


@scenario("functional, with gradients")
def autograd(w):
    value = mine(w.rank).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(value, 0, dist.group.WORLD)
    (gathered * (w.rank + 1)).sum().backward()
    expect(value.grad, torch.full((4, 2), float(sum(rank + 1 for rank in w.ranks))))
    wide = torch.cat(everyone(w)).requires_grad_()
    funcol.reduce_scatter_tensor_autograd(wide, "sum", 0, dist.group.WORLD).mul(w.rank + 1).sum().backward()
    expect(wide.grad, torch.cat([torch.full((4, 2), rank + 1.0) for rank in w.ranks]))
    rows = torch.ones(w.size, 2, requires_grad=True)
    ones = [1] * w.size
    funcol.all_to_all_single_autograd(rows, ones, ones, dist.group.WORLD).mul(w.rank + 1).sum().backward()
    expect(rows.grad, torch.tensor([[rank + 1.0] * 2 for rank in w.ranks]))
    return {"value": [value.grad, wide.grad, rows.grad]}


@scenario("torch.distributed.nn, with gradients")
def nn_functional(w):
    def gradient(call):
        value = mine(w.rank).requires_grad_()
        call(value).sum().mul(w.rank + 1).backward()
        return value.grad

    calls = {
        "all_reduce": with_gradients.all_reduce,
        "broadcast": lambda value: with_gradients.broadcast(value, 0),
        "all_gather": lambda value: torch.stack(with_gradients.all_gather(value)),
        "reduce": lambda value: with_gradients.reduce(value, 0),
        "all_to_all_single": lambda value: with_gradients.all_to_all_single(torch.empty(4, 2), value),
    }
    return {"cases": {name: attempt(lambda call=call: gradient(call)) for name, call in calls.items()}}


@scenario("torch.compile of DDP", same=("weights",), seconds=120, slow=True)
def compiled_ddp(w):
    torch._dynamo.reset()
    model = DDP(layers())
    return train(torch.compile(model, backend="aot_eager"), w) | train(model, w)


@scenario("torch.compile of functional collectives", same=("value",), seconds=120, slow=True)
def compiled_functional(w):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(value):
        total = funcol.all_reduce(value * 2, "sum", dist.group.WORLD)
        gathered = funcol.all_gather_tensor(value + 1, 0, dist.group.WORLD)
        part = funcol.reduce_scatter_tensor(gathered + 0, "sum", 0, dist.group.WORLD)
        return total + part.sum() - part.sum(), gathered, part

    total, gathered, part = step(mine(w.rank))
    expect(total, sum(everyone(w)) * 2)
    expect(gathered, torch.cat(everyone(w)) + 1)
    expect(part, (mine(w.rank) + 1) * w.size)
    return {"value": [total, gathered], "part": part}


@scenario("torch.compile of dist.all_reduce", same=("value",), seconds=120, slow=True)
def compiled_verb(w):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(value):
        doubled = value * 2
        dist.all_reduce(doubled)
        return doubled + 1

    total = step(mine(w.rank))
    expect(total, sum(everyone(w)) * 2 + 1)
    return {"value": total}


@scenario("torch.compile of a training step", seconds=120, slow=True)
def compiled_step(w):
    torch._dynamo.reset()
    model = layers()

    @torch.compile(backend="aot_eager")
    def loss(inputs, targets):
        return funcol.all_reduce(nn.functional.mse_loss(model(inputs), targets), "sum", dist.group.WORLD)

    value = loss(*batch(w.rank, 0))
    return {"loss": value + 0}
