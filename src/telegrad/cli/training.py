"""What the training examples share: options, batches, and a run with servers and trainers."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import telegrad.rpc as rpc
from telegrad import cluster, plurals, ps
from telegrad.cli.help_text import HelpFormatter
from telegrad.cli.progress import Progress, TrainingReport
from telegrad.errors import WorkerExited
from telegrad.launcher.functions import launch

__all__ = [
    "accuracy",
    "at_least_one",
    "check_folder",
    "checkpoint",
    "epochs",
    "keeping_results",
    "parser",
    "run",
    "write",
]

Train = Callable[[int, argparse.Namespace, Progress], None]

_INTERRUPTED = 130  # the exit code that shells give a command that Ctrl-C has ended
_POLL = 0.05  # seconds between two checks for reports


def parser(
    description: str | None, data: Sequence[str], epochs: int, out: str
) -> argparse.ArgumentParser:
    """Return a parser with the options of all examples. The first of `data` is the default."""
    parser = argparse.ArgumentParser(
        prog=f"telegrad train {Path(sys.argv[0]).stem}",
        description=description,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--servers",
        type=at_least_one,
        default=1,
        metavar="N",
        help="parameter servers (default: 1)",
    )
    parser.add_argument("--trainers", type=at_least_one, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--consistency",
        type=_consistency,
        default=ps.Sync(),
        metavar="RULE",
        help="sync, sync:QUORUM, async or stale:AHEAD (default: sync)",
    )
    parser.add_argument(
        "--epochs", type=at_least_one, default=epochs, metavar="N", help=f"default: {epochs}"
    )
    parser.add_argument("--data", choices=data, default=data[0], help=f"default: {data[0]}")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/data"),
        metavar="DIR",
        help="folder of the data; missing data are downloaded into it (default: build/data)",
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        help="device of the trainers: cpu, cuda, cuda:1, ... (default: cpu)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="folder for the checkpoints of the servers"
    )
    parser.add_argument(
        "--every",
        type=at_least_one,
        default=100,
        metavar="N",
        help="steps between two checkpoints (default: 100)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints")
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write loss, score, speed, version and staleness for TensorBoard",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(out),
        metavar="DIR",
        help=f"folder for the plot and the report (default: {out})",
    )
    return parser


def checkpoint(options: argparse.Namespace) -> ps.Checkpoint | None:
    """Return the checkpoint settings of the options, or None."""
    if options.checkpoint is None:
        return None
    return ps.Checkpoint(options.checkpoint, every=options.every, resume=options.resume)


def epochs(
    optimizer: ps.Optimizer, trainer: int, samples: int, batch: int, options: argparse.Namespace
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield each epoch with its batches of sample indices, shuffled anew in every epoch.

    The samples are divided between the trainers. A resumed run leaves out the batches that were
    trained before.
    """
    generator = torch.Generator().manual_seed(trainer)
    all_samples = samples // options.trainers * options.trainers
    own_samples = torch.arange(trainer, all_samples, options.trainers)
    batches_done = 0
    if options.resume:
        # with Sync, one version is a batch of every trainer; otherwise, of one trainer
        per_version = 1 if isinstance(options.consistency, ps.Sync) else options.trainers
        batches_done = optimizer.version // per_version
    for epoch in range(options.epochs):
        order = torch.randperm(len(own_samples), generator=generator)
        batches = torch.split(own_samples[order], batch)
        remaining = batches[batches_done:]
        batches_done = max(batches_done - len(batches), 0)
        if remaining:
            yield epoch, remaining


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, device: str) -> float:
    """Return the fraction of the samples that a classifier gets right."""
    correct = [
        model(x[rows].to(device)).argmax(1).cpu() == y[rows]
        for rows in torch.split(torch.arange(len(y)), 500)
    ]
    return float(torch.cat(correct).float().mean())


def run(train: Train, options: argparse.Namespace, metric: str = "accuracy") -> TrainingReport:
    """Run `train(trainer, options, progress)` in a process per trainer, and the servers.

    Show the progress, and write a plot and a report. `metric` is the name of the score that `train`
    reports for the test data.
    """
    check_folder(options.out)  # now, and not after the training
    if options.resume and options.checkpoint is None:
        sys.exit("--resume needs --checkpoint DIR, the folder of the earlier training")
    servers = plurals.count(options.servers, "server")
    trainers = plurals.count(options.trainers, "trainer")
    report = TrainingReport(f"{options.data}, {servers}, {trainers}", metric, options.epochs)
    roles = {"ps": options.servers, "trainer": options.trainers}
    reports = mp.get_context("forkserver").SimpleQueue()
    with keeping_results(lambda: write(report, options.out) if report.epochs else None):
        with report, _received(reports, report):
            launch(_work, roles, (train, options, metric, reports), show=False)
    if not report.epochs:
        sys.exit("nothing to do: the checkpoint is that of a finished training; raise --epochs")
    write(report, options.out)
    sys.stdout.write(f"test {metric} {100 * report.score:.2f} %\n")
    return report


@contextlib.contextmanager
def keeping_results(keep: Callable[[], object]) -> Iterator[None]:
    """Call `keep` if Ctrl-C ends the training in this block. End the command if it failed."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        keep()
        sys.exit(_INTERRUPTED)
    except WorkerExited as error:
        sys.exit(str(error))


def check_folder(folder: Path) -> None:
    """End the command if nothing can be written into the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        sys.exit(f"cannot write into --out {folder}: {error.strerror}")


class Report(Protocol):
    """What a training ends with."""

    def write(self, folder: Path) -> list[Path]: ...


def write(report: Report, folder: Path) -> None:
    """Write a report and say where."""
    for file in report.write(folder):
        sys.stdout.write(f"wrote {file}\n")


@contextlib.contextmanager
def _received(reports: Any, report: TrainingReport) -> Iterator[None]:
    """Add what arrives in the queue to the report, during the block and at its regular end."""
    done = threading.Event()

    def receive() -> None:
        while not reports.empty():
            report.add(reports.get())

    def receive_until_done() -> None:
        while not done.wait(_POLL):
            receive()

    thread = threading.Thread(target=receive_until_done, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=1)  # it waits for ever if a worker was ended while it sent a report
    receive()


def _work(train: Train, options: argparse.Namespace, metric: str, reports: Any) -> None:
    # the first trainer that joins provides the initial model: make it the same on all
    torch.manual_seed(0)
    place = cluster.detect()
    if options.tensorboard is not None:
        os.environ["TELEGRAD_TENSORBOARD"] = str(options.tensorboard)
    rpc.init_rpc()
    if place.role == "trainer":
        train(place.role_rank or 0, options, Progress(str(place.name), reports.put, metric))
    rpc.shutdown()  # a server serves calls until all workers are here


def at_least_one(text: str) -> int:
    """Return the number that an option has, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _consistency(text: str) -> ps.Sync | ps.Async | ps.Stale:
    rule, _, argument = text.partition(":")
    rules: dict[str, Callable[[], ps.Sync | ps.Async | ps.Stale]] = {
        "sync": lambda: ps.Sync(int(argument) if argument else None),
        "async": ps.Async,
        "stale": lambda: ps.Stale(int(argument or 4)),
    }
    try:
        return rules[rule]()
    except (KeyError, ValueError) as error:
        message = f"{text!r} is not one of sync, sync:QUORUM, async, stale:AHEAD"
        raise argparse.ArgumentTypeError(message) from error


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA support in torch
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return text
