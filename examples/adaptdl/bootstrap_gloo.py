"""Bring up torch's process group with nothing but a broadcast: rank 0 says where its store is.

    asynccoll run -n 2 examples/adaptdl/bootstrap_gloo.py

Rank 0 opens the store first, on a port that the kernel chooses, and then tells the port. AdaptDL picks a port that is free, closes
it, and hopes that it stays free until torch opens it.
"""

import os

import torch
import torch.distributed as dist

from asynccoll import collective

RANK, REPLICAS = int(os.environ["ASYNCCOLL_RANK"]), int(os.environ["ASYNCCOLL_WORLD_SIZE"])
HOST = "127.0.0.1"  # beyond one host: rank 0's address

collective.initialize()
store = dist.TCPStore(HOST, 0, REPLICAS, is_master=True, wait_for_workers=False) if RANK == 0 else None
host, port = collective.broadcast((HOST, store.port) if RANK == 0 else None)
if store is None:
    store = dist.TCPStore(host, port, REPLICAS, is_master=False)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=REPLICAS)

total = torch.tensor([float(RANK)])
dist.all_reduce(total)
assert total.item() == sum(range(REPLICAS))
if RANK == 0:
    print(f"gloo is up on {REPLICAS} replicas; its sum of all ranks is {total.item():.0f}")

dist.destroy_process_group()
collective.teardown()
