"""What follows from the number of a row alone: where it lives, where it stands in an index, what it is at first.

All of it is arithmetic on 64-bit numbers, the same on every worker. It does not matter when, by whom or on which server
a row is first used.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 by the golden ratio: multiples of it are spread evenly
_BLOCK = 1 << 16  # elements that are made at once, so that the work stays in the cache


def mix(numbers: Numbers) -> Numbers:
    """Each number turned into one whose bits all depend on all of its own (the last part of SplitMix64)."""
    mixed = numbers >> np.uint64(30)
    mixed ^= numbers
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    shifted = mixed >> np.uint64(27)
    mixed ^= shifted
    mixed *= np.uint64(0x94D049BB133111EB)
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed


def spread(ids: NDArray[np.int64]) -> Numbers:
    """Rows whose numbers are close or have a pattern are as good as random here."""
    return mix(ids.view(np.uint64) * _ODD)


def owners(ids: Tensor, servers: int) -> Tensor:
    """Which of the servers each row lives on."""
    return torch.from_numpy((spread(ids.numpy()) % np.uint64(servers)).astype(np.int64))


def initialize(rows: Tensor, ids: Tensor, seed: int, std: float) -> Tensor:
    """Write the first values of these rows, normally distributed around 0, and return them.

    >>> first = initialize(torch.empty(2, 3), torch.tensor([7, 9]), seed=0, std=1.0)
    >>> torch.equal(first[1:], initialize(torch.empty(1, 3), torch.tensor([9]), seed=0, std=1.0))
    True
    """
    if not std:
        return rows.zero_()
    quantiles = _quantiles(std)
    offset = np.uint64(seed * int(_ODD) % 2**64)
    keys = mix(spread(ids.numpy()) + offset)
    dim = rows.shape[1]
    together = max(1, _BLOCK // dim)
    for start in range(0, len(ids), together):
        numbers = _random16(keys[start : start + together], dim)
        rows[start : start + together].copy_(torch.from_numpy(quantiles.take(numbers, mode="wrap")))
    return rows


@lru_cache(maxsize=16)
def _quantiles(std: float) -> NDArray[np.float32]:
    """Return 2**16 numbers that stand for equal parts of the normal distribution: one is drawn by 16 random bits."""
    middles = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: NDArray[np.float32] = (torch.special.ndtri(middles) * std).to(torch.float32).numpy()
    return quantiles


def _random16(keys: Numbers, dim: int) -> NDArray[np.uint16]:
    """Return `dim` random 16-bit numbers for each key, four out of each 64 bits."""
    columns = np.arange(1, (dim + 3) // 4 + 1, dtype=np.uint64) * _ODD
    return mix(keys[:, None] + columns).astype("<u8", copy=False).view("<u2")[:, :dim]
