"""Measure steps per second of many CartPole observers that request actions from one policy.

    python -m benchmarks.cartpole                        1 to 10 observers
    python -m benchmarks.cartpole --observers 1,8 --rounds 5
    python -m benchmarks.cartpole --entries telegrad.batched,torch.batched --device cuda

The program reproduces the figure of PyTorch's tutorial. It prints a table and writes
build/bench/cartpole.jsonl and .png. The entries:

    telegrad.batched    `@telegrad.batched` on the method of the policy
    telegrad.by_hand    batched with locks and futures, as in PyTorch's tutorial on batch RPC
                        processing
    telegrad.single     a call and a forward pass for each step
    torch.batched       the same code as telegrad.by_hand on torch.distributed.rpc
    torch.single        the same code as telegrad.single on torch.distributed.rpc
    moolib.batched      moolib's queue with dynamic batching, in TELEGRAD_BENCH_PYTHON_MOOLIB
    limit               the observers without a remote policy: the limit of the machine

Every measurement starts new processes. Entries run in turn, and the table shows the median over the
rounds. The environment is gymnasium's if all peers have it, otherwise that of `benchmarks.pole`;
the results contain its name.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

import telegrad
import telegrad.rpc as telegrad_rpc
from benchmarks import machine, plots, pole, results
from benchmarks.group import free_port
from benchmarks.peers import PEERS
from benchmarks.processes import ROOT, die_with_parent, import_path
from benchmarks.worlds import forkserver

SERVER = "server"
LIMIT_S = 300.0
ALONE = 50
FIGURE_STEPS = 10_000  # the figure shows the wall time of this many steps
PACKAGES: dict[str, Any] = {"torch": torch_rpc, "telegrad": telegrad_rpc}
FUTURES: dict[str, Any] = {"torch": torch.futures.Future, "telegrad": telegrad.Future}
ENTRIES = (
    "telegrad.batched",
    "telegrad.by_hand",
    "telegrad.single",
    "torch.batched",
    "torch.single",
    "moolib.batched",
    "limit",
)
BASELINE = "torch.batched"


class Server(pole.Policy):
    """The policy, and the state that the tutorial uses to batch by hand."""

    def __init__(self, observers: int, package: str, device: str) -> None:
        super().__init__(device)
        self.lock = threading.Lock()
        self.new_future = FUTURES[package]
        self.future = self.new_future()
        self.states = torch.zeros(observers, 4)
        self.waiting = self.observers = observers

    @telegrad.batched(max_wait=0.001)
    def act(self, states: Tensor) -> list[int]:
        return self.decide(states).tolist()

    def act_alone(self, state: Tensor) -> int:
        return int(self.decide(state.unsqueeze(0)))

    def act_by_hand(self, number: int, state: Tensor) -> Any:
        with self.lock:
            self.states[number].copy_(state)
            self.waiting -= 1
            future = self.future
            if self.waiting == 0:
                self.waiting = self.observers
                self.future = self.new_future()
                future.set_result(self.decide(self.states))
        return future.then(lambda done: int(done.wait()[number]))


def single(server: Any, number: int, state: Tensor) -> int:
    return server.local_value().act_alone(state)  # type: ignore[no-any-return]


@torch_rpc.functions.async_execution
def by_hand_on_torch(server: Any, number: int, state: Tensor) -> Any:
    return server.local_value().act_by_hand(number, state)


@telegrad_rpc.functions.async_execution
def by_hand_on_telegrad(server: Any, number: int, state: Tensor) -> Any:
    return server.local_value().act_by_hand(number, state)


FUNCTIONS = {"telegrad.by_hand": by_hand_on_telegrad, "torch.batched": by_hand_on_torch}


def deciding(entry: str, server: Any, number: int) -> Callable[[Tensor], Any]:
    """Return the function with which an observer of this entry requests an action."""
    if entry == "telegrad.batched":
        return server.rpc_sync().act  # type: ignore[no-any-return]
    rpc_sync, function = PACKAGES[package_of(entry)].rpc_sync, FUNCTIONS.get(entry, single)
    return lambda state: rpc_sync(SERVER, function, args=(server, number, state))


def observe(entry: str, server: Any, number: int, steps: int, environment: str) -> float:
    return pole.observe(deciding(entry, server, number), environment, number, steps)


def work(
    rank: int, entry: str, port: int, observers: int, options: argparse.Namespace, rates: Any
) -> None:
    die_with_parent()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # torch derives an interface from the host name, which may fail
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    package = package_of(entry)
    rpc = PACKAGES[package]
    rpc.init_rpc(f"observer{rank}" if rank else SERVER, rank=rank, world_size=1 + observers)
    if rank == 0:
        server = rpc.RRef(Server(observers, package, options.device))
        task = (options.steps, options.environment)
        started = [
            rpc.rpc_async(
                f"observer{number + 1}",
                observe,
                args=(entry, server, number, *task),
                timeout=LIMIT_S,
            )
            for number in range(observers)
        ]
        rates.put(sum(each.wait() for each in started))
    rpc.shutdown()


def play_alone(
    rank: int, entry: str, port: int, observers: int, options: argparse.Namespace, rates: Any
) -> None:
    """Run an observer of `limit`, which computes its own actions."""
    die_with_parent()
    torch.set_num_threads(1)
    if rank:
        steps = ALONE * options.steps  # long enough that all observers run at the same time
        rates.put(pole.observe(lambda state: rank & 1, options.environment, rank, steps))


def package_of(entry: str) -> str:
    return entry.partition(".")[0]


def measure(
    entry: str, observers: int, options: argparse.Namespace, context: ForkServerContext
) -> float:
    """Return the steps per second of all observers together."""
    if package_of(entry) == "moolib":
        return measure_moolib(observers, options)
    rates = context.SimpleQueue()
    alone = entry == "limit"
    task = (entry, free_port(), observers, options, rates)
    processes = [
        context.Process(target=play_alone if alone else work, args=(rank, *task), daemon=True)
        for rank in range(1 + observers)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            if not wait([process.sentinel], LIMIT_S) or process.exitcode:
                raise RuntimeError(
                    f"{entry} with {observers} observers: a process ended with {process.exitcode}"
                )
    finally:
        for process in processes:
            process.kill()
            process.join()
    return float(sum(rates.get() for _ in range(observers if alone else 1)))


def measure_moolib(observers: int, options: argparse.Namespace) -> float:
    arguments = [observers, options.steps, options.environment, options.device, free_port()]
    done = subprocess.run(
        [PEERS["moolib"].python, "-m", "benchmarks.moolib_queue", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": import_path()},
    )
    if done.returncode:
        raise RuntimeError(f"moolib with {observers} observers: {done.stderr[-2000:]}")
    return float(done.stdout)


def moolib_has(module: str) -> bool:
    found = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PEERS["moolib"].python, "-c", found], check=False).returncode == 0


def tabulate(middle: dict[tuple[int, str], float], entries: list[str]) -> str:
    rows = [["observers", *entries]]
    for observers in sorted({observers for observers, _ in middle}):
        base = middle.get((observers, BASELINE), float("nan"))
        cells = [middle[observers, entry] for entry in entries]
        rows.append([str(observers), *(f"{cell:,.0f} {cell / base:.2f}x" for cell in cells)])
    return f"steps/s, and against {BASELINE}\n{results.aligned(rows)}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cartpole", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--observers",
        type=lambda text: [int(each) for each in text.split(",")],
        default=list(range(1, 11)),
    )
    parser.add_argument(
        "--entries", type=lambda text: text.split(","), help=f"default: all of {','.join(ENTRIES)}"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of measurements of each entry"
    )
    parser.add_argument("--steps", type=int, default=1000, help="number of steps of each observer")
    parser.add_argument("--device", default="cpu", help="device of the policy")
    parser.add_argument(
        "--environment",
        choices=[pole.GYMNASIUM, pole.PLAIN],
        help="default: gymnasium if all peers have it",
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/cartpole.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    if options.entries is None:
        options.entries = [
            entry for entry in ENTRIES if entry != "moolib.batched" or moolib_has("moolib")
        ]
    if options.environment is None:
        everywhere = "moolib.batched" not in options.entries or moolib_has("gymnasium")
        options.environment = pole.available() if everywhere else pole.PLAIN
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    context = forkserver("telegrad.rpc", "benchmarks.pole", "gymnasium")
    run = machine.heading(
        "cartpole", **{key: value for key, value in vars(options).items() if key != "out"}
    )
    measured: dict[tuple[int, str], list[float]] = {}
    with results.kept(options.out, run, lambda: written(measured)):
        for number in range(options.rounds):
            for observers in options.observers:
                for entry in options.entries:
                    rate = measure(entry, observers, options, context)
                    measured.setdefault((observers, entry), []).append(rate)
                    who = f"{results.counted(observers, 'observers')}, {entry}"
                    print(f"round {number + 1}: {who}: {rate:,.0f} steps/s", flush=True)
    middle = {key: statistics.median(rates) for key, rates in measured.items()}
    print(f"\n{tabulate(middle, options.entries)}")
    plots.save(options.out)
    return 0


def written(measured: dict[tuple[int, str], list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "kind": "result",
            "observers": observers,
            "entry": entry,
            "rounds": rates,
            "median": statistics.median(rates),
            "seconds": FIGURE_STEPS / statistics.median(rates),
        }
        for (observers, entry), rates in measured.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
