"""Trainers on this machine learn who clicks on what, with large tables on parameter servers.

Usage:

    python examples/recsys.py                              # or: telegrad train recsys
    python examples/recsys.py --servers 2 --trainers 4 --consistency stale:4
    python examples/recsys.py --checkpoint build/points    # and later the same with --resume

The data have the shape of the Criteo data set: 13 numbers and 26 categories, some with few values and some with tens of
millions, of which a few are frequent and most are rare. They are made up by a known rule, so it is also known how good
a prediction can be. Each category has a table of rows, `telegrad.ps.EmbeddingBag`; the tables have 146 million rows
together, of which servers hold those that occur. The rest of the model is trained by `telegrad.ps.Optimizer`, which
updates the tables, too. `telegrad.cli.launcher` starts the processes. A plot and an HTML report are written into
build/recsys.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
from telegrad.cli import launcher
from telegrad.cli.progress import Progress

BATCH, BATCHES, TEST = 512, 60, 20_000
NUMBERS, DIM = 13, 8
SIZES = [int(4 * 1.95**feature) for feature in range(26)]  # from 4 to 71 million
Data = tuple[Tensor, Tensor, Tensor, Tensor]


def clicks(count: int, seed: int) -> Data:
    """Numbers, categories, whether there was a click, and how likely that was."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, NUMBERS, generator=generator)
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    uniform = torch.rand(count, len(SIZES), generator=generator, dtype=torch.float64)
    # number n is about n times as rare as number 1, as in Zipf's law
    ids = ((sizes + 1) ** uniform).long() - 1
    wave = torch.sin((ids + 1) * 12.9898 + 78.233 * torch.arange(len(SIZES)).double()) * 43758.5453
    effects = wave - wave.floor() - 0.5  # as good as random, the same for the same category
    weights = torch.linspace(-0.4, 0.4, NUMBERS)
    likely = torch.sigmoid(-1 + numbers.tanh() @ weights + 1.2 * effects.sum(1).float())
    return numbers, ids, torch.bernoulli(likely, generator=generator), likely


class Model(nn.Module):
    def __init__(self, tables: telegrad.ps.Tables) -> None:
        super().__init__()
        rule = telegrad.ps.RowAdagrad(lr=0.05)
        self.bags = nn.ModuleList(
            telegrad.ps.EmbeddingBag(size, DIM, tables, mode="sum", optimizer=rule, std=0.01)
            for size in SIZES
        )
        self.top = nn.Sequential(
            nn.Linear(NUMBERS + len(SIZES) * DIM, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        wanted = [
            (bag, column.unsqueeze(1)) for bag, column in zip(self.bags, ids.unbind(1), strict=True)
        ]
        telegrad.ps.prefetch(wanted)  # the rows of all tables with one call to each server
        rows = [bag(column) for bag, column in wanted]
        scores: Tensor = self.top(torch.cat([numbers, *rows], 1)).squeeze(1)
        return scores


def train(number: int, options: argparse.Namespace, progress: Progress) -> None:
    together = {
        "servers": "ps*",
        "consistency": options.consistency,
        "trainers": options.trainers,
        "checkpoint": launcher.checkpoint(options),
    }
    model = Model(telegrad.ps.Tables(**together)).to(options.device)
    optimizer = telegrad.ps.Optimizer(model, optimizer=torch.optim.Adam, lr=2e-3, **together)
    test = clicks(TEST, seed=0)
    samples = BATCH * BATCHES * options.trainers  # new ones in each epoch
    for epoch, batches in launcher.epochs(optimizer, number, samples, BATCH, options):
        numbers, ids, clicked, _ = clicks(samples, seed=1 + epoch)
        for rows in batches:
            optimizer.zero_grad()
            scores = model(numbers[rows].to(options.device), ids[rows].to(options.device))
            loss = F.binary_cross_entropy_with_logits(scores, clicked[rows].to(options.device))
            loss.backward()
            optimizer.step()
            progress.note(epoch, loss.item(), len(rows), optimizer.staleness)
        progress.end(evaluate(model, test, options.device) if number == 0 else None)
    optimizer.close()  # whoever has more to do need not wait for us


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, device: str) -> float:
    numbers, ids, clicked, _ = data
    return auc(model(numbers.to(device), ids.to(device)).cpu(), clicked)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """How often what was clicked on has the higher score of two."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    yes = clicked > 0
    hits, misses = int(yes.sum()), int((~yes).sum())
    return float((ranks[yes].sum() - hits * (hits + 1) / 2) / (hits * misses))


def main() -> None:
    options = launcher.parser(__doc__, data=["clicks"], epochs=6, out="build/recsys").parse_args()
    _, _, clicked, likely = clicks(TEST, seed=0)
    best, base = auc(likely, clicked), float(clicked.mean())
    print(
        f"{100 * base:.1f} % of the test data are clicks; the rule that makes them has an AUC of {100 * best:.2f} %"
    )
    launcher.run(train, options, measure="AUC")


if __name__ == "__main__":
    main()
