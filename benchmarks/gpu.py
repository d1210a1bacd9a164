"""Measure CUDA tensors between processes that share a GPU: calls, parameter servers and a policy.

    python -m benchmarks.gpu                          all; calls and servers without and with MPS
    python -m benchmarks.gpu --only calls --plain     only calls, without MPS
    python -m benchmarks.gpu --out build/bench/gpu.jsonl

A GPU serves one process at a time. When another process submits work, the GPU switches context,
which takes about 150 us on an H200. NVIDIA's MPS daemon lets the GPU serve several processes at
once. If it can be started, the calls and servers are also measured with MPS. Every measurement
starts new processes. Packages run in turn, and the table shows the median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing as mp
from torch import Tensor

import telegrad.rpc as telegrad_rpc
from benchmarks import cartpole, machine, plots, pole, ps, results, worlds
from benchmarks.group import free_port
from benchmarks.processes import prepare_environment
from benchmarks.suite import Case

PACKAGES: dict[str, Any] = {"telegrad": telegrad_rpc, "torch": torch_rpc}
MEGABYTES = (1, 16, 100, 1000)
SECONDS = 0.5
FEWEST = 10
LIMIT_S = 300
LIMIT = "one process"
POLICIES = ("telegrad.batched", "telegrad.by_hand", "torch.batched", "torch.single")
OBSERVERS, STEPS = 10, 300
SLOW_STEPS = 4  # with CUDA tensors on torch RPC, a step of five trainers takes three seconds
PARTS = ["calls", "ps", "cartpole"]

Found = dict[tuple[str, int], float]  # by kind and amount: elements, megabytes or trainers


def echo(tensor: Tensor) -> Tensor:
    return tensor


def took(once: Callable[[], object]) -> float:
    """Return the median time of `once`, each measured until the GPU is done."""
    for _ in range(FEWEST):
        once()
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(times) < FEWEST or time.perf_counter() < until:
        begin = time.perf_counter()
        once()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def call(package: str, rank: int, port: int, figures: Any) -> None:
    """Run one of two workers; the second measures calls to the first."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc = PACKAGES[package]
    options = rpc.TensorPipeRpcBackendOptions(
        device_maps={"w0": {0: 0}} if rank else {}, rpc_timeout=LIMIT_S
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        one = torch.ones(1, device="cuda")
        figures.put(
            ("latency", 1, took(lambda: rpc.rpc_sync("w0", torch.add, args=(one, 1))) * 1e6)
        )
        for megabytes in MEGABYTES:
            large = torch.ones(megabytes * 250_000, device="cuda")
            seconds = took(lambda large=large: rpc.rpc_sync("w0", echo, args=(large,)))  # type: ignore[misc]
            figures.put(("bandwidth", megabytes, 2 * megabytes / 1000 / seconds))
    rpc.shutdown()


def limits(_: int, figures: Any) -> None:
    """Measure the limit of one process with a copy in each direction."""
    one = torch.ones(1, device="cuda")
    figures.put(("latency", 1, took(lambda: torch.add(one, 1)) * 1e6))
    for megabytes in MEGABYTES:
        large = torch.ones(megabytes * 250_000, device="cuda")
        seconds = took(lambda large=large: large.clone().clone())  # type: ignore[misc]
        figures.put(("bandwidth", megabytes, 2 * megabytes / 1000 / seconds))


def _call(rank: int, package: str, port: int, figures: Any) -> None:
    call(package, rank, port, figures)


def measure_calls(package: str) -> Found:
    figures = mp.get_context("spawn").SimpleQueue()
    if package == LIMIT:
        mp.spawn(limits, args=(figures,), nprocs=1)
    else:
        mp.spawn(_call, args=(package, free_port(), figures), nprocs=2)
    found: Found = {}
    while not figures.empty():
        kind, amount, value = figures.get()
        found[kind, amount] = value
    return found


def measure_training(entry: str, trainers: int) -> Found:
    steps = SLOW_STEPS if entry == "torch cuda" else 20
    options = argparse.Namespace(
        model="resnet50", trainers=trainers, servers=1, device="cuda", steps=steps
    )
    return {("ps", trainers): 1000 / ps.measure(entry, options)}


def measure_cartpole(entry: str, device: str = "cuda") -> Found:
    options = argparse.Namespace(steps=STEPS, device=device, environment=pole.available())
    context = worlds.forkserver("telegrad.rpc", "benchmarks.pole", "gymnasium")
    return {("cartpole", OBSERVERS): cartpole.measure(entry, OBSERVERS, options, context)}


def case(kind: str, amount: int, mps: bool) -> Case:
    group, suffix = f"gpu-{kind}{'-mps' if mps else ''}", ", with MPS" if mps else ""
    if kind == "latency":
        title = f"torch.add, 1 element on the GPU{suffix}"
        return Case(f"gpu-latency/1-element{suffix}", f"sync call of {title}", "us", "gpu")
    if kind == "bandwidth":
        title = f"{amount} MB on the GPU there and back, each way{suffix}"
        return Case(f"{group}/{amount}MB", title, "GB/s", "gpu", {}, True, axis="MB", at=amount)
    if kind == "cartpole":
        title = f"CartPole, {amount} observers, policy on the GPU"
        return Case(f"{group}/{amount}-observers", title, "steps/s", "gpu", {}, True)
    title = f"ResNet-50 on the GPU, {amount} trainers, a round{suffix}"
    return Case(f"{group}/{amount}-trainers", title, "ms", "gpu", axis="trainers", at=amount)


@contextlib.contextmanager
def mps() -> Iterator[bool]:
    """Start NVIDIA's MPS daemon for the block. Yield False if it cannot be started."""
    control = shutil.which("nvidia-cuda-mps-control") or shutil.which(
        "/usr/local/nvidia/bin/nvidia-cuda-mps-control"
    )
    if control is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        started = subprocess.run(
            [control, "-d"], capture_output=True, text=True, timeout=60, check=False
        )
        try:
            yield started.returncode == 0
        finally:
            subprocess.run(
                [control], input="quit\n", capture_output=True, text=True, timeout=60, check=False
            )
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def one_round(
    options: argparse.Namespace,
    number: int,
    mps: bool,
    run: dict[str, Any],
    figures: results.Results,
) -> None:
    entries: list[tuple[str, Callable[[], Found]]] = []
    if "calls" in options.only:
        for package in (*PACKAGES, LIMIT):
            entries.append((package, partial(measure_calls, package)))
    if "ps" in options.only:
        for trainers in options.trainers:
            for entry in ps.ON_A_GPU:
                entries.append((entry, partial(measure_training, entry, trainers)))
    # the processes of this part are forked from one that started without MPS
    if "cartpole" in options.only and not mps:
        for entry in POLICIES:
            entries.append((entry, partial(measure_cartpole, entry)))
    for entry, measure in entries:
        for (kind, amount), value in measure().items():
            this = case(kind, amount, mps)
            figures.of(this, entry).add({"value": value, "n": 1})
            print(
                f"round {number + 1}: {this.title}: {entry} {results.number(value)} {this.unit}",
                flush=True,
            )
        results.write(options.out, run, figures.lines())  # an aborted run loses nothing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=PARTS,
        help=f"some of {','.join(PARTS)}",
    )
    parser.add_argument(
        "--trainers", type=lambda text: list(map(int, text.split(","))), default=[2, 5]
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--plain", action="store_true", help="measure only without MPS")
    which.add_argument("--mps", action="store_true", help="measure only with MPS")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of measurements of each entry"
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/gpu.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    if not set(options.only) <= set(PARTS):
        parser.error(f"--only takes some of {','.join(PARTS)}")
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device, but torch finds none")
        return 1
    prepare_environment()
    figures = results.Results()
    run = machine.heading("gpu", rounds=options.rounds, mps=False)
    with results.kept(options.out, run, figures.lines):
        for number in range(options.rounds):
            if not options.mps:
                one_round(options, number, False, run, figures)
            if not options.plain:
                with mps() as there:
                    run["mps"] = there
                    if there:
                        one_round(options, number, True, run, figures)
    print(results.table(figures.lines()))
    plots.save(options.out, groups=plots.ON_A_GPU)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
