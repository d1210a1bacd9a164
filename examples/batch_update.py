"""A parameter server that averages the gradients of all trainers and returns the new model to each.

Usage:

    python examples/batch_update.py [--trainers 2] [--epochs 8]

`update_and_fetch_model` returns a future that completes when the last trainer of the round has
called it, so no thread of the server is blocked.
"""

import argparse
import sys
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
import telegrad.rpc as rpc

try:
    from sklearn.datasets import load_digits
except ImportError:  # `--help` works without it
    load_digits = None


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class ParameterServer:
    def __init__(self, trainers: int) -> None:
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.arrived = 0
        self.round: rpc.Future[Any] = rpc.Future()

    @rpc.functions.async_execution
    def update_and_fetch_model(self, gradients: list[Tensor]) -> Any:
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                share = gradient / self.trainers
                parameter.grad = share if parameter.grad is None else parameter.grad + share
            self.arrived += 1
            this_round = self.round
            if self.arrived == self.trainers:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.arrived, self.round = 0, rpc.Future()
                this_round.set_result(self.model)
            return this_round


def train(server: Any, trainer: int, trainers: int, epochs: int) -> float:
    """Train on a part of the digits, on each trainer. Return the accuracy on the test digits."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.data, dtype=torch.float32) / 16,
        torch.tensor(digits.target),
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, own = order[:297], order[297 + trainer :: trainers][: 1500 // trainers]
    model = new_model()
    for epoch in range(epochs):
        for batch in own.split(30):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            model = server.rpc_sync().update_and_fetch_model(list(gradients))
        if trainer == 0:
            print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


def work(options: argparse.Namespace) -> None:
    rpc.init_rpc()
    if rpc.get_worker_info().name == "server0":
        server = rpc.RRef(ParameterServer(options.trainers))
        calls = [
            rpc.rpc_async(
                f"trainer{trainer}",
                train,
                (server, trainer, options.trainers, options.epochs),
                timeout=0,
            )
            for trainer in range(options.trainers)
        ]
        print(
            "accuracy of the trainers:",
            ", ".join(f"{call.wait():.3f}" for call in calls),
            flush=True,
        )
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    if load_digits is None:
        sys.exit("the digits need scikit-learn: pip install 'telegrad[examples]'")
    telegrad.launch(work, {"server": 1, "trainer": options.trainers}, (options,))
