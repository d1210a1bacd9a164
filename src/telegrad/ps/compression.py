"""Gradients as 16-bit floats where they travel by calls. What rounding takes away is added to later gradients.

The remainder of an element is what its gradients had and the server does not have yet. It changes
only when a step has been applied: a step that is dropped, skipped or fails leaves it as it was, and
so does a step in which the parameter has no gradient. What is too large for 16 bits is sent in
several steps. Infinities and NaN are sent as they are, and leave no remainder.

State of a `Compressor`: `_remainder`; what was made for the last step, in case it must be sent again, and the remainder
that follows once that step has been applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.ps import flat_memory
from telegrad.ps.gradient_buckets import GradientBucket
from telegrad.ps.layout import DtypeRun, ServerRange

_LARGE = (torch.float32, torch.float64)
_SMALL = (torch.float16, torch.bfloat16)


def check(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _SMALL:
        raise UsageError(
            f"gradients can be compressed to {' or '.join(map(str, _SMALL))}, not to {dtype}"
        )


class Compressor:
    def __init__(
        self, share: ServerRange, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._share = share
        self._dtype = dtype
        self._remainder = flat_memory.allocate_private(share.nbytes, device)
        self._next = flat_memory.allocate_private(share.nbytes, device)
        self._step = -1
        self._packed: list[Tensor] = []

    def pack(
        self, step: int, gradients: Tensor, missing: AbstractSet[int] = frozenset()
    ) -> list[Tensor]:
        """Return the gradients of a range, run by run. Parameters that are `missing` have none."""
        if step != self._step:
            self._step = step
            self._packed = [self._pack_run(run, gradients, missing) for run in self._share.runs]
        return self._packed

    def applied(self) -> None:
        """Take note that the server has made its step with what was packed last."""
        self._remainder, self._next = self._next, self._remainder

    def preview(self, bucket: GradientBucket, gradients: Tensor) -> Tensor:
        """Return what `pack` would make of a bucket, if its gradients stay what they are now."""
        run = self._share.runs[bucket.run]
        piece = run.of(gradients)[bucket.first : bucket.last]
        if piece.dtype not in _LARGE:
            return piece.clone()
        total = run.of(self._remainder)[bucket.first : bucket.last] + piece
        return self._round(total)

    def _pack_run(self, run: DtypeRun, gradients: Tensor, missing: AbstractSet[int]) -> Tensor:
        gradient = run.of(gradients)
        if gradient.dtype not in _LARGE:
            return gradient
        remainder, rest = run.of(self._remainder), run.of(self._next)
        torch.add(remainder, gradient, out=rest)
        small = self._round(rest)
        rest -= small
        rest.nan_to_num_(0.0, 0.0, 0.0)
        for part in run.parts:
            if part.slot.number in missing:
                elements = part.within(run)
                small[elements] = 0
                rest[elements] = remainder[elements]
        return small

    def _round(self, values: Tensor) -> Tensor:
        """Return finite values as finite 16-bit floats, and the others as they are."""
        limit = torch.finfo(self._dtype).max
        small = values.clamp(-limit, limit).to(self._dtype)
        infinite = values.isinf()
        if infinite.any():
            small[infinite] = values[infinite].to(self._dtype)
        return small


def unpack(share: ServerRange, packed: Sequence[Tensor]) -> Tensor:
    """What `pack` was given, rounded."""
    gradients = flat_memory.allocate_private(share.nbytes, packed[0].device)
    for run, part in zip(share.runs, packed, strict=True):
        run.of(gradients).copy_(part)
    return gradients
