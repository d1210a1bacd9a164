"""Compression of gradients to 16-bit floats, for gradients that are sent by calls.

The rounding errors are kept in a *remainder* and added to the gradients of later steps. The
remainder of an element is the sum of its gradients minus what the server has received. It changes
only when a step has been applied: a step that is dropped, skipped or fails does not change it, and
neither does a step in which the parameter has no gradient. A value that is too large for 16 bits is
sent in several steps. Infinities and NaN are sent as they are, and leave no remainder.

State of a `Compressor`: `_remainder`; `_compressed`, the result for the step `_step`, which may
have to be sent again; `_next_remainder`, the remainder after that step. Used by the thread that
steps the optimizer, except `preview`, which only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.ps.gradient_buckets import GradientBucket
from telegrad.ps.layout import DtypeRange, ServerRange
from telegrad.transport import flat_memory

_COMPRESSED_DTYPES = (torch.float32, torch.float64)
_TARGET_DTYPES = (torch.float16, torch.bfloat16)


def check(dtype: torch.dtype | None) -> None:
    """Raise `UsageError` if gradients cannot be compressed to this dtype."""
    if dtype is not None and dtype not in _TARGET_DTYPES:
        supported = " or ".join(map(str, _TARGET_DTYPES))
        raise UsageError(f"gradients can be compressed to {supported}, not to {dtype}")


class Compressor:
    """Compress the gradients of one server's range to `dtype`."""

    def __init__(
        self, server_range: ServerRange, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._server_range = server_range
        self._dtype = dtype
        self._remainder = flat_memory.allocate_private(server_range.nbytes, device)
        self._next_remainder = flat_memory.allocate_private(server_range.nbytes, device)
        self._step = -1
        self._compressed: list[Tensor] = []

    def pack(
        self, step: int, gradients: Tensor, missing: AbstractSet[int] = frozenset()
    ) -> list[Tensor]:
        """Return the compressed gradients of a step, one tensor for each dtype range.

        `missing` are the indices of parameters without a gradient. A second call for the same step
        returns the same tensors.
        """
        if step != self._step:
            self._step = step
            self._compressed = [
                self._pack_dtype_range(each, gradients, missing)
                for each in self._server_range.dtype_ranges
            ]
        return self._compressed

    def commit(self) -> None:
        """Take over the new remainder: the server has applied the step that was packed last."""
        self._remainder, self._next_remainder = self._next_remainder, self._remainder

    def preview(self, bucket: GradientBucket, gradients: Tensor) -> Tensor:
        """Return what `pack` would return for a bucket if its gradients do not change."""
        dtype_range = self._server_range.dtype_ranges[bucket.dtype_range]
        piece = dtype_range.of(gradients)[bucket.first : bucket.last]
        if piece.dtype not in _COMPRESSED_DTYPES:
            return piece.clone()
        total = dtype_range.of(self._remainder)[bucket.first : bucket.last] + piece
        return self._round(total)

    def _pack_dtype_range(
        self, dtype_range: DtypeRange, gradients: Tensor, missing: AbstractSet[int]
    ) -> Tensor:
        gradient = dtype_range.of(gradients)
        if gradient.dtype not in _COMPRESSED_DTYPES:
            return gradient
        remainder = dtype_range.of(self._remainder)
        next_remainder = dtype_range.of(self._next_remainder)
        torch.add(remainder, gradient, out=next_remainder)
        rounded = self._round(next_remainder)
        next_remainder -= rounded
        next_remainder.nan_to_num_(0.0, 0.0, 0.0)
        for part in dtype_range.parts:
            if part.slot.index in missing:
                elements = part.slice_in(dtype_range)
                rounded[elements] = 0
                next_remainder[elements] = remainder[elements]
        return rounded

    def _round(self, values: Tensor) -> Tensor:
        """Round to 16 bits. Finite values stay finite: large ones become the largest float."""
        limit = torch.finfo(self._dtype).max
        rounded = values.clamp(-limit, limit).to(self._dtype)
        is_infinite = values.isinf()
        if is_infinite.any():
            rounded[is_infinite] = values[is_infinite].to(self._dtype)
        return rounded


def unpack(server_range: ServerRange, compressed: Sequence[Tensor]) -> Tensor:
    """Return the gradients of a range, as bytes, from the result of `pack`."""
    gradients = flat_memory.allocate_private(server_range.nbytes, compressed[0].device)
    for dtype_range, piece in zip(server_range.dtype_ranges, compressed, strict=True):
        dtype_range.of(gradients).copy_(piece)
    return gradients
