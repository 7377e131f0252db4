"""Who is let in: nobody who has not proved the secret, and of those who know it nobody with a wrong claim.

A rank 0 is forming while somebody calls it with a wrong secret, a recorded handshake (of this run and of an earlier one), one
flipped bit at every position of HELLO, PROOF, CHALLENGE and ANSWER, another run's id, a generation that is over, a rank that is
there already, another world size; reflects what it hears; or calls a rank of a mesh that is up. Then the ranks join, where the
claim of one who knows the secret has not ended the rendezvous for all, and the mesh is checked. Pickles that would make a
directory are sent at every stage. In all that is logged, raised, shown by ``repr`` or pickled the secret is looked for. ::

    python -m tests.reliability.admission                    # every bit, 10,000 pickles
    python -m tests.reliability.admission --only "flipped bits" --pickles 0
"""

import argparse
import asyncio
import base64
import collections
import contextlib
import errno
import json
import logging
import os
import pickle
import socket
import struct
import sys
import tempfile
import time
import traceback
from unittest import mock

from asynccoll.errors import AsynccollError
from asynccoll.net import control, coordinator
from asynccoll.net.coordinator import Coordinator
from asynccoll.net.dialing import Call
from asynccoll.net.handshake import (
    MAGIC,
    NO_RUN,
    NONCE_BYTES,
    VERSION,
    Answer,
    Hello,
    Purpose,
    Refused,
    Status,
    dial,
)
from asynccoll.net.launchers import Placement
from asynccoll.net.linktable import LinkTable
from asynccoll.net.rendezvous import form_mesh
from asynccoll.net.roster import Entry
from asynccoll.net.sockets import host_identity

from .common import LOOPS, conclude, tell

SECRET = b"q7-the-secret-that-must-not-show-8z"
SHOWN = (SECRET, SECRET.hex().encode(), base64.b64encode(SECRET)[:-4], repr(SECRET[:-1])[2:-1].encode())
"""Forms in which it could show."""
SAID, HEARD = 82 + 32, 44 + 65
"""Bytes of the handshake from the caller, and to it."""
POISON = b"cos\nmkdir\n(S'%s'\ntR."
"""A pickle that makes a directory."""


class Book:
    """What was tried and seen."""

    def __init__(self):
        self.tries = collections.Counter()
        self.outcomes = collections.defaultdict(collections.Counter)
        self.admitted = []
        """(case, what)."""
        self.failures = []
        self.texts = []
        """All that was logged, raised or shown."""
        self.unpickled = 0

    def saw(self, case, outcome):
        """A caller's fate."""
        self.tries[case] += 1
        if isinstance(outcome, BaseException):
            self.texts += shown(outcome)
            outcome = type(outcome).__name__
        elif isinstance(outcome, tuple):
            self.admitted.append((case, repr(outcome[1])))
            outcome[0].close()
        self.outcomes[case][str(outcome)] += 1

    def leaks(self):
        """Texts in which the secret is."""
        found = []
        for text in self.texts:
            raw = text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
            if any(form in raw for form in SHOWN):
                found.append(text)
        return found


def shown(error):
    """Everything that an error shows of itself."""
    texts = [str(error), repr(error), repr(error.args), repr(vars(error))]
    texts.append("".join(traceback.format_exception(error)))
    if isinstance(error, AsynccollError):
        texts.append(pickle.dumps(error))
    return texts


class Listener(logging.Handler):
    """Every line of the log, whatever its level."""

    def __init__(self, book):
        super().__init__(logging.DEBUG)
        self.book = book

    def emit(self, record):
        self.book.texts.append(self.format(record))


def entry(rank, size):
    """A JOIN as the ranks send it."""
    me = Entry(rank, size, "", "127.0.0.1", 0, host_identity(), os.getpid(), {"pulse": True})
    return control.encode("join", **me.as_message())


async def call(port, hello, *, secret=SECRET, flip=None, raw=None):
    """One handshake with the rank at ``port``; the socket and the answer, or what it ended with.

    ``flip``: the bit of what is said (from `SAID` bytes on: of what is heard) that is turned. ``raw``: say these bytes instead.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    at = {"said": 0, "heard": SAID}

    def turned(way, data):
        start, at[way] = at[way], at[way] + len(data)
        if flip is None or not start <= flip // 8 < start + len(data):
            return data
        changed = bytearray(data)
        changed[flip // 8 - start] ^= 1 << flip % 8
        return bytes(changed)

    try:
        async with asyncio.timeout(20):
            await loop.sock_connect(sock, ("127.0.0.1", port))
            if raw is not None:
                await loop.sock_sendall(sock, raw)
                sock.shutdown(socket.SHUT_WR)
                while data := await loop.sock_recv(sock, 1 << 12):
                    at["heard"] += len(data)
                return "shown out"
            machine = dial(secret, hello, os.urandom(NONCE_BYTES))
            step = next(machine)
            while True:
                if isinstance(step, bytes):
                    await loop.sock_sendall(sock, turned("said", step))
                    step = machine.send(b"")
                    continue
                data = b""
                while len(data) < step:
                    more = await loop.sock_recv(sock, step - len(data))
                    if not more:
                        return "shown out"
                    data += more
                step = machine.send(turned("heard", data))
    except StopIteration as end:
        kept, sock = sock, None
        return kept, end.value
    except (OSError, AsynccollError) as error:
        return error
    finally:
        if sock is not None:
            sock.close()


class Door:
    """A rank 0 of three that is forming, and what it has let in besides the ranks."""

    def __init__(self, book, case, *, generation=0):
        self.book, self.case, self.generation = book, case, generation
        self.judged, self.taken = [], []
        self.port = 0

    async def __aenter__(self):
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = listener.getsockname()[1]
        self._stack = contextlib.ExitStack()
        self._stack.callback(listener.close)
        door = self
        judge, take = Coordinator._judge, LinkTable.take

        def judging(coordinator, hello):
            door.judged.append(hello)
            return judge(coordinator, hello)

        def taking(table, purpose, peer, sock):
            door.taken.append((table.rank, purpose, peer))
            take(table, purpose, peer, sock)

        self._stack.enter_context(mock.patch.object(Coordinator, "_judge", judging))
        self._stack.enter_context(mock.patch.object(LinkTable, "take", taking))
        self.zero = asyncio.ensure_future(self.rank(0, fd=listener.fileno()))
        await asyncio.sleep(0)
        return self

    def rank(self, rank, *, fd=None, size=3, limit=300.0):
        place = Placement(
            rank=rank,
            size=size,
            host="127.0.0.1",
            port=self.port,
            secret=SECRET,
            generation=self.generation,
            rendezvous_fd=fd,
        )
        self.book.texts += [repr(place), repr(Call("h", 1, SECRET, Hello(Purpose.LINK, 1, 0, 3, 0)))]
        return form_mesh(place, SECRET, init_timeout=limit, pulse=True)

    async def __aexit__(self, kind, error, trace):
        try:
            if kind is None and not self.zero.done():
                before = len(self.judged), len(self.taken)
                links = await asyncio.gather(self.zero, self.rank(1), self.rank(2))
                self.book.texts += map(repr, links)
                if sorted(links[0].sockets) != [1, 2] or len({mesh.run_id for mesh in links}) != 1:
                    self.book.failures.append(f"{self.case}: not the mesh that it should be")
                self.before = before
                for mesh in links:
                    mesh.close()
            else:
                (outcome,) = await asyncio.gather(self.zero, return_exceptions=True)
                self.book.texts += shown(outcome)
        finally:
            self.zero.cancel()
            self._stack.close()

    def nobody(self, *, judged=0):
        """So far nobody was let in, and only so many were found to know the secret."""
        if len(self.judged) != judged:
            self.book.admitted.append((self.case, f"asked for a verdict on {self.judged[:3]}"))
        if self.taken:
            self.book.admitted.append((self.case, f"took {self.taken[:3]}"))


HELLO = Hello(Purpose.RENDEZVOUS, 1, 0, 3, 0)


async def wrong_secret(book, step):
    async with Door(book, "wrong secret") as door:
        for secret in (b"", SECRET[:-1], SECRET + b"0", SECRET.upper(), bytes(32), SECRET[1:]):
            for hello in (HELLO, HELLO._replace(purpose=Purpose.PULSE), HELLO._replace(rank=2)):
                book.saw("wrong secret", await call(door.port, hello, secret=secret))
        door.nobody()


async def flipped_bits(book, step):
    async with Door(book, "flipped bits") as door:
        for bit in range(0, 8 * SAID, step):
            book.saw("flipped bits", await call(door.port, HELLO, flip=bit))
        door.nobody()
        heard = range(8 * SAID, 8 * (SAID + HEARD), step)
        for bit in heard:  # these the caller must not believe; of ANSWER's the acceptor cannot know
            book.saw("flipped bits", await call(door.port, HELLO, flip=bit))


async def replay(book, step):
    """All that rank 1 says while it joins a mesh, said again: to the same rank 0 while it forms, and to a later one."""
    loop = asyncio.get_running_loop()
    said = bytearray()
    async with Door(book, "replay") as door:
        relay = socket.create_server(("127.0.0.1", 0))
        relay.setblocking(False)

        async def carry(source, sink, keep):
            with contextlib.suppress(OSError):
                while data := await loop.sock_recv(source, 4096):
                    if keep:
                        said.extend(data)
                    await loop.sock_sendall(sink, data)
                sink.shutdown(socket.SHUT_WR)

        place = Placement(rank=1, size=3, host="127.0.0.1", port=relay.getsockname()[1])
        one = asyncio.ensure_future(form_mesh(place, SECRET, init_timeout=20.0, pulse=True))
        here, _ = await loop.sock_accept(relay)
        there = socket.create_connection(("127.0.0.1", door.port))
        for sock in (here, there):
            sock.setblocking(False)
        ways = asyncio.gather(carry(here, there, True), carry(there, here, False))
        while len(said) <= SAID + 4:  # a poll: until it has joined
            await asyncio.sleep(0.005)
        known = len(door.judged), list(door.taken)
        for end in (len(said), SAID, SAID + 10):
            book.saw("replay", await call(door.port, HELLO, raw=bytes(said[:end])))
        if len(door.judged) != known[0]:
            book.admitted.append(("replay", "the same run"))
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        for sock in (here, there, relay):
            sock.close()
        ways.cancel()
        await asyncio.gather(ways, return_exceptions=True)
        await asyncio.gather(door.zero, return_exceptions=True)  # its rank 1 has left
    async with Door(book, "replay") as door:
        for end in (len(said), SAID, SAID + 10):
            book.saw("replay", await call(door.port, HELLO, raw=bytes(said[:end])))
        door.nobody()


async def wrong_claims(book, step):
    """From one who knows the secret: refused, and the mesh forms."""
    claims = {
        "wrong run": [
            HELLO._replace(purpose=purpose, run_id=run)
            for purpose in (Purpose.LINK, Purpose.PULSE)
            for run in (NO_RUN, bytes(range(16)), b"\xff" * 16)
        ],
        "old generation": [HELLO._replace(generation=6), HELLO._replace(generation=0)],
        "newer generation": [HELLO._replace(generation=8), HELLO._replace(generation=2**64 - 1)],
        "wrong target": [HELLO._replace(target=2), HELLO._replace(target=2**32 - 1)],
    }
    for case, hellos in claims.items():
        async with Door(book, case, generation=7) as door:
            for hello in hellos:
                if "generation" not in case:
                    hello = hello._replace(generation=7)
                outcome = await call(door.port, hello)
                book.saw(case, outcome)
                if not isinstance(outcome, Refused):
                    book.failures.append(f"{case}: {hello} got {outcome!r}")
            door.nobody(judged=len(hellos))


async def ruinous_claims(book, step):
    """From one who knows the secret: the rendezvous fails for all, since nobody knows who is right; nobody is let in."""
    claims = {
        "duplicate rank": [(1, 3), (1, 3)],
        "a second rank 0": [(0, 3)],
        "rank beyond the world": [(3, 3)],
        "wrong world size": [(1, 4)],
        "rank 2^32 - 1": [(2**32 - 1, 3)],
    }
    for case, joins in claims.items():
        with mock.patch.object(coordinator, "FAREWELL", 0.2):  # rank 2 will not come to be told
            await ruinous_claim(book, case, joins)


async def ruinous_claim(book, case, joins):
    """One of them."""
    async with Door(book, case) as door:
        socks = []
        for rank, size in joins:
            outcome = await call(door.port, HELLO._replace(rank=rank, size=size))
            if not isinstance(outcome, tuple):
                book.failures.append(f"{case}: {outcome!r}")
                continue
            socks.append(outcome[0])
            await asyncio.get_running_loop().sock_sendall(outcome[0], entry(rank, size))
        message = {}
        while message.get("kind") != "failed":
            message = await control.receive(socks[-1])
        book.tries[case] += 1
        book.outcomes[case][message["text"].partition(":")[0][:40]] += 1
        book.texts.append(json.dumps(message))
        for sock in socks:
            sock.close()
        (error,) = await asyncio.gather(door.zero, return_exceptions=True)
        if not isinstance(error, AsynccollError):
            book.admitted.append((case, repr(error)))


async def reflection(book, step):
    """Who answers a rank with its own words is not taken for rank 0."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]

        def header(length):
            return MAGIC + struct.pack("!HH", VERSION, length)

        answer = Answer(Status.ACCEPTED, 0, 3, 0, NO_RUN).encode()
        scripts = {
            "its own hello as challenge": lambda hello, proof: (hello, b""),
            "its own nonce": lambda hello, proof: (header(32) + hello[-32:], answer + proof),
            "its own proof": lambda hello, proof: (header(32) + bytes(32), answer + proof),
        }
        for script in scripts.values():
            calling = asyncio.ensure_future(call(port, HELLO))
            sock, _ = await loop.sock_accept(listener)
            sock.setblocking(False)
            with sock:
                hello = await loop.sock_recv(sock, 82)
                await loop.sock_sendall(sock, script(hello, bytes(32))[0])
                with contextlib.suppress(OSError):  # it has hung up
                    proof = await loop.sock_recv(sock, 32)
                    await loop.sock_sendall(sock, script(hello, proof)[1])
            book.saw("reflection", await calling)
    async with Door(book, "reflection") as door:  # and rank 0 is not taken in by its own challenge
        with socket.create_connection(("127.0.0.1", door.port)) as sock:
            sock.setblocking(False)
            await loop.sock_sendall(sock, HELLO.encode(bytes(32)))
            challenge = b""
            while len(challenge) < 44:
                challenge += await loop.sock_recv(sock, 44 - len(challenge))
            outcome = await call(door.port, HELLO, raw=HELLO.encode(challenge[12:]) + challenge[12:])
            book.saw("reflection", outcome)
        door.nobody()


async def second_connection(book, step):
    """Once the mesh is up nobody listens any more: a second connection for a live rank is refused by the kernel."""
    case = "a live rank's second connection"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        places = [
            Placement(rank=rank, size=3, host="127.0.0.1", port=port, rendezvous_fd=None if rank else listener.fileno())
            for rank in range(3)
        ]  # fmt: skip
        links = await asyncio.gather(*(form_mesh(place, SECRET, init_timeout=20.0) for place in places))
    ports = {int(address.rpartition(":")[2]) for address in links[0].addresses.values()} | {port}
    ports |= {sock.getsockname()[1] for mesh in links for sock in mesh.sockets.values()}
    for where in sorted(ports):
        for purpose in Purpose:
            for rank in (1, 2):
                outcome = await call(where, Hello(purpose, rank, 0, 3, 0, links[0].run_id))
                book.saw(case, outcome)
                if not isinstance(outcome, OSError) or outcome.errno != errno.ECONNREFUSED:
                    book.admitted.append((case, f"port {where}: {outcome!r}"))
    for mesh in links:
        mesh.close()


def made(path):
    return os.path.exists(path)


async def pickles(book, count):
    """A pickle that would make a directory, at every stage, ``count`` times; also from one who knows the secret."""
    case = "pickles"
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as place:
        victim = os.path.join(place, "made").encode()
        poison = POISON % victim
        pickle.loads(poison)
        if not made(victim):
            book.failures.append(f"{case}: the pickle does nothing, so this shows nothing")
        os.rmdir(victim)
        hello = HELLO.encode(bytes(32))
        stages = (
            poison,
            hello[:12] + poison,
            hello + poison,
            hello + bytes(32) + poison,
            hello[:50] + poison * 3,
            HELLO._replace(rank=2).encode(bytes(32)) + poison[:32] + poison,
            HELLO._replace(run_id=bytes(range(16))).encode(bytes(32)) + poison,
            MAGIC + struct.pack("!HH", VERSION, len(poison)) + poison,
        )
        frames = (
            struct.pack("!I", len(poison)) + poison,
            control.encode("join", host=poison, port=poison, node=poison, pid=poison, settings=poison),
            control.encode(str(poison)),
        )
        real = pickle.loads

        def counted(*data, **options):
            book.unpickled += 1
            return real(*data, **options)

        def unpickler(*data, **options):
            book.unpickled += 1
            return pickle._Unpickler(*data, **options)

        with (
            mock.patch.object(pickle, "loads", counted),
            mock.patch.object(pickle, "load", unpickler),
            mock.patch.object(pickle, "Unpickler", unpickler),
        ):
            async with Door(book, case) as door:
                for number in range(count):
                    if number % 10:
                        flip = number % (8 * 114)
                        said = stages[number % len(stages)]
                        if number % 3 == 0:
                            said = bytearray(said)
                            said[flip // 8 % len(said)] ^= 1 << flip % 8
                        book.saw(case, await call(door.port, HELLO, raw=bytes(said)))
                    else:
                        outcome = await call(door.port, HELLO)
                        book.tries[case] += 1
                        if isinstance(outcome, tuple):
                            sock, _ = outcome
                            with sock, contextlib.suppress(OSError):
                                await loop.sock_sendall(sock, frames[number // 10 % len(frames)])
                                sock.shutdown(socket.SHUT_WR)
                                while await loop.sock_recv(sock, 1 << 12):
                                    pass
                    if number % 1000 == 999:
                        tell(f"{case}: {number + 1}")
                if door.taken:
                    book.admitted.append((case, f"took {door.taken[:3]}"))
        if made(victim):
            book.failures.append(f"{case}: the directory was made")
        if book.unpickled:
            book.failures.append(f"{case}: {book.unpickled} were unpickled")


CASES = {
    "wrong secret": wrong_secret,
    "replay": replay,
    "flipped bits": flipped_bits,
    "wrong claims": wrong_claims,
    "ruinous claims": ruinous_claims,
    "reflection": reflection,
    "second connection": second_connection,
}


async def survey(names=CASES, step=1, count=10_000):
    """Run the cases. The `Book`."""
    book = Book()
    root = logging.getLogger()
    handler, level = Listener(book), logging.getLogger("asynccoll").level
    root.addHandler(handler)
    logging.getLogger("asynccoll").setLevel(logging.DEBUG)
    loop = asyncio.get_running_loop()
    try:
        for name in names:
            # The loop logs what it runs, at twenty times the price: not for thousands of calls that are all alike.
            loop.set_debug(name != "flipped bits")
            try:
                await CASES[name](book, step)
            except Exception as error:  # noqa: BLE001 (counted, told, and the exit code says so)
                book.failures.append(f'{name}: {type(error).__name__}: {error}; --only "{name}" --pickles 0')
            tell(f"{name}: {sum(book.tries.values())} tries so far, {len(book.admitted)} admitted")
        loop.set_debug(False)
        if count:
            await pickles(book, count)
    finally:
        root.removeHandler(handler)
        logging.getLogger("asynccoll").setLevel(level)
        loop.set_debug(False)
    book.failures += [f"admitted: {case}: {what}" for case, what in book.admitted]
    book.failures += [f"the secret shows in {text!r:.300}" for text in book.leaks()]
    return book


def main(arguments=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--step", type=int, default=1, help="flip every so manieth bit")
    parser.add_argument("--pickles", type=int, default=10_000)
    parser.add_argument("--loop", choices=LOOPS, default="asyncio")
    options = parser.parse_args(arguments)
    logging.getLogger().addHandler(logging.NullHandler())
    began = time.monotonic()
    with asyncio.Runner(loop_factory=LOOPS[options.loop]) as runner:
        book = runner.run(survey(options.only, options.step, options.pickles))
    return conclude(
        book.failures,
        loop=options.loop,
        tries=dict(book.tries),
        admitted=len(book.admitted),
        outcomes={case: dict(kinds.most_common(6)) for case, kinds in book.outcomes.items()},
        texts_searched=len(book.texts),
        leaks=len(book.leaks()),
        unpickled=book.unpickled,
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    sys.exit(main())
