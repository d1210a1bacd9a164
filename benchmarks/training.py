"""The training loops: a backward pass through several workers, and a network on the callee.

Peers with distributed autograd take part. `local` is the same work in one process, which is the
limit.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.base import CALLEE

Measured = dict[str, float]

WIDTH, SMALL_BATCH = 64, 8
MIN_PASSES = 30
BATCH = 32


class Digits(nn.Module):
    """The network of the tutorial on parameter servers.

    It has two convolutions, two linear layers and 1.2 million weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout2d(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


_layers: dict[str, nn.Linear] = {}


def layer(name: str) -> nn.Linear:
    """Return the layer with this name in this process."""
    if name not in _layers:
        _layers[name] = nn.Linear(WIDTH, WIDTH)
    return _layers[name]


def hop(module: str, x: Tensor, path: list[str]) -> Tensor:
    """Apply one layer in this process, and the rest on the workers of `path`."""
    x = layer("hop")(x).tanh()
    if not path:
        return x
    result: Tensor = importlib.import_module(module).rpc_sync(path[0], hop, (module, x, path[1:]))
    return result


def backward(peer: Any, seconds: float, workers: int) -> Measured:
    """Return the time of a backward pass over `workers` workers minus that in one process.

    The unit is microseconds.
    """
    path = [CALLEE, *(f"caller{number}" for number in range(2, workers))]
    x = torch.randn(SMALL_BATCH, WIDTH)
    rpc, autograd = peer.rpc, peer.autograd
    first = layer("first")

    def remote() -> float:
        with autograd.context() as context_id:
            loss = rpc.rpc_sync(path[0], hop, (peer.module, first(x), path[1:])).sum()
            begin = time.perf_counter()
            autograd.backward(context_id, [loss])
            return time.perf_counter() - begin

    def local() -> float:
        y = first(x)
        for name in path:
            y = layer(name)(y).tanh()
        loss = y.sum()
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin

    there, here = alternate([remote, local], seconds)
    return {"value": (statistics.median(there) - statistics.median(here)) * 1e6, "n": len(there)}


class Server:
    """The network on the callee."""

    def __init__(self) -> None:
        self.network = Digits()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.network(x)
        return result

    def parameter_rrefs(self, module: str) -> list[Any]:
        rpc = importlib.import_module(module)
        return [rpc.RRef(parameter) for parameter in self.network.parameters()]


def digits(peer: Any, seconds: float) -> Measured:
    """Return iterations per second of training with the network on the callee."""
    server = peer.rpc.remote(CALLEE, Server)
    optimizer = peer.optimizer(
        torch.optim.SGD, server.rpc_sync().parameter_rrefs(peer.module), lr=0.03
    )
    x, y = batch()

    def once() -> float:
        begin = time.perf_counter()
        with peer.autograd.context() as context_id:
            loss = F.nll_loss(server.rpc_sync().forward(x), y)
            peer.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        return time.perf_counter() - begin

    (times,) = alternate([once], seconds)
    return {"value": 1 / statistics.median(times), "n": len(times)}


def digits_backward(peer: Any, seconds: float) -> Measured:
    """Return the time of the network's backward pass on the callee minus that in one process.

    The unit is microseconds.
    """
    server, here, (x, y) = peer.rpc.remote(CALLEE, Server), Digits(), batch()

    def remote() -> float:
        with peer.autograd.context() as context_id:
            loss = F.nll_loss(server.rpc_sync().forward(x), y)
            begin = time.perf_counter()
            peer.autograd.backward(context_id, [loss])
            return time.perf_counter() - begin

    def local() -> float:
        loss = F.nll_loss(here(x), y)
        begin = time.perf_counter()
        torch.autograd.grad(loss, list(here.parameters()))
        return time.perf_counter() - begin

    there, found = alternate([remote, local], seconds)
    return {"value": (statistics.median(there) - statistics.median(found)) * 1e6, "n": len(there)}


def digits_here(seconds: float) -> Measured:
    """Return iterations per second of the same training in one process."""
    network = Digits()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03)
    x, y = batch()

    def once() -> float:
        begin = time.perf_counter()
        F.nll_loss(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    (times,) = alternate([once], seconds)
    return {"value": 1 / statistics.median(times), "n": len(times)}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 1, 28, 28, generator=generator), torch.randint(
        0, 10, (BATCH,), generator=generator
    )


def alternate(runs: list[Callable[[], float]], seconds: float) -> list[list[float]]:
    """Run `runs` in turn for `seconds` after a warm-up. Return the values of each."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(MIN_PASSES // 3):
        runs[number % len(runs)]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < MIN_PASSES:
        for run, found in zip(runs, times, strict=True):
            found.append(run())
    return times
