"""`GradientBuffer`: collects the gradients that one trainer sends bucket by bucket.

State, all of it under `_lock`: the memory, the step that its contents belong to, and which buckets of it have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor

from telegrad.errors import StaleReference
from telegrad.ps import flat_memory
from telegrad.ps.gradient_buckets import divide_into_buckets
from telegrad.ps.layout import ServerRange


class GradientBuffer:
    """Where a server gathers the gradients of one trainer for the step to come."""

    def __init__(self, share: ServerRange) -> None:
        self._buckets = divide_into_buckets(share)
        self._flat = flat_memory.allocate_private(share.nbytes)
        self._runs = [run.of(self._flat) for run in share.runs]
        self._step = 0
        self._here: set[int] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<GradientBuffer: {len(self._here)} of {len(self._buckets)} buckets of step {self._step}>"

    def bring(self, step: int, pieces: Mapping[int, Tensor]) -> None:
        with self._lock:
            if step != self._step:
                self._step = step
                self._here.clear()
            for number, piece in pieces.items():
                self._buckets[number].of(self._runs).copy_(piece)
                self._here.add(number)

    def complete(self, step: int, pieces: Mapping[int, Tensor]) -> Tensor:
        """The gradients of a step: these, and what was brought before."""
        self.bring(step, pieces)
        if len(self._here) < len(self._buckets):
            raise StaleReference(
                "some of these gradients were brought to an earlier life of this server"
            )
        return self._flat
