"""`ProcessRanks`: the ranks of a BigGraph training, as its own planner numbers them. Knows the roles, not what they do.

Each of N machines has a trainer, a parameter server and a parameter client; the first has the lock server too; partition servers
are on every machine (-1), nowhere (0), or where their user starts them (P > 0)::

    N = 2, P = 3     0  1   trainers              6        lock server
                     2  3   parameter servers     7  8  9  partition servers
                     4  5   parameter clients
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asynccoll.planner.given import integer, shown
from asynccoll.planner.ranks import MOST_RANKS, RankPlan, check_members

__all__ = ["ProcessRanks"]

_GROUPS: Final = 16
"""BigGraph's default for ``num_groups_for_partition_server``."""
_PER_SHARD: Final = 1
"""BigGraph's default for ``num_groups_per_sharded_partition_server``."""


class _Blocks(NamedTuple):
    """The fields alone: a NamedTuple keeps nothing besides, and `ProcessRanks` must know who starts the partition servers."""

    world_size: int
    trainers: list[int]
    parameter_servers: list[int]
    parameter_clients: list[int]
    lock_server: int
    partition_servers: list[int]


class ProcessRanks(_Blocks):
    """The rank of each process of a distributed training: a named tuple of blocks without gaps, in the order of its fields.

    Fields: ``world_size`` (int), ``trainers``, ``parameter_servers``, ``parameter_clients`` (lists of as many ranks as machines),
    ``lock_server`` (one rank), ``partition_servers`` (list of ranks).

    Make one with `from_num_invocations`. `_replace` and `_make` keep the fields only: then partition servers count as ones that
    their user starts.
    """

    _explicit: int | None = None

    @classmethod
    def from_num_invocations(cls, num_machines: int, num_partition_servers: int) -> ProcessRanks:
        """The ranks for ``num_machines`` >= 1 machines.

        Args:
            num_partition_servers: -1: every machine starts a partition server. 0: there are none, partitions go through files.
                P > 0: the user starts P of them.

        Raises:
            ValueError: not an integer (bool is none), no machine, or less than -1: ranks would be reserved that nobody fills.
        """
        _check("num_machines", num_machines, 1, "a training has at least one machine")
        _check(
            "num_partition_servers",
            num_partition_servers,
            -1,
            "-1 is one on every machine, 0 none, more is as many as you start yourself",
        )
        servers = num_machines if num_partition_servers < 0 else num_partition_servers
        start = 0
        blocks: list[list[int]] = []
        for size in (num_machines, num_machines, num_machines, 1, servers):
            blocks.append(list(range(start, start + size)))
            start += size
        trainers, parameter_servers, parameter_clients, (lock_server,), partition_servers = blocks
        made = cls(start, trainers, parameter_servers, parameter_clients, lock_server, partition_servers)
        made._explicit = num_partition_servers
        return made

    @property
    def num_machines(self) -> int:
        """Number of machines, which is that of trainers."""
        return len(self.trainers)

    @property
    def num_partition_servers(self) -> int:
        """What `from_num_invocations` was given: -1, 0 or the number that the user starts."""
        return len(self.partition_servers) if self._explicit is None else self._explicit

    @property
    def distributed(self) -> bool:
        """Whether processes talk at all: more than one machine, or partition servers that the user starts."""
        return self.num_machines > 1 or self.num_partition_servers > 0

    def trainer(self, index: int) -> int:
        """Rank of trainer ``index``, which is the number that its user gives on the command line.

        Raises:
            RuntimeError: "Invalid rank for trainer", with the numbers there are.
        """
        if not _is_index(index, self.num_machines):
            raise RuntimeError(f"Invalid rank for trainer: {shown(index)}; use 0 to {self.num_machines - 1}")
        return self.trainers[index]

    def partition_server(self, index: int) -> int:
        """Rank of partition server ``index`` of those that the user starts.

        Raises:
            RuntimeError: "Config doesn't require explicit partition servers": there are none, or each machine starts its own; or
                "Invalid rank for partition server", with the numbers there are.
        """
        number = self.num_partition_servers
        if number <= 0:
            raise RuntimeError(
                "Config doesn't require explicit partition servers: num_partition_servers is "
                f"{number}; start some yourself only where it is 1 or more"
            )
        if not _is_index(index, number):
            raise RuntimeError(f"Invalid rank for partition server: {shown(index)}; use 0 to {number - 1}")
        return self.partition_servers[index]

    def groups(
        self,
        num_groups_for_partition_server: int = _GROUPS,
        num_groups_per_sharded_partition_server: int = _PER_SHARD,
    ) -> list[list[int]]:
        """The groups that every process makes, in this order: the trainers' barrier group, then those to the partition servers.

        ``[trainers] + [trainers + partition_servers] * G``. The same members G times are G groups, over which one array is
        striped. G is ``num_groups_for_partition_server``; with more partition servers than machines a partition is sharded over
        the servers, and G is servers * (``num_groups_per_sharded_partition_server`` + 1): for each server one group for
        metadata and the others for data.

        Raises:
            ValueError: a number of groups is not an integer, or below 1, or the groups are too large together.
        """
        _check("num_groups_for_partition_server", num_groups_for_partition_server, 1, "use 1 or more")
        _check(
            "num_groups_per_sharded_partition_server",
            num_groups_per_sharded_partition_server,
            1,
            "use 1 or more",
        )
        number = num_groups_for_partition_server
        if self.num_partition_servers > self.num_machines:
            number = self.num_partition_servers * (num_groups_per_sharded_partition_server + 1)
        both = self.trainers + self.partition_servers
        check_members((self.num_machines, len(both) * number))
        return [list(self.trainers), *(list(both) for _ in range(number))]

    def process_name(self, rank: int) -> str:
        """Name of the process of ``rank``: Trainer-i, ParamS-i, ParamC-i, PartS-i, LockServer. ValueError for no rank."""
        if not _is_index(rank, self.world_size):
            raise ValueError(f"there is no rank {shown(rank)}; use 0 to {self.world_size - 1}")
        for name, block in (
            ("Trainer", self.trainers),
            ("ParamS", self.parameter_servers),
            ("ParamC", self.parameter_clients),
            ("PartS", self.partition_servers),
        ):
            if rank in block:
                return f"{name}-{block.index(rank)}"
        return "LockServer"

    def plan(
        self,
        num_groups_for_partition_server: int = _GROUPS,
        num_groups_per_sharded_partition_server: int = _PER_SHARD,
    ) -> RankPlan:
        """The same as a `RankPlan`: roles trainer, parameter_server, parameter_client, lock_server, partition_server.

        Rank i of a role runs on machine i; partition servers that the user starts have no machine in the plan. Groups are those of
        `groups`, "trainers" first, then "partitions.0" and so on.
        """
        first, *others = self.groups(num_groups_for_partition_server, num_groups_per_sharded_partition_server)
        own = range(self.num_machines)
        servers = list(own) if self.num_partition_servers < 0 else [None] * len(self.partition_servers)
        return RankPlan(
            (
                ("trainer", self.num_machines),
                ("parameter_server", self.num_machines),
                ("parameter_client", self.num_machines),
                ("lock_server", 1),
                ("partition_server", len(self.partition_servers)),
            ),
            (
                ("trainers", tuple(first)),
                *((f"partitions.{index}", tuple(members)) for index, members in enumerate(others)),
            ),
            (*own, *own, *own, 0, *servers),
        )


def _is_index(value: object, count: int) -> bool:
    try:
        return 0 <= integer(value, "") < count
    except TypeError:
        return False


def _check(name: str, value: object, least: int, remedy: str) -> None:
    # ValueError for what is no integer too: these numbers come from configuration files.
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {shown(value)}, which is not an integer; {remedy}")
    if value < least:
        raise ValueError(f"{name} is {shown(value)}; {remedy}")
    if value > MOST_RANKS // 4:
        raise ValueError(f"{name} is {shown(value)}; no plan has more than {MOST_RANKS // 4}")
