"""A tensor's memory as a verb takes it: without history, contiguous, as bytes, apart from another's. Knows no operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from asynccoll.buffers import DTYPES

__all__ = ["as_bytes", "dense", "flat_target", "moved", "overlap"]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, without its history, and as a storage of its own.

    FSDP resizes the storage of its tensors, which torch forbids for good once their memory has been shown to numpy.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"tensors of layout {tensor.layout} cannot be reduced: pass tensor.to_dense()"
        )
    shown: torch.Tensor = from_dlpack(to_dlpack(tensor.detach()))
    return shown


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, for a verb that only moves it: types that nobody can reduce (float8) travel as bytes."""
    data = dense(tensor)
    return data.view(torch.uint8) if as_bytes(data) else data


def as_bytes(tensor: torch.Tensor) -> str | None:
    """Name of an operation on a type that travels as bytes: ranks that disagree on the type would not be told apart otherwise."""
    name = str(tensor.dtype)
    return None if name.removeprefix("torch.") in DTYPES else name


def flat_target(output: torch.Tensor, count: int) -> tuple[torch.Tensor, Callable[[list[Any]], None] | None]:
    """Flat memory for a result of ``count`` elements, and what stores it into ``output`` where it is not that tensor's own."""
    if output.numel() != count:
        raise ValueError(f"the output has {output.numel()} elements, and the result {count}")
    data = dense(output)
    if data.is_contiguous():
        return data.view(-1), None
    flat = torch.empty(count, dtype=data.dtype)

    def store(_: list[Any]) -> None:
        data.copy_(flat.view(data.shape))

    return flat, store


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some byte may be in both."""
    (begin, end), (start, stop) = _extent(one), _extent(other)
    return begin < stop and start < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.element_size()
