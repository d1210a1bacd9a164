"""Booby traps: with Telegrad under test, nothing may reach torch's own RPC engine or its C++
distributed autograd.

Whoever does gets an error, and the name is written to the file that `$CONFORMANCE_TRIPPED` names,
so that the test fails even if it expected an error.
"""

import inspect
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed.autograd
import torch.distributed.rpc

TRIPPED = "CONFORMANCE_TRIPPED"


def arm() -> None:
    """Trap every function of the two C++ modules, wherever torch has imported it, and making an
    agent or an RRef.
    """
    rpc, autograd = torch._C._distributed_rpc, torch._C._distributed_autograd
    for cls in (rpc.TensorPipeAgent, rpc.PyRRef):
        cls.__init__ = _trap(f"{rpc.__name__}.{cls.__name__}")  # type: ignore[method-assign]
    traps = {
        function: _trap(f"{module.__name__}.{name}")
        for module in (rpc, autograd)
        for name, function in _own(module)
    }
    loaded = [
        m
        for n, m in sys.modules.items()
        if n.startswith(("torch.distributed.rpc", "torch.distributed.autograd"))
    ]
    for module in (rpc, autograd, *loaded):
        for name, function in _own(module):
            if function in traps:
                setattr(module, name, traps[function])


def _own(module: ModuleType) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if inspect.isbuiltin(value)]


def _trap(name: str) -> Any:
    def trap(*args: object, **kwargs: object) -> NoReturn:
        with open(os.environ[TRIPPED], "a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        raise RuntimeError(f"conformance guard: torch's own {name} was used")

    trap.__module__ = name.rpartition(".")[0]  # it is known as torch's where names are redirected
    return trap
