"""Recognises launchers whose variables asynccoll does not read. Knows names and traps, joins nothing.

`refuse_foreign_launcher` is the last question before a process is taken for a world of one: if a launcher
says that it started several, a ValueError tells how to hand their places over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FOREIGN", "Foreign", "refuse_foreign_launcher"]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A launcher by the variables that hold its rank and its world size."""

    name: str
    rank: str
    size: str


# Order: an MPI launcher inside a Slurm job is the one that counts; Slurm's own variables are looked at last.
FOREIGN = (
    Foreign("AdaptDL", "ADAPTDL_REPLICA_RANK", "ADAPTDL_NUM_REPLICAS"),
    Foreign("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE"),
    Foreign("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Foreign("an MPI launcher (PMI)", "PMI_RANK", "PMI_SIZE"),
    Foreign("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    Foreign("Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES"),
)

# Step ids from here on are Slurm's own (batch script, interactive step, external step), not those of `srun`
# tasks: slurm.h counts them down from 0xffffffff.
_FIRST_RESERVED_STEP = 0xFFFFFFF0

# What `srun --pty bash` and `salloc` call their jobs when no name is given.
_INTERACTIVE_JOBS = frozenset({"bash", "interactive"})


def refuse_foreign_launcher(environ: Mapping[str, str]) -> None:
    """ValueError if an unsupported launcher says that this process is one of several."""
    for foreign in FOREIGN:
        if (_integer(environ, foreign.size) or 0) > 1:
            _refuse(environ, foreign)
    if _is_slurm_task(environ):
        # Inside a step the job's count may be larger than the step's: `srun -n 2` in a job of 4 tasks.
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        if (_integer(environ, size) or 0) > 1:
            _refuse(environ, Foreign("Slurm", "SLURM_PROCID", size))


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process as a task; shells of sbatch, salloc and ``srun --pty`` are not
    tasks.
    """
    step, task = _integer(environ, "SLURM_STEP_ID"), _integer(environ, "SLURM_PROCID")
    if step is None or task is None or step >= _FIRST_RESERVED_STEP:
        return False
    interactive = "SLURM_PTY_PORT" in environ or environ.get("SLURM_JOB_NAME") in _INTERACTIVE_JOBS
    # A shell is task 0. Real tasks that inherit salloc's job name are not: the others still raise, loudly.
    return not (interactive and task == 0)


def _refuse(environ: Mapping[str, str], foreign: Foreign) -> None:
    raise ValueError(
        f"{foreign.size}={environ[foreign.size]!r}: {foreign.name} started several processes, and asynccoll does not "
        f"read its variables. Tell each its place: ASYNCCOLL_RANK=${foreign.rank} ASYNCCOLL_WORLD_SIZE=${foreign.size} "
        "ASYNCCOLL_MASTER_ADDR=<host of rank 0> ASYNCCOLL_MASTER_PORT=<a free port there>, or the arguments rank=, "
        "world_size= and address='tcp://host:port'. For separate worlds of one: ASYNCCOLL_RANK=0 ASYNCCOLL_WORLD_SIZE=1."
    )


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    """The variable's value where it is a plain number; somebody else's odd values are none of our
    business.
    """
    value = environ.get(name, "").strip()
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 10 else None
