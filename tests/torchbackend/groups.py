"""Groups of some ranks, meshes, profiling, and process groups that end and begin again."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from tests.torchbackend.suite import attempt, expect, scenario


def total(w, group) -> torch.Tensor:
    value = torch.tensor([w.rank + 1.0])
    dist.all_reduce(value, group=group)
    return value


def of(ranks) -> torch.Tensor:
    return torch.tensor([sum(rank + 1.0 for rank in ranks)])


@scenario("new_group")
def new_group(w):
    some = [0, w.size - 1]
    group = dist.new_group(some)
    found = [total(w, group)] if w.rank in some else []
    if w.rank in some:
        expect(found[0], of(some))
        assert dist.get_process_group_ranks(group) == some
        assert dist.get_group_rank(group, w.size - 1) == 1
        value = torch.full((2,), float(w.rank))
        dist.broadcast(value, w.size - 1, group=group)
        expect(value, torch.full((2,), w.size - 1.0))
    else:
        assert dist.get_rank(group) == -1
    dist.barrier()
    return {"value": found}


@scenario("the same ranks twice")
def twice(w):
    groups = [dist.new_group(list(w.ranks)) for _ in range(3)]
    values = [torch.full((3,), 10.0 * number + w.rank) for number in range(3)]
    # In opposite orders: groups do not wait for each other.
    order = [0, 1, 2] if w.rank % 2 else [2, 1, 0]
    works = {number: dist.all_reduce(values[number], group=groups[number], async_op=True) for number in order}
    for work in works.values():
        work.wait()
    for number, value in enumerate(values):
        expect(value, torch.full((3,), 10.0 * number * w.size + sum(w.ranks)))
    return {"value": values}


@scenario("groups that overlap")
def overlapping(w):
    pairs = [(rank, (rank + 1) % w.size) for rank in w.ranks]
    groups = [dist.new_group(sorted(pair)) for pair in pairs]
    found = []
    for pair, group in zip(pairs, groups, strict=True):
        if w.rank in pair:
            found.append(total(w, group))
            expect(found[-1], of(pair))
    return {"value": found}


@scenario("a group of one rank")
def alone(w):
    groups = [dist.new_group([rank]) for rank in w.ranks]
    found = total(w, groups[w.rank])
    expect(found, of([w.rank]))
    dist.barrier(group=groups[w.rank])
    out = [torch.zeros(1)]
    dist.all_gather(out, found, group=groups[w.rank])
    return {"value": out}


@scenario("new_subgroups")
def subgroups(w):
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == w.size // 2
    first = w.rank // 2 * 2
    expect(total(w, mine), of([first, first + 1]))


@scenario("new_subgroups_by_enumeration")
def enumerated(w):
    lists = [[0, w.size - 1], [1, 2]] if w.size == 4 else [[0], [1]]
    mine, _ = dist.new_subgroups_by_enumeration(lists)
    (own,) = [ranks for ranks in lists if w.rank in ranks]
    expect(total(w, mine), of(own))


@scenario("use_local_synchronization")
def local_synchronization(w):
    some = [0, w.size - 1]
    if w.rank in some:  # the others do not call
        group = dist.new_group(some, use_local_synchronization=True)
        expect(total(w, group), of(some))
    halves = [[0], [1]] if w.size == 2 else [[0, 1], [2, 3]]
    mine = next(ranks for ranks in halves if w.rank in ranks)
    expect(total(w, dist.new_group(mine, use_local_synchronization=True)), of(mine))


@scenario("ranks in an order of one's own")
def sorted_or_not(w):
    backwards = list(reversed(w.ranks))
    group = dist.new_group(backwards, sort_ranks=False) if _has_sort_ranks() else dist.new_group(backwards)
    outs = [torch.zeros(1) for _ in w.ranks]
    dist.all_gather(outs, torch.tensor([float(w.rank)]), group=group)
    expected = dist.get_process_group_ranks(group)
    expect(torch.cat(outs), torch.tensor(expected, dtype=torch.float32))
    return {"value": outs}


def _has_sort_ranks() -> bool:
    return "sort_ranks" in dist.new_group.__code__.co_varnames


@scenario("a group destroyed, and another")
def destroyed(w):
    first = dist.new_group(list(w.ranks))
    expect(total(w, first), of(w.ranks))
    dist.destroy_process_group(first)
    second = dist.new_group(list(w.ranks))
    expect(total(w, second), of(w.ranks))
    expect(total(w, None), of(w.ranks))


@scenario("destroy_process_group, and init again")
def again(w):
    found = []
    for _ in range(3):
        w.open()
        found.append(total(w, None))
        expect(found[-1], of(w.ranks))
    return {"value": found}


@scenario("names of a group")
def names(w):
    group = dist.new_group(list(w.ranks), group_desc="mine")
    assert dist.get_backend(group) == w.backend
    assert group.group_desc == "mine"
    assert group.group_name
    assert (group.rank(), group.size()) == (w.rank, w.size)
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is not None
    return {"desc": group.group_desc, "name": str(group.group_name)}


@scenario("split_group")
def split(w):
    def case():
        group = dist.split_group(split_ranks=[list(w.ranks)])
        expect(total(w, group), of(w.ranks))
        return total(w, group)

    return {"cases": {"split_group": attempt(case)}}


@scenario("a gloo group beside")
def beside(w):
    gloo = dist.new_group(list(w.ranks), backend="gloo")
    expect(total(w, gloo), of(w.ranks))
    expect(total(w, None), of(w.ranks))


@scenario("a group of this backend beside a gloo world")
def within_gloo(w):
    backend, w.backend = w.backend, "gloo"
    w.open()
    w.backend = backend
    group = dist.new_group(list(w.ranks), backend=backend)
    some = dist.new_group([0, w.size - 1], backend=backend)
    expect(total(w, group), of(w.ranks))
    if w.rank in (0, w.size - 1):
        expect(total(w, some), of([0, w.size - 1]))
    expect(total(w, None), of(w.ranks))


@scenario('"cpu:..." names the backend for a device')
def by_device(w):
    backend, w.backend = w.backend, f"cpu:{w.backend}"
    w.open()
    w.backend = backend
    expect(total(w, None), of(w.ranks))


@scenario("DeviceMesh, one way")
def mesh(w):
    one = init_device_mesh("cpu", (w.size,), mesh_dim_names=("all",))
    expect(total(w, one.get_group()), of(w.ranks))
    assert one.get_local_rank() == w.rank


@scenario("DeviceMesh, 2 x 2", worlds=(4,))
def mesh_2x2(w):
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    expect(total(w, two.get_group("rows")), of([w.rank % 2, w.rank % 2 + 2]))
    first = w.rank // 2 * 2
    expect(total(w, two.get_group("columns")), of([first, first + 1]))
    expect(total(w, two["rows"].get_group()), of([w.rank % 2, w.rank % 2 + 2]))
    flat = two._flatten("both")
    expect(total(w, flat.get_group()), of(w.ranks))


@scenario("collectives with TORCH_DISTRIBUTED_DEBUG=DETAIL")
def detail(w):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    w.open()
    expect(total(w, None), of(w.ranks))
    group = dist.new_group([0, 1])
    if w.rank < 2:
        expect(total(w, group), of([0, 1]))
    outs = [torch.zeros(1) for _ in w.ranks]
    dist.all_gather(outs, torch.tensor([float(w.rank)]))
    dist.broadcast(outs[0], 0)
    objects = [None] * w.size
    dist.all_gather_object(objects, w.rank)
    dist.barrier()


@scenario("profiler")
def profiler(w):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        total(w, None)
        dist.broadcast(torch.ones(3), 0)
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    events = [event for event in seen.events() if w.backend in event.name]
    for verb in ("allreduce", "broadcast"):
        count = sum(verb in event.name.replace("_", "") for event in events)
        assert count >= (2 if verb == "allreduce" else 1), [event.name for event in seen.events()]
    assert all(event.time_range.elapsed_us() >= 0 for event in events)


@scenario("DDP in the profiler")
def profiled_ddp(w):
    from tests.torchbackend.training import DDP, layers, train

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        answers = train(DDP(layers()), w)
    assert any(w.backend in e.name and "reduce" in e.name for e in seen.events())
    return answers
