"""`RowCache`: rows that a trainer has fetched a few steps ago, to be used again.

State: an index of the rows, their values, and the step in which each was fetched. There are at most `limit` of them:
when there would be more, those that are too old are thrown away, and all of them if that is not enough.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from telegrad.ps.embeddings.row_index import RowIndex


class RowCache:
    def __init__(self, steps: int, limit: int, dim: int, dtype: torch.dtype) -> None:
        """Rows are good for `steps` more steps after the one they were fetched in."""
        self._steps = steps
        self._limit = limit
        self._rows = torch.empty(limit, dim, dtype=dtype)
        self._fetched = torch.empty(limit, dtype=torch.int64)
        self._index = RowIndex()

    def __repr__(self) -> str:
        return f"<RowCache: {len(self._index)} of {self._limit} rows, good for {self._steps} steps>"

    def find(self, ids: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Which of these rows need not be fetched, and their values."""
        slots = self._slots(ids)
        known = slots >= 0
        known[known.clone()] = self._fetched[slots[known]] >= now - self._steps
        return known, self._rows[slots[known]]

    def note(self, ids: Tensor, rows: Tensor, now: int) -> None:
        """These rows have just been fetched."""
        if len(ids) > self._limit:
            return
        slots = self._slots(ids)
        new = slots < 0
        if len(self._index) + int(new.sum()) > self._limit:
            self._shrink(now, self._limit - len(ids))
            slots = self._slots(ids)
            new = slots < 0
        first = len(self._index)
        self._index.add(ids[new].numpy())
        slots[new] = torch.arange(first, len(self._index))
        self._rows[slots] = rows
        self._fetched[slots] = now

    def _shrink(self, now: int, room: int) -> None:
        kept = np.flatnonzero(self._fetched[: len(self._index)].numpy() >= now - self._steps)
        ids = self._index.ids[kept]
        self._index = RowIndex()
        if len(kept) > room:
            return
        self._index.add(ids)
        self._rows[: len(kept)] = self._rows[kept]
        self._fetched[: len(kept)] = self._fetched[kept]

    def _slots(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._index.find(ids.numpy()))
