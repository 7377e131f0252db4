"""torch's own tests of a backend, as its wheel ships them, on this one and on gloo. Knows how they start, not what they assert.

The tests are the methods of `torch.testing._internal.distributed.distributed_test`, and those of the RPC suites beside it that open
a process group. Each runs in processes of its own, with a deadline, and the command says what became of each::

    python -m tests.torchbackend.torchs_own --against gloo --json torchs_own.json

Where a test asks which backend it has, "asynccoll" is taken for gloo, so that whatever torch asks of gloo is asked of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib
import inspect
import json
import os
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BACKEND = "asynccoll"
DEADLINE = 60.0
"""Seconds that a test may take, unless the command says otherwise."""
ROOT = Path(__file__).parents[2]
PROCESS_GROUPS = "DistributedTest"
RPC = "rpc"
"""Its tests choose their own world size; they run once."""

WHY_SKIPPED = {
    # The first that is part of torch's own words.
    "a GPU": ("cuda", "gpu", "nccl", "accelerator", "ucc ", "multicast"),
    "a larger world": ("small world size", "world size of"),
    "another world size": ("odd world size", "exact world size"),
    "torchvision": ("torchvision",),
    "torch has given it up": ("github.com/pytorch", "flak"),
    "for MPI alone": ("mpi",),
}


_GLOO_ALONE = "torch refuses monitored_barrier to every backend but gloo"
ACCEPTED = {
    "test_monitored_barrier_gloo": _GLOO_ALONE,
    "test_monitored_barrier_gloo_subgroup": _GLOO_ALONE,
    "test_monitored_barrier_failure_order": _GLOO_ALONE,
    "test_monitored_barrier_wait_all_ranks": _GLOO_ALONE,
    "test_monitored_barrier_gloo_rank_0_timeout": "asks for the words of gloo's error",
}
"""Tests that do not pass, and why that is right."""


@dataclasses.dataclass
class Outcome:
    """What became of one test. ``status`` is pass, fail or skip."""

    name: str
    status: str
    reason: str
    seconds: float


# -- inside: one process for a backend and a world size, from which the ranks are forked -------------------------


class _Name(str):
    """A backend's name, in which torch's tests see others too where they compare it: then they ask of it what they ask of those."""

    also: frozenset[str]

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other in self.also  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # for membership in their sets


def _name(backend: str, *also: str) -> str:
    if backend == "gloo":
        return backend
    name = _Name(backend)
    name.also = frozenset(also)
    return name


def _load(backend: str, deadline: float) -> list[type[unittest.TestCase]]:
    """Torch's test classes, pointed at ``backend``.

    What they skip is decided while they are loaded: nothing that runs on gloo, and not the all-to-alls, which are for MPI alone.
    """
    os.environ["BACKEND"] = "gloo"  # read again at some tests
    # Tests of a second default group need a file, which no other has used: `_fresh` makes one for each.
    os.environ["INIT_METHOD"] = "file:///a-new-one-for-each-test"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    import torch.multiprocessing
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as agent

    # The ranks are forks of this process: what is loaded here is loaded once.
    if backend == BACKEND:
        from asynccoll import net
        from asynccoll.torch import backend as _  # noqa: F401

        for module in pkgutil.iter_modules(net.__path__, "asynccoll.net."):
            importlib.import_module(module.name)
    torch.set_num_threads(1)  # threads would not live on in a fork
    features = common.DistTestCases.backend_feature
    for having in (*[names for names in features.values() if "gloo" in names], features["plugin"]):
        having.add(backend)
    environment = os.environ
    # A real environment would make a plain text of the name.
    os.environ = dict(environment) | {"BACKEND": _name(backend, "gloo", "mpi")}  # type: ignore[assignment]  # noqa: B003
    try:
        from torch.testing._internal.distributed import distributed_test as theirs
    finally:
        os.environ = environment  # noqa: B003
    theirs.BACKEND = _name(backend, "gloo")
    for supported in (
        theirs.PROFILING_SUPPORTED_BACKENDS,
        theirs.CUDA_PROFILING_SUPPORTED_BACKENDS,
        theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        supported.append(backend)
    common.TIMEOUT_DEFAULT = deadline
    common.TIMEOUT_OVERRIDE.clear()

    class Forked:
        """The ranks share what is loaded, and none outlives its test."""

        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)  # type: ignore[attr-defined]

        def tearDown(self) -> None:
            for process in self.processes:  # type: ignore[has-type]
                if process.is_alive():
                    process.kill()
                process.join()
            self.processes: list[Any] = []
            super().tearDown()  # type: ignore[misc]

    class Groups(Forked, theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            theirs.INIT_METHOD = os.environ["INIT_METHOD"]
            self._spawn_processes()

    Groups.__name__ = Groups.__qualname__ = PROCESS_GROUPS
    classes: list[type[unittest.TestCase]] = [Groups]
    for suite in (*rpc_utils.GENERIC_TESTS, *rpc_utils.TENSORPIPE_TESTS):
        parts = (Forked, suite, agent.TensorPipeRpcAgentTestFixture, rpc_utils.SpawnHelper)
        classes.append(type(suite.__name__, parts, {}))
    return classes


def _of_gloo(backend: str) -> None:
    """The RPC suites name gloo where they open a group: give them ``backend``."""
    import torch.distributed as dist

    opening = dist.init_process_group

    def init_process_group(*args: Any, **given: Any) -> None:
        if given.get("backend") == "gloo":
            given["backend"] = backend
        opening(*args, **given)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def _opens_a_group(suite: type, name: str) -> bool:
    if suite.__name__.startswith("Ddp"):
        return True
    source = inspect.getsource(inspect.unwrap(getattr(suite, name)))
    return "init_process_group(" in source or "initialize_pg(" in source


def _tests(classes: Iterable[type[unittest.TestCase]], rpc: bool) -> Iterator[tuple[str, unittest.TestCase]]:
    for suite in classes:
        if (suite.__name__ != PROCESS_GROUPS) != rpc:
            continue
        for name in unittest.defaultTestLoader.getTestCaseNames(suite):
            if not rpc or _opens_a_group(suite, name):
                yield f"{suite.__name__}.{name}", suite(name)


@contextlib.contextmanager
def _output_in(log: Path) -> Iterator[None]:
    """What this process and its children print goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, 1):
            os.dup2(copy, number)
            os.close(copy)


def _run(name: str, test: unittest.TestCase, log: Path) -> Outcome:
    result = unittest.TestResult()
    began = time.monotonic()
    with _output_in(log):
        test.run(result)
    seconds = round(time.monotonic() - began, 2)
    if result.skipped:
        return Outcome(name, "skip", result.skipped[0][1], seconds)
    wrong = result.errors + result.failures
    if not wrong:
        return Outcome(name, "pass", "", seconds)
    with log.open("a") as file:
        file.write("\n".join(text for _, text in wrong))
    return Outcome(name, "fail", _in_few_words(wrong[0][1]), seconds)


def _in_few_words(traceback: str) -> str:
    """The first error that a rank raised: it stands at the margin, after its traceback."""
    lines = [
        line
        for line in traceback.splitlines()
        if re.match(r"[A-Za-z_.]*(Error|Exception|Timeout|Lost|Mismatch)\b.*:", line)
    ]
    own = [line for line in lines if not re.match(r"RuntimeError: Process \d+ exited with error", line)]
    return (own or lines or traceback.splitlines()[-1:])[0][:300]


def inside(
    backend: str, rpc: bool, patterns: list[str], deadline: float, logs: Path, skips: dict[str, str]
) -> None:
    """Run what is asked for, and print one line of JSON for each test. ``skips`` are not run, for the reasons there."""
    classes = _load(backend, deadline)
    if rpc:
        _of_gloo(backend)
    for name, test in _tests(classes, rpc):
        short = name.split(".")[1]
        if patterns and not any(fnmatch.fnmatch(short, p) or fnmatch.fnmatch(name, p) for p in patterns):
            continue
        if name in skips:
            outcome = Outcome(name, "skip", skips[name], 0.0)
        else:
            outcome = _run(name, test, logs / f"{name}.log")
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


# -- outside ------------------------------------------------------------------------------------------------------


def run_world(
    backend: str,
    world: int | str,
    patterns: Iterable[str] = (),
    *,
    deadline: float = DEADLINE,
    logs: Path | None = None,
    skips: dict[str, str] | None = None,
) -> list[Outcome]:
    """Torch's tests on ``backend`` with ``world`` ranks, or those with `RPC`; those that match a pattern, or all.

    Args:
        deadline: seconds for each test.
        logs: a directory for what the ranks print; None: nowhere.
        skips: tests that are known to be skipped, and why; they are not run.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = logs / f"{backend}-{world}".replace(" ", "-") if logs else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.torchbackend.torchs_own", "--inside", backend]
        command += ["--world", str(world), "--deadline", str(deadline), "--logs", str(folder)]
        known = Path(temporary) / "skips.json"
        known.write_text(json.dumps(skips or {}))
        command += ["--skips", str(known)]
        command += [part for pattern in patterns for part in ("--only", pattern)]
        # One thread of arithmetic for each rank: there are more ranks than cores.
        settings = {
            "WORLD_SIZE": str(4 if world == RPC else world),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": temporary,
        }
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            return list(_lines(process, deadline))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _lines(process: subprocess.Popen[str], deadline: float) -> Iterator[Outcome]:
    """What comes. A process that hangs itself, not only its ranks, is ended some time after it should have spoken."""
    assert process.stdout is not None
    while True:
        alarm = signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.setitimer(signal.ITIMER_REAL, deadline + 120)
        line = process.stdout.readline()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        if not line:
            break
        yield Outcome(**json.loads(line))
    if process.wait() != 0:
        raise RuntimeError(
            f"the process that starts the tests ended with {process.returncode}: see its output"
        )


def why_skipped(reason: str) -> str:
    """Torch's reason for a skip in one word or two."""
    said = reason.lower()
    for why, words in WHY_SKIPPED.items():
        if any(word in said for word in words):
            return why
    return "other"


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts of one run."""
    status = Counter(outcome.status for outcome in outcomes)
    skipped = Counter(why_skipped(outcome.reason) for outcome in outcomes if outcome.status == "skip")
    return {
        "tests": len(outcomes),
        "run": status["pass"] + status["fail"],
        "pass": status["pass"],
        "fail": status["fail"],
        "skipped": dict(skipped.most_common()),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
    }


def report(backend: str, world: int | str, outcomes: list[Outcome]) -> str:
    """One run in a few lines: counts, what was skipped for which reason, and each test that failed."""
    counts = summary(outcomes)
    skipped = ", ".join(f"{why} {count}" for why, count in counts["skipped"].items())
    lines = [
        f"{backend}, {_ranks(world)}: {counts['tests']} tests, {counts['run']} run, {counts['pass']} pass, {counts['fail']} fail; "
        f"skipped: {skipped or 'none'}; {counts['seconds']:.0f} s"
    ]
    for outcome in outcomes:
        if outcome.status == "fail":
            known = ACCEPTED.get(outcome.name.split(".")[1])
            lines.append(f"  {outcome.name}: {outcome.reason}" + (f" [known: {known}]" if known else ""))
    return "\n".join(lines)


def _ranks(world: int | str) -> str:
    return f"{world} ranks" if isinstance(world, int) else "the RPC suites"


def record(backend: str, world: int | str, outcomes: list[Outcome]) -> dict[str, Any]:
    """One run for the JSON: every name, under what became of it and why."""
    fails = {outcome.name: outcome.reason for outcome in outcomes if outcome.status == "fail"}
    skips: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.status == "skip":
            skips.setdefault(outcome.reason, []).append(outcome.name)
    passes = [outcome.name for outcome in outcomes if outcome.status == "pass"]
    return {
        "backend": backend,
        "world": world,
        "summary": summary(outcomes),
        "pass": passes,
        "fail": fails,
        "skip": skips,
    }


def main() -> int:
    """The command. 1 if a test fails that is not `ACCEPTED`, and that passes where it is compared with another backend."""
    parser = argparse.ArgumentParser(description="torch's own tests of a backend, on asynccoll")
    parser.add_argument(
        "--world", default="2,3,4,rpc", help="world sizes with commas, and 'rpc' for the RPC suites"
    )
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="names, with * and ?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every name and what became of it")
    parser.add_argument("--against", metavar="BACKEND", help="run them on this backend too: gloo")
    parser.add_argument("--deadline", type=float, default=DEADLINE, metavar="SECONDS", help="for each test")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="what the ranks printed")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--skips", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        skips = json.loads(options.skips.read_text())
        rpc = options.world == RPC
        inside(options.inside, rpc, options.only, options.deadline, options.logs, skips)
        return 0
    # Ended from outside, it ends the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import torch  # only for its version

    heading = {"command": shlex.join(["python", "-m", "tests.torchbackend.torchs_own", *sys.argv[1:]])}
    heading |= {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    worse = 0
    runs = []
    no_gpu: dict[str, str] = {}  # for that torch skips a test with any backend and in any world
    for world in [part if part == RPC else int(part) for part in options.world.split(",")]:
        found = {}
        for backend in filter(None, [options.against, BACKEND]):
            outcomes = run_world(
                backend, world, options.only, deadline=options.deadline, logs=options.logs, skips=no_gpu
            )
            skipped = [outcome for outcome in outcomes if outcome.status == "skip"]
            no_gpu |= {one.name: one.reason for one in skipped if why_skipped(one.reason) == "a GPU"}
            found[backend] = {outcome.name: outcome for outcome in outcomes}
            print(report(backend, world, outcomes), flush=True)
            runs.append(record(backend, world, outcomes))
            if options.json:
                options.json.write_text(json.dumps(heading | {"runs": runs}, indent=1) + "\n")
        other = found.get(options.against, {})
        for name, outcome in found[BACKEND].items():
            if outcome.status == "fail" and (name not in other or other[name].status == "pass"):
                worse += name.split(".")[1] not in ACCEPTED
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
