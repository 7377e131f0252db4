"""Control records and failures travel as bytes and come back; malformed bytes are a ProtocolError and cost no memory."""

from __future__ import annotations

import pickle
import struct
import threading
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from naming import shown

from asynccoll.errors import OpContext, PeerLost, ProtocolError
from asynccoll.objects import PICKLES, PLAIN, capture, pack_control, restore, unpack_control


class Rebuildable(Exception):
    pass


class TwoArguments(Exception):
    """Pickles well; its pickle calls ``__init__`` with one argument and fails."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class RefusesState:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("state")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


told: list[str] = []


class Telltale(Exception):
    """Says when it is unpickled."""

    def __reduce__(self) -> Any:
        return (_tell, (str(self),))


def _tell(text: str) -> Exception:
    told.append(text)
    return Rebuildable(text)


class Impostor(Exception):
    """Unpickles as something that is no exception."""

    def __reduce__(self) -> Any:
        return (str, ("not an exception",))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 (handed back to the test)
        return caught


def test_control_records_come_back_with_tuples_as_lists_and_any_plain_key() -> None:
    record = {
        "op": "sum",
        "shape": (2, 3),
        4: b"\x00\xff",
        "deep": [None, True, -(2**63), 2**64 - 1, 1.5, "ü"],
    }
    wanted = {**record, "shape": [2, 3]}
    assert unpack_control(pack_control(record), 1000) == wanted
    assert unpack_control(memoryview(pack_control(record)), 1000) == wanted
    long = {rank: f"host-{rank}:1234" for rank in range(1000)}
    assert unpack_control(pack_control(long), 100_000) == long


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (object(), TypeError),
        (np.int64(1), TypeError),
        ({1, 2}, TypeError),
        (2**64, ValueError),
        ("\ud800", ValueError),
    ],
    ids=shown,
)
def test_a_control_record_of_anything_else_is_an_error_where_it_is_made(
    record: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        pack_control(record)


NESTED = b"\xdd" + struct.pack(">I", 4000)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pack_control([1, 2])[:-1],
        pack_control(1) + b"\x00",
        b"\xc1",
        b"\xa2\xff\xfe",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xd4\x05\x00",
        b"\xc7\x00\x05",
        msgpack.packb(msgpack.Timestamp(1)),
        b"\x81\x90\x01",
        b"\x91" * 3000 + b"\x00",
        NESTED * 800,
        b"\x91" * 5000,
    ],
    ids=[
        "nothing", "cut short", "something after it", "reserved byte", "text that is not UTF-8", "array of 2**32",
        "text of 2**32", "bytes of 2**32", "map of 2**32", "extension", "empty extension", "timestamp", "list as key",
        "too deep", "nested claims", "deep and cut short",
    ],
)  # fmt: skip
def test_malformed_control_bytes_are_a_protocol_error_and_cost_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="malformed control record"):
            unpack_control(data, 100_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


def test_random_and_mutated_bytes_never_raise_anything_else() -> None:
    rng = np.random.default_rng(11)
    valid = pack_control(
        {"members": list(range(300)), "name": "world", "pickle": bytes(range(256)) * 8, "x": None}
    )
    for _ in range(3000):
        if rng.integers(2):
            data = rng.bytes(int(rng.integers(0, 64)))
        else:
            mutated = bytearray(valid)
            for where in rng.integers(0, len(valid), 3):
                mutated[where] = rng.integers(256)
            data = bytes(mutated)
        try:
            unpack_control(data, 10_000)
        except ProtocolError as error:
            assert error.__cause__ is not None  # noqa: PT017 (most random bytes are valid msgpack: either outcome is right)


def test_the_limit_is_in_bytes_and_checked_before_anything_is_read() -> None:
    data = pack_control(b"x" * 100)
    assert unpack_control(data, len(data)) == b"x" * 100
    for form in (data, bytearray(data), memoryview(data)):
        with pytest.raises(ProtocolError, match=f"of {len(data)} bytes, at most {len(data) - 1}"):
            unpack_control(form, len(data) - 1)
    with pytest.raises(ProtocolError, match=f"of {len(data)} bytes"):
        unpack_control(memoryview(np.frombuffer(data, np.uint16)), len(data) - 1)


def travelled(error: BaseException, safe: bool = False) -> tuple[str, str, str, BaseException | None]:
    return restore(unpack_control(pack_control(capture(error)), 200_000), safe=safe)


def test_a_failure_travels_with_its_type_text_traceback_and_itself() -> None:
    kind, message, trace, original = travelled(raised(Rebuildable("broke", 3)))
    assert kind == f"{__name__}.Rebuildable"
    assert message == "('broke', 3)"
    assert "in raised" in trace
    assert trace.rstrip().endswith("Rebuildable: ('broke', 3)")
    assert type(original) is Rebuildable
    assert original.args == ("broke", 3)


def test_builtin_types_are_named_without_their_module() -> None:
    assert travelled(raised(ZeroDivisionError("division")))[:2] == ("ZeroDivisionError", "division")


def test_asynccolls_own_errors_travel_with_their_data() -> None:
    original = travelled(PeerLost([3, 2], "killed", OpContext("allreduce", 7)))[3]
    assert isinstance(original, PeerLost)
    assert (original.peers, original.reason, original.seq) == (frozenset({2, 3}), "killed", 7)


@pytest.mark.parametrize(
    "error",
    [TwoArguments(3, "why"), Rebuildable(threading.Lock()), Rebuildable(RefusesState()), Impostor("x")],
    ids=["two arguments", "unpicklable", "fails to unpickle", "no exception"],
)
def test_an_exception_that_cannot_be_rebuilt_travels_as_text(error: BaseException) -> None:
    assert capture(error)["pickle"] is None
    kind, message, trace, original = travelled(raised(error))
    assert original is None
    assert kind.endswith(type(error).__qualname__)
    assert message == str(error)
    assert type(error).__qualname__ in trace


def test_safe_restores_no_exception_and_unpickles_nothing() -> None:
    info = capture(Rebuildable("x"))
    assert restore(info, safe=True) == (f"{__name__}.Rebuildable", "x", info["traceback"], None)
    info["pickle"] = pickle.dumps(Telltale("x"))
    told.clear()
    assert restore(info, safe=True)[3] is None
    assert told == []
    assert restore(info)[3] is not None
    assert told == ["x"]


def test_an_exception_without_text_travels() -> None:
    kind, message, trace, _ = travelled(raised(Unprintable()))
    assert kind.endswith("Unprintable")
    assert message == "<its __str__ raised ValueError>"
    assert "Unprintable" in trace


def test_text_with_lone_surrogates_travels() -> None:
    assert travelled(OSError(2, "no such file", "name-\udcff"))[1] == r"[Errno 2] no such file: 'name-\udcff'"
    assert travelled(Rebuildable("name-\udcff"))[1] == r"name-\udcff"


def test_a_failure_record_is_bounded_and_keeps_the_innermost_frames() -> None:
    def deep(level: int) -> None:
        # Two functions in turn, since traceback folds the repeats of one.
        deeper(level - 1) if level else leaf()

    def deeper(level: int) -> None:
        deep(level - 1) if level > 0 else leaf()

    def leaf() -> None:
        raise Rebuildable("x" * 1_000_000)

    with pytest.raises(Rebuildable) as caught:
        deep(400)
    info = capture(caught.value)
    assert len(info["message"]) == 16 * 1024
    assert len(info["traceback"]) == 16 * 1024
    assert info["traceback"].startswith("...")
    assert info["pickle"] is None
    assert len(pack_control(info)) < 100 * 1024
    try:
        deep(400)
    except Rebuildable as error:
        error.args = ("short",)
        info = capture(error)
    assert "in leaf" in info["traceback"]
    assert len(info["traceback"]) == 16 * 1024
    assert info["pickle"] is not None


@pytest.mark.parametrize(
    "info",
    [
        None,
        [],
        {},
        {"type": 1, "message": "", "traceback": "", "pickle": None},
        {"type": "E", "message": "", "traceback": "", "pickle": "text"},
        {"type": "E", "message": "", "traceback": ""},
    ],
    ids=shown,
)
def test_a_malformed_failure_record_is_a_protocol_error(info: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed failure record"):
        restore(info)


def test_a_plain_value_has_no_buffers_and_refuses_any() -> None:
    data, buffers, _ = PLAIN.dumps({"a": b"x" * 100_000})
    assert buffers == ()
    assert PLAIN.loads(data, ()) == {"a": b"x" * 100_000}
    with pytest.raises(ProtocolError, match="1 buffers"):
        PLAIN.loads(data, [memoryview(b"x")])
    with pytest.raises(TypeError, match="safe=True"):
        PLAIN.dumps([np.zeros(3)])


def test_an_object_is_a_pickle_and_its_large_buffers() -> None:
    value = {"a": np.arange(10_000), "b": "text"}
    data, buffers, _ = PICKLES.dumps(value)
    assert [len(buffer) for buffer in buffers] == [80_000]
    assert PICKLES.loads(data, buffers)["a"].tolist() == value["a"].tolist()
