"""Batched functions and objects that the tests call on other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from telegrad import batched
from telegrad.agent import Agent
from telegrad.refs import RRef, remote
from tests.local.gates import PATIENCE, Gate, Log, until


class Model:
    """Log each batch, and block the first one at a gate while further calls arrive."""

    def __init__(self, log: Log, gate: Gate | None = None) -> None:
        self.log = log
        self.gate = gate

    @batched(max_size=3, priority=lambda _, x, urgent=0: urgent)
    def mixed(self, x: torch.Tensor, urgent: list[int] | None = None) -> torch.Tensor:
        self._note(x)
        if (x < 0).any():
            raise ValueError(x.tolist())
        return x * 2

    @batched(max_size=4)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return self._note(x) * 2

    @batched
    def check(self, x: torch.Tensor) -> torch.Tensor:
        """Refuses negative numbers."""
        self._note(x)
        if (x < 0).any():
            raise ValueError(f"no negative numbers, please: {x.tolist()}")
        return x

    @batched(retry_alone=False)
    def check_once(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        if (x < 0).any():
            raise ValueError(f"no negative numbers, please: {x.tolist()}")
        return x

    @batched(max_size=8, min_size=3)
    def by_three(self, x: torch.Tensor) -> torch.Tensor:
        return self._note(x) * 2

    @batched(min_size="all")
    def together(self, x: torch.Tensor) -> torch.Tensor:
        return self._note(x) * 2

    @batched(max_wait=0.2)
    def unhurried(self, x: torch.Tensor) -> torch.Tensor:
        return self._note(x) * 2

    @batched(max_size=2, max_queue=2)
    def held_up(self, x: torch.Tensor) -> torch.Tensor:
        return self._note(x) * 2

    @batched(max_size=2, max_queue=2, when_full="reject")
    def refusing(self, x: torch.Tensor) -> torch.Tensor:
        return self._note(x) * 2

    def _note(self, x: torch.Tensor) -> torch.Tensor:
        self.log.note(x.tolist())
        if self.gate is not None:
            gate, self.gate = self.gate, None
            gate.hold()
        return x


def waiting(function: Any, count: int) -> None:
    """Wait until `count` calls of a batched function are queued."""
    until(lambda: function.batching.statistics().waiting == count)


def tensor(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def answers(futures: list[Any]) -> list[Any]:
    """Return the results as plain lists, or the exceptions."""
    return [future.exception(PATIENCE) or future.result().tolist() for future in futures]


def model_on(agent: Agent, owner: str, *args: Any) -> RRef[Model]:
    return remote(owner, Model, args, agent=agent)


def starting(reference: RRef[Any], method: str) -> Callable[..., Any]:
    return getattr(reference.rpc_async(), method)  # type: ignore[no-any-return]
