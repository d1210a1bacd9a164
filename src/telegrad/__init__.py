"""Remote calls, remote references, distributed autograd and parameter servers for PyTorch.

>>> import torch.distributed as dist
>>> from telegrad import Agent
>>> store = dist.HashStore()
>>> with Agent("trainer", store=store) as trainer, Agent("server", store=store):
...     trainer.call("server", sum, [1, 2, 3])
6

The names of `__all__` are imported when they are first used, so that the command line starts
without importing torch.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from telegrad import autograd as autograd
    from telegrad import cluster as cluster
    from telegrad import errors as errors
    from telegrad import nn as nn
    from telegrad import optim as optim
    from telegrad import ps as ps
    from telegrad import rpc as rpc
    from telegrad import weights as weights
    from telegrad.agent import Agent as Agent
    from telegrad.agent import current_agent as current_agent
    from telegrad.batching import batched as batched
    from telegrad.config import Config as Config
    from telegrad.current import Deadline as Deadline
    from telegrad.current import WorkerLogFilter as WorkerLogFilter
    from telegrad.current import current_caller as current_caller
    from telegrad.current import current_deadline as current_deadline
    from telegrad.futures import Future as Future
    from telegrad.group.membership import WorkerInfo as WorkerInfo
    from telegrad.launcher.functions import launch as launch
    from telegrad.messages.remote_functions import expose as expose
    from telegrad.refs import RRef as RRef
    from telegrad.refs import remote as remote
    from telegrad.scalars import report as report
    from telegrad.worker_group import GroupResult as GroupResult
    from telegrad.worker_group import WorkerGroup as WorkerGroup

__version__ = "0.1.0"

_PACKAGES = frozenset({"autograd", "cluster", "errors", "nn", "optim", "ps", "rpc", "weights"})
_DEFINED_IN = {
    "Agent": "telegrad.agent",
    "Config": "telegrad.config",
    "Deadline": "telegrad.current",
    "Future": "telegrad.futures",
    "GroupResult": "telegrad.worker_group",
    "RRef": "telegrad.refs",
    "WorkerGroup": "telegrad.worker_group",
    "WorkerInfo": "telegrad.group.membership",
    "WorkerLogFilter": "telegrad.current",
    "batched": "telegrad.batching",
    "current_agent": "telegrad.agent",
    "current_caller": "telegrad.current",
    "current_deadline": "telegrad.current",
    "expose": "telegrad.messages.remote_functions",
    "launch": "telegrad.launcher.functions",
    "remote": "telegrad.refs",
    "report": "telegrad.scalars",
}

__all__ = [
    "Agent",
    "Config",
    "Deadline",
    "Future",
    "GroupResult",
    "RRef",
    "WorkerGroup",
    "WorkerInfo",
    "WorkerLogFilter",
    "autograd",
    "batched",
    "cluster",
    "current_agent",
    "current_caller",
    "current_deadline",
    "errors",
    "expose",
    "launch",
    "nn",
    "optim",
    "ps",
    "remote",
    "report",
    "rpc",
    "weights",
]


def __getattr__(name: str) -> _typing.Any:
    if name in _PACKAGES:
        return _importlib.import_module(f"telegrad.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'telegrad' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(_DEFINED_IN[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
