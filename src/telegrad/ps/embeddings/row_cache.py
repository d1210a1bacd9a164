"""`RowCache`: rows that a trainer fetched in one of the last steps and may use again.

State: `_index`, the slot of each row; `_rows`, the values and `_fetched`, the step in which they
were fetched, both by slot. The cache holds at most `limit` rows. When it is full, it removes the
expired rows, and all rows if that is not enough. Used by one thread at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from telegrad.ps.embeddings.row_index import RowIndex


class RowCache:
    def __init__(self, steps: int, limit: int, dim: int, dtype: torch.dtype) -> None:
        """Rows are valid for `steps` more steps after the one in which they were fetched."""
        self._steps = steps
        self._limit = limit
        self._rows = torch.empty(limit, dim, dtype=dtype)
        self._fetched = torch.empty(limit, dtype=torch.int64)
        self._index = RowIndex()

    def __repr__(self) -> str:
        rows = f"{len(self._index)} of {self._limit} rows"
        return f"<RowCache: {rows}, valid for {self._steps} steps>"

    def find(self, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return a mask of the ids that are cached and valid, and the values of those."""
        slots = self._find_slots(ids)
        is_cached = slots >= 0
        is_cached[is_cached.clone()] = self._fetched[slots[is_cached]] >= step - self._steps
        return is_cached, self._rows[slots[is_cached]]

    def add(self, ids: Tensor, rows: Tensor, step: int) -> None:
        """Store rows that were fetched in this step."""
        if len(ids) > self._limit:
            return
        slots = self._find_slots(ids)
        is_new = slots < 0
        if len(self._index) + int(is_new.sum()) > self._limit:
            self._remove_expired(step, self._limit - len(ids))
            slots = self._find_slots(ids)
            is_new = slots < 0
        first = len(self._index)
        self._index.add(ids[is_new].numpy())
        slots[is_new] = torch.arange(first, len(self._index))
        self._rows[slots] = rows
        self._fetched[slots] = step

    def _remove_expired(self, step: int, limit: int) -> None:
        """Remove expired rows, and all rows if more than `limit` would remain."""
        fetched = self._fetched[: len(self._index)].numpy()
        valid = np.flatnonzero(fetched >= step - self._steps)
        ids = self._index.ids[valid]
        self._index = RowIndex()
        if len(valid) > limit:
            return
        self._index.add(ids)
        self._rows[: len(valid)] = self._rows[valid]
        self._fetched[: len(valid)] = self._fetched[valid]

    def _find_slots(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._index.find(ids.numpy()))
