"""`RowBatch`: the unique rows that an input uses, ordered by server and id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from telegrad.ps.embeddings.row_hash import owners


class RowBatch(NamedTuple):
    """The unique ids of an input, and how to map between the input and them.

    >>> batch = RowBatch.of(torch.tensor([30, 10, 30]), servers=1)
    >>> batch.ids.tolist(), batch.positions.tolist(), batch.counts
    ([10, 30], [1, 0, 1], [2])
    >>> batch.order.tolist(), batch.starts.tolist()
    ([1, 0, 2], [0, 1])
    """

    ids: Tensor
    positions: Tensor  # for each element of the input, the position of its id in `ids`
    counts: list[int]  # the number of `ids` on each server
    order: Tensor  # indices of the input, grouped by id
    starts: Tensor  # for each of `ids`, where its group starts in `order`

    @classmethod
    def of(cls, ids: Tensor, servers: int) -> RowBatch:
        """Return the batch of an input: one-dimensional, on the CPU, with repetitions."""
        order, starts, ranks = _group(ids)
        unique = ids.index_select(0, order.index_select(0, starts))
        positions = torch.empty_like(order).scatter_(0, order, ranks)
        if servers == 1:
            return cls(unique, positions, [len(unique)], order, starts)
        owner = owners(unique, servers)
        by_owner = owner.argsort(stable=True)
        rank = torch.empty_like(by_owner)
        rank[by_owner] = torch.arange(len(by_owner))
        positions = rank[positions]
        counts = owner.bincount(minlength=servers).tolist()
        order, starts, _ = _group(positions)
        return cls(unique[by_owner], positions, counts, order, starts)

    def only(self, mask: Tensor) -> RowBatch:
        """Return a batch of some of the ids, without the mapping to the input."""
        counts = [int(part.sum()) for part in mask.split_with_sizes(self.counts)]
        empty = self.positions[:0]
        return RowBatch(self.ids[mask], empty, counts, empty, empty)

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """Split a tensor by server. Its first dimension is that of `ids`."""
        return values.split_with_sizes(self.counts)


def _group(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort integers that are not negative.

    Return the indices that sort them, where each distinct value starts there, and for each sorted
    value its rank among the distinct ones.
    """
    count = len(values)
    bits = max(1, count - 1).bit_length()
    if count and int(values.max()) >> (63 - bits):
        order = values.argsort(stable=True)
        ordered = values[order].numpy()
    else:  # value and index fit into one integer: sorting those takes a sixth of the time
        keys = (values.numpy() << bits) | np.arange(count)
        keys.sort()
        order = torch.from_numpy(keys & ((1 << bits) - 1))
        ordered = keys >> bits
    is_first = np.ones(count, bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    ranks = np.cumsum(is_first)
    ranks -= 1
    return order, torch.from_numpy(np.flatnonzero(is_first)), torch.from_numpy(ranks)


def sum_gradients(
    gradients: Sequence[tuple[RowBatch, Tensor]], servers: int
) -> tuple[RowBatch, Tensor]:
    """Return the sum of several gradients of one table, each with its batch."""
    batch = RowBatch.of(torch.cat([each.ids for each, _ in gradients]), servers)
    total = gradients[0][1].new_zeros(len(batch.ids), gradients[0][1].shape[1])
    positions = batch.positions.split_with_sizes(_sizes(gradients))
    for (_, gradient), targets in zip(gradients, positions, strict=True):
        total.index_add_(0, targets, gradient)
    return batch, total


def _sizes(gradients: Iterable[tuple[RowBatch, Tensor]]) -> list[int]:
    return [len(batch.ids) for batch, _ in gradients]
