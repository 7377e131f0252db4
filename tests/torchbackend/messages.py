"""Messages between two ranks, in every order, and collectives of Python objects."""

import torch
import torch.distributed as dist
from torch.distributed import P2POp

from tests.torchbackend.suite import expect, scenario


def filled(number: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(number))


@scenario("isend and irecv, crossing")
def crossing(w):
    size = 200_000  # more than a socket holds
    out = filled(-1, size)
    sending, receiving = dist.isend(filled(w.rank, size), w.right), dist.irecv(out, w.left)
    sending.wait()
    receiving.wait()
    expect(out, filled(w.left, size))
    receiving, sending = dist.irecv(out, w.right), dist.isend(filled(w.rank + 10, size), w.left)
    receiving.wait()
    sending.wait()
    expect(out, filled(w.right + 10, size))
    return {"value": out[:4]}


@scenario("send and recv, one after the other")
def blocking(w):
    out = filled(-1)
    if w.rank == 0:
        dist.send(filled(7), 1)
        dist.recv(out, w.size - 1)
    else:
        dist.recv(out, w.rank - 1)
        dist.send(out + 1, w.right)
    return {"value": out}


@scenario("batch_isend_irecv")
def batch(w):
    outs = [filled(-1), filled(-1)]
    ops = [
        P2POp(dist.isend, filled(w.rank), w.right),
        P2POp(dist.irecv, outs[0], w.left),
        P2POp(dist.isend, filled(w.rank + 100), w.left),
        P2POp(dist.irecv, outs[1], w.right),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if w.size > 2:
        expect(outs[0], filled(w.left))
        expect(outs[1], filled(w.right + 100))
    return {"value": outs}


@scenario("recv from any source")
def any_source(w):
    if w.rank:
        dist.send(filled(w.rank), 0)
        dist.barrier()
        return {"value": None}
    came = {}
    for _ in range(w.size - 1):
        out = filled(-1)
        source = dist.recv(out)
        came[source] = out
        expect(out, filled(source))
    dist.barrier()
    assert sorted(came) == list(range(1, w.size))
    return {"value": [came[rank] for rank in sorted(came)]}


@scenario("irecv from any source")
def any_source_later(w):
    if w.rank:
        dist.send(filled(w.rank), 0)
        dist.barrier()  # who leaves ends what is received from any rank
        return {"value": None}
    outs = [filled(-1) for _ in range(w.size - 1)]
    works = [dist.irecv(out) for out in outs]
    for work in works:
        work.wait()
    dist.barrier()
    return {"value": sorted(out[0].item() for out in outs)}


@scenario("recv from the next rank, which then leaves")
def left_behind(w):
    # Each hears the one before it, sends and is gone: its message is still received.
    out = filled(0)
    if w.rank:
        dist.recv(out, w.rank - 1)
    if w.right:
        dist.send(out + 1, w.right)
    return {"value": out}


@scenario("tags out of order")
def tags(w):
    outs = {tag: filled(-1) for tag in (1, 2, 3)}
    if w.rank == 0:
        works = [dist.isend(filled(10 * tag), 1, tag=tag) for tag in (1, 2, 3)]
    elif w.rank == 1:
        works = [dist.irecv(outs[tag], 0, tag=tag) for tag in (3, 1, 2)]
    else:
        works = []
    for work in works:
        work.wait()
    if w.rank == 1:
        for tag, out in outs.items():
            expect(out, filled(10 * tag))
    return {"value": list(outs.values())}


@scenario("messages beside collectives")
def beside(w):
    out, total = filled(-1), filled(w.rank)
    receiving = dist.irecv(out, w.left)
    work = dist.all_reduce(total, async_op=True)
    sending = dist.isend(filled(w.rank), w.right)
    work.wait()
    for one in (sending, receiving):
        one.wait()
    expect(out, filled(w.left))
    expect(total, filled(sum(w.ranks)))
    return {"value": [out, total]}


@scenario("messages by rank of a group")
def in_group(w):
    group = dist.new_group([0, w.size - 1])
    out = filled(-1)
    if w.rank == 0:
        dist.send(filled(5), group=group, group_dst=1)
    elif w.rank == w.size - 1:
        dist.recv(out, group=group, group_src=0)
        expect(out, filled(5))
    return {"value": out}


THING = {"a": [1, 2.5, "three"], "b": (None, True)}


@scenario("all_gather_object")
def gathered_objects(w):
    outs = [None] * w.size
    dist.all_gather_object(outs, {"rank": w.rank, "much": "x" * (1 + 1000 * w.rank)})
    assert [out["rank"] for out in outs] == list(w.ranks)
    assert [len(out["much"]) for out in outs] == [1 + 1000 * rank for rank in w.ranks]


@scenario("gather_object")
def objects_at_one(w):
    outs = [None] * w.size if w.rank == 1 else None
    dist.gather_object((w.rank, THING), outs, 1)
    assert outs is None or outs == [(rank, THING) for rank in w.ranks]


@scenario("broadcast_object_list")
def broadcast_objects(w):
    objects = [THING, w.rank, torch.ones(3)] if w.rank == 0 else [None] * 3
    dist.broadcast_object_list(objects, 0)
    assert objects[:2] == [THING, 0]
    return {"value": objects[2]}


@scenario("scatter_object_list")
def scatter_objects(w):
    out = [None]
    dist.scatter_object_list(out, [(rank, THING) for rank in w.ranks] if w.rank == 0 else None, 0)
    assert out == [(w.rank, THING)]


@scenario("send_object_list and recv_object_list")
def sent_objects(w):
    objects = [THING, "text"]
    if w.rank == 0:
        dist.send_object_list(objects, 1)
    elif w.rank == 1:
        out = [None, None]
        assert dist.recv_object_list(out, 0) == 0
        assert out == objects
    dist.barrier()


@scenario("recv_object_list from any source")
def objects_of_any(w):
    if w.rank == 1:
        dist.send_object_list([THING, "text"], 0)
    elif w.rank == 0:
        out = [None, None]
        assert dist.recv_object_list(out) == 1
        assert out == [THING, "text"]
