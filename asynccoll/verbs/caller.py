"""What a verb needs of the communicator that it is a method of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asynccoll import calls
from asynccoll.streams import Stream
from asynccoll.work import Work

__all__ = ["Caller"]


class Caller(ABC):
    """Base of the classes of verbs."""

    _place: calls.Place

    @abstractmethod
    def _call(
        self,
        verb: str,
        prepare: Callable[[], calls.Call],
        timeout: float | timedelta | None,
        key: str | None,
        name: str | None,
    ) -> Work[Any]:
        """Start the operation that ``prepare`` makes of the arguments. It takes its number whatever becomes of it."""

    def _stream(self, start: Callable[[calls.Parts], Work[Any]]) -> Stream:
        """What gives the parts of the operation that ``start`` begins."""
        return Stream(start)
