"""Train a classifier of handwritten digits with several trainers and parameter servers.

    pip install 'telegrad[examples]'
    telegrad train mnist                             # or: python examples/mnist.py
    telegrad train mnist --servers 2 --trainers 4 --consistency stale:4
    telegrad train mnist --data mnist                # MNIST, loaded by torchvision
    telegrad train mnist --checkpoint build/points   # add --resume to continue later

Every worker is a process that `telegrad.launch` starts. A server has no code of its own; a
trainer is an ordinary training loop that uses `telegrad.ps.Optimizer`. By default the digits are
those of scikit-learn, 8 x 8 pixels. A plot and an HTML report are written into build/mnist.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
from telegrad.cli import training
from telegrad.cli.progress import Progress

try:
    from sklearn.datasets import load_digits
except ImportError:  # `--help` works without it
    load_digits = None

BATCH = 32
Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """Return training and test data: the digits that scikit-learn contains."""
    if load_digits is None:
        sys.exit("the digits need scikit-learn: pip install 'telegrad[examples]'")
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return (x[360:], y[360:]), (x[:360], y[:360])


def mnist(folder: Path) -> tuple[Data, Data]:
    """Return training and test data of MNIST, from the folder or downloaded into it."""
    try:
        from torchvision.datasets import MNIST  # noqa: PLC0415  # only `--data mnist` needs it
    except ImportError:
        sys.exit("--data mnist needs torchvision: pip install torchvision")
    try:
        both = [MNIST(str(folder), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        sys.exit(f"MNIST is neither in {folder}/MNIST/raw nor can it be downloaded: {error}")
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


def train(trainer: int, options: argparse.Namespace, progress: Progress) -> None:
    (x, y), test = load(options)
    model = network(x.shape[-1]).to(options.device)
    optimizer = telegrad.ps.Optimizer(
        model,
        servers="ps*",
        optimizer=torch.optim.Adam,
        consistency=options.consistency,
        trainers=options.trainers,
        checkpoint=training.checkpoint(options),
    )
    for epoch, batches in training.epochs(optimizer, trainer, len(y), BATCH, options):
        optimizer.param_groups[0]["lr"] = rate(epoch / options.epochs)
        for rows in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows].to(options.device)), y[rows].to(options.device))
            loss.backward()
            optimizer.step()
            progress.step(epoch, loss.item(), len(rows), optimizer.staleness)
        is_first = trainer == 0
        progress.end_epoch(training.accuracy(model, *test, options.device) if is_first else None)
    optimizer.close()  # other trainers no longer wait for this one


def rate(fraction: float) -> float:
    """Return the learning rate after this fraction of the training."""
    return 1e-4 + (3e-3 - 1e-4) * (1 + math.cos(math.pi * fraction)) / 2


def main() -> None:
    options = training.parser(
        __doc__, data=["digits", "mnist"], epochs=20, out="build/mnist"
    ).parse_args()
    load(options)  # download once, before the trainers start
    training.run(train, options)


if __name__ == "__main__":
    main()
