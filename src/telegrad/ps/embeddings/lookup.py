"""Embeddings of fetched rows on the CPU, with backward passes that take a tenth of the time of torch's.

The gradient of a row is the sum of the gradients of all places where it was used. A `RowBatch` knows these places row
by row, so the sum is an `embedding_bag` itself: one bag for each row. torch's backward pass has to sort first, and adds
up one place after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from telegrad.ps.embeddings.row_batch import RowBatch

_DTYPES = (torch.float32, torch.float64)  # torch adds up 16-bit floats with less precision


def is_possible(rows: Tensor) -> bool:
    """Return whether `rows` can be used here."""
    return rows.is_cpu and rows.dtype in _DTYPES


def embedding(rows: Tensor, batch: RowBatch, shape: torch.Size) -> Tensor:
    """Return the rows of a batch of that shape, as `torch.nn.functional.embedding` does."""
    gathered: Tensor = _Embedding.apply(rows, batch)  # type: ignore[no-untyped-call]
    return gathered.view(*shape, rows.shape[1])


def embedding_bag(
    rows: Tensor,
    batch: RowBatch,
    places: Tensor,
    offsets: Tensor | None,
    mode: str,
    include_last_offset: bool,
) -> Tensor:
    """Return the sums or means of bags, as `torch.nn.functional.embedding_bag` does."""
    result: Tensor = _EmbeddingBag.apply(  # type: ignore[no-untyped-call]
        rows, batch, places, offsets, mode, include_last_offset
    )
    return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, batch: RowBatch) -> Tensor:  # type: ignore[override]
        ctx.batch = batch
        return rows.index_select(0, batch.places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _by_row(gradient, ctx.batch.order, ctx.batch.starts), None


class _EmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        rows: Tensor,
        batch: RowBatch,
        places: Tensor,
        offsets: Tensor | None,
        mode: str,
        include_last_offset: bool,
    ) -> Tensor:
        ctx.batch, ctx.shape, ctx.offsets, ctx.mode = batch, places.shape, offsets, mode
        return functional.embedding_bag(
            places, rows, offsets, mode=mode, include_last_offset=include_last_offset
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        batch = ctx.batch
        if ctx.offsets is None:  # all bags are of one length
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
        return _by_row(gradient, bags, batch.starts), None, None, None, None, None


def _by_row(gradient: Tensor, lines: Tensor, starts: Tensor) -> Tensor:
    """Add up the lines of a gradient that belong to one row."""
    return functional.embedding_bag(lines, gradient.contiguous(), starts, mode="sum")
