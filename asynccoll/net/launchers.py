"""Reads a process's place in the world out of arguments and environment. Opens and resolves nothing.

Order, first hit wins::

    arguments > ASYNCCOLL_* > RANK and WORLD_SIZE (torchrun, Ray Train, Kubeflow) > a world of one

A launcher that is present but not in that list (Open MPI, Slurm, ...) is an error that names its variable: N
processes that each believe they are alone would compute N different results without a word.

A reader is any object with ``source`` and ``read(environ) -> Finding | None``; a new launcher is one more
entry in `READERS`, before the general ones it must win against.
"""

from __future__ import annotations

import ipaddress
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, SupportsIndex

from asynccoll.net.foreign import refuse_foreign_launcher

__all__ = ["ASYNCCOLL", "READERS", "TORCH", "Finding", "Placement", "Reader", "VariableFamily", "detect"]

MAX_WORLD_SIZE = 2**31 - 1
"""Ranks and sizes travel as unsigned 32-bit numbers; the sign bit stays free."""

MAX_GENERATION = 2**63 - 1
"""Generations travel as unsigned 64-bit numbers."""

_HOW_TO_PLACE = (
    "set ASYNCCOLL_RANK, ASYNCCOLL_WORLD_SIZE, ASYNCCOLL_MASTER_ADDR and ASYNCCOLL_MASTER_PORT, "
    "or pass rank=, world_size= and address='tcp://host:port'"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process stands, and where rank 0 is to be found.

    Attributes:
        rank: own rank, ``0 <= rank < size``.
        size: number of ranks in the world.
        host: name or address of rank 0; None in a world of one.
        port: TCP port of rank 0; None in a world of one.
        secret: what was given for authentication, None where nothing was. Never shown by ``repr``.
        local_rank: rank among the processes of this host, None where the launcher does not say.
        node_rank: number of this host, None where the launcher does not say.
        generation: how often the launcher has restarted the job; ranks of different generations never meet.
        source: what gave the rank: ``"arguments"``, ``"ASYNCCOLL_*"``, ``"RANK/WORLD_SIZE"`` or ``"none"``.
        rendezvous_fd: a listening socket that the launcher holds open for rank 0, None where there is none.
        address_source: what gave ``host`` and ``port``: ``"arguments"``, ``"ASYNCCOLL_*"``, ``"RANK/WORLD_SIZE"`` (that is
            MASTER_ADDR and MASTER_PORT) or ``"none"``.
        interface: name of the network interface on which other ranks are to call this one, None for the one that leads to
            rank 0. Rank 0 is called at ``host``.
    """

    rank: int = 0
    size: int = 1
    host: str | None = None
    port: int | None = None
    secret: bytes | None = field(default=None, repr=False)
    local_rank: int | None = None
    node_rank: int | None = None
    generation: int = 0
    source: str = "none"
    rendezvous_fd: int | None = None
    interface: str | None = None
    address_source: str = "none"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one reader found. Rank and size are there together, or the reader found nothing."""

    rank: int
    size: int
    local_rank: int | None = None
    node_rank: int | None = None
    generation: int = 0


class Reader(Protocol):
    """One way of finding a rank in the environment."""

    @property
    def source(self) -> str:
        """Name under which a find is reported, for example ``"ASYNCCOLL_*"``."""

    def read(self, environ: Mapping[str, str]) -> Finding | None:
        """Rank and size; None where this launcher is absent. ValueError where it is present and garbled."""

    def read_size(self, environ: Mapping[str, str]) -> int | None:
        """The world size alone, for callers who give the rank themselves."""

    def read_rank(self, environ: Mapping[str, str]) -> int | None:
        """The rank alone, for callers who give the world size themselves."""

    def read_address(self, environ: Mapping[str, str]) -> tuple[str, int] | None:
        """Host and port of rank 0; None where this launcher does not say."""


@dataclass(frozen=True, slots=True)
class VariableFamily:
    """A reader for launchers that hand out one variable per fact."""

    source: str
    rank: str
    size: str
    host: str
    port: str
    local_rank: str
    node_rank: tuple[str, ...] = ()
    generation: str | None = None

    def read(self, environ: Mapping[str, str]) -> Finding | None:
        """Both variables or neither: one alone is a ValueError that names the missing one."""
        rank, size = self.read_rank(environ), self.read_size(environ)
        if rank is None and size is None:
            return None
        if rank is None or size is None:
            there, missing = (self.size, self.rank) if rank is None else (self.rank, self.size)
            hint = ""
            if rank is None and "JOB_COMPLETION_INDEX" in environ:
                # An Indexed Job numbers its pods but does not count them: users set the size and forget the
                # rank.
                hint = " (in a Kubernetes Indexed Job: ASYNCCOLL_RANK=$JOB_COMPLETION_INDEX)"
            raise ValueError(
                f"{there}={environ[there]!r} is set but {missing} is not: set both or neither{hint}"
            )
        check_rank(rank, size, f"{self.rank}={environ[self.rank]!r}", f"{self.size}={environ[self.size]!r}")
        node_rank = next((name for name in self.node_rank if name in environ), None)
        return Finding(
            rank=rank,
            size=size,
            local_rank=_read_number(environ, self.local_rank),
            node_rank=None if node_rank is None else _read_number(environ, node_rank),
            generation=_read_generation(environ, self.generation) or 0,
        )

    def read_size(self, environ: Mapping[str, str]) -> int | None:
        """The world size, at least 1; None where it is not set."""
        size = _read_number(environ, self.size)
        if size == 0:
            raise ValueError(f"{self.size}={environ[self.size]!r}: the world size is at least 1")
        return size

    def read_rank(self, environ: Mapping[str, str]) -> int | None:
        """The rank; None where it is not set."""
        return _read_number(environ, self.rank)

    def read_address(self, environ: Mapping[str, str]) -> tuple[str, int] | None:
        """Both variables or neither, so that a host never meets another family's port."""
        if self.host not in environ and self.port not in environ:
            return None
        for there, missing in ((self.host, self.port), (self.port, self.host)):
            if missing not in environ:
                raise ValueError(
                    f"{there}={environ[there]!r} is set but {missing} is not: rank 0 is found by both"
                )
        return _read_host(environ, self.host), _read_port(environ, self.port)


ASYNCCOLL = VariableFamily(
    source="ASYNCCOLL_*",
    rank="ASYNCCOLL_RANK",
    size="ASYNCCOLL_WORLD_SIZE",
    host="ASYNCCOLL_MASTER_ADDR",
    port="ASYNCCOLL_MASTER_PORT",
    local_rank="ASYNCCOLL_LOCAL_RANK",
)

# torchrun gives GROUP_RANK and a restart count, Ray Train NODE_RANK; Kubeflow and hand-written scripts
# neither.
TORCH = VariableFamily(
    source="RANK/WORLD_SIZE",
    rank="RANK",
    size="WORLD_SIZE",
    host="MASTER_ADDR",
    port="MASTER_PORT",
    local_rank="LOCAL_RANK",
    node_rank=("GROUP_RANK", "NODE_RANK"),
    generation="TORCHELASTIC_RESTART_COUNT",
)

READERS: tuple[Reader, ...] = (ASYNCCOLL, TORCH)
"""In the order of preference. Why ours first: it is set for us on purpose. Why RANK before any scheduler's
own
variables: torchrun or Ray inside a Slurm job both leave stale SLURM_* behind."""


def detect(
    address: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    secret: bytes | str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    readers: Sequence[Reader] = READERS,
) -> Placement:
    """This process's place in the world.

    Args:
        address: ``None`` or ``"env://"`` (take it from the environment), or ``"tcp://host:port"`` of rank 0
            (IPv6 addresses in brackets).
        rank: own rank. A missing half of the pair rank and world_size is taken from the environment.
        world_size: number of ranks.
        secret: shared secret; ``ASYNCCOLL_SECRET`` where it is None.
        environ: the environment to read.
        readers: the launchers to look for, in order.

    Surrounding blanks of a variable are ignored (``" 3 "`` is 3); an empty variable counts as garbled. Where
    several launchers are present the first reader wins and the others are not read at all. Host and port come
    as a pair from the first reader that has them. ``ASYNCCOLL_SECRET``, ``ASYNCCOLL_GENERATION``,
    ``ASYNCCOLL_RENDEZVOUS_FD`` and ``ASYNCCOLL_SOCKET_IFNAME`` count whoever gave the rank. A world of one needs no address,
    and none is read.

    Raises:
        ValueError: a garbled argument or variable (named, with its value), half of a pair, a rank outside of
        the
            world, no address for a world of more than one, or a launcher that is present but not supported.
    """
    given_address = _parse_address(address)
    finding, source = _find_rank(rank, world_size, environ, readers)
    if finding is None:
        if given_address is not None:
            raise ValueError(
                f"address={address!r} is given, but neither rank= and world_size= nor a launcher's variables say which "
                f"rank this is: {_HOW_TO_PLACE}"
            )
        refuse_foreign_launcher(environ)
        finding = Finding(rank=0, size=1)
    host: str | None = None
    port: int | None = None
    interface: str | None = None
    address_source = "none"
    if finding.size > 1:
        if given_address is not None:
            (host, port), address_source = given_address, "arguments"
        else:
            (host, port), address_source = _find_address(environ, readers, finding, source)
        interface = _read_interface(environ)
    generation = _read_generation(environ, "ASYNCCOLL_GENERATION")
    return Placement(
        rank=finding.rank,
        size=finding.size,
        host=host,
        port=port,
        secret=_read_secret(secret, environ),
        local_rank=finding.local_rank,
        node_rank=finding.node_rank,
        generation=finding.generation if generation is None else generation,
        source=source,
        rendezvous_fd=_read_number(environ, "ASYNCCOLL_RENDEZVOUS_FD"),
        interface=interface,
        address_source=address_source,
    )


def check_rank(rank: int, size: int, rank_as_given: str, size_as_given: str) -> None:
    """ValueError, showing both values as given, unless ``0 <= rank < size``."""
    if not 0 <= rank < size:
        raise ValueError(
            f"{rank_as_given} is outside of {size_as_given}: ranks run from 0 to world size - 1 ({size - 1})"
        )


def _find_rank(
    rank: int | None, world_size: int | None, environ: Mapping[str, str], readers: Sequence[Reader]
) -> tuple[Finding | None, str]:
    if rank is None and world_size is None:
        for reader in readers:
            finding = reader.read(environ)
            if finding is not None:
                return finding, reader.source
        return None, "none"
    # The half that was not given comes from the first reader that has it, whatever else that reader lacks.
    rank_as_given, size_as_given = f"rank={rank!r}", f"world_size={world_size!r}"
    if rank is not None:
        rank = _check_argument("rank", rank)
    if world_size is not None:
        world_size = _check_argument("world_size", world_size)
        if world_size == 0:
            raise ValueError("world_size=0: the world size is at least 1")
    for reader in readers:
        if rank is None:
            rank = reader.read_rank(environ)
            rank_as_given = f"rank {rank} ({reader.source})"
        if world_size is None:
            world_size = reader.read_size(environ)
            size_as_given = f"world size {world_size} ({reader.source})"
    if rank is None:
        raise ValueError(f"{size_as_given} is given but rank= is not, nor is it in the environment")
    if world_size is None:
        raise ValueError(f"{rank_as_given} is given but world_size= is not, nor is it in the environment")
    check_rank(rank, world_size, rank_as_given, size_as_given)
    return Finding(rank=rank, size=world_size), "arguments"


def _find_address(
    environ: Mapping[str, str], readers: Sequence[Reader], finding: Finding, source: str
) -> tuple[tuple[str, int], str]:
    """Host and port of rank 0, and what gave them."""
    for reader in readers:
        address = reader.read_address(environ)
        if address is not None:
            return address, reader.source
    raise ValueError(
        f"rank {finding.rank} of {finding.size} (from {source}) does not know where rank 0 is: set "
        "ASYNCCOLL_MASTER_ADDR and ASYNCCOLL_MASTER_PORT (or MASTER_ADDR and MASTER_PORT), "
        "or pass address='tcp://host:port'"
    )


def _parse_address(address: str | None) -> tuple[str, int] | None:
    if address is None or address == "env://":
        return None
    if isinstance(address, str):
        match = re.fullmatch(r"tcp://(\[[^][]+\]|[^][:/?#@]+):([^:/]+)", address)
        if match:
            name = f"address={address!r}"
            return parse_host(match[1], name), parse_port(match[2], name)
    raise ValueError(
        f"address={address!r} is not understood: it is None or 'env://' (take it from the environment), "
        "or 'tcp://host:port' with an IPv6 address in brackets"
    )


def _check_argument(name: str, value: SupportsIndex) -> int:
    """An int, whatever integer type it came in; bool is refused, because ``rank=True`` is always a slip."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number <= MAX_WORLD_SIZE:
        raise ValueError(f"{name}={value!r} is not an integer from 0 to {MAX_WORLD_SIZE}")
    return number


def _read_number(environ: Mapping[str, str], name: str, limit: int = MAX_WORLD_SIZE) -> int | None:
    """The variable as a non-negative integer, None where it is not set."""
    value = environ.get(name)
    return None if value is None else parse_number(value, f"{name}={value!r}", limit)


def _read_generation(environ: Mapping[str, str], name: str | None) -> int | None:
    return None if name is None else _read_number(environ, name, MAX_GENERATION)


def parse_number(value: str, shown: str, limit: int = MAX_WORLD_SIZE) -> int:
    """``value`` as an integer from 0 to ``limit``; a ValueError shows it as ``shown``."""
    digits = value.strip()
    if not digits:
        raise ValueError(f"{shown} is empty: unset it or give it an integer")
    # Not int(): it would take "1_000" and other scripts' digits, which no launcher writes.
    if re.fullmatch(r"-[0-9]+", digits):
        raise ValueError(f"{shown} is negative")
    if not re.fullmatch(r"[0-9]+", digits):
        raise ValueError(f"{shown} is not an integer")
    if len(digits.lstrip("0")) > len(str(limit)) or int(digits) > limit:
        raise ValueError(f"{shown} is larger than {limit}")
    return int(digits)


def _read_host(environ: Mapping[str, str], name: str) -> str:
    return parse_host(environ[name], f"{name}={environ[name]!r}")


def parse_host(value: str, shown: str) -> str:
    """A host name or an address without brackets; a ValueError shows it as ``shown``."""
    host = value.strip()
    if not host:
        raise ValueError(f"{shown} is empty: give the name or address of the host that rank 0 runs on")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or bare != host:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError:
            _refuse_host(shown)
        return bare
    if re.search(r"[\s/\[\]?#@,]", host):
        _refuse_host(shown)
    return host


def _refuse_host(shown: str) -> NoReturn:
    raise ValueError(
        f"{shown} is not a host name or an IP address (the port goes into its own variable, a scheme nowhere)"
    )


def _read_port(environ: Mapping[str, str], name: str) -> int:
    value = environ[name]
    if "://" in value:
        raise ValueError(
            f"{name}={value!r} is not a port number. Kubernetes sets variables of this form for every Service, here for "
            "one named after the variable: set ASYNCCOLL_MASTER_ADDR and ASYNCCOLL_MASTER_PORT instead, or "
            "enableServiceLinks: false in the pod"
        )
    return parse_port(value, f"{name}={value!r}")


def parse_port(value: str, shown: str) -> int:
    """A port from 1 to 65535; 0 is refused, because the other ranks could not find it."""
    port = parse_number(value, shown)
    if not 1 <= port <= 65535:
        raise ValueError(f"{shown} is not a port from 1 to 65535")
    return port


def _read_interface(environ: Mapping[str, str]) -> str | None:
    value = environ.get("ASYNCCOLL_SOCKET_IFNAME")
    if value is None:
        return None
    name = value.strip()
    if not name:
        raise ValueError(
            f"ASYNCCOLL_SOCKET_IFNAME={value!r} is empty: unset it or give the name of a network interface"
        )
    return name


def _read_secret(secret: bytes | str | None, environ: Mapping[str, str]) -> bytes | None:
    """The secret as bytes. Messages never show it."""
    name = "secret="
    if secret is None:
        secret, name = environ.get("ASYNCCOLL_SECRET"), "ASYNCCOLL_SECRET"
    if secret is None:
        return None
    if not isinstance(secret, str | bytes | bytearray):
        raise ValueError(f"{name} is a {type(secret).__name__}: give random text, or bytes")
    if not secret.strip():
        raise ValueError(f"{name} is empty: leave it out, or give the same random text to every rank")
    # The environment carries bytes that are not UTF-8 as surrogates: give back what the launcher wrote.
    raw = secret.encode("utf-8", "surrogateescape") if isinstance(secret, str) else bytes(secret)
    if not raw:
        raise ValueError(f"{name} is empty: leave it out, or give the same random text to every rank")
    return raw
