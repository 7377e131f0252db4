"""Messages on one rank's engine: what becomes of a receive whose value cannot be made or does not come."""

import pytest
from wires import Wires, kinds, operation

from asynccoll.engine import wire
from asynccoll.engine.mail import Receive
from asynccoll.errors import CollectiveTimeout

LONG = 100_000
"""Bytes of a message of which the description travels first."""


def post(wires, place, source=1, **options):
    """Rank 0 receives from rank 1, or from ``source``."""
    op = operation(**options)
    op.comm, op.mail = 0, Receive(source, None, place, lambda meta, parts, source, tag: bytes(parts[0]))
    wires.engines[0].message(op, 0.0)
    wires.collect(0)
    return op


class TestMemory:
    @pytest.mark.parametrize("came_first", [True, False])
    def test_a_receive_that_gets_no_memory_raises_and_the_next_message_is_received(self, came_first):
        def refuse(meta, nbytes):
            raise MemoryError(f"no {nbytes} bytes")

        wires = Wires(2, [0])
        long = wire.message_frame(0, wire.MESSAGES | 1 << 40, 0, b"", LONG, b"")
        if came_first:
            wires.feed(0, 1, long)
        op = post(wires, refuse)
        if not came_first:
            wires.feed(0, 1, long)
        assert wires.ended[0] == [op]
        assert isinstance(op.error, MemoryError)
        assert wire.TAKE not in kinds(wires.take(0, 1))

        wires.feed(0, 1, wire.message_frame(0, wire.MESSAGES | 1 << 40 | 1, 0, b"", 2, b"ok"))
        after = post(wires, lambda meta, nbytes: [memoryview(bytearray(nbytes))])
        assert after.result == b"ok"
        assert not wires.engines[0].pending()


class TestTimeouts:
    @pytest.mark.parametrize(("source", "missing"), [(1, {1}), (2, {2}), (None, {1, 2})])
    def test_who_may_have_sent_it_is_missing(self, source, missing):
        wires = Wires(3, [0])
        op = post(wires, lambda meta, nbytes: [], source, timeout=2.0)
        wires.tick(2.0)
        assert isinstance(op.error, CollectiveTimeout)
        assert op.error.missing == missing
