"""The servers and trainers of an example as processes of this machine: started together, watched, ended together.

Ctrl-C ends all of them, whether the terminal tells every process or somebody tells this one only. Workers die of it at
once and silently; they are started with the signal blocked, so that it cannot reach them before they are ready for it.
Here it only leaves word, and is obeyed at the next look: an exception out of nowhere might end up anywhere.
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

_INTERRUPTED = 130  # what shells say of a command that Ctrl-C has ended
_LOOK = 0.05  # seconds between two looks at what workers report


def parser(
    description: str | None, data: Sequence[str], epochs: int, out: str
) -> argparse.ArgumentParser:
    """The options that all examples have. The first of `data` is the default."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--servers", type=int, default=1)
    made.add_argument("--trainers", type=int, default=2)
    made.add_argument(
        "--consistency",
        type=_consistency,
        default=ps.Sync(),
        help="sync, sync:QUORUM, async or stale:AHEAD",
    )
    made.add_argument("--epochs", type=int, default=epochs)
    made.add_argument("--data", choices=data, default=data[0])
    made.add_argument(
        "--folder",
        type=Path,
        default=Path("build/data"),
        help="where data are, or are downloaded to",
    )
    made.add_argument(
        "--device",
        type=_device,
        default="cpu",
        help="where trainers compute: cpu, cuda, cuda:1, ...",
    )
    made.add_argument("--checkpoint", type=Path, help="a folder for the servers' checkpoints")
    made.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
    made.add_argument("--resume", action="store_true", help="go on from the checkpoints there")
    made.add_argument(
        "--out", type=Path, default=Path(out), help="where the plot and the report go"
    )
    return made


def checkpoint(options: argparse.Namespace) -> ps.Checkpoint | None:
    """What the options say of checkpoints."""
    if options.checkpoint is None:
        return None
    return ps.Checkpoint(options.checkpoint, every=options.every, resume=options.resume)


def epochs(
    optimizer: ps.Optimizer, number: int, samples: int, batch: int, options: argparse.Namespace
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Epochs and their batches: this trainer's part of the samples, in a new order each time.

    A run that is resumed leaves out what has been done.
    """
    generator = torch.Generator().manual_seed(number)
    mine = torch.arange(number, samples // options.trainers * options.trainers, options.trainers)
    # all trainers make one step, or each makes its own
    together = isinstance(options.consistency, ps.Sync)
    done = optimizer.version // (1 if together else options.trainers) if options.resume else 0
    for epoch in range(options.epochs):
        batches = torch.split(mine[torch.randperm(len(mine), generator=generator)], batch)
        left, done = batches[done:], max(done - len(batches), 0)
        if left:
            yield epoch, left


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, device: str) -> float:
    """Which part of the samples a classifier gets right."""
    right = [
        model(x[rows].to(device)).argmax(1).cpu() == y[rows]
        for rows in torch.split(torch.arange(len(y)), 500)
    ]
    return float(torch.cat(right).float().mean())


def run(train: Train, options: argparse.Namespace, measure: str = "accuracy") -> TrainingReport:
    """Run `train(number, options, progress)` in as many processes as there shall be trainers, with their servers.

    Shows how it goes, and writes a plot and a report. `train` must be importable by its name, or be in `__main__`.
    `measure` says what it reports of the test data.
    """
    journal = TrainingReport(
        f"{options.data}, {options.servers} servers, {options.trainers} trainers", measure
    )
    reports = mp.get_context("forkserver").SimpleQueue()
    try:
        with _interrupted() as interrupted, journal:
            workers = _start(train, options, reports)
            try:
                _watch(workers, reports, journal, interrupted)
            finally:
                for process in workers.processes:
                    process.kill()
                    process.join()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(_INTERRUPTED)
    if not journal.entries:
        sys.exit("nothing is left to do: the checkpoint is of a training that has come to its end")
    for file in journal.write(options.out):
        sys.stdout.write(f"wrote {file}\n")
    sys.stdout.write(f"test {measure} {100 * journal.accuracy:.2f} %\n")
    return journal


def _start(train: Train, options: argparse.Namespace, reports: Any) -> Any:
    mp.set_forkserver_preload([*_imported_by(train), "torch._dynamo"])  # once, not by every worker
    size = options.servers + options.trainers
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which workers inherit
    try:
        arguments = (train, _free_port(), options, reports)
        start: Any = mp.start_processes
        return start(_work, arguments, size, join=False, start_method="forkserver")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _imported_by(train: Train) -> list[str]:
    """The modules that the names in a script come from. ("__main__" itself is not preloaded by all Pythons.)"""
    values = train.__globals__.values()
    names = {
        value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
        for value in values
    }
    return sorted(
        name for name in names if name in sys.modules and name not in {"__main__", train.__module__}
    )


@contextlib.contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """Set when Ctrl-C is pressed; pressed again, it raises `KeyboardInterrupt` as usual."""
    event = threading.Event()

    def note(*_: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _watch(
    workers: Any, reports: Any, journal: TrainingReport, interrupted: threading.Event
) -> None:
    """Until all have ended. What one of them died of is raised."""
    while True:
        codes = [process.exitcode for process in workers.processes]
        if interrupted.is_set() or -signal.SIGINT in codes:  # it may reach the workers first
            raise KeyboardInterrupt
        if any(codes):
            workers.join()
        while not reports.empty():
            journal.note(reports.get())
        if None not in codes:
            return
        running = [
            process.sentinel
            for process, code in zip(workers.processes, codes, strict=True)
            if code is None
        ]
        multiprocessing.connection.wait(running, timeout=_LOOK)


def _work(rank: int, train: Train, port: int, options: argparse.Namespace, reports: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    # whichever trainer comes first and brings its model, they all start from the same
    torch.manual_seed(0)
    number = rank - options.servers
    name = f"ps{rank}" if number < 0 else f"trainer{number}"
    rpc.init_rpc(name, rank=rank, world_size=options.servers + options.trainers)
    if number >= 0:
        train(number, options, Progress(name, reports.put))
    rpc.shutdown()  # a server does nothing but wait here


def _consistency(text: str) -> ps.Sync | ps.Async | ps.Stale:
    rule, _, number = text.partition(":")
    rules: dict[str, Callable[[], ps.Sync | ps.Async | ps.Stale]] = {
        "sync": lambda: ps.Sync(int(number) if number else None),
        "async": ps.Async,
        "stale": lambda: ps.Stale(int(number or 4)),
    }
    try:
        return rules[rule]()
    except (KeyError, ValueError) as error:
        message = f"{text!r} is not one of sync, sync:QUORUM, async, stale:AHEAD"
        raise argparse.ArgumentTypeError(message) from error


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    # the latter is what a torch without CUDA raises
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
