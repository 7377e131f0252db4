"""How a rank tells what became of a function, and how that is raised at the launcher. Knows pickles and errors, not processes."""

from __future__ import annotations

import pickle
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, BinaryIO, NamedTuple, NoReturn

from asynccoll.errors import OpContext, PeerLost, RemoteError
from asynccoll.launch.ends import Exit

__all__ = ["Failure", "describe", "lost", "pickler", "raise_first"]


class Failure(NamedTuple):
    """What a rank tells about the exception that ended a function."""

    when: float  # monotonic time, which is one clock for all processes of a host
    type_name: str
    message: str
    traceback: str
    error: bytes  # the pickled exception; empty where it has no pickle


def describe(error: BaseException) -> Failure:
    """What to tell about ``error``, just caught. Its traceback begins below the caller's frame."""
    import cloudpickle

    when = time.monotonic()
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        pickled: bytes = cloudpickle.dumps(error)
    except Exception as unpicklable:  # noqa: BLE001 (pickling may raise anything; the launcher is told)
        pickled = b""
        text += f"(The exception itself could not be pickled: {unpicklable!r})"
    return Failure(when, f"{type(error).__module__}.{type(error).__qualname__}", str(error), text, pickled)


def pickler(file: BinaryIO) -> pickle.Pickler:
    """A cloudpickle pickler that keeps the file names of functions, so that a rank's traceback shows their lines.

    cloudpickle replaces them, to get the same pickle wherever a function was defined; nobody compares ours.
    """
    import cloudpickle  # takes 20 ms, and only launchers and objects without a plain pickle need it

    table = cloudpickle.Pickler.dispatch_table
    keeping = {CodeType: lambda code: (_code, (code.co_filename, *table[CodeType](code)))}
    pickler_type = type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": ChainMap(keeping, table)})
    made: pickle.Pickler = pickler_type(file)
    return made


def _code(filename: str, build: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    return build(*args).replace(co_filename=filename)


def lost(end: Exit, nproc: int, verb: str, when: str) -> PeerLost:
    """The error for a rank whose process ended, ``when`` ("before ...") it should not have."""
    error = PeerLost([end.rank], f"{end.reason} (pid {end.pid})", OpContext(verb, elapsed=end.elapsed))
    error.detail = text = (
        f"rank {end.rank} of {nproc} {end.reason} (pid {end.pid}) {when}; "
        "the others were stopped. Look at its output for the cause."
    )
    error.args = (text,)
    return error


def raise_first(
    failures: Mapping[int, Failure],
    nproc: int,
    verb: str,
    elapsed: float,
    kind: type[BaseException] = BaseException,
) -> NoReturn:
    """Raise the earliest of the ranks' failures: with its own type, or as `RemoteError` where it cannot be rebuilt.

    ``kind``: what may be raised here as it is; others are a `RemoteError` as well.
    """
    # Interpreters take their time to end, so ends may come in another order than the failures behind them.
    rank = min(failures, key=lambda rank: failures[rank].when)
    failure = failures[rank]
    try:
        error = pickle.loads(failure.error)
        if not isinstance(error, kind):
            raise TypeError(f"a {type(error).__name__} of another process is not raised here")
    except Exception as unreadable:
        raise RemoteError(
            rank,
            failure.type_name,
            failure.message,
            OpContext(verb, elapsed=elapsed),
            remote_traceback=failure.traceback,
        ) from unreadable
    error.add_note(f"raised on rank {rank} of {nproc} by {verb}()\n\n{failure.traceback.rstrip()}")
    raise error
