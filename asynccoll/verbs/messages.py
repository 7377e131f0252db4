"""Verbs between two ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from asynccoll import calls
from asynccoll.calls import Message
from asynccoll.verbs.caller import Caller
from asynccoll.work import Work

__all__ = ["MessageVerbs"]


class MessageVerbs(Caller):
    """send and recv."""

    def send(
        self,
        value: Any,
        dst: int,
        tag: int = 0,
        *,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[None]:
        """Send one message to rank ``dst``: an array of any shape, or any Python value that pickles.

        Complete when its memory is free, which may be before it is received: a value up to 32 KiB travels at once and waits
        there; a larger one when a `recv` has matched it. Its content at the call counts, except that arrays of 16 KiB and more
        within an object are lent until then. Messages of one rank with the same tag are received in the order of the calls.
        Sending to oneself works. Independent of the order of other operations.

        Args:
            value: what to send.
            dst: rank of the receiver in this communicator.
            tag: an integer of 64 bits, for `recv` to choose by.
            timeout: seconds (or timedelta) until `CollectiveTimeout`, whose ``.missing`` is the receiver; the message is then
                taken back.
            key: must be None; messages are matched by source and tag.
            name: has nobody to be compared with; for symmetry.

        Raises (from the work):
            PeerLost, CommunicatorClosed: the receiver died or left.
            TypeError, ValueError: a wrong argument, or a value that does not pickle. Nothing has been sent.
        """
        return self._call("send", lambda: calls.send(self._place, value, dst, tag), timeout, key, name)

    def recv(
        self,
        src: int | None = None,
        tag: int | None = None,
        *,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[Any]:
        """The value of the next message from rank ``src`` with ``tag``; None means any.

        Of several messages that fit the one that arrived first is taken; receives are served in the order of the calls.
        Cancelling it takes nothing: a message that was on its way waits for the next `recv`. With ``src=None`` a death of any
        rank is `PeerLost`, since the message may have been its.
        """
        return self._call("recv", lambda: calls.receive(self._place, "recv", src, tag), timeout, key, name)

    def recv_message(
        self,
        src: int | None = None,
        tag: int | None = None,
        *,
        timeout: float | timedelta | None = None,
        key: str | None = None,
        name: str | None = None,
    ) -> Work[Message]:
        """`recv`, with the sender's rank and the tag: ``Message(value, source, tag)``."""
        return self._call(
            "recv_message", lambda: calls.receive(self._place, "recv_message", src, tag), timeout, key, name
        )
