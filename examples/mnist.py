"""Trainers on this machine learn handwritten digits together, through parameter servers.

Usage:

    python examples/mnist.py                             # or: telegrad train mnist
    python examples/mnist.py --servers 2 --trainers 4 --consistency stale:4
    python examples/mnist.py --data mnist                # the real ones, through torchvision
    python examples/mnist.py --checkpoint build/points   # and later the same with --resume

Every worker is a process, which `telegrad.cli.launcher` starts. A server has no code of its own; a trainer is an
ordinary training loop with `telegrad.ps.Optimizer` in place of another optimizer. By default the digits are those of
scikit-learn, 8 x 8 pixels. A plot and an HTML report are written into build/mnist.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
from telegrad.cli import launcher
from telegrad.cli.progress import Progress

BATCH = 32
Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """Training and test data of scikit-learn's digits, which come with it."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return (x[360:], y[360:]), (x[:360], y[:360])


def mnist(folder: Path) -> tuple[Data, Data]:
    """Training and test data of MNIST: from the folder, or downloaded into it."""
    try:
        from torchvision.datasets import MNIST  # noqa: PLC0415  # only those who ask for MNIST need it

        both = [MNIST(str(folder), train=train, download=True) for train in (True, False)]
    except (ImportError, OSError, RuntimeError) as error:
        sys.exit(f"MNIST is neither in {folder}/MNIST/raw nor to be had otherwise: {error}")
    first, second = [(each.data.unsqueeze(1).float() / 255, each.targets) for each in both]
    return first, second


def load(options: argparse.Namespace) -> tuple[Data, Data]:
    return mnist(options.folder) if options.data == "mnist" else digits()


def network(pixels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (pixels // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(number: int, options: argparse.Namespace, progress: Progress) -> None:
    (x, y), test = load(options)
    model = network(x.shape[-1]).to(options.device)
    optimizer = telegrad.ps.Optimizer(
        model,
        servers="ps*",
        optimizer=torch.optim.Adam,
        consistency=options.consistency,
        trainers=options.trainers,
        checkpoint=launcher.checkpoint(options),
    )
    for epoch, batches in launcher.epochs(optimizer, number, len(y), BATCH, options):
        optimizer.param_groups[0]["lr"] = rate(epoch / options.epochs)
        for rows in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows].to(options.device)), y[rows].to(options.device))
            loss.backward()
            optimizer.step()
            progress.note(epoch, loss.item(), len(rows), optimizer.staleness)
        progress.end(launcher.accuracy(model, *test, options.device) if number == 0 else None)
    optimizer.close()  # whoever has more to do need not wait for us


def rate(part: float) -> float:
    """The learning rate after this part of the training."""
    return 1e-4 + (3e-3 - 1e-4) * (1 + math.cos(math.pi * part)) / 2


def main() -> None:
    options = launcher.parser(
        __doc__, data=["digits", "mnist"], epochs=20, out="build/mnist"
    ).parse_args()
    load(options)  # what must be downloaded is downloaded once
    launcher.run(train, options)


if __name__ == "__main__":
    main()
