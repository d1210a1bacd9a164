"""Measure one large argument that is sent to many workers of one host.

    python -m benchmarks.broadcast
    python -m benchmarks.broadcast --megabytes 10 --workers 2,8 --rounds 9

The first worker calls a function with one tensor on all others, which return one element of it. The
entries: `call_all` is `WorkerGroup.call_all`, `one by one` is one `rpc_async` for each worker, with
Telegrad and with torch RPC. The table shows the median time until all have returned. The limit is
one copy of the tensor by torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

import telegrad
import telegrad.rpc as telegrad_rpc
from benchmarks import machine, results
from benchmarks.group import free_port
from benchmarks.processes import die_with_parent, import_path
from benchmarks.worlds import forkserver, resume, running, stop

ENTRIES = {
    "telegrad call_all": "telegrad",
    "telegrad one by one": "telegrad",
    "torch one by one": "torch",
}
PACKAGES: dict[str, Any] = {"telegrad": telegrad_rpc, "torch": torch_rpc}
COPY = "one copy"


def element(tensor: Tensor) -> float:
    return float(tensor[0])


def one_by_one(rpc: Any, size: int, tensor: Tensor) -> None:
    futures = [rpc.rpc_async(f"w{rank}", element, (tensor,)) for rank in range(1, size)]
    for future in futures:
        future.wait()


def work(package: str, rank: int, size: int, port: int, megabytes: int, pipe: Connection) -> None:
    """Run a process of a group. The first one calls the others when the parent asks for it."""
    die_with_parent()
    torch.set_num_threads(1)
    rpc = PACKAGES[package]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
    tensor = torch.ones(megabytes * 250_000 if rank == 0 else 1)
    target = torch.ones_like(tensor)
    calls: dict[str, Callable[[], object]] = {
        f"{package} one by one": lambda: one_by_one(rpc, size, tensor),
        COPY: lambda: target.copy_(tensor),
    }
    if package == "telegrad":
        group = telegrad.WorkerGroup()
        calls["telegrad call_all"] = lambda: group.call_all(element, tensor).values()
    pipe.send("here")
    while (request := pipe.recv()) is not None:
        entry, until = request
        times: list[float] = []
        while not times or time.monotonic() < until:
            begin = time.perf_counter()
            calls[entry]()
            times.append(time.perf_counter() - begin)
        pipe.send(times)
    os._exit(0)


class Group:
    """The processes of one package, which are stopped while they are not measured."""

    def __init__(self, package: str, size: int, megabytes: int) -> None:
        context = forkserver("telegrad", "telegrad.rpc", "benchmarks.results")
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            near, far = context.Pipe()
            process = context.Process(target=work, args=(package, rank, size, port, megabytes, far))
            process.start()
            self.pipes.append(near)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()
        stop(self.processes)

    def measure(self, entry: str, seconds: float) -> float:
        """Return the median time of an entry."""
        with running(self.processes):
            self.pipes[0].send((entry, time.monotonic() + seconds))
            return statistics.median(self.pipes[0].recv())

    def close(self) -> None:
        resume(self.processes)
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def measure(options: argparse.Namespace, count: int, lines: list[dict[str, Any]]) -> None:
    """Add the times of every round for `count` workers that are called."""
    entries = {**ENTRIES, COPY: "telegrad"}
    own: dict[str, dict[str, Any]] = {
        entry: {"kind": "result", "workers": count, "entry": entry, "rounds": []}
        for entry in entries
    }
    lines += own.values()
    with contextlib.ExitStack() as stack:
        groups = {package: Group(package, count + 1, options.megabytes) for package in PACKAGES}
        for group in groups.values():
            stack.callback(group.close)
        for entry, package in entries.items():
            groups[package].measure(entry, 0.0)  # connect, and warm up
        for _ in range(options.rounds):
            for entry, package in entries.items():
                own[entry]["rounds"].append(groups[package].measure(entry, options.seconds))


def table(lines: list[dict[str, Any]]) -> str:
    times = {(line["workers"], line["entry"]): statistics.median(line["rounds"]) for line in lines}
    entries = list(dict.fromkeys(entry for _, entry in times))
    rows = [["workers", *entries, "call_all against torch"]]
    for count in dict.fromkeys(workers for workers, _ in times):
        ratio = times[count, "torch one by one"] / times[count, "telegrad call_all"]
        figures = [f"{times[count, entry] * 1e3:,.1f} ms" for entry in entries]
        rows.append([str(count), *figures, f"{ratio:.1f}x"])
    return results.aligned(rows)


def main(argv: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broadcast", description=summary)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument(
        "--workers",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[1, 4, 8],
        help="how many are called; default 1,4,8",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="duration of each measurement")
    parser.add_argument("--out", type=results.out_file, default=Path("build/bench/broadcast.jsonl"))
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = import_path()
    run = machine.heading("broadcast", rounds=options.rounds, megabytes=options.megabytes)
    lines: list[dict[str, Any]] = []
    with results.kept(options.out, run, lambda: lines):
        for count in options.workers:
            measure(options, count, lines)
    print(table(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
