"""Network namespaces: one for a command, with what its kernel counted, or two that are joined by a cable which can be cut.

Nothing of the machine's own network is touched. Knows no meshes.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

_CLONE_NEWNET = 0x40000000  # include/uapi/linux/sched.h

AVAILABLE = bool(
    sys.platform == "linux" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "nsenter", "unshare")))
)
"""It takes root and the tools of iproute2 and util-linux."""


def _call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


class Namespace:
    """A network namespace. It lives as long as this object's descriptor, or a process inside of it."""

    def __init__(self):
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _call("unshare", _CLONE_NEWNET)
            try:
                self.fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            finally:
                _call("setns", home, _CLONE_NEWNET)
        finally:
            os.close(home)
        self.ip("link", "set", "lo", "up")

    def enter(self):
        """Move the calling thread in. For a child just forked."""
        _call("setns", self.fd, _CLONE_NEWNET)

    @property
    def path(self):
        """Where other processes find it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def ip(self, *arguments):
        """Run ``ip`` inside."""
        subprocess.run(["nsenter", f"--net={self.path}", "ip", *arguments], check=True, timeout=10)

    def close(self):
        """Let go of it."""
        os.close(self.fd)


class Cable:
    """Two namespaces, ``ends``, with the addresses 10.0.0.1 and 10.0.0.2 on ``eth0``; a context manager."""

    addresses = ("10.0.0.1", "10.0.0.2")

    def __init__(self):
        self.ends = (Namespace(), Namespace())
        first, second = self.ends
        first.ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.path)
        for end, address in zip(self.ends, self.addresses, strict=True):
            end.ip("addr", "add", f"{address}/24", "dev", "eth0")
            end.ip("link", "set", "eth0", "up")

    def set(self, state, end=0):
        """``"down"`` cuts the cable at one end, without a word to any connection; ``"up"`` mends it."""
        self.ends[end].ip("link", "set", "eth0", state)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for end in self.ends:
            end.close()


CROWD = Path(__file__).with_name("crowd.py")


def in_namespace(settings, *command, timeout=100):
    """Run a command in a new network namespace whose loopback is up; ``settings`` are sysctls.

    The namespace's TCP statistics are the last lines on stderr.
    """
    script = "".join(f"echo '{value}' > /proc/sys/{name} && " for name, value in settings.items())
    script = f'ip link set lo up && {script} "$@"; status=$?; cat /proc/net/netstat /proc/net/snmp >&2; exit $status'
    return subprocess.run(
        ["unshare", "-n", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def statistic(netstat, name, table="TcpExt:"):
    """One number of /proc/net/netstat or snmp: a line of names, then a line of values."""
    names, values = [line.split() for line in netstat.splitlines() if line.startswith(table)]
    return int(values[names.index(name)])


SMALL_BACKLOG = {"net/core/somaxconn": 8, "net/ipv4/tcp_abort_on_overflow": 1}
