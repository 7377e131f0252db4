"""Decides which secret the ranks prove to one another. Knows files and owners, not how a secret is used.

Explicit secrets win. Without one, processes of one user on one host share a file that only that user can
read; for anything reachable from elsewhere there is no default, because every choice would be a guess or a
hole.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from asynccoll.errors import RendezvousError
from asynccoll.net.sockets import plain_host

__all__ = ["NO_SECRET", "SECRET_BYTES", "is_loopback", "load_secret", "names_a_host"]

NO_SECRET = b""
"""What ``insecure=True`` uses: everybody knows it, so it keeps strangers out by accident only."""

SECRET_BYTES = 32
"""Size of the secret that the per-user file holds: as long as the HMAC-SHA256 that it keys (RFC 2104, section
3).
"""

_FILE = "secret"


def load_secret(explicit: bytes | str | None, host: str | None, insecure: bool) -> bytes:
    """The secret for a mesh whose rank 0 is at ``host``.

    Args:
        explicit: what the user or the launcher gave; text is encoded as UTF-8.
        host: name or address of rank 0; None in a world of one, which proves nothing to anybody.
        insecure: whether the user accepts that anyone who reaches the port may join.

    Returns:
        ``explicit`` if given; the per-user secret if ``host`` is a loopback address or ``localhost`` (a name
        that merely resolves to one does not count: it may resolve to something else on the next host);
        `NO_SECRET` if ``insecure``.

    Raises:
        ValueError: ``explicit`` is empty.
        RendezvousError: ``host`` can be reached from elsewhere and there is no secret, or the per-user file
        is not
            to be trusted.
    """
    if explicit is not None:
        raw = explicit.encode("utf-8", "surrogateescape") if isinstance(explicit, str) else bytes(explicit)
        if not raw:
            raise ValueError("secret is empty: leave it out, or give the same random text to every rank")
        return raw
    if host is None:
        return NO_SECRET
    if is_loopback(host):
        return _per_user_secret()
    if insecure:
        return NO_SECRET
    raise RendezvousError(
        f"rank 0 at {host!r} can be reached from other hosts, and there is no secret to tell ranks from strangers: "
        "set ASYNCCOLL_SECRET to the same random text for every rank (or pass secret=). On a network where every "
        "process is trusted, pass insecure=True. For ranks on this host alone, use 127.0.0.1 as the address.",
        address=host,
    )


def is_loopback(host: str) -> bool:
    """Whether ``host``, as written, can only mean this machine. Nothing is resolved."""
    if host.lower().rstrip(".") == "localhost":  # RFC 6761, section 6.3
        return True
    try:
        return ipaddress.ip_address(plain_host(host)).is_loopback
    except ValueError:
        return False


def names_a_host(host: str) -> bool:
    """Whether ``host``, as written, is a name of its own: no address, and no name that says by itself that it means
    loopback on every host (``localhost``, ``ip6-loopback``, ``localhost.localdomain``).
    """
    name = host.lower()
    if "localhost" in name or "loopback" in name:
        return False
    try:
        socket.inet_aton(host)  # also "127.1" and "2130706433", which resolvers take for addresses
    except (OSError, ValueError):  # ValueError: characters that no address has
        pass
    else:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _per_user_secret() -> bytes:
    """The secret in this user's runtime directory, made by whoever asks first."""
    if not hasattr(os, "geteuid"):
        # Without owners and modes a file proves nothing about who wrote it.
        raise RendezvousError(
            "this platform has no per-user runtime directory: set ASYNCCOLL_SECRET for every rank"
        )
    directory = _runtime_directory()
    try:
        handle = _open_private_directory(directory)
        try:
            return _read_secret(directory, handle) or _create_secret(directory, handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise _untrusted(directory, f"it cannot be used ({error})") from error


def _runtime_directory() -> Path:
    """``$XDG_RUNTIME_DIR/asynccoll``, or ``asynccoll-<uid>`` among the temporary files."""
    uid = os.geteuid()
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/"):
        try:
            # After `sudo -E` or `su` the variable names another user's directory, or one that is gone.
            if os.stat(base).st_uid == uid:
                return Path(base, "asynccoll")
        except OSError:
            pass
    return Path(tempfile.gettempdir(), f"asynccoll-{uid}")


def _open_private_directory(directory: Path) -> int:
    """A descriptor of ``directory``, made if need be, proved to be ours alone."""
    with contextlib.suppress(FileExistsError):  # ours from an earlier run, or planted: the checks below tell
        os.mkdir(directory, 0o700)
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:  # what O_DIRECTORY | O_NOFOLLOW says to a symbolic link, too
        raise _untrusted(directory, "it is a symbolic link or not a directory") from error
    try:
        _check_private(directory, os.fstat(handle))
    except RendezvousError:
        os.close(handle)
        raise
    return handle


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _untrusted(path, f"it belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise _untrusted(path, f"its mode {stat.S_IMODE(status.st_mode):04o} lets other users in")


def _read_secret(directory: Path, handle: int) -> bytes | None:
    path = directory / _FILE
    try:
        # O_NONBLOCK: a planted named pipe would otherwise hang the open.
        file = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _untrusted(path, f"it cannot be opened as a plain file ({error.strerror})") from error
    try:
        status = os.fstat(file)
        _check_private(path, status)
        if not stat.S_ISREG(status.st_mode) or status.st_size != SECRET_BYTES:
            raise _untrusted(path, f"it is not a plain file of {SECRET_BYTES} bytes")
        return os.read(file, SECRET_BYTES)
    finally:
        os.close(file)


def _create_secret(directory: Path, handle: int) -> bytes:
    """Write a new secret under a name of our own, then link it: the first link wins, and is complete when it
    shows.
    """
    draft = f"{_FILE}.{os.getpid()}.{secrets.token_hex(8)}"
    file = os.open(
        draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=handle
    )
    try:
        try:
            os.write(file, secrets.token_bytes(SECRET_BYTES))
        finally:
            os.close(file)
        with contextlib.suppress(FileExistsError):  # another process was first; its secret is the one
            os.link(draft, _FILE, src_dir_fd=handle, dst_dir_fd=handle)
    finally:
        os.unlink(draft, dir_fd=handle)
    secret = _read_secret(directory, handle)
    if secret is None:
        raise _untrusted(directory / _FILE, "it vanished while it was being made")
    return secret


def _untrusted(path: Path, why: str) -> RendezvousError:
    return RendezvousError(
        f"the per-user secret is not to be trusted: {path}: {why}. "
        "Remove it, or set ASYNCCOLL_SECRET to the same random text for every rank."
    )
