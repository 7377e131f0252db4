"""Stops the process groups of a launcher that died. Knows process groups and one pipe, not ranks or jobs.

As a program, ``python -I -S guard.py GRACE``, it is a launcher's last will: it reads ``+PGID`` and ``-PGID``
lines from its standard input, which only the launcher holds open, and stops every group still listed when the
input
ends: SIGTERM, and after ``GRACE`` seconds SIGKILL. The kernel closes the pipe however the launcher dies.

Why a process of its own, and not PR_SET_PDEATHSIG in each rank: that needs code between fork and exec (unsafe
beside threads), exists on Linux alone, fires when the forking *thread* ends, and does not reach a rank's own
children. It imports the standard library only, because it runs by path, outside the package.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

__all__ = ["POLL", "group_alive", "kill_group"]

POLL = 0.02
"""Seconds between two looks at groups that were asked to end: nothing reports the end of a grandchild."""


def kill_group(group: int, number: int) -> None:
    """Send signal ``number`` to every process of ``group``; silent where it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        # PermissionError: macOS's answer for a group of zombies, and Linux's for one that changed its user.
        return


def group_alive(group: int) -> bool:
    """True while ``group`` has a process that is not a zombie.

    Zombies have to be told apart: an orphan's last parent, process 1, does not reap in many containers.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    if not os.path.exists("/proc/self/stat"):
        return True
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # proc(5): "pid (name) state ppid pgrp ..."; the name may hold blanks and parentheses.
                state, _, pgrp = file.read().rpartition(b")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state not in (b"Z", b"X"):
            return True
    return False


def stop_groups(groups: Iterable[int], grace: float) -> None:
    """Stop ``groups``: SIGTERM, then SIGKILL for those that are alive ``grace`` seconds later."""
    left = set(groups)
    for group in left:
        kill_group(group, signal.SIGTERM)
        kill_group(group, signal.SIGCONT)
    deadline = time.monotonic() + grace
    while (left := {group for group in left if group_alive(group)}) and time.monotonic() < deadline:
        time.sleep(POLL)
    for group in left:
        kill_group(group, signal.SIGKILL)


def watch(grace: float) -> None:
    """Follow the launcher's list on standard input to its end, then stop what is still on it."""
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    stop_groups(groups, grace)


if __name__ == "__main__":
    watch(float(sys.argv[1]))
