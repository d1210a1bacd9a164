"""`RowGradients`: the gradients of a table's rows since the last step, and `RowsParameter`, which shows them to torch.

Whoever works on gradients in PyTorch reads and writes `parameter.grad`: `GradScaler`, `clip_grad_norm_`, hooks of
training frameworks. A table that an `Optimizer` steps has a parameter for them. It has no elements and requires no
gradient, so nothing counts, initialises or reduces it, but its `grad` has a line for each row that the backward passes
have reached, which are added up when somebody asks. What is done to it in place is what the servers get.

State of a `RowGradients`: `_parts`, what backward passes have left, to which whoever runs one appends; `shown`, whether
an `Optimizer` steps the table. Without one, `grad` is None, so that optimizers of torch leave the parameter alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.ps.embeddings.row_batch import RowBatch, total

if TYPE_CHECKING:
    from telegrad.ps.embeddings.tables import Tables


class RowGradients:
    def __init__(self, servers: int) -> None:
        self.shown = False
        self._servers = servers
        self._parts: list[tuple[RowBatch, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, batch: RowBatch, gradient: Tensor) -> None:
        self._parts.append((batch, gradient))

    def clear(self) -> None:
        self._parts.clear()

    def sum(self) -> tuple[RowBatch, Tensor]:
        """Return the rows that have gradients, each once, and their gradients."""
        parts = list(self._parts)
        if len(parts) > 1:
            self._parts[: len(parts)] = [total(parts, self._servers)]
        return self._parts[0]

    def replace(self, gradient: Tensor) -> None:
        """Take other gradients for the same rows."""
        batch, before = self.sum()
        if gradient.shape != before.shape:
            raise UsageError(
                f"the gradients of {len(before)} rows of a table cannot be replaced by a tensor of "
                f"shape {tuple(gradient.shape)}"
            )
        self._parts[0] = batch, gradient


class RowsParameter(nn.Parameter):
    """A parameter without elements whose `grad` is that of the rows of a table."""

    tables: Tables
    _rows: RowGradients

    @classmethod
    def of(cls, rows: RowGradients, tables: Tables, dim: int, dtype: torch.dtype) -> RowsParameter:
        made = cls(torch.empty(0, dim, dtype=dtype), requires_grad=False)
        made.tables, made._rows = tables, rows
        return made

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        rows = self._rows
        return rows.sum()[1] if rows.shown and rows else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self._rows.clear()
        else:
            self._rows.replace(value)

    @grad.deleter
    def grad(self) -> None:
        self._rows.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowsParameter:
        """Return a parameter of the same rows, which are on servers."""
        if id(self) not in memo:
            copied = RowsParameter.of(self._rows, self.tables, self.shape[1], self.dtype)
            memo[id(self)] = copied
        found: RowsParameter = memo[id(self)]
        return found
