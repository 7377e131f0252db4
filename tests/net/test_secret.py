"""Which secret is used, and which files are not believed."""

import os
import stat
import subprocess
import sys
import tempfile

import pytest

from asynccoll.errors import RendezvousError
from asynccoll.net import secret as secret_module
from asynccoll.net.secret import NO_SECRET, SECRET_BYTES, is_loopback, load_secret, names_a_host


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """An XDG runtime directory of our own; the secret goes into its subdirectory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "asynccoll"


def refused():
    with pytest.raises(RendezvousError) as caught:
        load_secret(None, "127.0.0.1", insecure=False)
    message = str(caught.value)
    assert "ASYNCCOLL_SECRET" in message
    return message


@pytest.mark.parametrize("host", ["127.0.0.1", "head", None])
@pytest.mark.parametrize("insecure", [True, False])
def test_an_explicit_secret_wins_everywhere(host, insecure, runtime):
    assert load_secret("gehëim", host, insecure) == "gehëim".encode()
    assert load_secret(b"\x00\xff", host, insecure) == b"\x00\xff"
    assert not runtime.exists()


@pytest.mark.parametrize("empty", ["", b""])
def test_an_empty_secret_is_a_mistake(empty):
    with pytest.raises(ValueError, match="empty"):
        load_secret(empty, "127.0.0.1", insecure=True)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST", "localhost."]
)
def test_loopback_uses_the_secret_of_the_user(host, runtime):
    assert is_loopback(host)
    secret = load_secret(None, host, insecure=False)
    assert len(secret) == SECRET_BYTES
    assert secret == load_secret(None, host, insecure=True)
    assert secret == (runtime / "secret").read_bytes()


@pytest.mark.parametrize(
    "host", ["head", "node7.example.org", "HEAD.", "7", "b\u00fccher", "fe80::1%eth0", "::1", "0.0.0.0"]
)
def test_what_names_a_host_is_no_address_in_any_form(host):
    names = {"head", "node7.example.org", "HEAD.", "b\u00fccher"}
    assert names_a_host(host) == (host in names)


@pytest.mark.parametrize(
    "host",
    ["localhost", "Localhost.", "a.localhost", "ip6-localhost", "LOOPBACK", "127.1", "0x7f.1", "2130706433"],
)
def test_what_says_by_itself_that_it_means_loopback_names_no_host(host):
    assert not names_a_host(host)


@pytest.mark.parametrize("host", ["head", "10.0.0.1", "0.0.0.0", "::", "fd00::1", "localhost.example.org"])
def test_a_wide_address_needs_a_secret_or_an_explicit_waiver(host, runtime):
    assert not is_loopback(host)
    with pytest.raises(RendezvousError) as caught:
        load_secret(None, host, insecure=False)
    assert "ASYNCCOLL_SECRET" in str(caught.value)
    assert "insecure=True" in str(caught.value)
    assert caught.value.address == host
    assert load_secret(None, host, insecure=True) == NO_SECRET
    assert not runtime.exists()


def test_a_world_of_one_makes_no_file(runtime):
    assert load_secret(None, None, insecure=False) == NO_SECRET
    assert not runtime.exists()


def test_only_the_user_can_read_the_file(runtime):
    mask = os.umask(0)
    try:
        load_secret(None, "127.0.0.1", insecure=False)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE((runtime / "secret").stat().st_mode) == 0o600
    assert [entry.name for entry in runtime.iterdir()] == ["secret"]


def test_two_users_directories_have_different_secrets(tmp_path, monkeypatch):
    secrets = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / name))
        secrets.add(load_secret(None, "127.0.0.1", insecure=False))
    assert len(secrets) == 2


@pytest.mark.parametrize("xdg", [None, "", "relative", "/nonexistent/run"])
def test_without_a_runtime_directory_it_is_among_the_temporary_files(xdg, tmp_path, monkeypatch):
    if xdg is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", xdg)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    secret = load_secret(None, "127.0.0.1", insecure=False)
    assert (tmp_path / f"asynccoll-{os.geteuid()}" / "secret").read_bytes() == secret


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_runtime_directory_is_not_used(tmp_path, monkeypatch):
    theirs, temporary = tmp_path / "theirs", tmp_path / "tmp"
    theirs.mkdir()
    temporary.mkdir()
    os.chown(theirs, 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(theirs))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    load_secret(None, "127.0.0.1", insecure=False)
    assert (temporary / "asynccoll-0" / "secret").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["directory", "file"])
def test_what_another_user_owns_is_not_believed(runtime, which):
    load_secret(None, "127.0.0.1", insecure=False)
    victim = runtime if which == "directory" else runtime / "secret"
    os.chown(victim, 12345, -1)
    message = refused()
    assert "belongs to user 12345" in message
    assert str(victim) in message


@pytest.mark.parametrize("which", ["directory", "file"])
@pytest.mark.parametrize("mode", [0o040, 0o004, 0o022])
def test_what_others_may_open_is_not_believed(runtime, which, mode):
    load_secret(None, "127.0.0.1", insecure=False)
    victim = runtime if which == "directory" else runtime / "secret"
    victim.chmod(victim.stat().st_mode | mode)
    assert "lets other users in" in refused()


def test_a_linked_directory_is_not_followed(runtime, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    runtime.symlink_to(elsewhere)
    assert "symbolic link" in refused()
    assert not list(elsewhere.iterdir())


def test_a_linked_file_is_not_followed(runtime, tmp_path):
    planted = tmp_path / "planted"
    planted.write_bytes(bytes(SECRET_BYTES))
    planted.chmod(0o600)
    runtime.mkdir(mode=0o700)
    (runtime / "secret").symlink_to(planted)
    assert "cannot be opened as a plain file" in refused()


def test_a_plain_file_in_place_of_the_directory_is_refused(runtime):
    runtime.touch(mode=0o600)
    assert "not a directory" in refused()


def test_a_named_pipe_is_refused_without_waiting_for_its_writer(runtime):
    runtime.mkdir(mode=0o700)
    os.mkfifo(runtime / "secret", 0o600)
    assert "not a plain file" in refused()


@pytest.mark.parametrize("size", [0, SECRET_BYTES - 1, SECRET_BYTES + 1])
def test_a_file_of_another_size_is_refused(runtime, size):
    runtime.mkdir(mode=0o700)
    (runtime / "secret").write_bytes(bytes(size))
    (runtime / "secret").chmod(0o600)
    assert f"{SECRET_BYTES} bytes" in refused()


def test_who_comes_second_takes_the_secret_of_the_first(runtime, monkeypatch):
    """Another process makes the file just after this one has found none."""
    real = secret_module._read_secret
    seen = []

    def read(directory, handle):
        seen.append(real(directory, handle))
        if len(seen) == 1:
            (directory / "secret").write_bytes(b"1" * SECRET_BYTES)
            (directory / "secret").chmod(0o600)
        return seen[-1]

    monkeypatch.setattr(secret_module, "_read_secret", read)
    assert load_secret(None, "127.0.0.1", insecure=False) == b"1" * SECRET_BYTES
    assert seen[0] is None
    assert [entry.name for entry in runtime.iterdir()] == ["secret"]


# Forks 64 processes that wait for one pipe to close, then ask at once; prints what each got.
CROWD = """
import os, sys
from asynccoll.net import secret as secret_module
from asynccoll.net.secret import load_secret
ready, go = os.pipe()
results, report = os.pipe()
children = []
for _ in range(64):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        os.write(report, load_secret(None, "127.0.0.1", False).hex().encode() + b"\\n")
        os._exit(0)
    children.append(child)
os.close(go)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
os.close(report)
sys.stdout.write(open(results).read())
"""


def test_64_processes_that_start_at_once_get_one_secret(runtime):
    done = subprocess.run(
        [sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=60, check=True
    )
    answers = done.stdout.split()
    assert len(answers) == 64
    assert set(answers) == {(runtime / "secret").read_bytes().hex()}
    assert [entry.name for entry in runtime.iterdir()] == ["secret"]
