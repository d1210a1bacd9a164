"""Measure rounds per second of a batch-update parameter server with precomputed gradients.

    python -m benchmarks.ps                                    ResNet-18, 2 trainers
    python -m benchmarks.ps --model resnet18,resnet50 --trainers 2,4 --rounds 5
    python -m benchmarks.ps --entries telegrad.ps,torch
    python -m benchmarks.ps --scaling                          1 to 8 trainers, 1 to 4 servers

In each round every trainer sends the gradients of the whole model and receives the new parameters.
The server runs one step of SGD with momentum with the mean of the gradients. `--scaling` measures
only telegrad.ps and draws a plot. The entries:

    telegrad.ps        `telegrad.ps.Optimizer`
    telegrad           the code of PyTorch's tutorial on batch RPC processing, on Telegrad. With
                       `--device cuda` it sends gradients and model through the CPU, as the
                       tutorial does
    torch              the same code on torch.distributed.rpc
    telegrad cuda      only with `--device cuda`: the server has its model on the GPU, and calls
    torch cuda         send CUDA tensors with a device map
    one process        the same steps in one process without copies: the limit for one server

Every measurement starts new processes. Entries run in turn, and the tables show the median over the
rounds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing as mp
from torch import Tensor, nn

import telegrad
import telegrad.rpc as telegrad_rpc
from benchmarks import machine, plots, results
from benchmarks.group import free_port
from benchmarks.processes import prepare_environment
from benchmarks.worlds import together

SERVER = "server"
LIMIT_S = 300.0
WARM = 3
RATE, MOMENTUM = 1e-6, 0.9
BLOCKS = {"resnet18": ([2, 2, 2, 2], False), "resnet50": ([3, 4, 6, 3], True)}


def shapes(model: str) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters of a residual network for ImageNet."""
    counts, bottleneck = BLOCKS[model]
    found: list[tuple[int, ...]] = []

    def conv(into: int, out: int, size: int) -> None:
        # with the two parameters of its batch normalization
        found.extend([(out, into, size, size), (out,), (out,)])

    conv(3, 64, 7)
    width = 64
    for stage, count in enumerate(counts):
        inner = 64 << stage
        out = inner * (4 if bottleneck else 1)
        for block in range(count):
            sizes = [(width, inner, 1), (inner, inner, 3), (inner, out, 1)] if bottleneck else []
            for each in sizes or [(width, inner, 3), (inner, inner, 3)]:
                conv(*each)
            if block == 0 and width != out:
                conv(width, out, 1)
            width = out
    return [*found, (1000, width), (1000,)]


class Model(nn.Module):
    """The parameters of a network, without its computation."""

    def __init__(self, name: str, device: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes(name)]
        )

    def fill_gradients(self) -> None:
        for each in self.parameters():
            each.grad = torch.randn_like(each)


# The server of the tutorial, with both packages


class BatchUpdateServer:
    def __init__(self, options: argparse.Namespace, future: Any, device: str) -> None:
        self.model = Model(options.model, device)
        self.lock = threading.Lock()
        self.new_future = future
        self.future_model = future()
        self.trainers = options.trainers
        self.updates = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        for each in self.model.parameters():
            each.grad = torch.zeros_like(each)

    def get_model(self) -> nn.Module:
        return self.model

    def update(self, gradients: list[Tensor]) -> Any:
        with self.lock:
            self.updates += 1
            for each, gradient in zip(self.model.parameters(), gradients, strict=True):
                assert each.grad is not None
                each.grad += gradient
            future = self.future_model
            if self.updates >= self.trainers:
                for each in self.model.parameters():
                    assert each.grad is not None
                    each.grad /= self.trainers
                self.updates = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result(self.model)
                self.future_model = self.new_future()
        return future


@torch_rpc.functions.async_execution
def update_on_torch(server: Any, gradients: list[Tensor]) -> Any:
    return server.local_value().update(gradients)


@telegrad_rpc.functions.async_execution
def update_on_telegrad(server: Any, gradients: list[Tensor]) -> Any:
    return server.local_value().update(gradients)


# The program of each process


def timed(once: Callable[[], object], options: argparse.Namespace) -> float:
    """Return rounds per second, after a warm-up."""
    for _ in range(WARM):
        once()
    finish(options)
    begin = time.perf_counter()
    for _ in range(options.steps):
        once()
    finish(options)
    return float(options.steps / (time.perf_counter() - begin))


def finish(options: argparse.Namespace) -> None:
    if options.device != "cpu":
        torch.cuda.synchronize()


def train_by_calls(package: str, server: Any, options: argparse.Namespace) -> float:
    """Run a trainer of the tutorial: send gradients, receive the model."""
    rpc, update = {
        "torch": (torch_rpc, update_on_torch),
        "telegrad": (telegrad_rpc, update_on_telegrad),
    }[package]
    mine = Model(options.model, options.device)
    mine.fill_gradients()
    gradients = [each.grad for each in mine.parameters() if each.grad is not None]

    def once() -> None:
        sent = [each.to(options.server_device) for each in gradients]
        rpc.rpc_sync(SERVER, update, args=(server, sent)).to(options.device)

    return timed(once, options)


def tutorial(entry: str, rank: int, options: argparse.Namespace) -> float:
    package, _, tensors = entry.partition(" ")
    rpc: Any = {"torch": torch_rpc, "telegrad": telegrad_rpc}[package]
    on_gpu = tensors == "cuda"
    options.server_device = "cuda" if on_gpu else "cpu"
    how = rpc.TensorPipeRpcBackendOptions(device_maps={SERVER: {0: 0}} if on_gpu and rank else {})
    name = SERVER if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=1 + options.trainers, rpc_backend_options=how)
    rate = 0.0
    if rank == 0:
        kind = torch.futures.Future if package == "torch" else telegrad.Future
        server = rpc.RRef(
            BatchUpdateServer(
                options,
                functools.partial(kind, devices=[0] if on_gpu else []),
                options.server_device,
            )
        )
        arguments = (package, server, options)
        started = [
            rpc.rpc_async(f"trainer{number}", train_by_calls, args=arguments, timeout=LIMIT_S)
            for number in range(1, 1 + options.trainers)
        ]
        rate = min(each.wait() for each in started)
    rpc.shutdown()
    return rate


def parameter_server(rank: int, options: argparse.Namespace) -> float:
    name = f"ps{rank}" if rank < options.servers else f"trainer{rank}"
    telegrad_rpc.init_rpc(name, rank=rank, world_size=options.servers + options.trainers)
    rate = 0.0
    if rank >= options.servers:
        model = Model(options.model, options.device)
        with telegrad.ps.Optimizer(
            model, "ps*", torch.optim.SGD, lr=RATE, momentum=MOMENTUM, trainers=options.trainers
        ) as optimizer:
            model.fill_gradients()
            rate = timed(optimizer.step, options)
    telegrad_rpc.shutdown()
    return rate


def one_process(options: argparse.Namespace) -> float:
    server = BatchUpdateServer(options, telegrad.Future, options.device)
    gradients = [
        [torch.randn_like(each) for each in server.model.parameters()]
        for _ in range(options.trainers)
    ]

    def once() -> None:
        for each in gradients:
            server.update(each)

    return timed(once, options)


def work(rank: int, entry: str, port: int, options: argparse.Namespace, rates: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(rank)
    if entry == "one process":
        rate = one_process(options)
    elif entry == "telegrad.ps":
        rate = parameter_server(rank, options)
    else:
        rate = tutorial(entry, rank, options)
    if rate:
        rates.put(rate)


def measure(entry: str, options: argparse.Namespace) -> float:
    servers = {"telegrad.ps": options.servers, "one process": 0}.get(entry, 1)
    size = 1 if entry == "one process" else servers + options.trainers
    rates = mp.get_context("spawn").SimpleQueue()
    # processes on a GPU need the current environment, which selects MPS
    together(work, size, entry, free_port(), options, rates, fresh=options.device != "cpu")
    found = []
    while not rates.empty():
        found.append(rates.get())
    return min(found)


ENTRIES = ("telegrad.ps", "telegrad", "torch", "one process")
ON_A_GPU = ("telegrad.ps", "telegrad", "telegrad cuda", "torch", "torch cuda", "one process")
Rates = dict[str, list[float]]  # by entry, a rate for each round


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ps", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model", type=names, default=["resnet18"], help=f"one or more of {','.join(BLOCKS)}"
    )
    parser.add_argument("--trainers", type=numbers, default=[2])
    parser.add_argument(
        "--servers",
        type=numbers,
        default=[1],
        help="number of servers of telegrad.ps; other entries have one",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of models and gradients"
    )
    parser.add_argument("--entries", type=names, help="default: all of the device")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measurements of each entry"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="number of training rounds in each measurement"
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="measure telegrad.ps with 1, 2, 4, 8 trainers and 1, 2, 4 servers",
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/ps.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    options.entries = options.entries or list(ENTRIES if options.device == "cpu" else ON_A_GPU)
    if options.scaling:
        options.entries, options.trainers, options.servers = (
            ["telegrad.ps"],
            [1, 2, 4, 8],
            [1, 2, 4],
        )
    prepare_environment()
    run = machine.heading(
        "ps", **{key: value for key, value in vars(options).items() if key != "out"}
    )
    lines: list[dict[str, Any]] = []
    with results.kept(options.out, run, lambda: [line for line in lines if line["rounds"]]):
        for model, trainers, servers in itertools.product(
            options.model, options.trainers, options.servers
        ):
            case = {
                "model": model,
                "trainers": trainers,
                "servers": servers,
                "device": options.device,
            }
            rates: Rates = {entry: [] for entry in options.entries}
            lines += [
                {"kind": "result", "entry": entry, **case, "rounds": found}
                for entry, found in rates.items()
            ]
            measure_all(argparse.Namespace(**case, steps=options.steps), rates, options.rounds)
            counts = (results.counted(trainers, "trainers"), results.counted(servers, "servers"))
            print(f"\n{', '.join((model, *counts))}\n{table(rates)}\n", flush=True)
    if options.scaling:
        plots.save(options.out)
    return 0


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def measure_all(case: argparse.Namespace, measured: Rates, rounds: int) -> None:
    for number in range(rounds):
        for entry, rates in measured.items():
            rates.append(measure(entry, case))
            print(f"round {number + 1}: {entry} {rates[-1]:.1f} rounds/s", flush=True)


def table(measured: Rates) -> str:
    base = statistics.median(measured[results.BASELINE]) if results.BASELINE in measured else None
    rows = [["", "rounds/s", "from", "to", "to torch"]]
    for entry, rates in measured.items():
        middle = statistics.median(rates)
        ratio = "-" if base is None else f"{middle / base:.2f}x"
        rows.append([entry, *(f"{each:.1f}" for each in (middle, min(rates), max(rates))), ratio])
    return results.aligned(rows)


if __name__ == "__main__":
    raise SystemExit(main())
