"""A communicator whose loop runs in a thread of its own, called from any thread. Knows how calls get there, not what blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

from asynccoll.background import LoopThread
from asynccoll.calls import Parts
from asynccoll.communicator import Communicator
from asynccoll.engine.group import MAX_PENDING
from asynccoll.errors import NotInitialized
from asynccoll.groups import Lineage
from asynccoll.pending import Pending, SyncStream

__all__ = ["Threaded"]


class Threaded(Communicator):
    """A communicator whose calls come from any thread: prepared there, started in the loop's thread."""

    def __init__(self, communicator: Communicator, thread: LoopThread) -> None:
        # The same communicator, with its pump and its groups: all that differs is how a call gets to the loop.
        self.__dict__.update(communicator.__dict__)
        self._thread = thread
        self._under_way: set[object] = set()
        """Calls whose end nobody has seen yet; the engine counts only those that the loop's thread has started. No lock: it is
        changed from both threads, and a signal handler may end a call in the middle of another."""

    def _call(self, *call: Any) -> Any:
        self._usable()
        prepared = self._prepared(*call)
        pending: Pending[Any] = Pending(self._thread)
        self._under_way.add(pending)
        pending.add_done_callback(self._under_way.discard)
        self._thread.soon(lambda: pending.begin(lambda: self._start(prepared)))
        return pending

    def _stream(self, start: Callable[[Parts], Any]) -> Any:
        return SyncStream(start, self._thread)

    def _sub(self, comm: int, name: str, lineage: Lineage | None = None) -> Self:
        return type(self)(Communicator(self._pump, name, self._options, comm, lineage), self._thread)

    def _skip(self, refused: Any) -> None:
        self._thread.soon(lambda: self._start(refused).exception())

    def _usable(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"this process is a fork of process {self._pid}, which opened the communicator; "
                "call asynccoll.sync.init() in the child, with ranks of its own"
            )
        if self._pump.closed or not self._thread.alive:
            raise NotInitialized(
                f"communicator {self._name!r} is closed; open a new one with asynccoll.sync.init()"
            )
        if len(self._under_way) >= MAX_PENDING or self._group.crowded:
            raise RuntimeError(
                f"{MAX_PENDING} operations of communicator {self._name!r} are under way, which is the most; wait for some first"
            )
