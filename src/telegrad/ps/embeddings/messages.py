"""The arguments and results of calls between trainers and servers about tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.consistency import Consistency
from telegrad.ps.embeddings.row_hash import initialize
from telegrad.ps.embeddings.row_optimizers import RowOptimizer


@dataclass(frozen=True)
class TablesSpec:
    """The configuration that a trainer sends to one server. It is the same for all trainers."""

    name: str
    server_index: int  # of this server, in `servers`
    servers: tuple[str, ...]  # the first is the leader
    consistency: Consistency
    trainers: int  # that must have joined before training starts
    checkpoint: Checkpoint | None


@dataclass(frozen=True)
class TableSpec:
    """The properties of a table. They are the same for all trainers."""

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    seed: int
    std: float
    padding: int | None = None

    def initialize(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Write the initial values of the rows `ids` into `rows`, and return it."""
        initialize(rows, ids, self.seed, self.std)
        if self.padding is not None:
            rows[ids == self.padding] = 0
        return rows


class TableDefinition(NamedTuple):
    """A table and its optimizer."""

    spec: TableSpec
    optimizer: RowOptimizer


class RowRequest(NamedTuple):
    """Ids of rows of a table: unique, sorted, all on one server."""

    table: str
    ids: Tensor


class RowUpdate(NamedTuple):
    """Gradients of rows on one server, possibly of none. `optimizer` is set if it has changed."""

    table: str
    ids: Tensor
    gradients: Tensor
    optimizer: RowOptimizer | None = None
