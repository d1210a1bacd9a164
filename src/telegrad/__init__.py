"""Remote calls, remote references, distributed autograd and parameter servers for PyTorch.

>>> import torch.distributed as dist
>>> from telegrad import Agent
>>> store = dist.HashStore()
>>> with Agent("trainer", store=store) as trainer, Agent("server", store=store):
...     trainer.call("server", sum, [1, 2, 3])
6
"""

from telegrad import openmp as _idling  # noqa: F401  # first: importing torch, below, loads what reads its setting

# isort: split

from telegrad import autograd, errors, nn, optim, ps, rpc
from telegrad.agent import Agent, current_agent
from telegrad.batching import batched
from telegrad.config import Config
from telegrad.current import current_caller, current_deadline
from telegrad.deadline import Deadline
from telegrad.futures import Future
from telegrad.group.membership import WorkerInfo
from telegrad.refs import RRef, remote
from telegrad.runtime import expose

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "Config",
    "Deadline",
    "Future",
    "RRef",
    "WorkerInfo",
    "autograd",
    "batched",
    "current_agent",
    "current_caller",
    "current_deadline",
    "errors",
    "expose",
    "nn",
    "optim",
    "ps",
    "remote",
    "rpc",
]
