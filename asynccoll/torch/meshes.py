"""Forms a mesh for a torch process group through its store. Knows stores and addresses, not what the group will do."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from typing import Any, Final

from asynccoll import world
from asynccoll.errors import RendezvousError, name_ranks
from asynccoll.net.interfaces import address_towards, interface_address
from asynccoll.net.launchers import Placement
from asynccoll.net.secret import is_loopback, names_a_host
from asynccoll.net.sockets import host_identity
from asynccoll.sync import SyncCommunicator, open_with

__all__ = ["open_by_store"]

_ADDRESS: Final = "asynccoll/address"
_HOST: Final = "asynccoll/host/"
_BACKLOG: Final = 4096
_PAUSES: Final = 0.001, 0.05
"""Seconds between two questions to the store: at first, and after a while."""


def open_by_store(store: Any, rank: int, size: int, timeout: float | None) -> SyncCommunicator:
    """The world of ``size`` ranks that share ``store``. Blocks until all have come.

    Rank 0 binds a port that the kernel chooses, keeps it, and publishes it with a random secret: whoever reads the store may join,
    and nobody else. It listens on loopback where all ranks are on one host, else at the address that leads to the store.

    Args:
        store: a ``torch.distributed.Store`` that only these ranks use.
        timeout: seconds for the ranks to come, and the limit of an operation; None: without an end.

    Raises:
        RendezvousError: a rank did not come, the store did not answer, or rank 0 has no address for the others.
    """
    if size == 1:
        return open_with(lambda: world.connect_at(Placement(), timeout=timeout))
    if rank:
        store.set(f"{_HOST}{rank}", host_identity())
        host, port, secret = _read(store)
        return _open(Placement(rank, size, host, port, secret), timeout)
    host = _own_address(store, size)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = "" if names_a_host(host) else host  # all addresses, where only the others know which is meant
    with socket.create_server((where, 0), family=family, backlog=_BACKLOG) as listener:
        port = listener.getsockname()[1]
        secret = secrets.token_bytes(32)
        store.set(_ADDRESS, f"{secret.hex()} {port} {host}")
        placed = Placement(rank, size, host, port, secret, rendezvous_fd=listener.fileno())
        try:
            return _open(placed, timeout)
        finally:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a file store deletes nothing
                store.delete_key(_ADDRESS)


def _open(placement: Placement, timeout: float | None) -> SyncCommunicator:
    forming = float("inf") if timeout is None else timeout
    return open_with(lambda: world.connect_at(placement, timeout=timeout, init_timeout=forming))


def _wait_for(store: Any, keys: list[str]) -> None:
    """Wait until all ``keys`` are set; TimeoutError after the store's own limit. By asking: in a wait of torch's Ctrl-C is not
    heard before its end.
    """
    deadline = time.monotonic() + store.timeout.total_seconds()
    pause = _PAUSES[0]
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing within {store.timeout.total_seconds():g} s")
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def _read(store: Any) -> tuple[str, int, bytes]:
    try:
        _wait_for(store, [_ADDRESS])
        secret, port, host = store.get(_ADDRESS).decode().split(" ")
    except TimeoutError as error:
        raise RendezvousError(
            f"rank 0 has not published its address in the store of this process group ({error}): look at the output of rank 0",
            missing=[0],
        ) from error
    except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
        raise RendezvousError(f"{_gone(error)}, before rank 0's address was read from it") from error
    return host, int(port), bytes.fromhex(secret)


def _gone(error: RuntimeError) -> str:
    return f"the store of this process group is gone ({error}): look at the output of the process that holds it, rank 0 as a rule"


def _own_address(store: Any, rank_count: int) -> str:
    """Where rank 0 listens: on loopback if that does for everybody."""
    keys = {rank: f"{_HOST}{rank}" for rank in range(1, rank_count)}
    try:
        _wait_for(store, list(keys.values()))
        hosts = {store.get(key) for key in keys.values()}
    except TimeoutError as error:
        absent = [rank for rank, key in keys.items() if not store.check([key])]
        raise RendezvousError(
            f"{name_ranks(absent)} did not come in time ({error}): look at their output", missing=absent
        ) from error
    except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
        raise RendezvousError(f"{_gone(error)}, before all ranks had come") from error
    if hosts == {host_identity().encode()}:
        return "127.0.0.1"
    interface = os.environ.get("ASYNCCOLL_SOCKET_IFNAME")
    if interface:
        try:
            return str(interface_address(interface.strip(), socket.AF_INET)[0])
        except LookupError as error:
            raise RendezvousError(
                f"rank 0 cannot listen: ASYNCCOLL_SOCKET_IFNAME={interface!r} {error.args[0]}"
            ) from error
    while not hasattr(store, "host") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    # A file or a hash store says nothing about hosts: then this host's own name has to do.
    name = getattr(store, "host", None) or socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        own = address_towards(family, address)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot tell at which address the others reach it: none leads to {name!r} ({error}). Set "
            "ASYNCCOLL_SOCKET_IFNAME on rank 0 to the interface that does"
        ) from error
    # The store is on this host, by a name that means loopback here alone (/etc/hosts): the others know what it means.
    return name if is_loopback(own) and names_a_host(name) else own
