"""Keeps torch.compile out of this package's own code. Knows its switch, which is there whether or not anybody compiles.

Where compiled code runs, torch compiles every Python function that is called on the way: also a process group's, which torch's C++
calls there (to rebuild the buckets of DDP, to wait for a functional collective). It fails on a process group, whose attributes are
none of its business.
"""

from __future__ import annotations

from types import FunctionType
from typing import Final, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["untraced"]

C = TypeVar("C", bound=type)

_SKIP: Final = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""For a function itself, and for what it calls."""


def untraced(cls: C) -> C:
    """A class decorator: its public methods, and what they call, run as they are. It costs them nothing."""
    for name, method in vars(cls).items():
        if isinstance(method, FunctionType) and not name.startswith("_"):
            eval_frame.set_code_exec_strategy(method.__code__, _SKIP)
            # Where a function that is being compiled calls it, it is a call to make and not code to look into.
            method._torchdynamo_disable = True  # type: ignore[attr-defined]
    return cls
