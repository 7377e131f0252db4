"""Exact, ranked collective communication that Python programs can await."""

from asynccoll.communicator import Communicator
from asynccoll.errors import (
    AlreadyInitialized,
    AsynccollError,
    AuthenticationError,
    CollectiveCancelled,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    NotInitialized,
    PeerLost,
    ProtocolError,
    RemoteError,
    RendezvousError,
)
from asynccoll.reduction import ReduceOp
from asynccoll.work import Work
from asynccoll.world import (
    allgather,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_tree,
    barrier,
    broadcast,
    connect,
    get_communicator,
    init,
    rank,
    run,
    shutdown,
    use,
    world_size,
)

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitialized",
    "AsynccollError",
    "AuthenticationError",
    "CollectiveCancelled",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorClosed",
    "NotInitialized",
    "PeerLost",
    "ProtocolError",
    "ReduceOp",
    "RemoteError",
    "RendezvousError",
    "Work",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_tree",
    "barrier",
    "broadcast",
    "connect",
    "get_communicator",
    "init",
    "rank",
    "run",
    "shutdown",
    "use",
    "world_size",
]
