"""A training step of DistributedDataParallel: the backend "asynccoll" beside gloo, in one run. Knows torch's interface alone.

``python -m benchmarks.ddp``. Every rank holds the same model twice, one wrapped over a group of each backend. Rounds take
turns: some steps (forward, backward with its allreduces, SGD) on one, the same steps with the same data on the other, each after a
barrier. A time is that of the slowest rank, a figure the median over the rounds; CPU time is one rank's, all its threads together.
At the end the weights must be the same bits on all ranks, and within 1e-6 of gloo's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import command

__all__ = ["main", "run_rank", "table"]

BACKENDS = ("asynccoll", "gloo")
TOLERANCE = 1e-6
"""By which weights may differ between the backends, relative to the largest."""


def run_rank(store: str, nproc: int, width: int, depth: int, batch: int, rounds: int, steps: int) -> Any:
    """One rank: seconds of a step for each backend and round, number of parameters, and what is wrong with the weights."""
    import os

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["ASYNCCOLL_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nproc)
    try:
        trainers = {}
        for backend in BACKENDS:
            torch.manual_seed(0)
            layers = [torch.nn.Linear(width, width) for _ in range(depth)]
            group = dist.new_group(backend=backend)
            model = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Sequential(*layers), process_group=group
            )
            trainers[backend] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        cpu: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for number in range(rounds + 1):
            generator = torch.Generator().manual_seed(number * nproc + rank)
            data = torch.randn(steps, batch, width, generator=generator)
            for backend in BACKENDS[:: 1 if number % 2 else -1]:
                model, optimizer = trainers[backend]
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                for one in data:
                    optimizer.zero_grad()
                    model(one).square().mean().backward()
                    optimizer.step()
                if number:  # the first round warms up
                    times[backend].append((time.perf_counter() - began) / steps)
                    cpu[backend].append((time.process_time() - worked) / steps)
        ours, theirs = (
            torch.cat([parameter.detach().reshape(-1) for parameter in trainers[backend][0].parameters()])
            for backend in BACKENDS
        )
        everywhere = [torch.empty_like(ours) for _ in range(nproc)]
        dist.all_gather(everywhere, ours)
        return {
            "times": times,
            "cpu": cpu,
            "parameters": ours.numel(),
            "torch": torch.__version__,
            "apart": float((ours - theirs).abs().max() / theirs.abs().max()),
            "same_bits": all(torch.equal(ours, other) for other in everywhere),
        }
    finally:
        dist.destroy_process_group()


def table(of_ranks: Sequence[dict[str, Any]]) -> tuple[list[str], float]:
    """Lines for people, and asynccoll's time as a share of gloo's: the median over the rounds."""
    slowest = {
        backend: [max(times) for times in zip(*(rank["times"][backend] for rank in of_ranks), strict=True)]
        for backend in BACKENDS
    }
    shares = [ours / theirs for ours, theirs in zip(slowest["asynccoll"], slowest["gloo"], strict=True)]
    lines = ["#  backend   median ms      min      max   cpu ms"]
    for backend, times in slowest.items():
        cpu = statistics.median(one for rank in of_ranks for one in rank["cpu"][backend])
        figures = (statistics.median(times), min(times), max(times), cpu)
        lines.append(f"{backend:>10s}  " + " ".join(f"{1e3 * figure:8.2f}" for figure in figures))
    share = statistics.median(shares)
    lines.append(f"# share of gloo's time: {share:.2f} (rounds {min(shares):.2f} to {max(shares):.2f})")
    return lines, share


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if the weights are wrong."""
    parser = command.new_parser(
        "ddp",
        "A DistributedDataParallel step on the backend asynccoll, beside gloo.",
        __doc__,
    )
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--width", type=int, default=1024, help="of each linear layer (default 1024)")
    parser.add_argument("--depth", type=int, default=4, help="layers (default 4: 4.2 M parameters)")
    parser.add_argument("--batch", type=int, default=16, help="rows for each rank (default 16)")
    parser.add_argument("--rounds", type=int, default=15, metavar="R", help="rounds (default 15)")
    parser.add_argument("--steps", type=int, default=5, metavar="S", help="steps of a round (default 5)")
    command.add_limits(parser)
    options = parser.parse_args(argv)
    sizes = (options.width, options.depth, options.batch, options.rounds, options.steps)
    if options.nproc < 1 or min(sizes) < 1:
        parser.error("every number must be at least 1")
    with tempfile.TemporaryDirectory() as directory:
        arguments = (f"{directory}/store", options.nproc, *sizes)
        of_ranks = command.on_ranks(run_rank, options.nproc, *arguments, timeout=options.timeout)
    first = of_ranks[0]
    print(f"# {first['parameters']} parameters, {options.nproc} ranks, torch {first['torch']}")
    print(*table(of_ranks)[0], sep="\n")
    apart = max(rank["apart"] for rank in of_ranks)
    same = all(rank["same_bits"] for rank in of_ranks)
    print(f"# weights: {apart:.1e} from gloo's, {'the same bits' if same else 'DIFFERENT'} on all ranks")
    command.save(options.json, {"ranks": of_ranks})
    return int(not same or apart > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
