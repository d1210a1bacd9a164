"""Parameter servers: workers that hold the parameters of a model and update them for many trainers.

To a trainer, a parameter server is a `torch.optim.Optimizer`; large tables are modules whose rows live there.
"""

from telegrad.ps.consistency import Async, Stale, Sync
from telegrad.ps.embeddings.modules import Embedding, EmbeddingBag, prefetch
from telegrad.ps.embeddings.row_optimizers import RowAdagrad, RowAdam, RowSGD
from telegrad.ps.embeddings.tables import Tables
from telegrad.ps.server.checkpoint import Checkpoint
from telegrad.ps.trainer.optimizer import Optimizer

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
