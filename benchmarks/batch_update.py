"""Measure the phases of the batch-update parameter server of PyTorch's tutorial, with ResNet-50.

    python -m benchmarks.batch_update --trainers 2,5
    python -m benchmarks.batch_update --device cuda --trainers 5

The tutorial is the one on batch RPC processing. The same code runs on Telegrad and on
torch.distributed.rpc in turn; every measurement starts new processes. In each step a trainer
computes gradients on `--device`, sends them to the server through the CPU, waits until all trainers
have sent theirs, and receives the new model. One future answers all trainers. The table shows the
medians over the steps of all trainers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.futures
from torch import Tensor, nn

from benchmarks import machine, results
from benchmarks.group import free_port
from benchmarks.processes import prepare_environment
from benchmarks.worlds import together

PACKAGES = {"telegrad": "telegrad.rpc", "torch": "torch.distributed.rpc"}
PHASES = ("compute", "update_and_fetch", "load")
CLASSES, BATCH, SIDE, WARM = 30, 20, 64, 2


class Server:
    """The class `BatchUpdateParameterServer` of the tutorial."""

    def __init__(self, trainers: int) -> None:
        models: Any = importlib.import_module("torchvision.models")
        self.model: nn.Module = models.resnet50(num_classes=CLASSES)
        self.lock = threading.Lock()
        self.future_model: Any = torch.futures.Future()
        self.trainers = trainers
        self.here = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self) -> nn.Module:
        return self.model

    def update_and_fetch(self, gradients: list[Tensor]) -> Any:
        with self.lock:
            self.here += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient
            future = self.future_model
            if self.here >= self.trainers:
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= self.trainers
                self.here = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result(self.model)
                self.future_model = torch.futures.Future()
        return future


class _Process:
    server: Server | None = None


def update_and_fetch(gradients: list[Tensor]) -> Any:
    assert _Process.server is not None
    return _Process.server.update_and_fetch(gradients)


update_and_fetch._wrapped_async_rpc_function = update_and_fetch  # type: ignore[attr-defined]  # as `async_execution` of both


def get_model() -> nn.Module:
    assert _Process.server is not None
    return _Process.server.get_model()


def train(rpc: Any, device: str, steps: int) -> list[list[float]]:
    """Return the seconds of each phase of each step."""
    model = rpc.rpc_sync("worker0", get_model).to(device)
    loss_of = nn.MSELoss()
    inputs = torch.randn(BATCH, 3, SIDE, SIDE, device=device)
    labels = torch.zeros(BATCH, CLASSES, device=device).scatter_(
        1, torch.arange(BATCH, device=device)[:, None], 1
    )
    found = []
    for _ in range(steps + WARM):
        begin = time.perf_counter()
        loss_of(model(inputs), labels).backward()
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        computed = time.perf_counter()
        fetched_model = rpc.rpc_sync("worker0", update_and_fetch, (gradients,))
        fetched = time.perf_counter()
        model = fetched_model.to(device)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append([computed - begin, fetched - computed, time.perf_counter() - fetched])
    return found[WARM:]


def work(
    rank: int, package: str, trainers: int, options: argparse.Namespace, port: int, folder: str
) -> None:
    if rank:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (trainers + 1)))
    rpc: Any = importlib.import_module(PACKAGES[package])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if rank == 0:
        _Process.server = Server(trainers)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=trainers + 1)
    if rank:
        Path(folder, f"{rank}.json").write_text(
            json.dumps(train(rpc, options.device, options.steps))
        )
    rpc.shutdown()


def measure(options: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Measure every case and add its lines."""
    for trainers in options.trainers:
        found: dict[str, list[list[float]]] = {entry: [] for entry in options.entries}
        for _ in range(options.rounds):
            for entry, times in found.items():
                with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                    together(
                        work,
                        trainers + 1,
                        entry,
                        trainers,
                        options,
                        free_port(),
                        folder,
                        fresh=options.device != "cpu",
                    )
                    for rank in range(1, trainers + 1):
                        times += json.loads(Path(folder, f"{rank}.json").read_text())
                print(".", end="", flush=True)
        for entry, times in found.items():
            phases = {
                name: list(each)
                for name, each in zip(PHASES, zip(*times, strict=True), strict=True)
            }
            line = {
                "kind": "result",
                "better": "lower",
                "entry": entry,
                "trainers": trainers,
                "device": options.device,
            }
            totals = [sum(each) * 1e3 for each in times]
            size = len(totals) // options.rounds
            medians = [
                statistics.median(totals[at : at + size]) for at in range(0, len(totals), size)
            ]
            lines.append({**line, "unit": "ms", "rounds": medians, **phases})


def table(lines: list[dict[str, Any]]) -> str:
    rows = [["trainers", "", *PHASES, "step", "against torch"]]
    for line in lines:
        medians = [statistics.median(line[name]) * 1e3 for name in PHASES]
        torch_lines = [
            each
            for each in lines
            if each["entry"] == "torch" and each["trainers"] == line["trainers"]
        ]
        ratio = ""
        if torch_lines:
            ratio = f"{sum(statistics.median(torch_lines[0][name]) * 1e3 for name in PHASES) / sum(medians):.2f}x"
        figures = [f"{each:.1f} ms" for each in (*medians, sum(medians))]
        rows.append([str(line["trainers"]), line["entry"], *figures, ratio])
    return results.aligned(rows)


def main(argv: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_update", description=summary)
    parser.add_argument(
        "--trainers", type=lambda text: [int(each) for each in text.split(",")], default=[2, 5]
    )
    parser.add_argument("--entries", type=lambda text: text.split(","), default=list(PACKAGES))
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device of the models of the trainers",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measurements of each entry"
    )
    parser.add_argument("--steps", type=int, default=10, help="number of steps in each measurement")
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/batch_update.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    prepare_environment()
    run = machine.heading(
        "batch-update", rounds=options.rounds, steps=options.steps, device=options.device
    )
    lines: list[dict[str, Any]] = []
    with results.kept(options.out, run, lambda: lines):
        measure(options, lines)
    print(f"\n{table(lines)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
