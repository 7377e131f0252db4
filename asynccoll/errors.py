"""Every exception that asynccoll raises on purpose. Knows nothing of sockets, loops or engines.

::

    AsynccollError
    ├── CollectiveError            one operation failed: .op .seq .key .group .rank .elapsed
    │   ├── PeerLost               a rank died or became unreachable: .peer .peers .reason .addresses
    │   ├── CollectiveTimeout      (also TimeoutError) the deadline passed: .missing
    │   ├── CollectiveMismatch     ranks disagree on what to do: .field .values
    │   ├── CollectiveCancelled    another rank cancelled it: .origin
    │   ├── RemoteError            another rank failed locally: .origin .type_name .remote_traceback .original
    │   └── CommunicatorClosed     a rank left the communicator: .origin
    ├── RendezvousError            the mesh did not form: .address .elapsed .missing
    │   └── AuthenticationError    a peer did not prove that it knows the secret
    ├── ProtocolError              a peer broke the wire format
    ├── NotInitialized             (also RuntimeError)
    └── AlreadyInitialized         (also RuntimeError)

Errors carry data; messages are built from it. Every one survives pickling with its data, so that a launcher
can hand a rank's failure to its parent process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "AlreadyInitialized",
    "AsynccollError",
    "AuthenticationError",
    "CollectiveCancelled",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CommunicatorClosed",
    "NotInitialized",
    "OpContext",
    "PeerLost",
    "ProtocolError",
    "RemoteError",
    "RendezvousError",
]


def _rebuild(cls: type[AsynccollError], args: tuple[Any, ...], state: dict[str, Any]) -> AsynccollError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def name_ranks(ranks: Iterable[int]) -> str:
    """``"rank 3"``, or ``"ranks 1, 2, 5"`` in ascending order (at most 16 are spelled out)."""
    ordered = sorted(ranks)
    shown = ", ".join(map(str, ordered[:16]))
    if len(ordered) > 16:
        shown += f" and {len(ordered) - 16} more"
    return f"rank {shown}" if len(ordered) == 1 else f"ranks {shown}"


class AsynccollError(Exception):
    """Root of the tree: catch it to catch everything asynccoll raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        return (_rebuild, (type(self), self.args, state))


class OpContext(NamedTuple):
    """Where an operation stands, as every `CollectiveError` reports it."""

    op: str = "operation"
    """Verb, for example ``"allreduce"``."""
    seq: int = -1
    """Number of the operation on its communicator, in call order; -1 where there is none."""
    group: str = "world"
    """Name of the communicator."""
    rank: int = -1
    """This process's rank in that communicator."""
    elapsed: float = 0.0
    """Seconds from the call to the failure."""
    key: str | None = None
    """Key of a keyed operation, which has no number in call order."""


class CollectiveError(AsynccollError):
    """One collective operation ended without a result.

    Attributes:
        op: verb of the operation, ``"allreduce"`` for example.
        seq: its number on the communicator, in call order; -1 where it has none (a keyed operation, a message).
        key: key of a keyed operation, else None.
        group: name of the communicator.
        rank: own rank in it.
        elapsed: seconds from the call to the failure.
    """

    def __init__(self, detail: str, context: OpContext = OpContext()) -> None:  # noqa: B008 (immutable)
        super().__init__(detail)
        self.detail = detail
        self.place(context)

    def place(self, context: OpContext) -> None:
        """Say where it happened."""
        self.op, self.seq, self.group, self.rank, self.elapsed, self.key = context

    def __str__(self) -> str:
        where = self.op
        if self.key is not None:
            where += f" key {self.key!r}"
        elif self.seq >= 0:
            where += f" #{self.seq}"
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        return f"{who}{where} on {self.group!r} after {self.elapsed:.3f} s: {self.detail}"


EVICTED = "evicted"
"""First word of the reason on a rank that the others have given up."""


class PeerLost(CollectiveError):
    """A rank died, or became unreachable, before the operation was complete. Every survivor names the same rank.

    `asynccoll.Communicator.shrink` gives the survivors a communicator without it. A rank that was given up although it lives (it
    was stopped, or cut off) names itself, with a reason that begins with ``"evicted"``.

    Attributes:
        peer: the lowest lost rank.
        peers: every rank of the communicator known to be lost.
        reason: what was observed, for example ``"connection closed without goodbye"``.
        addresses: rank -> ``"host:port"`` of the lost ranks, where it is known.
    """

    def __init__(
        self,
        peers: Iterable[int],
        reason: str,
        context: OpContext = OpContext(),  # noqa: B008
        *,
        addresses: Mapping[int, str] | None = None,
        remedy: str = "",
    ) -> None:
        """``remedy``: what to do, in place of the usual."""
        self.addresses = dict(addresses or {})
        self.peers = frozenset(peers)
        self.peer = min(self.peers)
        self.reason = reason
        if not remedy and reason.startswith(EVICTED):
            remedy = "The others go on without this process; close the communicator, and join a new mesh."
        elif not remedy:
            remedy = (
                "Look at that process's own output for the cause; go on without it by shrink(), or close this communicator and "
                "start again."
            )
        places = [self.addresses[rank] for rank in sorted(self.addresses)[:4]]
        where = f"; at {', '.join(places)}" if places else ""
        super().__init__(f"lost {name_ranks(self.peers)} ({reason}{where}). {remedy}", context)


class CollectiveTimeout(CollectiveError, TimeoutError):
    """The operation's deadline passed. ``missing`` holds the ranks that had not arrived.

    Attributes:
        missing: ranks that had not called the operation (empty where all had, and data was still under way). Of a `recv` the
            ranks from which a message could have come; of a `send` the rank that did not receive it.
        limit: the deadline in seconds.
    """

    def __init__(
        self,
        missing: Iterable[int],
        limit: float,
        context: OpContext = OpContext(),  # noqa: B008
        *,
        note: str = "",
        waited_for: str = "",
    ) -> None:
        """``waited_for``: what did not happen and a remedy, in place of the sentence about ranks that did not call."""
        self.missing = frozenset(missing)
        self.limit = limit
        if waited_for:
            what = waited_for
        else:
            if self.missing:
                what = f"{name_ranks(self.missing)} did not call it"
            else:
                what = "every rank called it, but data did not arrive in time"
            what += f"{note}. Check that all ranks make the same calls in the same order"
        super().__init__(f"timed out (limit {limit:g} s): {what}, or raise timeout=.", context)


class CollectiveMismatch(CollectiveError):
    """The ranks do not agree on the operation. Raised on every rank; no rank got a result.

    Attributes:
        field: what differs: ``"verb"``, ``"path"``, ``"op"``, ``"dtype"``, ``"shape"``, ``"root"``, ``"name"``,
            ``"algorithm"`` or ``"structure"``.
        values: rank -> that rank's value of the field (ranks that did not answer are absent).
        sites: rank -> where that rank made the call, for reading only.
    """

    def __init__(
        self,
        field: str,
        values: Mapping[int, Any],
        context: OpContext = OpContext(),  # noqa: B008
        *,
        sites: Mapping[int, str] | None = None,
    ) -> None:
        self.field = field
        self.values = dict(values)
        self.sites = dict(sites or {})
        groups: dict[str, list[int]] = {}
        for rank, value in sorted(self.values.items()):
            groups.setdefault(repr(value) if field == "name" else str(value), []).append(rank)
        odd = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
        listed = "; ".join(
            f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in odd
        )
        places: dict[str, list[int]] = {}
        for rank, site in sorted(self.sites.items()):
            places.setdefault(site, []).append(rank)
        sites_text = ""
        if places:
            sites_text = (
                f" Called at: {', '.join(f'{name_ranks(ranks)} {site}' for site, ranks in places.items())}."
            )
        super().__init__(
            f"ranks disagree on {field}: {listed}.{sites_text} Make the same call on every rank.", context
        )


class CollectiveCancelled(CollectiveError):
    """Another rank cancelled its await, so the operation ended everywhere. The mesh stays usable.

    Attributes:
        origin: the rank that cancelled.
    """

    def __init__(self, origin: int, context: OpContext = OpContext()) -> None:  # noqa: B008
        self.origin = origin
        super().__init__(
            f"cancelled by rank {origin}. The communicator is in step: the next operation works.", context
        )


class RemoteError(CollectiveError):
    """Another rank's part of the operation failed locally, so it ended everywhere. The mesh stays usable.

    Attributes:
        origin: the rank on which it failed.
        type_name: qualified name of the exception there.
        remote_traceback: its traceback as text (empty where there is none).
        original: the exception itself where it can be rebuilt here, else None.
    """

    def __init__(
        self,
        origin: int,
        type_name: str,
        message: str,
        context: OpContext = OpContext(),  # noqa: B008
        *,
        remote_traceback: str = "",
        original: BaseException | None = None,
    ) -> None:
        self.origin = origin
        self.type_name = type_name
        self.remote_traceback = remote_traceback
        self.original = original
        tail = (
            f"\n--- traceback of rank {origin} ---\n{remote_traceback.rstrip()}" if remote_traceback else ""
        )
        super().__init__(f"failed on rank {origin} with {type_name}: {message}{tail}", context)


class CommunicatorClosed(CollectiveError):
    """A rank left the communicator (or this one closed it), so the operation cannot complete.

    Attributes:
        origin: the rank that left.
        cause: why, in its own words: ``"closed"``, or what ended its ``async with`` block.
    """

    def __init__(self, origin: int, context: OpContext = OpContext(), *, cause: str = "closed") -> None:  # noqa: B008
        self.origin = origin
        self.cause = cause
        super().__init__(
            f"rank {origin} left the communicator ({cause}). Every rank must finish its operations before it closes.",
            context,
        )


class RendezvousError(AsynccollError):
    """The mesh did not form.

    Attributes:
        address: where rank 0 was to be found, ``"host:port"``.
        elapsed: seconds spent.
        missing: ranks that had not joined, as far as this rank knows.
    """

    def __init__(
        self, message: str, *, address: str = "", elapsed: float = 0.0, missing: Iterable[int] = ()
    ) -> None:
        self.address = address
        self.elapsed = elapsed
        self.missing = frozenset(missing)
        super().__init__(message)


class AuthenticationError(RendezvousError):
    """A peer could not prove that it knows the secret, or this rank could not prove it to a peer; or, with TLS, one does not accept
    the other's certificate.
    """


class ProtocolError(AsynccollError):
    """A peer sent bytes that are not asynccoll's wire format. The connection to it is closed."""


class NotInitialized(AsynccollError, RuntimeError):
    """An operation was called before `init()` or after `shutdown()`."""


class AlreadyInitialized(AsynccollError, RuntimeError):
    """`init()` was called while a default communicator is open."""
