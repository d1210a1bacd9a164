"""Start the servers and trainers of an example as processes of this machine, and supervise them.

Ctrl-C ends all processes, whether the terminal sends SIGINT to all of them or only this one gets
it. Workers die of it at once, without a traceback; they are started with the signal blocked, so
that it cannot reach them before they have set its handler. In this process the handler only sets an
event, which the supervising loop checks: an exception raised by a handler could interrupt any line.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import telegrad.rpc as rpc
from telegrad import ps
from telegrad.cli.progress import Progress, TrainingReport

__all__ = ["accuracy", "checkpoint", "epochs", "parser", "run"]

Train = Callable[[int, argparse.Namespace, Progress], None]

_INTERRUPTED = 130  # the exit code that shells give a command that Ctrl-C has ended
_POLL = 0.05  # seconds between two checks for reports and signals


def parser(
    description: str | None, data: Sequence[str], epochs: int, out: str
) -> argparse.ArgumentParser:
    """Return a parser with the options of all examples. The first of `data` is the default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument(
        "--consistency",
        type=_consistency,
        default=ps.Sync(),
        help="sync, sync:QUORUM, async or stale:AHEAD",
    )
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--data", choices=data, default=data[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/data"),
        help="folder of the data; missing data are downloaded into it",
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        help="device of the trainers: cpu, cuda, cuda:1, ...",
    )
    parser.add_argument("--checkpoint", type=Path, help="folder for the checkpoints of the servers")
    parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoints")
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="folder for the plot and the report"
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

    Show the progress, and write a plot and a report. `train` must be importable by its name, or be
    in `__main__`. `metric` is the name of the score that it reports for the test data.
    """
    report = TrainingReport(
        f"{options.data}, {options.servers} servers, {options.trainers} trainers", metric
    )
    reports = mp.get_context("forkserver").SimpleQueue()
    try:
        with _interrupted() as interrupted, report:
            workers = _start(train, options, reports)
            try:
                _supervise(workers, reports, report, interrupted)
            finally:
                for process in workers.processes:
                    process.kill()
                    process.join()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(_INTERRUPTED)
    if not report.epochs:
        sys.exit("nothing to do: the checkpoint is that of a finished training; raise --epochs")
    for file in report.write(options.out):
        sys.stdout.write(f"wrote {file}\n")
    sys.stdout.write(f"test {metric} {100 * report.score:.2f} %\n")
    return report


def _start(train: Train, options: argparse.Namespace, reports: Any) -> Any:
    # import these once in the fork server, not in every worker
    mp.set_forkserver_preload([*_imported_by(train), "torch._dynamo"])
    size = options.servers + options.trainers
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers inherit this
    try:
        arguments = (train, _free_port(), options, reports)
        start: Any = mp.start_processes
        return start(_work, arguments, size, join=False, start_method="forkserver")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _imported_by(train: Train) -> list[str]:
    """Return the modules that the global names of a script come from.

    Not "__main__" itself, which not all versions of Python preload.
    """
    names = {
        value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        for value in train.__globals__.values()
    }
    return sorted(
        name for name in names if name in sys.modules and name not in {"__main__", train.__module__}
    )


@contextlib.contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets. A second Ctrl-C raises `KeyboardInterrupt` as usual."""
    event = threading.Event()

    def handle(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _supervise(
    workers: Any, reports: Any, report: TrainingReport, interrupted: threading.Event
) -> None:
    """Collect reports until all workers have ended. Raise the exception that ended a worker."""
    while True:
        exit_codes = [process.exitcode for process in workers.processes]
        # SIGINT may reach the workers before this process
        if interrupted.is_set() or -signal.SIGINT in exit_codes:
            raise KeyboardInterrupt
        if any(exit_codes):
            workers.join()  # raises the exception of the worker
        while not reports.empty():
            report.add(reports.get())
        if None not in exit_codes:
            return
        running = [
            process.sentinel
            for process, exit_code in zip(workers.processes, exit_codes, strict=True)
            if exit_code is None
        ]
        multiprocessing.connection.wait(running, timeout=_POLL)


def _work(rank: int, train: Train, port: int, options: argparse.Namespace, reports: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    # the first trainer that joins provides the initial model: make it the same on all
    torch.manual_seed(0)
    trainer = rank - options.servers
    name = f"ps{rank}" if trainer < 0 else f"trainer{trainer}"
    rpc.init_rpc(name, rank=rank, world_size=options.servers + options.trainers)
    if trainer >= 0:
        train(trainer, options, Progress(name, reports.put))
    rpc.shutdown()  # a server serves calls until all workers are here


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
