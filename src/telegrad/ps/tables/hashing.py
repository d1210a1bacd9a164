"""What follows from the number of a row alone: where it lives, where it stands in an index, what it is at first.

All of it is arithmetic on 64-bit numbers, the same on every worker. It does not matter when, by whom or on which server
a row is first used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 by the golden ratio: multiples of it are spread evenly
_BLOCK = 1 << 16  # elements that are made at once, so that the work stays in the cache


def mix(numbers: Numbers) -> Numbers:
    """Each number turned into one whose bits all depend on all of its own (the last part of SplitMix64)."""
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def spread(ids: NDArray[np.int64]) -> Numbers:
    """Rows whose numbers are close or have a pattern are as good as random here."""
    return mix(ids.view(np.uint64) * _ODD)


def owners(ids: Tensor, servers: int) -> Tensor:
    """Which of the servers each row lives on."""
    return torch.from_numpy((spread(ids.numpy()) % np.uint64(servers)).astype(np.int64))


def initial(ids: Tensor, dim: int, seed: int, std: float, dtype: torch.dtype) -> Tensor:
    """The first values of these rows: normally distributed around 0.

    >>> first = initial(torch.tensor([7, 9]), 3, seed=0, std=1.0, dtype=torch.float32)
    >>> torch.equal(first[1:], initial(torch.tensor([9]), 3, seed=0, std=1.0, dtype=torch.float32))
    True
    """
    rows = torch.zeros(len(ids), dim, dtype=dtype)
    if std:
        keys = mix(spread(ids.numpy()) + np.uint64(seed % 2**64) * _ODD)
        together = max(1, _BLOCK // dim)
        for start in range(0, len(ids), together):
            values = _normal(keys[start : start + together], dim) * np.float32(std)
            rows[start : start + together].copy_(torch.from_numpy(values))
    return rows


def _normal(keys: Numbers, dim: int) -> NDArray[np.float32]:
    """Two numbers out of each 64 bits, by the method of Box and Muller."""
    pairs = (dim + 1) // 2
    columns = np.arange(1, pairs + 1, dtype=np.uint64) * _ODD
    bits = mix(keys[:, None] + columns).astype("<u8", copy=False).view("<u4").reshape(len(keys), pairs, 2)
    radius: Any = (bits[..., 0].astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    angle: Any = bits[..., 1].astype(np.float32) * np.float32(2 * np.pi / 2**32)
    values = np.empty((len(keys), 2 * pairs), np.float32)
    np.multiply(radius, np.cos(angle), out=values[:, :pairs])
    np.multiply(radius, np.sin(angle), out=values[:, pairs:])
    return values[:, :dim]
