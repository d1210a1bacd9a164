"""Data and model parallel training: dense layers under DDP, and an embedding table on a server.

Usage:

    python examples/ddp_embedding.py [--epochs 8]

Two trainers share an embedding table on the server and average the gradients of their dense layers
with DistributedDataParallel. Both happen in one backward pass: the hooks of DDP run inside
distributed autograd.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import telegrad
import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

try:
    from sklearn.datasets import load_digits
except ImportError:  # `--help` works without it
    load_digits = None

TRAINERS, SHADES = 2, 17


def tokens(pixels: Tensor) -> Tensor:
    """Return one token per pixel, which encodes its position and its shade."""
    return torch.arange(64) * SHADES + pixels


class Hybrid(nn.Module):
    def __init__(self, table: RemoteModule) -> None:
        super().__init__()
        self.table = table
        self.dense = DistributedDataParallel(
            nn.Sequential(nn.ReLU(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.dense(self.table(words))

    def parameter_rrefs(self) -> list[Any]:
        return [
            *self.table.remote_parameters(),
            *(rpc.RRef(parameter) for parameter in self.dense.parameters()),
        ]


def train(table: RemoteModule, epochs: int) -> float:
    """Train on a part of the digits, on each trainer. Return the accuracy on the test digits."""
    digits = load_digits()
    words, labels = tokens(torch.tensor(digits.data, dtype=torch.long)), torch.tensor(digits.target)
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))
    test, own = order[:297], order[297 + dist.get_rank() :: TRAINERS]

    model = Hybrid(table)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=0.01)
    for epoch in range(epochs):
        for batch in own[torch.randperm(len(own))].split(50):
            with dist_autograd.context() as context_id:
                loss = F.cross_entropy(model(words[batch]), labels[batch])
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    with torch.no_grad():
        return (model(words[test]).argmax(1) == labels[test]).float().mean().item()


def work(epochs: int) -> None:
    torch.manual_seed(0)
    place = telegrad.cluster.detect()
    rpc.init_rpc()
    if place.role == "trainer":
        dist.init_process_group("gloo", rank=place.role_rank or 0, world_size=TRAINERS)
    rpc.api._barrier(set())
    if place.role == "master":
        table = RemoteModule("server0/cpu", nn.EmbeddingBag, (64 * SHADES, 32), {"mode": "mean"})
        futures = [
            rpc.rpc_async(f"trainer{trainer}", train, args=(table, epochs), timeout=0)
            for trainer in range(TRAINERS)
        ]
        print(
            "accuracy of the trainers:",
            ", ".join(f"{future.wait():.3f}" for future in futures),
            flush=True,
        )
    rpc.shutdown()
    if place.role == "trainer":
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    if load_digits is None:
        sys.exit("the digits need scikit-learn: pip install 'telegrad[examples]'")
    roles = {"trainer": TRAINERS, "server": 1, "master": 1}
    telegrad.launch(work, roles, (options.epochs,))
