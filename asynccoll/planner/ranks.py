"""`RankPlan`: which ranks have which role, on which machine, in which groups. Knows names and numbers, not what the roles do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from asynccoll.planner import documents
from asynccoll.planner.given import integer, items, shown
from asynccoll.planner.placing import Key, holder

__all__ = ["MOST_MEMBERS", "MOST_RANKS", "RankPlan", "check_members"]

MOST_RANKS: Final = 1 << 20
"""Ranks that a plan can have: more are a garbled number, not a cluster."""

MOST_MEMBERS: Final = 1 << 24
"""Members that the groups of a plan can have together: some hundred MB."""

_FORM: Final = "asynccoll.RankPlan"


@final
@dataclass(frozen=True, slots=True, repr=False)
class RankPlan:
    """Who is who in a world whose ranks have roles. Make one with `from_roles`; it never changes.

    ::

        plan = RankPlan.from_roles({"trainer": 2, "parameter_server": 2, "lock_server": 1}, machines=2)

        rank       0          1          2                   3                   4
        role       trainer 0  trainer 1  parameter_server 0  parameter_server 1  lock_server 0
        machine    0          1          0                   1                   0

    Equal plans are equal and hash alike. Every field is checked, also where a plan is made from its fields.
    """

    counts: tuple[tuple[str, int], ...]
    """``(role, number of ranks)``, in the order of their ranks. 0 is a role that nobody has."""
    named_groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """``(name, ranks)``, in the order in which every process makes its groups. Names differ, ranks need not."""
    machines: tuple[int | None, ...] | None = None
    """Machine of each rank, None where it is not said. None instead of the tuple: the plan says nothing about machines."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: a name, a number, a rank or a machine is not possible; the message names it.
            TypeError: something is not a number.
        """
        # Lists become tuples, and integers of other libraries plain ones: a plan hashes and travels.
        put = object.__setattr__
        seen: set[str] = set()
        counts = []
        for role, given in _pairs(self.counts, "counts is", '(("trainer", 4), ...)'):
            _check_name("role", role, seen)
            count = integer(given, f"the number of ranks of role {role!r} is")
            if not 0 <= count <= MOST_RANKS:
                raise ValueError(f"role {role!r} has {shown(count)} ranks; use 0 to {MOST_RANKS}")
            counts.append((role, count))
        put(self, "counts", tuple(counts))
        if not 1 <= self.world_size <= MOST_RANKS:
            raise ValueError(f"the roles have {self.world_size} ranks together; use 1 to {MOST_RANKS}")
        seen = set()
        groups = []
        total = 0
        for name, members in _pairs(self.named_groups, "named_groups is", '(("everyone", (0, 1)), ...)'):
            _check_name("group", name, seen)
            given = items(members, f"the members of group {name!r} are", "write its ranks, as a list")
            ranks = tuple(self._rank(rank, f"group {name!r} holds") for rank in given)
            if not ranks:
                raise ValueError(f"group {name!r} is empty: a group has at least one rank")
            if len(set(ranks)) < len(ranks):
                raise ValueError(f"group {name!r} names a rank twice: {ranks}")
            groups.append((name, ranks))
            total += len(ranks)
            check_members([total])
        put(self, "named_groups", tuple(groups))
        if self.machines is not None:
            wanted = "give the machine of each rank, as a list"
            put(self, "machines", self._numbered(items(self.machines, "machines is", wanted)))

    @classmethod
    def from_roles(
        cls,
        roles: Mapping[str, int],
        *,
        groups: Mapping[str, Iterable[str | int]] | None = None,
        machines: int | Sequence[int | None] | None = None,
    ) -> RankPlan:
        """Number the ranks: one block without gaps for each role, in the order of ``roles``, from rank 0 on.

        Args:
            roles: role -> number of ranks, 0 or more.
            groups: name -> members, each a rank or a role (all its ranks). By default every role that has ranks is a group of its
                own name; ``{}`` is no groups. `with_group` adds more, also the same members several times.
            machines: number of machines: rank i of each role runs on machine i, and where a role has more ranks than there are
                machines, each has an equal share, neighbours together. Or the machine of each rank, None where it is not known.

        Raises:
            ValueError: a name is empty or there twice, a number is not possible, a group has a member that does not exist, or a
                machine has no ranks.
            TypeError: something is of another type.
        """
        if not isinstance(roles, Mapping):
            raise TypeError(f'roles is {shown(roles)}; write {{"trainer": 4, "lock_server": 1}}')
        bare = cls(tuple(roles.items()))
        if groups is None:
            named = tuple((role, bare.ranks(role)) for role, count in bare.counts if count)
        elif not isinstance(groups, Mapping):
            raise TypeError(f'groups is {shown(groups)}; write {{"everyone": ["trainer", 4]}}')
        else:
            named = tuple((name, bare._members(name, members)) for name, members in groups.items())
        if machines is not None and (not isinstance(machines, Iterable) or isinstance(machines, str | bytes)):
            machines = bare._spread(integer(machines, "the number of machines is"))
        return cls(bare.counts, named, None if machines is None else tuple(machines))

    def with_group(self, name: str, members: Iterable[str | int], repeat: int = 1) -> RankPlan:
        """This plan and one group more, at the end; or ``repeat`` > 1 groups ``name.0``, ``name.1``, ... of the same members.

        Groups of the same members are different communicators, over which one array can be striped.

        Args:
            members: ranks and roles (all their ranks), in the rank order of the group.

        Raises:
            ValueError: the name is taken, a member does not exist or is there twice, ``repeat`` is below 1, or the groups are too
                large together.
        """
        if integer(repeat, "repeat is") < 1:
            raise ValueError(f"repeat={shown(repeat)}: a group is there once or more")
        _check_name("group", name, set())  # before a number makes a str of whatever it is
        ranks = self._members(name, members)
        check_members([max(1, len(ranks)) * repeat])
        names = [name] if repeat == 1 else [f"{name}.{index}" for index in range(repeat)]
        more = tuple((each, ranks) for each in names)
        return RankPlan(self.counts, self.named_groups + more, self.machines)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(count for _, count in self.counts)

    @property
    def roles(self) -> dict[str, int]:
        """Role -> number of ranks, in the order of the ranks. A new dict each time."""
        return dict(self.counts)

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Group -> its ranks, in the order in which groups are made. A new dict each time."""
        return dict(self.named_groups)

    @property
    def num_machines(self) -> int:
        """Number of machines; 0 where the plan says nothing about them."""
        return 1 + max((at for at in self.machines or () if at is not None), default=-1)

    def ranks(self, role: str) -> tuple[int, ...]:
        """The ranks of ``role``, ascending. ValueError where the plan has no such role."""
        start = 0
        for name, count in self.counts:
            if name == role:
                return tuple(range(start, start + count))
            start += count
        raise ValueError(f"there is no role {shown(role)}; there is: {', '.join(self.roles)}")

    def role_of(self, rank: int) -> str:
        """The role of ``rank``. ValueError where there is no such rank."""
        return self._find(rank)[0]

    def index_of(self, rank: int) -> int:
        """Which one of its role ``rank`` is, from 0. ValueError where there is no such rank."""
        return self._find(rank)[1]

    def machine_of(self, rank: int) -> int | None:
        """The machine on which ``rank`` runs, None where the plan does not say. ValueError where there is no such rank."""
        at = self._rank(rank, "the plan was asked for")
        return None if self.machines is None else self.machines[at]

    def ranks_on(self, machine: int | None) -> tuple[int, ...]:
        """The ranks that run on ``machine``, ascending; those without a machine for None.

        Raises:
            ValueError: there is no such machine, or the plan says nothing about machines. TypeError: it is no integer.
        """
        if self.machines is None:
            raise ValueError("this plan does not say which rank runs where; make it with machines=")
        if (
            machine is not None
            and not 0 <= integer(machine, "give the number of a machine, not") < self.num_machines
        ):
            raise ValueError(f"there is no machine {shown(machine)}; use 0 to {self.num_machines - 1}")
        return tuple(rank for rank, at in enumerate(self.machines) if at == machine)

    def place(self, key: Key, role: str) -> int:
        """The rank of ``role`` that holds ``key``: the same in every interpreter, on every machine, whatever PYTHONHASHSEED says.

        Keys are spread evenly. When a role grows by one rank, only the keys that the new one gets move. Roles of the same number of
        ranks hold a key at the same index. Takes time in proportion to the ranks of the role (about a microsecond each).

        Args:
            key: str, bytes, int, or a tuple of these. Equal keys have one place; ``1``, ``"1"`` and ``b"1"`` are three keys.

        Raises:
            ValueError: there is no such role, or it has no ranks.
            TypeError: the key is of another type, bool included.
        """
        ranks = self.ranks(role)
        if not ranks:
            raise ValueError(f"role {role!r} has no ranks, so nobody can hold {shown(key)}")
        return ranks[holder(key, len(ranks))]

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads."""
        return documents.dump(
            _FORM,
            {
                "roles": [list(pair) for pair in self.counts],
                "groups": [[name, list(ranks)] for name, ranks in self.named_groups],
                "machines": None if self.machines is None else list(self.machines),
            },
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> RankPlan:
        """The plan that `to_json` wrote. ValueError, with the field, where the text says anything else."""
        found = documents.load(text, _FORM, ("roles", "groups", "machines"))
        roles, groups, machines = found["roles"], found["groups"], found["machines"]
        if not _is_table(roles) or not all(type(count) is int for _, count in roles):
            documents.reject(_FORM, "roles", roles, '[["trainer", 4], ...]')
        if not _is_table(groups) or not all(_is_integers(ranks) for _, ranks in groups):
            documents.reject(_FORM, "groups", groups, '[["name", [0, 1]], ...]')
        if machines is not None and not _is_integers(machines, or_none=True):
            documents.reject(
                _FORM, "machines", machines, "null, or the number of a machine, or null, for each rank"
            )
        try:
            bare = cls(tuple((role, count) for role, count in roles))
        except ValueError as error:
            raise ValueError(f"{_FORM}: the field 'roles' is wrong: {error}") from None
        try:
            grouped = cls(bare.counts, tuple((name, tuple(ranks)) for name, ranks in groups))
        except ValueError as error:
            raise ValueError(f"{_FORM}: the field 'groups' is wrong: {error}") from None
        try:
            return cls(bare.counts, grouped.named_groups, None if machines is None else tuple(machines))
        except ValueError as error:
            raise ValueError(f"{_FORM}: the field 'machines' is wrong: {error}") from None

    def __repr__(self) -> str:
        parts = [f"{role}={count}" for role, count in self.counts]
        return f"<RankPlan {' '.join(parts)}, {len(self.named_groups)} groups, {self.num_machines} machines>"

    def _find(self, rank: int) -> tuple[str, int]:
        left = self._rank(rank, "the plan was asked for")
        for role, count in self.counts:
            if left < count:
                return role, left
            left -= count
        raise AssertionError(f"rank {rank} is below {self.world_size} and has no role")

    def _rank(self, given: object, who: str) -> int:
        rank = integer(given, f"{who} rank")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{who} rank {shown(rank)}, and there is none; use 0 to {self.world_size - 1}")
        return rank

    def _numbered(self, machines: Sequence[int | None]) -> tuple[int | None, ...]:
        """``machines`` as plain integers, checked: 0, 1, ... without gaps."""
        if len(machines) != self.world_size:
            raise ValueError(
                f"{len(machines)} machines are given for {self.world_size} ranks; give one for each rank"
            )
        found = tuple(
            None if at is None else integer(at, f"the machine of rank {rank} is")
            for rank, at in enumerate(machines)
        )
        used = {at for at in found if at is not None}
        for at in used:
            if not 0 <= at < len(used):
                raise ValueError(
                    f"there is a machine {shown(at)}, and {len(used)} machines have ranks; number them from 0 on, without gaps"
                )
        return found

    def _spread(self, number: int) -> tuple[int, ...]:
        """The machine of each rank on ``number`` machines, all of which get some."""
        largest = max(count for _, count in self.counts)
        if not 1 <= number <= largest:
            raise ValueError(
                f"{shown(number)} machines, and the largest role has {largest} ranks; use 1 to {largest}"
            )
        return tuple(
            index if count <= number else index * number // count
            for _, count in self.counts
            for index in range(count)
        )

    def _members(self, name: str, members: Iterable[str | int]) -> tuple[int, ...]:
        wanted = (
            f"write a list, [{members!r}]" if isinstance(members, str) else "write a list of roles and ranks"
        )
        found: list[int] = []
        for member in items(members, f"the members of group {name!r} are", wanted):
            if isinstance(member, str):
                found += self.ranks(member)
            else:
                found.append(integer(member, f"group {name!r} holds"))
        return tuple(found)


def check_members(sizes: Iterable[int]) -> None:
    """ValueError if groups of these sizes are more than a plan can have: before they are made, and fill the memory."""
    if sum(sizes) > MOST_MEMBERS:
        raise ValueError(
            f"the groups have more than {MOST_MEMBERS} members together; make fewer groups, or smaller ones"
        )


def _check_name(kind: str, name: object, seen: set[str]) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a {kind} is {shown(name)}, which is not a str")
    if not name or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"the name of a {kind} is {shown(name)}; use printable characters, no blanks at its ends"
        )
    if name in seen:
        raise ValueError(f"there are two {kind}s of the name {name!r}; give each its own")
    seen.add(name)


def _pairs(value: Any, what: str, form: str) -> list[tuple[Any, Any]]:
    wanted = f"it must be pairs, {form}"
    pairs = [items(pair, what, wanted) for pair in items(value, what, wanted)]
    if not all(len(pair) == 2 for pair in pairs):
        raise TypeError(f"{what} {shown(value)}; {wanted}")
    return [(first, second) for first, second in pairs]


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in value
    )


def _is_integers(value: Any, *, or_none: bool = False) -> bool:
    return isinstance(value, list) and all(type(item) is int or (or_none and item is None) for item in value)
