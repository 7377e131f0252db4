"""Calls another rank until it answers. Knows retries, names and handshakes, not what the connection is for.

A refused connection, a reset, a name that does not resolve yet, silence, or a stranger on the port: all of
these may pass while processes start, so they are retried until the deadline, and the last one is told in the
error. A wrong secret, a certificate that is not accepted, another version or a rank that says no will not pass, so they end the
call at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from asynccoll.errors import ProtocolError
from asynccoll.net import handshake
from asynccoll.net.accepting import HANDSHAKE_TIMEOUT, shake
from asynccoll.net.handshake import Answer, Hello, Status
from asynccoll.net.sockets import Endpoint, channel_of, prepare, reason, resolve

if TYPE_CHECKING:
    from asynccoll.net.tls import Tls

__all__ = ["CONNECT_TIMEOUT", "Backoff", "Call", "dial"]

CONNECT_TIMEOUT = 10.0
"""Seconds for one TCP connect: covers three lost SYNs (sent after 0, 1, 3 and 7 s), then another address gets
its turn.
"""


class Backoff:
    """Waiting times that grow and are jittered, so that ranks started at one instant do not call in step."""

    FIRST = 0.01
    FACTOR = 1.6
    LONGEST = 0.5

    def __init__(self) -> None:
        # Upper end of the next waiting time, in seconds.
        self._ceiling = self.FIRST

    def next(self) -> float:
        """Seconds to wait now."""
        wait = self._ceiling * random.uniform(0.5, 1.0)
        self._ceiling = min(self.LONGEST, self._ceiling * self.FACTOR)
        return wait


class Stage(IntEnum):
    """How far an attempt got."""

    LOOKUP = 0
    CONNECT = 1
    HANDSHAKE = 2


_SILENCE = {
    Stage.LOOKUP: "the resolver has not answered yet",
    Stage.CONNECT: "no answer to the connect yet",
    Stage.HANDSHAKE: "connected, but no answer to the handshake yet",
}

_SLOW = 0.5
"""Seconds after which an attempt that is cut off counts as one that got no answer."""


@dataclass(slots=True)
class Call:
    """One call in progress; ``trouble`` is there for whoever has to explain why it did not succeed in time."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    hello: Hello
    tls: Tls | None = None
    """With what the connection begins, or None."""
    trouble: str = ""
    """What came of the address that got furthest, the last time around."""
    furthest: Stage | None = None
    """How far that was; None before the first address of a round has failed."""

    def failed(self, stage: Stage, text: str) -> None:
        """An attempt ended at ``stage``. Of several addresses the one that got furthest tells most."""
        if self.furthest is None or stage > self.furthest:
            self.trouble, self.furthest = text, stage

    def cut_off(self, stage: Stage, seconds: float) -> None:
        """Time ran out during an attempt. What an earlier one ended in says more, unless this one just got no answer."""
        if seconds > _SLOW or not self.trouble:
            self.trouble = _SILENCE[stage]


async def dial(call: Call) -> tuple[socket.socket, Answer]:
    """Call until the other rank has answered and both have proved the secret. Runs until cancelled (use a timeout).

    Returns:
        The connection, which is now the caller's, and what the acceptor said about itself.

    Raises:
        handshake.BadProof, handshake.VersionMismatch, handshake.TlsMismatch, handshake.Refused: see there.
        AuthenticationError: one of the two does not accept the other's certificate.
    """
    backoff = Backoff()
    while True:
        call.furthest = None
        # Every address gets its turn in each round: a name may have one that leads nowhere.
        for endpoint in await _look_up(call):
            reached = await _attempt(call, endpoint)
            if reached is not None:
                return reached
        await asyncio.sleep(backoff.next())


async def _look_up(call: Call) -> Sequence[Endpoint]:
    """The addresses of the name, none if it does not resolve."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        return await resolve(call.host, call.port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that IDNA cannot encode
        call.failed(Stage.LOOKUP, f"the name {call.host!r} did not resolve ({reason(error)})")
        return ()
    except asyncio.CancelledError:
        call.cut_off(Stage.LOOKUP, loop.time() - began)
        raise


async def _attempt(call: Call, endpoint: Endpoint) -> tuple[socket.socket, Answer] | None:
    """One connect and handshake; None, and ``call.trouble`` set, if it is worth trying again."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    stage = Stage.CONNECT
    reached = False
    sock: socket.socket | None = None
    try:
        family, address = endpoint
        sock = prepare(socket.socket(family, socket.SOCK_STREAM))
        if os.name == "posix":
            # The port that the kernel gives this end may be the one that a rank wants to listen on next.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        async with asyncio.timeout(CONNECT_TIMEOUT):
            await loop.sock_connect(sock, address)
        if sock.getsockname() == sock.getpeername():
            # Nobody listened, and the kernel gave our end the very port we were calling (simultaneous open).
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        stage = Stage.HANDSHAKE
        if call.tls is not None:
            sock = call.tls.dialed(sock, call.host)
        machine = handshake.dial(
            call.secret, call.hello, secrets.token_bytes(handshake.NONCE_BYTES), channel_of(sock)
        )
        _, answer = await shake(sock, machine)
        reached = True
    except TimeoutError:
        if stage is Stage.CONNECT:
            call.failed(stage, f"no answer to the connect within {CONNECT_TIMEOUT:g} s")
        else:
            call.failed(stage, f"connected, but no handshake within {HANDSHAKE_TIMEOUT:g} s")
    except handshake.Refused as error:
        if error.answer.status is not Status.NEW_GENERATION:
            raise
        # Left over by a restart and about to go; the one we want will listen there next.
        call.failed(stage, str(error))
    except ProtocolError as error:
        call.failed(stage, f"connected, but {error}")
    except OSError as error:
        call.failed(stage, reason(error) if stage is Stage.CONNECT else f"connected, then: {reason(error)}")
    except asyncio.CancelledError:
        call.cut_off(stage, loop.time() - began)
        raise
    else:
        return sock, answer
    finally:
        if not reached and sock is not None:
            sock.close()
    return None
