"""Functions of the id of a row: its server, its hash, and its initial values.

They are arithmetic on 64-bit integers with the same result on every worker. So it does not matter
when, by which trainer or on which server a row is first used.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Hashes = NDArray[np.uint64]

# 2**64 divided by the golden ratio, odd: its multiples are spread evenly
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# elements that are initialized at once, so that intermediate results stay in the cache
_BLOCK = 1 << 16


def mix(values: Hashes) -> Hashes:
    """Hash integers so that every bit depends on all bits: the finalizer of SplitMix64."""
    mixed = values >> np.uint64(30)
    mixed ^= values
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    shifted = mixed >> np.uint64(27)
    mixed ^= shifted
    mixed *= np.uint64(0x94D049BB133111EB)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed


def hash_ids(ids: NDArray[np.int64]) -> Hashes:
    """Return well-distributed hashes, also for ids that are consecutive or have a pattern."""
    return mix(ids.view(np.uint64) * _GOLDEN)


def owners(ids: Tensor, servers: int) -> Tensor:
    """Return for each row the index of the server that holds it."""
    return torch.from_numpy((hash_ids(ids.numpy()) % np.uint64(servers)).astype(np.int64))


def initialize(rows: Tensor, ids: Tensor, seed: int, std: float) -> Tensor:
    """Write the initial values of the rows `ids` into `rows`, and return it.

    They are normally distributed with mean 0.

    >>> first = initialize(torch.empty(2, 3), torch.tensor([7, 9]), seed=0, std=1.0)
    >>> torch.equal(first[1:], initialize(torch.empty(1, 3), torch.tensor([9]), seed=0, std=1.0))
    True
    """
    if not std:
        return rows.zero_()
    quantiles = _quantiles(std)
    offset = np.uint64(seed * int(_GOLDEN) % 2**64)
    keys = mix(hash_ids(ids.numpy()) + offset)
    dim = rows.shape[1]
    block_rows = max(1, _BLOCK // dim)
    for start in range(0, len(ids), block_rows):
        indices = _random16(keys[start : start + block_rows], dim)
        block = rows[start : start + block_rows]
        if rows.dtype is torch.float32 and rows.is_contiguous():
            quantiles.take(indices, mode="wrap", out=block.numpy())
        else:
            block.copy_(torch.from_numpy(quantiles.take(indices, mode="wrap")))
    return rows


@lru_cache(maxsize=16)
def _quantiles(std: float) -> NDArray[np.float32]:
    """Return 2**16 quantiles of the normal distribution, to be drawn by 16 random bits."""
    probabilities = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    values = torch.special.ndtri(probabilities) * std
    quantiles: NDArray[np.float32] = values.to(torch.float32).numpy()
    return quantiles


def _random16(keys: Hashes, dim: int) -> NDArray[np.uint16]:
    """Return `dim` random 16-bit integers for each key, four from each 64-bit hash."""
    columns = np.arange(1, (dim + 3) // 4 + 1, dtype=np.uint64) * _GOLDEN
    return mix(keys[:, None] + columns).astype("<u8", copy=False).view("<u2")[:, :dim]
