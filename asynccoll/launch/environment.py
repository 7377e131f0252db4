"""The environment by which a rank learns who it is. Knows names and values; starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["rank_environment"]

_IDENTITY = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SECRET",
    "RENDEZVOUS_FD",
    "GENERATION",
)
"""``ASYNCCOLL_`` variables that say who a process is: those of an outer job must never reach an inner one."""


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(
    environ: Mapping[str, str], rank: int, nproc: int, port: int, secret: str, listener_fd: int
) -> dict[str, str]:
    """The environment of ``rank``: ``environ`` with this job's identity in place of an outer job's.

    Two defaults are set where ``environ`` has none: ``PYTHONUNBUFFERED=1``, so that output is live although
    it goes through a pipe, and, for more than one rank, ``OMP_NUM_THREADS`` = usable cores / ranks (at least
    1). Without the latter each rank's numpy and torch start one thread per core, and the ranks fight for the
    cores.
    """
    env = dict(environ)
    for name in _IDENTITY:
        env.pop(f"ASYNCCOLL_{name}", None)
    env["ASYNCCOLL_RANK"] = env["ASYNCCOLL_LOCAL_RANK"] = str(rank)
    env["ASYNCCOLL_WORLD_SIZE"] = str(nproc)
    env["ASYNCCOLL_MASTER_ADDR"] = "127.0.0.1"
    env["ASYNCCOLL_MASTER_PORT"] = str(port)
    env["ASYNCCOLL_SECRET"] = secret
    if rank == 0:
        env["ASYNCCOLL_RENDEZVOUS_FD"] = str(listener_fd)
    env.setdefault("PYTHONUNBUFFERED", "1")
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // nproc)))
    return env
