"""Trainers of one model for tests: each on its own thread, with its own part of every batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from telegrad import ps
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE

Work = Callable[[ps.Optimizer, nn.Module], Any]


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Small, with parameters of several sizes."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).to(
        dtype
    )
    generator = torch.Generator().manual_seed(seed)
    for each in net.parameters():
        each.data = torch.randn(each.shape, generator=generator, dtype=dtype) / 2
    return net


def batch(step: int, trainer: int, rows: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + trainer)
    return torch.randn(rows, 5, generator=generator, dtype=dtype)


def loss(net: nn.Module, data: Tensor) -> Tensor:
    return ((net(data) - data.sum(1, keepdim=True).sin()) ** 2).mean()


def train(optimizer: Any, net: nn.Module, steps: range, trainers: list[int]) -> None:
    """Make steps on the batches of these trainers together: of one, or of all in one process."""
    for step in steps:
        optimizer.zero_grad()
        loss(net, torch.cat([batch(step, trainer) for trainer in trainers])).backward()
        optimizer.step()


def check_same(net: nn.Module, other: nn.Module) -> None:
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-11)


class Trainers:
    """Runs things on the threads of several trainers; whatever they raise is raised in the test."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._threads: list[threading.Thread] = []

    def start(self, agent: str, work: Work, seed: int = 0, **options: Any) -> Future[Any]:
        """Run `work(optimizer, model)` of a new trainer on a thread, then close the optimizer."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                net = model(seed)
                with ps.Optimizer(net, agent=self._cluster[agent], **options) as optimizer:
                    future.set_result(work(optimizer, net))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name=f"trainer {agent}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def train(
        self, count: int, steps: int, first: int, seeds: Sequence[int] | None = None, **options: Any
    ) -> list[nn.Module]:
        """`count` trainers on agents from `first` on; their models afterwards."""

        def work(number: int) -> Work:
            def run(optimizer: ps.Optimizer, net: nn.Module) -> nn.Module:
                train(optimizer, net, range(steps), [number])
                return net

            return run

        started = [
            self.start(f"w{first + number}", work(number), seed, trainers=count, **options)
            for number, seed in enumerate(seeds or [0] * count)
        ]
        return [each.result(PATIENCE) for each in started]

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a trainer does not end"
