"""Mutual proof that both ends of a connection know the secret. Knows bytes and HMACs, no sockets or clocks.

::

    dialer                                             acceptor
      | HELLO  who I am, whom I want, my nonce           |
      |------------------------------------------------->|
      |                          CHALLENGE  your nonce   |
      |<-------------------------------------------------|
      | PROOF  HMAC("dialer", HELLO, CHALLENGE)          |
      |------------------------------------------------->|   checked before anything else is sent or believed
      |  ANSWER  status, who I am, HMAC("acceptor", ...) |
      |<-------------------------------------------------|   checked by the dialer

The dialer proves first, so a stranger who merely connects gets nothing that he could try passwords on. Both
nonces go into both HMACs, so nothing recorded earlier can be used again; the labels keep one side's HMAC from
standing in for the other's. Over TLS the name of the connection goes in too: somebody in between, with a connection
to each end and certificates that they accept, cannot pass the messages through. All sizes are fixed: `LIMIT` bytes
are the most that either side reads before the proof.

The machines are generators. They yield an ``int`` (read exactly so many bytes and send them in) or ``bytes``
(write these, then send in ``b""``), and return when both sides have proved themselves. Exact reads leave
every later byte to whoever owns the connection next.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Generator
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from asynccoll.errors import AuthenticationError, ProtocolError, RendezvousError

__all__ = [
    "LIMIT",
    "MAGIC",
    "NONCE_BYTES",
    "NO_RUN",
    "RUN_ID_BYTES",
    "TLS_WANTED",
    "VERSION",
    "Answer",
    "BadProof",
    "Hello",
    "Machine",
    "NotAsynccoll",
    "Purpose",
    "Refused",
    "Status",
    "TlsMismatch",
    "VersionMismatch",
    "accept",
    "dial",
]

MAGIC = b"asynccol"
VERSION = 1
"""Of everything that follows the header, data frames included."""

NONCE_BYTES = 32
"""As long as the HMAC: the chance that a nonce comes twice is that of guessing the HMAC."""

RUN_ID_BYTES = 16
NO_RUN = bytes(RUN_ID_BYTES)
"""Run id of a dialer that has not been told one yet."""

LIMIT = 256
"""The most bytes that either side takes from a peer that has proved nothing."""

_MAC_BYTES = hashlib.sha256().digest_size

# Magic, version, and how many bytes of this message follow. The only part that no later version may change:
# with it two versions can tell each other apart.
_HEADER = struct.Struct("!8sHH")

_TLS_LENGTH = 0xFFFF
TLS_WANTED = _HEADER.pack(MAGIC, VERSION, _TLS_LENGTH)
"""What an acceptor that begins with TLS says to a caller that began with the handshake itself."""

_NO_TLS = "it uses TLS, and this rank was given no ssl=: give ssl= to every rank or to none"

_TLS_RECORD = b"\x16\x03"
"""How TLS begins: a handshake record, version 3.something (RFC 8446, section 5.1)."""
_HELLO = struct.Struct(f"!BBIIIQ{RUN_ID_BYTES}s{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"!BIIQ{RUN_ID_BYTES}s")


class Purpose(IntEnum):
    """What a connection is for."""

    RENDEZVOUS = 1
    """A rank registers with rank 0; the connection becomes their data link."""
    LINK = 2
    """A data link: the higher rank dials the lower."""
    PULSE = 3
    """Heartbeats, beside a data link."""


class Status(IntEnum):
    """The acceptor's verdict on a HELLO. All but `BAD_PROOF` are authenticated."""

    ACCEPTED = 0
    BAD_PROOF = 1
    """The dialer does not know the secret."""
    WRONG_RUN = 2
    """The dialer belongs to another run."""
    OLD_GENERATION = 3
    """The dialer's generation is older than the acceptor's: it was left over by a restart."""
    NEW_GENERATION = 4
    """The dialer's generation is newer: the acceptor was left over."""
    WRONG_RANK = 5
    """The acceptor is not the rank that was wanted, or expects no call from the dialer's rank."""
    WRONG_PURPOSE = 6
    """The acceptor takes no connections of that purpose."""
    DUPLICATE = 7
    """There is a connection from that rank already."""


class Hello(NamedTuple):
    """Who dials, and whom. Travels in clear, believed only after the proof."""

    purpose: Purpose
    rank: int
    target: int
    """The rank that is wanted."""
    size: int
    generation: int
    run_id: bytes = NO_RUN
    lane: int = 0
    """Number of the stream between the two ranks."""

    def encode(self, nonce: bytes) -> bytes:
        """The bytes of the HELLO message."""
        body = _HELLO.pack(
            self.purpose,
            self.lane,
            self.rank,
            self.target,
            self.size,
            self.generation,
            self.run_id,
            nonce,
        )
        return _HEADER.pack(MAGIC, VERSION, len(body)) + body


class Answer(NamedTuple):
    """Who accepted, or why not."""

    status: Status
    rank: int
    size: int
    generation: int
    run_id: bytes

    def encode(self) -> bytes:
        """The bytes of the ANSWER message, without its HMAC."""
        return _ANSWER.pack(*self)


class NotAsynccoll(ProtocolError):
    """What came is not the beginning of asynccoll's handshake."""


class VersionMismatch(RendezvousError):
    """The peer speaks another version of the protocol.

    Attributes:
        mine: own version.
        theirs: the peer's.
    """

    def __init__(self, theirs: int) -> None:
        self.mine, self.theirs = VERSION, theirs
        super().__init__(
            f"the peer speaks version {theirs} of asynccoll's protocol, this process version {VERSION}: "
            "install the same release of asynccoll for every rank"
        )


class TlsMismatch(RendezvousError):
    """One of the two begins with TLS, the other does not."""


class BadProof(AuthenticationError):
    """The secrets of the two ends differ.

    Attributes:
        hello: what a dialer claimed to be; None on the dialer's own side.
    """

    def __init__(self, message: str, hello: Hello | None = None) -> None:
        self.hello = hello
        super().__init__(message)


class Refused(RendezvousError):
    """Both ends know the secret, but the acceptor does not take this connection.

    Attributes:
        hello: what the dialer said.
        answer: what the acceptor said.
    """

    def __init__(self, hello: Hello, answer: Answer) -> None:
        self.hello, self.answer = hello, answer
        status = answer.status
        if status is Status.WRONG_RUN:
            why = f"it belongs to run {answer.run_id.hex()}, not to run {hello.run_id.hex()}"
        elif status in (Status.OLD_GENERATION, Status.NEW_GENERATION):
            why = f"it is of generation {answer.generation}, not {hello.generation}"
        elif status is Status.DUPLICATE:
            why = f"it has a connection from rank {hello.rank} already"
        elif answer.rank != hello.target:
            why = f"it is rank {answer.rank}"
        else:
            why = f"it takes no {hello.purpose.name.lower()} connection from rank {hello.rank}"
        super().__init__(f"rank {hello.target} refused rank {hello.rank}: {why}")


Machine: TypeAlias = Generator[int | bytes, bytes, "tuple[Hello, Answer]"]
"""See the module's docstring for the protocol of yields."""


def dial(secret: bytes, hello: Hello, nonce: bytes, channel: Callable[[], bytes] = bytes) -> Machine:
    """The dialer's side. ``channel`` names the connection below, if it has a name. Returns ``hello`` and the acceptor's answer.

    Raises:
        NotAsynccoll: the peer does not speak this protocol.
        VersionMismatch: it speaks another version of it.
        TlsMismatch: it begins with TLS.
        BadProof: the secrets differ.
        Refused: the acceptor knows the secret and says no.
    """
    opening = hello.encode(nonce)
    yield opening
    challenge = yield from _read_message(NONCE_BYTES, _TLS_LENGTH)
    name = channel()
    yield _mac(secret, b"dialer", opening, challenge, name)
    verdict = yield _ANSWER.size
    mac = yield _MAC_BYTES
    if verdict[0] == Status.BAD_PROOF:
        raise BadProof(
            f"rank {hello.target} says that this process does not know its secret: give the same ASYNCCOLL_SECRET (or "
            "secret=) to every rank; without one, every rank must run as the same user on the same host"
        )
    if not hmac.compare_digest(mac, _mac(secret, b"acceptor", opening, challenge, verdict, name)):
        raise BadProof(
            f"the process that answers for rank {hello.target} does not know the secret: the address is another "
            "program's, or ASYNCCOLL_SECRET (or secret=) differs between ranks"
        )
    status, *identity = _ANSWER.unpack(verdict)
    try:
        answer = Answer(Status(status), *identity)
    except ValueError as error:
        raise NotAsynccoll(f"the peer answered with the unknown status {status}") from error
    if answer.status is not Status.ACCEPTED:
        raise Refused(hello, answer)
    return hello, answer


def accept(
    secret: bytes, nonce: bytes, judge: Callable[[Hello], Answer], channel: Callable[[], bytes] = bytes
) -> Machine:
    """The acceptor's side. ``judge`` is asked once, after the dialer has proved itself; ``channel`` as for `dial`. Returns its
    HELLO and the answer.

    Raises:
        NotAsynccoll: the peer does not speak this protocol.
        VersionMismatch: it speaks another version of it; it has been told ours.
        TlsMismatch: it begins with TLS; it has been shown that we do not.
        BadProof: it does not know the secret; it has been told so.
        Refused: ``judge`` said no; the dialer has been told why.
    """
    try:
        opening = yield from _read_message(_HELLO.size)
    except (VersionMismatch, TlsMismatch):
        yield _HEADER.pack(MAGIC, VERSION, 0)  # a caller that speaks TLS knows us by the magic
        raise
    purpose, lane, rank, target, size, generation, run_id, their_nonce = _HELLO.unpack(
        opening[_HEADER.size :]
    )
    if purpose not in Purpose.__members__.values():
        raise NotAsynccoll(f"the peer asks for the unknown purpose {purpose}")
    hello = Hello(Purpose(purpose), rank, target, size, generation, run_id, lane)
    if hmac.compare_digest(their_nonce, nonce):
        raise NotAsynccoll("the peer sent our own nonce back")
    challenge = _HEADER.pack(MAGIC, VERSION, NONCE_BYTES) + nonce
    yield challenge
    proof = yield _MAC_BYTES
    name = channel()
    if not hmac.compare_digest(proof, _mac(secret, b"dialer", opening, challenge, name)):
        # Zeros: who has proved nothing learns nothing that depends on the secret, nor who we are.
        yield Answer(Status.BAD_PROOF, 0, 0, 0, NO_RUN).encode() + bytes(_MAC_BYTES)
        raise BadProof(f"it claims to be rank {rank} but does not know the secret", hello)
    answer = judge(hello)
    verdict = answer.encode()
    yield verdict + _mac(secret, b"acceptor", opening, challenge, verdict, name)
    if answer.status is not Status.ACCEPTED:
        raise Refused(hello, answer)
    return hello, answer


def _read_message(length: int, wanted: int | None = None) -> Generator[int | bytes, bytes, bytes]:
    """Header and body of a message whose body has ``length`` bytes in this version. ``wanted``: the length that asks for TLS."""
    header = yield _HEADER.size
    magic, version, announced = _HEADER.unpack(header)
    if magic.startswith(_TLS_RECORD):
        raise TlsMismatch(_NO_TLS)
    if magic != MAGIC:
        raise NotAsynccoll("the peer does not speak asynccoll's protocol")
    if version != VERSION:
        raise VersionMismatch(version)
    if announced == wanted:
        raise TlsMismatch(_NO_TLS)
    if announced != length:
        raise NotAsynccoll(f"the peer announces {announced} bytes where {length} belong")
    body = yield length
    return header + body


def _mac(secret: bytes, role: bytes, *transcript: bytes) -> bytes:
    """HMAC over the role and everything said so far. All parts but the last have fixed lengths, so joining them is
    unambiguous.
    """
    return hmac.digest(secret, b"asynccoll " + role + b"\0" + b"".join(transcript), "sha256")
