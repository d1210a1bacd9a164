"""The functions that callers call on the callee. Every peer serves exactly these."""

from __future__ import annotations

from typing import Any

import torch

_source: dict[int, torch.Tensor] = {}


def add(a: Any, b: Any) -> Any:
    return a + b


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def sink(x: torch.Tensor) -> float:
    """Takes a tensor, sends back one of its elements."""
    return float(x[-1])


def source(elements: int) -> torch.Tensor:
    """Sends a tensor that the callee already has."""
    if elements not in _source:
        _source.clear()
        _source[elements] = torch.ones(elements)
    return _source[elements]


class Counter:
    """An object that callers refer to."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count


FUNCTIONS = (add, echo, sink, source)
