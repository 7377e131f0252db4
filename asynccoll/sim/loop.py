"""An event loop whose clock is virtual: it jumps to the next timer when nothing is ready. Knows nothing of collectives.

Programs run unmodified and deterministically, and an hour of timeouts passes in a moment. A program that waits for something
that can never happen is an error (`Stuck`) instead of a hang.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["SimLoop", "Stuck"]

_THREAD_SECONDS: Final = 5.0
"""Real seconds for which a loop with nothing to do waits for the other threads of its process."""


class Stuck(RuntimeError):
    """Every task waits, and no timer is set: the program would hang for ever."""


class _VirtualSelector(selectors.BaseSelector):
    """Never blocks: where a real selector would wait, the clock is moved."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        events = self._real.select(0)
        if not events:
            if timeout is None:
                return self._wait_for_threads()
            self.now += timeout
        return events

    def _wait_for_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing is left but what another thread may hand in: that takes real time."""
        if threading.active_count() > 1 and (events := self._real.select(_THREAD_SECONDS)):
            return events
        raise Stuck("all tasks wait and no timer is set: this program would hang")

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class SimLoop(asyncio.SelectorEventLoop):
    """A stdlib event loop in virtual time. `time()` starts at 0 and moves only when nothing is ready."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now
