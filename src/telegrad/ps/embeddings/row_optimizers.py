"""The optimizers of tables. Servers run them on the rows that have a gradient, and on no others.

An optimizer object has no state. `update` gets the state of the rows as tensors, indexed by the
slots of the storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telegrad.errors import UsageError


@dataclass(frozen=True)
class RowSGD:
    """What `torch.optim.SGD` does with a sparse gradient."""

    lr: float = 1e-3

    def __post_init__(self) -> None:
        _check(self.lr >= 0, self)

    def state_spec(self, dim: int) -> dict[str, tuple[int, float]]:
        """Return the state of each row: by name, the number of elements and their first value."""
        return {}

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradients: Tensor, step: int
    ) -> None:
        """Update the rows in `slots`, which are unique. Steps are counted from 1 on."""
        _write(rows, slots, rows.index_select(0, slots).add_(gradients, alpha=-self.lr))


@dataclass(frozen=True)
class RowAdagrad:
    """Adagrad with one accumulator for each row, which sums the mean squares of its gradients.

    With `per_element` there is one for each element, as in `torch.optim.Adagrad`.
    """

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    per_element: bool = False

    def __post_init__(self) -> None:
        _check(self.lr >= 0 and self.eps >= 0 and self.initial_accumulator_value >= 0, self)

    def state_spec(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"sum": (dim if self.per_element else 1, self.initial_accumulator_value)}

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradients: Tensor, step: int
    ) -> None:
        squares = gradients.square()
        if not self.per_element:
            squares = squares.mean(1, keepdim=True)
        sums = state["sum"].index_select(0, slots).add_(squares)
        _write(state["sum"], slots, sums)
        deviations = sums.sqrt_().add_(self.eps)
        values = rows.index_select(0, slots).addcdiv_(gradients, deviations, value=-self.lr)
        _write(rows, slots, values)


@dataclass(frozen=True)
class RowAdam:
    """What `torch.optim.SparseAdam` does: moments change only for rows that have a gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(self.lr >= 0 and self.eps > 0 and all(0 <= beta < 1 for beta in self.betas), self)

    def state_spec(self, dim: int) -> dict[str, tuple[int, float]]:
        return {"exp_avg": (dim, 0.0), "exp_avg_sq": (dim, 0.0)}

    def update(
        self, rows: Tensor, state: Mapping[str, Tensor], slots: Tensor, gradients: Tensor, step: int
    ) -> None:
        beta1, beta2 = self.betas
        mean = state["exp_avg"].index_select(0, slots).lerp_(gradients, 1 - beta1)
        _write(state["exp_avg"], slots, mean)
        square = state["exp_avg_sq"].index_select(0, slots).lerp_(gradients.square(), 1 - beta2)
        _write(state["exp_avg_sq"], slots, square)
        step_size = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        deviations = square.sqrt_().add_(self.eps)
        values = rows.index_select(0, slots).addcdiv_(mean, deviations, value=-step_size)
        _write(rows, slots, values)


RowOptimizer = RowSGD | RowAdagrad | RowAdam


def _write(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write `values` to the rows in `slots`, which are unique.

    numpy copies each row as one item. `index_copy_` takes twice as long.
    """
    _items(rows)[slots.numpy()] = _items(values)


def _items(rows: Tensor) -> NDArray[np.void]:
    """Return an array over the same memory with one item for each row."""
    row_bytes = rows.view(torch.uint8).numpy()
    return row_bytes.view(f"V{row_bytes.shape[1]}")[:, 0]


def _check(valid: bool, optimizer: object) -> None:
    if not valid:
        raise UsageError(f"{optimizer} has an option that is out of its range")
