"""`GradientBuffer`: the gradients that one trainer sends bucket by bucket, before its step.

State, all of it under `_lock`: the memory, the step that its contents belong to, and which buckets
of that step have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor

from telegrad.errors import StaleReference
from telegrad.ps.gradient_buckets import divide_into_buckets
from telegrad.ps.layout import ServerRange
from telegrad.transport import flat_memory


class GradientBuffer:
    def __init__(self, server_range: ServerRange) -> None:
        self._buckets = divide_into_buckets(server_range)
        self._flat = flat_memory.allocate_private(server_range.nbytes)
        self._dtype_ranges = [each.of(self._flat) for each in server_range.dtype_ranges]
        self._step = 0
        self._arrived: set[int] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        count = f"{len(self._arrived)} of {len(self._buckets)} buckets"
        return f"<GradientBuffer: {count} of step {self._step}>"

    def add(self, step: int, pieces: Mapping[int, Tensor]) -> None:
        """Store buckets of a step, by index. Those of an earlier step become invalid."""
        with self._lock:
            if step != self._step:
                self._step = step
                self._arrived.clear()
            for index, piece in pieces.items():
                self._buckets[index].of(self._dtype_ranges).copy_(piece)
                self._arrived.add(index)

    def complete(self, step: int, pieces: Mapping[int, Tensor]) -> Tensor:
        """Store the last buckets of a step, and return all gradients of the step as bytes.

        Raise `StaleReference` if some are missing, because this server was restarted.
        """
        self.add(step, pieces)
        if len(self._arrived) < len(self._buckets):
            raise StaleReference(
                "some gradients of this step were sent to this server before it was restarted; "
                "send all of them again"
            )
        return self._flat
