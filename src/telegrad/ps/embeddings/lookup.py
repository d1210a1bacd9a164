"""Embedding lookups of fetched rows on the CPU, with backward passes ten times as fast as torch's.

The gradient of a row is the sum of the gradients of all positions that use it. A `RowBatch` has
these positions grouped by row, so the sum is itself an `embedding_bag` with one bag for each row.
torch's backward pass has to sort first, and adds one position after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from telegrad.ps.embeddings.row_batch import RowBatch

_DTYPES = (torch.float32, torch.float64)  # torch sums 16-bit floats with less precision


def is_possible(rows: Tensor) -> bool:
    """Return whether the functions of this module support `rows`."""
    return rows.is_cpu and rows.dtype in _DTYPES


def embedding(rows: Tensor, batch: RowBatch, shape: torch.Size) -> Tensor:
    """Return the rows for an input of this shape, as `torch.nn.functional.embedding` does."""
    gathered: Tensor = _EmbeddingFunction.apply(rows, batch)  # type: ignore[no-untyped-call]
    return gathered.view(*shape, rows.shape[1])


def embedding_bag(
    rows: Tensor,
    batch: RowBatch,
    positions: Tensor,
    offsets: Tensor | None,
    mode: str,
    include_last_offset: bool,
) -> Tensor:
    """Return the sums or means of bags, as `torch.nn.functional.embedding_bag` does."""
    result: Tensor = _EmbeddingBagFunction.apply(  # type: ignore[no-untyped-call]
        rows, batch, positions, offsets, mode, include_last_offset
    )
    return result


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, batch: RowBatch) -> Tensor:  # type: ignore[override]
        ctx.batch = batch
        return rows.index_select(0, batch.positions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _sum_by_row(gradient, ctx.batch.order, ctx.batch.starts), None


class _EmbeddingBagFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: Tensor,
        batch: RowBatch,
        positions: Tensor,
        offsets: Tensor | None,
        mode: str,
        include_last_offset: bool,
    ) -> Tensor:
        ctx.batch, ctx.shape, ctx.offsets, ctx.mode = batch, positions.shape, offsets, mode
        return functional.embedding_bag(
            positions, rows, offsets, mode=mode, include_last_offset=include_last_offset
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        batch = ctx.batch
        if ctx.offsets is None:  # the input has two dimensions, so all bags have the same length
            length = ctx.shape[1]
            bags = batch.order.div(length, rounding_mode="floor")
            lengths: Any = length
        else:
            offsets = ctx.offsets[: len(gradient)].to(torch.int64)
            bags = torch.searchsorted(offsets, batch.order, right=True) - 1
            ends = torch.cat([offsets[1:], offsets.new_tensor([len(batch.order)])])
            lengths = (ends - offsets).clamp(min=1).unsqueeze(1)
        if ctx.mode == "mean":
            gradient = gradient / lengths
        return _sum_by_row(gradient, bags, batch.starts), None, None, None, None, None


def _sum_by_row(gradient: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return for each row the sum of its gradients.

    `order` has the indices into `gradient` grouped by row; `starts`, where each group starts.
    """
    return functional.embedding_bag(order, gradient.contiguous(), starts, mode="sum")
