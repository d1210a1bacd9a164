"""`RowStorage`: the rows of one table that one server holds, with the state of their optimizer.

A row is stored when it is first trained, so a table takes only the memory of its trained rows. Rows
that are only read are not stored: their initial values follow from their ids (`row_hash`).

State: `_index`, the slot of each row; `_rows` and `_state`, the values and the optimizer state by
slot, in memory that grows (`growable_array`); `steps`, the number of updates; `_recent_slots`, the
slots of the last batches, which are usually updated next. A row never changes its slot. Used by one
thread at a time, under the lock of the shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.ps.embeddings import growable_array
from telegrad.ps.embeddings.messages import TableSpec
from telegrad.ps.embeddings.row_index import Ids, RowIndex
from telegrad.ps.embeddings.row_optimizers import RowOptimizer

_REMEMBERED_BATCHES = 4
# elements that are updated at once, so that intermediate results stay in the cache
_BLOCK = 1 << 17


class RowStorage:
    def __init__(self, spec: TableSpec, optimizer: RowOptimizer) -> None:
        self.spec = spec
        self.optimizer = optimizer
        self.steps = 0
        self._index = RowIndex()
        self._recent_slots: deque[tuple[Tensor, Tensor]] = deque(maxlen=_REMEMBERED_BATCHES)
        self._rows = growable_array.reserve_rows(spec.rows, spec.dim, spec.dtype)
        self._state = {
            name: growable_array.reserve_rows(spec.rows, width, spec.dtype)
            for name, (width, _) in optimizer.state_spec(spec.dim).items()
        }

    def __repr__(self) -> str:
        rows = f"{len(self)} of {self.spec.rows} rows of {self.spec.dim}"
        return f"<RowStorage {self.spec.name!r}: {rows}, {self.steps} steps of {self.optimizer}>"

    def __len__(self) -> int:
        return len(self._index)

    def read(self, ids: Tensor, store_new: bool) -> Tensor:
        """Return the rows `ids`, which are unique. `store_new` stores those that are new."""
        if store_new:
            slots = self._find_or_store(ids)  # first, because it may replace `_rows`
            return self._rows.index_select(0, slots)
        slots = torch.from_numpy(self._index.find(ids.numpy()))
        missing = slots < 0
        if not missing.any():
            return self._rows.index_select(0, slots)
        values = torch.empty(len(ids), self.spec.dim, dtype=self.spec.dtype)
        values[~missing] = self._rows.index_select(0, slots[~missing])
        initial = values.new_empty(int(missing.sum()), self.spec.dim)
        values[missing] = self.spec.initialize(initial, ids[missing])
        return values

    def write(self, ids: Tensor, values: Tensor) -> None:
        """Replace the values of rows. Their optimizer state stays."""
        slots = self._find_or_store(ids)
        self._rows.index_copy_(0, slots, values)

    def update(self, gradients: Sequence[tuple[Tensor, Tensor]], trainers: int) -> None:
        """Make a step with the mean of the gradients of `trainers` trainers.

        `gradients` are pairs of ids and gradients. Trainers without a pair count as zeros.
        """
        self.steps += 1
        ids, mean = _mean(gradients, trainers)
        if len(ids):
            slots = self._find_or_store(ids)
            block_rows = max(1, _BLOCK // self.spec.dim)
            for start in range(0, len(ids), block_rows):
                block = slice(start, start + block_rows)
                self.optimizer.update(
                    self._rows, self._state, slots[block], mean[block], self.steps
                )

    def change_optimizer(self, optimizer: RowOptimizer) -> None:
        """Continue with other options of the same optimizer. Its state stays."""
        if optimizer.state_spec(self.spec.dim).keys() != self._state.keys():
            raise UsageError(
                f"table {self.spec.name!r} is trained with {self.optimizer}, "
                f"which cannot become {optimizer}"
            )
        self.optimizer = optimizer

    def stored_rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return ids and values of `count` rows from slot `start` on, as copies."""
        stop = min(start + count, len(self))
        return torch.from_numpy(self._index.ids[start:stop].copy()), self._rows[start:stop].clone()

    def contents(self) -> dict[str, Tensor]:
        """Return copies of ids, values and optimizer state, for a checkpoint."""
        count = len(self)
        state = {name: each[:count].clone() for name, each in self._state.items()}
        return {
            "ids": torch.from_numpy(self._index.ids.copy()),
            "rows": self._rows[:count].clone(),
            **state,
        }

    def restore(self, contents: dict[str, Tensor], steps: int) -> None:
        """Replace everything by what `contents` returned."""
        has_same_names = contents.keys() == {"ids", "rows", *self._state}
        if not has_same_names or contents["rows"].shape[1:] != self._rows.shape[1:]:
            raise UsageError(
                f"the checkpoint of table {self.spec.name!r} has another dimension or optimizer"
            )
        self._index = RowIndex()
        self._recent_slots.clear()
        self._index.add(contents["ids"].numpy())
        self._reserve(len(self))
        self._rows[: len(self)] = contents["rows"]
        for name, each in self._state.items():
            each[: len(self)] = contents[name]
        self.steps = steps

    def _find_or_store(self, ids: Tensor) -> Tensor:
        """Return the slots of rows. Store the rows that are new."""
        for recent_ids, slots in self._recent_slots:
            if torch.equal(recent_ids, ids):
                return slots
        found, places = self._index.search(ids.numpy())
        slots = torch.from_numpy(found)  # shares memory with `found`
        missing = np.flatnonzero(found < 0)
        if missing.size:
            found[missing] = self._store(ids.numpy()[missing], places[missing])
        # a clone, because the memory of `ids` belongs to the message
        self._recent_slots.append((ids.clone(), slots))
        return slots

    def _store(self, ids: Ids, places: Ids) -> Ids:
        """Store new rows with their initial values. `places`: where their search ended."""
        first, last = len(self), len(self) + len(ids)
        self._reserve(last)
        self.spec.initialize(self._rows[first:last], torch.from_numpy(ids))
        for name, (_, initial_value) in self.optimizer.state_spec(self.spec.dim).items():
            self._state[name][first:last] = initial_value
        self._index.add(ids, places)
        return np.arange(first, last)

    def _reserve(self, rows: int) -> None:
        self._rows = growable_array.grow_rows(self._rows, rows)
        self._state = {
            name: growable_array.grow_rows(each, rows) for name, each in self._state.items()
        }


def _mean(gradients: Sequence[tuple[Tensor, Tensor]], trainers: int) -> tuple[Tensor, Tensor]:
    """Return unique ids and their mean gradients, which are finite if the gradients are.

    Gradients are divided before they are summed, and 16-bit floats are summed as float32.
    """
    if len(gradients) == 1:
        ids, values = gradients[0]
        return ids, values if trainers == 1 else values / trainers
    counts = [len(ids) for ids, _ in gradients]
    ids, positions = torch.unique(torch.cat([ids for ids, _ in gradients]), return_inverse=True)
    dtype = gradients[0][1].dtype
    sum_dtype = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
    total = torch.zeros(len(ids), gradients[0][1].shape[1], dtype=sum_dtype)
    for (_, values), targets in zip(gradients, positions.split_with_sizes(counts), strict=True):
        total.index_add_(0, targets, values.to(sum_dtype), alpha=1 / trainers)
    return ids, total.to(dtype)
