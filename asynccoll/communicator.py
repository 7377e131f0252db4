"""`Communicator`: how a call becomes a numbered operation and a `Work`. Knows no sockets and no frames; see `asynccoll.verbs`."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import CodeType, TracebackType
from typing import Any, Final, NamedTuple, Self

from asynccoll import calls
from asynccoll.engine.fingerprint import Fingerprint, digests
from asynccoll.engine.group import MAX_PENDING
from asynccoll.engine.operation import Operation
from asynccoll.engine.programs.items import nothing
from asynccoll.errors import NotInitialized, OpContext, PeerLost
from asynccoll.groups import Lineage, distinct_ranks, group_id, ranks_of, survivors_id
from asynccoll.objects import PICKLES, PLAIN, describe_error
from asynccoll.pump import Pump
from asynccoll.verbs.messages import MessageVerbs
from asynccoll.verbs.moving import MovingVerbs
from asynccoll.verbs.reducing import ReducingVerbs
from asynccoll.work import Work

__all__ = ["Communicator", "Options", "seconds"]

_NAME_LIMIT: Final = 256
_MESSAGES: Final = ("send", "recv", "recv_message")
"""Verbs that take no number."""
_PACKAGE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


def seconds(value: float | timedelta | None, name: str, default: float | None) -> float | None:
    """A time limit in seconds (None: no limit); `ValueError` that names the argument if it is not a positive number."""
    if value is None:
        return default
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = value.total_seconds() if isinstance(value, timedelta) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0:
        raise ValueError(f"{name}={value!r} is not a positive number of seconds")
    return None if math.isinf(number) else number


class Options(NamedTuple):
    """What a communicator was opened with."""

    timeout: float | None = 1800.0
    """Seconds that an operation may take, unless the call says otherwise."""
    algorithm: str = "auto"
    """What ``algorithm="auto"`` stands for."""
    table: Mapping[str, Any] | None = None
    """Thresholds of the automatic choice."""
    local_rank: int = 0
    node_rank: int = 0
    safe: bool = False
    """Nothing is pickled or unpickled."""


class Communicator(ReducingVerbs, MovingVerbs, MessageVerbs):
    """All ranks of a mesh, seen from one of them. Open it with `asynccoll.init` or `asynccoll.connect`.

    Every verb is a plain function that starts its operation at the call and returns a `Work` to await. Operations of one
    communicator are matched by the order of the calls: every rank makes the same calls in the same order, concurrently if it
    likes. Those with ``key=`` are matched by their keys instead. Use it from the event loop that opened it,
    or with ``progress="thread"`` from any that runs.
    """

    def __init__(
        self,
        pump: Pump,
        name: str = "world",
        options: Options = Options(),  # noqa: B008 (immutable)
        comm: int = 0,
        lineage: Lineage | None = None,
    ) -> None:
        self._pump = pump
        self._loop = pump.loop
        self._pid = os.getpid()
        self._comm = comm
        """Id of the communicator in the engine; 0 is the world."""
        self._group = group = pump.engine.group(comm)
        self._left = False
        self._made: dict[tuple[int, ...], int] = {}
        """Ranks as given -> how often this rank has made that group."""
        self._lineage = Lineage(comm, name, group.members, {}) if lineage is None else lineage
        codec = PLAIN if options.safe else PICKLES
        self._place = calls.Place(group.rank, group.size, options.algorithm, options.table, codec)
        pump.engine.safe = options.safe
        self._options = options
        self._name = name
        self._started = 0
        self._on_close: list[Callable[[], None]] = []
        """See `on_close`."""

    # -- facts --------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number in the communicator, 0 to ``world_size - 1``."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """How many ranks the communicator has."""
        return self._place.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """World rank of each of the communicator's ranks."""
        return self._group.members

    @property
    def name(self) -> str:
        """Name of the communicator, as it stands in errors."""
        return self._name

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks on its host."""
        return self._options.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this rank's host, in the order of the hosts' lowest ranks."""
        return self._options.node_rank

    @property
    def is_group(self) -> bool:
        """It was made by `new_group` or `split`, not by opening a mesh."""
        return self._comm != 0

    @property
    def closed(self) -> bool:
        """`close` has been called, here or on the communicator that `init` or `connect` opened."""
        return self._left or self._pump.closed

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Communicator {self._name!r} rank {self.rank} of {self.world_size}{state}>"

    def pending(self) -> list[str]:
        """Operations under way on this rank, oldest first, as ``"allreduce #12"`` or ``"allreduce key 'a'"``."""
        return [op.label for op in sorted(self._group.active.values(), key=lambda op: op.started)]

    def stats(self) -> dict[str, int]:
        """Counts since the start: ``operations`` and ``pending`` of this communicator; ``bytes_sent`` and ``bytes_received`` of the
        mesh, with headers.
        """
        pump = self._pump
        return {
            "operations": self._started,
            "pending": len(self._group.active),
            "bytes_sent": pump.bytes_sent,
            "bytes_received": pump.bytes_received,
        }

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when this rank begins to close."""
        self._on_close.append(callback)

    # -- groups -------------------------------------------------------------------------------------------

    def new_group(self, ranks: Iterable[int], name: str | None = None) -> Self | None:
        """A communicator of some of this one's ranks; None where this rank is not one of them. No communication.

        The order of ``ranks`` is the rank order of the group. Every member calls with the same list; others may, and need not. The
        same list once more is another communicator, matched by how often each member has asked for exactly that list. A group's
        operations are matched and ordered on their own: those of different groups never wait for each other.

        Raises:
            ValueError: ``ranks`` is empty, names a rank twice, or one that this communicator does not have.
            TypeError: something in it is not an integer.
        """
        self._open()
        self._here()
        given = distinct_ranks(ranks, self.world_size)
        count = self._made[given] = self._made.get(given, 0) + 1
        if self.rank not in given:
            return None
        if name is None:
            name = f"{self._name}[{','.join(map(str, given[:8]))}{',...' if len(given) > 8 else ''}]"
            if count > 1:
                name += f"#{count}"
        comm = group_id(self._comm, given, count)
        self._pump.make(comm, tuple(self.ranks[rank] for rank in given), name)
        return self._sub(comm, name)

    def _sub(self, comm: int, name: str, lineage: Lineage | None = None) -> Self:
        return type(self)(self._pump, name, self._options, comm, lineage)

    async def split(
        self, color: int | None, order: int | None = None, name: str | None = None
    ) -> Self | None:
        """One communicator for each ``color``, of the ranks that pass it; None where ``color`` is None. Every rank calls.

        Ranks are in the order of ``order`` (by default their rank here), ties in the order of their rank here.
        """
        rows = await self.allgather((color, self.rank if order is None else order), name=name)
        return None if color is None else self.new_group(ranks_of(color, rows), name)

    async def shrink(self, *, timeout: float | timedelta | None = None, name: str | None = None) -> Self:
        """A communicator of the ranks that are left, after `PeerLost`. Every survivor calls; a rank that does not is ``missing`` in
        the `CollectiveTimeout` of the others.

        Ranks are numbered anew, in the order of their ranks here; ``ranks`` tells who they were in the world. If another rank dies
        meanwhile, the survivors go on without it. Operations that were under way are not repeated. This communicator stays as it
        is: close the mesh, not the old communicator alone, when all is done.

        Args:
            timeout: time limit in seconds for all survivors to call; by default that of the communicator.

        Raises:
            PeerLost: this rank itself was taken for dead by the others; or ranks have fallen silent, and those that are left are
                not the majority, so that the others may be alive and go on: start again.
            CollectiveTimeout: not every survivor has called in time.
            CommunicatorClosed: a survivor has left meanwhile; call again, if the others do.
        """
        self._open()
        self._here()
        started = self._loop.time()
        limit = seconds(timeout, "timeout", self._options.timeout)
        _check_name(name)
        root, root_name, all_members, made = self._lineage
        departures = self._pump.engine.departures
        while True:
            elapsed = self._loop.time() - started
            refusal = departures.may_go_on(
                all_members, root
            )  # of all, so that ranks which are a step apart decide alike
            if refusal is not None:
                rank = all_members.index(self.ranks[self.rank])
                refusal.place(OpContext("shrink", -1, root_name, rank, elapsed))
                raise refusal
            members = departures.survivors(all_members, root)
            count = made[members] = made.get(members, 0) + 1
            label = name or f"{root_name} shrunk to {len(members)}"
            comm = survivors_id(root, members, count)
            self._pump.make(comm, members, label)
            group = self._sub(comm, label, self._lineage)
            try:
                # Not the method of a subclass that hands calls over to this loop from other threads.
                left = None if limit is None else max(limit - elapsed, 0.001)
                await Communicator._call(group, "shrink", lambda: calls.meeting(name), left, None, name)
            except PeerLost:  # another one: once more, without it
                self._pump.leave(comm, "failed: another rank was lost")
            except BaseException as error:
                self._pump.leave(comm, f"failed with {describe_error(error)}")
                raise
            else:
                return group

    # -- end ----------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Leave in good order; twice is silent. What is pending here fails with `CommunicatorClosed`, here and on the peers."""
        await self._close("closed")

    async def _close(self, cause: str) -> None:
        own = self._pid == os.getpid()  # a forked child must not write to its parent's sockets
        if own and not self.closed and not self._loop.is_closed():
            self._here()
        for callback in self._on_close:
            callback()
        self._on_close.clear()
        if not own:
            return
        if self._loop.is_closed():
            self._pump.abandon()
        elif not self._comm:
            await self._pump.close(cause)
        elif not self.closed:
            self._left = True
            self._pump.leave(self._comm, cause)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close("closed" if error is None else f"failed with {describe_error(error)}")

    # -- how a call becomes an operation --------------------------------------------------------------------

    def _call(
        self,
        verb: str,
        prepare: Callable[[], calls.Call],
        timeout: float | timedelta | None,
        key: str | None,
        name: str | None,
    ) -> Work[Any]:
        """Number the call, whatever becomes of it: else the next call would match the peers' present one."""
        self._usable()
        return self._start(self._prepared(verb, prepare, timeout, key, name))

    def _prepared(
        self,
        verb: str,
        prepare: Callable[[], calls.Call],
        timeout: float | timedelta | None,
        key: str | None,
        name: str | None,
    ) -> Operation:
        """Check the arguments and take the snapshot of the value. Touches no engine.

        The operation is ``refused`` where an argument is wrong: it takes its number, or its use of the key, and fails. Where the
        key itself is wrong it takes neither: no other rank has a call that it could belong to.
        """
        if key is not None:
            try:
                key = _checked_key(verb, key)
            except (TypeError, ValueError) as error:
                refused = _refused(verb, error, None)
                refused.message = True
                return refused
        try:
            limit = seconds(timeout, "timeout", self._options.timeout)
            _check_name(name)
            fingerprint, program, expected, agreed, swaps, mail = prepare()
            op = Operation(
                fingerprint,
                digests(fingerprint) if agreed is None else agreed,
                program,
                swaps=swaps,
                expected=expected,
                timeout=limit,
                site=_call_site(),
            )
            op.mail, op.key = mail, key
            return op
        except Exception as error:  # noqa: BLE001 (raised from the work, and on every other rank)
            return _refused(verb, error, key)
        except BaseException as error:
            # Ctrl-C while the value was being taken: the call has its place in the order all the same.
            self._skip(_refused(verb, RuntimeError(f"interrupted by {type(error).__name__}"), key))
            raise

    def _skip(self, op: Operation) -> None:
        """Give a refused operation its number, though nobody waits for it here."""
        self._start(op).exception()

    def _start(self, op: Operation) -> Work[Any]:
        self._open()  # the value was pickled meanwhile, which may run any code
        work: Work[Any] = Work(loop=self._loop)
        self._begin(work, op)
        return work

    def _begin(self, work: Work[Any], op: Operation) -> None:
        """Number ``op`` and start it; ``work`` tells its end."""
        self._started += 1
        op.comm = self._comm
        work.start(self._pump, op)

    def _open(self) -> None:
        if self.closed:
            how = "new_group()" if self._comm and not self._pump.closed else "asynccoll.init()"
            raise NotInitialized(f"communicator {self._name!r} is closed; open a new one with {how}")

    def _usable(self) -> None:
        """Raise, without taking a number, if no operation can be started from here."""
        self._open()
        if self._group.crowded:
            ended = len(self._group.withdrawn)
            kept = (
                f" (with {ended} that have ended here, whose keys other ranks have not used yet)"
                if ended
                else ""
            )
            raise RuntimeError(
                f"{MAX_PENDING} operations of communicator {self._name!r} are under way{kept}, which is the most; await some first"
            )
        self._here()

    def _here(self) -> None:
        """Raise if this is not the process, or not the loop, that opened the communicator."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"communicator {self._name!r} belongs to process {self._pid}, and this is a fork of it (process {os.getpid()}); "
                "call asynccoll.init() in the child, with ranks of its own"
            )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise RuntimeError(
                f"communicator {self._name!r} was opened in event loop {self._loop!r}; this call comes from {loop!r}. "
                "Call from the loop that opened it, open it with progress='thread', or use asynccoll.sync"
            )


def _refused(verb: str, error: Exception, key: str | None) -> Operation:
    fingerprint = Fingerprint(verb)
    op = Operation(fingerprint, digests(fingerprint), nothing())
    op.refused, op.message, op.key = error, verb in _MESSAGES, key
    return op


def _checked_key(verb: str, key: object) -> str:
    """``key`` as a plain `str`. Raises TypeError or ValueError."""
    if verb in _MESSAGES:
        raise ValueError(f"{verb} takes no key=: messages are matched by source and tag; leave it out")
    if not isinstance(key, str):
        raise TypeError(f"key= must be a string, not {key!r:.100}")
    if len(key) > _NAME_LIMIT:
        raise ValueError(f"key= must have at most {_NAME_LIMIT} characters, and has {len(key)}")
    return str.__str__(key)  # of a subclass (`numpy.str_`, a str enum) what it holds


def _check_name(name: str | None) -> None:
    """It travels in control frames, so it is bounded."""
    if name is not None and (not isinstance(name, str) or len(name) > _NAME_LIMIT):
        raise ValueError(f"name= must be a string of at most {_NAME_LIMIT} characters, not {name!r:.100}")


def _call_site() -> tuple[CodeType, int]:
    """Code and instruction of the caller outside this package: turned into text only if an error needs it."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti
