"""DistributedDataParallel in all its forms, its hooks, and what trains with it: the weights after some steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torchbackend.suite import World, scenario

STEPS = 3


def layers() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``rank`` trains on."""
    seeded = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 8, generator=seeded), torch.randn(6, 4, generator=seeded)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def step(model, optimizer, w: World, number: int) -> None:
    inputs, targets = batch(w.rank, number)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def train(model: nn.Module, w: World, optimizer=None, steps: int = STEPS) -> dict:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        step(model, optimizer, w, number)
    return {"weights": weights(model)}


@scenario("DDP", same=("weights",))
def plain_ddp(w):
    return train(DDP(layers()), w)


class Unused(nn.Module):
    """Uses one branch or the other, by rank and step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.calls = dist.get_rank()

    def forward(self, inputs):
        self.calls += 1
        return self.branches[self.calls % 2](inputs)


@scenario("DDP find_unused_parameters", same=("weights",))
def unused(w):
    return train(DDP(Unused(), find_unused_parameters=True), w)


@scenario("DDP gradient_as_bucket_view", same=("weights",))
def bucket_view(w):
    return train(DDP(layers(), gradient_as_bucket_view=True), w)


@scenario("DDP static_graph", same=("weights",))
def static_graph(w):
    return train(DDP(layers(), static_graph=True), w)


@scenario("DDP many buckets", same=("weights",))
def many_buckets(w):
    model = small_buckets(layers())
    answers = train(model, w)
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert len(sizes.split(",")) > 1, sizes
    return answers


def small_buckets(model: nn.Module, **options) -> DDP:
    """A model of this size has one bucket otherwise."""
    usual, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 256
    try:
        return DDP(model, bucket_cap_mb=0.0005, **options)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = usual


@scenario("DDP mixed_precision", same=("weights",))
def mixed_precision(w):
    precision = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.float32)
    return train(DDP(layers(), mixed_precision=precision), w)


@scenario("DDP buffers (BatchNorm)", same=("weights",))
def buffers(w):
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)))
    train(model, w)
    model(batch(w.rank, 9)[0])  # sends the buffers of rank 0
    model.eval()
    model(batch(0, 10)[0])
    return {"weights": list(weights(model)[:2]), "of rank 0": weights(model)[2] if w.rank == 0 else None}


@scenario("DDP no_sync", same=("weights",))
def no_sync(w):
    model = DDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            nn.functional.mse_loss(model(batch(w.rank, number)[0]), batch(w.rank, number)[1]).backward()
        nn.functional.mse_loss(model(batch(w.rank, number + 50)[0]), batch(w.rank, number)[1]).backward()
        optimizer.step()
    return {"weights": weights(model)}


@scenario("DDP two models on two groups", same=("weights",))
def two_models(w):
    second = dist.new_group(list(w.ranks))
    one, two = DDP(layers()), DDP(layers(), process_group=second)
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    for number in range(STEPS):
        inputs, targets = batch(w.rank, number)
        (
            nn.functional.mse_loss(one(inputs), targets) + nn.functional.mse_loss(two(inputs), targets)
        ).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": weights(one) + weights(two)}


@scenario("DDP SyncBatchNorm", same=("weights",))
def sync_batch_norm(w):
    torch.manual_seed(1)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    )
    return train(DDP(model), w)


@scenario("DDP join, uneven inputs", same=("weights",))
def join(w):
    model = DDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for number in range(2 + w.rank):
            step(model, optimizer, w, number)
    return {"weights": weights(model)}


def hooked(w: World, state, hook) -> dict:
    model = small_buckets(layers())
    model.register_comm_hook(state, hook)
    return train(model, w)


@scenario("DDP hook allreduce", same=("weights",))
def allreduce_hook(w):
    return hooked(w, None, default_hooks.allreduce_hook)


# Sums in 16 bits are rounded at every step, and depend on the order.
@scenario("DDP hook fp16_compress", same=("weights",), tolerance=1e-4)
def fp16_hook(w):
    return hooked(w, None, default_hooks.fp16_compress_hook)


@scenario("DDP hook bf16_compress", same=("weights",), tolerance=1e-3)
def bf16_hook(w):
    return hooked(w, None, default_hooks.bf16_compress_hook)


@scenario("DDP hook fp16_compress_wrapper", same=("weights",), tolerance=1e-4)
def fp16_wrapper(w):
    return hooked(w, None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


def with_power_sgd(w: World, hook, rank: int, steps: int) -> dict:
    """Steps enough for the hook to begin, with two of an ordinary allreduce before."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model = DDP(layers())
    model.register_comm_hook(state, hook)
    return train(model, w, torch.optim.SGD(model.parameters(), lr=0.1), steps)


@scenario("DDP hook PowerSGD", same=("weights",))
def power_sgd(w):
    return with_power_sgd(w, powerSGD_hook.powerSGD_hook, rank=2, steps=6)


@scenario("DDP hook batched PowerSGD", same=("weights",))
def batched_power_sgd(w):
    return with_power_sgd(w, powerSGD_hook.batched_powerSGD_hook, rank=1, steps=4)


@scenario("DDP hook quantization")
def quantization(w):
    state = dist.group.WORLD
    model = DDP(layers())
    model.register_comm_hook(state, quantization_hooks.quantization_pertensor_hook)
    return train(model, w)


@scenario("DDP hook of one's own, with then", same=("weights",))
def own_hook(w):
    def hook(group, bucket):
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        chain = work.get_future().then(lambda future: future.value()[0].div_(w.size))
        return chain.then(lambda future: future.value() * 0.5)

    return hooked(w, dist.group.WORLD, hook)


@scenario("DDP hook that waits in then", same=("weights",))
def waiting_hook(w):
    def hook(group, bucket):
        buffer = bucket.buffer()
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()

        def again(future):
            dist.all_reduce(buffer, group=group, async_op=True).wait()
            return buffer.div_(w.size**2)

        return future.then(again)

    model = DDP(layers())
    model.register_comm_hook(dist.group.WORLD, hook)
    return train(model, w)


@scenario("post-local SGD", same=("weights",))
def post_local(w):
    model = DDP(layers())
    subgroup = dist.new_subgroups(1)[0]
    state = post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    for number in range(6):
        step(model, optimizer, w, number)
    averager.average_parameters(model.parameters())
    return {"weights": weights(model)}


@scenario("ZeroRedundancyOptimizer", same=("weights",))
def zero(w):
    model = DDP(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
    answers = train(model, w, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if w.rank == 0:
        answers["of rank 0"] = [one["exp_avg"] for one in optimizer.state_dict()["state"].values()]
    return answers


@scenario("ZeroRedundancyOptimizer, parameters as bucket view", same=("weights",))
def zero_view(w):
    model = DDP(layers())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.05, parameters_as_bucket_view=True
    )
    return train(model, w, optimizer)


@scenario("ZeroRedundancyOptimizer, overlapped with DDP", same=("weights",))
def zero_overlapped(w):
    model = small_buckets(layers(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, overlap_with_ddp=True)
    model.register_comm_hook(
        None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    )
    return train(model, w, optimizer)


@scenario("join of DDP and ZeroRedundancyOptimizer", same=("weights",))
def join_both(w):
    model = DDP(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for number in range(1 + w.rank):
            step(model, optimizer, w, number)
    return {"weights": weights(model)}


@scenario("DDP with TORCH_DISTRIBUTED_DEBUG=DETAIL", same=("weights",))
def detail(w):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    w.open()
    answers = train(DDP(layers()), w)
    total = torch.arange(4.0) * (w.rank + 1)
    dist.all_reduce(total)
    dist.barrier()
    return {**answers, "total": total}


@scenario("DDP with sparse gradients", same=("weights",))
def sparse_gradients(w):
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        words = torch.randint(20, (6, 3), generator=torch.Generator().manual_seed(10 * w.rank + number))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(words), batch(w.rank, number)[1]).backward()
        optimizer.step()
    return {"weights": weights(model)}
