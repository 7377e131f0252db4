"""Every collective of `torch.distributed`, on tensors of every kind, against what plain torch computes from everybody's input."""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.torchbackend.suite import attempt, expect, scenario

TYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "uint8",
    "int8",
    "bool",
    "complex64",
)


def value_of(dtype: str, rank: int, *shape: int) -> torch.Tensor:
    """Small whole numbers: exact in every type, summed in any order."""
    count = torch.Size(shape).numel()
    whole = ((torch.arange(count) * 7 + 3 * rank) % 5).reshape(shape)
    kind = getattr(torch, dtype)
    return torch.complex(whole.float(), whole.float() + rank) if kind.is_complex else whole.to(kind)


def of_type(dtype: str):
    return lambda w, rank: value_of(dtype, rank, 2 * w.size, 3)


KINDS = {
    **{dtype: of_type(dtype) for dtype in TYPES},
    "0-dim": lambda w, rank: value_of("float32", rank),
    "empty": lambda w, rank: torch.empty(0, 3),
    "transposed": lambda w, rank: value_of("float32", rank, 3, 2 * w.size).t(),
    "strided": lambda w, rank: value_of("float32", rank, 4 * w.size, 6)[::2, ::2],
    "offset": lambda w, rank: value_of("float32", rank, 2 * w.size + 1, 3)[1:],
    "4-dim channels last": lambda w, rank: value_of("float32", rank, w.size, 2, 3, 2).to(
        memory_format=torch.channels_last
    ),
    "requires_grad": lambda w, rank: value_of("float32", rank, 2 * w.size, 3).requires_grad_(),
    "parameter": lambda w, rank: torch.nn.Parameter(value_of("float32", rank, 2 * w.size, 3)),
}


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Room for such a tensor, of the same layout."""
    return torch.zeros_like(tensor.detach())


def summed(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].detach().clone()
    for one in values[1:]:
        total = (total.long() + one.long()).to(one.dtype) if one.dtype == torch.bool else total + one.detach()
    return total


def all_reduce(w, values):
    mine = values[w.rank]
    dist.all_reduce(mine)
    return mine, summed(w.originals)


def broadcast(w, values):
    mine = values[w.rank]
    dist.broadcast(mine, 1)
    return mine, w.originals[1]


def reduce(w, values):
    mine, total = values[w.rank], summed(w.originals)
    dist.reduce(mine, 1)
    return (mine, total) if w.rank == 1 else (torch.zeros(0), torch.zeros(0))


def all_gather(w, values):
    outs = [like(values[0]) for _ in w.ranks]
    dist.all_gather(outs, values[w.rank])
    return torch.stack(outs), torch.stack([one.detach() for one in values])


def all_gather_into_tensor(w, values):
    first = values[0].detach()
    shape = (w.size * first.shape[0], *first.shape[1:]) if first.dim() else (w.size,)
    out = torch.zeros(shape, dtype=first.dtype)
    dist.all_gather_into_tensor(out, values[w.rank])
    return out, torch.cat([one.detach().reshape(-1) for one in values]).reshape(shape)


def gather(w, values):
    outs = [like(values[0]) for _ in w.ranks] if w.rank == 1 else None
    dist.gather(values[w.rank], outs, 1)
    if outs is None:
        return torch.zeros(0), torch.zeros(0)
    return torch.stack(outs), torch.stack([one.detach() for one in values])


def scatter(w, values):
    out = like(values[0])
    dist.scatter(out, [one.detach() for one in values] if w.rank == 1 else None, 1)
    return out, values[w.rank].detach()


def reduce_scatter(w, values):
    out = like(values[0])
    dist.reduce_scatter(out, [one.detach() for one in values])
    return out, summed([values[w.rank]] * w.size)


def reduce_scatter_tensor(w, values):
    mine = values[w.rank]
    if not mine.dim():
        return torch.zeros(0), torch.zeros(0)
    parts = [one.detach().chunk(w.size)[w.rank] if one.numel() else one.detach() for one in values]
    out = torch.zeros_like(parts[0])
    dist.reduce_scatter_tensor(out, mine)
    return out, summed(parts)


def all_to_all(w, values):
    outs = [like(values[0]) for _ in w.ranks]
    dist.all_to_all(outs, [values[w.rank].detach().clone() for _ in w.ranks])
    return torch.stack(outs), torch.stack([one.detach() for one in values])


def all_to_all_single(w, values):
    mine = values[w.rank]
    if not mine.dim():
        return torch.zeros(0), torch.zeros(0)
    out = like(mine)
    dist.all_to_all_single(out, mine)
    if not mine.numel():
        return out, out
    return out, torch.cat([one.detach().chunk(w.size)[w.rank] for one in values])


def send_and_recv(w, values):
    out = like(values[0])
    sending = dist.isend(values[w.rank].detach(), w.right)
    dist.recv(out, w.left)
    sending.wait()
    return out, values[w.left].detach()


def every_kind(verb):
    def run(w):
        def case(make):
            w.originals = [make(w, rank).detach().clone() for rank in w.ranks]
            found, expected = verb(w, [make(w, rank) for rank in w.ranks])
            expect(found, expected, str(w.originals[0].dtype))
            return found

        return {"cases": {kind: attempt(lambda make=make: case(make)) for kind, make in KINDS.items()}}

    return run


for _verb in (
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_tensor,
    all_to_all,
    all_to_all_single,
    send_and_recv,
):
    scenario(f"{_verb.__name__}, every kind of tensor")(every_kind(_verb))


OPS = {
    "SUM": (ReduceOp.SUM, lambda values: values.sum(0)),
    "AVG": (ReduceOp.AVG, lambda values: values.float().mean(0)),
    "PRODUCT": (ReduceOp.PRODUCT, lambda values: values.prod(0)),
    "MIN": (ReduceOp.MIN, lambda values: values.amin(0)),
    "MAX": (ReduceOp.MAX, lambda values: values.amax(0)),
    "BAND": (ReduceOp.BAND, lambda values: folded(torch.bitwise_and, values)),
    "BOR": (ReduceOp.BOR, lambda values: folded(torch.bitwise_or, values)),
    "BXOR": (ReduceOp.BXOR, lambda values: folded(torch.bitwise_xor, values)),
}


def folded(op, values):
    total = values[0]
    for one in values[1:]:
        total = op(total, one)
    return total


@scenario("every ReduceOp")
def operations(w):
    def case(name, verb, dtype):
        op, model = OPS[name]
        values = torch.stack([value_of(dtype, rank, w.size, 3) + 1 for rank in w.ranks])
        expected = model(values).to(values.dtype)
        mine = values[w.rank].clone()
        if verb == "all_reduce":
            dist.all_reduce(mine, op)
        elif verb == "reduce":
            dist.reduce(mine, 0, op)
            if w.rank:
                return None
        else:
            out = torch.zeros(1, 3, dtype=mine.dtype)
            dist.reduce_scatter_tensor(out, mine, op)
            mine, expected = out, expected[w.rank : w.rank + 1]
        expect(mine, expected, f"{verb} {name}")
        return mine

    cases = {}
    for name in OPS:
        for verb in ("all_reduce", "reduce", "reduce_scatter_tensor"):
            for dtype in ("int64",) if name.startswith("B") else ("float32", "int32", "bfloat16"):
                if name != "AVG" or dtype != "int32":
                    cases[f"{verb} {name} {dtype}"] = attempt(lambda a=(name, verb, dtype): case(*a))
    return {"cases": cases}


@scenario("PREMUL_SUM")
def premultiplied(w):
    def case():
        value = torch.ones(3)
        dist.all_reduce(value, dist._make_nccl_premul_sum(2.0))
        expect(value, torch.full((3,), 2.0 * w.size))
        return value

    return {"cases": {"PREMUL_SUM": attempt(case)}}


@scenario("all_reduce of a sparse tensor")
def sparse(w):
    rows = [0, w.rank + 1]
    value = torch.sparse_coo_tensor([rows], torch.full((2, 3), w.rank + 1.0), (w.size + 1, 3))
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    expected = torch.cat([torch.tensor([sum(w.ranks) + w.size]), torch.arange(1, w.size + 1)]).float()
    expect(value.to_dense(), expected[:, None].expand(-1, 3))
    none = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (4,))
    dist.all_reduce(none)
    return {"value": value.to_dense(), "none": none.to_dense()}


@scenario("all_gather, uneven sizes")
def uneven_gather(w):
    def case():
        outs = [torch.zeros(rank + 1, 2) for rank in w.ranks]
        dist.all_gather(outs, torch.full((w.rank + 1, 2), float(w.rank)))
        for rank, out in enumerate(outs):
            expect(out, torch.full((rank + 1, 2), float(rank)))
        return outs

    return {"value": case()}


@scenario("reduce_scatter, uneven sizes")
def uneven_reduce_scatter(w):
    out = torch.zeros(w.rank + 1)
    dist.reduce_scatter(out, [torch.full((rank + 1,), w.rank + 1.0) for rank in w.ranks])
    expect(out, torch.full((w.rank + 1,), sum(rank + 1.0 for rank in w.ranks)))
    return {"value": out}


@scenario("all_to_all_single, with splits")
def splits(w):
    sending = [peer + 1 for peer in w.ranks]
    value = torch.cat([torch.full((peer + 1, 2), 10.0 * w.rank + peer) for peer in w.ranks])
    out = torch.zeros((w.rank + 1) * w.size, 2)
    dist.all_to_all_single(out, value, [w.rank + 1] * w.size, sending)
    expect(out, torch.cat([torch.full((w.rank + 1, 2), 10.0 * peer + w.rank) for peer in w.ranks]))
    none = [0] * w.size
    none[w.right] = 1
    back = [0] * w.size
    back[w.left] = 1
    got = torch.zeros(1, 2)
    dist.all_to_all_single(got, torch.full((1, 2), float(w.rank)), back, none)
    expect(got, torch.full((1, 2), float(w.left)))
    return {"value": [out, got]}


@scenario("all_to_all, uneven sizes")
def uneven_all_to_all(w):
    outs = [torch.zeros(w.rank + 1) for _ in w.ranks]
    dist.all_to_all(outs, [torch.full((peer + 1,), float(w.rank)) for peer in w.ranks])
    for peer, out in enumerate(outs):
        expect(out, torch.full((w.rank + 1,), float(peer)))
    return {"value": outs}


@scenario("coalesced collectives")
def coalesced(w):
    def case():
        pair = [torch.ones(2) * w.rank, torch.ones(3)]
        dist.all_reduce_coalesced(pair)
        expect(pair[1], torch.full((3,), float(w.size)))
        return pair

    def manager():
        pair = [torch.ones(2) * w.rank, torch.ones(3)]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as together:
            for one in pair:
                dist.all_reduce(one)
        together.wait()
        expect(pair[1], torch.full((3,), float(w.size)))
        return pair

    def gathered():
        outs = [[torch.zeros(2), torch.zeros(3)] for _ in w.ranks]
        dist.all_gather_coalesced(outs, [torch.ones(2) * w.rank, torch.ones(3)])
        return [one for row in outs for one in row]

    calls = {"all_reduce": case, "manager": manager, "all_gather": gathered}
    return {"cases": {name: attempt(call) for name, call in calls.items()}}


@scenario("async_op and chains of then")
def chains(w):
    value = torch.full((4,), w.rank + 1.0)
    work = dist.all_reduce(value, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    again = doubled.then(lambda future: future.wait() + 1)
    total = sum(rank + 1.0 for rank in w.ranks)
    expect(again.wait(), torch.full((4,), 2 * total + 1))
    work.wait()
    assert work.is_completed()
    expect(work.get_future().wait()[0], torch.full((4,), total))
    many = [torch.full((1000,), float(number)) for number in range(20)]
    for pending in [dist.all_reduce(one, async_op=True) for one in many]:
        pending.wait()
    for number, one in enumerate(many):
        expect(one, torch.full((1000,), float(number * w.size)))
    together = torch.futures.collect_all(
        [dist.all_reduce(one, async_op=True).get_future() for one in many[:3]]
    )
    together.wait()
    outs = [torch.zeros(2) for _ in w.ranks]
    dist.all_gather(outs, torch.full((2,), float(w.rank)), async_op=True).wait()
    return {"value": [again.wait(), value, *many[:3], *outs]}


@scenario("barrier")
def barrier(w):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    w.store.set(f"came{w.rank}", "")
    dist.barrier()
    assert w.store.check([f"came{rank}" for rank in w.ranks])


@scenario("monitored_barrier", known="torch 2.13 allows it for gloo alone")
def monitored(w):
    dist.monitored_barrier()


@scenario("large tensors")
def large(w):
    value = torch.arange(2_000_000.0) % 1000 + w.rank
    dist.all_reduce(value)
    expect(value[:1000], torch.arange(1000.0) * w.size + sum(w.ranks))
    return {"sum": value.double().sum()}
