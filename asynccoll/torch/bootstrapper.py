"""Brings up torch's process groups over a mesh, which agrees on the store. Knows communicators and torch's stores.

::

    rank 0                         rank 1, 2, ...
    listen, start the store
    |---- allgather: address of the store, groups, backend, timeouts ---->|   nobody guesses a port
    open the groups in a thread    open the groups in a thread               the event loop turns
    |<--------------------------- barrier ------------------------------->|   up everywhere, or nowhere

Beside all this each rank listens for an alarm, a message that a rank sends to all others when it fails or is cancelled:
torch itself would wait for it until its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from asynccoll.communicator import Communicator
from asynccoll.errors import (
    AlreadyInitialized,
    CollectiveCancelled,
    CollectiveMismatch,
    CommunicatorClosed,
    OpContext,
    PeerLost,
    RemoteError,
)
from asynccoll.pickling import text_of
from asynccoll.torch.opening import Limit, Plan, planned, refuse_second

__all__ = ["bootstrap"]

CONNECT = 300.0
"""Seconds for reaching the store, torch's own default. It listens before anybody is told of it, so a refusal is final."""

ATTEMPT = 10.0
"""Seconds of one attempt: torch cannot be interrupted in it."""

GRACE = 2.0
"""Seconds for telling the others of a failure, and for the thread to come back once the store is gone."""

COMEBACK = 15.0
"""Seconds for which an opening waits for the thread of one before it that failed: more than `ATTEMPT`, its longest wait that
nothing ends."""

LOOK = 0.05
"""Seconds between two looks at that thread."""

SECOND_THOUGHT = 1.0
"""Seconds in which the cause may still arrive, where torch failed here: the rank that began it has told all the others, but
rank 0 takes the store away as soon as it hears of it."""

_TAG = 0
_MAX_TEXT = 16_384
"""Characters of a message or traceback in an alarm: it must fit into what a receiver takes unasked."""

_log = logging.getLogger("asynccoll")
T = TypeVar("T")


async def bootstrap(
    comm: Communicator,
    groups: Iterable[Iterable[int]] = (),
    backend: str = "gloo",
    timeout: Limit | Sequence[Limit] = None,
) -> list[dist.ProcessGroup]:
    """Open torch's default process group for the ranks of ``comm``, with the same ranks; then one sub-group for each list.

    Every rank calls. Rank 0 opens the store on a port that the kernel chooses, at the address at which the others reach it,
    and then tells it: no port is guessed, and none can be taken meanwhile. torch blocks in a thread of its own, so that the
    event loop goes on. ``torch.distributed.destroy_process_group()`` ends it, and another bootstrap may follow. ``comm`` may be
    closed before that or afterwards.

    Args:
        comm: a mesh, or a group of one, of this event loop.
        groups, backend, timeout: as for `init_process_group`, the same on every rank.

    Returns:
        The sub-groups in the order of the lists; ``GroupMember.NON_GROUP_MEMBER`` where this rank is not a member.

    Raises:
        ValueError: an argument is wrong. AlreadyInitialized: this process has a default group, or is opening one.
        CollectiveMismatch: ``groups``, ``backend`` or ``timeout`` differ; on every rank.
        RemoteError, CollectiveCancelled: it failed on another rank, or was cancelled there. PeerLost: a rank died.
        CollectiveTimeout: a rank did not call within the timeout of ``comm``.
        RuntimeError: torch's own errors.

    Unless it returns on every rank, no rank keeps a group. A rank that is cancelled in its very last step, when the others know
    that all is up, takes back its own alone.
    """
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"comm is a {type(comm).__name__}: bootstrap() takes the Communicator of asynccoll.init() or connect(), in its loop"
        )
    group = comm.new_group(range(comm.world_size), name=f"{comm.name} bootstrap")
    assert group is not None  # every rank is in it
    return await _Bootstrap(comm, group).run(groups, backend, timeout)


class _Opening:
    """At most one group is opened in a process at a time, by one thread, which may outlive the call."""

    lock = threading.Lock()
    """Held from the start to the end of an opening."""

    abandoned = False
    """Nobody waits any more for the opening under way: it ends once torch comes back, and leaves nothing."""


class _Thread:
    """``function`` in a daemon thread. Not in the loop's executor: that is joined at exit, and torch may not come back."""

    def __init__(self, function: Callable[[Callable[[], bool]], T], undo: Callable[[], None]) -> None:
        """``function`` is given what tells whether it is still wanted; ``undo`` takes back what it has made."""
        self._function = function
        self._undo = undo
        self._loop = asyncio.get_running_loop()
        # Guards what follows.
        self._lock = threading.Lock()
        self._abandoned = False
        self._succeeded = False
        # Its result, in the loop.
        self.done: asyncio.Future[Any] = self._loop.create_future()
        # Set by the thread's last step.
        self.ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="asynccoll-bootstrap", daemon=True).start()

    def _run(self) -> None:
        result, error = None, None
        try:
            result = self._function(lambda: not self._abandoned)
        except BaseException as caught:  # noqa: BLE001 (raised in the loop)
            error = caught
        with self._lock:
            self._succeeded = error is None
            undo = self._abandoned and self._succeeded
        try:
            if undo:
                self._undo()
        finally:
            _Opening.lock.release()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver, result, error)

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        self.ended.set_result(None)
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result)
        elif isinstance(error, Exception):
            self.done.set_exception(error)
        else:
            self.done.set_exception(RuntimeError(f"torch was interrupted by {type(error).__name__}"))

    def abandon(self) -> bool:
        """What it makes from now on it undoes itself. True: it has made it already, and undoing is the caller's."""
        with self._lock:
            self._abandoned = _Opening.abandoned = True
            return self._succeeded


class _Bootstrap:
    """One call of `bootstrap` on one rank."""

    def __init__(self, comm: Communicator, group: Communicator) -> None:
        self._comm = comm
        # The same ranks under a name of our own: what the user has under way on `comm` is in nobody's way.
        self._group = group
        self._started = asyncio.get_running_loop().time()
        # One for each of the others: a receive from any of them would end with the first who leaves, maybe because of an alarm that
        # is still on its way here.
        self._alarms = [
            group.recv_message(rank, _TAG, timeout=math.inf)
            for rank in range(group.world_size)
            if rank != group.rank
        ]
        self._thread: _Thread | None = None
        # Rank 0's store server. The only reference until the default group takes it over.
        self._server: dist.TCPStore | None = None

    async def run(
        self, groups: Iterable[Iterable[int]], backend: str, timeout: Limit | Sequence[Limit]
    ) -> list[dist.ProcessGroup]:
        """The whole of it. Leaves nothing behind but torch's groups, or nothing at all."""
        try:
            plan = planned(self._group.world_size, self._group.rank, groups, backend, timeout)
            refuse_second()
            host, port = await self._agree(plan)
            made = await self._open(plan, host, port)
            await self._unless_alarmed(self._group.barrier())
            # It is up everywhere. Who is cancelled before it knows tells the others, which are still here.
            await self._unless_alarmed(self._group.barrier())
            self._ignore_alarms()
            await self._group.close()  # here, where a cancel takes back what there is
        except BaseException as error:
            cause = await self._fail(error)
            if cause is error:
                raise
            raise cause from error
        else:
            self._keep_server()
            return made
        finally:
            self._ignore_alarms()
            await self._group.close()

    async def _agree(self, plan: Plan) -> tuple[str, int]:
        """Where the store is. CollectiveMismatch where the ranks do not want the same."""
        where: tuple[str, int] | None = None
        if self._group.rank == 0:
            host = _own_address(self._comm)
            server = await asyncio.to_thread(_serve, host)
            self._server = server
            where = host, server.port
        seconds = [limit.total_seconds() for limit in (plan.world_timeout, *plan.timeouts)]
        own = [where, plan.groups, plan.backend, seconds]
        rows = await self._unless_alarmed(self._group.allgather(own))
        for column, field in enumerate(("groups", "backend", "timeout"), start=1):
            values = {rank: row[column] for rank, row in enumerate(rows)}
            if any(value != values[0] for value in values.values()):
                raise CollectiveMismatch(field, values, self._context())
        host, port = rows[0][0]
        return host, port

    async def _open(self, plan: Plan, host: str, port: int) -> list[dist.ProcessGroup]:
        deadline = asyncio.get_running_loop().time() + COMEBACK
        while not _Opening.lock.acquire(blocking=False):
            if not _Opening.abandoned or asyncio.get_running_loop().time() > deadline:
                raise AlreadyInitialized(
                    "torch's default process group is being opened in this process already, or an opening that failed has not "
                    "come back from torch: one at a time; after a failure, start the process again"
                )
            await self._unless_alarmed(asyncio.sleep(LOOK))
        _Opening.abandoned = False

        def opened(wanted: Callable[[], bool]) -> list[dist.ProcessGroup]:
            store = _reach(host, port, min(CONNECT, plan.world_timeout.total_seconds()), wanted)
            store.set_timeout(plan.world_timeout)
            return plan.open(store=dist.PrefixStore("asynccoll", store))

        try:
            self._thread = _Thread(opened, _destroy)
        except RuntimeError:  # no thread to be had
            _Opening.lock.release()
            raise
        made: list[dist.ProcessGroup] = await self._unless_alarmed(self._thread.done, SECOND_THOUGHT)
        return made

    async def _unless_alarmed(self, work: Awaitable[T], patience: float | None = None) -> T:
        """The result of ``work``; an alarm's error if that comes first.

        ``patience``: seconds for which ``work`` goes on once a rank has left. None: for ever. The group's own operations end by
        themselves where they need that rank; and where they do not, their result is still good.
        """
        future = asyncio.ensure_future(work)
        try:
            error = await self._alarm_before(future, patience)
            if error is not None:
                raise error
        except BaseException:  # re-raised
            future.cancel()
            raise
        return future.result()

    async def _alarm_before(
        self, future: asyncio.Future[Any] | None, patience: float | None, limit: float | None = None
    ) -> BaseException | None:
        """What ends the wait for ``future``, or if there is none for ``limit`` seconds; None where nothing does."""
        left: BaseException | None = None
        waited: set[asyncio.Future[Any]] = {*self._alarms} if future is None else {future, *self._alarms}
        while waited:
            done, waited = await asyncio.wait(waited, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if future in done:
                return None
            heard = [self._alarmed(alarm) for alarm in done if not alarm.cancelled()]
            for error in heard:
                if not isinstance(error, CommunicatorClosed):
                    return error
            # Who leaves without an alarm has heard of one, which may be on its way here.
            left = left or next(iter(heard), None)
            if not done:
                return left
            limit = limit if patience is None else patience
        return left

    def _ignore_alarms(self) -> None:
        for alarm in self._alarms:
            alarm.cancel()

    def _alarmed(self, alarm: asyncio.Future[Any]) -> BaseException:
        """The error that an alarm stands for: it has come, or waiting for it has failed."""
        failure = alarm.exception()
        if failure is not None:
            return failure
        message = alarm.result()
        told = message.value
        if told["kind"] == "cancelled":
            return CollectiveCancelled(message.source, self._context())
        return RemoteError(
            message.source,
            told["type"],
            told["text"],
            self._context(),
            remote_traceback=told["traceback"],
        )

    def _context(self) -> OpContext:
        elapsed = asyncio.get_running_loop().time() - self._started
        return OpContext("bootstrap", -1, self._comm.name, self._comm.rank, elapsed)

    # -- failure --------------------------------------------------------------------------------------------

    async def _fail(self, error: BaseException) -> BaseException:
        """Tell the others, unless they know; end torch's thread; take back what it made. Returns what to raise."""
        if isinstance(error, RuntimeError | OSError | CommunicatorClosed) and not isinstance(
            error, AlreadyInitialized
        ):
            # torch's own, or that a rank left: it may be the echo of what went wrong there.
            heard = await self._alarm_before(None, None, SECOND_THOUGHT)
            error = error if heard is None or isinstance(heard, CommunicatorClosed) else heard
        try:
            # Whatever ends on every rank by itself needs no telling.
            if not isinstance(
                error,
                CollectiveMismatch | RemoteError | CollectiveCancelled | PeerLost | CommunicatorClosed,
            ):
                await self._tell(error)
        finally:
            self._server = None  # ends the waits of every rank's torch for keys that will not come
            await self._end_thread()
        return error

    async def _tell(self, error: BaseException) -> None:
        group = self._group
        kind = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        trace = "".join(traceback.format_exception(error))[-_MAX_TEXT:]
        alarm = {
            "kind": kind,
            "type": type(error).__qualname__,
            "text": text_of(error)[:_MAX_TEXT],
            "traceback": trace,
        }
        try:
            sends = [
                group.send(alarm, rank, _TAG, timeout=GRACE)
                for rank in range(group.world_size)
                if rank != group.rank
            ]
        except (CommunicatorClosed, RuntimeError):  # the mesh is closed: the others know from that
            return
        if sends:
            await asyncio.wait(sends, timeout=GRACE)
            for send in sends:
                if send.done() and not send.cancelled():
                    send.exception()  # whoever did not take it has left, or died, which ends its wait too

    async def _end_thread(self) -> None:
        thread = self._thread
        if thread is None:
            return
        made = thread.abandon()
        thread.done.cancel()
        if made:
            await asyncio.to_thread(_destroy)
            return
        done, _ = await asyncio.wait({thread.ended}, timeout=GRACE)
        if not done:
            _log.warning(
                "torch has not come back from opening its process group; its thread is left alone, and this process cannot open "
                "another group until it does"
            )

    def _keep_server(self) -> None:
        """The store lives as long as the default group: who holds a sub-group may need it for later groups."""
        if self._server is not None:
            server, self._server = self._server, None
            # Not at exit: then it goes with the process, however that ends.
            weakref.finalize(dist.group.WORLD, _drop, [server]).atexit = False


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _drop(held: list[dist.TCPStore]) -> None:
    held.clear()


def _own_address(comm: Communicator) -> str:
    """The address of this host at which the others reach it. Not a wider one: whoever reaches a store may write to it."""
    asked = getattr(comm._pump, "own_addresses", None)
    addresses: list[str] = asked() if asked is not None else []
    # Ranks on this host may have come through loopback; they reach the other address as well.
    wide = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    return (wide or addresses or ["127.0.0.1"])[0]


def _reach(host: str, port: int, limit: float, wanted: Callable[[], bool]) -> dist.TCPStore:
    """A client of the store. OSError where nobody listens any more: torch by itself would go on calling."""
    deadline = time.monotonic() + limit
    while True:
        left = max(0.1, min(ATTEMPT, deadline - time.monotonic()))
        try:
            socket.create_connection((host, port), left).close()
            return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=left))
        except (TimeoutError, dist.DistNetworkError) as error:
            if not wanted() or time.monotonic() >= deadline:
                raise ConnectionError(
                    f"rank 0's store at {host}:{port} was not reached in {limit:g} s ({error}): all TCP ports must be open between "
                    "the hosts of a mesh"
                ) from error


def _serve(host: str) -> dist.TCPStore:
    """A store that listens at ``host`` and nowhere else, on a port that the kernel chooses.

    By itself torch listens on all addresses: so it gets a socket that listens already.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port: int = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT),
        master_listen_fd=listener.detach(),
    )
