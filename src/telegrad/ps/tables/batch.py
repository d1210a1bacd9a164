"""`Batch`: the rows that some input uses, each once, those of one server together and sorted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from telegrad.ps.tables.hashing import owners


class Batch(NamedTuple):
    """
    >>> batch = Batch.of(torch.tensor([30, 10, 30]), servers=1)
    >>> batch.ids.tolist(), batch.places.tolist(), batch.counts
    ([10, 30], [1, 0, 1], [2])
    """

    ids: Tensor
    places: Tensor  # where each number of the input stands in `ids`
    counts: list[int]  # how many of them are of each server

    @classmethod
    def of(cls, ids: Tensor, servers: int) -> Batch:
        """`ids` are the numbers of rows, in one dimension, on the CPU."""
        unique, places = torch.unique(ids, return_inverse=True)
        if servers == 1:
            return cls(unique, places, [len(unique)])
        owner = owners(unique, servers)
        order = owner.argsort(stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        return cls(unique[order], rank[places], owner.bincount(minlength=servers).tolist())

    def only(self, mask: Tensor) -> Batch:
        """Some of the rows."""
        counts = [int(part.sum()) for part in mask.split_with_sizes(self.counts)]
        return Batch(self.ids[mask], self.places[:0], counts)

    def split(self, lines: Tensor) -> Sequence[Tensor]:
        """Something with a line for each row, by server."""
        return lines.split_with_sizes(self.counts)


def total(gradients: Sequence[tuple[Batch, Tensor]], servers: int) -> tuple[Batch, Tensor]:
    """The sum of several gradients of one table."""
    if len(gradients) == 1:
        return gradients[0]
    batch = Batch.of(torch.cat([each.ids for each, _ in gradients]), servers)
    summed = gradients[0][1].new_zeros(len(batch.ids), gradients[0][1].shape[1])
    for (_, gradient), places in zip(gradients, batch.places.split_with_sizes(_lengths(gradients)), strict=True):
        summed.index_add_(0, places, gradient)
    return batch, summed


def _lengths(gradients: Iterable[tuple[Batch, Tensor]]) -> list[int]:
    return [len(batch.ids) for batch, _ in gradients]
