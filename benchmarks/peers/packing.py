"""Tensors as bytes, for peers without tensor support: NumPy's view of the memory, in a pickle.

This makes one copy each way. Users of these peers are told to do this. It is several times faster
than a pickle of the tensor itself.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy
import torch

__all__ = ["packed", "unpacked"]


def packed(value: Any) -> bytes:
    return pickle.dumps(_lowered(value), protocol=5)


def unpacked(data: bytes) -> Any:
    return _raised(pickle.loads(data))


def _lowered(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_lowered, value))
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _raised(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_raised, value))
    return torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value
