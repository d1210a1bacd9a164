"""What trainers and servers say to each other about tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from telegrad.ps.consistency import Consistency
from telegrad.ps.embeddings.row_optimizers import RowOptimizer
from telegrad.ps.embeddings.row_storage import TableSpec
from telegrad.ps.server.checkpoint import Checkpoint


@dataclass(frozen=True)
class TablesSpec:
    """What trainers tell a server when they come to it. All of them say the same."""

    name: str
    number: int  # of this server
    servers: tuple[str, ...]  # the first leads
    consistency: Consistency
    trainers: int  # that must have come before anybody starts
    checkpoint: Checkpoint | None


class TableDefinition(NamedTuple):
    """A table, and how it is trained."""

    shape: TableSpec
    rule: RowOptimizer


class RowRequest(NamedTuple):
    """Rows of a table: unique, sorted, all of one server."""

    table: str
    ids: Tensor


class RowUpdate(NamedTuple):
    """Gradients of rows, which may be none; `rule` if it has changed."""

    table: str
    ids: Tensor
    gradients: Tensor
    rule: RowOptimizer | None = None
