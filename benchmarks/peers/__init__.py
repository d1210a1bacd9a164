"""The peers: what each needs to run. Nothing here imports one; that happens in the processes of its group."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass

from benchmarks.peers.base import CALLEE, Peer, Place

__all__ = ["CALLEE", "PEERS", "Peer", "PeerSpec", "Place", "load"]


@dataclass(frozen=True)
class PeerSpec:
    """How to find and treat a peer."""

    name: str
    adapter: str  # "module:class" or "module:class:argument"
    package: str
    builtin: bool = False  # can call a torch operator without a Python function around it
    spins: bool = False  # its idle processes keep a core busy: they are stopped while they are not measured
    on_request: bool = False  # runs only when asked for by name

    @property
    def python(self) -> str:
        """The interpreter with this peer installed: `TELEGRAD_BENCH_PYTHON_RAY=/path/to/python` names another one."""
        return os.environ.get(f"TELEGRAD_BENCH_PYTHON_{self.name.upper().replace('-', '_')}", sys.executable)


_SPECS = (
    PeerSpec("telegrad", "torch_rpc:TorchShaped:telegrad.rpc", "telegrad", builtin=True),
    PeerSpec("torch", "torch_rpc:TorchShaped:torch.distributed.rpc", "torch", builtin=True, spins=True),
    PeerSpec("torch-uv", "torch_rpc:TorchOverTcp", "torch", builtin=True, on_request=True),
    PeerSpec("moolib", "moolib_rpc:Moolib", "moolib", spins=True),
    PeerSpec("ray", "ray_actor:Ray", "ray"),
    PeerSpec("rpyc", "rpyc_service:Rpyc", "rpyc"),
)
PEERS = {spec.name: spec for spec in _SPECS}


def load(adapter: str) -> Peer:
    """The peer that `PeerSpec.adapter` names."""
    module, name, *arguments = adapter.split(":")
    factory = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)
    peer: Peer = factory(*arguments)
    return peer
