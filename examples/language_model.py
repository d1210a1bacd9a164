"""A language model whose embedding and decoder live on a server, and whose LSTM is on the trainer.

Usage:

    python examples/language_model.py [--epochs 8] [--text FILE]

It learns the characters of this project's licence, or of any text file. Distributed autograd sends
the gradients of the embedding and the decoder to the server, and one optimizer updates both parts.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

STEPS, BATCH, WIDTH = 32, 32, 96


class Model(nn.Module):
    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embedding = RemoteModule("server0/cpu", nn.Embedding, (symbols, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = RemoteModule("server0/cpu", nn.Linear, (WIDTH, symbols))

    def forward(self, text: Tensor, state: Any) -> tuple[Tensor, Any]:
        hidden, state = self.lstm(self.embedding(text), state)
        return self.decoder(hidden), state

    def parameter_rrefs(self) -> list[Any]:
        local = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        return [*self.embedding.remote_parameters(), *local, *self.decoder.remote_parameters()]


def train(epochs: int, file: Path) -> None:
    text = file.read_text()
    symbols = sorted(set(text))
    indices = torch.tensor([symbols.index(symbol) for symbol in text])
    columns = indices[: len(indices) // BATCH * BATCH].view(BATCH, -1)

    model = Model(len(symbols))
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for epoch in range(epochs):
        state, losses = None, []
        for start in range(0, columns.shape[1] - 1, STEPS):
            piece = columns[:, start : start + STEPS + 1]
            with dist_autograd.context() as context_id:
                logits, state = model(piece[:, :-1], state)
                loss = F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
                dist_autograd.backward(context_id, [loss])
                optimizer.clip_grad_norm_(1.0, context_id)
                optimizer.step(context_id)
            state = tuple(part.detach() for part in state)
            losses.append(loss.item())
        schedule.step()
        print(f"epoch {epoch}: perplexity {math.exp(sum(losses) / len(losses)):.2f}", flush=True)


def work(options: argparse.Namespace) -> None:
    rpc.init_rpc()
    worker = rpc.get_worker_info()
    torch.manual_seed(worker.id)
    if worker.name == "trainer0":
        train(options.epochs, options.text)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "LICENSE")
    telegrad.launch(work, {"trainer": 1, "server": 1}, (parser.parse_args(),))
