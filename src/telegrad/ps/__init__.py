"""Parameter servers: workers that hold the parameters of a model and update them for many trainers.

To a trainer, a parameter server is a `torch.optim.Optimizer`.
"""

from telegrad.ps.checkpoint import Checkpoint
from telegrad.ps.consistency import Async, Stale, Sync
from telegrad.ps.optimizer import Optimizer

__all__ = ["Async", "Checkpoint", "Optimizer", "Stale", "Sync"]
