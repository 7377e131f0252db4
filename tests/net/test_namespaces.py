"""What needs a network of its own: tiny backlogs, few ports, and hosts with several or misleading addresses.

Each test runs child processes in a fresh network namespace, so nothing of the machine's own network is touched.
"""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from namespaces import AVAILABLE, CROWD, SMALL_BACKLOG, in_namespace, statistic

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs root, unshare and ip to make network namespaces")


@pytest.mark.parametrize(
    "loop", ["asyncio", "uvloop", *(pytest.param(f"round {n}", marks=pytest.mark.slow) for n in range(48))]
)
def test_64_processes_that_call_at_once_all_get_through_a_backlog_of_8(loop):
    done = in_namespace(SMALL_BACKLOG, sys.executable, str(CROWD), "64", "127.0.0.1", "29500", "60", loop)
    assert done.stdout == "64 of 64 formed the mesh\n"
    assert done.returncode == 0
    assert statistic(done.stderr, "ListenOverflows") > 0  # else this was no test of backlogs


def test_few_ports_are_enough_or_the_error_is_clear():
    """16 ranks need 14 listeners and 120 connections; the namespace has 50 ports."""
    settings = {"net/ipv4/ip_local_port_range": "40000 40049"}
    done = in_namespace(settings, sys.executable, str(CROWD), "16", "127.0.0.1", "29500", "20")
    if done.returncode:
        assert "RendezvousError" in done.stdout
        assert "errno" in done.stdout
    else:
        assert done.stdout == "16 of 16 formed the mesh\n"


def test_no_port_at_all_is_a_clear_error_on_every_rank():
    settings = {
        "net/ipv4/ip_local_port_range": "40000 40001",
        "net/ipv4/ip_local_reserved_ports": "40000-40001",
    }
    done = in_namespace(settings, sys.executable, str(CROWD), "4", "127.0.0.1", "29500", "3")
    assert done.stdout.endswith("0 of 4 formed the mesh\n")
    assert done.stdout.count("RendezvousError") >= 4


# One host: waits for its network, then runs some ranks in one loop and prints what they learned.
HOST = """
import asyncio, json, sys
from asynccoll.net.launchers import Placement
from asynccoll.net.rendezvous import form_mesh

sys.stdin.readline()
ranks, size, address = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

async def main():
    interface = (sys.argv[5:] or [None])[0]
    places = [Placement(rank=rank, size=size, host=address, port=29500, interface=interface) for rank in ranks]
    meshes = await asyncio.gather(
        *(form_mesh(place, b"s", init_timeout=float(sys.argv[4])) for place in places), return_exceptions=True
    )
    for mesh in meshes:
        if isinstance(mesh, Exception):
            print(json.dumps({"error": str(mesh), "elapsed": mesh.elapsed}), flush=True)
        else:
            print(json.dumps({"addresses": mesh.addresses, "nodes": mesh.node_ranks}), flush=True)
    sys.stdin.readline()
    for mesh in meshes:
        if not isinstance(mesh, Exception):
            mesh.close()

asyncio.run(main())
"""


class Host:
    """Some ranks in a network namespace of their own; with ``names``, a file, instead of /etc/hosts."""

    def __init__(self, ranks, size, address, init_timeout=20.0, *interface, names=None):
        arguments = [json.dumps(ranks), str(size), address, str(init_timeout), *interface]
        self.count = len(ranks)
        command = [sys.executable, "-c", HOST, *arguments]
        if names is not None:
            script = 'mount --bind "$0" /etc/hosts && exec "$@"'
            command = ["-m", "--propagation", "private", "sh", "-c", script, str(names), *command]
        self.process = subprocess.Popen(
            ["unshare", "-n", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.pid = str(self.process.pid)

    def ip(self, *arguments):
        subprocess.run(["nsenter", "-t", self.pid, "-n", "ip", *arguments], check=True, timeout=10)

    def say(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def outcomes(self):
        return [json.loads(self.process.stdout.readline()) for _ in range(self.count)]


@pytest.fixture
def hosts():
    """``hosts(spec, spec)``: two hosts joined by a cable as 10.0.0.1 and 10.0.0.2, the rest of the network up."""
    made = []

    def make(*specifications, names=None):
        files = names or [None] * len(specifications)
        for specification, file in zip(specifications, files, strict=True):
            made.append(Host(*specification, names=file))
        own = os.stat("/proc/self/ns/net").st_ino
        for host in made:
            # Until `unshare` has left our namespace, commands would act on the machine's own network.
            while os.stat(f"/proc/{host.pid}/ns/net").st_ino == own:
                pass
        first, second = made
        first.ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second.pid)
        for number, host in enumerate(made, start=1):
            host.ip("addr", "add", f"10.0.0.{number}/24", "dev", "eth0")
            host.ip("link", "set", "eth0", "up")
            host.ip("link", "set", "lo", "up")
        return made

    yield make
    for host in made:
        host.process.kill()
        host.process.wait(timeout=10)
        host.process.stdin.close()
        host.process.stdout.close()


def test_ranks_advertise_the_address_that_leads_to_rank_0(hosts):
    """Also where each host has another network with the same address, and whatever its name resolves to."""
    a, b = hosts(([0, 1], 4, "10.0.0.1"), ([2, 3], 4, "10.0.0.1"))
    for host in (a, b):
        host.ip("link", "add", "docker0", "type", "veth", "peer", "name", "container")
        host.ip("addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.ip("link", "set", "docker0", "up")
        host.say()
    for outcome in (*a.outcomes(), *b.outcomes()):
        hosts_of_ranks = {rank: address.rpartition(":")[0] for rank, address in outcome["addresses"].items()}
        assert hosts_of_ranks == {"0": "10.0.0.1", "1": "10.0.0.1", "2": "10.0.0.2", "3": "10.0.0.2"}
        assert outcome["nodes"] == {"0": 0, "1": 0, "2": 1, "3": 1}


def test_ranks_advertise_an_address_of_the_interface_that_is_named(hosts):
    a, b = hosts(([0, 1], 4, "10.0.0.1", 20.0, "fast0"), ([2, 3], 4, "10.0.0.1", 20.0, "fast0"))
    a.ip("link", "add", "fast0", "type", "veth", "peer", "name", "fast0", "netns", b.pid)
    for number, host in enumerate((a, b), start=1):
        host.ip("addr", "add", f"10.1.0.{number}/24", "dev", "fast0")
        host.ip("link", "set", "fast0", "up")
    for host in (a, b):
        host.say()
    for outcome in (*a.outcomes(), *b.outcomes()):
        hosts_of_ranks = {rank: address.rpartition(":")[0] for rank, address in outcome["addresses"].items()}
        # Rank 0 is where everybody was told, and the last rank is called by nobody.
        assert hosts_of_ranks == {"0": "10.0.0.1", "1": "10.1.0.1", "2": "10.1.0.2", "3": "10.0.0.2"}
        assert outcome["nodes"] == {"0": 0, "1": 0, "2": 1, "3": 1}


def test_a_rank_that_came_through_loopback_is_named_at_once(hosts):
    """Rank 0 listens everywhere, rank 1 calls it as 127.0.0.1, and rank 2 on another host could not call rank 1."""
    a, b = hosts(([0], 3, "0.0.0.0", 60.0), ([2], 3, "10.0.0.1", 60.0))
    command = ["nsenter", "-t", a.pid, "-n", sys.executable, "-c", HOST, "[1]", "3", "127.0.0.1", "60"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as local:
        for process in (a.process, b.process, local):
            process.stdin.write("\n")
            process.stdin.flush()
        outcomes = [*a.outcomes(), *b.outcomes(), json.loads(local.stdout.readline())]
        local.kill()
    for outcome in outcomes:
        assert "rank 1 advertised loopback address 127.0.0.1:" in outcome["error"]
        assert "MASTER_ADDR" in outcome["error"]
        assert outcome["elapsed"] < 30


# -- names ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hosts_file(tmp_path):
    """``hosts_file(lines...)``: a file that may stand in for a host's /etc/hosts."""
    made = []

    def write(*lines):
        made.append(tmp_path / f"hosts{len(made)}")
        made[-1].write_text("127.0.0.1 localhost\n" + "".join(f"{line}\n" for line in lines))
        return made[-1]

    return write


def test_a_host_whose_own_name_means_loopback_advertises_the_address_that_leads_to_rank_0(hosts, hosts_file):
    """As many distributions write their /etc/hosts."""
    own = [hosts_file(f"127.0.0.1 {socket.gethostname()}"), hosts_file(f"127.0.1.1 {socket.gethostname()}")]
    a, b = hosts(([0, 1], 4, "10.0.0.1"), ([2, 3], 4, "10.0.0.1"), names=own)
    for host in (a, b):
        host.say()
    for outcome in (*a.outcomes(), *b.outcomes()):
        hosts_of_ranks = {rank: address.rpartition(":")[0] for rank, address in outcome["addresses"].items()}
        assert hosts_of_ranks == {"0": "10.0.0.1", "1": "10.0.0.1", "2": "10.0.0.2", "3": "10.0.0.2"}


@pytest.mark.parametrize(
    "lines", [["127.0.1.1 first"], ["::1 first", "127.0.0.1 first"]], ids=["IPv4", "both families"]
)
def test_a_mesh_forms_where_the_name_of_rank_0_means_loopback_on_its_own_host_alone(hosts, hosts_file, lines):
    """As many distributions write their /etc/hosts. Nobody but rank 0 has to be called on its host."""
    own = [hosts_file(*lines), hosts_file("10.0.0.1 first")]
    a, b = hosts(([0, 3], 4, "first"), ([1, 2], 4, "first"), names=own)
    for host in (a, b):
        host.say()
    for outcome in (*a.outcomes(), *b.outcomes()):
        hosts_of_ranks = {rank: address.rpartition(":")[0] for rank, address in outcome["addresses"].items()}
        assert hosts_of_ranks.pop("3") in ("127.0.0.1", "[::1]")  # called by nobody
        assert hosts_of_ranks == {"0": "first", "1": "10.0.0.2", "2": "10.0.0.2"}
        assert outcome["nodes"] == {"0": 0, "1": 1, "2": 1, "3": 0}


def test_a_mesh_forms_over_ipv6_where_the_name_of_rank_0_means_loopback_on_its_own_host(hosts, hosts_file):
    own = [hosts_file("::1 first"), hosts_file("fd00::1 first")]
    a, b = hosts(([0], 2, "first"), ([1], 2, "first"), names=own)
    for number, host in enumerate((a, b), start=1):
        host.ip("addr", "add", f"fd00::{number}/64", "dev", "eth0", "nodad")
        host.say()
    for outcome in (*a.outcomes(), *b.outcomes()):
        assert outcome["nodes"] == {"0": 0, "1": 1}


def test_another_rank_that_the_name_of_rank_0_led_through_loopback_is_named_at_once(hosts, hosts_file):
    """Rank 1 shares rank 0's host, has called it through loopback, and would have to be called by rank 2."""
    own = [hosts_file("127.0.1.1 first"), hosts_file("10.0.0.1 first")]
    a, b = hosts(([0, 1], 3, "first", 60.0), ([2], 3, "first", 60.0), names=own)
    for host in (a, b):
        host.say()
    for outcome in (*a.outcomes(), *b.outcomes()):
        assert "rank 1 advertised loopback address 127.0.0.1:" in outcome["error"]
        assert outcome["elapsed"] < 30


@pytest.mark.parametrize("name", ["ip6-localhost", "127.1"])
def test_a_name_that_says_loopback_stays_there_and_that_is_told(hosts, hosts_file, name):
    """Whatever another host makes of it: both sides say what they tried."""
    own = [hosts_file("127.0.0.1 ip6-localhost"), hosts_file("10.0.0.1 ip6-localhost")]
    there = "10.0.0.1" if name == "127.1" else name
    a, b = hosts(([0], 2, name, 3.0), ([1], 2, there, 3.0), names=own)
    for host in (a, b):
        host.say()
    (zero,), (one,) = a.outcomes(), b.outcomes()
    assert "rank 1 did not join" in zero["error"]
    assert "Rank 0 listens on 127.0.0.1, which no other host can call" in zero["error"]
    assert f"in place of {name!r}" in zero["error"]
    assert "rank 0 was not reached" in one["error"]
    assert "Connection refused" in one["error"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_name_that_the_system_learns_late_is_found(hosts, hosts_file, late):
    """On the host of rank 0, or on the other one."""
    own = [hosts_file("10.0.0.1 first"), hosts_file("10.0.0.1 first")]
    known = own[late].read_text()
    own[late].write_text("127.0.0.1 localhost\n")
    a, b = hosts(([0], 2, "first"), ([1], 2, "first"), names=own)
    for host in (a, b):
        host.say()
    time.sleep(0.5)  # not for luck: any order of events must do
    own[late].write_text(known)
    for outcome in (*a.outcomes(), *b.outcomes()):
        assert outcome["nodes"] == {"0": 0, "1": 1}


def test_a_name_that_the_system_never_learns_is_the_reason_given(hosts, hosts_file):
    own = [hosts_file("10.0.0.1 first"), hosts_file()]
    a, b = hosts(([0], 2, "first", 2.0), ([1], 2, "first", 2.0), names=own)
    for host in (a, b):
        host.say()
    (zero,), (one,) = a.outcomes(), b.outcomes()
    assert "rank 1 did not join" in zero["error"]
    assert "the name 'first' did not resolve" in one["error"] or "resolver has not answered" in one["error"]
    assert one["elapsed"] < 20
