"""Measure the overhead of backward passes through remote calls over the same pass in one process.

    python -m benchmarks.backward
    python -m benchmarks.backward --cases "chain of 20,RNN of 40" --rounds 15

One process, a group of torch.distributed.rpc and a group of Telegrad run each case in turn, for a
fraction of a second each. All other processes are stopped meanwhile, because idle processes of torch
RPC use all cores. For each case the table shows the median time of the backward pass and, in
parentheses, of the whole pass (context, calls, backward). The overhead is the time above that of one
process. The column `overhead` is torch's overhead divided by Telegrad's: 2.00x means that Telegrad
has half of torch's overhead.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as torch_autograd
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn

import telegrad.autograd as telegrad_autograd
import telegrad.rpc as telegrad_rpc
from benchmarks import machine, results
from benchmarks.group import free_port
from benchmarks.processes import die_with_parent, import_path
from benchmarks.worlds import forkserver, running, stop

WIDTH, BATCH = 64, 8
WORKERS = 4  # including the caller
PACKAGES: dict[str, tuple[Any, Any]] = {
    "torch": (torch_rpc, torch_autograd),
    "telegrad": (telegrad_rpc, telegrad_autograd),
}
ENTRIES = ("one process", *PACKAGES)
Call = Callable[..., Any]  # (worker, function, *args) -> result
_layers: dict[str, nn.Linear] = {}


def layer(name: str = "layer") -> nn.Linear:
    """Return the layer with this name in this process."""
    if name not in _layers:
        _layers[name] = nn.Linear(WIDTH, WIDTH)
    return _layers[name]


def apply_layer(x: Tensor) -> Tensor:
    result: Tensor = layer()(x).tanh()
    return result


def apply_along(package: str, path: list[str], x: Tensor) -> Tensor:
    """Apply one layer in this process, and the rest on the workers of `path`."""
    x = apply_layer(x)
    if not path:
        return x
    if package not in PACKAGES:
        return apply_along(package, path[1:], x)
    result: Tensor = PACKAGES[package][0].rpc_sync(path[0], apply_along, (package, path[1:], x))
    return result


def recur(state: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(layer()(state) + x)


def total(parameters: list[Tensor]) -> Tensor:
    return torch.stack(parameters).sum()


def calls_of(package: str) -> tuple[Call, Call]:
    """Return the functions of a package that call synchronously and asynchronously."""
    if package not in PACKAGES:
        return lambda _, function, *args: function(
            *args
        ), lambda _, function, *args: lambda: function(*args)
    rpc = PACKAGES[package][0]
    return (
        lambda to, function, *args: rpc.rpc_sync(to, function, args),
        lambda to, function, *args: rpc.rpc_async(to, function, args).wait,
    )


# The cases: functions of the package that return the loss


def chain(package: str, count: int) -> Tensor:
    call, _ = calls_of(package)
    x = layer("first")(torch.ones(BATCH, WIDTH))
    for _ in range(count):
        x = call("worker1", apply_layer, x)
    return x.sum()


def parallel(package: str, count: int) -> Tensor:
    _, start = calls_of(package)
    x = layer("first")(torch.ones(BATCH, WIDTH))
    started = [start("worker1", apply_layer, x) for _ in range(count)]
    return torch.stack([wait() for wait in started]).sum()


def recurrent(package: str, count: int) -> Tensor:
    call, _ = calls_of(package)
    state, inputs = torch.zeros(BATCH, WIDTH), layer("first")(torch.ones(count, BATCH, WIDTH))
    states = []
    for x in inputs:
        state = call("worker1", recur, state, x)
        states.append(state)
    return layer("head")(torch.stack(states)).tanh().sum()


def through_workers(package: str, count: int) -> Tensor:
    path = [f"worker{rank}" for rank in range(1, count)]
    x = layer("first")(torch.ones(BATCH, WIDTH))
    call, _ = calls_of(package)
    result: Tensor = call(path[0], apply_along, package, path[1:], x)
    return result.sum()


def arguments(package: str, count: int) -> Tensor:
    if count not in _parameters:
        _parameters[count] = [nn.Parameter(torch.ones(16)) for _ in range(count)]
    call, _ = calls_of(package)
    result: Tensor = call("worker1", total, _parameters[count])
    return result


_parameters: dict[int, list[nn.Parameter]] = {}
CASES: dict[str, Callable[[str], Tensor]] = {
    "one call": lambda package: chain(package, 1),
    "chain of 20": lambda package: chain(package, 20),
    "chain of 200": lambda package: chain(package, 200),
    "200 parallel calls": lambda package: parallel(package, 200),
    "RNN of 40": lambda package: recurrent(package, 40),
    "two workers": lambda package: through_workers(package, 2),
    "four workers": lambda package: through_workers(package, 4),
    "1000 parameters": lambda package: arguments(package, 1000),
}


def timed(case: str, package: str) -> tuple[float, float]:
    """Return the seconds of one backward pass and of the whole pass."""
    begin = time.perf_counter()
    if package not in PACKAGES:
        loss = CASES[case](package)
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        end = time.perf_counter()
        return end - middle, end - begin
    autograd = PACKAGES[package][1]
    with autograd.context() as context_id:
        loss = CASES[case](package)
        middle = time.perf_counter()
        autograd.backward(context_id, [loss])
        end = time.perf_counter()
    return end - middle, time.perf_counter() - begin


class World:
    """The processes of one entry. They are stopped, except inside of `run`."""

    def __init__(self, entry: str) -> None:
        context = forkserver("torch._dynamo", "telegrad.rpc", "benchmarks.results")
        size, port = WORKERS if entry in PACKAGES else 1, free_port()
        self._pipe, far = context.Pipe()
        self._processes = [
            context.Process(target=work, args=(entry, rank, size, port, None if rank else far))
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        self._pipe.recv()
        stop(self._processes)

    def run(self, case: str, passes: int, seconds: float) -> list[tuple[float, float]]:
        """Return the times of at least `passes` passes and `seconds` seconds."""
        with running(self._processes):
            self._pipe.send((case, passes, seconds))
            times: list[tuple[float, float]] = self._pipe.recv()
        return times

    def close(self) -> None:
        """End the processes. A graceful shutdown would measure nothing more."""
        for process in self._processes:
            process.kill()
            process.join()


def work(entry: str, rank: int, size: int, port: int, pipe: Connection | None) -> None:
    """Run a process. The one with the pipe is the caller and runs what the parent asks for."""
    die_with_parent()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    if entry in PACKAGES:
        rpc = PACKAGES[entry][0]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if pipe is None:
        signal.pause()  # serve calls until the parent ends this process
        return
    pipe.send("ready")
    while True:
        case, passes, seconds = pipe.recv()
        times: list[tuple[float, float]] = []
        end = time.perf_counter() + seconds
        while len(times) < passes or time.perf_counter() < end:
            times.append(timed(case, entry))
        pipe.send(times)


def measure(options: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Add the median times of every round for each case and entry."""
    worlds = {entry: World(entry) for entry in ENTRIES}
    for case in options.cases:
        found: dict[str, list[tuple[float, float]]] = {entry: [] for entry in ENTRIES}
        for world in worlds.values():
            world.run(case, 2, options.seconds)  # connect, and warm up
        for _ in range(options.rounds):
            for entry, world in worlds.items():
                times = world.run(case, 2, options.seconds)[1:]
                backward, whole = map(statistics.median, zip(*times, strict=True))
                found[entry].append((backward, whole))
        for entry, medians in found.items():
            backward, whole = zip(*medians, strict=True)
            lines.append(
                {"kind": "result", "case": case, "entry": entry, "rounds": backward, "whole": whole}
            )
        print(".", end="", flush=True)
    for world in worlds.values():
        world.close()


def table(lines: list[dict[str, Any]]) -> str:
    rows = [["", *ENTRIES, "time", "overhead", "overhead of the whole"]]
    for case in dict.fromkeys(line["case"] for line in lines):
        of_case = {line["entry"]: line for line in lines if line["case"] == case}
        medians = {
            entry: (statistics.median(line["rounds"]), statistics.median(line["whole"]))
            for entry, line in of_case.items()
        }
        (here, whole_here), (theirs, whole_theirs), (ours, whole_ours) = (
            medians[entry] for entry in ENTRIES
        )
        figures = [
            f"{backward * 1e3:.2f} ({whole * 1e3:.2f}) ms" for backward, whole in medians.values()
        ]
        ratios = [
            theirs / ours,
            (theirs - here) / (ours - here),
            (whole_theirs - whole_here) / (whole_ours - whole_here),
        ]
        rows.append([case, *figures, *(f"{ratio:.2f}x" for ratio in ratios)])
    return results.aligned(rows)


def main(argv: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backward", description=summary)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="duration of each case, entry and round"
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/backward.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = import_path()
    run = machine.heading(
        "backward", cases=options.cases, rounds=options.rounds, seconds=options.seconds
    )
    lines: list[dict[str, Any]] = []
    with results.kept(options.out, run, lambda: lines):
        measure(options, lines)
    print(f"\n{table(lines)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
