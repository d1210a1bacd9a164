"""What `batched` may be told: one frozen, validated value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from telegrad.errors import UsageError


@dataclass(frozen=True)
class BatchOptions:
    max_size: int = 64
    max_wait: float | None = None
    min_size: int | Literal["all"] = 1
    pad_to: tuple[int, ...] = ()
    cuda_graph: bool = False
    max_queue: int | None = None
    when_full: Literal["wait", "reject"] = "wait"
    priority: Callable[..., float] | None = None
    retry_alone: bool = True

    def __post_init__(self) -> None:
        def require(good: bool, message: str) -> None:
            if not good:
                raise UsageError(f"batched: {message}")

        require(self.max_size >= 1, f"max_size must be at least 1, not {self.max_size!r}")
        require(
            self.max_wait is None or 0 <= self.max_wait < math.inf,
            f"max_wait must be seconds or None, not {self.max_wait!r}",
        )
        require(
            self.min_size == "all"
            or (isinstance(self.min_size, int) and 1 <= self.min_size <= self.max_size),
            f"min_size must be 'all' or from 1 to max_size, not {self.min_size!r}",
        )
        require(
            all(size >= 1 for size in self.pad_to)
            and list(self.pad_to) == sorted(set(self.pad_to)),
            f"pad_to must be growing sizes, not {self.pad_to!r}",
        )
        require(
            not self.pad_to or self.pad_to[-1] >= self.max_size,
            f"a batch of {self.max_size} fits none of the sizes {self.pad_to!r}: make max_size smaller",
        )
        require(
            not self.cuda_graph or bool(self.pad_to),
            "cuda_graph needs pad_to: a graph is made for each of its sizes",
        )
        require(
            self.max_queue is None or self.max_queue >= self.max_size,
            f"max_queue must be None or at least max_size, not {self.max_queue!r}",
        )
        require(
            self.when_full in ("wait", "reject"),
            f"when_full must be 'wait' or 'reject', not {self.when_full!r}",
        )

    def padded(self, size: int) -> int:
        """How many rows a batch of `size` calls is given."""
        return next((fixed for fixed in self.pad_to if fixed >= size), size)
