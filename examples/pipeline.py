"""Pipeline parallel training: a residual network in two halves, on two workers.

Usage:

    python examples/pipeline.py [--epochs 3] [--micro-batch 64]

A batch is divided into micro-batches, so that both halves compute at the same time. The master
sends each micro-batch to the first half and passes a reference to the result on to the second half,
which fetches it directly from the first. Distributed autograd runs the backward pass through both.
"""

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.optim import DistributedOptimizer

try:
    from sklearn.datasets import load_digits
except ImportError:  # `--help` works without it
    load_digits = None


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Half(nn.Module):
    """Some layers, whose input may be a reference."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Tensor:
        return self.layers(x.to_here() if isinstance(x, rpc.RRef) else x)

    def parameter_rrefs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def first_half() -> Half:
    return Half(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), Residual(16), Residual(16), nn.MaxPool2d(2)
    )


def second_half() -> Half:
    return Half(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), Residual(32), nn.Flatten(), nn.Linear(512, 10)
    )


class Pipeline:
    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.first = rpc.remote("half0", first_half)
        self.second = rpc.remote("half1", second_half)

    def __call__(self, images: Tensor) -> Tensor:
        outputs = []
        for micro_batch in images.split(self.micro_batch):
            hidden = self.first.remote().forward(micro_batch)  # stays on the first worker
            outputs.append(self.second.rpc_async().forward(hidden))
        return torch.cat([output.wait() for output in outputs])

    def parameter_rrefs(self) -> list[Any]:
        return self.first.rpc_sync().parameter_rrefs() + self.second.rpc_sync().parameter_rrefs()


def train(epochs: int, micro_batch: int) -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, training = order[:297], order[297:]

    model = Pipeline(micro_batch)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameter_rrefs(), lr=2e-3)
    for epoch in range(epochs):
        start = time.perf_counter()
        for batch in training[torch.randperm(len(training))].split(250):
            with dist_autograd.context() as context_id:
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
        seconds = time.perf_counter() - start
        print(
            f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}, {seconds:.1f} s",
            flush=True,
        )


def work(options: argparse.Namespace) -> None:
    rpc.init_rpc()
    worker = rpc.get_worker_info()
    torch.manual_seed(worker.id)
    if worker.name == "master0":
        train(options.epochs, options.micro_batch)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=64)
    options = parser.parse_args()
    if load_digits is None:
        sys.exit("the digits need scikit-learn: pip install 'telegrad[examples]'")
    telegrad.launch(work, {"master": 1, "half": 2}, (options,))
