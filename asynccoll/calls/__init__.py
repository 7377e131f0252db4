"""From a verb's arguments to an operation: which path, what must agree, which program. Knows no loop and no engine state.

Each function is pure: it may raise `TypeError` or `ValueError` for wrong arguments, and has not touched anything when it does.
"""

from asynccoll.calls.exchanging import alltoall, gather, scatter
from asynccoll.calls.messages import Message, receive, send
from asynccoll.calls.moving import allgather, barrier, broadcast, meeting
from asynccoll.calls.one_way import reduce, reduce_scatter
from asynccoll.calls.place import Call, Place
from asynccoll.calls.reducing import allreduce, allreduce_in_place, allreduce_tree
from asynccoll.calls.scanning import exscan, scan
from asynccoll.calls.streaming import Parts, allreduce_stream

__all__ = [
    "Call",
    "Message",
    "Parts",
    "Place",
    "allgather",
    "allreduce",
    "allreduce_in_place",
    "allreduce_stream",
    "allreduce_tree",
    "alltoall",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "meeting",
    "receive",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
]
