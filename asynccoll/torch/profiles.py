"""An operation in torch's profiler, by the name that torch's own groups would give it. Knows no operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["profiled"]

Finish = Callable[[list[Any]], None]

_NAMES = {
    # torch's words for those of which the verb is another.
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}


def profiled(verb: str, inputs: Sequence[torch.Tensor], finish: Finish | None) -> Finish | None:
    """What is to be done at the end of an operation that starts now, if it is ``finish`` otherwise.

    Where a profiler is on, an event from now to that end is recorded, such as ``asynccoll:all_reduce``, with the shapes of
    ``inputs``; it is asynchronous, since it ends in another thread. The event of an operation that fails ends when its work goes.
    """
    if not torch.autograd._profiler_enabled():
        return finish
    record = torch._C._autograd._record_function_with_args_enter(
        f"asynccoll:{_NAMES.get(verb, verb)}", *inputs
    )
    caller = threading.get_ident()

    def end(results: list[Any]) -> None:
        if finish is not None:
            finish(results)
        if threading.get_ident() != caller:
            torch._C._autograd._record_function_with_args_exit(record)
            return
        # It was complete before anybody waited. torch takes an event for asynchronous by the thread that ends it.
        other = threading.Thread(target=torch._C._autograd._record_function_with_args_exit, args=(record,))
        other.start()
        other.join()

    return end
