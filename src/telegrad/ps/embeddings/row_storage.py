"""`RowStorage`: the rows of one table that one server holds, with what its optimizer keeps of them.

A row is made when it is first trained, so a table costs what is used of it. Rows that are only read are not kept: what
they are follows from their numbers (`hashing`).

State: the index; the rows and what is kept of them, by slot, in memory (`lines`) that grows; `steps`, how many
times the table was updated; `_known`, where the rows of the last batches are, which are usually updated next: a row
stays in its slot. A storage is used by one thread at a time; its shard sees to that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.ps.embeddings import growable_array
from telegrad.ps.embeddings.row_hash import initialize
from telegrad.ps.embeddings.row_index import Ids, RowIndex
from telegrad.ps.embeddings.row_optimizers import RowOptimizer

_REMEMBERED = 4  # batches
# elements that are updated at once: what is computed on the way stays in the cache
_BLOCK = 1 << 17


@dataclass(frozen=True)
class TableSpec:
    """What a table is. All trainers say the same of it."""

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    seed: int
    std: float
    padding: int | None = None

    def initialize(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Write the first values of these rows, and return them."""
        initialize(rows, ids, self.seed, self.std)
        if self.padding is not None:
            rows[ids == self.padding] = 0
        return rows


class RowStorage:
    def __init__(self, shape: TableSpec, rule: RowOptimizer) -> None:
        self.shape = shape
        self.rule = rule
        self.steps = 0
        self._index = RowIndex()
        self._known: deque[tuple[Tensor, Tensor]] = deque(maxlen=_REMEMBERED)
        self._rows = growable_array.reserve_rows(shape.rows, shape.dim, shape.dtype)
        self._kept = {
            name: growable_array.reserve_rows(shape.rows, width, shape.dtype)
            for name, (width, _) in rule.keeps(shape.dim).items()
        }

    def __repr__(self) -> str:
        rows = f"{len(self)} of {self.shape.rows} rows of {self.shape.dim}"
        return f"<RowStorage {self.shape.name!r}: {rows}, {self.steps} steps of {self.rule}>"

    def __len__(self) -> int:
        return len(self._index)

    def read(self, ids: Tensor, keep: bool) -> Tensor:
        """These rows, of which none may be asked for twice; `keep` makes those that are not here."""
        if keep:
            slots = self._slots(ids)  # first, since it may move the rows to larger memory
            return self._rows.index_select(0, slots)
        slots = torch.from_numpy(self._index.find(ids.numpy()))
        missing = slots < 0
        if not missing.any():
            return self._rows.index_select(0, slots)
        values = torch.empty(len(ids), self.shape.dim, dtype=self.shape.dtype)
        values[~missing] = self._rows.index_select(0, slots[~missing])
        made = self.shape.initialize(
            values.new_empty(int(missing.sum()), self.shape.dim), ids[missing]
        )
        values[missing] = made
        return values

    def write(self, ids: Tensor, values: Tensor) -> None:
        slots = self._slots(ids)
        self._rows.index_copy_(0, slots, values)

    def update(self, gradients: Sequence[tuple[Tensor, Tensor]], trainers: int) -> None:
        """A step with the mean of what trainers brought, rows and their gradients; who brought nothing counts too."""
        self.steps += 1
        ids, mean = _mean(gradients, trainers)
        if len(ids):
            slots = self._slots(ids)
            together = max(1, _BLOCK // self.shape.dim)
            for start in range(0, len(ids), together):
                block = slice(start, start + together)
                self.rule.update(self._rows, self._kept, slots[block], mean[block], self.steps)

    def change(self, rule: RowOptimizer) -> None:
        """Go on with other numbers; what is kept of each row stays."""
        if rule.keeps(self.shape.dim).keys() != self._kept.keys():
            raise UsageError(
                f"table {self.shape.name!r} is trained with {self.rule}, which cannot become {rule}"
            )
        self.rule = rule

    def part(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows in the order in which they were made: their numbers, and copies of their values."""
        stop = min(start + count, len(self))
        return torch.from_numpy(self._index.ids[start:stop].copy()), self._rows[start:stop].clone()

    def contents(self) -> dict[str, Tensor]:
        """Copies of everything."""
        count = len(self)
        kept = {name: each[:count].clone() for name, each in self._kept.items()}
        return {
            "ids": torch.from_numpy(self._index.ids.copy()),
            "rows": self._rows[:count].clone(),
            **kept,
        }

    def restore(self, contents: dict[str, Tensor], steps: int) -> None:
        """Begin with what `contents` returned."""
        if (
            contents.keys() != {"ids", "rows", *self._kept}
            or contents["rows"].shape[1:] != self._rows.shape[1:]
        ):
            raise UsageError(
                f"the checkpoint of table {self.shape.name!r} is of another kind of table or optimizer"
            )
        self._index = RowIndex()
        self._known.clear()
        self._index.add(contents["ids"].numpy())
        self._reserve(len(self))
        self._rows[: len(self)] = contents["rows"]
        for name, each in self._kept.items():
            each[: len(self)] = contents[name]
        self.steps = steps

    def _slots(self, ids: Tensor) -> Tensor:
        """Where these rows are, made if need be."""
        for known, slots in self._known:
            if torch.equal(known, ids):
                return slots
        found, places = self._index.search(ids.numpy())
        slots = torch.from_numpy(found)
        missing = np.flatnonzero(found < 0)
        if missing.size:
            found[missing] = self._make(ids.numpy()[missing], places[missing])
        # a clone, since the memory it came in is the sender's
        self._known.append((ids.clone(), slots))
        return slots

    def _make(self, ids: Ids, places: Ids) -> Ids:
        """Make rows whose search in the index ended at `places`."""
        first, last = len(self), len(self) + len(ids)
        self._reserve(last)
        self.shape.initialize(self._rows[first:last], torch.from_numpy(ids))
        for name, (_, value) in self.rule.keeps(self.shape.dim).items():
            self._kept[name][first:last] = value
        self._index.add(ids, places)
        return np.arange(first, last)

    def _reserve(self, rows: int) -> None:
        self._rows = growable_array.grow_rows(self._rows, rows)
        self._kept = {
            name: growable_array.grow_rows(each, rows) for name, each in self._kept.items()
        }


def _mean(gradients: Sequence[tuple[Tensor, Tensor]], trainers: int) -> tuple[Tensor, Tensor]:
    """Return rows and their mean gradients, which are finite if the gradients are.

    Each is divided before they are added up, and 16-bit floats are added up as float32.
    """
    if len(gradients) == 1:
        ids, values = gradients[0]
        return ids, values if trainers == 1 else values / trainers
    counts = [len(ids) for ids, _ in gradients]
    ids, places = torch.unique(torch.cat([ids for ids, _ in gradients]), return_inverse=True)
    dtype = gradients[0][1].dtype
    wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
    total = torch.zeros(len(ids), gradients[0][1].shape[1], dtype=wide)
    for (_, values), there in zip(gradients, places.split_with_sizes(counts), strict=True):
        total.index_add_(0, there, values.to(wide), alpha=1 / trainers)
    return ids, total.to(dtype)
