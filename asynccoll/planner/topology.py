"""`Topology`: on which host each rank is, and how fast the links between them are. Knows numbers that others measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, NamedTuple, TypeAlias, final

from asynccoll.planner import documents
from asynccoll.planner.given import integer, integers, items, shown

__all__ = ["LOCAL", "MOST_BYTES", "REMOTE", "Link", "Matrix", "Topology", "checked", "checked_bytes"]

Matrix: TypeAlias = tuple[tuple[float, ...], ...]
"""W rows of W numbers: ``[a][b]`` is about what rank a sends to rank b. The diagonal is 0.0 and means nothing."""

_FORM: Final = "asynccoll.Topology"
_LATENCIES: Final = (0.0, 1e6)
_BANDWIDTHS: Final = (1.0, 1e18)
"""What can be a measurement. Beyond it sums of times would no longer be numbers."""

MOST_BYTES: Final = 1 << 80
"""Bytes that a message can have. Beyond it times would no longer be numbers."""


def checked_bytes(nbytes: object) -> int:
    """``nbytes`` as an int. TypeError where it is not an integer, ValueError where it is below 0 or above `MOST_BYTES`."""
    number = integer(nbytes, "give a number of bytes: nbytes is")
    if number < 0:
        raise ValueError(f"nbytes is {shown(number)}; it must be 0 or more")
    if number > MOST_BYTES:
        raise ValueError(f"nbytes is an integer of {number.bit_length()} bits; it must be at most 2^80")
    return number


class Link(NamedTuple):
    """What it costs to send from one rank to another."""

    latency: float
    """Seconds until the first byte is there."""
    bandwidth: float
    """Bytes per second."""

    def seconds(self, nbytes: float) -> float:
        """Time for one message of ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


LOCAL: Final = Link(20e-6, 2e9)
"""Assumed between ranks of one host where nothing was measured: TCP over loopback, as an order of magnitude."""
REMOTE: Final = Link(100e-6, 1.25e9)
"""Assumed between hosts where nothing was measured: TCP over 10 Gb/s Ethernet, as an order of magnitude."""


@final
@dataclass(frozen=True, slots=True, repr=False)
class Topology:
    """Hosts of ranks 0 to W - 1 and, where somebody has measured them, the links. Make one with `from_hosts`; it never changes."""

    hosts: tuple[str, ...]
    """Name of each rank's host."""
    latency: Matrix | None = None
    """Seconds, W x W; None where nothing was measured."""
    bandwidth: Matrix | None = None
    """Bytes per second, W x W; None where nothing was measured."""

    def __post_init__(self) -> None:
        """Check every field, and turn rows of any numbers (lists, numpy) into tuples of floats.

        Raises:
            ValueError: no ranks, a name or a number that is not possible, a matrix that is not W x W; the message says which.
            TypeError: something is of another type.
        """
        put = object.__setattr__
        put(
            self,
            "hosts",
            tuple(items(self.hosts, "hosts is", "give the name of each rank's host, as a list")),
        )
        if not self.hosts:
            raise ValueError("hosts is empty: a topology has at least one rank")
        for rank, host in enumerate(self.hosts):
            if not isinstance(host, str):
                raise TypeError(f"the host of rank {rank} is {shown(host)}, which is not a str")
            if not host or not host.isprintable() or host != host.strip():
                raise ValueError(
                    f"the host of rank {rank} is {host!r}; use a printable name, no blanks at its ends"
                )
        if self.latency is not None:
            put(self, "latency", _matrix("latency", self.latency, self.world_size, _LATENCIES))
        if self.bandwidth is not None:
            put(self, "bandwidth", _matrix("bandwidth", self.bandwidth, self.world_size, _BANDWIDTHS))

    @classmethod
    def from_hosts(
        cls,
        hosts: Iterable[str],
        *,
        latency: Sequence[Sequence[float]] | None = None,
        bandwidth: Sequence[Sequence[float]] | None = None,
    ) -> Topology:
        """The topology of ``len(hosts)`` ranks.

        Args:
            hosts: name of the host of each rank, in rank order.
            latency: seconds, W x W: ``[a][b]`` from rank a to rank b; 0 to 1e6. Both ways may differ. The diagonal is ignored.
            bandwidth: bytes per second, W x W, 1 to 1e18.

        Raises:
            ValueError, TypeError: as for the fields.
        """
        # Whatever kind of lists they are become tuples in `__post_init__`, however a topology comes to be.
        return cls(hosts, latency, bandwidth)  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """0 to ``world_size`` - 1."""
        return tuple(range(self.world_size))

    @property
    def measured(self) -> bool:
        """Whether there is a matrix."""
        return self.latency is not None or self.bandwidth is not None

    def ranks_on(self, host: str) -> tuple[int, ...]:
        """The ranks on ``host``, ascending. ValueError where there is no such host."""
        found = tuple(rank for rank, name in enumerate(self.hosts) if name == host)
        if not found:
            raise ValueError(f"there is no host {host!r}; there is: {', '.join(dict.fromkeys(self.hosts))}")
        return found

    def link(self, source: int, target: int) -> Link:
        """From rank ``source`` to rank ``target``: what was measured, else what is assumed for one host, or for two.

        ValueError where there is no such rank, TypeError for what is no integer.
        """
        for rank in (source, target):
            if not 0 <= integer(rank, "give the number of a rank, not") < self.world_size:
                raise ValueError(f"there is no rank {shown(rank)}; use 0 to {self.world_size - 1}")
        assumed = LOCAL if self.hosts[source] == self.hosts[target] else REMOTE
        return Link(
            assumed.latency if self.latency is None else self.latency[source][target],
            assumed.bandwidth if self.bandwidth is None else self.bandwidth[source][target],
        )

    def reordered(self, order: Sequence[int]) -> Topology:
        """The same links among fewer or renumbered ranks: rank i of the result is rank ``order[i]`` of this one.

        ``topology.reordered(ring_order(topology))`` is the topology of the group that has its ranks in the order of the ring.

        Raises:
            ValueError: ``order`` is empty, names a rank twice or one that does not exist.
            TypeError: it is no list of integers.
        """
        wanted = f"name ranks from 0 to {self.world_size - 1}, none of them twice"
        order = integers(order, "order is", wanted)
        if (
            not order
            or len(set(order)) < len(order)
            or not all(0 <= rank < self.world_size for rank in order)
        ):
            raise ValueError(f"order is {shown(order)}; {wanted}")
        latency, bandwidth = (
            None if matrix is None else tuple(tuple(matrix[a][b] for b in order) for a in order)
            for matrix in (self.latency, self.bandwidth)
        )
        return Topology(tuple(self.hosts[rank] for rank in order), latency, bandwidth)

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads; numbers come back as they were, bit for bit."""
        return documents.dump(
            _FORM,
            {
                "hosts": list(self.hosts),
                "latency": None if self.latency is None else [list(row) for row in self.latency],
                "bandwidth": None if self.bandwidth is None else [list(row) for row in self.bandwidth],
            },
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Topology:
        """The topology that `to_json` wrote. ValueError, with the field, where the text says anything else."""
        found = documents.load(text, _FORM, ("hosts", "latency", "bandwidth"))
        hosts = found["hosts"]
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            documents.reject(_FORM, "hosts", hosts, "the name of each rank's host, as a list")
        for name in ("latency", "bandwidth"):
            if found[name] is not None and not _is_table(found[name]):
                documents.reject(_FORM, name, found[name], "null, or a list of rows of numbers")
        try:
            return cls.from_hosts(hosts, latency=found["latency"], bandwidth=found["bandwidth"])
        except ValueError as error:
            raise ValueError(f"{_FORM}: {error}") from None

    def __repr__(self) -> str:
        links = "measured" if self.measured else "assumed"
        return f"<Topology {self.world_size} ranks on {len(set(self.hosts))} hosts, links {links}>"


def checked(topology: object) -> Topology:
    """``topology``, if it is one; else a TypeError that says how to make one."""
    if not isinstance(topology, Topology):
        raise TypeError(
            f'topology is {shown(topology)}; give a Topology, such as Topology.from_hosts(["host-a", "host-a", "host-b"])'
        )
    return topology


def _matrix(name: str, rows: Any, size: int, bounds: tuple[float, float]) -> Matrix:
    least, most = bounds
    rows = items(rows, f"{name} is", f"give {size} rows of {size} numbers")
    if len(rows) != size:
        raise ValueError(f"{name} has {len(rows)} rows for {size} ranks; give one for each rank")
    found = []
    for a, given in enumerate(rows):
        row = items(given, f"{name}[{a}] is", f"give {size} rows of {size} numbers")
        if len(row) != size:
            raise ValueError(f"{name}[{a}] has {len(row)} numbers for {size} ranks; give one for each rank")
        numbers = []
        for b, value in enumerate(row):
            if a == b:
                numbers.append(0.0)
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name}[{a}][{b}] is {shown(value)}, which is not a number")
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if not least <= number <= most:
                raise ValueError(f"{name}[{a}][{b}] is {shown(value)}; it must be from {least:g} to {most:g}")
            numbers.append(number)
        found.append(tuple(numbers))
    return tuple(found)


def _is_table(value: Any) -> bool:
    """Rows of numbers; null only on the diagonal, where a tool may have nothing to say."""
    return isinstance(value, list) and all(
        isinstance(row, list)
        and all(
            (isinstance(item, int | float) and not isinstance(item, bool)) or (item is None and a == b)
            for b, item in enumerate(row)
        )
        for a, row in enumerate(value)
    )
