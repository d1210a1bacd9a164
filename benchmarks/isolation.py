"""Measure small calls while another worker sends large tensors to the same callee.

    python -m benchmarks.isolation
    python -m benchmarks.isolation --megabytes 100 --rounds 9

Three processes of each library run in turn: a callee, a caller that calls a function of a one-element
tensor, one call after the other, and a sender. In each round the caller is measured alone, and then
while the sender sends a tensor of `--megabytes` to the callee again and again. The table shows the
median time of a call in both cases, their ratio, and the bandwidth of the sender.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

import telegrad.rpc as telegrad_rpc
from benchmarks import machine, results
from benchmarks.callers import add, drive
from benchmarks.group import free_port
from benchmarks.processes import die_with_parent, import_path
from benchmarks.worlds import forkserver, resume, running, stop

CALLEE, CALLER, SENDER = range(3)
PACKAGES: dict[str, Any] = {"telegrad": telegrad_rpc, "torch": torch_rpc}
_AHEAD = 0.5  # seconds for which the sender sends before the caller is measured


def element(tensor: Tensor) -> float:
    return float(tensor[0])


def work(entry: str, rank: int, port: int, megabytes: int, pipe: Connection) -> None:
    """Run a process of a group, which follows the parent's commands."""
    die_with_parent()
    torch.set_num_threads(1)
    rpc = PACKAGES[entry]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3)
    large = torch.ones(megabytes * 250_000 if rank == SENDER else 1)
    tensor, function = (large, element) if rank == SENDER else (torch.ones(1), add)
    arguments = (tensor,) if rank == SENDER else (tensor, tensor)

    def call(_: Tensor) -> Any:
        return rpc.rpc_sync("w0", function, arguments)

    if rank != CALLEE:
        call(tensor)
    pipe.send("here")
    while (until := pipe.recv()) is not None:
        pipe.send(drive(call, call, until, 1)[1])
    os._exit(0)


class Group:
    """The processes of one entry."""

    def __init__(self, entry: str, megabytes: int) -> None:
        context = forkserver("telegrad", "telegrad.rpc", "benchmarks.callers")
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in (CALLEE, CALLER, SENDER):
            near, far = context.Pipe()
            process = context.Process(target=work, args=(entry, rank, port, megabytes, far))
            process.start()
            self.pipes.append(near)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()
        stop(self.processes)

    def measure(self, seconds: float) -> dict[str, float]:
        """Return the median times of a call, alone and beside the sender, and its calls/s."""
        caller, sender = self.pipes[CALLER], self.pipes[SENDER]
        with running(self.processes):
            caller.send(time.monotonic() + seconds)
            alone = statistics.median(caller.recv())
            sender.send(time.monotonic() + _AHEAD + seconds)
            time.sleep(_AHEAD)
            caller.send(time.monotonic() + seconds)
            beside = statistics.median(caller.recv())
            large = sender.recv()
        return {"alone": alone, "beside": beside, "sent": len(large) / sum(large)}

    def close(self) -> None:
        resume(self.processes)
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


def table(lines: list[dict[str, Any]], megabytes: int) -> str:
    rows = [["", "alone", f"beside {megabytes} MB", "ratio", "sent"]]
    for line in lines:
        alone, beside, sent = (
            statistics.median(line[name]) for name in ("alone", "beside", "sent")
        )
        rows.append(
            [
                line["entry"],
                f"{alone * 1e6:,.0f} us",
                f"{beside * 1e6:,.0f} us",
                f"{beside / alone:.2f}x",
                f"{sent * megabytes / 1000:.2f} GB/s",
            ]
        )
    return results.aligned(rows)


def main(argv: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolation", description=summary)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement")
    parser.add_argument("--out", type=results.out_file, default=Path("build/bench/isolation.jsonl"))
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = import_path()
    run = machine.heading("isolation", rounds=options.rounds, megabytes=options.megabytes)
    lines: list[dict[str, Any]] = [
        {"kind": "result", "entry": entry, "alone": [], "beside": [], "sent": []}
        for entry in PACKAGES
    ]
    with results.kept(options.out, run, lambda: lines), contextlib.ExitStack() as stack:
        groups = [Group(entry, options.megabytes) for entry in PACKAGES]
        for group in groups:
            stack.callback(group.close)
        for _ in range(options.rounds):
            for line, group in zip(lines, groups, strict=True):
                for name, value in group.measure(options.seconds).items():
                    line[name].append(value)
    print(table(lines, options.megabytes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
