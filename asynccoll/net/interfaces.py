"""The network interfaces of this host: their names, and an address of each. Knows no ranks and no connections."""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

__all__ = ["address_towards", "interface_address"]

_SIOCGIFADDR = 0x8915
"""Linux, netdevice(7): the IPv4 address of the interface that the request names."""

_IFREQ = struct.Struct("16s4x4s16x")
"""struct ifreq as that request fills it: name, family and port, IPv4 address, the rest of the union."""

_INET6 = Path("/proc/net/if_inet6")
"""One line for each IPv6 address: 32 hexadecimal digits, index, prefix length, scope, flags, name of the interface."""

_LINK_LOCAL = "20"
"""Scope of an address that means nothing on another host (IPV6_ADDR_LINKLOCAL in the kernel's include/net/ipv6.h)."""

_UNKNOWN = "has an address that cannot be looked up on this platform: give the address itself"


def address_towards(family: socket.AddressFamily, address: tuple[Any, ...]) -> str:
    """This host's address on the way to ``address``, which may be its own. OSError if there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: asks the kernel for the way
        return str(probe.getsockname()[0])


def interface_address(name: str, family: socket.AddressFamily) -> tuple[Any, ...]:
    """An address of the interface ``name``, with port 0, as ``socket.bind`` takes it. Its first one, where it has several.

    Raises:
        LookupError: there is no such interface, it has no address of that family that other hosts could call, or the platform is
            one where that cannot be asked. The message goes on after the name.
    """
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        raise LookupError(f"is not a network interface of this host; there are {', '.join(names)}")
    if family == socket.AF_INET6:
        if not _INET6.exists():
            raise LookupError(_UNKNOWN)
        for line in _INET6.read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != _LINK_LOCAL:
                return str(IPv6Address(int(digits, 16))), 0, 0, 0
        raise LookupError("has no IPv6 address that other hosts could call")
    try:
        import fcntl  # not everywhere
    except ImportError:
        raise LookupError(_UNKNOWN) from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode(), bytes(4)))
        except OSError as error:
            raise LookupError("has no IPv4 address") from error
    return socket.inet_ntoa(_IFREQ.unpack(answer)[1]), 0
