"""Trainers on this machine learn handwritten digits together, through parameter servers.

Usage:

    python examples/mnist.py                             # or: telegrad train mnist
    python examples/mnist.py --servers 2 --trainers 4 --consistency stale:4
    python examples/mnist.py --data mnist                # the real ones, through torchvision
    python examples/mnist.py --checkpoint build/points   # and later the same with --resume

Every worker is a process. A server has no code of its own; a trainer is an ordinary training loop with
`telegrad.ps.Optimizer` in place of another optimizer. By default the digits are those of scikit-learn, 8 x 8 pixels. A
plot and an HTML report are written into build/mnist.
"""

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
import telegrad.rpc as rpc
from telegrad.cli.journal import Entry, Journal

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
    from torchvision.datasets import MNIST  # noqa: PLC0415  # only those who ask for MNIST need it

    both = [MNIST(str(folder), train=train, download=True) for train in (True, False)]
    first, second = [(each.data.unsqueeze(1).float() / 255, each.targets) for each in both]
    return first, second


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


def train(number: int, options: argparse.Namespace, reports: Any) -> None:
    (x, y), test = mnist(options.folder) if options.data == "mnist" else digits()
    model = network(x.shape[-1]).to(options.device)
    optimizer = telegrad.ps.Optimizer(
        model,
        servers="ps*",
        optimizer=torch.optim.Adam,
        lr=3e-3,
        consistency=consistency(options.consistency),
        trainers=options.trainers,
        checkpoint=options.checkpoint and telegrad.ps.Checkpoint(options.checkpoint, resume=options.resume),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs, eta_min=1e-4)
    generator = torch.Generator().manual_seed(number)
    mine = torch.arange(number, len(y) // options.trainers * options.trainers, options.trainers)
    for epoch in range(options.epochs):
        started, losses = time.perf_counter(), []
        for rows in mine[torch.randperm(len(mine), generator=generator)].split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows].to(options.device)), y[rows].to(options.device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
        speed = len(mine) / (time.perf_counter() - started)
        right = accuracy(model, test, options.device) if number == 0 else None
        mean = sum(losses) / len(losses)
        reports.put(Entry(f"trainer{number}", epoch, mean, speed, optimizer.staleness, right))
    optimizer.close()  # whoever has more to do need not wait for us


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, device: str) -> float:
    x, y = data
    right = [model(x[rows].to(device)).argmax(1).cpu() == y[rows] for rows in torch.arange(len(y)).split(1000)]
    return float(torch.cat(right).float().mean())


def consistency(text: str) -> Any:
    rule, _, number = text.partition(":")
    rules: dict[str, Any] = {
        "sync": lambda: telegrad.ps.Sync(int(number) if number else None),
        "async": telegrad.ps.Async,
        "stale": lambda: telegrad.ps.Stale(int(number or 4)),
    }
    if rule not in rules:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of sync, sync:QUORUM, async, stale:AHEAD")
    return rules[rule]()


def run_worker(rank: int, port: int, options: argparse.Namespace, reports: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    number = rank - options.servers
    name = f"ps{rank}" if number < 0 else f"trainer{number}"
    try:
        rpc.init_rpc(name, rank=rank, world_size=options.servers + options.trainers)
        if number >= 0:
            train(number, options, reports)
        rpc.shutdown()  # a server does nothing but wait here
    except KeyboardInterrupt:
        sys.exit(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--consistency", default="sync", help="sync, sync:QUORUM, async or stale:AHEAD")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--folder", type=Path, default=Path("build/data"), help="where MNIST is, or will be")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpoint", type=Path, help="a folder for the servers' checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints there")
    parser.add_argument("--out", type=Path, default=Path("build/mnist"), help="where the plot and the report go")
    options = parser.parse_args()
    consistency(options.consistency)

    mp.set_forkserver_preload(["__main__", "torch._dynamo"])  # imported once, not by every worker
    reports = mp.get_context("forkserver").SimpleQueue()
    size = options.servers + options.trainers
    with Journal(f"{options.data}, {options.servers} servers, {options.trainers} trainers") as journal:
        arguments = (free_port(), options, reports)
        workers = mp.start_processes(run_worker, arguments, size, join=False, start_method="forkserver")
        try:
            ended = False
            while not ended:
                ended = workers.join(timeout=0.05)
                while not reports.empty():
                    journal.note(reports.get())
        except KeyboardInterrupt:
            for process in workers.processes:
                process.terminate()
                process.join()
            sys.exit("stopped")
    for file in journal.write(options.out):
        print(f"wrote {file}")
    print(f"test accuracy {100 * journal.accuracy:.2f} %")


if __name__ == "__main__":
    main()
