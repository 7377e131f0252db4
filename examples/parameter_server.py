"""Embeddings of a graph, trained the way PyTorch-BigGraph does it: trainers, parameter servers and clients, a lock server and
partition servers, each a process of its own. All are started here, on one machine that stands for several.

    python examples/parameter_server.py

The nodes are cut into partitions, so the edges into buckets: one for each pair of partitions. A trainer asks the lock server for
a bucket whose partitions nobody has, fetches these from the partition servers, trains on the bucket's edges, and puts them back.
What all trainers share, a vector for each relation, is on the parameter servers: a trainer hands its client what it has changed
and gets what all have. The graph is networkx's "Les Miserables": who meets whom, once or more often, which makes two relations.
"""

import argparse
import itertools
import multiprocessing.connection
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import networkx
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from asynccoll.planner import ProcessRanks, RankPlan
from asynccoll.torch import ServerProcess, Startable, start_server

DIMENSION = 16
STEPS, RATE = 3, 0.1  # of gradient steps on a bucket
STRIPES = 2  # groups over which a partition is spread on its way: as many channels between the same ranks
RELATIONS = ("meets once", "meets often")


def send(rank: int, value: Any) -> None:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    dist.send(torch.tensor([len(data)]), rank)
    dist.send(data, rank)


def receive(rank: int | None = None) -> tuple[int, Any]:
    """Who sent, and what: from any rank that has something for this one, where ``rank`` is None."""
    size = torch.zeros(1, dtype=torch.long)
    sender = dist.recv(size, rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, sender)
    return sender, pickle.loads(data.numpy().tobytes())


def ask(rank: int, *request: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
    """Send ``request`` to the server of ``rank`` and return its answer. Raises what was raised there, as text."""
    send(rank, request)
    meanwhile()
    _, (kind, value) = receive(rank)
    if kind == "error":
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def serve(clients: int, handle: Callable[..., Any]) -> None:
    """Answer requests from whoever comes first, until ``clients`` ranks have said JOIN. Then tell those ranks."""
    joined: list[int] = []
    while len(joined) < clients:
        sender, (verb, *arguments) = receive()
        if verb == "JOIN":
            joined.append(sender)
            continue
        try:
            send(sender, ("value", handle(sender, verb, *arguments)))
        except Exception:  # noqa: BLE001 (raised where the request came from)
            send(sender, ("error", traceback.format_exc()))
    for rank in joined:
        send(rank, ("value", None))


def leave() -> None:
    """Wait for all: who takes from any rank that has something is told by asynccoll, though not by gloo, that one has left."""
    dist.barrier()


class Server(Startable):
    """Has the plan. Its groups are set before `start`: that of the trainers, then the stripes."""

    clients = "trainer"

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self.kept: dict[Any, Tensor] = {}

    def start(self) -> None:
        serve(len(self.plan.ranks(self.clients)), self.handle)
        leave()


class LockServer(Server):
    """Hands out buckets. Nobody else has their partitions, and each comes once in an epoch."""

    def __init__(self, plan: RankPlan, partitions: int) -> None:
        super().__init__(plan)
        self.partitions = partitions
        self.epoch, self.left = -1, list[tuple[int, int]]()
        self.held: dict[int, tuple[int, int]] = {}

    def handle(self, sender: int, verb: str, *arguments: Any) -> Any:
        if verb == "release":
            del self.held[sender]
            return None
        (epoch,) = arguments
        if epoch > self.epoch and not self.left and not self.held:
            self.epoch = epoch
            self.left = list(itertools.product(range(self.partitions), repeat=2))
        if epoch < self.epoch or (epoch == self.epoch and not self.left):
            return "none left"
        taken = set(itertools.chain(*self.held.values()))
        free = [bucket for bucket in self.left if taken.isdisjoint(bucket)]
        if epoch > self.epoch or not free:
            return "wait"
        self.left.remove(free[0])
        self.held[sender] = free[0]
        return free[0]


class PartitionServer(Server):
    """Keeps partitions: a row for each node, its embedding and then the sum of squares that Adagrad needs."""

    def __init__(self, plan: RankPlan, sizes: list[int]) -> None:
        super().__init__(plan)
        self.sizes = sizes

    def handle(self, sender: int, verb: str, partition: int) -> None:
        if partition not in self.kept:
            rows = (
                torch.randn(
                    self.sizes[partition], DIMENSION + 1, generator=torch.Generator().manual_seed(partition)
                )
                / DIMENSION
            )
            self.kept[partition] = rows * (torch.arange(DIMENSION + 1) < DIMENSION)
        move(self.kept[partition], sender, self.groups[1:], dist.isend if verb == "get" else dist.irecv)


def move(rows: Tensor, rank: int, stripes: list[dist.ProcessGroup], how: Callable[..., Any]) -> None:
    """Send or receive ``rows``, some of them over each group; in place."""
    parts = rows.tensor_split(len(stripes))
    for work in [how(part, rank, group=group) for part, group in zip(parts, stripes, strict=True)]:
        work.wait()


class ParameterServer(Server):
    """Keeps what all trainers share. A push adds a change to a value and answers with the sum of all changes."""

    clients = "parameter_client"

    def handle(self, sender: int, verb: str, key: str, change: Tensor) -> Tensor:
        self.kept[key] = self.kept.get(key, torch.zeros_like(change)) + change
        return self.kept[key]


class ParameterClient(Server):
    """A trainer's way to the parameter servers: it knows which of them has what."""

    def start(self) -> None:
        serve(1, self.handle)
        for server in self.plan.ranks("parameter_server"):
            ask(server, "JOIN")
        leave()

    def handle(self, sender: int, verb: str, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        place = {key: self.plan.place(key, "parameter_server") for key in changes}
        return {key: ask(place[key], "push", key, change) for key, change in changes.items()}


class Graph:
    """Edges as (left node, relation, right node); node n is row n // P of partition n % P."""

    def __init__(self, partitions: int) -> None:
        graph = networkx.les_miserables_graph()
        number = {name: index for index, name in enumerate(sorted(graph))}
        met = [(number[a], int(weight > 1), number[b]) for a, b, weight in graph.edges(data="weight")]
        self.edges = sorted(met + [(b, k, a) for a, k, b in met])
        self.partitions = partitions
        self.sizes = [len(range(part, len(number), partitions)) for part in range(partitions)]

    def bucket(self, left: int, right: int) -> Tensor:
        """The edges between two partitions, by row: a tensor of three columns."""
        count = self.partitions
        edges = [edge for edge in self.edges if (edge[0] % count, edge[2] % count) == (left, right)]
        return torch.tensor([(a // count, k, b // count) for a, k, b in edges]).reshape(-1, 3).long()


def loss_of(left: Tensor, relations: Tensor, right: Tensor, edges: Tensor) -> Tensor:
    """How surprising the right ends of ``edges`` are among all rows of ``right``: mean cross entropy."""
    a, k, b = edges.T
    return cross_entropy((left[a] + relations[k]) @ right.T, b)


class Trainer(Startable):
    """Trains bucket after bucket. The first one also says how good it has become."""

    def __init__(self, plan: RankPlan, machine: int, graph: Graph, epochs: int) -> None:
        self.plan, self.machine, self.graph, self.epochs = plan, machine, graph, epochs
        self.relations = torch.zeros(len(RELATIONS), DIMENSION)

    def start(self) -> None:
        torch.set_num_threads(1)
        (lock,) = self.plan.ranks("lock_server")
        client = self.plan.ranks("parameter_client")[self.machine]
        first = self.report("first") if self.machine == 0 else None
        dist.barrier(group=self.groups[0])
        for epoch in range(self.epochs):
            while (bucket := ask(lock, "acquire", epoch)) != "none left":
                if bucket == "wait":
                    time.sleep(0.002)  # another trainer has what is left
                    continue
                self.train(client, *bucket)
                ask(lock, "release")
        dist.barrier(group=self.groups[0])
        last = self.report("last") if self.machine == 0 else None
        for server in (client, lock, *self.plan.ranks("partition_server")):
            ask(server, "JOIN")
        leave()
        if first is not None and not last < first:
            sys.exit("the loss has not become smaller")

    def swap(self, verb: str, partition: int, rows: Tensor | None = None) -> Tensor:
        """Fetch (get) or leave (put) a partition at its server."""
        if rows is None:
            rows = torch.empty(self.graph.sizes[partition], DIMENSION + 1)
        server = self.plan.place(partition, "partition_server")
        how = dist.irecv if verb == "get" else dist.isend
        ask(server, verb, partition, meanwhile=lambda: move(rows, server, self.groups[1:], how))
        return rows

    def share(self, client: int, change: Tensor) -> None:
        """Hand on what this trainer has changed in the relations, and take what all have."""
        values = ask(client, "push", dict(zip(RELATIONS, change, strict=True)))
        self.relations = torch.stack([values[name] for name in RELATIONS])

    def train(self, client: int, left: int, right: int) -> None:
        rows = {partition: self.swap("get", partition) for partition in {left, right}}
        edges = self.graph.bucket(left, right)
        before = self.relations
        for _ in range(STEPS if len(edges) else 0):
            leaves = {partition: part[:, :-1].clone().requires_grad_() for partition, part in rows.items()}
            relations = self.relations.clone().requires_grad_()
            loss_of(leaves[left], relations, leaves[right], edges).backward()
            for partition, leaf in leaves.items():
                squares = rows[partition][:, -1:].add_(leaf.grad.square().mean(1, keepdim=True))
                rows[partition][:, :-1] -= RATE * leaf.grad / (squares.sqrt() + 1e-8)
            self.relations = self.relations - RATE / 10 * relations.grad
        self.share(client, self.relations - before)
        for partition, part in rows.items():
            self.swap("put", partition, part)

    def report(self, which: str) -> float:
        """Print and return the mean loss over all edges, each right end against all nodes."""
        self.share(self.plan.ranks("parameter_client")[0], torch.zeros_like(self.relations))
        nodes = torch.empty(sum(self.graph.sizes), DIMENSION)
        for partition in range(self.graph.partitions):
            nodes[partition :: self.graph.partitions] = self.swap("get", partition)[:, :-1]
        loss = loss_of(nodes, self.relations, nodes, torch.tensor(self.graph.edges)).item()
        print(f"{which} loss {loss:.3f}", flush=True)
        return loss


def supervise(processes: list[ServerProcess]) -> None:
    """Wait for the end of all. The first that fails is raised, and ends the others with this process.

    All are watched from the beginning: while one is missing, none of the others gets ready.
    """
    deadline = time.monotonic() + 300
    while processes:
        starting = [process for process in processes if not process.ready]
        sentinels = [process.sentinel for process in processes]
        multiprocessing.connection.wait(sentinels, 0.5 if starting else None)
        for process in processes:
            if process.failure is not None:
                raise process.failure
        processes = [process for process in processes if process.exitcode is None]
        if starting and time.monotonic() > deadline:
            starting[0].wait_ready(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train embeddings with servers of many kinds.")
    parser.add_argument("--machines", type=int, default=2, help="how many there are to be (default 2)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the edges (default 4)")
    parser.add_argument("--backend", default="gloo", help="of torch's process groups (default gloo)")
    options = parser.parse_args()
    if options.machines < 1 or options.epochs < 1:
        parser.error("there is at least one machine, and one epoch")

    ranks = ProcessRanks.from_num_invocations(options.machines, -1)
    graph = Graph(partitions=2 * options.machines)
    plan = ranks.plan(num_groups_for_partition_server=STRIPES)
    parts: dict[int, Startable] = {
        **{rank: Trainer(plan, m, graph, options.epochs) for m, rank in enumerate(ranks.trainers)},
        **{rank: ParameterServer(plan) for rank in ranks.parameter_servers},
        **{rank: ParameterClient(plan) for rank in ranks.parameter_clients},
        ranks.lock_server: LockServer(plan, graph.partitions),
        **{rank: PartitionServer(plan, graph.sizes) for rank in ranks.partition_servers},
    }
    with tempfile.TemporaryDirectory() as folder:
        where, groups = f"file://{folder}/store", list(plan.groups.values())
        processes = []
        for rank, part in parts.items():
            more = {"backend": options.backend, "process_name": ranks.process_name(rank)}
            processes.append(start_server(part, where, plan.world_size, rank, groups, **more))
        supervise(processes)


if __name__ == "__main__":
    main()
