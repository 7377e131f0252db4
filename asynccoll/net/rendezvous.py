"""Forms the mesh: one authenticated TCP connection per pair of ranks. Knows whom to ask, not how it is done.

`asynccoll.net.coordinator` is rank 0's side, `asynccoll.net.joiner` that of all others; the bytes are in
`asynccoll.net.handshake` and `asynccoll.net.control`.

::

    rank 0            rank 1            rank 2
      |<---- JOIN ------|                 |
      |<---------------- JOIN ------------|      rank 0 reports who is missing
      |---- WELCOME ---->                 |
      |----------------- WELCOME -------->|      run id, everybody's address
      |                 |<---- link ------|      the higher rank dials the lower
      |<---- LINKED ----|                 |
      |<---------------- LINKED ----------|
      |---- READY ------>                 |
      |----------------- READY ---------->|      the mesh is up on every rank, or on none
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asynccoll.net import control
from asynccoll.net.coordinator import Coordinator
from asynccoll.net.handshake import RUN_ID_BYTES
from asynccoll.net.joiner import Joiner
from asynccoll.net.launchers import Placement
from asynccoll.net.links import Links
from asynccoll.net.sockets import host_identity

if TYPE_CHECKING:
    from asynccoll.net.tls import Tls

__all__ = ["MAX_OFFER", "Links", "form_mesh"]

MAX_OFFER = control.MAX_CONTROL // 2
"""Most bytes of ``offer`` and of ``must_agree`` as msgpack: half a control message, the rest is for the
members.
"""


async def form_mesh(
    placement: Placement,
    secret: bytes,
    *,
    init_timeout: float,
    offer: Mapping[str, Any] | None = None,
    must_agree: Mapping[str, Any] | None = None,
    pulse: bool = False,
    tls: Tls | None = None,
) -> Links:
    """Meet the other ranks and connect to each. Every rank calls this once, in any order.

    Args:
        placement: own rank, world size, and where rank 0 is.
        secret: what all ranks know and nobody else does.
        init_timeout: seconds to wait for the others.
        offer: what rank 0 hands to everybody (other ranks' offers are ignored). Must suit msgpack.
        must_agree: name -> value of settings that have to be equal on all ranks. Must suit msgpack.
        pulse: make a second connection for each pair, for heartbeats. The same on every rank.
        tls: what every connection begins with, before the proof of the secret. On every rank, or on none.

    Returns:
        The connected sockets and what was learned, once the whole mesh is up on every rank. The sockets are
        the caller's. Nothing is registered with the loop, and no byte of what the peers send next has been
        read.

    Raises:
        RendezvousError: a rank did not come, came twice, left, disagrees, or cannot be reached; rank 0 cannot
        listen.
            All ranks that had joined raise with the same reason. ``missing`` holds the ranks that are not
            there.
        AuthenticationError: this rank and rank 0 do not have the same secret, or one does not accept the other's certificate.
        ValueError: ``offer`` or ``must_agree`` is too large. TypeError: msgpack cannot carry it.

    Cancelling closes everything and tells the others.
    """
    offered = control.normalise(offer or {}, MAX_OFFER, "offer")
    settings = control.normalise({**(must_agree or {}), "pulse": pulse}, MAX_OFFER, "must_agree")
    if placement.size == 1:
        return Links(
            rank=0,
            size=1,
            run_id=os.urandom(RUN_ID_BYTES),
            addresses={0: "local"},
            hosts={0: host_identity()},
            welcome=offered,
        )
    if placement.rank == 0:
        return await Coordinator(placement, secret, settings, init_timeout, pulse, offered, tls).form()
    return await Joiner(placement, secret, settings, init_timeout, pulse, tls).form()
