"""Parameter servers: workers that hold the parameters of a model and update them for many trainers.

To a trainer, a parameter server is a `torch.optim.Optimizer`; large tables are modules whose rows live there.
"""

from telegrad.ps.checkpoint import Checkpoint
from telegrad.ps.consistency import Async, Stale, Sync
from telegrad.ps.optimizer import Optimizer
from telegrad.ps.tables.group import Tables
from telegrad.ps.tables.modules import Embedding, EmbeddingBag, prefetch
from telegrad.ps.tables.rules import RowAdagrad, RowAdam, RowSGD

__all__ = [
    "Async",
    "Checkpoint",
    "Embedding",
    "EmbeddingBag",
    "Optimizer",
    "RowAdagrad",
    "RowAdam",
    "RowSGD",
    "Stale",
    "Sync",
    "Tables",
    "prefetch",
]
