"""Sums of sparse tensors: what a rank gives, and what becomes of what all gave. Knows COO tensors, not how they travel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Part", "give", "store_sum"]


class Part(NamedTuple):
    """One rank's tensor: its elements that are there, each place once, in the order of the places."""

    indices: torch.Tensor
    """(dimensions, elements) of int64."""
    values: torch.Tensor
    shape: tuple[int, ...]


def give(tensor: torch.Tensor, op: Any) -> Part:
    """What this rank gives for the reduction of ``tensor``.

    Raises:
        NotImplementedError: ``op`` is not SUM: what is not there is 0, which only a sum may leave out.
    """
    if op != dist.ReduceOp.SUM:
        raise NotImplementedError(
            "sparse tensors can be reduced with ReduceOp.SUM only: pass tensor.to_dense() for another"
        )
    own = tensor.detach().coalesce()
    return Part(own.indices(), own.values(), tuple(own.shape))


def store_sum(parts: list[Part], into: torch.Tensor) -> None:
    """Store the sum: coalesced, the same bits on every rank.

    Raises:
        ValueError: shapes, dtypes or sparse dimensions differ; raised on every rank, since all have all parts.
    """
    kinds = [
        f"{part.shape} of {part.values.dtype}, {part.indices.shape[0]} dimensions sparse" for part in parts
    ]
    if len(set(kinds)) > 1:
        listed = "; ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(f"the ranks' sparse tensors differ: {listed}. Pass one kind on every rank")
    indices = torch.cat([part.indices for part in parts], dim=1)
    values = torch.cat([part.values for part in parts])
    # All ranks coalesce the same elements in the same order.
    total = torch.sparse_coo_tensor(indices, values, parts[0].shape, check_invariants=False).coalesce()
    with torch.no_grad():  # not detach(): a sparse tensor's copy has places of its own
        into.copy_(total)
