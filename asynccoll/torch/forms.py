"""The forms in which torch lets a process group's methods be called: one tensor or a list, options or their values, or nothing.

`torch.distributed` passes lists and options; a DDP communication hook may call ``group.allreduce([tensor])``, and other programs
``group.broadcast(tensor, 0)``. Knows options, not what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed.distributed_c10d as c10d

from asynccoll.torch.collectives import Collectives, Tensors
from asynccoll.torch.untraced import untraced
from asynccoll.torch.work import GroupWork

__all__ = ["Forms"]

Limit: TypeAlias = timedelta | None
One: TypeAlias = torch.Tensor | Tensors
Many: TypeAlias = Tensors | list[Tensors]


@untraced
class Forms(Collectives):
    """`Collectives` in all forms. ``opts`` are torch's options, or one of their values: a ``ReduceOp``, a root, a limit."""

    def allreduce(
        self, tensors: One, opts: Any = None, timeout: Limit = None, *, op: Any = None
    ) -> GroupWork:
        """Reduce one tensor in place."""
        return super().allreduce(
            _listed(tensors), _options(c10d.AllreduceOptions, opts, op=op, timeout=timeout)
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Reduce each tensor in place."""
        return super().allreduce_coalesced(tensors, opts or c10d.AllreduceCoalescedOptions())

    def reduce(
        self,
        tensors: One,
        opts: Any = None,
        op: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> GroupWork:
        """Reduce one tensor to the root, in place there."""
        options = _options(c10d.ReduceOptions, opts, root=root, op=op, timeout=timeout)
        return super().reduce(_listed(tensors), options)

    def reduce_scatter(
        self, outputs: One, inputs: Many, opts: Any = None, timeout: Limit = None, *, op: Any = None
    ) -> GroupWork:
        """Reduce a tensor for each rank; each rank gets its own. Their sizes may differ."""
        options = _options(c10d.ReduceScatterOptions, opts, op=op, timeout=timeout)
        return super().reduce_scatter(_listed(outputs), _rows(inputs), options)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        """Reduce ``input``, of ``world_size * output.numel()`` elements; each rank gets its part."""
        return super().reduce_scatter_single(output, input, opts or c10d.ReduceScatterOptions())

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        """`reduce_scatter_single` of each pair."""
        return super().reduce_scatter_single_coalesced(outputs, inputs, opts or c10d.ReduceScatterOptions())

    def broadcast(
        self, tensors: One, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> GroupWork:
        """The root's tensor, in place elsewhere."""
        options = _options(c10d.BroadcastOptions, opts, root=root, timeout=timeout)
        return super().broadcast(_listed(tensors), options)

    def allgather(self, outputs: Many, inputs: One, opts: Any = None, *, timeout: Limit = None) -> GroupWork:
        """Every rank's tensor, in rank order. Their sizes may differ."""
        options = _options(c10d.AllgatherOptions, opts, timeout=timeout)
        return super().allgather(_rows(outputs), _listed(inputs), options)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        """`allgather` of each input; ``outputs[rank]`` are that rank's."""
        return super().allgather_coalesced(outputs, inputs, opts or c10d.AllgatherOptions())

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> GroupWork:
        """Every rank's tensor, all of one size, one after the other in ``output``."""
        return super().all_gather_single(output, input, opts or c10d.AllgatherOptions())

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """`all_gather_single` of each pair."""
        return super().all_gather_single_coalesced(outputs, inputs, opts or c10d.AllgatherOptions())

    def gather(
        self, outputs: Many, inputs: One, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> GroupWork:
        """Every rank's tensor at the root."""
        options = _options(c10d.GatherOptions, opts, root=root, timeout=timeout)
        return super().gather(_rows(outputs), _listed(inputs), options)

    def scatter(
        self, outputs: One, inputs: Many, opts: Any = None, timeout: Limit = None, *, root: int | None = None
    ) -> GroupWork:
        """This rank's own of the root's tensors."""
        options = _options(c10d.ScatterOptions, opts, root=root, timeout=timeout)
        return super().scatter(_listed(outputs), _rows(inputs), options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """What each rank has for this one. Sizes may differ."""
        return super().alltoall(outputs, inputs, opts or c10d.AllToAllOptions())

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
        *,
        timeout: Limit = None,
    ) -> GroupWork:
        """`alltoall` of rows: so many for each rank, or as many for each as for another."""
        options = _options(c10d.AllToAllOptions, opts, timeout=timeout)
        return super().all_to_all_single(output, input, output_sizes, input_sizes, options)

    def barrier(self, opts: Any = None, *, timeout: Limit = None) -> GroupWork:
        """Wait for all ranks."""
        return super().barrier(_options(c10d.BarrierOptions, opts, timeout=timeout))

    # Their names in older programs.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _listed(given: One) -> Tensors:
    return [given] if isinstance(given, torch.Tensor) else given


def _rows(given: Any) -> list[Tensors]:
    """A list of lists, of which torch's forms for one tensor have the inner one alone."""
    return [given] if given and isinstance(given[0], torch.Tensor) else given


def _options(
    kind: type, given: Any, *, root: int | None = None, op: Any = None, timeout: Limit = None
) -> Any:
    """Options of ``kind``: those that were given, or new ones with the values, of which one may be ``given`` in their place."""
    if isinstance(given, kind):
        return given
    if isinstance(given, timedelta):
        timeout = given
    elif isinstance(given, int):
        root = given
    elif given is not None:
        op = given
    options = kind()
    if op is not None:
        options.reduceOp = op
    if root is not None:
        options.rootRank = root
    if timeout is not None:
        options.timeout = timeout
    return options
