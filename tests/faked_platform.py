"""Makes this interpreter look like a platform with less: what Windows lacks, as far as Linux can be without it.

`fake`, or as a plugin ``pytest -p faked_platform``, before asynccoll is imported: no ``fcntl``, no ``fork``, no
hooks for it, no process groups and users, no SIGKILL and its like, no SO_REUSEPORT, no ``sendmsg``, no uvloop. The usual loop is
like Windows' own: it watches no descriptors.
"""

import asyncio
import concurrent.futures
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile

# What these took from `os` and `signal` at their import stays theirs.
for module in (concurrent.futures, multiprocessing, subprocess, tempfile):
    assert module

MISSING = {
    os: (
        "fork",
        "forkpty",
        "register_at_fork",
        "killpg",
        "setsid",
        "getpgid",
        "geteuid",
        "getuid",
        "pidfd_open",
    ),
    signal: (
        "SIGKILL",
        "SIGHUP",
        "SIGTSTP",
        "SIGCONT",
        "SIGSTOP",
        "SIGCHLD",
        "SIGPIPE",
        "SIGUSR1",
        "pthread_kill",
    ),
    socket: ("SO_REUSEPORT",),
}


class Blind(asyncio.SelectorEventLoop):
    """A loop that does everything but watch descriptors for others, as Windows' Proactor."""

    def _none(self, *args):
        raise NotImplementedError

    add_reader = remove_reader = add_writer = remove_writer = _none


class BlindPolicy(asyncio.DefaultEventLoopPolicy):
    """Gives `Blind` loops, as Windows' policy gives Proactor's."""

    def new_event_loop(self):
        return Blind()


class Lacking:
    """A method that neither a class nor its instances have, though what they derive from does."""

    def __get__(self, instance, owner=None):
        raise AttributeError("this platform has no such call")


def fake(hidden=("fcntl", "resource", "pwd", "grp", "uvloop")):
    """Take away what the platform lacks, and the modules ``hidden``."""
    for module, names in MISSING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in hidden:
        sys.modules[name] = None  # an import of it is an ImportError
    socket.socket.sendmsg = socket.socket.recvmsg = Lacking()
    asyncio.set_event_loop_policy(BlindPolicy())


def pytest_configure(config):
    """As a plugin: when pytest's own plugins, which need more, have been imported."""
    fake(hidden=("fcntl",))
