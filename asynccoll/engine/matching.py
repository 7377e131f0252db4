"""Which calls of several ranks belong together when each names its key: the n-th use of a key on each. Knows no frames.

One rank of a group keeps it for all. A *use* is one operation to be: each rank takes part once, under a number that it chose
(its announcement). A use ends when every rank has come: by a grant, or, where a rank has withdrawn meanwhile, with that rank's
reason for those who came and for each who comes later. So there is state for outstanding uses only, and none for a key whose uses
are all over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from asynccoll.engine.group import MAX_PENDING
from asynccoll.errors import ProtocolError

__all__ = ["OVER", "Answer", "Matching"]

MAX_ANNOUNCED: Final = 2 * MAX_PENDING
"""Uses of one rank that may be outstanding: twice what a rank allows itself."""
OVER: Final[Mapping[str, Any]] = {"reason": "over"}
"""To the rank that withdrew: every rank has come, so its use is forgotten."""


class Answer(NamedTuple):
    """What one rank is to be told of its announcement."""

    rank: int
    number: int
    """The announcement."""
    body: Mapping[str, Any] | None
    """Why it has ended; None: it is granted, with all others of the same list."""


class _Use:
    """One operation to be."""

    __slots__ = ("came", "ended", "number", "origin", "waiting")

    def __init__(self) -> None:
        self.came = 0
        """Ranks that have come."""
        self.waiting: dict[int, int] = {}
        """Rank -> its announcement, while the use may still be granted."""
        self.ended: Mapping[str, Any] | None = None
        """Why it has ended, for those who come later."""
        self.origin = -1
        """The rank that withdrew, and the number of its announcement."""
        self.number = -1


class _Key:
    """The uses of one key that some rank has not come to."""

    __slots__ = ("taken", "uses")

    def __init__(self, size: int) -> None:
        self.uses: deque[_Use] = deque()
        """Oldest first. They complete in this order, since each rank comes to them in this order."""
        self.taken = [0] * size
        """Rank -> how many of them it has come to."""


class Matching:
    """The keys of one group of ``size`` ranks."""

    __slots__ = ("_keys", "_live", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: dict[str, _Key] = {}
        self._live: list[dict[int, _Use]] = [{} for _ in range(size)]
        """Rank -> announcement -> its use, until the rank has had its last answer."""

    def announce(self, rank: int, number: int, key: str) -> list[Answer]:
        """``rank`` uses ``key`` once more, under ``number``. Who is to be told what now.

        Raises:
            ProtocolError: the rank has used the number, or has too many uses outstanding.
        """
        live = self._live[rank]
        if number in live:
            raise ProtocolError(f"rank {rank} announced two keyed operations under one number")
        if len(live) >= MAX_ANNOUNCED:
            raise ProtocolError(f"rank {rank} announced more than {MAX_ANNOUNCED} keyed operations")
        entry = self._keys.get(key)
        if entry is None:
            entry = self._keys[key] = _Key(self._size)
        position = entry.taken[rank]
        entry.taken[rank] += 1
        if position == len(entry.uses):
            entry.uses.append(_Use())
        use = entry.uses[position]
        use.came += 1
        answers = []
        if use.ended is None:
            use.waiting[rank] = number
            live[number] = use
        else:
            answers.append(Answer(rank, number, use.ended))
        if use.came == self._size:
            answers += self._complete(use)
            entry.uses.popleft()
            entry.taken = [count - 1 for count in entry.taken]
            if not entry.uses:
                del self._keys[key]
        return answers

    def _complete(self, use: _Use) -> list[Answer]:
        """Every rank has come to ``use``."""
        if use.ended is not None:
            del self._live[use.origin][use.number]
            return [Answer(use.origin, use.number, OVER)]
        for rank, number in use.waiting.items():
            del self._live[rank][number]
        return [Answer(rank, number, None) for rank, number in sorted(use.waiting.items())]

    def withdraw(self, rank: int, number: int, body: Mapping[str, Any]) -> list[Answer]:
        """``rank`` ends its announcement ``number`` because of ``body``. Who is to be told what now.

        Nobody, where the announcement had its answer before. After a timeout the rank itself is told too: who had not come.
        """
        use = self._live[rank].get(number)
        if use is None or use.ended is not None:
            return []
        body = {**body, "origin": rank}
        late = body["reason"] == "timeout"
        if late:
            body["missing"] = [other for other in range(self._size) if other not in use.waiting]
        answers = []
        for other, theirs in use.waiting.items():
            if other != rank:
                del self._live[other][theirs]
            if other != rank or late:
                answers.append(Answer(other, theirs, body))
        use.ended, use.origin, use.number = body, rank, number
        use.waiting.clear()
        return answers

    @property
    def outstanding(self) -> int:
        """Uses that are kept."""
        return sum(len(entry.uses) for entry in self._keys.values())
