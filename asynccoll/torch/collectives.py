"""A torch process group's collectives and messages, as operations of a communicator. Knows both sides' names, layouts and options.

Lists of tensors, views, strides and complex numbers become what a verb takes; a result goes to the caller's tensors, never to their
gradients' history. Each method starts its operations at the call, and returns a `GroupWork`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from asynccoll.pending import Pending
from asynccoll.sync import SyncCommunicator
from asynccoll.torch.layouts import as_bytes, dense, flat_target, moved, overlap
from asynccoll.torch.profiles import profiled
from asynccoll.torch.sparse import give, store_sum
from asynccoll.torch.untraced import untraced
from asynccoll.torch.work import Callbacks, GroupWork, Started

__all__ = ["Collectives"]

Tensors = list[torch.Tensor]
Start = Callable[[], Pending[Any]]


class Plan:
    """Operations to start, and what becomes of them."""

    def __init__(
        self, starts: Iterable[Start], value: Tensors, finish: Callable[[list[Any]], None] | None = None
    ) -> None:
        self.starts = list(starts)
        self.value = value
        self.finish = finish


@untraced
class Collectives:
    """What `torch.distributed` and torch's own C++ call. Ranks and roots are the group's.

    ``opts`` are torch's options of the call: ``timeout``, and ``reduceOp`` and ``rootRank`` where there is such a thing.
    """

    _comm: SyncCommunicator
    _limit: float | None
    """Seconds that an operation may take, unless its options say otherwise."""
    _callbacks: Callbacks
    _starting: threading.Lock
    """Held while the operations of one call get their numbers, whichever thread calls."""
    _started: int
    """Collectives that this rank has called."""
    _batch: list[GroupWork] | None = None
    """Works that were started since `_start_coalescing`."""

    # -- reductions -----------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        """Reduce one tensor in place. Sparse ones (COO) are gathered, and added up on every rank."""

        def plan() -> Plan:
            tensor = _only(tensors)
            if tensor.layout is torch.sparse_coo:
                part, limit = give(tensor, opts.reduceOp), self._seconds(opts)
                gather = partial(self._comm.allgather_async, part, timeout=limit)
                return Plan([gather], tensors, lambda results: store_sum(results[0], tensor))
            return Plan([self._reduction(tensor, opts)], tensors)

        return self._run("allreduce", tensors, plan)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> GroupWork:
        """Reduce each tensor in place."""

        def plan() -> Plan:
            return Plan([self._reduction(tensor, opts) for tensor in tensors], tensors)

        return self._run("allreduce", tensors, plan, len(tensors))

    def _reduction(self, tensor: torch.Tensor, opts: Any) -> Start:
        data, limit = dense(tensor), self._seconds(opts)
        return partial(self._comm.allreduce__async, data, opts.reduceOp, timeout=limit)

    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        """Reduce one tensor to the root, in place there."""

        def plan() -> Plan:
            data = dense(_only(tensors))
            out = data if opts.rootRank == self._comm.rank else None
            root, limit = opts.rootRank, self._seconds(opts)
            start = partial(self._comm.reduce_async, data, opts.reduceOp, root, out=out, timeout=limit)
            return Plan([start], tensors)

        return self._run("reduce", tensors, plan)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> GroupWork:
        """Reduce a tensor for each rank; each rank gets its own. Their sizes may differ."""
        given = [one for row in inputs for one in row]
        even = len({part.numel() for part in given}) == 1

        def plan() -> Plan:
            output, parts = _only(outputs), self._one_each(_only(inputs), "input")
            if even:
                return self._scattering(
                    output, torch.stack([dense(part).reshape(-1) for part in parts]), opts
                )
            limit = self._seconds(opts)

            def to(root: int) -> Start:
                out = dense(output) if root == self._comm.rank else None
                data = dense(parts[root])  # here, where a refusal still takes the number of the whole call
                return partial(self._comm.reduce_async, data, opts.reduceOp, root, out=out, timeout=limit)

            return Plan([to(root) for root in range(self._comm.world_size)], outputs)

        return self._run("reduce_scatter", given, plan, 1 if even else self._comm.world_size)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> GroupWork:
        """Reduce ``input``, of ``world_size * output.numel()`` elements; each rank gets its part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        """`reduce_scatter_single` of each pair."""

        def plan() -> Plan:
            plans = [
                self._scattering(output, self._parts_of(source, output, "reduce_scatter"), opts)
                for output, source in zip(outputs, inputs, strict=True)
            ]
            return _together(plans, outputs)

        return self._run("reduce_scatter", inputs, plan, len(inputs))

    def _scattering(self, output: torch.Tensor, rows: torch.Tensor, opts: Any) -> Plan:
        """Reduce ``rows``, one for each rank."""
        own, finish = flat_target(output, rows.shape[1])
        if finish is None and overlap(own, rows):
            # A shard of the buffer that is reduced, as sharded optimizers pass it: the peers still read what is there.
            target, own = own, torch.empty_like(own)
            staged = own

            def finish(_: list[Any]) -> None:
                target.copy_(staged)

        start = partial(
            self._comm.reduce_scatter_async,
            rows,
            opts.reduceOp,
            out=own.view(1, -1),
            timeout=self._seconds(opts),
        )
        return Plan([start], [output], finish)

    # -- moves ----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> GroupWork:
        """The root's tensor, in place elsewhere."""

        def plan() -> Plan:
            data = moved(_only(tensors))
            root, limit, kind = opts.rootRank, self._seconds(opts), as_bytes(_only(tensors))
            if root == self._comm.rank:
                start = partial(self._comm.broadcast_async, data, root, timeout=limit, name=kind)
            else:
                start = partial(self._comm.broadcast_async, root=root, out=data, timeout=limit, name=kind)
            return Plan([start], tensors)

        return self._run("broadcast", tensors, plan)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        """Every rank's tensor, in rank order. Their sizes may differ."""
        return self._run(
            "allgather",
            inputs,
            lambda: self._gathering(self._one_each(_only(outputs), "output"), _only(inputs), opts),
        )

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        """`allgather` of each input; ``outputs[rank]`` are that rank's."""

        def plan() -> Plan:
            columns = zip(*self._one_each(outputs, "output"), strict=True)
            plans = [
                self._gathering(list(column), tensor, opts)
                for column, tensor in zip(columns, inputs, strict=True)
            ]
            return _together(plans, [tensor for row in outputs for tensor in row])

        return self._run("allgather", inputs, plan, len(inputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> GroupWork:
        """Every rank's tensor, all of one size, one after the other in ``output``."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        """`all_gather_single` of each pair."""

        def plan() -> Plan:
            plans = []
            for output, source in zip(outputs, inputs, strict=True):
                whole, finish = flat_target(output, self._comm.world_size * source.numel())
                rows = list(whole.view(self._comm.world_size, -1))
                gathering = self._gathering(rows, source.reshape(-1), opts)
                plans.append(Plan(gathering.starts, [output], finish))
            return _together(plans, outputs)

        return self._run("allgather", inputs, plan, len(inputs))

    def _gathering(self, outputs: Tensors, tensor: torch.Tensor, opts: Any) -> Plan:
        data, outs, limit = moved(tensor), [moved(one) for one in outputs], self._seconds(opts)
        return Plan(
            [partial(self._comm.allgather_async, data, out=outs, timeout=limit, name=as_bytes(tensor))],
            outputs,
        )

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        """Every rank's tensor at the root."""

        def plan() -> Plan:
            root, limit = opts.rootRank, self._seconds(opts)
            data, outs, value = moved(_only(inputs)), None, []
            if root == self._comm.rank:
                value = self._one_each(_only(outputs), "output")
                outs = [moved(one) for one in value]
            kind = as_bytes(_only(inputs))
            start = partial(self._comm.gather_async, data, root, out=outs, timeout=limit, name=kind)
            return Plan([start], value)

        return self._run("gather", inputs, plan)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> GroupWork:
        """This rank's own of the root's tensors."""

        def plan() -> Plan:
            root, limit = opts.rootRank, self._seconds(opts)
            out, values = moved(_only(outputs)), None
            if root == self._comm.rank:
                values = [moved(one) for one in self._one_each(_only(inputs), "input")]
            kind = as_bytes(_only(outputs))
            start = partial(self._comm.scatter_async, values, root, out=out, timeout=limit, name=kind)
            return Plan([start], outputs)

        return self._run("scatter", [one for row in inputs for one in row], plan)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        """What each rank has for this one. Sizes may differ."""

        def plan() -> Plan:
            outs = [moved(one) for one in self._one_each(outputs, "output")]
            values, limit = (
                [moved(one) for one in self._one_each(inputs, "input")],
                self._seconds(opts),
            )
            kind = as_bytes(inputs[0])
            start = partial(self._comm.alltoall_async, values, out=outs, timeout=limit, name=kind)
            return Plan([start], outputs)

        return self._run("alltoall", inputs, plan)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any,
    ) -> GroupWork:
        """`alltoall` of rows: so many for each rank, or as many for each as for another."""

        def plan() -> Plan:
            whole, finish = flat_target(output, output.numel())
            rows = whole.view(output.shape)
            outs = [moved(part) for part in self._rows(rows, output_sizes, "output")]
            values = [moved(part) for part in self._rows(input, input_sizes, "input")]
            limit = self._seconds(opts)
            kind = as_bytes(input)
            start = partial(self._comm.alltoall_async, values, out=outs, timeout=limit, name=kind)
            return Plan([start], [output], finish)

        return self._run("alltoall", [input], plan)

    def barrier(self, opts: Any) -> GroupWork:
        """Wait for all ranks."""
        limit = self._seconds(opts)
        return self._run("barrier", [], lambda: Plan([partial(self._comm.barrier_async, timeout=limit)], []))

    # -- messages -------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> GroupWork:
        """One tensor to rank ``dst``. Outside of the order of collectives."""
        tensor = _only(tensors)
        kind, data = as_bytes(tensor), moved(tensor)
        value = data if kind is None else (kind, data)
        plan = Plan([partial(self._comm.send_async, value, dst, tag, timeout=self._limit)], [])
        return self._work("send", tensors, plan)

    def recv(self, tensors: Tensors, src: int, tag: int) -> GroupWork:
        """One tensor from rank ``src``: the next with that tag."""
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> GroupWork:
        """One tensor from whichever rank sent one first; `GroupWork.source_rank` says which."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, src: int | None, tag: int) -> GroupWork:
        target = _only(tensors)
        data = moved(target)
        came: list[int] = []

        def finish(results: list[Any]) -> None:
            (message,) = results
            kind, value = message.value if isinstance(message.value, tuple) else (None, message.value)
            if (kind, value.dtype) != (as_bytes(target), data.dtype) or value.numel() != data.numel():
                raise ValueError(
                    f"rank {self._comm.rank} receives into {tuple(target.shape)} of {target.dtype}, and rank {message.source} sent "
                    f"{tuple(value.shape)} of {kind or value.dtype} with tag {tag}: the tensors must have one dtype and one size"
                )
            data.copy_(value.view(data.shape))
            came.append(message.source)

        start = partial(self._comm.recv_message_async, src, tag, timeout=self._limit)
        plan = Plan([start], tensors, finish)
        return self._work("recv" if src is not None else "recvAnySource", tensors, plan, came)

    # -- how a call becomes operations ----------------------------------------------------------------------

    def _run(self, verb: str, inputs: Tensors, prepare: Callable[[], Plan], count: int = 1) -> GroupWork:
        """Start what ``prepare`` plans: ``count`` operations.

        Where it raises, the call takes the numbers of so many, as it does on the ranks where it is right, and fails on every rank.
        """
        self._started += 1
        try:
            plan = prepare()
        except Exception as error:  # noqa: BLE001 (raised by wait, and on every other rank)
            plan = Plan([self._refusal(verb, error)] * count, [])
        return self._work(verb, inputs, plan)

    def _refusal(self, verb: str, error: Exception) -> Start:
        def refuse() -> Any:
            raise error

        return lambda: self._comm._threaded._call(verb, refuse, None, None, None)

    def _work(self, verb: str, inputs: Tensors, plan: Plan, source: Sequence[int] = ()) -> GroupWork:
        finish = profiled(verb, inputs, plan.finish)
        with self._starting:
            operations = [start() for start in plan.starts]
        work = GroupWork(Started(operations, plan.value, finish, source), self._callbacks)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _seconds(self, opts: Any) -> float | None:
        seconds: float = opts.timeout.total_seconds()
        return seconds if seconds > 0 else self._limit

    def _one_each(self, given: list[Any], what: str) -> list[Any]:
        if len(given) != self._comm.world_size:
            raise ValueError(
                f"{len(given)} {what} tensors for a group of {self._comm.world_size} ranks: pass one for each"
            )
        return given

    def _parts_of(self, source: torch.Tensor, part: torch.Tensor, verb: str) -> torch.Tensor:
        size = self._comm.world_size
        if source.numel() != size * part.numel():
            raise ValueError(
                f"{verb}: the input has {source.numel()} elements, and the output {part.numel()}: {size} ranks need "
                f"{size} times as many"
            )
        return dense(source).reshape(size, -1)

    def _rows(self, tensor: torch.Tensor, sizes: Sequence[int], what: str) -> Sequence[torch.Tensor]:
        size = self._comm.world_size
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if not tensor.dim() or rows % size:
                raise ValueError(
                    f"{what} of {rows} rows does not divide into {size} equal parts: pass the split sizes"
                )
            sizes = [rows // size] * size
        if len(sizes) != size or sum(sizes) != rows:
            raise ValueError(
                f"{what} split sizes {list(sizes)} do not add up to {rows} rows for {size} ranks"
            )
        parts: Sequence[torch.Tensor] = tensor.split(list(sizes))
        return parts


def _only(given: Sequence[Any]) -> Any:
    if len(given) != 1:
        raise ValueError(f"{len(given)} tensors where a CPU has one: pass a list of one")
    return given[0]


def _together(plans: list[Plan], value: Tensors) -> Plan:
    finishes = [plan.finish for plan in plans if plan.finish is not None]

    def finish(_: list[Any]) -> None:
        for one in finishes:
            one([])

    return Plan([start for plan in plans for start in plan.starts], value, finish if finishes else None)
