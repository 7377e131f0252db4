"""Runs scenarios in processes of one backend and one world size, and finds out how each ended. Knows no scenario by name."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.torchbackend import everything
from tests.torchbackend.suite import SCENARIOS, Scenario, World, bits, one_line, plain, refusals

GRACE = 2.5
"""Seconds for the others, once a rank has failed."""
FORMING = 60.0
"""Seconds in which a process must be there."""

OK, PART, FAILED, CRASH, HANG = "ok", "part", "failed", "crash", "hang"
WORSE = {OK: 0, PART: 1, FAILED: 2, CRASH: 3, HANG: 3}


class Cell(NamedTuple):
    """How a scenario ended on one backend at one world size."""

    state: str
    note: str = ""
    seconds: float = 0.0
    answers: Any = None
    """Of each rank, where all have answered."""


class Processes:
    """One process for each rank, which run one scenario after the other. A context manager: at the end none is left."""

    def __init__(self, backend: str, size: int, scratch: Path) -> None:
        self.backend = backend
        self.size = size
        self._scratch = scratch
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([everything.__name__])  # type: ignore[attr-defined]
        self._ranks: list[tuple[Any, multiprocessing.connection.Connection]] = []
        self._runs = 0
        self.fallen: list[str] = []
        """Processes that ended between two scenarios."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            args = (theirs, self.backend, rank, self.size, self._store.port, self._scratch)
            process = self._context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        limit = time.monotonic() + FORMING
        for process, connection in self._ranks:
            if not connection.poll(max(0.0, limit - time.monotonic())):
                raise RuntimeError(f"process {process.pid} did not start: {self._log(0)}")
            connection.recv()

    def _end(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(10)
        self._ranks = []

    def _log(self, rank: int) -> str:
        path = self._scratch / f"{self.backend}-{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self, scenario: Scenario) -> Cell:
        """Run it on every rank, within its deadline. What does not answer is killed."""
        for rank, (process, connection) in enumerate(self._ranks):
            if connection.poll():  # nothing is due: it is the end
                process.join(5)
                self.fallen.append(
                    f"{self.backend} {self.size}: rank {rank} ended with {process.exitcode} before {scenario.name!r}"
                )
                self._end()
                break
        if not self._ranks:
            self._start()
        self._runs += 1
        began = time.monotonic()
        for _, connection in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # it ends now: seen as the end of its replies
                connection.send((scenario.name, self._runs))
        replies, lost = self._replies(began + scenario.seconds)
        cell = self._judge(scenario, replies, lost)._replace(seconds=time.monotonic() - began)
        if lost or len(replies) < self.size or (scenario.fresh and self.backend == "gloo"):
            self._end()
        return cell

    def _replies(self, limit: float) -> tuple[dict[int, Any], list[int]]:
        replies: dict[int, Any] = {}
        lost: list[int] = []
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting and (left := limit - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    replies[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    lost.append(rank)
                if rank in lost or replies[rank][0] == FAILED:
                    limit = min(limit, time.monotonic() + GRACE)
        return replies, lost

    def _judge(self, scenario: Scenario, replies: dict[int, Any], lost: list[int]) -> Cell:
        failed = {rank: value for rank, (state, value) in sorted(replies.items()) if state == FAILED}
        if lost:
            process = self._ranks[lost[0]][0]
            process.join(5)
            return Cell(CRASH, f"rank {lost[0]} ended with {process.exitcode}")
        silent = [rank for rank in range(self.size) if rank not in replies]
        if failed:
            rank, note = next(iter(failed.items()))
            also = f"; ranks {silent} hang" if silent else ""
            return Cell(FAILED, f"rank {rank}: {note}{also}")
        if silent:
            return Cell(HANG, f"ranks {silent}: {where(self._log(silent[0]))}")
        answers = [replies[rank][1] for rank in range(self.size)]
        for key in scenario.same:
            for rank, other in enumerate(answers):
                if bits(other[key]) != bits(answers[0][key]):
                    return Cell(FAILED, f"{key}: rank {rank} has other bits than rank 0", 0, answers)
        without = list(dict.fromkeys(one for each in answers for one in refusals(each)))
        return Cell(PART if without else OK, f"without {', '.join(without)}" if without else "", 0, answers)


def where(log: str) -> str:
    """Where a process hung: the innermost lines of its main thread, from the dump that it left."""
    _, _, dump = log.rpartition("Timeout (")
    _, _, stack = dump.rpartition("most recent call first):")  # the main thread is the last
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File")]
    return " < ".join(frame.rpartition("/")[2].replace('", line ', ":") for frame in frames[:3])


def serve(connection: Any, backend: str, rank: int, size: int, port: int, scratch: Path) -> None:
    """A rank's process: runs what it is told, until the connection ends."""
    with (scratch / f"{backend}-{rank}.log").open("a") as log:
        os.dup2(log.fileno(), 2)
    faulthandler.enable(sys.__stderr__)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection.send("here")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, run = connection.recv()
            place = scratch / f"{backend}-{size}-{run}"
            place.mkdir(exist_ok=True)
            world = World(rank, size, backend, dist.PrefixStore(f"{backend}/{size}/{run}", store), place)
            faulthandler.dump_traceback_later(SCENARIOS[name].seconds - 0.5, file=sys.__stderr__)
            connection.send(_outcome(SCENARIOS[name], world))
            faulthandler.cancel_dump_traceback_later()


def _outcome(scenario: Scenario, world: World) -> tuple[str, Any]:
    torch.manual_seed(0)
    try:
        world.open()
        answers = plain(scenario.run(world) or {})
    except Exception as error:  # noqa: BLE001 (that is the outcome)
        print(f"{scenario.name}:", file=sys.stderr)
        traceback.print_exception(error)
        return FAILED, one_line(error)
    finally:
        with contextlib.suppress(Exception):  # the group may be what failed
            world.close()
        dist.set_debug_level(dist.DebugLevel.OFF)
    return OK, answers


def run_all(
    backend: str, size: int, scenarios: Iterable[Scenario], fallen: list[str]
) -> Iterator[tuple[Scenario, Cell]]:
    """Every scenario on new processes; they start again after one that hangs or ends them. Adds to `fallen`."""
    with tempfile.TemporaryDirectory() as scratch, Processes(backend, size, Path(scratch)) as processes:
        for scenario in scenarios:
            if size in scenario.worlds:
                yield scenario, processes.run(scenario)
        fallen += processes.fallen
