"""`RowGradients` collects the gradients of a table; `RowsParameter` shows them as `grad`.

Code that works on gradients in PyTorch reads and writes `parameter.grad`: `GradScaler`,
`clip_grad_norm_`, hooks of training frameworks. So a table has a parameter. It has no elements and
requires no gradient, so that nothing counts, initializes or reduces it. Its `grad` has the
gradients of all rows that backward passes have reached since the last step; they are summed on
first access. In-place changes of `grad` change what is sent to the servers.

State of `RowGradients`: `_batches`, the gradients of backward passes, appended by the threads that
run them; `shown`, whether an `Optimizer` steps the table. Otherwise `grad` is None, so that
optimizers of torch ignore the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.ps.embeddings.row_batch import RowBatch, sum_gradients

if TYPE_CHECKING:
    from telegrad.ps.embeddings.tables import Tables


class RowGradients:
    def __init__(self, servers: int) -> None:
        self.shown = False
        self._servers = servers
        self._batches: list[tuple[RowBatch, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, batch: RowBatch, gradient: Tensor) -> None:
        """Add the gradient of one backward pass."""
        self._batches.append((batch, gradient))

    def clear(self) -> None:
        self._batches.clear()

    def sum(self) -> tuple[RowBatch, Tensor]:
        """Return the unique rows that have gradients, and the sums of their gradients."""
        batches = list(self._batches)
        if len(batches) > 1:
            # other threads may append meanwhile, so replace only what was summed
            self._batches[: len(batches)] = [sum_gradients(batches, self._servers)]
        return self._batches[0]

    def replace(self, gradient: Tensor) -> None:
        """Replace the gradients of the same rows."""
        batch, before = self.sum()
        if gradient.shape != before.shape:
            raise UsageError(
                f"the gradients of {len(before)} rows of a table cannot be replaced by a tensor "
                f"of shape {tuple(gradient.shape)}"
            )
        self._batches[0] = batch, gradient


class RowsParameter(nn.Parameter):
    """A parameter without elements whose `grad` is the gradient of the rows of a table."""

    tables: Tables
    _rows: RowGradients

    @classmethod
    def of(cls, rows: RowGradients, tables: Tables, dim: int, dtype: torch.dtype) -> RowsParameter:
        parameter = cls(torch.empty(0, dim, dtype=dtype), requires_grad=False)
        parameter.tables, parameter._rows = tables, rows
        return parameter

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
        """Return a parameter of the same rows, which are on the servers."""
        return RowsParameter.of(self._rows, self.tables, self.shape[1], self.dtype)
