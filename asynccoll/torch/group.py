"""`AsynccollGroup`: a `torch.distributed.ProcessGroup` on a communicator. Knows what torch asks of a group besides collectives."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asynccoll.sync import SyncCommunicator
from asynccoll.torch.forms import Forms
from asynccoll.torch.untraced import untraced
from asynccoll.torch.work import Callbacks, GroupWork, Started

__all__ = ["AsynccollGroup"]

NAME = "asynccoll"
CPU = torch.device("cpu")


@untraced
class AsynccollGroup(Forms, dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """One process group of torch's. Its operations run in the thread of the mesh; its calls may come from any thread.

    The group that formed the mesh owns it, with the thread; groups of its ranks are communicators on the same mesh.
    """

    def __init__(
        self,
        communicator: SyncCommunicator,
        store: Any,
        timeout: float | None,
        callbacks: Callbacks,
        *,
        owner: bool,
    ) -> None:
        """``owner``: the communicator has formed the mesh, and goes with this group."""
        super().__init__(communicator.rank, communicator.world_size)
        self._comm = communicator
        self._store = store
        self._limit = timeout
        self._callbacks = callbacks
        self._owner = owner
        self._started = 0
        self._starting = threading.Lock()
        self._batch = None
        self._name = ""
        self._desc = "undefined"

    @property
    def communicator(self) -> SyncCommunicator:
        """What the group runs on, for verbs that torch does not have."""
        return self._comm

    # -- who ------------------------------------------------------------------------------------------------

    def getRank(self) -> int:
        """Rank of this process in the group."""
        return self._comm.rank

    def getSize(self) -> int:
        """How many ranks the group has."""
        return self._comm.world_size

    rank, size = getRank, getSize

    def getBackendName(self) -> str:
        """``"asynccoll"``."""
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """Name by which functional collectives find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Once, by torch."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What the user called the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Once, by torch."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        """The same as `getGroupName`."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The same as `getGroupDesc`."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> AsynccollGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"the backend {NAME!r} has no tensors on {device}: it works on those of the CPU"
            )
        return self

    def get_group_store(self) -> Any:
        """The store through which the group met."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: operations are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has started on the group."""
        return self._started

    def _has_hooks(self) -> bool:
        return False

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that blocks. Every rank that came hears of all that did not, with and without ``wait_all_ranks``.

        Raises:
            CollectiveTimeout: they did not come within ``timeout``, or the group's own limit; ``missing`` holds them.
        """
        options = dist.BarrierOptions()
        if timeout is not None:
            # Zero is "at once" here; in options, which have whole milliseconds, it says that there is no limit of their own.
            options.timeout = max(timeout, timedelta(milliseconds=1))
        self.barrier(options).wait()

    # -- coalescing: works that torch wants to have as one ------------------------------------------------------

    supports_coalescing = False
    """`batch_isend_irecv` starts its messages one by one, which never wait for each other here."""

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        works, self._batch = self._batch or [], None
        tensors = [tensor for work in works for tensor in work.tensors]
        return GroupWork(Started(works, tensors), self._callbacks)

    # -- the end --------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave in good order; what is pending fails with `CommunicatorClosed`. The peers hear at once. Twice is silent."""
        self._comm.close()
        if self._owner:
            self._callbacks.close()

    def abort(self) -> None:
        """The same as `shutdown`: nothing that is pending is waited for."""
        self.shutdown()
