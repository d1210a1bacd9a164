"""Measure rows per second of an embedding table: forward lookup and update by gradients.

    python -m benchmarks.embeddings                               1 million rows of 64, 1 trainer
    python -m benchmarks.embeddings --trainers 2 --servers 2 --rounds 5
    python -m benchmarks.embeddings --entries telegrad.ps,torch

Each step uses 2048 bags of 26 rows. A few rows are frequent and most are rare (Zipf's law). The
step adds up the rows of each bag and runs a step of SGD. A row counts once in each step that uses
it. The entries:

    telegrad.ps        `telegrad.ps.EmbeddingBag`: rows and their gradients are sent
    telegrad           `nn.EmbeddingBag(sparse=True)` on a server, with distributed autograd: sums
                       of bags are sent
    torch              the same on torch.distributed.rpc
    one process        `nn.EmbeddingBag(sparse=True)` and `torch.optim.SGD`; nothing is sent
    telegrad.ps large  telegrad.ps with 100 million rows and a new batch in each step, so that many
                       rows are created
    telegrad.ps known  the same with batches that were used before, as in telegrad.ps: no row is
                       created during the measurement

Every measurement starts new processes. Entries run in turn, and the table shows the median over the
rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as torch_autograd
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.optim import DistributedOptimizer as TorchOptimizer

import telegrad
import telegrad.autograd as telegrad_autograd
import telegrad.rpc as telegrad_rpc
from benchmarks import machine, results
from benchmarks.group import free_port
from benchmarks.processes import prepare_environment
from benchmarks.worlds import together
from telegrad.optim import DistributedOptimizer as TelegradOptimizer

SERVER = "server"
LIMIT_S = 300.0
RATE = 1e-3
BATCHES = 8  # used in turn
LARGE = 100_000_000
PACKAGES: dict[str, tuple[Any, Any, Any]] = {
    "torch": (torch_rpc, torch_autograd, TorchOptimizer),
    "telegrad": (telegrad_rpc, telegrad_autograd, TelegradOptimizer),
}
ENTRIES = (
    "telegrad.ps",
    "telegrad",
    "torch",
    "one process",
    "telegrad.ps large",
    "telegrad.ps known",
)


def inputs(rows: int, count: int, options: argparse.Namespace, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (options.bags, options.length)
    uniform = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [((rows + 1) ** each).long() - 1 for each in uniform]


def timed(
    step: Callable[[Tensor], object],
    rows: int,
    options: argparse.Namespace,
    seed: int,
    fresh: bool = False,
) -> float:
    """Return rows per second.

    Each batch is used once before the measurement, unless `fresh` requests a new one in each step.
    """
    batches = inputs(rows, options.steps + BATCHES if fresh else BATCHES, options, seed)
    for batch in batches[:BATCHES]:
        step(batch)
    chosen = (
        batches[BATCHES:]
        if fresh
        else [batches[number % BATCHES] for number in range(options.steps)]
    )
    counts = [batch.unique().numel() for batch in chosen]
    begin = time.perf_counter()
    for batch in chosen:
        step(batch)
    return sum(counts) / (time.perf_counter() - begin)


# A module on a server, with both packages


def forward(table: Any, batch: Tensor) -> Tensor:
    result: Tensor = table.local_value()(batch)
    return result


def parameters(package: str, table: Any) -> list[Any]:
    return [PACKAGES[package][0].RRef(each) for each in table.local_value().parameters()]


def train_by_calls(package: str, table: Any, number: int, options: argparse.Namespace) -> float:
    rpc, autograd, make = PACKAGES[package]
    optimizer = make(
        torch.optim.SGD, rpc.rpc_sync(SERVER, parameters, args=(package, table)), lr=RATE
    )

    def step(batch: Tensor) -> None:
        with autograd.context() as context:
            output = rpc.rpc_sync(SERVER, forward, args=(table, batch))
            autograd.backward(context, [output.sum()])
            optimizer.step(context)

    return timed(step, options.rows, options, number)


def module_on_a_server(package: str, rank: int, options: argparse.Namespace) -> float:
    rpc = PACKAGES[package][0]
    rpc.init_rpc(
        SERVER if rank == 0 else f"trainer{rank}", rank=rank, world_size=1 + options.trainers
    )
    rate = 0.0
    if rank == 0:
        table = rpc.RRef(nn.EmbeddingBag(options.rows, options.dim, mode="sum", sparse=True))
        started = [
            rpc.rpc_async(
                f"trainer{number}",
                train_by_calls,
                args=(package, table, number, options),
                timeout=LIMIT_S,
            )
            for number in range(1, 1 + options.trainers)
        ]
        rate = sum(each.wait() for each in started)
    rpc.shutdown()
    return rate


# Rows on servers and in one process


def resident_mb() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def rows_on_servers(rank: int, entry: str, options: argparse.Namespace, sizes: Any) -> float:
    name = f"ps{rank}" if rank < options.servers else f"trainer{rank}"
    telegrad_rpc.init_rpc(name, rank=rank, world_size=options.servers + options.trainers)
    rows = options.rows if entry == "telegrad.ps" else LARGE
    rate = 0.0
    if rank >= options.servers:
        rule = telegrad.ps.RowSGD(lr=RATE)
        bag = telegrad.ps.EmbeddingBag(
            rows,
            options.dim,
            "ps*",
            mode="sum",
            optimizer=rule,
            trainers=options.trainers,
            consistency=options.rule,
        )

        def step(batch: Tensor) -> None:
            bag(batch).sum().backward()
            bag.tables.step()

        rate = timed(step, rows, options, rank, fresh=entry == "telegrad.ps large")
        bag.tables.close()
        if rank == options.servers:
            servers = [f"ps{number}" for number in range(options.servers)]
            sizes.put(sum(telegrad_rpc.rpc_sync(server, resident_mb) for server in servers))
    telegrad_rpc.shutdown()
    return rate


def one_process(options: argparse.Namespace) -> float:
    bag = nn.EmbeddingBag(options.rows, options.dim, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(bag.parameters(), lr=RATE)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        bag(batch).sum().backward()
        optimizer.step()

    return timed(step, options.rows, options, 0)


def work(
    rank: int, entry: str, port: int, options: argparse.Namespace, rates: Any, sizes: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    if entry == "one process":
        rate = one_process(options)
    elif entry in PACKAGES:
        rate = module_on_a_server(entry, rank, options)
    else:
        rate = rows_on_servers(rank, entry, options, sizes)
    if rate:
        rates.put(rate)


def measure(entry: str, options: argparse.Namespace) -> tuple[float, float | None]:
    """Return the rows per second of all trainers, and the memory of the servers in MB."""
    servers = {"one process": 0}.get(entry, 1 if entry in PACKAGES else options.servers)
    size = 1 if entry == "one process" else servers + options.trainers
    rates, sizes = (mp.get_context("forkserver").SimpleQueue() for _ in range(2))
    together(work, size, entry, free_port(), options, rates, sizes)
    found = []
    while not rates.empty():
        found.append(rates.get())
    return sum(found), None if sizes.empty() else sizes.get()


def main(argv: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embeddings", description=summary)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--bags", type=int, default=2048, help="number of bags in a batch")
    parser.add_argument("--length", type=int, default=26, help="number of rows in a bag")
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument(
        "--servers",
        type=int,
        default=1,
        help="number of servers of telegrad.ps; other entries have one",
    )
    parser.add_argument(
        "--async",
        dest="rule",
        action="store_const",
        const=telegrad.ps.Async(),
        help="without synchronous rounds",
    )
    parser.add_argument("--entries", type=lambda text: text.split(","), default=list(ENTRIES))
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measurements of each entry"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="number of training steps in each measurement"
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/embeddings.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    prepare_environment()
    said = {key: value for key, value in vars(options).items() if key not in ("out", "rule")}
    run = machine.heading(
        "embeddings", **said, consistency=repr(options.rule or telegrad.ps.Sync())
    )
    measured: dict[str, list[tuple[float, float | None]]] = {entry: [] for entry in options.entries}
    with results.kept(options.out, run, lambda: written(measured)):
        for number in range(options.rounds):
            for entry, found in measured.items():
                found.append(measure(entry, options))
                rate = results.number(found[-1][0])
                print(f"round {number + 1}: {entry} {rate} rows/s", flush=True)
    print(f"\n{results.counted(options.trainers, 'trainers')}\n{table(measured)}")
    return 0


def written(measured: dict[str, list[tuple[float, float | None]]]) -> list[dict[str, Any]]:
    return [
        {
            "kind": "result",
            "entry": entry,
            "rounds": [rate for rate, _ in found],
            "server_mb": [mb for _, mb in found],
        }
        for entry, found in measured.items()
        if found
    ]


def table(measured: dict[str, list[tuple[float, float | None]]]) -> str:
    middles = {
        entry: statistics.median(rate for rate, _ in found) for entry, found in measured.items()
    }
    base = middles.get(results.BASELINE, float("nan"))
    rows = [["", "rows/s", "from", "to", "to torch", "servers hold"]]
    for entry, found in measured.items():
        rates = [rate for rate, _ in found]
        held = "" if found[-1][1] is None else f"{found[-1][1]:,.0f} MB"
        figures = [results.number(each) for each in (middles[entry], min(rates), max(rates))]
        rows.append([entry, *figures, f"{middles[entry] / base:.2f}x", held])
    return results.aligned(rows)


if __name__ == "__main__":
    raise SystemExit(main())
