"""`Storage`: the rows of one table that one server holds, with what its optimizer keeps of them.

A row is made when it is first trained, so a table costs what is used of it. Rows that are only read are not kept: what
they are follows from their numbers (`hashing`).

State: the index; the rows and what is kept of them, by slot, in memory that doubles when it is full; `steps`, how many
times the table was updated. A storage is used by one thread at a time; its shard sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from telegrad.errors import UsageError
from telegrad.ps.tables.hashing import initial
from telegrad.ps.tables.index import Index
from telegrad.ps.tables.rules import Rule

_AT_LEAST = 1024  # rows
_BLOCK = 1 << 17  # elements that are updated at once: what is computed on the way stays in the cache


@dataclass(frozen=True)
class Shape:
    """What a table is. All trainers say the same of it."""

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    seed: int
    std: float
    padding: int | None = None

    def initial(self, ids: Tensor) -> Tensor:
        values = initial(ids, self.dim, self.seed, self.std, self.dtype)
        if self.padding is not None:
            values[ids == self.padding] = 0
        return values


class Storage:
    def __init__(self, shape: Shape, rule: Rule) -> None:
        self.shape = shape
        self.rule = rule
        self.steps = 0
        self._index = Index()
        self._rows = torch.empty(0, shape.dim, dtype=shape.dtype)
        self._kept = {
            name: torch.empty(0, width, dtype=shape.dtype) for name, (width, _) in rule.keeps(shape.dim).items()
        }

    def __repr__(self) -> str:
        rows = f"{len(self)} of {self.shape.rows} rows of {self.shape.dim}"
        return f"<Storage {self.shape.name!r}: {rows}, {self.steps} steps of {self.rule}>"

    def __len__(self) -> int:
        return len(self._index)

    def read(self, ids: Tensor, keep: bool) -> Tensor:
        """These rows, of which none may be asked for twice; `keep` makes those that are not here."""
        slots = self._slots(ids) if keep else self._find(ids)
        missing = slots < 0
        if keep or not missing.any():
            return self._rows.index_select(0, slots)
        values = torch.empty(len(ids), self.shape.dim, dtype=self.shape.dtype)
        values[~missing] = self._rows.index_select(0, slots[~missing])
        values[missing] = self.shape.initial(ids[missing])
        return values

    def write(self, ids: Tensor, values: Tensor) -> None:
        slots = self._slots(ids)  # first, since it may move the rows to larger memory
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

    def change(self, rule: Rule) -> None:
        """Go on with other numbers; what is kept of each row stays."""
        if rule.keeps(self.shape.dim).keys() != self._kept.keys():
            raise UsageError(f"table {self.shape.name!r} is trained with {self.rule}, which cannot become {rule}")
        self.rule = rule

    def part(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows in the order in which they were made: their numbers, and copies of their values."""
        stop = min(start + count, len(self))
        return torch.from_numpy(self._index.ids[start:stop].copy()), self._rows[start:stop].clone()

    def contents(self) -> dict[str, Tensor]:
        """Copies of everything."""
        count = len(self)
        kept = {name: each[:count].clone() for name, each in self._kept.items()}
        return {"ids": torch.from_numpy(self._index.ids.copy()), "rows": self._rows[:count].clone(), **kept}

    def restore(self, contents: dict[str, Tensor], steps: int) -> None:
        """Begin with what `contents` returned."""
        if contents.keys() != {"ids", "rows", *self._kept} or contents["rows"].shape[1:] != self._rows.shape[1:]:
            raise UsageError(f"the checkpoint of table {self.shape.name!r} is of another kind of table or optimizer")
        self._index = Index()
        self._index.add(contents["ids"].numpy())
        self._rows = contents["rows"]
        self._kept = {name: contents[name] for name in self._kept}
        self.steps = steps

    def _find(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._index.find(ids.numpy()))

    def _slots(self, ids: Tensor) -> Tensor:
        slots = self._find(ids)
        missing = slots < 0
        if missing.any():
            new = ids[missing]
            first = len(self)
            self._reserve(first + len(new))
            self._rows[first : first + len(new)] = self.shape.initial(new)
            for name, (_, value) in self.rule.keeps(self.shape.dim).items():
                self._kept[name][first : first + len(new)] = value
            self._index.add(new.numpy())
            slots[missing] = torch.arange(first, first + len(new))
        return slots

    def _reserve(self, rows: int) -> None:
        have = len(self._rows)
        if rows > have:
            room = max(rows, min(max(2 * have, _AT_LEAST), self.shape.rows))
            self._rows = _grown(self._rows, room)
            self._kept = {name: _grown(each, room) for name, each in self._kept.items()}


def _mean(gradients: Sequence[tuple[Tensor, Tensor]], trainers: int) -> tuple[Tensor, Tensor]:
    if len(gradients) == 1:
        ids, values = gradients[0]
        return ids, values if trainers == 1 else values / trainers
    ids, places = torch.unique(torch.cat([ids for ids, _ in gradients]), return_inverse=True)
    total = gradients[0][1].new_zeros(len(ids), gradients[0][1].shape[1])
    for (_, values), there in zip(gradients, places.split_with_sizes([len(ids) for ids, _ in gradients]), strict=True):
        total.index_add_(0, there, values)
    return ids, total.div_(trainers)


def _grown(lines: Tensor, room: int) -> Tensor:
    larger = lines.new_empty(room, lines.shape[1])
    larger[: len(lines)] = lines
    return larger
