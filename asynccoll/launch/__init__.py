"""Ranks as local processes that live and die together. Knows processes and their environment; not meshes.

`Job` starts ranks, watches them and stops them; `launch` runs a function on them; ``asynccoll run`` runs a
script; `asynccoll.workers` keeps them for many functions (`asynccoll.worker` is what these run).

The laws of a job:

- It draws the secret and holds the listening socket of the rendezvous, which rank 0 inherits: no port is
  guessed, and the socket stays open as long as the job, so that ``init()`` may follow a closed one.
- Every rank leads a session and process group of its own. The terminal's Ctrl-C therefore reaches the
  launcher alone, which passes it on once, and a signal to a rank reaches its children too.
- The first failure decides. "First" is the order in which the kernel reports ends: one pidfd per rank in one
  epoll set, whose ready list is in order of arrival. (Where there is no pidfd, a thread waits for each rank,
  and ends that are microseconds apart may swap.) Peers that fail because of the first one end later, and
  change nothing.
- When the job is over, however it ended, nothing of it is left: what ranks leave behind in their groups is
  stopped too. Only a process that made a session of its own (a daemon) outlives its rank. If the launcher is
  killed, its guard (`asynccoll.launch.guard`) stops the groups.

POSIX only. Linux is what it is tested on.
"""

from __future__ import annotations

from asynccoll.launch.ends import Cause, Exit, Overdue, exit_code
from asynccoll.launch.environment import rank_environment
from asynccoll.launch.function import launch
from asynccoll.launch.job import GRACE, Job
from asynccoll.launch.signals import SignalPipe

__all__ = [
    "GRACE",
    "Cause",
    "Exit",
    "Job",
    "Overdue",
    "SignalPipe",
    "exit_code",
    "launch",
    "rank_environment",
]
