"""What a worker and its starter say to each other, byte by byte. Knows no sockets and no functions.

One frame is a kind (one byte), a length (eight, little-endian) and a payload, a pickle. To the worker come `RUN` (number of the
run, whether the meshes are to be made anew, and a pickled function with its arguments) and `INTERRUPT` (the number of a run). From
it come `VALUE` and `FAILURE` (a `reports.Failure`): the first when the meshes are there, then one for each run.

Before the first frame comes a pickle of ``(sys.path, sys.argv, whether asynccoll.sync is to be opened)``.
"""

from __future__ import annotations

__all__ = ["CHILD", "FAILURE", "HEAD", "INTERRUPT", "RUN", "VALUE", "frame", "length_of"]

RUN, INTERRUPT, VALUE, FAILURE = b"R", b"I", b"V", b"F"
"""Kinds of frames."""

HEAD = 9
"""Bytes before the payload."""

CHILD = """
import pickle, socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
source = channel.makefile("rb")
sys.path[:], sys.argv[:], facade = pickle.load(source)
from asynccoll.worker import serve
serve(channel, source, facade)
"""
"""What a worker's interpreter runs. The search path comes first, because whatever follows may be found through it alone."""


def frame(kind: bytes, payload: bytes) -> bytes:
    """One frame."""
    return kind + len(payload).to_bytes(8, "little") + payload


def length_of(head: bytes) -> int:
    """Bytes of the payload after ``head``."""
    return int.from_bytes(head[1:HEAD], "little")
