"""Parameter servers: workers that hold the parameters of a model and update them for trainers.

A trainer uses `Optimizer`, which is a `torch.optim.Optimizer`, and for large embedding tables the
modules `Embedding` and `EmbeddingBag`, whose rows are on the servers. Workers need no code of their
own to be servers.

`ps.trainer` and `ps.server` are the two sides. They know each other's remote functions, and share
only the modules of this package: messages, layout, buckets, compression and the
consistency rules. `ps.embeddings` has both sides of embedding tables.
"""

from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.consistency import Async, Stale, Sync
from telegrad.ps.embeddings.modules import Embedding, EmbeddingBag, prefetch
from telegrad.ps.embeddings.row_optimizers import RowAdagrad, RowAdam, RowSGD
from telegrad.ps.embeddings.tables import Tables
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
