"""Hosts as network namespaces of this machine, joined by a bridge; links can be cut and healed.

    with Network(3) as network:
        subprocess.run([*network.hosts[0].prefix, "ping", "-c1", network.hosts[1].address])
        network.cut(1)
        network.heal(1)

The bridge is in a namespace of its own, the switch, and has an address, too: a proxy can run there.
Every namespace has its own abstract unix sockets, so workers on two hosts have only TCP in common.
It needs root and the `ip` command of iproute2.

Hardware addresses are fixed and known to all hosts. A cut of one direction replaces them by an
address that no host has, so packets are lost without an error, as in a fault of the network. The
names of namespaces contain the id of the process that made them. What a killed process left is
removed when the next network is made.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["INTERFACE", "Host", "Network", "enter", "hindrance"]

INTERFACE = "eth0"
_SUBNET = "10.77.0"
_SWITCH = 254  # the last part of its address
_NOBODY = "02:00:00:00:00:ff"
_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"telegrad-(\d+)-\d+-\w+")

_counter = itertools.count()


@dataclass(frozen=True)
class Host:
    """A namespace and its address."""

    namespace: str
    number: int

    @property
    def address(self) -> str:
        return f"{_SUBNET}.{self.number}"

    @property
    def hardware_address(self) -> str:
        return f"02:00:00:00:00:{self.number:02x}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """The beginning of a command line that runs a program on this host."""
        return ("ip", "netns", "exec", self.namespace)


def hindrance() -> str:
    """Return the reason why no network can be made here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the ip command (iproute2) is not installed"
    probe = f"telegrad-{os.getpid()}-{next(_counter)}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "switch", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this system allows no network namespaces: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return ""


def enter(host: Host) -> None:
    """Move the calling thread to a host. Threads and processes that it starts are there, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(Path("/var/run/netns", host.namespace)) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")


class Network:
    """Hosts with one interface each, and the switch between them."""

    def __init__(self, size: int) -> None:
        _remove_abandoned()
        tag = f"telegrad-{os.getpid()}-{next(_counter)}"
        self.hosts = [Host(f"{tag}-host{number}", number) for number in range(1, size + 1)]
        self.switch = Host(f"{tag}-switch", _SWITCH)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        switch = self.switch.namespace
        for host in (self.switch, *self.hosts):
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", INTERFACE, "type", "bridge")
        for host in self.hosts:
            pair = f"link add {INTERFACE} netns {host.namespace} type veth peer name {_port(host)}"
            _ip(*pair.split(), "netns", switch)
            _ip("-n", switch, "link", "set", _port(host), "master", INTERFACE, "up")
        for host in (self.switch, *self.hosts):
            _ip("-n", host.namespace, "link", "set", INTERFACE, "address", host.hardware_address)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.namespace, "link", "set", INTERFACE, "up")
        for index in range(len(self.hosts)):
            self.heal(index)

    def cut(self, index: int) -> None:
        """Take the cable of a host away: nothing comes out and nothing goes in."""
        host = self.hosts[index]
        _ip("-n", self.switch.namespace, "link", "set", _port(host), "down")

    def cut_sending(self, index: int) -> None:
        """Lose what a host sends; it still receives."""
        for other in self._others(self.hosts[index]):
            _set_neighbour(self.hosts[index], other, _NOBODY)

    def cut_receiving(self, index: int) -> None:
        """Lose what the others send to a host; what it sends still arrives."""
        for other in self._others(self.hosts[index]):
            _set_neighbour(other, self.hosts[index], _NOBODY)

    def heal(self, index: int) -> None:
        """Undo every cut of a host."""
        host = self.hosts[index]
        _ip("-n", self.switch.namespace, "link", "set", _port(host), "up")
        for other in self._others(host):
            _set_neighbour(host, other, other.hardware_address)
            _set_neighbour(other, host, host.hardware_address)

    def _others(self, host: Host) -> Iterable[Host]:
        return (each for each in (self.switch, *self.hosts) if each != host)

    def close(self) -> None:
        """Remove the namespaces. They exist on until the last process in them has ended."""
        for host in (self.switch, *self.hosts):
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def _port(host: Host) -> str:
    return f"port{host.number}"


def _set_neighbour(host: Host, other: Host, hardware_address: str) -> None:
    entry = f"neigh replace {other.address} lladdr {hardware_address} dev {INTERFACE}"
    _ip("-n", host.namespace, *entry.split(), "nud", "permanent")


def _remove_abandoned() -> None:
    """Remove the namespaces of processes that have ended."""
    for line in _ip("netns", "list").splitlines():
        match = _NAME.match(line)
        if match and not Path("/proc", match[1]).exists():
            _ip("netns", "del", match[0])


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
