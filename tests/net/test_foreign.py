"""Launchers that are present but not read must not end in many worlds of one."""

import pytest

from asynccoll.net.foreign import FOREIGN, refuse_foreign_launcher

STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: foreign.name)
def test_a_launcher_of_several_processes_is_refused_with_its_own_variables(foreign):
    with pytest.raises(ValueError) as caught:
        refuse_foreign_launcher({foreign.rank: "1", foreign.size: "2"})
    message = str(caught.value)
    assert f"{foreign.size}='2'" in message
    assert f"ASYNCCOLL_RANK=${foreign.rank} ASYNCCOLL_WORLD_SIZE=${foreign.size}" in message
    assert "ASYNCCOLL_MASTER_ADDR" in message


@pytest.mark.parametrize("value", ["1", "0", "", "x", "1:4", "-2", "²"])
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: foreign.name)
def test_a_launcher_of_one_process_or_of_no_clear_number_is_none_of_our_business(foreign, value):
    refuse_foreign_launcher({foreign.rank: "0", foreign.size: value})


def test_a_slurm_step_counts_its_own_tasks_not_those_of_the_job():
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS='2'"):
        refuse_foreign_launcher(STEP)
    refuse_foreign_launcher({**STEP, "SLURM_STEP_NUM_TASKS": "1"})


def test_a_slurm_step_without_its_own_count_uses_that_of_the_job():
    old = {name: value for name, value in STEP.items() if name != "SLURM_STEP_NUM_TASKS"}
    with pytest.raises(ValueError, match="SLURM_NTASKS='4'"):
        refuse_foreign_launcher(old)


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, id="salloc"),
        pytest.param({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, id="sbatch"),
        pytest.param({**STEP, "SLURM_STEP_ID": "4294967291"}, id="sbatch as a batch step"),
        pytest.param({**STEP, "SLURM_STEP_ID": "4294967290"}, id="salloc as an interactive step"),
        pytest.param({**STEP, "SLURM_JOB_NAME": "bash"}, id="srun --pty bash"),
        pytest.param({**STEP, "SLURM_JOB_NAME": "interactive"}, id="interactive"),
        pytest.param({**STEP, "SLURM_PTY_PORT": "5"}, id="srun --pty"),
    ],
)
def test_a_slurm_shell_is_a_world_of_one(shell):
    refuse_foreign_launcher(shell)


def test_tasks_that_inherit_an_interactive_job_name_do_not_run_apart_in_silence():
    with pytest.raises(ValueError, match="SLURM"):
        refuse_foreign_launcher({**STEP, "SLURM_JOB_NAME": "interactive", "SLURM_PROCID": "1"})


def test_mpi_inside_slurm_names_mpi():
    with pytest.raises(ValueError, match="Open MPI"):
        refuse_foreign_launcher({**STEP, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
