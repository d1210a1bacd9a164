"""Gradients as 16-bit floats where they travel by calls. What rounding takes away is kept and added to the next ones.

State of a `Compressor`: the rest of each element that has not been sent, and what was made for the last step, in case
it must be sent again: compressing twice would add the rest twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.ps import segments
from telegrad.ps.buckets import Bucket
from telegrad.ps.layout import Share

_LARGE = (torch.float32, torch.float64)
_SMALL = (torch.float16, torch.bfloat16)


def check(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _SMALL:
        raise UsageError(f"gradients can be compressed to {' or '.join(map(str, _SMALL))}, not to {dtype}")


class Compressor:
    def __init__(self, share: Share, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._share = share
        self._dtype = dtype
        self._rest = segments.private(share.nbytes, device)
        self._step = -1
        self._packed: list[Tensor] = []

    def pack(self, step: int, gradients: Tensor) -> list[Tensor]:
        """The gradients of a range, run by run."""
        if step != self._step:
            self._step = step
            self._packed = [self._smaller(run.of(gradients), run.of(self._rest)) for run in self._share.runs]
        return self._packed

    def preview(self, bucket: Bucket, gradients: Tensor) -> Tensor:
        """What `pack` would make of a bucket, if its gradients stay what they are now."""
        run = self._share.runs[bucket.run]
        piece = run.of(gradients)[bucket.first : bucket.last]
        if piece.dtype not in _LARGE:
            return piece.clone()
        return (run.of(self._rest)[bucket.first : bucket.last] + piece).to(self._dtype)

    def _smaller(self, gradient: Tensor, rest: Tensor) -> Tensor:
        if gradient.dtype not in _LARGE:
            return gradient
        rest += gradient
        small = rest.to(self._dtype)
        rest -= small
        return small


def unpack(share: Share, packed: Sequence[Tensor]) -> Tensor:
    """What `pack` was given, rounded."""
    gradients = segments.private(share.nbytes, packed[0].device)
    for run, part in zip(share.runs, packed, strict=True):
        run.of(gradients).copy_(part)
    return gradients
