"""Runs a command in a network namespace of its own, and reads what its kernel counted. Knows no meshes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

POSSIBLE = bool(
    sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
)
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
