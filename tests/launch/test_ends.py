import signal

import pytest

from asynccoll.launch import Exit, Overdue, exit_code


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (Exit(2, 1234, 3, 1.24), 3, "rank 2 exited with code 3 (pid 1234) after 1.2 s"),
        (Exit(0, 7, -signal.SIGKILL, 0.0), 137, "rank 0 was killed by SIGKILL (pid 7) after 0.0 s"),
        (Exit(0, 7, -40, 0.0), 168, "rank 0 was killed by signal 40 (pid 7) after 0.0 s"),
    ],
)
def test_an_exit_has_a_shells_code_and_says_what_happened(end, code, text):
    assert (end.code, str(end)) == (code, text)
    assert exit_code(end) == code


def test_a_job_without_a_cause_succeeded():
    assert exit_code(None) == 0


def test_a_job_over_its_limit_has_the_code_of_timeout_and_names_the_ranks():
    cause = Overdue(2.5, (1, 3))
    assert exit_code(cause) == 124
    assert str(cause) == "ranks 1, 3 still running after the limit of 2.5 s"


def test_a_signal_to_the_launcher_counts_128_more():
    assert exit_code(signal.SIGINT) == 130
