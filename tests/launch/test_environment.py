import pytest

from asynccoll.launch import environment
from asynccoll.launch.environment import rank_environment


def env_of(rank: int, nproc: int, **environ: str) -> dict[str, str]:
    return rank_environment(environ, rank, nproc, 4711, "5ec2e7", 9)


def test_a_rank_learns_who_and_where_it_is():
    assert env_of(1, 3, HOME="/h", OMP_NUM_THREADS="2") == {
        "HOME": "/h",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "ASYNCCOLL_RANK": "1",
        "ASYNCCOLL_LOCAL_RANK": "1",
        "ASYNCCOLL_WORLD_SIZE": "3",
        "ASYNCCOLL_MASTER_ADDR": "127.0.0.1",
        "ASYNCCOLL_MASTER_PORT": "4711",
        "ASYNCCOLL_SECRET": "5ec2e7",
    }


def test_only_rank_0_gets_the_listening_socket():
    assert env_of(0, 2)["ASYNCCOLL_RENDEZVOUS_FD"] == "9"
    assert "ASYNCCOLL_RENDEZVOUS_FD" not in env_of(1, 2, ASYNCCOLL_RENDEZVOUS_FD="3")


def test_the_identity_of_an_outer_job_is_replaced_and_its_settings_are_kept():
    env = env_of(1, 2, ASYNCCOLL_SECRET="outer", ASYNCCOLL_GENERATION="4", ASYNCCOLL_TIMEOUT="7")
    assert env["ASYNCCOLL_SECRET"] == "5ec2e7"
    assert "ASYNCCOLL_GENERATION" not in env
    assert env["ASYNCCOLL_TIMEOUT"] == "7"


def test_the_given_environment_is_not_changed():
    given = {"ASYNCCOLL_RANK": "7"}
    rank_environment(given, 0, 1, 1, "", 3)
    assert given == {"ASYNCCOLL_RANK": "7"}


@pytest.mark.parametrize(("cores", "nproc", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1"), (1, 2, "1")])
def test_ranks_share_the_cores(cores, nproc, threads, monkeypatch):
    monkeypatch.setattr(environment, "_usable_cores", lambda: cores)
    assert env_of(0, nproc)["OMP_NUM_THREADS"] == threads


def test_a_single_rank_keeps_its_threads():
    assert "OMP_NUM_THREADS" not in env_of(0, 1)


def test_a_users_choice_of_buffering_wins():
    assert env_of(0, 1, PYTHONUNBUFFERED="")["PYTHONUNBUFFERED"] == ""
