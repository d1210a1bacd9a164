"""`RowBatch`: the rows that some input uses, each once, those of one server together and sorted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from telegrad.ps.embeddings.row_hash import owners


class RowBatch(NamedTuple):
    """
    >>> batch = RowBatch.of(torch.tensor([30, 10, 30]), servers=1)
    >>> batch.ids.tolist(), batch.places.tolist(), batch.counts
    ([10, 30], [1, 0, 1], [2])
    >>> batch.order.tolist(), batch.starts.tolist()
    ([1, 0, 2], [0, 1])
    """

    ids: Tensor
    places: Tensor  # where each number of the input stands in `ids`
    counts: list[int]  # how many of them are of each server
    order: Tensor  # the positions of the input, those of one row together
    starts: Tensor  # where those of each row start in `order`

    @classmethod
    def of(cls, ids: Tensor, servers: int) -> RowBatch:
        """`ids` are the numbers of rows, in one dimension, on the CPU."""
        order, starts, ranks = _grouped(ids)
        unique = ids.index_select(0, order.index_select(0, starts))
        places = torch.empty_like(order).scatter_(0, order, ranks)
        if servers == 1:
            return cls(unique, places, [len(unique)], order, starts)
        owner = owners(unique, servers)
        by_owner = owner.argsort(stable=True)
        rank = torch.empty_like(by_owner)
        rank[by_owner] = torch.arange(len(by_owner))
        places = rank[places]
        counts = owner.bincount(minlength=servers).tolist()
        return cls(unique[by_owner], places, counts, *_grouped(places)[:2])

    def only(self, mask: Tensor) -> RowBatch:
        """Some of the rows."""
        counts = [int(part.sum()) for part in mask.split_with_sizes(self.counts)]
        nothing = self.places[:0]
        return RowBatch(self.ids[mask], nothing, counts, nothing, nothing)

    def split(self, lines: Tensor) -> Sequence[Tensor]:
        """Something with a line for each row, by server."""
        return lines.split_with_sizes(self.counts)


def _grouped(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of `numbers` in the order of the numbers, where each number starts there, and the ranks."""
    count = len(numbers)
    bits = max(1, count - 1).bit_length()
    if count and int(numbers.max()) >> (63 - bits):
        order = numbers.argsort(stable=True)
        ordered = numbers[order].numpy()
    else:  # number and position fit into one integer: sorting those takes a sixth of the time
        keys = (numbers.numpy() << bits) | np.arange(count)
        keys.sort()
        order = torch.from_numpy(keys & ((1 << bits) - 1))
        ordered = keys >> bits
    is_first = np.ones(count, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    ranks = np.cumsum(is_first)
    ranks -= 1
    return order, torch.from_numpy(np.flatnonzero(is_first)), torch.from_numpy(ranks)


def total(gradients: Sequence[tuple[RowBatch, Tensor]], servers: int) -> tuple[RowBatch, Tensor]:
    """The sum of several gradients of one table."""
    if len(gradients) == 1:
        return gradients[0]
    batch = RowBatch.of(torch.cat([each.ids for each, _ in gradients]), servers)
    summed = gradients[0][1].new_zeros(len(batch.ids), gradients[0][1].shape[1])
    for (_, gradient), places in zip(
        gradients, batch.places.split_with_sizes(_sizes(gradients)), strict=True
    ):
        summed.index_add_(0, places, gradient)
    return batch, summed


def _sizes(gradients: Iterable[tuple[RowBatch, Tensor]]) -> list[int]:
    return [len(batch.ids) for batch, _ in gradients]
