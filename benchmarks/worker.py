"""A process of a peer's group: join the group, run loops on command, answer over a pipe.

The argument is the file descriptor of the pipe. The process ends on command, when the pipe closes,
and when its parent dies.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import limits, peers, remote, worlds
from benchmarks.measure import LOOPS, Measured
from benchmarks.peers.base import Peer, Place
from benchmarks.processes import die_with_parent


class Commands:
    """The commands of the parent, by method name."""

    def __init__(self) -> None:
        self.peer: Peer | None = None

    def start(self, adapter: str, place: dict[str, Any]) -> None:
        self.peer = peers.load(adapter)
        self.peer.start(Place(**place))

    def check(self, builtin: bool) -> None:
        """Check that every function returns the same values as in this process."""
        peer, x = self.joined(), torch.arange(4096.0)
        if not torch.equal(peer.call(remote.echo)(x), x) or not torch.equal(
            peer.call(remote.add)(x, 1), x + 1
        ):
            raise ValueError("a tensor was changed")
        if peer.call(remote.sink)(x) != 4095.0 or peer.call(remote.add)(1, 1) != 2:
            raise ValueError("a value was changed")
        things = peer.call(remote.container)("tensors", 3)  # not all peers send arrays
        if peer.call(remote.count)(things) != 3 or [list(each) for each in things] != [[1.0]] * 3:
            raise ValueError("a container was changed")
        if peer.result(peer.submit(remote.add)(1, 1)) != 2:
            raise ValueError("an asynchronous call returned a wrong value")
        if builtin and not torch.equal(peer.call(torch.add)(x, 1), x + 1):
            raise ValueError("a builtin returned a wrong value")

    def measure(self, loop: str, seconds: float, params: dict[str, Any]) -> Measured:
        return LOOPS[loop](self.joined(), seconds, **params)

    def limit(self, loop: str, seconds: float, params: dict[str, Any]) -> Measured:
        return limits.LOOPS[loop](seconds, **params)

    def world(self, peer: str, size: int) -> dict[str, float]:
        return worlds.measure(peer, size)

    def versions(self, package: str) -> dict[str, str]:
        return {
            "python": platform.python_version(),
            package: version(package),
            "torch": str(torch.__version__),
        }

    def joined(self) -> Peer:
        if self.peer is None:
            raise RuntimeError("this process has not started its peer")
        return self.peer


def version(package: str) -> str:
    for name in (package, *importlib.metadata.packages_distributions().get(package, [])):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    # not installed, but found on the path
    return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def serve(pipe: Connection) -> None:
    commands = Commands()
    while (message := receive(pipe))[0] != "stop":
        pipe.send(outcome(getattr(commands, message[0]), message[1:]))
    if commands.peer is not None:
        commands.peer.stop()


def receive(pipe: Connection) -> tuple[Any, ...]:
    try:
        message: tuple[Any, ...] = pipe.recv()
        return message
    except EOFError:  # the parent has ended
        os._exit(1)


def outcome(command: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, command(*args)
    except Exception:
        return False, traceback.format_exc()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    die_with_parent()
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # do not wait for remaining threads of the peer
