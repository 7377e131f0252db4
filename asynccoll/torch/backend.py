"""How torch gets a process group for the backend "asynccoll". Knows which mesh a new group belongs to.

The default group forms a mesh; a group of its ranks is a communicator on that mesh, so that it costs no connections, and a rank
that dies ends only the groups that hold it. A group whose default group is another backend's forms a mesh of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from asynccoll.torch.group import AsynccollGroup
from asynccoll.torch.meshes import open_by_store
from asynccoll.torch.work import Callbacks

__all__ = ["create"]


def create(options: Any, _: Any = None) -> AsynccollGroup:
    """The group that torch's ``init_process_group`` and ``new_group`` ask for. Blocks until its ranks have come.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, ``group_rank``, ``group_size``, timeout, and
            ``global_ranks_in_group``, which is empty for the default group.

    Raises:
        RendezvousError: ranks did not come in time; it names them.
        ValueError: the timeout is not positive; raised before anything is asked of the store, so that no rank waits for one
            that has raised.
    """
    seconds = options.timeout.total_seconds()
    if not seconds > 0:
        raise ValueError(
            f"rank {options.group_rank}: timeout={options.timeout!r} of a process group is not positive (torch counts in "
            "nanoseconds: more than 292 years become negative): pass datetime.timedelta(days=365) for as good as no limit"
        )
    limit = None if math.isinf(seconds) else seconds
    ranks = list(options.global_ranks_in_group)
    parent = dist.group.WORLD if ranks and dist.is_initialized() else None
    if isinstance(parent, AsynccollGroup):
        group = parent.communicator.new_group(ranks, options.group_id)
        assert group is not None  # torch asks on members only
        return AsynccollGroup(group, options.store, limit, parent._callbacks, owner=False)
    communicator = open_by_store(options.store, options.group_rank, options.group_size, limit)
    return AsynccollGroup(communicator, options.store, limit, Callbacks(), owner=True)
