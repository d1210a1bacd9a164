"""What a worker knows of its host: an id, and the addresses of its network interfaces."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: get the IPv4 address of an interface
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = "/proc/self/ns/net"


@functools.cache
def host_id() -> str:
    """Return a text that two processes share if one can reach the unix sockets of the other.

    It changes when the host restarts, and is another one in each network namespace.
    """
    try:
        parts = [_BOOT_ID.read_text().strip(), str(os.stat(_NETWORK_NAMESPACE).st_ino)]
    except OSError:  # not Linux
        parts = [socket.gethostname()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface of this host."""
    found: dict[str, list[str]] = {}
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                try:
                    request = struct.pack("256s", name.encode()[:15])
                    reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
                except OSError:  # it has no IPv4 address
                    continue
                found.setdefault(name, []).append(socket.inet_ntoa(reply[20:24]))
        try:
            lines = Path("/proc/net/if_inet6").read_text().splitlines()
        except OSError:  # no IPv6
            lines = []
        for line in lines:
            digits, *_, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def describe_interfaces() -> str:
    """Return the network interfaces of this host for a message."""
    texts = [f"{name} {', '.join(addresses)}" for name, addresses in interfaces().items()]
    return "; ".join(texts) or "unknown"


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can use an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
