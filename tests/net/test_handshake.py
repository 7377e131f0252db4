"""The handshake as bytes: both machines against each other, against forgers and against nonsense."""

import struct

import pytest

from asynccoll.errors import AuthenticationError, ProtocolError, RendezvousError
from asynccoll.net import handshake
from asynccoll.net.handshake import (
    LIMIT,
    MAGIC,
    NO_RUN,
    TLS_WANTED,
    VERSION,
    Answer,
    BadProof,
    Hello,
    NotAsynccoll,
    Purpose,
    Refused,
    Status,
    TlsMismatch,
    VersionMismatch,
    accept,
    dial,
)

RUN = bytes(range(16))
HELLO = Hello(Purpose.LINK, rank=3, target=1, size=4, generation=2, run_id=RUN)
ANSWER = Answer(Status.ACCEPTED, rank=1, size=4, generation=2, run_id=RUN)
NONCE_D, NONCE_A = b"d" * 32, b"a" * 32


class Wire:
    """Runs two machines against each other, one byte stream each way. ``tamper(sender, n, data)`` may change a message."""

    def __init__(self, dialer, acceptor, tamper=lambda sender, n, data: data):
        self.machines = {"dialer": dialer, "acceptor": acceptor}
        self.tamper = tamper
        self.incoming = {"dialer": b"", "acceptor": b""}
        self.sent = {"dialer": [], "acceptor": []}
        self.taken = {"dialer": 0, "acceptor": 0}
        self.outcome = {}

    def run(self):
        wants = {name: next(machine) for name, machine in self.machines.items()}
        moved = True
        while moved:
            moved = False
            for name, other in (("dialer", "acceptor"), ("acceptor", "dialer")):
                while name not in self.outcome:
                    want = wants[name]
                    if isinstance(want, bytes):
                        self.sent[name].append(want)
                        self.incoming[other] += self.tamper(name, len(self.sent[name]) - 1, want)
                        give = b""
                    elif len(self.incoming[name]) >= want:
                        give, self.incoming[name] = self.incoming[name][:want], self.incoming[name][want:]
                        self.taken[name] += want
                    else:
                        break
                    moved = True
                    try:
                        wants[name] = self.machines[name].send(give)
                    except StopIteration as end:
                        self.outcome[name] = end.value
                    except Exception as error:  # noqa: BLE001 (a result like any other here)
                        self.outcome[name] = error
        return self.outcome.get("dialer"), self.outcome.get("acceptor")


def meet(dialer_secret=b"s", acceptor_secret=b"s", *, hello=HELLO, judge=lambda hello: ANSWER, tamper=None):
    wire = Wire(
        dial(dialer_secret, hello, NONCE_D),
        accept(acceptor_secret, NONCE_A, judge),
        tamper or (lambda sender, n, data: data),
    )
    return (*wire.run(), wire)


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("secret", [b"", b"s", bytes(1000)])
def test_two_sides_with_one_secret_learn_who_the_other_is(purpose, secret):
    hello = HELLO._replace(purpose=purpose, lane=5, generation=2**64 - 1)
    dialer, acceptor, wire = meet(secret, secret, hello=hello)
    assert dialer == acceptor == (hello, ANSWER)
    assert wire.incoming == {"dialer": b"", "acceptor": b""}


def test_no_side_reads_or_sends_more_than_the_limit():
    _, _, wire = meet()
    assert wire.taken["dialer"] <= LIMIT
    assert wire.taken["acceptor"] <= LIMIT


def test_the_bytes_are_those_of_the_documentation():
    _, _, wire = meet()
    hello, proof = wire.sent["dialer"]
    challenge, answer = wire.sent["acceptor"]
    assert hello == (
        b"asynccol" + struct.pack("!HH", 1, 70) + struct.pack("!BBIIIQ", 2, 0, 3, 1, 4, 2) + RUN + NONCE_D
    )
    assert challenge == b"asynccol" + struct.pack("!HH", 1, 32) + NONCE_A
    assert answer[:-32] == struct.pack("!BIIQ", 0, 1, 4, 2) + RUN
    assert (len(hello), len(challenge), len(proof), len(answer)) == (82, 44, 32, 65)
    # HMAC-SHA256 of fixed transcripts under the key "s": a change here is a new protocol version.
    import hashlib
    import hmac

    assert proof == hmac.new(b"s", b"asynccoll dialer\0" + hello + challenge, hashlib.sha256).digest()
    transcript = b"asynccoll acceptor\0" + hello + challenge + answer[:-32]
    assert answer[-32:] == hmac.new(b"s", transcript, hashlib.sha256).digest()


def test_a_dialer_with_another_secret_is_told_and_learns_nothing():
    asked = []
    dialer, acceptor, wire = meet(b"wrong", judge=asked.append)
    assert isinstance(dialer, AuthenticationError)
    assert "ASYNCCOLL_SECRET" in str(dialer)
    assert isinstance(acceptor, BadProof)
    assert acceptor.hello == HELLO
    assert not asked
    assert wire.sent["acceptor"][1] == bytes([Status.BAD_PROOF]) + bytes(64)


def test_an_acceptor_with_another_secret_cannot_pass_for_the_real_one():
    """It takes every proof, but cannot answer with one."""

    def impostor():
        yield 82
        yield MAGIC + struct.pack("!HH", VERSION, 32) + NONCE_A
        yield 32
        yield ANSWER.encode() + b"\0" * 32
        return "passed"

    dialer, acceptor = Wire(dial(b"s", HELLO, NONCE_D), impostor()).run()
    assert acceptor == "passed"
    assert isinstance(dialer, AuthenticationError)
    assert "does not know the secret" in str(dialer)


def test_the_dialers_own_proof_reflected_is_not_an_answer():
    def mirror():
        yield 82
        yield MAGIC + struct.pack("!HH", VERSION, 32) + NONCE_A
        proof = yield 32
        yield ANSWER.encode() + proof
        return "passed"

    dialer, _ = Wire(dial(b"s", HELLO, NONCE_D), mirror()).run()
    assert isinstance(dialer, AuthenticationError)


def every_bit(sender, message, length):
    return [(sender, message, bit) for bit in range(0, 8 * length, 8)] + [(sender, message, 8 * length - 1)]


@pytest.mark.parametrize(
    ("sender", "message", "bit"),
    [
        *every_bit("dialer", 0, 82),
        *every_bit("acceptor", 0, 44),
        *every_bit("dialer", 1, 32),
        *every_bit("acceptor", 1, 65),
    ],
)
def test_one_flipped_bit_anywhere_ends_the_handshake(sender, message, bit):
    asked = []

    def judge(hello):
        asked.append(hello)
        return ANSWER

    def tamper(name, n, data):
        if (name, n) != (sender, message):
            return data
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    dialer, acceptor, _ = meet(judge=judge, tamper=tamper)
    # Either side may be left waiting for bytes that its peer, which has given up, never sends.
    assert not isinstance(dialer, tuple)
    if sender == "dialer":
        assert not asked
        assert not isinstance(acceptor, tuple)


def test_a_recorded_dialer_is_no_use_against_a_new_nonce():
    _, _, wire = meet()
    recorded = b"".join(wire.sent["dialer"])

    def replay():
        yield recorded
        yield 44
        yield 65
        return "passed"

    asked = []
    _, acceptor = Wire(replay(), accept(b"s", b"b" * 32, asked.append)).run()
    assert isinstance(acceptor, BadProof)
    assert not asked


def test_a_recorded_acceptor_is_no_use_against_a_new_nonce():
    _, _, wire = meet()
    challenge, answer = wire.sent["acceptor"]

    def replay():
        yield 82
        yield challenge
        yield 32
        yield answer
        return "passed"

    dialer, _ = Wire(dial(b"s", HELLO, b"e" * 32), replay()).run()
    assert isinstance(dialer, AuthenticationError)


@pytest.mark.parametrize(
    "status", [status for status in Status if status not in (Status.ACCEPTED, Status.BAD_PROOF)]
)
def test_a_refusal_is_authenticated_and_says_why(status):
    answer = ANSWER._replace(status=status, generation=9, run_id=bytes(16))
    dialer, acceptor, _ = meet(judge=lambda hello: answer)
    for outcome in (dialer, acceptor):
        assert isinstance(outcome, Refused)
        assert outcome.answer == answer
        assert "rank 1 refused rank 3" in str(outcome)
    text = str(dialer)
    if status is Status.WRONG_RUN:
        assert NO_RUN.hex() in text
        assert RUN.hex() in text
    elif status in (Status.OLD_GENERATION, Status.NEW_GENERATION):
        assert "generation 9, not 2" in text


@pytest.mark.parametrize("theirs", [0, 2, 65535])
def test_another_version_of_the_dialer_is_told_ours(theirs):
    def other():
        # Whatever a later version says after its header, we must not need it.
        yield MAGIC + struct.pack("!HH", theirs, 9) + b"something"
        header = yield 12
        return header

    dialer, acceptor = Wire(other(), accept(b"s", NONCE_A, lambda hello: ANSWER)).run()
    assert dialer == MAGIC + struct.pack("!HH", VERSION, 0)
    assert isinstance(acceptor, VersionMismatch)
    assert (acceptor.mine, acceptor.theirs) == (VERSION, theirs)


@pytest.mark.parametrize("theirs", [0, 2, 65535])
def test_another_version_of_the_acceptor_is_an_error_with_both_numbers(theirs):
    def other():
        yield 12
        yield MAGIC + struct.pack("!HH", theirs, 0)
        return "told"

    dialer, _ = Wire(dial(b"s", HELLO, NONCE_D), other()).run()
    assert isinstance(dialer, RendezvousError)
    assert f"version {theirs}" in str(dialer)
    assert f"version {VERSION}" in str(dialer)


NONSENSE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(100),
    "huge length": MAGIC + struct.pack("!HH", VERSION, 65535) + bytes(100),
    "length of another message": MAGIC + struct.pack("!HH", VERSION, 32) + bytes(100),
    "unknown purpose": MAGIC + struct.pack("!HHB", VERSION, 70, 9) + bytes(69),
    "wrong magic": b"asynccoL" + struct.pack("!HH", VERSION, 70) + bytes(70),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE)
def test_an_acceptor_gives_up_on_nonsense_without_an_answer(said):
    def stranger():
        yield said
        return None

    wire = Wire(stranger(), accept(b"s", NONCE_A, lambda hello: ANSWER))
    _, acceptor = wire.run()
    assert isinstance(acceptor, NotAsynccoll)
    assert isinstance(acceptor, ProtocolError)
    assert not wire.sent["acceptor"]
    assert wire.taken["acceptor"] <= LIMIT


@pytest.mark.parametrize("said", [NONSENSE["HTTP"], NONSENSE["zeros"], NONSENSE["unknown purpose"]])
def test_a_dialer_gives_up_on_nonsense(said):
    def stranger():
        yield said
        return None

    dialer, _ = Wire(dial(b"s", HELLO, NONCE_D), stranger()).run()
    assert isinstance(dialer, NotAsynccoll)


def test_both_ends_have_to_be_on_one_connection():
    def machines(dialers, acceptors):
        dialer = dial(b"s", HELLO, NONCE_D, lambda: dialers)
        return Wire(dialer, accept(b"s", NONCE_A, lambda hello: ANSWER, lambda: acceptors)).run()

    assert machines(b"one", b"one") == ((HELLO, ANSWER), (HELLO, ANSWER))
    for dialers, acceptors in ((b"one", b"two"), (b"", b"two"), (b"one", b"")):
        for outcome in machines(dialers, acceptors):
            assert type(outcome) is BadProof


def test_an_acceptor_without_the_secret_cannot_name_the_connection_either():
    # It echoes what it likes as its HMAC: that of the dialer's own connection under another secret.
    forged = accept(b"other", NONCE_A, lambda hello: ANSWER, lambda: b"one")
    assert type(Wire(dial(b"s", HELLO, NONCE_D, lambda: b"one"), forged).run()[0]) is BadProof


CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(64)


def test_an_acceptor_shows_a_caller_that_begins_with_tls_who_it_is():
    def stranger():
        yield CLIENT_HELLO
        return None

    wire = Wire(stranger(), accept(b"s", NONCE_A, lambda hello: ANSWER))
    _, acceptor = wire.run()
    assert type(acceptor) is TlsMismatch
    assert "given no ssl=" in str(acceptor)
    assert wire.sent["acceptor"] == [MAGIC + struct.pack("!HH", VERSION, 0)]
    assert wire.taken["acceptor"] <= LIMIT


@pytest.mark.parametrize("said", [TLS_WANTED, CLIENT_HELLO], ids=["asked for it", "met with it"])
def test_a_dialer_hears_that_tls_is_wanted(said):
    def acceptor():
        yield said
        return None

    dialer, _ = Wire(dial(b"s", HELLO, NONCE_D), acceptor()).run()
    assert type(dialer) is TlsMismatch
    assert "give ssl= to every rank or to none" in str(dialer)


def test_a_caller_cannot_ask_the_acceptor_for_tls():
    def stranger():
        yield TLS_WANTED + bytes(100)
        return None

    wire = Wire(stranger(), accept(b"s", NONCE_A, lambda hello: ANSWER))
    assert isinstance(wire.run()[1], NotAsynccoll)
    assert not wire.sent["acceptor"]


def test_our_own_nonce_sent_back_is_refused():
    _, acceptor = Wire(dial(b"s", HELLO, NONCE_A), accept(b"s", NONCE_A, lambda hello: ANSWER)).run()
    assert isinstance(acceptor, NotAsynccoll)


def test_an_unknown_authenticated_status_is_nonsense_not_an_acceptance():
    dialer, _, _ = meet(judge=lambda hello: ANSWER._replace(status=200))
    assert isinstance(dialer, NotAsynccoll)


def test_the_proof_covers_every_field_of_the_hello():
    proofs = set()
    for change in (
        {},
        {"purpose": Purpose.PULSE},
        {"lane": 1},
        {"rank": 2},
        {"target": 0},
        {"size": 5},
        {"generation": 3},
        {"run_id": NO_RUN},
    ):
        _, _, wire = meet(hello=HELLO._replace(**change))
        proofs.add(wire.sent["dialer"][1])
    assert len(proofs) == 8


def test_nothing_here_reads_a_clock_a_socket_or_a_random_number():
    assert not {"socket", "time", "random", "secrets", "os", "asyncio"} & set(vars(handshake))
