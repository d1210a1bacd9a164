"""The functions that callers call on the callee. Every peer serves exactly these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_source: dict[int, torch.Tensor] = {}
_containers: dict[tuple[str, int], Any] = {}


def add(a: Any, b: Any) -> Any:
    return a + b


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def sink(x: torch.Tensor) -> float:
    """Take a tensor and return one of its elements."""
    return float(x[-1])


def source(elements: int) -> torch.Tensor:
    """Return a tensor that the callee already has."""
    if elements not in _source:
        _source.clear()
        _source[elements] = torch.ones(elements)
    return _source[elements]


def container(kind: str, count: int) -> Any:
    """Return `count` small objects of a kind, created once."""
    if (kind, count) not in _containers:
        _containers[kind, count] = _CONTAINERS[kind](count)
    return _containers[kind, count]


_CONTAINERS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda count: [torch.ones(1) for _ in range(count)],
    "scalars": lambda count: [torch.tensor(1.0) for _ in range(count)],
    "matrices": lambda count: [torch.ones(4, 4) for _ in range(count)],
    "arrays": lambda count: [np.ones(1) for _ in range(count)],
    "dict-of-tensors": lambda count: {f"name{number}": torch.ones(1) for number in range(count)},
    "dict-of-arrays": lambda count: {f"name{number}": np.ones(1) for number in range(count)},
}


def count(things: Any) -> int:
    """Take a container and return the number of its objects."""
    return len(things)


class Counter:
    """An object that callers refer to."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count


FUNCTIONS = (add, echo, sink, source, container, count)
