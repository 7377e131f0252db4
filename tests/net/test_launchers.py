"""Which place `detect` reads out of arguments and environments."""

import pytest

from asynccoll.net.launchers import READERS, Finding, Placement, detect

ASYNCCOLL = {
    "ASYNCCOLL_RANK": "1",
    "ASYNCCOLL_WORLD_SIZE": "4",
    "ASYNCCOLL_MASTER_ADDR": "10.0.0.1",
    "ASYNCCOLL_MASTER_PORT": "29500",
}
PLAIN = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
TORCHRUN = {
    **PLAIN,
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
    "TORCHELASTIC_RESTART_COUNT": "5",
    "TORCHELASTIC_RUN_ID": "job",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_NODELIST": "n[1-4]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


# name, environment, what the placement must say
PICKED = [
    ("nothing", {}, dict(rank=0, size=1, host=None, port=None, source="none", secret=None)),
    ("ours", ASYNCCOLL, dict(rank=1, size=4, host="10.0.0.1", port=29500, source="ASYNCCOLL_*")),
    ("ours with local rank", {**ASYNCCOLL, "ASYNCCOLL_LOCAL_RANK": "1"}, dict(local_rank=1, node_rank=None)),
    ("ours with a secret", {**ASYNCCOLL, "ASYNCCOLL_SECRET": "ä"}, dict(secret="ä".encode())),
    ("a secret that is not UTF-8", {**ASYNCCOLL, "ASYNCCOLL_SECRET": "\udcff"}, dict(secret=b"\xff")),
    ("ours with a generation", {**ASYNCCOLL, "ASYNCCOLL_GENERATION": "7"}, dict(generation=7)),
    ("ours with a listener", {**ASYNCCOLL, "ASYNCCOLL_RENDEZVOUS_FD": "5"}, dict(rendezvous_fd=5)),
    (
        "plain torch",
        PLAIN,
        dict(
            rank=2,
            size=3,
            host="head",
            port=1234,
            source="RANK/WORLD_SIZE",
            generation=0,
            address_source="RANK/WORLD_SIZE",
        ),
    ),
    ("torchrun", TORCHRUN, dict(rank=2, local_rank=0, node_rank=2, generation=5)),
    ("Ray Train", {**PLAIN, "LOCAL_RANK": "0", "NODE_RANK": "1"}, dict(local_rank=0, node_rank=1)),
    (
        "a secret beside torchrun",
        {**TORCHRUN, "ASYNCCOLL_SECRET": "s"},
        dict(source="RANK/WORLD_SIZE", secret=b"s"),
    ),
    ("our generation beside torchrun", {**TORCHRUN, "ASYNCCOLL_GENERATION": "9"}, dict(generation=9)),
    ("both, different", {**PLAIN, **ASYNCCOLL}, dict(rank=1, size=4, host="10.0.0.1", source="ASYNCCOLL_*")),
    (
        "our rank, torch's address",
        {**PLAIN, "ASYNCCOLL_RANK": "0", "ASYNCCOLL_WORLD_SIZE": "2"},
        dict(rank=0, size=2, host="head", port=1234),
    ),
    (
        "our address, torch's rank",
        {**PLAIN, "ASYNCCOLL_MASTER_ADDR": "b", "ASYNCCOLL_MASTER_PORT": "5"},
        dict(rank=2, host="b", port=5, address_source="ASYNCCOLL_*"),
    ),
    ("ours complete, half of torch's", {**ASYNCCOLL, "RANK": "x"}, dict(rank=1)),
    ("blanks around numbers", {**PLAIN, "RANK": " 1 ", "MASTER_PORT": "\t1234\n"}, dict(rank=1, port=1234)),
    ("blanks around the host", {**PLAIN, "MASTER_ADDR": " head "}, dict(host="head")),
    ("leading zeros", {**PLAIN, "RANK": "001"}, dict(rank=1)),
    ("IPv6", {**PLAIN, "MASTER_ADDR": "fd00::1"}, dict(host="fd00::1")),
    ("IPv6 in brackets", {**PLAIN, "MASTER_ADDR": "[fd00::1]"}, dict(host="fd00::1")),
    ("IPv6 with a zone", {**PLAIN, "MASTER_ADDR": "fe80::1%eth0"}, dict(host="fe80::1%eth0")),
    (
        "a world of one",
        {"RANK": "0", "WORLD_SIZE": "1"},
        dict(rank=0, size=1, host=None, source="RANK/WORLD_SIZE"),
    ),
    ("one with an address", {**PLAIN, "RANK": "0", "WORLD_SIZE": "1"}, dict(size=1, host=None, port=None)),
    (
        "one with a garbled address",
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "x"},
        dict(size=1, port=None),
    ),
    ("torchrun inside Slurm", {**SLURM, **TORCHRUN}, dict(rank=2, size=3)),
    ("torchrun inside Open MPI", {**OPEN_MPI, **TORCHRUN}, dict(rank=2, size=3)),
    ("an interface beside torchrun", {**TORCHRUN, "ASYNCCOLL_SOCKET_IFNAME": " ib0 "}, dict(interface="ib0")),
    ("no interface", TORCHRUN, dict(interface=None)),
    ("an interface in a world of one", {"ASYNCCOLL_SOCKET_IFNAME": ""}, dict(size=1, interface=None)),
    ("only a local rank", {"LOCAL_RANK": "1"}, dict(size=1, local_rank=None, source="none")),
    ("only an address", {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}, dict(size=1, host=None)),
]


@pytest.mark.parametrize(
    ("environ", "expected"), [case[1:] for case in PICKED], ids=[case[0] for case in PICKED]
)
def test_an_environment_gives_the_documented_place(environ, expected):
    placement = detect(environ=environ)
    assert {name: getattr(placement, name) for name in expected} == expected


# name, environment, fragments that the message must hold
REFUSED = [
    (
        "rank is a word",
        {**ASYNCCOLL, "ASYNCCOLL_RANK": "three"},
        ["ASYNCCOLL_RANK='three' is not an integer"],
    ),
    ("rank is a float", {**PLAIN, "RANK": "1.0"}, ["RANK='1.0' is not an integer"]),
    ("rank is hexadecimal", {**PLAIN, "RANK": "0x1"}, ["RANK='0x1' is not an integer"]),
    ("rank has an underscore", {**PLAIN, "RANK": "1_0"}, ["RANK='1_0' is not an integer"]),
    ("rank in other digits", {**PLAIN, "RANK": "١"}, ["RANK='١' is not an integer"]),
    ("rank is negative", {**PLAIN, "RANK": "-1"}, ["RANK='-1' is negative"]),
    ("rank is empty", {**PLAIN, "RANK": ""}, ["RANK='' is empty"]),
    ("rank is blank", {**PLAIN, "RANK": "  "}, ["RANK='  ' is empty"]),
    (
        "interface is blank",
        {**PLAIN, "ASYNCCOLL_SOCKET_IFNAME": " "},
        ["ASYNCCOLL_SOCKET_IFNAME=' ' is empty", "name of a network interface"],
    ),
    ("rank is huge", {**PLAIN, "RANK": "9" * 5000}, ["RANK=", "larger than 2147483647"]),
    ("size is a word", {**PLAIN, "WORLD_SIZE": "all"}, ["WORLD_SIZE='all' is not an integer"]),
    ("size is zero", {**PLAIN, "WORLD_SIZE": "0"}, ["WORLD_SIZE='0'", "at least 1"]),
    ("size is empty", {**ASYNCCOLL, "ASYNCCOLL_WORLD_SIZE": ""}, ["ASYNCCOLL_WORLD_SIZE='' is empty"]),
    ("rank equals size", {**PLAIN, "RANK": "3"}, ["RANK='3'", "WORLD_SIZE='3'", "outside"]),
    (
        "rank above size",
        {**ASYNCCOLL, "ASYNCCOLL_RANK": "9"},
        ["ASYNCCOLL_RANK='9'", "ASYNCCOLL_WORLD_SIZE='4'"],
    ),
    (
        "our rank alone",
        {"ASYNCCOLL_RANK": "0"},
        ["ASYNCCOLL_RANK='0' is set but ASYNCCOLL_WORLD_SIZE is not"],
    ),
    (
        "our size alone",
        {"ASYNCCOLL_WORLD_SIZE": "2"},
        ["ASYNCCOLL_WORLD_SIZE='2' is set but ASYNCCOLL_RANK is not"],
    ),
    ("our rank alone beside torchrun", {**PLAIN, "ASYNCCOLL_RANK": "0"}, ["ASYNCCOLL_WORLD_SIZE is not"]),
    ("rank alone", {"RANK": "0"}, ["RANK='0' is set but WORLD_SIZE is not"]),
    ("size alone", {"WORLD_SIZE": "2"}, ["WORLD_SIZE='2' is set but RANK is not"]),
    (
        "Indexed Job without a rank",
        {"WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"},
        ["RANK is not", "ASYNCCOLL_RANK=$JOB_COMPLETION_INDEX"],
    ),
    (
        "no address",
        without(PLAIN, "MASTER_ADDR", "MASTER_PORT"),
        ["ASYNCCOLL_MASTER_ADDR", "MASTER_PORT", "address="],
    ),
    (
        "host without port",
        without(PLAIN, "MASTER_PORT"),
        ["MASTER_ADDR='head' is set but MASTER_PORT is not"],
    ),
    (
        "port without host",
        without(PLAIN, "MASTER_ADDR"),
        ["MASTER_PORT='1234' is set but MASTER_ADDR is not"],
    ),
    (
        "our port alone does not borrow a host",
        {**PLAIN, "ASYNCCOLL_MASTER_PORT": "5"},
        ["ASYNCCOLL_MASTER_PORT='5' is set but ASYNCCOLL_MASTER_ADDR is not"],
    ),
    (
        "Kubernetes service variable",
        {**PLAIN, "MASTER_PORT": "tcp://10.0.0.1:29500"},
        ["MASTER_PORT='tcp://10.0.0.1:29500'", "Kubernetes", "ASYNCCOLL_MASTER_PORT", "enableServiceLinks"],
    ),
    ("port is a word", {**PLAIN, "MASTER_PORT": "http"}, ["MASTER_PORT='http' is not an integer"]),
    ("port zero", {**PLAIN, "MASTER_PORT": "0"}, ["MASTER_PORT='0' is not a port from 1 to 65535"]),
    ("port too large", {**PLAIN, "MASTER_PORT": "65536"}, ["MASTER_PORT='65536' is not a port"]),
    ("port empty", {**PLAIN, "MASTER_PORT": ""}, ["MASTER_PORT='' is empty"]),
    ("host empty", {**PLAIN, "MASTER_ADDR": " "}, ["MASTER_ADDR=' ' is empty"]),
    (
        "host with a port",
        {**PLAIN, "MASTER_ADDR": "head:29500"},
        ["MASTER_ADDR='head:29500' is not a host name"],
    ),
    (
        "host with a scheme",
        {**PLAIN, "MASTER_ADDR": "tcp://head"},
        ["MASTER_ADDR='tcp://head' is not a host name"],
    ),
    ("host with a blank", {**PLAIN, "MASTER_ADDR": "he ad"}, ["MASTER_ADDR='he ad' is not a host name"]),
    ("host is a list", {**PLAIN, "MASTER_ADDR": "a,b"}, ["MASTER_ADDR='a,b' is not a host name"]),
    ("host in brackets", {**PLAIN, "MASTER_ADDR": "[head]"}, ["MASTER_ADDR='[head]' is not a host name"]),
    ("local rank garbled", {**PLAIN, "LOCAL_RANK": "x"}, ["LOCAL_RANK='x' is not an integer"]),
    ("node rank garbled", {**PLAIN, "GROUP_RANK": ""}, ["GROUP_RANK='' is empty"]),
    (
        "restart count garbled",
        {**PLAIN, "TORCHELASTIC_RESTART_COUNT": "?"},
        ["TORCHELASTIC_RESTART_COUNT='?'"],
    ),
    ("generation garbled", {"ASYNCCOLL_GENERATION": "-2"}, ["ASYNCCOLL_GENERATION='-2' is negative"]),
    ("listener garbled", {**ASYNCCOLL, "ASYNCCOLL_RENDEZVOUS_FD": "fd"}, ["ASYNCCOLL_RENDEZVOUS_FD='fd'"]),
    ("secret empty", {**ASYNCCOLL, "ASYNCCOLL_SECRET": ""}, ["ASYNCCOLL_SECRET is empty"]),
    ("Slurm step", SLURM, ["SLURM_STEP_NUM_TASKS='4'", "Slurm", "ASYNCCOLL_RANK=$SLURM_PROCID"]),
    ("Open MPI", OPEN_MPI, ["OMPI_COMM_WORLD_SIZE='2'", "ASYNCCOLL_RANK=$OMPI_COMM_WORLD_RANK"]),
]


@pytest.mark.parametrize(
    ("environ", "fragments"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_garbled_environment_is_an_error_that_names_it(environ, fragments):
    with pytest.raises(ValueError) as caught:
        detect(environ=environ)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://10.0.0.9:99", None, "env://"])
def test_arguments_win_over_every_variable(address):
    placement = detect(
        address, rank=0, world_size=2, secret="mine", environ={**ASYNCCOLL, "ASYNCCOLL_SECRET": "env"}
    )
    host, port = ("10.0.0.9", 99) if address and address.startswith("tcp") else ("10.0.0.1", 29500)
    found = "arguments" if address and address.startswith("tcp") else "ASYNCCOLL_*"
    assert placement == Placement(0, 2, host, port, secret=b"mine", source="arguments", address_source=found)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("tcp://head:1", "head", 1),
        ("tcp://127.0.0.1:65535", "127.0.0.1", 65535),
        ("tcp://[::1]:29500", "::1", 29500),
        ("tcp://[fe80::1%eth0]:29500", "fe80::1%eth0", 29500),
    ],
)
def test_an_address_gives_host_and_port(address, host, port):
    placement = detect(address, rank=1, world_size=2, environ={})
    assert (placement.host, placement.port) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "file:///shared/dir",
        "head:29500",
        "tcp://head",
        "tcp://head:",
        "tcp://:29500",
        "tcp://::1:29500",
        "tcp://head:29500/",
        "tcp://head:29500?rank=0",
        "http://head:29500",
        "env:",
        "",
        "tcp://[head]:29500",
        "tcp://head:port",
        "tcp://head:0",
        29500,
    ],
)
def test_any_other_address_is_refused_by_name(address):
    with pytest.raises(ValueError) as caught:
        detect(address, rank=0, world_size=2, environ={})
    assert f"address={address!r}" in str(caught.value)


def test_what_address_forms_exist_is_told():
    with pytest.raises(ValueError) as caught:
        detect("file:///shared/dir", rank=0, world_size=2, environ={})
    assert "env://" in str(caught.value)
    assert "tcp://host:port" in str(caught.value)


def test_an_address_with_the_rank_from_the_environment():
    placement = detect("tcp://x:1", environ={"RANK": "1", "WORLD_SIZE": "2"})
    assert placement == Placement(1, 2, "x", 1, source="RANK/WORLD_SIZE", address_source="arguments")


def test_half_of_the_pair_may_come_from_the_environment():
    assert detect("tcp://x:1", rank=1, environ={"WORLD_SIZE": "3"}).size == 3
    assert detect("tcp://x:1", world_size=3, environ={"ASYNCCOLL_RANK": "2"}).rank == 2


@pytest.mark.parametrize(
    ("arguments", "environ", "fragments"),
    [
        (dict(rank=1), {}, ["rank=1", "world_size="]),
        (dict(world_size=2), {}, ["world_size=2", "rank="]),
        (dict(address="tcp://x:1"), {}, ["address='tcp://x:1'", "ASYNCCOLL_RANK", "rank="]),
        (dict(rank=2, world_size=2), {}, ["rank=2", "world_size=2", "outside"]),
        (dict(rank=5), {"WORLD_SIZE": "4"}, ["rank=5", "world size 4 (RANK/WORLD_SIZE)"]),
        (dict(rank=-1, world_size=2), {}, ["rank=-1"]),
        (dict(rank=0, world_size=0), {}, ["world_size=0", "at least 1"]),
        (dict(rank="0", world_size=2), {}, ["rank='0'"]),
        (dict(rank=0.0, world_size=2), {}, ["rank=0.0"]),
        (dict(rank=True, world_size=2), {}, ["rank=True"]),
        (dict(rank=0, world_size=2), {}, ["rank 0 of 2", "address='tcp://host:port'"]),
        (dict(secret=""), {}, ["secret=", "empty"]),
        (dict(secret=b""), {}, ["secret=", "empty"]),
    ],
)
def test_garbled_arguments_are_named(arguments, environ, fragments):
    with pytest.raises(ValueError) as caught:
        detect(**arguments, environ=environ)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_arguments_for_a_world_of_one_need_no_address():
    assert detect(rank=0, world_size=1, environ={}) == Placement(source="arguments")


def test_integers_of_other_types_are_taken():
    class Index:
        def __index__(self):
            return 1

    assert detect("tcp://x:1", rank=Index(), world_size=2, environ={}).rank == 1


def test_foreign_launchers_do_not_matter_where_the_rank_is_given():
    assert detect("tcp://x:1", rank=0, world_size=2, environ=SLURM).source == "arguments"


def test_a_secret_is_never_shown():
    placement = detect(secret="hush", environ={})
    assert placement.secret == b"hush"
    assert "hush" not in repr(placement)


def test_a_new_reader_needs_no_change_to_detect():
    class Pbs:
        source = "PBS"

        def read(self, environ):
            return Finding(rank=int(environ["PBS_RANK"]), size=2) if "PBS_RANK" in environ else None

        def read_rank(self, environ):
            return None

        def read_size(self, environ):
            return None

        def read_address(self, environ):
            return ("pbs-head", 7) if "PBS_RANK" in environ else None

    readers = (*READERS, Pbs())
    found = detect(environ={"PBS_RANK": "1"}, readers=readers)
    assert found == Placement(1, 2, "pbs-head", 7, source="PBS", address_source="PBS")
    assert detect(environ={**PLAIN, "PBS_RANK": "1"}, readers=readers).source == "RANK/WORLD_SIZE"
