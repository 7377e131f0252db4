"""FSDP, DTensor, tensor and pipeline parallelism, and checkpoints: weights and whole tensors, put together again."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as tensors
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.torchbackend.suite import World, expect, scenario
from tests.torchbackend.training import STEPS, batch, layers, step


def mesh_of(w: World):
    return init_device_mesh("cpu", (w.size,), mesh_dim_names=("all",))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor put together; any other tensor as it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(model: nn.Module, w: World) -> dict:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for number in range(STEPS):
        step(model, optimizer, w, number)
    return {"weights": [whole(value) for value in model.state_dict().values()]}


def sharded(mesh, **options) -> nn.Module:
    model = layers()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@scenario("FSDP2", same=("weights",))
def fsdp2(w):
    return trained(sharded(mesh_of(w)), w)


@scenario("FSDP2, not resharded after forward", same=("weights",))
def fsdp2_kept(w):
    return trained(sharded(mesh_of(w), reshard_after_forward=False), w)


@scenario("FSDP2, bfloat16", same=("weights",))
def fsdp2_mixed(w):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(sharded(mesh_of(w), mp_policy=policy), w)


@scenario("FSDP2, accumulation and clipping", same=("weights", "norm"))
def fsdp2_clipped(w):
    model = sharded(mesh_of(w))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = torch.zeros(())
    for number in range(STEPS):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            model(batch(w.rank, 10 * number + part)[0]).square().mean().backward()
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": [whole(value) for value in model.state_dict().values()], "norm": norm}


@scenario("FSDP2 on a mesh of 2 x 2 (HSDP)", same=("weights",), worlds=(4,))
def hsdp(w):
    return trained(sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))), w)


def fsdp1(w: World, **options) -> dict:
    model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        step(model, optimizer, w, number)
    with FullyShardedDataParallel.summon_full_params(model):
        return {"weights": [value.detach().clone() for value in model.parameters()]}


@scenario("FSDP1", same=("weights",))
def fsdp1_full(w):
    return fsdp1(w, use_orig_params=True)


@scenario("FSDP1, SHARD_GRAD_OP", same=("weights",))
def fsdp1_grads(w):
    return fsdp1(w, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@scenario("DTensor shard, replicate, redistribute", same=("values",))
def redistribute(w):
    mesh, value = mesh_of(w), numbers(8, 12)
    by_row = distribute_tensor(value, mesh, [Shard(0)])
    rows = 8 // w.size
    expect(by_row.to_local(), value[w.rank * rows : (w.rank + 1) * rows])
    by_column = by_row.redistribute(mesh, [Shard(1)])
    everywhere = by_column.redistribute(mesh, [Replicate()])
    for one in (by_row.full_tensor(), by_column.full_tensor(), everywhere.to_local()):
        expect(one, value)
    return {"values": [by_column.full_tensor(), everywhere.to_local()]}


@scenario("DTensor uneven shards", same=("values",))
def uneven(w):
    value = numbers(w.size * 2 + 1, 3)
    placed = distribute_tensor(value, mesh_of(w), [Shard(0)])
    expect(placed.full_tensor(), value)
    expect(placed.sum().full_tensor(), value.sum())
    return {"values": [placed.redistribute(placements=[Replicate()]).to_local()]}


@scenario("DTensor partial sums", same=("values",))
def partial(w):
    mesh, value = mesh_of(w), numbers(8, 4)
    placed = distribute_tensor(value, mesh, [Shard(0)])
    expect(placed.sum().full_tensor(), value.sum(), "sum")
    expect(placed.sum(0).full_tensor(), value.sum(0), "sum of rows")
    expect(placed.mean().full_tensor(), value.mean(), "mean")
    expect(placed.max().full_tensor(), value.max(), "max")
    parts = DTensor.from_local(torch.full((8,), w.rank + 1.0), mesh, [Partial()])
    total = torch.full((8,), sum(rank + 1.0 for rank in w.ranks))
    expect(parts.full_tensor(), total, "partial")
    expect(parts.redistribute(mesh, [Shard(0)]).full_tensor(), total, "partial to shards")
    top = DTensor.from_local(torch.tensor([float(w.rank)]), mesh, [Partial("max")])
    expect(top.full_tensor(), torch.tensor([w.size - 1.0]), "partial max")
    average = DTensor.from_local(torch.tensor([float(w.rank)]), mesh, [Partial("avg")])
    expect(average.full_tensor(), torch.tensor([(w.size - 1) / 2]), "partial avg")
    return {"values": [placed.sum().full_tensor(), average.full_tensor()]}


@scenario("DTensor products and gradients", same=("values",))
def products(w):
    mesh = mesh_of(w)
    left, right = numbers(8, 4) / 10, numbers(4, 8) / 10
    one = distribute_tensor(left, mesh, [Shard(1)]).requires_grad_()
    two = distribute_tensor(right, mesh, [Shard(0)]).requires_grad_()
    product = one @ two
    expect(product.full_tensor(), left @ right)
    product.sum().backward()
    expect(one.grad.full_tensor(), torch.ones(8, 8) @ right.t())
    return {"values": [product.full_tensor(), two.grad.full_tensor()]}


@scenario("DTensor drawn at random", same=("values",))
def random(w):
    drawn = tensors.rand(8, 4, device_mesh=mesh_of(w), placements=[Replicate()])
    return {"values": [drawn.full_tensor()]}


@scenario("DTensor from_local, checked", same=("values",))
def from_local(w):
    value = torch.full((3,), float(w.rank))
    return {"values": [DTensor.from_local(value, mesh_of(w), [Replicate()], run_check=True).to_local()]}


@scenario("DTensor on a mesh of 2 x 2", same=("values",), worlds=(4,))
def two_ways(w):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    value = numbers(8, 6)
    placed = distribute_tensor(value, mesh, [Shard(0), Shard(1)])
    expect(placed.to_local(), value.chunk(2)[w.rank // 2].chunk(2, 1)[w.rank % 2])
    expect(placed.full_tensor(), value)
    expect(placed.sum().full_tensor(), value.sum())
    line = torch.tensor([float(w.rank)])
    dist.all_reduce(line, group=mesh.get_group("rows"))
    expect(line, torch.tensor([2.0 * (w.rank % 2) + 2]))
    part = distribute_tensor(value, mesh["columns"], [Shard(1)])
    expect(part.full_tensor(), value)
    return {"values": [placed.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor()]}


def of_one_batch(model: nn.Module) -> list[torch.Tensor]:
    """The weights after some steps on what is the same on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(0, number)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [whole(value) for value in model.state_dict().values()]


def parallel(w: World, plan: dict) -> dict:
    found = of_one_batch(parallelize_module(layers(), mesh_of(w), plan))
    for one, expected in zip(found, of_one_batch(layers()), strict=True):
        assert torch.allclose(one, expected, atol=1e-5), (one - expected).abs().max()
    return {"weights": found}


@scenario("tensor parallel (Colwise, Rowwise)", same=("weights",))
def tensor_parallel(w):
    return parallel(
        w, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    )


@scenario("sequence parallel", same=("values",))
def sequence_parallel(w):
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    alone = nn.Sequential(
        *(type(layer)(*sizes) for layer, sizes in zip(model, ((8,), (8, 16), (16, 8)), strict=True))
    )
    alone.load_state_dict(model.state_dict())
    mesh, value = mesh_of(w), numbers(2, 8, 8) / 100
    parallelize_module(model, mesh, plan)
    out = model(distribute_tensor(value, mesh, [Shard(1)]))
    local = (
        out.full_tensor()
        if isinstance(out, DTensor)
        else DTensor.from_local(out, mesh, [Shard(1)]).full_tensor()
    )
    assert torch.allclose(local, alone(value), atol=1e-5)
    return {"values": [local]}


@scenario("loss parallel", same=("values",))
def loss(w):
    mesh = mesh_of(w)
    logits = distribute_tensor(numbers(4, 8) / 10, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        found = nn.functional.cross_entropy(logits, torch.tensor([1, 2, 3, 4]))
        found.backward()
    return {"values": [whole(found), logits.grad.full_tensor()]}


@scenario("pipeline (GPipe, 1F1B)")
def pipeline(w):
    losses = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(w.rank)
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        stage = PipelineStage(module, w.rank, w.size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        found: list[torch.Tensor] = []
        inputs = (torch.cat([batch(0, 0)[0]] * 2)[:8],) if w.rank == 0 else ()
        target = {"target": torch.ones(8, 8), "losses": found} if w.rank == w.size - 1 else {}
        schedule.step(*inputs, **target)
        losses.append([found, module[0].weight.grad])
    return {"losses": losses}


@scenario("checkpoint of FSDP2, saved and loaded", same=("weights",))
def checkpoint(w):
    model = sharded(mesh_of(w))
    saved = trained(model, w)["weights"]
    dcp.save({"model": states.get_model_state_dict(model), "step": STEPS}, checkpoint_id=w.scratch)
    other = sharded(mesh_of(w))
    state = {"model": states.get_model_state_dict(other), "step": 0}
    dcp.load(state, checkpoint_id=w.scratch)
    states.set_model_state_dict(other, state["model"])
    found = [whole(value) for value in other.state_dict().values()]
    for one, two in zip(found, saved, strict=True):
        expect(one, two)
    return {"weights": found, "step": state["step"]}


@scenario("checkpoint saved in the background", same=("weights",))
def checkpoint_async(w):
    model = sharded(mesh_of(w))
    saved = trained(model, w)["weights"]
    future = dcp.async_save({"model": states.get_model_state_dict(model)}, checkpoint_id=w.scratch)
    future.result()
    state = {"model": states.get_model_state_dict(sharded(mesh_of(w)))}
    dcp.load(state, checkpoint_id=w.scratch)
    found = [whole(value) for value in state["model"].values()]
    for one, two in zip(found, saved, strict=True):
        expect(one, two)
    return {"weights": found}


@scenario("whole state of FSDP2, from rank 0", same=("weights",))
def whole_state(w):
    model = sharded(mesh_of(w))
    gather = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = states.get_model_state_dict(model, options=gather)
    assert bool(full) == (w.rank == 0)
    other = sharded(mesh_of(w))
    for value in other.parameters():
        nn.init.zeros_(value)
    spread = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(other, full, options=spread)
    found = [whole(value) for value in other.state_dict().values()]
    for one, two in zip(found, layers().state_dict().values(), strict=True):
        expect(one, two)
    return {"weights": found}
