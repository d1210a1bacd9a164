"""Train a residual network with several trainers and parameter servers.

    pip install 'telegrad[examples]'
    telegrad train resnet                   # or: python examples/resnet.py
    telegrad train resnet --data cifar10 --epochs 30 --trainers 4 --servers 2
    telegrad train resnet --network small   # learns in seconds on two cores

By default the images are the digits of scikit-learn, scaled to 32 x 32 pixels, and the network is
torchvision's ResNet-18, or a small one if torchvision is not installed. It uses group
normalisation, because the statistics of batch normalisation are buffers, which parameter servers do
not share.
"""

import argparse
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

try:
    from torchvision.datasets import CIFAR10
    from torchvision.models import resnet18
except ImportError:  # the small network and the digits do not need it
    CIFAR10 = resnet18 = None

BATCH = 32
Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """Return training and test data: the digits that scikit-learn contains."""
    if load_digits is None:
        sys.exit("the digits need scikit-learn: pip install 'telegrad[examples]'")
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    small = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8 - 1
    x = F.interpolate(small, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    y = torch.tensor(labels)[order]
    return (x[360:], y[360:]), (x[:360], y[:360])


def cifar10(folder: Path) -> tuple[Data, Data]:
    """Return training and test data of CIFAR-10, from the folder or downloaded into it."""
    if CIFAR10 is None:
        sys.exit("CIFAR-10 needs torchvision: pip install torchvision")
    try:
        both = [CIFAR10(str(folder), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        sys.exit(f"CIFAR-10 is neither in {folder} nor can it be downloaded: {error}")
    first, second = [
        (torch.tensor(each.data).permute(0, 3, 1, 2).float() / 128 - 1, torch.tensor(each.targets))
        for each in both
    ]
    return first, second


def load(options: argparse.Namespace) -> tuple[Data, Data]:
    return cifar10(options.folder) if options.data == "cifar10" else digits()


def norm(channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels)


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False),
            norm(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            norm(out),
        )
        self.short = nn.Conv2d(into, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def network(name: str) -> nn.Module:
    if name == "resnet18" and resnet18 is None:
        sys.exit("ResNet-18 needs torchvision: pip install torchvision, or use --network small")
    if name == "resnet18":
        return resnet18(num_classes=10, norm_layer=norm, zero_init_residual=True)
    stem = nn.Sequential(nn.Conv2d(3, 16, 5, 2, 2, bias=False), norm(16), nn.ReLU())
    blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
    return nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(trainer: int, options: argparse.Namespace, progress: Progress) -> None:
    (x, y), test = load(options)
    model = network(options.network).to(options.device)
    optimizer = telegrad.ps.Optimizer(
        model,
        servers="ps*",
        optimizer=torch.optim.Adam,
        lr=1e-3,
        consistency=options.consistency,
        trainers=options.trainers,
        checkpoint=training.checkpoint(options),
    )
    for epoch, batches in training.epochs(optimizer, trainer, len(y), BATCH, options):
        for rows in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows].to(options.device)), y[rows].to(options.device))
            loss.backward()
            optimizer.step()
            progress.step(epoch, loss.item(), len(rows), optimizer.staleness)
        is_first = trainer == 0
        progress.end_epoch(training.accuracy(model, *test, options.device) if is_first else None)
    optimizer.close()


def main() -> None:
    parser = training.parser(__doc__, data=["digits", "cifar10"], epochs=5, out="build/resnet")
    networks = ["small"] if resnet18 is None else ["resnet18", "small"]
    parser.add_argument("--network", choices=["resnet18", "small"], default=networks[0])
    options = parser.parse_args()
    load(options)  # download once, before the trainers start
    training.run(train, options)


if __name__ == "__main__":
    main()
