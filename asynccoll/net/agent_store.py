"""Where rank 0 is, under torchrun: told through the store of its agent. Knows torch's store, and loads torch only there.

The agent listens at MASTER_ADDR and MASTER_PORT itself, so rank 0 cannot. Rank 0 listens on a port that the kernel chooses and
leaves its address, and a random secret, in the agent's store::

    asynccoll/<TORCHELASTIC_RUN_ID>/<TORCHELASTIC_RESTART_COUNT>/<n>/rank0

``n`` counts the meshes of a process. After a restart the store is the same, with the keys of the dead attempt still in it: so
the count of restarts is in the name, and rank 0 removes its key once the mesh is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from asynccoll.errors import RendezvousError
from asynccoll.net.accepting import listen
from asynccoll.net.interfaces import address_towards, interface_address
from asynccoll.net.launchers import TORCH, Placement
from asynccoll.net.secret import SECRET_BYTES, names_a_host
from asynccoll.net.sockets import format_address, reason, resolve

__all__ = ["placed", "under_agent"]

SLICE = 0.5
"""Seconds of one wait in torch, which cannot be interrupted: a cancelled `placed` leaves a thread for so long."""

CONNECT = 5.0
"""Seconds of one attempt to reach the store, likewise; it listens before any rank runs."""

_KEY = "rank0"
_MAX_VALUE = 4096
"""Bytes of what rank 0 leaves in the store; a longer text is not ours."""

_numbers = itertools.count()
"""Number of the next mesh that this process asks the store about."""

T = TypeVar("T")


def under_agent(placement: Placement, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``placement`` is a rank of torchrun whose agent listens at the address that it was given."""
    return (
        placement.size > 1
        and placement.rendezvous_fd is None
        and placement.address_source == TORCH.source
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Whoever gives ranks of his own making makes another world than torchrun's.
        and TORCH.read_rank(environ) == placement.rank
        and TORCH.read_size(environ) == placement.size
    )


@contextlib.asynccontextmanager
async def placed(
    placement: Placement, init_timeout: float, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[Placement]:
    """The placement with rank 0's address, and with a secret where none was given; to be held until the mesh is up.

    Anything but a rank under torchrun's agent is given back as it is. Every rank opens its meshes in the same order.

    Raises:
        RendezvousError: the store cannot be reached, or rank 0 has not told its address in ``init_timeout`` seconds.
    """
    if not under_agent(placement, environ):
        yield placement
        return
    asked = _Asked(placement, init_timeout, environ)
    try:
        if placement.rank == 0:
            async with asked.told() as found:
                yield found
        else:
            yield await asked.heard()
    finally:
        asked.stop()


class _Told(NamedTuple):
    """What rank 0 leaves in the store."""

    host: str
    port: int
    secret: bytes

    def encoded(self) -> str:
        return json.dumps([self.host, self.port, self.secret.hex()])

    @classmethod
    def decoded(cls, raw: bytes) -> _Told:
        """ValueError where it is something else."""
        if len(raw) > _MAX_VALUE:
            raise ValueError(f"{len(raw)} bytes")
        fields = json.loads(raw)
        if not isinstance(fields, list) or len(fields) != 3:
            raise ValueError("not three fields")
        host, port, secret = fields
        if not isinstance(host, str) or type(port) is not int or not isinstance(secret, str):
            raise ValueError("fields of other types")
        return cls(host, port, bytes.fromhex(secret))


class _Asked:
    """One mesh of one rank, and the agent's store."""

    def __init__(self, placement: Placement, init_timeout: float, environ: Mapping[str, str]) -> None:
        assert placement.host is not None  # as in any world of more than one
        assert placement.port is not None
        self._placement = placement
        self._host, self._port = placement.host, placement.port
        self._one_host = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
        run = environ.get("TORCHELASTIC_RUN_ID", "")
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"asynccoll/{run}/{restarts}/{next(_numbers)}"
        self._limit = init_timeout
        loop = asyncio.get_running_loop()
        self._started = loop.time()
        self._time = loop.time
        # Set when nobody waits any more: a thread in torch goes home after its slice.
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    @contextlib.asynccontextmanager
    async def told(self) -> AsyncIterator[Placement]:
        """Rank 0's side: listen, tell, and take the key back at the end."""
        given = self._placement.secret
        with contextlib.closing(await self._listener()) as listener:
            host = self._called(listener)
            secret = secrets.token_bytes(SECRET_BYTES) if given is None else given
            # A secret that was given stays where it was given.
            told = _Told(host, listener.getsockname()[1], secret if given is None else b"")
            store = await self._in_thread(lambda: self._connect(told))
            try:
                yield replace(
                    self._placement,
                    host=host,
                    port=told.port,
                    secret=secret,
                    rendezvous_fd=listener.fileno(),
                )
            finally:
                # Behind the mesh, or its failure: whoever has not read it by now is not in the mesh.
                await asyncio.shield(self._in_thread(lambda: self._forget(store)))

    async def heard(self) -> Placement:
        """The others' side: wait for what rank 0 tells."""
        told = await self._in_thread(self._wait)
        return replace(
            self._placement, host=told.host, port=told.port, secret=self._placement.secret or told.secret
        )

    async def _listener(self) -> socket.socket:
        """A listener for rank 0, on loopback or on the interface that leads to the store."""
        try:
            if self._one_host:
                return listen((socket.AF_INET, ("127.0.0.1", 0)), self._placement.size, reuse=False)
            family, store = (await resolve(self._host, self._port))[0]
            if self._placement.interface is not None:
                address = interface_address(self._placement.interface, family)
            else:
                address = (address_towards(family, store), 0)
                if names_a_host(self._host) and address[0].startswith(("127.", "::1")):
                    # The store's host is this one, by a name that means loopback here alone (/etc/hosts).
                    address = ("::" if family == socket.AF_INET6 else "0.0.0.0", 0)
            return listen((family, address), self._placement.size, reuse=False)
        except (OSError, UnicodeError) as error:
            raise self._error(
                f"rank 0 cannot listen on an address that leads there: {reason(error)}. Set ASYNCCOLL_MASTER_ADDR and "
                "ASYNCCOLL_MASTER_PORT to an address of rank 0's host"
            ) from error
        except LookupError as error:
            raise self._error(
                f"ASYNCCOLL_SOCKET_IFNAME={self._placement.interface!r} of rank 0 {error}"
            ) from error

    def _called(self, listener: socket.socket) -> str:
        """How others call rank 0: at the address of its listener, or by its host's name where that is all addresses."""
        host: str = listener.getsockname()[0]
        return self._host if host in ("0.0.0.0", "::") else host

    # -- in threads -----------------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    def _store(self) -> Any:
        """The agent's store, under our prefix. Loads torch."""
        try:
            from torch.distributed import PrefixStore, TCPStore
        except ImportError as error:
            raise self._error(
                f"torch cannot be imported ({error}). Install it for the Python that the ranks run in, or set "
                "ASYNCCOLL_MASTER_ADDR and ASYNCCOLL_MASTER_PORT to a free port on rank 0's host"
            ) from error
        while True:
            wait = min(CONNECT, self._left())
            try:
                store = TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=wait))
            except RuntimeError as error:
                self._go_on(f"it cannot be reached ({_first_line(error)})", error)
            else:
                return PrefixStore(self._prefix, store)

    def _connect(self, told: _Told) -> Any:
        store = self._store()
        try:
            store.set(_KEY, told.encoded())
        except RuntimeError as error:
            raise self._error(f"it does not take rank 0's address ({_first_line(error)})") from error
        return store

    def _wait(self) -> _Told:
        store = self._store()
        while True:
            try:
                store.wait([_KEY], timedelta(seconds=min(SLICE, self._left())))
                raw = store.get(_KEY)
            except RuntimeError as error:
                # Of this kind are all of torch's: the slice is up, or the connection has ended.
                if "Timeout" not in type(error).__name__ and "timeout" not in str(error).lower():
                    raise self._error(f"the connection to it has ended ({_first_line(error)})") from error
                self._go_on(
                    "rank 0 has not told its address there. Look at rank 0's output; every rank must open its meshes in the same "
                    "order",
                    error,
                    missing=(0,),
                )
            else:
                try:
                    return _Told.decoded(raw)
                except ValueError as error:
                    raise self._error(
                        f"what it holds under {self._prefix}/{_KEY} is not rank 0's address ({error})"
                    ) from error

    def _forget(self, store: Any) -> None:
        # The agent may have ended its store together with the job: then the key is gone as well.
        with contextlib.suppress(RuntimeError):
            store.delete_key(_KEY)

    def _left(self) -> float:
        return max(0.05, min(self._started + self._limit - self._time(), 86_400.0))

    def _go_on(self, text: str, cause: Exception, *, missing: tuple[int, ...] = ()) -> None:
        """Return if there is time for another attempt, else raise what ``text`` says."""
        if self._stopped.is_set() or self._time() >= self._started + self._limit:
            raise self._error(text, missing) from cause

    def _error(self, text: str, missing: tuple[int, ...] = ()) -> RendezvousError:
        place = self._placement
        address = format_address(self._host, self._port)
        elapsed = self._time() - self._started
        limit = "" if math.isinf(self._limit) else f" (limit {self._limit:g} s)"
        return RendezvousError(
            f"rank {place.rank} of {place.size}: the store of torchrun's agent at {address}, after {elapsed:.1f} s{limit}: {text}.",
            address=address,
            elapsed=elapsed,
            missing=missing,
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
