"""The peers and their requirements.

This module imports no peer; the processes of a group import theirs.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.base import CALLEE, Peer, Place
from benchmarks.processes import import_path

__all__ = ["CALLEE", "PEERS", "Peer", "PeerSpec", "Place", "folder", "installed", "load"]


@dataclass(frozen=True)
class PeerSpec:
    """How to find and run a peer."""

    name: str
    adapter: str  # "module:class" or "module:class:argument"
    package: str
    about: str  # the configuration, and what the adapter does
    builtin: bool = False  # can call a torch operator without a Python function
    # idle processes keep a core busy: they are stopped while they are not measured
    spins: bool = False
    forks: bool = True  # works in a process that was forked after the import
    on_request: bool = False  # runs only if it is named
    # environment variables of its processes
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter with this peer installed.

        `TELEGRAD_BENCH_PYTHON_RAY=/path/to/python` selects it. The default is the interpreter that
        `telegrad bench peers` created and, if there is none, this interpreter.
        """
        own = folder() / self.name / "bin" / "python"
        default = str(own) if own.exists() else sys.executable
        return os.environ.get(
            f"TELEGRAD_BENCH_PYTHON_{self.name.upper().replace('-', '_')}", default
        )


def folder() -> Path:
    """Return the folder of the environments: `TELEGRAD_BENCH_PEERS`, or one in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TELEGRAD_BENCH_PEERS") or Path(cache, "telegrad", "peers"))


_SPECS = (
    PeerSpec(
        "telegrad",
        "torch_rpc:TorchShaped:telegrad.rpc",
        "telegrad",
        "default configuration, through `telegrad.rpc`: unix sockets, and shared memory for large tensors",
        builtin=True,
    ),
    PeerSpec(
        "torch",
        "torch_rpc:TorchShaped:torch.distributed.rpc",
        "torch",
        "`torch.distributed.rpc`, default options: on one machine TensorPipe chooses its shared-memory transport",
        builtin=True,
        spins=True,
    ),
    PeerSpec(
        "torch-uv",
        "torch_rpc:TorchOverTcp",
        "torch",
        "`torch.distributed.rpc` over TCP only",
        builtin=True,
        on_request=True,
    ),
    PeerSpec(
        "moolib",
        "moolib_rpc:Moolib",
        "moolib",
        "functions served by name, default transports (shared memory on one machine)",
        spins=True,
        forks=False,
    ),
    PeerSpec(
        "ray",
        "ray_actor:Ray",
        "ray",
        "one named actor; the callers are drivers of one local cluster, large values go through its "
        "object store, where tensors are read without a copy",
        environment={
            "RAY_AUTH_MODE": "token",
            "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
        },  # with a token, processes other than children can join
    ),
    PeerSpec(
        "monarch",
        "monarch_actor:Monarch",
        "monarch",
        "one actor on this host, called with `call_one` by clients that hold a reference to it; default transport",
        forks=False,
    ),
    PeerSpec(
        "grpc",
        "grpc_service:Grpc",
        "grpc",
        "a server with ten threads on a unix socket, no limit on the size of messages; tensors as bytes",
    ),
    PeerSpec(
        "rpyc",
        "rpyc_service:Rpyc",
        "rpyc",
        "a threaded server over TCP; tensors as bytes, since RPyC would pass them by reference",
    ),
)
PEERS = {spec.name: spec for spec in _SPECS}


def load(adapter: str) -> Peer:
    """Return the peer that `PeerSpec.adapter` names."""
    module, name, *arguments = adapter.split(":")
    factory = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)
    peer: Peer = factory(*arguments)
    return peer


def installed(spec: PeerSpec) -> bool:
    """Check in the peer's own interpreter, without importing the peer."""
    code = f"import sys, importlib.util as u; sys.exit(u.find_spec({spec.package!r}) is None)"
    environment = {**os.environ, "PYTHONPATH": import_path()}
    try:
        return (
            subprocess.run(
                [spec.python, "-c", code], env=environment, timeout=60, check=False
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
