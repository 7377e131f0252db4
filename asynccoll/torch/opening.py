"""torch's default process group and its sub-groups, opened in one order on every rank. Knows arguments, and no meshes.

The order is the contract: torch numbers its groups by how many a process has made, so that every process makes all of
them, in the same order, whether or not it is a member.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from asynccoll.errors import AlreadyInitialized

__all__ = ["NO_TIMEOUT", "Limit", "Plan", "given_method", "init_process_group", "planned", "refuse_second"]

NO_TIMEOUT = timedelta(days=365)
"""What ``timeout=None`` stands for. torch has no "never": parameter servers wait for requests for as long as a training lasts."""

_log = logging.getLogger("asynccoll")

Limit: TypeAlias = "float | timedelta | None"
"""Seconds, a timedelta, or None for `NO_TIMEOUT`."""


class Plan(NamedTuple):
    """Checked arguments: what will be opened."""

    world_size: int
    rank: int
    groups: list[list[int]]
    """Ranks of each sub-group, as given."""
    world_timeout: timedelta
    timeouts: list[timedelta]
    """One for each sub-group."""
    backend: str

    def open(self, **where: Any) -> list[dist.ProcessGroup]:
        """Open the default group and the sub-groups; blocks until every rank does. ``where``: torch's ``init_method`` or
        ``store``. If it fails there is no default group.
        """
        _log.debug("rank %d of %d: opening torch's %s group", self.rank, self.world_size, self.backend)
        # An opening that failed leaves torch's count of groups where it was, on some ranks further than on others; groups of one
        # number meet. torch itself sets it back when it destroys the default group.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            self.backend,
            world_size=self.world_size,
            rank=self.rank,
            timeout=self.world_timeout,
            **where,
        )
        try:
            made = [
                dist.new_group(ranks, timeout=limit)
                for ranks, limit in zip(self.groups, self.timeouts, strict=True)
            ]
        except BaseException:  # re-raised
            dist.destroy_process_group()
            raise
        _log.debug("rank %d of %d: %d sub-groups are open", self.rank, self.world_size, len(made))
        return made


def planned(
    world_size: int,
    rank: int,
    groups: Iterable[Iterable[int]],
    backend: str,
    timeout: Limit | Sequence[Limit],
) -> Plan:
    """The arguments of `init_process_group`, checked. Opens nothing; ValueError names the argument and its value."""
    size = _integer("world_size", world_size)
    if size < 1:
        raise ValueError(f"world_size={world_size!r}: the world size is at least 1")
    own = _integer("rank", rank)
    if not 0 <= own < size:
        raise ValueError(f"rank={rank!r} is outside of world_size={size}: ranks run from 0 to {size - 1}")
    if not isinstance(backend, str) or not backend:
        raise ValueError(f"backend={backend!r} is not the name of a torch backend, such as 'gloo'")
    known = dist.Backend.backend_list
    if ":" not in backend and backend.lower() not in known:  # "cpu:gloo,cuda:nccl" is torch's to read
        names = ", ".join(name for name in known if name != dist.Backend.UNDEFINED)
        raise ValueError(f"backend={backend!r} is not a backend that torch knows here; there is: {names}")
    lists = _lists(groups, size)
    if isinstance(timeout, Sequence) and not isinstance(timeout, str | bytes):
        if len(timeout) != 1 + len(lists):
            raise ValueError(
                f"timeout={timeout!r} has {len(timeout)} entries: give 1 + {len(lists)}, that of the world and then that of each "
                "group, or a single one for all"
            )
        limits = [_limit(one) for one in timeout]
    else:
        limits = [_limit(timeout)] * (1 + len(lists))
    return Plan(size, own, lists, limits[0], limits[1:], backend)


def given_method(init_method: str | None) -> str:
    """``init_method``. RuntimeError, in BigGraph's words, where nobody says where the ranks meet."""
    if init_method is None:
        raise RuntimeError("distributed_init_method must be set when num_machines > 1")
    return init_method


def refuse_second() -> None:
    """AlreadyInitialized where this process has a default group: torch knows only one at a time."""
    if dist.is_initialized():
        raise AlreadyInitialized(
            f"torch.distributed already has a default process group in this process ({dist.get_backend()}, rank "
            f"{dist.get_rank()} of {dist.get_world_size()}): call torch.distributed.destroy_process_group() first"
        )


def init_process_group(
    init_method: str | None,
    world_size: int,
    rank: int,
    groups: Iterable[Iterable[int]],
    backend: str = "gloo",
    timeout: Limit | Sequence[Limit] = None,
) -> list[dist.ProcessGroup]:
    """Open torch's default process group, then one sub-group for each list of ranks. Blocks until every rank has called.

    Every rank passes the same ``groups``, whether or not it is in them. The same list several times gives as many distinct
    groups, whose operations do not wait for each other.

    Args:
        init_method: where the ranks meet, as torch has it: ``"tcp://host:port"``, ``"file:///path"``, ``"env://"``.
        world_size: number of ranks.
        rank: own rank, ``0 <= rank < world_size``.
        groups: lists of distinct ranks.
        backend: name of a torch backend: ``"gloo"``, ``"asynccoll"``.
        timeout: limit of an operation, in seconds or as timedelta; None means 365 days. A sequence has one for the world
            and then one for each group.

    Returns:
        The groups in the order of the lists. Where this rank is not a member it is ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        RuntimeError: ``init_method`` is None.
        ValueError: another argument is wrong; the message names it. Nothing was opened.
        AlreadyInitialized: this process has a default group.
    """
    plan = planned(world_size, rank, groups, backend, timeout)
    where = given_method(init_method)
    refuse_second()
    return plan.open(init_method=where)


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} is not an integer") from None


def _lists(groups: Any, size: int) -> list[list[int]]:
    if isinstance(groups, str | bytes):
        raise ValueError(f"groups={groups!r} is not a list of lists of ranks")
    try:
        given = [list(ranks) for ranks in groups]
    except TypeError:
        raise ValueError(f"groups={groups!r} is not a list of lists of ranks") from None
    lists = []
    for number, ranks in enumerate(given):
        name = f"groups[{number}]"
        if not ranks:
            raise ValueError(f"{name} is empty: a group has at least one rank")
        checked = [_integer(f"{name}[{place}]", rank) for place, rank in enumerate(ranks)]
        for rank in checked:
            if not 0 <= rank < size:
                raise ValueError(
                    f"{name}={ranks!r} has rank {rank}: ranks of a world of {size} run from 0 to {size - 1}"
                )
        if len(set(checked)) < len(checked):
            raise ValueError(f"{name}={ranks!r} names a rank twice")
        lists.append(checked)
    return lists


def _limit(timeout: Any) -> timedelta:
    if timeout is None:
        return NO_TIMEOUT
    try:
        if isinstance(timeout, bool | str | bytes):
            raise TypeError
        number = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0:
        raise ValueError(f"timeout={timeout!r} is not a positive number of seconds, a timedelta or None")
    return min(timedelta(seconds=min(number, NO_TIMEOUT.total_seconds())), NO_TIMEOUT)
