"""Measure the seconds until digits are learned: parameter servers in two forms, and one process.

    python -m benchmarks.ps_accuracy
    python -m benchmarks.ps_accuracy --target 0.97 --rounds 5 --entries telegrad.ps,torch

Two trainers train with SGD and batches of 32 each until the test accuracy is reached. The clock
starts when all workers have joined. The entries:

    telegrad.ps        `telegrad.ps.Optimizer` with `Sync()`, one server; each trainer tests with
                       its part of the data
    telegrad           the network on the server as in PyTorch's tutorial on parameter servers:
                       forward by calls, distributed autograd, DistributedOptimizer; trainers step
                       independently of each other
    torch              the same on torch.distributed.rpc. A step of one trainer can make the
                       backward pass of another fail, because it changes tensors that the pass
                       needs. Then the batch is repeated
    one process        batches of 64, which are those of the two trainers together

The digits are those of scikit-learn, scaled to 28 x 28 pixels. Without scikit-learn, they are noisy
copies of ten patterns.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

import telegrad
import telegrad.rpc
from benchmarks import machine, results
from benchmarks.group import free_port
from benchmarks.processes import prepare_environment
from benchmarks.training import Digits
from benchmarks.worlds import together
from telegrad import current_agent

SERVER = "server"
TRAINERS, BATCH, RATE = 2, 32, 0.05
CHECK_EVERY = 5  # steps
MOST_STEPS = 2000
ENTRIES = ("telegrad.ps", "telegrad", "torch", "one process")
Data = tuple[Tensor, Tensor]
Outcome = tuple[float, int, list[float]]  # seconds, steps, losses


def digits() -> tuple[Data, Data]:
    """Return training and test data."""
    generator = torch.Generator().manual_seed(0)
    try:
        images, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
        small, y = (
            torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16,
            torch.tensor(labels),
        )
    except ImportError:
        patterns = torch.rand(10, 1, 8, 8, generator=generator).round()
        y = torch.randint(0, 10, (1797,), generator=generator)
        small = patterns[y] + 0.7 * torch.randn(len(y), 1, 8, 8, generator=generator)
    order = torch.randperm(len(y), generator=generator)
    x, y = F.interpolate(small, size=28)[order], y[order]
    return (x[360:], y[360:]), (x[:360], y[:360])


def network() -> nn.Module:
    """Return the network of the tutorial, without dropout.

    The results of trainers then do not depend on how the data are distributed.
    """
    torch.manual_seed(0)
    made = Digits()
    for module in made.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
    return made


def batches(samples: int) -> Iterator[Tensor]:
    """Yield the indices of the samples of each step, for all trainers together, without end.

    Trainer n uses every `TRAINERS`th sample.
    """
    generator = torch.Generator().manual_seed(1)
    while True:
        for rows in torch.randperm(samples, generator=generator).split(TRAINERS * BATCH):
            if len(rows) == TRAINERS * BATCH:
                yield rows


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


def until_learned(
    target: float, step: Callable[[Tensor], float], measure: Callable[[], float]
) -> Outcome:
    """Run steps until `measure` reaches the target."""
    begin, losses = time.perf_counter(), []
    for number, rows in enumerate(batches(len(digits()[0][1])), 1):
        losses.append(step(rows))
        if (number % CHECK_EVERY == 0 and measure() >= target) or number == MOST_STEPS:
            return time.perf_counter() - begin, number, losses
    raise AssertionError("batches never end")


# The entries


def one_process(target: float) -> Outcome:
    (x, y), test = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(rows: Tensor) -> float:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        return loss.item()

    return until_learned(target, step, lambda: accuracy(model, *test))


def parameter_server(rank: int, target: float) -> Outcome | None:
    telegrad.rpc.init_rpc(
        SERVER if rank == 0 else f"trainer{rank}", rank=rank, world_size=1 + TRAINERS
    )
    outcome = None
    if rank > 0:
        (x, y), test = digits()
        model = network()
        optimizer = telegrad.ps.Optimizer(
            model, SERVER, torch.optim.SGD, lr=RATE, trainers=TRAINERS
        )

        def step(rows: Tensor) -> float:
            mine = rows[rank - 1 :: TRAINERS]
            optimizer.zero_grad()
            loss = F.nll_loss(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
            return loss.item()

        trainers = [f"trainer{number}" for number in range(1, 1 + TRAINERS)]
        agent = current_agent()
        assert agent is not None

        def measure() -> float:  # each trainer measures its part
            parts = agent.all_gather(
                accuracy(model, *(each[rank - 1 :: TRAINERS] for each in test)), trainers
            )
            return statistics.mean(parts.values())

        outcome = until_learned(target, step, measure)
        optimizer.close()
    telegrad.rpc.shutdown()
    return outcome if rank == 1 else None


class Server:
    """The network and the methods that trainers call."""

    def __init__(self) -> None:
        self.model = network()
        self.test = digits()[1]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(x)
        return result

    def accuracy(self) -> float:
        return accuracy(self.model, *self.test)


_servers: list[Server] = []
_lock = threading.Lock()


def the_server() -> Server:
    with _lock:
        if not _servers:
            _servers.append(Server())
        return _servers[0]


def forward(x: Tensor) -> Tensor:
    return the_server().forward(x)


def accuracy_there() -> float:
    return the_server().accuracy()


def parameter_rrefs(rpc: str) -> list[Any]:
    return [importlib.import_module(rpc).RRef(each) for each in the_server().model.parameters()]


PACKAGES = {
    "torch": ("torch.distributed.rpc", "torch.distributed.autograd", "torch.distributed.optim"),
    "telegrad": ("telegrad.rpc", "telegrad.autograd", "telegrad.optim"),
}


def network_on_the_server(package: str, rank: int, target: float, stop: Any) -> Outcome | None:
    rpc, autograd, optim = map(importlib.import_module, PACKAGES[package])
    rpc.init_rpc(SERVER if rank == 0 else f"trainer{rank}", rank=rank, world_size=1 + TRAINERS)
    outcome = None
    if rank > 0:
        (x, y), _ = digits()
        references = rpc.rpc_sync(SERVER, parameter_rrefs, args=(PACKAGES[package][0],))
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, references, lr=RATE)

        def step(rows: Tensor) -> float:
            while True:
                try:
                    return once(rows[rank - 1 :: TRAINERS])
                except RuntimeError as error:
                    if "inplace operation" not in str(error):
                        raise

        def once(mine: Tensor) -> float:
            with autograd.context() as context_id:
                loss = F.nll_loss(rpc.rpc_sync(SERVER, forward, args=(x[mine],)), y[mine])
                autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            return float(loss.item())

        def measure() -> float:
            if rank > 1:
                return target if stop.is_set() else 0.0
            return float(rpc.rpc_sync(SERVER, accuracy_there))

        outcome = until_learned(target, step, measure)
        stop.set()
    rpc.shutdown()
    return outcome if rank == 1 else None


def work(rank: int, entry: str, port: int, target: float, stop: Any, outcomes: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(
        max(1, (os.cpu_count() or 1) // (1 if entry == "one process" else TRAINERS))
    )
    if entry == "one process":
        outcome: Outcome | None = one_process(target)
    elif entry == "telegrad.ps":
        outcome = parameter_server(rank, target)
    else:
        outcome = network_on_the_server(entry, rank, target, stop)
    if outcome is not None:
        outcomes.put(outcome)


def measure(entry: str, target: float) -> Outcome:
    context = mp.get_context("forkserver")
    outcomes, stop = context.SimpleQueue(), context.Event()
    size = 1 if entry == "one process" else 1 + TRAINERS
    together(work, size, entry, free_port(), target, stop, outcomes)
    outcome: Outcome = outcomes.get()
    return outcome


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ps_accuracy", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--target", type=float, default=0.95, help="test accuracy")
    parser.add_argument("--entries", type=lambda text: text.split(","), default=list(ENTRIES))
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measurements of each entry"
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/ps-accuracy.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    prepare_environment()
    run = machine.heading(
        "ps-accuracy", **{key: value for key, value in vars(options).items() if key != "out"}
    )
    measured: dict[str, list[Outcome]] = {entry: [] for entry in options.entries}
    with results.kept(options.out, run, lambda: written(measured)):
        for number in range(options.rounds):
            for entry, found in measured.items():
                found.append(measure(entry, options.target))
                seconds, steps, _ = found[-1]
                print(f"round {number + 1}: {entry} {seconds:.2f} s, {steps} steps", flush=True)
    print_table(measured, options.target)
    return 0


def print_table(measured: dict[str, list[Outcome]], target: float) -> None:
    rows = [["", "seconds", "from", "to", "steps"]]
    for entry, found in measured.items():
        seconds = [each[0] for each in found]
        figures = (statistics.median(seconds), min(seconds), max(seconds))
        rows.append(
            [
                entry,
                *(f"{each:.2f}" for each in figures),
                f"{statistics.median(each[1] for each in found):.0f}",
            ]
        )
    print(f"\nuntil {100 * target:.0f} % of the test digits are correct\n{results.aligned(rows)}")


def written(measured: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    return [
        {
            "kind": "result",
            "entry": entry,
            "rounds": [each[0] for each in found],
            "steps": [each[1] for each in found],
            "losses": found[0][2],
        }
        for entry, found in measured.items()
        if found
    ]


if __name__ == "__main__":
    raise SystemExit(main())
